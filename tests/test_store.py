"""sessions.store: what is reported committed is there after anything, and nothing half."""

from __future__ import annotations

import functools
import os
import random
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import store_writer
from sessions import schema, statements
from sessions import store as store_module
from sessions.message import Message
from sessions.schema import MIGRATIONS, StoreError
from sessions.store import Recovered, Store
from sessions.write_set import Page, WriteSet
from store_writer import ENTRIES, KEPT, FileLog, Writer, commit_number

ROOT = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "broker.db"


@pytest.fixture
def log(path: Path) -> FileLog:
    return FileLog(path.parent / "streams")


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., Tuple[Recovered, Writer]]]:
    """Opens a store, after closing the one before it."""
    stores: List[Store] = []

    def open_store(
        durability: str = "commit", log: Optional[FileLog] = None
    ) -> Tuple[Recovered, Writer]:
        for store in stores:
            store.stop()
        store = Store(path, durability, log)
        stores.append(store)
        recovered = store.recover()
        return recovered, Writer(store)

    yield open_store
    for store in stores:
        store.stop()


Opened = Callable[..., Tuple[Recovered, Writer]]


def query(path: Path, sql: str) -> List[Any]:
    """Rows (bare values of one column) as another process sees them."""
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute(sql).fetchall()
    finally:
        connection.close()
    return [row[0] if len(row) == 1 else row for row in rows]


def queued(session_id: int, keys: List[int], payload: bytes = b"p") -> WriteSet:
    """Messages that only this session has, seq and message id being the key."""
    write_set = WriteSet()
    write_set.messages = [(key, "t", payload, 1, 0, b"", "p", key, 0) for key in keys]
    write_set.entries = [(session_id, key, key, 0, 1, 0, b"", 0, 0) for key in keys]
    return write_set


def session_row(session_id: int, disconnected_at: Optional[float] = None) -> Tuple[object, ...]:
    return (session_id, f"client-{session_id}", 5, 3600, disconnected_at, None, None)


# -- what is written is read ------------------------------------------------


def test_a_new_store_is_empty(opened: Opened) -> None:
    recovered, _ = opened()
    assert vars(recovered) == {
        "sessions": [],
        "subscriptions": [],
        "retained": [],
        "queues": [],
        "next_session_id": 1,
        "next_message_id": 1,
        "next_seq": 1,
    }


def test_state_survives_a_restart(opened: Opened) -> None:
    _, writer = opened()
    write_set = queued(7, [3, 4], b"payload")
    write_set.sessions = [(7, "c", 5, 3600, None, b"will", 12.5), session_row(9, 1700000000.25)]
    write_set.subscriptions = [(7, "b/#", 1, 5, 0), (7, "a/é", 2, 6, 268435455)]
    write_set.retained = [("r", b"\0\xff", 1, b"props", "pub", 1700000000000001, 5)]
    write_set.received = [(7, 65535)]
    writer.commit(write_set)
    recovered, writer = opened()
    assert recovered.sessions == write_set.sessions
    assert sorted(recovered.subscriptions) == sorted(write_set.subscriptions)  # type: ignore[type-var]
    assert recovered.retained == write_set.retained
    assert recovered.queues == [(7, 2, 2 * len("tpayload"), 4)]
    assert (recovered.next_session_id, recovered.next_message_id, recovered.next_seq) == (10, 5, 5)
    assert writer.page(7).received == [65535]


def test_lists_are_applied_in_their_order(opened: Opened, path: Path) -> None:
    """An upsert beside a removal of the same key: the later list wins."""
    _, writer = opened()
    write_set = queued(1, [1, 2])
    write_set.sessions = [session_row(1)]
    write_set.subscriptions = [(1, "kept", 1, 1, 0), (1, "gone", 1, 1, 0)]
    write_set.unsubscriptions = [(1, "gone")]
    write_set.updates = [(77, 3, 1, 2)]
    write_set.deletes = [(1, 1)]
    write_set.sole_messages = [1]
    write_set.received = [(1, 5), (1, 6)]
    write_set.released = [(1, 5)]
    write_set.retained = [("kept", b"1", 0, b"", "", 1, 0), ("gone", b"1", 0, b"", "", 1, 0)]
    write_set.unretained = ["gone"]
    writer.commit(write_set)
    assert query(path, "SELECT topic_filter FROM subscriptions") == ["kept"]
    assert query(path, "SELECT seq, packet_id, state FROM queue") == [(2, 77, 3)]
    assert query(path, "SELECT id FROM messages") == [2]
    assert query(path, "SELECT packet_id FROM received") == [6]
    assert query(path, "SELECT topic FROM retained") == ["kept"]


def test_upserts_replace_every_column(opened: Opened) -> None:
    _, writer = opened()
    first, second = WriteSet(), WriteSet()
    first.sessions = [(1, "c", 4, 10, None, b"w", 1.0)]
    first.subscriptions = [(1, "a", 1, 1, 1)]
    first.retained = [("r", b"1", 0, b"x", "p", 1, 1)]
    second.sessions = [(1, "c", 5, 20, 2.0, None, None)]
    second.subscriptions = [(1, "a", 2, 2, 0)]
    second.retained = [("r", b"2", 1, b"y", "q", 2, 2)]
    writer.commit(first)
    writer.commit(second)
    recovered, _ = opened()
    assert recovered.sessions == second.sessions
    assert recovered.subscriptions == second.subscriptions
    assert recovered.retained == second.retained


@pytest.mark.parametrize(
    "count", [1, 2, 3, statements.CHUNK, statements.CHUNK + 1, 2 * statements.CHUNK + 5]
)
def test_lists_of_any_length(opened: Opened, path: Path, count: int) -> None:
    _, writer = opened()
    keys = list(range(1, count + 1))
    writer.commit(queued(1, keys))
    assert query(path, "SELECT seq FROM queue") == keys
    write_set = WriteSet()
    write_set.updates = [(key % 65535 + 1, 2, 1, key) for key in keys]
    writer.commit(write_set)
    assert query(path, "SELECT packet_id FROM queue") == [key % 65535 + 1 for key in keys]
    write_set = WriteSet()
    write_set.deletes = [(1, key) for key in keys[:-1]]
    write_set.sole_messages = keys[:-1]
    writer.commit(write_set)
    assert query(path, "SELECT seq FROM queue") == query(path, "SELECT id FROM messages") == keys[-1:]


def test_a_shared_message_goes_with_its_last_entry(opened: Opened, path: Path) -> None:
    _, writer = opened()
    write_set = WriteSet()
    write_set.messages = [(1, "t", b"", 1, 0, b"", "", 1, 0), (2, "t", b"", 1, 0, b"", "", 1, 0)]
    write_set.entries = [
        (session_id, seq, message_id, 1, 1, 0, b"", 0, 0)
        for seq, (session_id, message_id) in enumerate([(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)], 1)
    ]
    writer.commit(write_set)
    for deletes, left in (
        ([(1, 1), (1, 4)], [1, 2]),
        ([(2, 5)], [1]),
        ([(2, 2)], [1]),
        ([(3, 3)], []),
    ):
        write_set = WriteSet()
        write_set.deletes = deletes
        write_set.shared_messages = [1, 2]
        writer.commit(write_set)
        assert query(path, "SELECT id FROM messages") == left


MODEL_KEYS = st.integers(1, 6)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.dictionaries(st.tuples(MODEL_KEYS, MODEL_KEYS), st.booleans()), max_size=6))
def test_subscriptions_and_received_follow_a_model(
    tmp_path_factory: pytest.TempPathFactory, rounds: List[Dict[Tuple[int, int], bool]]
) -> None:
    store = Store(tmp_path_factory.mktemp("model") / "broker.db", "commit", None)
    store.recover()
    writer = Writer(store)
    model: Set[Tuple[int, int]] = set()
    try:
        for changes in rounds:
            write_set = WriteSet()
            for (session_id, number), present in changes.items():
                if present:
                    model.add((session_id, number))
                    write_set.subscriptions.append((session_id, str(number), 0, 0, 0))
                    write_set.received.append((session_id, number))
                else:
                    model.discard((session_id, number))
                    write_set.unsubscriptions.append((session_id, str(number)))
                    write_set.released.append((session_id, number))
            writer.commit(write_set)
    finally:
        store.stop()
    path = store._path
    assert set(query(path, "SELECT session_id, packet_id FROM received")) == model
    assert {
        (session_id, int(topic_filter))
        for session_id, topic_filter in query(path, "SELECT session_id, topic_filter FROM subscriptions")
    } == model


# -- pages ------------------------------------------------------------------


def test_pages_follow_each_other(opened: Opened) -> None:
    _, writer = opened()
    writer.commit(queued(1, list(range(1, 26))))
    writer.commit(queued(2, [30]))
    seen: List[object] = []
    while True:
        rows = writer.page(1, int(str(seen[-1])) if seen else 0, 10).rows
        if not rows:
            break
        assert len(rows) <= 10
        seen += [row[0] for row in rows]
    assert seen == list(range(1, 26))


PAYLOADS = [
    b"",
    bytes(range(256)),
    b"x" * statements.LARGE_BYTES,
    b"y" * (statements.LARGE_BYTES + 1),
    b"z" * 300_000,
]


def test_a_page_row_has_entry_and_message(opened: Opened) -> None:
    _, writer = opened()
    write_set = WriteSet()
    topics = ["t", "é/\U0001f600/\x01\x7f", 'quo"te\\', "a/b", "\uffff"]
    write_set.messages = [
        (10 + at, topic, payload, 2, 1, b"\x26\0\xff", 'pub"é', 1700000000000000 + at, 5)
        for at, (topic, payload) in enumerate(zip(topics, PAYLOADS))
    ]
    write_set.entries = [(1, 20 + at, 10 + at, at % 2, 1, 0, b"\x0b\x05", 9, 4) for at in range(5)]
    writer.commit(write_set)
    assert writer.page(1).rows == [
        (seq, qos, retain, ids, packet_id, state, message_id, shared, *message[1:])
        for (_, seq, message_id, shared, qos, retain, ids, packet_id, state), message in zip(
            write_set.entries, write_set.messages
        )
    ]


def test_a_page_sees_the_commit_it_came_with(opened: Opened) -> None:
    _, writer = opened()
    write_set = queued(1, [1])
    write_set.received = [(1, 9), (1, 3)]
    write_set.pages = [
        store_writer.PageRequest(1, 0, 5, True),
        store_writer.PageRequest(1, 1, 5, False),
        store_writer.PageRequest(8, 0, 5, True),
    ]
    pages = writer.commit(write_set)
    assert [(page.session_id, len(page.rows), page.received) for page in pages] == [
        (1, 1, [3, 9]),
        (1, 0, []),
        (8, 0, []),
    ]


def test_a_page_ends_at_its_bytes_but_has_a_row(opened: Opened) -> None:
    _, writer = opened()
    writer.commit(queued(1, [1, 2, 3], b"x" * 999))
    writer.commit(queued(1, [4], b"x" * 9999))
    assert [row[0] for row in writer.page(1, 0, 10, 2000).rows] == [1, 2]
    assert [row[0] for row in writer.page(1, 2, 10, 5000).rows] == [3]
    assert [row[0] for row in writer.page(1, 3, 10, 1).rows] == [4]


def test_a_page_that_cannot_be_read_leaves_the_commit(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writer = opened()
    monkeypatch.setattr(statements, "PAGE", "SELECT x FROM nowhere")
    write_set = queued(1, [1])
    write_set.pages = [store_writer.PageRequest(1, 0, 5, True)]
    (page,) = writer.commit(write_set)
    assert page.rows == [] and isinstance(page.error, sqlite3.OperationalError)
    assert query(path, "SELECT seq FROM queue") == [1]


# -- sessions that end, free pages, the WAL ---------------------------------


def test_an_ended_session_takes_everything_along(opened: Opened, path: Path) -> None:
    _, writer = opened()
    write_set = WriteSet()
    write_set.sessions = [session_row(1), session_row(2)]
    write_set.subscriptions = [(1, "a", 1, 1, 0), (2, "a", 1, 1, 0)]
    write_set.received = [(1, 5), (2, 5)]
    write_set.messages = [(key, "t", b"", 1, 0, b"", "", 1, 0) for key in (1, 2, 3, 4)]
    # 1 is of session 1 alone, 2 of both, 3 twice of session 1, 4 of session 2 alone.
    write_set.entries = [
        (session_id, seq, message_id, shared, 1, 0, b"", 0, 0)
        for seq, (session_id, message_id, shared) in enumerate(
            [(1, 1, 0), (1, 2, 1), (2, 2, 1), (1, 3, 1), (1, 3, 1), (2, 4, 0)], 1
        )
    ]
    writer.commit(write_set)
    write_set = WriteSet()
    write_set.ended = [1, 99]
    write_set.sessions = [(3, "client-1", 5, 0, None, None, None)]
    writer.commit(write_set)
    assert query(path, "SELECT session_id FROM sessions ORDER BY 1") == [2, 3]
    assert query(path, "SELECT session_id FROM subscriptions") == [2]
    assert query(path, "SELECT session_id FROM received") == [2]
    assert query(path, "SELECT session_id, message_id FROM queue") == [(2, 2), (2, 4)]
    assert query(path, "SELECT id FROM messages") == [2, 4]


def test_a_session_id_is_not_used_again(opened: Opened, path: Path) -> None:
    _, writer = opened()
    write_set = WriteSet()
    write_set.ended = [1]
    write_set.sessions = [session_row(1)]
    with pytest.raises(ValueError, match="used again"):
        writer.commit(write_set)
    assert query(path, "SELECT * FROM sessions") == []


@pytest.mark.parametrize("restart", [False, True])
def test_a_long_queue_is_purged_in_steps(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    monkeypatch.setattr(statements, "PURGE_ENTRIES", 100)
    monkeypatch.setattr(store_module, "IDLE_AFTER", 1000.0)
    _, writer = opened()
    write_set = queued(1, list(range(1, 501)))
    write_set.sessions = [session_row(1)]
    writer.commit(write_set)
    write_set = WriteSet()
    write_set.ended = [1]
    writer.commit(write_set)
    left = len(query(path, "SELECT seq FROM queue"))
    assert 300 <= left < 500
    if restart:
        recovered, writer = opened()
        assert recovered.queues == [] and recovered.next_session_id == 2
        assert recovered.next_seq == 501
    while left:
        write_set = WriteSet()
        write_set.retained = [("r", b"", 0, b"", "", 1, 0)]
        writer.commit(write_set)
        left, before = len(query(path, "SELECT seq FROM queue")), left
        assert before - 110 <= left < before
    assert query(path, "SELECT id FROM messages") == []


def test_an_idle_writer_purges_and_gives_pages_back(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "IDLE_AFTER", 0.001)
    monkeypatch.setattr(store_module, "VACUUM_FREE_PAGES", 10)
    tidy = threading.Event()
    vacuum = Store._vacuum

    def vacuum_and_tell(store: Store, connection: sqlite3.Connection) -> None:
        vacuum(store, connection)
        if ended and not store._ending and not store._untidy:
            tidy.set()

    monkeypatch.setattr(Store, "_vacuum", vacuum_and_tell)
    ended: List[int] = []
    _, writer = opened()
    write_set = queued(1, list(range(1, 10001)), b"x" * 500)
    write_set.sessions = [session_row(1)]
    writer.commit(write_set)
    (full,) = query(path, "PRAGMA page_count")
    write_set = WriteSet()
    write_set.ended = [1]
    ended.append(1)
    writer.commit(write_set)
    assert tidy.wait(30)
    assert query(path, "SELECT count(*) FROM messages") == [0]
    assert query(path, "PRAGMA page_count")[0] < full / 20


def test_the_wal_stays_small(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CHECKPOINT_PAGES", 100)
    _, writer = opened()
    for number in range(200):
        writer.commit(queued(1, [number + 1], b"x" * 40_000))
    assert path.stat().st_size > 200 * 40_000 * 0.9
    assert path.with_name("broker.db-wal").stat().st_size < 200 * 4096


def test_a_reader_delays_the_wal_but_not_the_writer(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "CHECKPOINT_PAGES", 20)
    monkeypatch.setattr(store_module, "WAL_LIMIT_PAGES", 100)
    monkeypatch.setattr(store_module, "READERS_WAIT_MS", 1)
    _, writer = opened()
    writer.commit(queued(1, [1]))
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM messages").fetchone() == (1,)
    for number in range(2, 32):
        writer.commit(queued(1, [number], b"x" * 40_000))
    assert reader.execute("SELECT count(*) FROM messages").fetchone() == (1,)
    assert any("keeps the write-ahead log" in record.message for record in caplog.records)
    reader.close()
    size = path.with_name("broker.db-wal").stat().st_size
    for number in range(32, 132):
        writer.commit(queued(1, [number], b"x" * 40_000))
    assert path.with_name("broker.db-wal").stat().st_size <= size + 100 * 4096


# -- plans ------------------------------------------------------------------


TABLES = "sessions subscriptions messages queue received retained stream_ends".split()
WRITES = {
    name: value for name, value in vars(statements).items() if isinstance(value, statements.Statement)
}


def plan(path: Path, sql: str) -> List[str]:
    numbered = re.findall(r"\?(\d)", sql)
    count = int(max(numbered)) if numbered else sql.count("?")
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute("EXPLAIN QUERY PLAN " + sql, [None] * count).fetchall()
    finally:
        connection.close()
    return [str(row[3]) for row in rows]


def scans(steps: List[str]) -> List[str]:
    """The steps that read a whole table, by its name or by an alias of it."""
    words = [step.split() for step in steps]
    return [
        " ".join(step)
        for step in words
        if step[0] == "SCAN" and step[1] in [*TABLES, "q", "m", "other"]
    ]


@pytest.mark.parametrize("name", sorted(WRITES))
@pytest.mark.parametrize("size", [1, 8, statements.CHUNK])
def test_no_write_scans_a_table(opened: Opened, path: Path, name: str, size: int) -> None:
    opened()
    assert scans(plan(path, WRITES[name].by_size[size])) == []


@pytest.mark.parametrize("sql", [*statements.PURGE, statements.PURGE_END, statements.PAGE_RECEIVED])
def test_no_purge_scans_a_table(opened: Opened, path: Path, sql: str) -> None:
    opened()
    assert scans(plan(path, sql)) == []


def test_a_page_reads_its_rows_in_order_and_no_more(opened: Opened, path: Path) -> None:
    opened()
    steps = plan(path, statements.PAGE)
    assert scans(steps) == []
    assert "SEARCH q USING PRIMARY KEY (session_id=? AND seq>?)" in steps
    assert "SEARCH m USING INTEGER PRIMARY KEY (rowid=?)" in steps
    assert not any("TEMP B-TREE" in step for step in steps)


def test_shared_messages_are_found_by_the_partial_index(opened: Opened, path: Path) -> None:
    opened()
    for sql in (statements.SHARED_MESSAGES.by_size[8], statements.PURGE[1]):
        assert any("INDEX queue_shared (message_id=?)" in step for step in plan(path, sql))


# -- the log ----------------------------------------------------------------


def stream_set(number: int) -> WriteSet:
    write_set = queued(1, [number])
    record = Message("s", number.to_bytes(8, "big"), 1, False, b"", "p", number, 0)
    write_set.stream_messages = {("s", 0): [record]}
    return write_set


def test_the_log_is_synced_before_and_told_after_the_commit(
    opened: Opened, path: Path, log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writer = opened("commit", log)
    known: List[Tuple[str, List[Any]]] = []

    def observed(name: str, call: Callable[[], None]) -> None:
        call()
        known.append((name, query(path, "SELECT end_offset FROM stream_ends")))

    for name in ("sync", "committed"):
        monkeypatch.setattr(log, name, functools.partial(observed, name, getattr(log, name)))
    writer.commit(stream_set(1))
    assert log.events == ["recover", "append", "sync", "committed"]
    assert known == [("sync", []), ("committed", [1])]


def test_no_stream_message_no_log(opened: Opened, log: FileLog) -> None:
    _, writer = opened("commit", log)
    writer.commit(queued(1, [1]))
    assert log.events == ["recover"]


def test_the_log_is_cut_back_to_what_sqlite_knows(opened: Opened, log: FileLog) -> None:
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


@pytest.mark.parametrize("fail_in", ["append", "sync"])
def test_a_failing_log_fails_the_commit_whole(
    opened: Opened, path: Path, log: FileLog, fail_in: str
) -> None:
    _, writer = opened("commit", log)
    writer.commit(stream_set(1))
    log.fail_in = fail_in
    write_set = stream_set(2)
    write_set.pages = [store_writer.PageRequest(1, 0, 5, True)]
    _, pages, error = writer.outcome(write_set)
    assert pages == [] and str(error) == f"{fail_in} fails"
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1]
    log.fail_in = ""
    writer.commit(stream_set(2))
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1, 2]
    assert query(path, "SELECT end_offset FROM stream_ends") == [2]


def test_a_failing_rollback_is_repeated_before_the_next_commit(
    opened: Opened, path: Path, log: FileLog
) -> None:
    _, writer = opened("commit", log)
    writer.commit(stream_set(1))
    clash = stream_set(1)
    log.fail_in = "rollback"
    assert isinstance(writer.outcome(clash)[2], sqlite3.IntegrityError)
    assert str(writer.outcome(stream_set(2))[2]) == "rollback fails"
    log.fail_in = ""
    writer.commit(stream_set(3))
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1, 3]


def test_watermarks_that_fail_do_not_undo_a_commit(
    opened: Opened, path: Path, log: FileLog, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_full_disk_fails_the_commit_and_no_other(
    opened: Opened, path: Path, log: FileLog
) -> None:
    """No file may grow for a while: what a full disk or a quota does."""
    _, writer = opened("commit", log)
    writer.commit(stream_set(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.with_name("broker.db-wal").stat().st_size
    big = stream_set(2)
    big.retained = [("r", bytes(1_000_000), 1, b"", "p", 1, 0)]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, hard))
        _, _, first = writer.outcome(big)
        _, _, second = writer.outcome(big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(first, sqlite3.OperationalError)
    assert isinstance(second, sqlite3.OperationalError)
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1]
    writer.commit(big)
    recovered, _ = opened("commit", FileLog(log.directory))
    assert recovered.retained == big.retained
    assert query(path, "SELECT seq FROM queue") == log.records(("s", 0)) == [1, 2]


def test_a_full_database_fails_the_commit_and_no_other(opened: Opened, path: Path) -> None:
    _, writer = opened()
    connection = writer.store._connection
    assert connection is not None
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    keys = list(range(1, 2000))
    _, _, error = writer.outcome(queued(1, keys, b"x" * 100))
    assert isinstance(error, sqlite3.OperationalError) and "full" in str(error)
    assert query(path, "SELECT count(*) FROM messages") == [0]
    connection.execute("PRAGMA max_page_count = 1000000")
    writer.commit(queued(1, keys, b"x" * 100))
    assert query(path, "SELECT count(*) FROM messages") == [len(keys)]


def test_a_report_that_fails_does_not_stop_the_writer(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(path, "commit", None)
    store.recover()
    reports: List[Optional[Exception]] = []

    def done(write_set: WriteSet, pages: List[Page], error: Optional[Exception]) -> None:
        reports.append(error)
        raise RuntimeError("nobody listens")

    store.start(done)
    store.submit(queued(1, [1]))
    store.submit(queued(1, [2]))
    store.stop()
    assert reports == [None, None]
    assert "nobody listens" in caplog.text
    assert query(path, "SELECT seq FROM queue") == [1, 2]


def test_stop_finishes_what_was_submitted_and_leaves_one_file(path: Path) -> None:
    store = Store(path, "commit", None)
    store.recover()
    store.start(lambda *outcome: None)
    for number in range(1, 51):
        store.submit(queued(1, [number]))
    store.stop()
    assert sorted(os.listdir(path.parent)) == ["broker.db", "lock"]
    assert query(path, "SELECT count(*) FROM queue") == [50]


# -- what cannot be used ----------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        Store(path, "commit", None).recover()
    text = str(caught.value)
    assert "\n" not in text and str(path.parent) in text
    return text


def test_one_store_per_data_directory(opened: Opened, path: Path) -> None:
    _, writer = opened()
    assert refusal(path) == f"{path.parent}: in use by another process"
    writer.store.stop()
    opened()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
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


def test_no_database_at_all(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"These are not the pages you are looking for. " * 200)
    before = path.read_bytes()
    assert refusal(path) == f"{path}: file is not a database"
    assert path.read_bytes() == before
    # And nothing stays locked.
    path.unlink()
    store = Store(path, "commit", None)
    store.recover()
    store.stop()


def test_a_damaged_database(opened: Opened, path: Path) -> None:
    _, writer = opened()
    write_set = queued(1, list(range(1, 500)))
    write_set.sessions = [session_row(number) for number in range(1, 500)]
    writer.commit(write_set)
    writer.store.stop()
    data = bytearray(path.read_bytes())
    data[8192:] = random.Random(4).randbytes(len(data) - 8192)
    path.write_bytes(data)
    assert refusal(path).startswith(f"{path}: ")
    assert path.read_bytes() == data


def test_an_older_database_is_migrated_at_start(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writer = opened()
    write_set = WriteSet()
    write_set.sessions = [session_row(1)]
    writer.commit(write_set)

    def add_note(db: Any) -> None:
        db.table("sessions").add_column("note", str)

    newer = functools.partial(schema.prepare, migrations=(*MIGRATIONS, add_note))
    monkeypatch.setattr(store_module, "prepare", newer)
    recovered, writer = opened()
    assert recovered.sessions == write_set.sessions
    writer.store.stop()
    backup = path.with_name(f"broker.db.v{len(MIGRATIONS)}.backup")
    assert query(backup, "SELECT client_id FROM sessions") == ["client-1"]
    monkeypatch.undo()
    assert "newer than this program" in refusal(path)


def test_an_unknown_durability_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="'sometimes'"):
        Store(path, "sometimes", None)


# -- durability -------------------------------------------------------------


@pytest.mark.parametrize("durability", ["commit", "interval"])
def test_commits_are_synced(opened: Opened, path: Path, durability: str) -> None:
    _, writer = opened(durability)
    connection = writer.store._connection
    assert connection is not None
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)


def test_off_keeps_state_in_memory_and_the_log_unsynced(
    opened: Opened, path: Path, log: FileLog
) -> None:
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


def test_kill_9_loses_nothing_reported(tmp_path: Path) -> None:
    """Whenever the writer is killed, the disk holds a whole commit, the last reported or one more."""
    rng = random.Random(20)
    reported = -1
    for _ in range(ROUNDS):
        victim = subprocess.Popen(
            [sys.executable, store_writer.__file__, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert victim.stdout is not None
        target = rng.randrange(1, 60)
        for _ in range(target):
            reported = int(victim.stdout.readline())
        # From here it runs on; how far is up to the scheduler.
        victim.send_signal(signal.SIGKILL)
        rest = victim.stdout.read().split(b"\n")[:-1]
        victim.wait()
        victim.stdout.close()
        if rest:
            reported = int(rest[-1])
        last = verify(tmp_path)
        assert last in (reported, reported + 1)


def verify(directory: Path) -> int:
    """The number of the last commit on disk, all of which and only of which must be there."""
    log = FileLog(directory / "streams")
    store = Store(directory / "broker.db", "commit", log)
    recovered = store.recover()
    writer = Writer(store)
    try:
        page = writer.page(1)
        path = directory / "broker.db"
        (last,) = [int(str(row[1], "ascii")) for row in recovered.retained]
        assert recovered.sessions == commit_number(last).sessions
        assert recovered.subscriptions == commit_number(last).subscriptions
        expected = list(range(max(0, last - KEPT + 1) * ENTRIES, (last + 1) * ENTRIES))
        assert [row[0] for row in page.rows] == expected
        assert [row[9] for row in page.rows] == [b"%d" % key for key in expected]
        assert [row[5] for row in page.rows] == [2] * (len(expected) - ENTRIES) + [0] * ENTRIES
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
