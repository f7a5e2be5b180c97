"""sessions.store.writer: reported commits survive every failure, and no commit is half done."""

from __future__ import annotations

import errno
import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support import store_writer
from support.core import wait_until
from support.store_cases import Opened, log, opened, path, query, queued, session_row  # noqa: F401 - fixtures
from support.store_writer import ENTRIES, KEPT, FileLog, Writer, commit_number, retained, retained_rows

from sessions.message import Message
from sessions.row_kinds import RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.store import database, schema
from sessions.store import writer as store_module
from sessions.store.interface import StoreError
from sessions.store.schema import MIGRATIONS
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet

# -- the stream log -----------------------------------------------------------


def stream_set(number: int) -> WriteSet:
    write_set = queued(1, [number])
    record = Message("s", number.to_bytes(8, "big"), 1, False, b"", "p", number, 0)
    write_set.stream_messages = {("s", 0): [record]}
    return write_set


def test_records_are_appended_to_the_stream_log_after_the_commit(opened: Opened, path: Path, log: FileLog) -> None:
    _, writer = opened("commit", log)
    writer.commit(stream_set(1))
    assert log.events == ["recover", "append", "committed"]
    writer.store.stop()
    assert log.events[3:] == ["sync"]
    assert query(path, "SELECT end_offset FROM stream_ends") == [1]


def test_a_commit_without_stream_messages_does_not_use_the_stream_log(opened: Opened, log: FileLog) -> None:
    _, writer = opened("commit", log)
    writer.commit(queued(1, [1]))
    assert log.events == ["recover"]


def test_the_stream_log_is_cut_back_to_the_ends_in_sqlite(opened: Opened, log: FileLog) -> None:
    _, writer = opened("commit", log)
    writer.commit(stream_set(1))
    writer.store.stop()
    with open(log.path(("s", 0)), "ab") as file:
        file.write(bytes(24))
    with open(log.path(("never", 3)), "ab") as file:
        file.write(bytes(8))
    again = FileLog(log.directory)
    opened("commit", again)
    assert again.records(("s", 0)) == [1]
    assert again.records(("never", 3)) == []


def test_a_failing_stream_log_loses_no_commit(opened: Opened, path: Path, log: FileLog) -> None:
    """A commit is in the log before the stream log fails; those that follow are refused until it works again."""
    _, writer = opened("commit", log)
    writer.commit(stream_set(1))
    log.fail_in = "append"
    writer.commit(stream_set(2))
    assert str(writer.outcome(stream_set(3))) == "append fails"
    assert log.records(("s", 0)) == [1]
    log.fail_in = ""
    wait_until(lambda: writer.outcome(stream_set(3)) is None)
    writer.commit(stream_set(4))
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1, 2, 3, 4]
    assert query(path, "SELECT end_offset FROM stream_ends") == [4]


def test_records_that_the_stream_log_refused_are_appended_at_the_next_start(opened: Opened, path: Path, log: FileLog) -> None:
    _, writer = opened("commit", log)
    log.fail_in = "append"
    writer.commit(stream_set(1))
    writer.store.stop()
    assert log.records(("s", 0)) == [] and list((path.parent / "log").iterdir())
    again = FileLog(log.directory)
    opened("commit", again)
    assert again.records(("s", 0)) == [1]


def test_a_full_stream_log_at_start_does_not_block_later_commits(path: Path, log: FileLog) -> None:
    """The commit log, which keeps the records, is longer than commits otherwise wait for."""
    store = SqliteStore(path, "commit", log, log_bytes=512 * 1024, apply_interval=1000.0)
    store.recover()
    writer = Writer(store)
    for number in range(1, 21):
        large = stream_set(number)
        large.saved(RETAINED)[:] = [retained("r", bytes(10_000))]
        assert writer.outcome(large) is None
    killed = path.parent.with_name("killed") / path.name
    shutil.copytree(path.parent, killed.parent)

    again = FileLog(killed.parent / "streams")
    again.path(("s", 0)).unlink()
    again.fail_in, again.error = "append", errno.ENOSPC
    second = SqliteStore(killed, "commit", again, log_bytes=1)
    second.recover()
    writer = Writer(second)
    error = writer.outcome(stream_set(21))
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    again.fail_in = ""
    wait_until(lambda: writer.outcome(stream_set(21)) is None)
    wait_until(lambda: again.records(("s", 0)) == list(range(1, 22)))
    second.stop()
    store.stop()


def test_watermarks_that_fail_do_not_undo_a_commit(opened: Opened, path: Path, log: FileLog, caplog: pytest.LogCaptureFixture) -> None:
    _, writer = opened("commit", log)
    log.fail_in = "committed"
    writer.commit(stream_set(1))
    assert "high watermarks" in caplog.text
    log.fail_in = ""
    writer.commit(stream_set(2))
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1, 2]


def test_stream_messages_without_a_log_are_refused(opened: Opened, path: Path) -> None:
    _, writer = opened()
    with pytest.raises(ValueError, match="no stream log"):
        writer.commit(stream_set(1))
    assert query(path, "SELECT * FROM queue") == []


# -- failures ---------------------------------------------------------------


def test_a_full_disk_fails_only_the_commits_meanwhile(path: Path, log: FileLog) -> None:
    """No file may grow for a while, as on a full disk or with a used-up quota."""
    store = SqliteStore(path, "commit", log, log_bytes=512 * 1024)
    store.recover()
    writer = Writer(store)
    writer.commit(stream_set(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.with_name("broker.db-wal").stat().st_size
    big = stream_set(2)
    big.saved(RETAINED)[:] = [retained("r", bytes(1_000_000))]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, hard))
        errors = [writer.outcome(big), writer.outcome(big)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(isinstance(error, OSError) and error.errno == errno.EFBIG for error in errors)
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1]
    writer.commit(big)
    store.stop()
    store = SqliteStore(path, "commit", FileLog(log.directory))
    recovered = store.recover()
    assert recovered.rows(RETAINED) == retained_rows(big)
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1, 2]
    store.stop()


def test_a_full_database_fails_only_the_commits_meanwhile(opened: Opened, path: Path) -> None:
    _, writer = opened()
    connection = writer.store.database.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    keys = list(range(1, 2000))
    first = queued(1, keys, b"x" * 100)
    first.pages = [store_writer.PageRequest(1, 0, 5, False)]
    assert writer.outcome(first) is None  # it is in the log
    wait_until(lambda: "full" in str(writer.outcome(queued(2, [5000]))))
    assert query(path, "SELECT count(*) FROM messages") == [0]
    connection.execute("PRAGMA max_page_count = 1000000")
    assert [len(page.rows) for page in writer.pages(first)] == [5]
    writer.commit(queued(2, [5000]))
    assert query(path, "SELECT count(*) FROM messages") == [len(keys) + 1]


def test_a_failing_callback_does_not_stop_the_writer(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteStore(path, "commit", None)
    store.recover()
    reports: list[Exception | None] = []

    def done(write_set: WriteSet, error: Exception | None) -> None:
        reports.append(error)
        raise RuntimeError("the callback failed")

    store.start(done, lambda *read: None)
    store.submit(queued(1, [1]))
    store.submit(queued(1, [2]))
    store.stop()
    assert reports == [None, None]
    assert "the callback failed" in caplog.text
    assert query(path, "SELECT seq FROM queue") == [1, 2]


def test_stop_commits_everything_submitted_and_leaves_one_file(path: Path) -> None:
    store = SqliteStore(path, "commit", None)
    store.recover()
    store.start(lambda *outcome: None, lambda *read: None)
    for number in range(1, 51):
        store.submit(queued(1, [number]))
    store.stop()
    assert sorted(os.listdir(path.parent)) == ["broker.db", "lock", "log"]
    assert query(path, "SELECT count(*) FROM queue") == [50]


# -- stores that cannot be opened ---------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        SqliteStore(path, "commit", None).recover()
    text = str(caught.value)
    assert "\n" not in text and str(path.parent) in text
    return text


def test_one_store_per_data_directory(opened: Opened, path: Path) -> None:
    _, writer = opened()
    assert refusal(path) == f"{path.parent}: in use by another process"
    writer.store.stop()
    opened()


def test_a_data_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in refusal(tmp_path / "file" / "broker.db")


def test_a_path_that_is_a_directory(path: Path) -> None:
    path.mkdir(parents=True)
    assert refusal(path) == f"{path}: unable to open database file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_database_that_cannot_be_written(opened: Opened, path: Path) -> None:
    _, writer = opened()
    writer.store.stop()
    path.chmod(0o400)
    assert "readonly" in refusal(path)


def test_a_file_that_is_not_a_database(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"These are not the pages you are looking for. " * 200)
    before = path.read_bytes()
    assert refusal(path) == f"{path}: file is not a database"
    assert path.read_bytes() == before
    # The lock is released.
    path.unlink()
    store = SqliteStore(path, "commit", None)
    store.recover()
    store.stop()


def test_a_damaged_database(opened: Opened, path: Path) -> None:
    _, writer = opened()
    write_set = queued(1, list(range(1, 500)))
    write_set.saved(SESSIONS)[:] = [session_row(number) for number in range(1, 500)]
    writer.commit(write_set)
    writer.store.stop()
    data = bytearray(path.read_bytes())
    data[8192:] = random.Random(4).randbytes(len(data) - 8192)
    path.write_bytes(data)
    assert refusal(path).startswith(f"{path}: ")
    assert path.read_bytes() == data


def test_an_older_database_is_migrated_at_start(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, writer = opened()
    write_set = WriteSet()
    write_set.saved(SESSIONS)[:] = [session_row(1)]
    writer.commit(write_set)

    def add_note(db: Any) -> None:
        db.table("sessions").add_column("note", str)

    newer = functools.partial(schema.prepare, migrations=(*MIGRATIONS, add_note))
    monkeypatch.setattr(database, "prepare", newer)
    recovered, writer = opened()
    assert recovered.rows(SESSIONS) == write_set.saved(SESSIONS)
    writer.store.stop()
    backup = path.with_name(f"broker.db.v{len(MIGRATIONS)}.backup")
    assert query(backup, "SELECT client_id FROM sessions") == ["client-1"]
    monkeypatch.undo()
    assert "newer than this program" in refusal(path)


def test_an_unknown_durability_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="'sometimes'"):
        SqliteStore(path, "sometimes", None)


# -- durability -------------------------------------------------------------


@pytest.mark.parametrize("durability", ["commit", "interval"])
def test_the_tables_are_synced_by_the_store_alone(opened: Opened, path: Path, durability: str) -> None:
    _, writer = opened(durability)
    connection = writer.store.database.connection
    assert connection.execute("PRAGMA synchronous").fetchone() == (1,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)


def test_durability_off_keeps_state_in_memory_and_the_stream_log_unsynced(opened: Opened, path: Path, log: FileLog) -> None:
    _, writer = opened("off", log)
    writer.commit(stream_set(1))
    assert [row[0] for row in writer.page(1).rows] == [1]
    assert log.events == ["recover all", "append", "committed"]
    assert sorted(os.listdir(path.parent)) == ["lock", "streams"]
    again = FileLog(log.directory)
    recovered, _ = opened("off", again)
    assert recovered.queues == []
    assert again.records(("s", 0)) == [1]


ROUNDS = 12


def test_kill_9_loses_no_reported_commit(tmp_path: Path) -> None:
    """After a kill the disk has exactly the last reported commit or the one after it."""
    rng = random.Random(20)
    reported = -1
    for _ in range(ROUNDS):
        victim = subprocess.Popen(
            [sys.executable, store_writer.__file__, str(tmp_path)],
            stdout=subprocess.PIPE,
        )
        assert victim.stdout is not None
        target = rng.randrange(1, 60)
        for _ in range(target):
            reported = int(victim.stdout.readline())
        # The process runs on for a random time.
        victim.send_signal(signal.SIGKILL)
        rest = victim.stdout.read().split(b"\n")[:-1]
        victim.wait()
        victim.stdout.close()
        if rest:
            reported = int(rest[-1])
        last = verify(tmp_path)
        assert last in (reported, reported + 1)


def verify(directory: Path) -> int:
    """The number of the last commit on disk; everything of it must be there, and nothing else."""
    log = FileLog(directory / "streams")
    store = SqliteStore(directory / "broker.db", "commit", log)
    recovered = store.recover()
    writer = Writer(store)
    try:
        page = writer.page(1)
        path = directory / "broker.db"
        (last,) = [int(row.payload) for row in recovered.rows(RETAINED)]
        assert recovered.rows(SESSIONS) == commit_number(last).saved(SESSIONS)
        assert recovered.rows(SUBSCRIPTIONS) == commit_number(last).saved(SUBSCRIPTIONS)
        expected = list(range(max(0, last - KEPT + 1) * ENTRIES, (last + 1) * ENTRIES))
        assert [row.seq for row in page.rows] == expected
        assert [row.payload for row in page.rows] == [b"%d" % key for key in expected]
        assert [row.state for row in page.rows] == [2] * (len(expected) - ENTRIES) + [0] * ENTRIES
        assert page.received == [last % 60000 + 1]
        assert query(path, "SELECT id FROM messages") == expected
        for partition in (0, 1):
            numbers = list(range(partition, last + 1, 2))
            if numbers:
                assert log.records(("s", partition)) == numbers
        assert query(path, "PRAGMA integrity_check") == ["ok"]
        return last
    finally:
        store.stop()


def test_an_idle_writer_lets_the_stream_log_apply_retention(opened: Opened, log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETENTION_AFTER", 0.01)
    heard = threading.Event()
    monkeypatch.setattr(log, "committed", heard.set)
    opened("commit", log)
    assert heard.wait(10)


# -- defects ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["the thread of the tables", "the thread that commits"])
def test_a_defect_refuses_later_commits_and_keeps_what_was_committed(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """Without that a commit would be answered never, or be missing in the tables for good."""
    _, writer = opened("commit", None)
    follower = writer.store.follower
    assert follower is not None

    def fail(*arguments: object) -> None:
        raise RuntimeError("no such field")

    commit = queued(1, [1])
    commit.saved(SESSIONS)[:] = [session_row(1)]
    if place == "the thread of the tables":
        monkeypatch.setattr(follower._tables, "run_query", fail)
        commit.queries = [None]  # type: ignore[list-item]
    else:
        monkeypatch.setattr(follower, "add", fail)
    assert writer.outcome(commit) is None
    wait_until(lambda: follower.failure is not None)
    assert "no such field" in str(writer.outcome(queued(1, [2])))
    assert "event=defect in=tables" in caplog.messages
    writer.store.stop()
    monkeypatch.undo()
    recovered, _ = opened("commit", None)
    assert [row.session_id for row in recovered.queues] == [1]
