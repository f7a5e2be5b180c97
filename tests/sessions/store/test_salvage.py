"""sessions.store.salvage: damage loses only the rows it hit, and the damaged files are kept unchanged."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.full_store import CHANGES, PAGE, TABLES, Rows, fill, overwrite, page_kinds, rows_of
from support.store_cases import queued
from support.store_writer import Writer

from sessions.row_kinds import SESSIONS
from sessions.store import salvage as salvage_module
from sessions.store.check import check_database
from sessions.store.interface import CorruptStore, StoreError
from sessions.store.pages import PageFile
from sessions.store.salvage import damaged_copies, finish_salvage, salvage, set_stream_ends
from sessions.store.schema import MIGRATIONS, as_database
from sessions.store.writer import SqliteStore

STAMP = "20260101T000000Z"


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undamaged") / "broker.db"
    fill(path)
    return path


@pytest.fixture(scope="module")
def rows(undamaged: Path) -> Rows:
    return rows_of(undamaged)


@pytest.fixture
def path(undamaged: Path, tmp_path: Path) -> Path:
    shutil.copyfile(undamaged, tmp_path / "broker.db")
    return tmp_path / "broker.db"


def losses(undamaged: Path, page: int) -> Rows:
    """The rows that are on a page, or continue there."""
    lost: Rows = {}
    before, after = (_rows_without(undamaged, without) for without in (0, page))
    for table in TABLES:
        lost[table] = before[table] - after[table]
    return lost


class _OnePageMissing(PageFile):
    """The pages of a file except one."""

    missing = 0

    def page(self, number: int) -> bytes | None:
        return None if number == self.missing else super().page(number)


def _rows_without(undamaged: Path, page: int) -> Rows:
    pages = _OnePageMissing(undamaged)
    pages.missing = page
    connection = sqlite3.connect(":memory:", isolation_level=None)
    salvage_module.prepare(connection, "")
    shapes = {table: salvage_module._Shape(as_database(connection), table) for table in TABLES}
    found: Rows = {table: set() for table in TABLES}
    for rowid, record in pages.records():
        for table, shape in shapes.items():
            row = shape.row(rowid, record)
            if row is not None:
                found[table].add(row)
                break
    pages.close()
    connection.close()
    return found


def salvaged(path: Path) -> tuple[Rows, list[str]]:
    damaged = path.read_bytes()
    result = salvage(path, STAMP, "test")
    assert result.aside.name == f"broker.db.corrupt-{STAMP}"
    assert result.aside.read_bytes() == damaged
    report = path.with_name(f"{result.aside.name}.txt").read_text()
    assert report.splitlines() == result.lines
    state = check_database(path)
    assert state.problems == []
    kept = rows_of(path)
    assert result.kept == {table: len(kept[table]) for table in TABLES}
    return kept, result.lines


def test_an_undamaged_database_is_salvaged_completely(path: Path, rows: Rows) -> None:
    kept, lines = salvaged(path)
    assert kept == rows
    assert lines[0] == f"put aside as broker.db.corrupt-{STAMP}: test"
    assert len(lines) == 2 and lines[1].startswith("kept 30 sessions, 600 subscriptions, ")


def cases() -> Iterator[tuple[str, str]]:
    kinds = ("header", "pointer map", "root interior table", "root interior index", "free")
    for kind in (*kinds, "leaf table", "leaf index", "overflow"):
        for change in CHANGES:
            yield kind, change


@pytest.mark.parametrize(("kind", "change"), [*cases()])
def test_damage_loses_only_the_rows_it_hit(undamaged: Path, path: Path, rows: Rows, kind: str, change: str) -> None:
    numbers = page_kinds(undamaged)[kind]
    page = numbers[len(numbers) // 2]
    hit = losses(undamaged, page)
    overwrite(path, page, CHANGES[change])
    kept, _ = salvaged(path)
    gone_sessions = {row[0] for row in hit["sessions"]}
    gone_messages = {row[0] for row in hit["messages"]}
    gone_entries = {row[2] for row in hit["queue"]}
    for table in TABLES:
        # SQLite has no checksums: a change within a value is not detected.
        changed = {row[0] for row in kept[table] - rows[table]}
        assert changed <= {row[0] for row in hit[table]}
        for row in rows[table] - kept[table]:
            follows = table in ("subscriptions", "received", "queue") and row[0] in gone_sessions
            follows |= table == "queue" and row[2] in gone_messages
            follows |= table == "messages" and row[0] in gone_entries
            follows |= table == "messages" and bool(gone_sessions)
            assert follows or row in hit[table], f"{table} {row[:3]!r}"


@pytest.mark.parametrize("pages", [0, 1, 2, 40, 150])
def test_a_truncated_file_keeps_its_remaining_rows(path: Path, rows: Rows, pages: int) -> None:
    size = pages * PAGE + (100 if pages else 0)
    os.truncate(path, size)
    kept, lines = salvaged(path)
    for table in TABLES:
        assert kept[table] <= rows[table]
    assert any("cannot be read" in line or "pages are missing" in line for line in lines)
    if pages == 150:
        assert kept["messages"]


def test_the_write_ahead_log_is_read_and_renamed_with_the_database(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path, keep_wal=True)
    shutil.copyfile(path, tmp_path / "copy.db")
    shutil.copyfile(f"{path}-wal", tmp_path / "copy.db-wal")
    expected = rows_of(tmp_path / "copy.db")
    wal = path.with_name("broker.db-wal").read_bytes()
    overwrite(path, 1, CHANGES["zeros"])
    kept, _ = salvaged(path)
    assert kept == expected
    aside = path.with_name(f"broker.db.corrupt-{STAMP}")
    assert path.with_name(f"{aside.name}-wal").read_bytes() == wal
    assert not path.with_name("broker.db-wal").exists()


def test_an_unreadable_file_gives_an_empty_database(path: Path) -> None:
    path.write_bytes(b"x" * 50_000)
    kept, lines = salvaged(path)
    assert not any(kept.values())
    assert lines[-1].startswith("kept 0 sessions")
    store = SqliteStore(path, "commit", None)
    assert store.recover().rows(SESSIONS) == []
    store.stop()


def test_an_older_database_keeps_its_version(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    connection = sqlite3.connect(path, isolation_level=None)
    salvage_module.prepare(connection, str(path), MIGRATIONS[:1])
    connection.execute("INSERT INTO sessions VALUES (1, 'c', 5, 10, NULL, NULL, NULL)")
    connection.close()
    result = salvage(path, STAMP, "test")
    assert result.kept["sessions"] == 1
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()
    store = SqliteStore(path, "commit", None)
    assert [row[1] for row in store.recover().rows(SESSIONS)] == ["c"]
    store.stop()


@pytest.mark.parametrize(
    ("pragma", "reason"),
    [("user_version = 99", "schema version 99 is newer"), ("application_id = 7", "not a database")],
)
def test_newer_and_foreign_databases_are_not_touched(path: Path, pragma: str, reason: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA {pragma}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=reason):
        salvage(path, STAMP, "test")
    assert path.read_bytes() == before and damaged_copies(path) == []


def test_a_second_salvage_gets_another_name(path: Path) -> None:
    first, second = (salvage(path, STAMP, "test").aside for _ in range(2))
    assert [first, second] == damaged_copies(path)
    assert second.name == f"{first.name}-2"


# -- interruptions ------------------------------------------------------------


@pytest.mark.parametrize("step", range(12))
def test_an_interrupted_salvage_is_finished_or_undone(path: Path, rows: Rows, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash before any of the renames leaves a complete database."""
    path.with_name("broker.db-wal").write_bytes(b"")
    path.with_name("broker.db.suspect").write_text("x")
    left = [step]
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real(source, target)

    monkeypatch.setattr(salvage_module.os, "rename", rename)
    try:
        salvage(path, STAMP, "test")
    except KeyboardInterrupt:
        pass
    monkeypatch.undo()
    finish_salvage(path)
    assert rows_of(path) == rows
    assert not list(path.parent.glob("*.salvaged*"))
    for aside in damaged_copies(path):
        assert rows_of(aside) == rows
        assert not path.with_name("broker.db.suspect").exists()


def test_a_full_disk_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(salvage_module, "_copy", full)
    with pytest.raises(OSError, match="No space"):
        salvage(path, STAMP, "test")
    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == ["broker.db"]


# -- with a store -------------------------------------------------------------


def test_a_damaged_store_opens_after_a_salvage(path: Path) -> None:
    page = next(page for page in page_kinds(path)["leaf index"] if losses(path, page)["queue"])
    overwrite(path, page, CHANGES["zeros"])
    with pytest.raises(CorruptStore):
        SqliteStore(path, "commit", None).recover()
    salvage(path, STAMP, "test")
    store = SqliteStore(path, "commit", None)
    assert len(store.recover().rows(SESSIONS)) == 30
    store.stop()


def test_a_refused_database_keeps_its_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path, keep_wal=True)
    wal = path.with_name("broker.db-wal")
    page = next(page for page in page_kinds(path)["leaf index"] if losses(path, page)["queue"])
    store = SqliteStore(path, "commit", None)
    store.recover()
    store.stop()
    overwrite(path, page, CHANGES["zeros"])
    # A write-ahead log as a crash leaves it, with one commit that did not change the page.
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("INSERT INTO stream_ends VALUES ('s', 0, 1)")
    before = path.read_bytes(), wal.read_bytes()
    connection.close()
    path.write_bytes(before[0])
    wal.write_bytes(before[1])
    with pytest.raises(CorruptStore):
        SqliteStore(path, "commit", None).recover()
    assert (path.read_bytes(), wal.read_bytes()) == before


def test_an_empty_database_with_a_write_ahead_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path, keep_wal=True)
    shutil.copyfile(path, tmp_path / "copy.db")
    shutil.copyfile(f"{path}-wal", tmp_path / "copy.db-wal")
    expected = rows_of(tmp_path / "copy.db")
    os.truncate(path, 0)
    with pytest.raises(CorruptStore, match="is empty, though"):
        SqliteStore(path, "commit", None).recover()
    kept, _ = salvaged(path)
    assert kept == expected


def test_damage_found_while_running_is_checked_at_the_next_start(path: Path) -> None:
    """A start reads no messages, so their damage is found when a client returns."""
    leaves = page_kinds(path)["leaf table"]
    store = SqliteStore(path, "commit", None)
    store.recover()
    writer = Writer(store)
    for page in leaves:
        overwrite(path, page, CHANGES["zeros"])
    found = [writer.page(session, size=1).error for session in range(20, 31)]
    assert any(found) and "malformed" in store.damage
    store.stop()
    assert path.with_name("broker.db.suspect").exists()
    with pytest.raises(CorruptStore):
        SqliteStore(path, "commit", None).recover()
    result = salvage(path, STAMP, "test")
    assert path.with_name(f"{result.aside.name}.suspect").exists()
    store = SqliteStore(path, "commit", None)
    store.recover()
    store.stop()


def test_the_damage_marker_is_removed_if_the_check_finds_nothing(path: Path) -> None:
    path.with_name("broker.db.suspect").write_text("database disk image is malformed")
    store = SqliteStore(path, "commit", None)
    store.recover()
    assert not path.with_name("broker.db.suspect").exists()
    Writer(store).commit(queued(1, [5000]))
    assert store.damage == ""
    store.stop()


def test_stream_ends_are_set(path: Path) -> None:
    set_stream_ends(path, {("s", 1): 5, ("s", 0): 7})
    set_stream_ends(path, {("s", 0): 9})
    assert check_database(path).ends == {("s", 0): 9, ("s", 1): 5}
