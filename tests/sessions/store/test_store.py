"""sessions.store.writer: rows are stored, read in pages, and deleted."""

from __future__ import annotations

import sqlite3
import threading
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import store_writer
from support.store_cases import Opened, log, opened, path, query, queued, session_row  # noqa: F401 - fixtures
from support.store_writer import Writer, message, retained, retained_rows

from sessions.row_kinds import RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.rows import MESSAGE_COLUMNS, SessionRow, SubscriptionRow, received_key
from sessions.store import follower, maintenance, statements
from sessions.store.interface import nothing_recovered
from sessions.store.maintenance import Maintenance
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet

# -- rows -------------------------------------------------------------------


def test_a_new_store_is_empty(opened: Opened) -> None:
    recovered, _ = opened()
    assert recovered == nothing_recovered()


def test_state_survives_a_restart(opened: Opened) -> None:
    _, writer = opened()
    write_set = queued(7, [3, 4], b"payload")
    write_set.saved(SESSIONS)[:] = [
        SessionRow(7, "c", 5, 3600, None, b"will", 12.5, "user", "rules", "[]"),
        session_row(9, 1700000000.25),
    ]
    write_set.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(7, "b/#", 1, 5, 0), SubscriptionRow(7, "a/é", 2, 6, 268435455)]
    write_set.saved(RETAINED)[:] = [retained("r", b"\0\xff", 1, b"props", "pub", 1700000000000001, 5)]
    write_set.received = [received_key(7, 65535)]
    writer.commit(write_set)
    recovered, writer = opened()
    assert recovered.rows(SESSIONS) == write_set.saved(SESSIONS)
    assert sorted(recovered.rows(SUBSCRIPTIONS)) == sorted(write_set.saved(SUBSCRIPTIONS))
    assert recovered.rows(RETAINED) == retained_rows(write_set)
    assert recovered.queues == [(7, 2, 2 * len("tpayload"), 4)]
    assert (recovered.next_session_id, recovered.next_message_id, recovered.next_seq) == (10, 5, 5)
    assert writer.page(7).received == [65535]


def test_lists_are_applied_in_their_order(opened: Opened, path: Path) -> None:
    """The removal of a key comes before its insertion."""
    _, writer = opened()
    before = WriteSet()
    before.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(1, "again", 1, 1, 0), SubscriptionRow(1, "gone", 1, 1, 0)]
    before.saved(RETAINED)[:] = [retained("again", b"1"), retained("gone", b"1")]
    writer.commit(before)
    write_set = queued(1, [1, 2])
    write_set.saved(SESSIONS)[:] = [session_row(1)]
    write_set.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(1, "again", 2, 1, 0)]
    write_set.removed(SUBSCRIPTIONS)[:] = [(1, "again"), (1, "gone")]
    write_set.entry_updates = [(77, 3, 1, 2)]
    write_set.deleted_entries = [(1, 1, 1, 0)]
    write_set.received = [received_key(1, 6), received_key(1, 7)]
    write_set.deleted_received = [received_key(1, 5), received_key(1, 6)]
    write_set.saved(RETAINED)[:] = [retained("again", b"2")]
    write_set.removed(RETAINED)[:] = ["again", "gone"]
    writer.commit(write_set)
    assert query(path, "SELECT topic_filter, qos FROM subscriptions") == [("again", 2)]
    assert query(path, "SELECT seq, packet_id, state FROM queue") == [(2, 77, 3)]
    assert query(path, "SELECT id FROM messages") == [2]
    assert query(path, "SELECT packet_id FROM received") == [6, 7]
    assert query(path, "SELECT topic, payload FROM retained") == [("again", b"2")]


def test_upserts_replace_every_column(opened: Opened) -> None:
    _, writer = opened()
    first, second = WriteSet(), WriteSet()
    first.saved(SESSIONS)[:] = [SessionRow(1, "c", 4, 10, None, b"w", 1.0, None, None)]
    first.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(1, "a", 1, 1, 1)]
    first.saved(RETAINED)[:] = [retained("r", b"1", 0, b"x", "p", 1, 1)]
    second.saved(SESSIONS)[:] = [SessionRow(1, "c", 5, 20, 2.0, None, None, "user", "rules", "[]")]
    second.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(1, "a", 2, 2, 0)]
    second.saved(RETAINED)[:] = [retained("r", b"2", 1, b"y", "q", 2, 2)]
    writer.commit(first)
    writer.commit(second)
    recovered, _ = opened()
    assert recovered.rows(SESSIONS) == second.saved(SESSIONS)
    assert recovered.rows(SUBSCRIPTIONS) == second.saved(SUBSCRIPTIONS)
    assert recovered.rows(RETAINED) == retained_rows(second)


@pytest.mark.parametrize("count", [1, 2, 3, statements.CHUNK, statements.CHUNK + 1, 2 * statements.CHUNK + 5])
def test_lists_of_any_length(opened: Opened, path: Path, count: int) -> None:
    _, writer = opened()
    keys = list(range(1, count + 1))
    writer.commit(queued(1, keys))
    assert query(path, "SELECT seq FROM queue") == keys
    write_set = WriteSet()
    write_set.entry_updates = [(key % 65535 + 1, 2, 1, key) for key in keys]
    writer.commit(write_set)
    assert query(path, "SELECT packet_id FROM queue") == [key % 65535 + 1 for key in keys]
    write_set = WriteSet()
    write_set.deleted_entries = [(1, key, key, 0) for key in keys[:-1]]
    writer.commit(write_set)
    assert query(path, "SELECT seq FROM queue") == query(path, "SELECT id FROM messages") == keys[-1:]


def test_a_shared_message_is_deleted_with_its_last_entry(opened: Opened, path: Path) -> None:
    _, writer = opened()
    write_set = WriteSet()
    write_set.messages = [message(1, "t", b""), message(2, "t", b"")]
    write_set.entries = [
        (session_id, seq, message_id, 1, 1, 0, b"", 0, 0, 1, 0)
        for seq, (session_id, message_id) in enumerate([(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)], 1)
    ]
    writer.commit(write_set)
    for deletes, left in (
        ([(1, 1, 1, 1), (1, 4, 2, 1)], [1, 2]),
        ([(2, 5, 2, 1)], [1]),
        ([(2, 2, 1, 1)], [1]),
        ([(3, 3, 1, 1)], []),
    ):
        write_set = WriteSet()
        write_set.deleted_entries = deletes
        writer.commit(write_set)
        assert query(path, "SELECT id FROM messages") == left


MODEL_KEYS = st.integers(1, 6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.tuples(MODEL_KEYS, MODEL_KEYS), st.booleans()), max_size=6))
def test_subscriptions_and_received_follow_a_model(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[dict[tuple[int, int], bool]]
) -> None:
    store = SqliteStore(tmp_path_factory.mktemp("model") / "broker.db", "commit", None)
    store.recover()
    writer = Writer(store)
    model: set[tuple[int, int]] = set()
    try:
        for changes in rounds:
            write_set = WriteSet()
            for (session_id, number), present in changes.items():
                if present:
                    if (session_id, number) in model:
                        write_set.deleted_received.append(received_key(session_id, number))
                    model.add((session_id, number))
                    write_set.saved(SUBSCRIPTIONS).append(SubscriptionRow(session_id, str(number), 0, 0, 0))
                    write_set.received.append(received_key(session_id, number))
                else:
                    model.discard((session_id, number))
                    write_set.removed(SUBSCRIPTIONS).append((session_id, str(number)))
                    write_set.deleted_received.append(received_key(session_id, number))
            writer.commit(write_set)
    finally:
        store.stop()
    path = store.database.path
    assert set(query(path, "SELECT session_id, packet_id FROM received")) == model
    assert {
        (session_id, int(topic_filter)) for session_id, topic_filter in query(path, "SELECT session_id, topic_filter FROM subscriptions")
    } == model


# -- pages ------------------------------------------------------------------


def test_pages_follow_each_other(opened: Opened) -> None:
    _, writer = opened()
    writer.commit(queued(1, list(range(1, 26))))
    writer.commit(queued(2, [30]))
    seen: list[object] = []
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
        message(10 + at, topic, payload, 2, True, b"\x26\0\xff", 'pub"é', 1700000000000000 + at, 5)
        for at, (topic, payload) in enumerate(zip(topics, PAYLOADS))
    ]
    write_set.entries = [
        (1, 20 + at, 10 + at, at % 2, 1, 0, b"\x0b\x05", 9, 4, len(topics[at]) + len(payload) + 3, 5) for at, payload in enumerate(PAYLOADS)
    ]
    writer.commit(write_set)
    columns = attrgetter(*MESSAGE_COLUMNS)
    assert writer.page(1).rows == [
        (seq, qos, retain, ids, packet_id, state, message_id, shared, *columns(sent)[1:], size)
        for (_, seq, message_id, shared, qos, retain, ids, packet_id, state, size, _), sent in zip(write_set.entries, write_set.messages)
    ]


@pytest.mark.parametrize("packet_ids", [[0], [7], [10], [0, 0, 0], [5, 5], [11, 12], [1, 11, 1], [11, 1], [65535, 65535]])
def test_a_page_has_the_packet_id_of_each_entry(opened: Opened, packet_ids: list[int]) -> None:
    _, writer = opened()
    write_set = queued(1, list(range(1, len(packet_ids) + 1)))
    write_set.entry_updates = [(packet_id, 2, 1, seq) for seq, packet_id in enumerate(packet_ids, 1)]
    writer.commit(write_set)
    assert [row.packet_id for row in writer.page(1).rows] == packet_ids


def test_a_page_sees_the_commit_it_was_submitted_with(opened: Opened) -> None:
    _, writer = opened()
    write_set = queued(1, [1])
    write_set.received = [received_key(1, 9), received_key(1, 3)]
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


def test_a_page_waits_only_for_changes_that_concern_it(opened: Opened) -> None:
    _, writer = opened()
    store = writer.store

    def applied() -> bool:
        return store.progress().commits_behind == 0

    assert writer.outcome(queued(1, [1, 2, 3, 4])) is None
    assert [row.seq for row in writer.next_page(1, 0, 2).rows] == [1, 2] and applied()
    acknowledged = WriteSet()
    acknowledged.entry_updates = [(7, 2, 1, 2)]
    acknowledged.deleted_entries = [(1, 1, 1, 0)]
    assert writer.outcome(acknowledged) is None
    assert [row.seq for row in writer.next_page(1, 2, 2).rows] == [3, 4] and not applied()
    # The client comes back, and reads from the beginning.
    assert [(row.seq, row.packet_id) for row in writer.next_page(1, 0, 2).rows] == [(2, 7), (3, 0)] and applied()
    assert writer.outcome(queued(1, [5])) is None
    assert [row.seq for row in writer.next_page(1, 4, 2).rows] == [5] and applied()
    ended = WriteSet()
    ended.removed(SESSIONS)[:] = [1]
    assert writer.outcome(ended) is None
    assert writer.next_page(1, 2).rows == [] and applied()


def test_pages_and_changes_keep_their_order(opened: Opened) -> None:
    """A page that needs the changes behind it, asked for before others that are already waiting."""
    _, writer = opened()
    writer.commit(queued(1, [1, 2, 3]))
    removed = WriteSet()
    removed.deleted_entries = [(1, 1, 1, 0)]
    removed.pages = [store_writer.PageRequest(1, 1, 5, False)]
    again = WriteSet()
    again.pages = [store_writer.PageRequest(1, 0, 5, False, until_seq=3)]
    added = queued(1, [4])
    added.pages = [store_writer.PageRequest(1, 3, 5, False)]
    last = WriteSet()
    last.deleted_entries = [(1, 2, 2, 0)]
    last.pages = [store_writer.PageRequest(1, 0, 5, True)]
    sets = [removed, again, added, last]
    for write_set in sets:
        assert writer.outcome(write_set) is None
    found = [[row.seq for row in writer.pages(write_set)[0].rows] for write_set in sets]
    assert found == [[2, 3], [2, 3], [4], [3, 4]]


def test_a_page_ends_at_its_byte_limit_but_has_a_row(opened: Opened) -> None:
    _, writer = opened()
    writer.commit(queued(1, [1, 2, 3], b"x" * 999))
    writer.commit(queued(1, [4], b"x" * 9999))
    assert [row[0] for row in writer.page(1, 0, 10, 2000).rows] == [1, 2]
    assert [row[0] for row in writer.page(1, 2, 10, 5000).rows] == [3]
    assert [row[0] for row in writer.page(1, 3, 10, 1).rows] == [4]


def test_a_page_that_cannot_be_read_does_not_undo_the_commit(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, writer = opened()
    monkeypatch.setattr(statements, "PAGE", "SELECT x FROM nowhere")
    write_set = queued(1, [1])
    write_set.pages = [store_writer.PageRequest(1, 0, 5, True)]
    (page,) = writer.commit(write_set)
    assert page.rows == [] and isinstance(page.error, sqlite3.OperationalError)
    assert query(path, "SELECT seq FROM queue") == [1]


# -- deleted sessions, free pages, the write-ahead log ------------------------


def test_a_deleted_session_is_deleted_with_everything(opened: Opened, path: Path) -> None:
    _, writer = opened()
    write_set = WriteSet()
    write_set.saved(SESSIONS)[:] = [session_row(1), session_row(2)]
    write_set.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(1, "a", 1, 1, 0), SubscriptionRow(2, "a", 1, 1, 0)]
    write_set.received = [received_key(1, 5), received_key(2, 5)]
    write_set.messages = [message(key, "t", b"") for key in (1, 2, 3, 4)]
    # Message 1 is queued for session 1, 2 for both, 3 twice for session 1, 4 for session 2.
    write_set.entries = [
        (session_id, seq, message_id, shared, 1, 0, b"", 0, 0, 1, 0)
        for seq, (session_id, message_id, shared) in enumerate([(1, 1, 0), (1, 2, 1), (2, 2, 1), (1, 3, 1), (1, 3, 1), (2, 4, 0)], 1)
    ]
    writer.commit(write_set)
    write_set = WriteSet()
    write_set.removed(SESSIONS)[:] = [1, 99]
    write_set.saved(SESSIONS)[:] = [SessionRow(3, "client-1", 5, 0, None, None, None, None, None)]
    writer.commit(write_set)
    assert query(path, "SELECT session_id FROM sessions ORDER BY 1") == [2, 3]
    assert query(path, "SELECT session_id FROM subscriptions") == [2]
    assert query(path, "SELECT session_id FROM received") == [2]
    assert query(path, "SELECT session_id, message_id FROM queue") == [(2, 2), (2, 4)]
    assert query(path, "SELECT id FROM messages") == [2, 4]


def test_a_session_id_is_not_used_again(opened: Opened, path: Path) -> None:
    _, writer = opened()
    write_set = WriteSet()
    write_set.removed(SESSIONS)[:] = [1]
    write_set.saved(SESSIONS)[:] = [session_row(1)]
    with pytest.raises(ValueError, match="used again"):
        writer.commit(write_set)
    assert query(path, "SELECT * FROM sessions") == []


@pytest.mark.parametrize("restart", [False, True])
def test_a_long_queue_is_purged_in_steps(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool) -> None:
    monkeypatch.setattr(statements, "PURGE_ENTRIES", 100)
    monkeypatch.setattr(follower, "IDLE_AFTER", 1000.0)
    _, writer = opened()
    write_set = queued(1, list(range(1, 501)))
    write_set.saved(SESSIONS)[:] = [session_row(1)]
    writer.commit(write_set)
    write_set = WriteSet()
    write_set.removed(SESSIONS)[:] = [1]
    writer.commit(write_set)
    left = len(query(path, "SELECT seq FROM queue"))
    assert 300 <= left < 500
    if restart:
        recovered, writer = opened()
        assert recovered.queues == [] and recovered.next_session_id == 2
        assert recovered.next_seq == 501
    while left:
        write_set = WriteSet()
        write_set.saved(RETAINED)[:] = [retained("r", b"")]
        writer.commit(write_set)
        left, before = len(query(path, "SELECT seq FROM queue")), left
        assert before - 110 <= left < before
    assert query(path, "SELECT id FROM messages") == []


def test_an_idle_writer_purges_and_vacuums(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "IDLE_AFTER", 0.001)
    monkeypatch.setattr(maintenance, "VACUUM_FREE_PAGES", 10)
    tidy = threading.Event()
    vacuum = Maintenance._vacuum

    def vacuum_and_tell(one: Maintenance) -> None:
        vacuum(one)
        if ended and not one.has_work and not query(path, "SELECT session_id FROM sessions"):
            tidy.set()

    monkeypatch.setattr(Maintenance, "_vacuum", vacuum_and_tell)
    ended: list[int] = []
    _, writer = opened()
    write_set = queued(1, list(range(1, 10001)), b"x" * 500)
    write_set.saved(SESSIONS)[:] = [session_row(1)]
    writer.commit(write_set)
    query(path, "PRAGMA wal_checkpoint(PASSIVE)")
    (full,) = query(path, "PRAGMA page_count")
    assert path.stat().st_size == full * 4096
    write_set = WriteSet()
    write_set.removed(SESSIONS)[:] = [1]
    ended.append(1)
    writer.commit(write_set)
    assert tidy.wait(30)
    assert query(path, "SELECT count(*) FROM messages") == [0]
    assert query(path, "PRAGMA page_count")[0] < full / 20
    assert path.stat().st_size < full / 20 * 4096


def test_the_wal_stays_small(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "CHECKPOINT_PAGES", 100)
    _, writer = opened()
    for number in range(200):
        writer.commit(queued(1, [number + 1], b"x" * 40_000))
    assert path.stat().st_size > 200 * 40_000 * 0.9
    assert path.with_name("broker.db-wal").stat().st_size < 200 * 4096


def test_a_reader_delays_the_checkpoint_but_not_the_writer(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(maintenance, "CHECKPOINT_PAGES", 20)
    monkeypatch.setattr(maintenance, "WAL_LIMIT_PAGES", 100)
    monkeypatch.setattr(maintenance, "READERS_WAIT_MS", 1)
    _, writer = opened()
    writer.commit(queued(1, [1]))
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM messages").fetchone() == (1,)
    for number in range(2, 32):
        writer.commit(queued(1, [number], b"x" * 40_000))
    assert reader.execute("SELECT count(*) FROM messages").fetchone() == (1,)
    assert any("event=write_ahead_log_long " in record.message for record in caplog.records)
    reader.close()
    size = path.with_name("broker.db-wal").stat().st_size
    for number in range(32, 132):
        writer.commit(queued(1, [number], b"x" * 40_000))
    assert path.with_name("broker.db-wal").stat().st_size <= size + 100 * 4096
