"""sessions.store.pages: the rows read from the pages are SQLite's rows, without deleted ones."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from support.full_store import CHANGES, PAGE, TABLES, fill, overwrite, page_kinds, rows_of

from sessions.store.check import COMMIT_LOG
from sessions.store.pages import PageFile, Record
from sessions.store.schema import prepare


def records(path: Path) -> Counter[Record]:
    pages = PageFile(path)
    try:
        found = Counter(record for _, record in pages.records())
        assert pages.notes() == []
        return found
    finally:
        pages.close()


def on_pages(path: Path) -> Counter[Record]:
    """The records that the pages of the tables should have, with NULL for the rowid."""
    found: Counter[Record] = Counter()
    for table, rows in rows_of(path).items():
        keyed = table in ("sessions", "messages", "stream_readers")
        found.update((None, *row[1:]) if keyed else row for row in rows)
    return found


@pytest.mark.parametrize("keep_wal", [False, True])
def test_every_row_is_found_once(tmp_path: Path, keep_wal: bool) -> None:
    path = tmp_path / "broker.db"
    fill(path, keep_wal)
    assert path.with_name("broker.db-wal").exists() is keep_wal
    found = records(path)
    expected = on_pages(path)
    assert len(expected) > 1500
    assert found & expected == expected
    # The rest are entries of the indexes and SQLite's own tables.
    rest = found - expected
    assert {len(record) for record in rest} <= {2, 3, 4, 5}
    assert not [record for record in rest if isinstance(record[-1], bytes)]


def test_the_store_used_every_kind_of_page(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path)
    assert {
        "header",
        "pointer map",
        "root interior table",
        "root interior index",
        "leaf table",
        "leaf index",
        "overflow",
        "free",
    } <= set(page_kinds(path))


def test_uncommitted_and_torn_frames_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path, keep_wal=True)
    expected = records(path)
    wal = path.with_name("broker.db-wal")
    whole = wal.read_bytes()
    frame = PAGE + 24
    # A frame that no commit follows, and half of another.
    blank = bytearray(whole[32 : 32 + frame])
    blank[4:8] = bytes(4)
    wal.write_bytes(whole + blank + blank[: frame // 2])
    assert records(path) == expected


def test_frames_behind_a_damaged_one_are_read(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path, keep_wal=True)
    last = max(rows_of(path)["messages"], key=lambda row: int(str(row[0])))
    path.with_name("broker.db-shm").unlink(missing_ok=True)
    fill(path, keep_wal=True)
    wal = bytearray(path.with_name("broker.db-wal").read_bytes())
    at = 32 + (PAGE + 24) * 5 + 24 + 100
    wal[at : at + 8] = b"\xff" * 8
    path.with_name("broker.db-wal").write_bytes(wal)
    pages = PageFile(path)
    found = {record for _, record in pages.records()}
    assert (None, *last[1:]) in found
    assert [note for note in pages.notes() if note.startswith("write-ahead log: frame 6 ")]
    pages.close()


def test_a_broken_chain_of_overflow_pages_gives_no_row(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path)
    before = records(path)
    page = page_kinds(path)["overflow"][-1]
    overwrite(path, page, lambda data: (12345).to_bytes(4, "big") + data[4:])
    pages = PageFile(path)
    lost = before - Counter(record for _, record in pages.records())
    assert lost.total() == 1 and isinstance(next(iter(lost))[-1], bytes)
    assert [note for note in pages.notes() if note.endswith(" rows cannot be read")]
    pages.close()


def test_a_file_that_is_not_a_database_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    path.write_bytes(b"These are not the pages you are looking for. " * 500)
    pages = PageFile(path)
    assert list(pages.records()) == []
    assert pages.user_version is None and pages.application_id is None
    assert pages.notes()[0] == "the file header cannot be read"
    pages.close()


@pytest.mark.parametrize("change", CHANGES)
def test_reading_writes_nothing(tmp_path: Path, change: str) -> None:
    path = tmp_path / "broker.db"
    fill(path)
    for numbers in page_kinds(path).values():
        overwrite(path, numbers[0], CHANGES[change])
    before = path.read_bytes()
    pages = PageFile(path)
    assert sum(1 for _ in pages.records()) > 0
    assert pages.notes()
    pages.close()
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir() if found.name not in ("lock", "log")] == ["broker.db"]


def test_rows_of_different_tables_and_indexes_have_different_types(tmp_path: Path) -> None:
    """Salvage assigns rows to tables by their column types alone, and reads them in column order."""
    connection = sqlite3.connect(tmp_path / "broker.db", isolation_level=None)
    prepare(connection, "")
    shapes: list[tuple[bool, tuple[str, ...]]] = []
    for name, kind, text in connection.execute("SELECT name, type, sql FROM sqlite_master").fetchall():
        if kind == "table" and "sqlite_" not in name:
            columns = connection.execute(f"PRAGMA table_info({name})").fetchall()
            without_rowid = "WITHOUT ROWID" in text
            if without_rowid:
                keys = [column[5] for column in columns if column[5]]
                assert [column[5] for column in columns][: len(keys)] == sorted(keys) == keys
            shapes.append((without_rowid, tuple(column[2] for column in columns)))
    assert len(set(shapes)) == len([*TABLES, COMMIT_LOG])
    indexes = connection.execute("SELECT name, tbl_name FROM sqlite_master WHERE type = 'index' AND name NOT LIKE 'sqlite_%'").fetchall()
    for index, table in indexes:
        types = {column[0]: column[2] for column in connection.execute(f"PRAGMA table_info({table})")}
        parts = connection.execute(f"PRAGMA index_xinfo({index})").fetchall()
        assert (True, tuple(types.get(part[1], "INTEGER") for part in parts)) not in shapes
    connection.close()
    assert indexes
