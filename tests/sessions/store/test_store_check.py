"""sessions.store.check: each broken rule is reported, and a check writes nothing."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from support.full_store import CHANGES, fill, overwrite, page_kinds, rows_of
from support.store_cases import queued
from support.store_writer import Writer

from sessions.store.check import check_database
from sessions.store.schema import MIGRATIONS, prepare
from sessions.store.writer import SqliteStore


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undamaged") / "broker.db"
    fill(path)
    return path


@pytest.fixture
def path(undamaged: Path, tmp_path: Path) -> Path:
    shutil.copyfile(undamaged, tmp_path / "broker.db")
    return tmp_path / "broker.db"


def test_an_undamaged_database_has_no_problems_and_gets_no_files(path: Path) -> None:
    before = path.read_bytes()
    state = check_database(path)
    assert state.problems == [] and state.ends == {}
    assert state.counts == {table: len(rows) for table, rows in rows_of(path).items()}
    path.with_name("broker.db-wal").unlink(missing_ok=True)
    path.with_name("broker.db-shm").unlink(missing_ok=True)
    check_database(path)
    assert path.read_bytes() == before and os.listdir(path.parent) == ["broker.db"]


def test_a_database_in_use_is_read_at_its_last_commit(path: Path) -> None:
    store = SqliteStore(path, "commit", None)
    store.recover()
    writer = Writer(store)
    assert check_database(path).problems == []
    before = check_database(path).counts["queue"]
    writer.commit(queued(1, [90_000, 90_001]))
    state = check_database(path)
    assert (state.problems, state.counts["queue"]) == ([], before + 2)
    writer.commit(queued(1, [90_002]))
    store.stop()


def test_a_database_is_read_with_the_write_ahead_log_of_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path, keep_wal=True)
    before = path.read_bytes(), path.with_name("broker.db-wal").read_bytes()
    state = check_database(path)
    assert state.problems == [] and state.counts["sessions"] == 30
    assert (path.read_bytes(), path.with_name("broker.db-wal").read_bytes()) == before


BROKEN = [
    ("DELETE FROM sessions WHERE session_id = 3", "20 subscriptions without a session"),
    ("DELETE FROM sessions WHERE session_id = 3", "39 packet ids without a session"),
    ("DELETE FROM messages WHERE id = 880", "1 queue entries without a message"),
    ("DELETE FROM queue WHERE seq > 890", "10 messages that no queue entry refers to"),
    ("UPDATE queue SET size = size + 1 WHERE seq = 880", "1 queue entries with a wrong size"),
    (
        "INSERT INTO queue SELECT 1, 9000, message_id, 0, 1, 0, x'', 0, 0, size, 0 FROM queue WHERE seq = 880",
        "2 queue entries that share a message and do not say so",
    ),
    ("PRAGMA application_id = 1", "not a database of this broker"),
    ("PRAGMA user_version = 99", "schema version 99 is newer than this program's"),
]


@pytest.mark.parametrize(("change", "problem"), BROKEN)
def test_each_broken_rule_is_a_problem(path: Path, change: str, problem: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(change)
    connection.close()
    assert [found for found in check_database(path).problems if found.startswith(problem)]


def test_entries_of_a_deleted_session_are_no_problem(path: Path) -> None:
    """They are deleted in steps."""
    connection = sqlite3.connect(path, isolation_level=None)
    for table in ("sessions", "subscriptions", "received"):
        connection.execute(f"DELETE FROM {table} WHERE session_id = 30")
    connection.close()
    assert check_database(path).problems == []


@pytest.mark.parametrize("kind", ["header", "leaf table", "leaf index", "root interior table", "pointer map"])
@pytest.mark.parametrize("change", ["zeros", "noise", "ones", "shifted"])
def test_damage_is_a_problem(path: Path, kind: str, change: str) -> None:
    overwrite(path, page_kinds(path)[kind][0], CHANGES[change])
    problems = check_database(path).problems
    assert problems and not [line for line in problems if "\n" in line]


def test_checking_an_emptied_database_keeps_its_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    fill(path, keep_wal=True)
    os.truncate(path, 0)
    assert check_database(path).problems == ["is empty, though its write-ahead log is not"]
    assert path.with_name("broker.db-wal").stat().st_size > 0


def test_a_missing_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_database(tmp_path / "broker.db")


def test_a_database_of_an_older_version_lacks_no_table_that_came_later(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    connection = sqlite3.connect(path, isolation_level=None)
    prepare(connection, str(path), MIGRATIONS[:4])
    connection.close()
    state = check_database(path)
    assert state.problems == [] and "sessions" in state.counts and "stream_readers" not in state.counts
