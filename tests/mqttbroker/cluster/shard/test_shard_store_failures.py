"""A shard's store whose disk or tables fail: it waits, ends for another node, or makes its tables again, and says so."""

from __future__ import annotations

import asyncio
import errno
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop
from support.core import wait_until
from support.full_store import overwrite
from support.memory_log import CLUSTER, TIMING, MemoryTopic, memory_store
from support.patience import PATIENCE
from support.store_model import RandomCommits, check_reads, check_recovered
from support.store_writer import Writer

from mqttbroker.cluster.log.records import TAKEOVER, Header, encode_record
from mqttbroker.cluster.shard.snapshot_keeper import SnapshotKeeper
from mqttbroker.cluster.shard.snapshots import Snapshots
from mqttbroker.cluster.shard.store import KafkaStore, Sizes
from mqttbroker.cluster.shard.tables import DATABASE, ShardTables
from sessions.store.interface import CorruptStore, StoreError
from sessions.write_set import WriteSet

pytestmark = pytest.mark.one_build


def lost(reason: str) -> None:
    raise AssertionError(reason)


def next_commit(commits: RandomCommits) -> WriteSet:
    write_set = commits.next()
    write_set.stream_messages = {}
    return write_set


def started(directory: Path) -> tuple[KafkaStore, queue.SimpleQueue[str]]:
    """A store without anything to commit, and the reasons why it ended."""
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    store = memory_store(MemoryTopic(), directory, "one", reasons.put)
    store.recover()
    store.start(lambda *answer: None, lambda *read: None)
    return store, reasons


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [line for line in caplog.messages if line.startswith(f"event={event} ")]


def on_tables(store: KafkaStore, function: Callable[[], object]) -> None:
    """Call a function on the thread of the tables."""
    store._follower._executor.submit(function).result(PATIENCE)


def limit_pages(store: KafkaStore, more: int) -> None:
    """Let the database grow by so many pages, as on a disk that is nearly full."""
    connection = store._follower.tables.database.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + more}")


def filled(memory: MemoryTopic, directory: Path, count: int = 30) -> RandomCommits:
    """The commits of a store that was stopped."""
    commits = RandomCommits(1)
    store = memory_store(memory, directory, "first", lost)
    store.recover()
    writer = Writer(store)  # type: ignore[arg-type]
    for _ in range(count):
        assert writer.outcome(next_commit(commits)) is None
    store.stop()
    return commits


@pytest.mark.parametrize("fault", ["database full", "tidying fails"])
def test_what_a_failing_disk_does_not_take_is_applied_when_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, commits = MemoryTopic(), RandomCommits(3)
    store = memory_store(memory, tmp_path, "one", lost)
    store.recover()
    writer = Writer(store)  # type: ignore[arg-type]
    assert writer.outcome(next_commit(commits)) is None
    if fault == "database full":
        on_tables(store, lambda: limit_pages(store, 0))
    else:

        def fail() -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(store._follower.tables.database, "wal_pages", fail)
    for _ in range(30):
        assert writer.outcome(next_commit(commits)) is None
    wait_until(lambda: lines(caplog, "store_trouble"))
    (line,) = lines(caplog, "store_trouble")
    assert "reason=" in line and ("full" in line or "No space" in line)
    assert bool(store.status().problem) == (fault == "database full")
    if fault == "database full":
        on_tables(store, lambda: limit_pages(store, 10**6))
    else:
        monkeypatch.undo()
    assert writer.outcome(next_commit(commits)) is None
    wait_until(lambda: not store.status().problem)
    check_reads(writer, commits.rows)
    store.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_defect_behind_the_log_ends_the_store_and_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, reasons = started(tmp_path)

    async def fail(shards: object) -> dict[int, int]:
        raise RuntimeError("the handler is closed")

    monkeypatch.setattr(store._kafka, "ends", fail)
    assert "a defect" in reasons.get(timeout=PATIENCE)
    assert any("event=defect in=s" in line for line in caplog.messages)
    store.stop()


def test_the_loop_of_the_log_does_not_spin_when_a_task_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reasons = started(tmp_path)

    def fail(tables: ShardTables) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(ShardTables, "apply", fail)
    assert "defect" in reasons.get(timeout=PATIENCE)
    thread = store._thread
    assert thread is not None and thread.native_id is not None
    before = cpu_seconds(thread)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 0.5)
    assert cpu_seconds(thread) - before < 0.25
    monkeypatch.undo()
    store.stop()


def cpu_seconds(thread: threading.Thread) -> float:
    fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_commits_wait_for_tables_that_are_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, commits = MemoryTopic(), RandomCommits(4)
    store = memory_store(memory, tmp_path, "one", lost, TIMING, Sizes(max_unapplied=20_000))
    store.recover()
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    store.start(lambda *answer: answers.put(answer), lambda *read: None)
    on_tables(store, lambda: limit_pages(store, 0))
    store.submit(next_commit(commits))
    count = 0

    def stuck() -> bool:
        nonlocal count
        while not answers.empty():
            assert answers.get() and count < 1000
            store.submit(next_commit(commits))
            count += 1
        return store.undecided() and store.progress().unapplied_bytes > 20_000

    wait_until(stuck)
    assert answers.empty()
    on_tables(store, lambda: limit_pages(store, 10**6))
    assert answers.get(timeout=PATIENCE)
    store.stop()


def test_tables_that_cannot_be_written_for_long_end_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqttbroker.cluster.shard.tables_follower.GIVE_UP_AFTER", 0.3)
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    memory, commits = MemoryTopic(), RandomCommits(4)
    store = memory_store(memory, tmp_path, "one", reasons.put, TIMING, Sizes(max_unapplied=1000))
    store.recover()
    store.start(lambda *answer: None, lambda *read: None)
    on_tables(store, lambda: limit_pages(store, 0))
    for _ in range(30):
        store.submit(next_commit(commits))
    assert "full" in reasons.get(timeout=PATIENCE)
    store.stop()


# -- damage -------------------------------------------------------------------------


def zero_pages(file: Path, first: int = 2) -> None:
    for page in range(first, file.stat().st_size // 4096 + 1):
        overwrite(file, page, lambda data: bytes(len(data)))


def damage_header(file: Path) -> None:
    overwrite(file, 1, lambda data: b"\xff" * len(data))


def drop_sessions(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("DELETE FROM sessions")
    connection.execute("INSERT OR IGNORE INTO subscriptions VALUES (7777, 'a/b', 1, 0, 0)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("damage", [damage_header, zero_pages, drop_sessions])
def test_damaged_tables_are_put_aside_and_made_again_from_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    memory = MemoryTopic()
    commits = filled(memory, tmp_path)
    damage(tmp_path / DATABASE)
    reasons = []
    for start in range(2):
        store = memory_store(memory, tmp_path, f"again-{start}", reasons.append)
        try:
            recovered = store.recover()
            break
        except StoreError as error:  # found as late as when the rows are read
            reasons.append(str(error))
    assert len(reasons) <= 1 and all(str(tmp_path / DATABASE) in reason for reason in reasons)
    check_recovered(recovered, commits.rows)
    (line,) = lines(caplog, "store_damaged")
    assert DATABASE in line
    assert (tmp_path / f"{DATABASE}.damaged").exists() and not (tmp_path / f"{DATABASE}.suspect").exists()
    store.start(lambda *answer: None, lambda *read: None)
    store.stop()


def keeper(memory: MemoryTopic, directory: Path, failed: Callable[[sqlite3.Error], object]) -> SnapshotKeeper:
    """One whose shard is another node's, and whose log still has everything."""
    snapshots = Snapshots({}, "c", "node", time.time)
    return SnapshotKeeper(snapshots, 0, 1, "c.log", directory, 1, 0.0, lambda: 1, lambda: False, lambda: None, failed)


@pytest.mark.parametrize("damage", [damage_header, zero_pages])
async def test_damaged_tables_are_noticed_before_a_snapshot_is_looked_for(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    memory = MemoryTopic()
    await asyncio.to_thread(filled, memory, tmp_path)
    damage(tmp_path / DATABASE)
    with pytest.raises(CorruptStore, match=DATABASE):
        await keeper(memory, tmp_path, lost_error).prepare(0)


async def test_a_database_that_was_not_finished_has_nothing_of_the_log(tmp_path: Path) -> None:
    (tmp_path / DATABASE).touch()
    await keeper(MemoryTopic(), tmp_path, lost_error).prepare(0)


async def test_damage_that_a_snapshot_meets_is_told(tmp_path: Path) -> None:
    memory = MemoryTopic()
    await asyncio.to_thread(filled, memory, tmp_path)
    zero_pages(tmp_path / DATABASE)
    errors: list[sqlite3.Error] = []
    snapshots = keeper(memory, tmp_path, errors.append)
    snapshots.request()
    writing = asyncio.create_task(snapshots.run())
    async with asyncio.timeout(PATIENCE):
        while not errors:
            await asyncio.sleep(0.01)
    writing.cancel()
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    store = memory_store(MemoryTopic(), tmp_path / "store", "one", reasons.put)
    store.recover()
    store.start(lambda *answer: None, lambda *read: None)
    store.note_error(errors[0])
    assert "damaged" in reasons.get(timeout=PATIENCE)
    store.stop()


def lost_error(error: sqlite3.Error) -> None:
    raise AssertionError(error)


def test_damage_that_is_met_while_running_ends_the_store_and_its_next_start_mends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    memory = MemoryTopic()
    commits = filled(memory, tmp_path)
    store = memory_store(memory, tmp_path, "second", reasons.put)
    store.recover()
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    store.start(lambda *answer: answers.put(answer), lambda *read: None)

    def damage() -> None:
        store._follower.tables.database.checkpoint("TRUNCATE")
        store._follower.tables.database.connection.execute("PRAGMA shrink_memory")
        zero_pages(tmp_path / DATABASE)

    on_tables(store, damage)
    store.submit(next_commit(commits))
    reason = reasons.get(timeout=PATIENCE)
    assert DATABASE in reason and "malformed" in reason
    store.stop()
    assert not lines(caplog, "store_trouble")
    again = memory_store(memory, tmp_path, "third", lost)
    recovered = again.recover()
    if answers.empty():
        again.start(lambda *answer: None, lambda *read: None)
    check_recovered(recovered, commits.rows)
    assert len(lines(caplog, "store_damaged")) == 1
    again.stop()


# -- Kafka away ---------------------------------------------------------------------


def test_a_store_whose_kafka_is_away_says_so_without_any_commit(tmp_path: Path) -> None:
    memory, commits = MemoryTopic(), RandomCommits(5)
    store = memory_store(memory, tmp_path, "one", lost)
    store.recover()
    writer = Writer(store)  # type: ignore[arg-type]
    assert writer.outcome(next_commit(commits)) is None
    assert not store.status().problem and not store.undecided()
    memory.away = True
    wait_until(store.undecided)
    assert "Kafka" in store.status().problem
    memory.away = False
    wait_until(lambda: not store.undecided() and not store.status().problem)
    assert writer.outcome(next_commit(commits)) is None
    store.stop()


def test_a_commit_that_is_submitted_while_kafka_is_away_is_undecided_until_it_is_back(tmp_path: Path) -> None:
    memory, commits = MemoryTopic(), RandomCommits(5)
    store = memory_store(memory, tmp_path, "one", lost)
    store.recover()
    answers: queue.SimpleQueue[tuple[object, object]] = queue.SimpleQueue()
    store.start(lambda *answer: answers.put(answer), lambda *read: None)
    memory.away = True
    wait_until(lambda: store.status().state.value == "checking")
    store.submit(next_commit(commits))
    wait_until(store.undecided)
    assert answers.empty()
    memory.away = False
    assert answers.get(timeout=PATIENCE)[1] is None
    store.stop()


# -- bytes of others in the log -------------------------------------------------------


FOREIGN = [b"", b"{}", b"MQ" + bytes(200), bytes(10_000)]


def test_records_of_another_program_are_void_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory, commits = MemoryTopic(), RandomCommits(6)
    memory.append(0, FOREIGN[0])
    for start in range(2):
        store = memory_store(memory, tmp_path, f"node-{start}", lost, sizes=Sizes(max_record=200))
        check_recovered(store.recover(), commits.rows)
        writer = Writer(store)  # type: ignore[arg-type]
        for number in range(20):
            if number % 5 == 0:
                memory.append(0, FOREIGN[number // 5])
            assert writer.outcome(next_commit(commits)) is None
        check_reads(writer, commits.rows)
        store.stop()
    found = [line for line in lines(caplog, "void_record") if " topic=memory partition=0 offset=" in line]
    offsets = [offset for offset, record in enumerate(memory.records[0]) if record in FOREIGN]
    assert [int(line.split("offset=")[1].split()[0]) for line in found] == offsets and len(offsets) == 9


@pytest.mark.parametrize("body", [b"", b"\xc1"])
def test_a_takeover_is_logged_with_its_node_and_one_without_a_name_counts_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    caplog.set_level("INFO", "mqttbroker.cluster")
    memory, commits = MemoryTopic(), RandomCommits(7)
    first = memory_store(memory, tmp_path, "one", lost)
    first.recover()
    assert Writer(first).outcome(next_commit(commits)) is None  # type: ignore[arg-type]
    epoch = first.status().epoch
    first.stop()
    memory.append(0, encode_record(Header(TAKEOVER, 0, CLUSTER, b"stranger", epoch, 0), body))
    (tmp_path / "two").mkdir()
    second = memory_store(memory, tmp_path / "two", "two", lost)
    check_recovered(second.recover(), commits.rows)
    second.stop()
    found = lines(caplog, "shard_taken_over")
    assert f"node=one address= version= owner={b'one-----'.hex()} epoch={epoch}" in found[0]
    assert "node= " in found[1] and b"stranger".hex() in found[1]


def test_a_record_of_a_newer_program_ends_the_store(tmp_path: Path) -> None:
    memory = MemoryTopic()
    memory.append(0, encode_record(Header(9, 0, CLUSTER, b"node----", 0, 1), b""))
    with pytest.raises(StoreError, match="memory, partition 0, offset 0: .* written by a newer program"):
        memory_store(memory, tmp_path, "one", lost).recover()


def test_a_defect_at_the_end_of_the_store_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store then neither commits the write sets that were submitted, nor releases the shard."""
    store, reasons = started(tmp_path)

    async def fail(shard: object) -> None:
        raise RuntimeError("the handler is closed")

    monkeypatch.setattr(store, "_drain", fail)
    store.stop()
    assert "the handler is closed" in reasons.get(timeout=PATIENCE)
    assert "event=defect in=log_thread" in caplog.messages


def test_a_loop_that_cannot_be_made_does_not_leave_the_start_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Coroutine[object, object, None]) -> None:
        work.close()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(uvloop, "run", fail)
    store = memory_store(MemoryTopic(), tmp_path, "one", lost)
    with pytest.raises(StoreError, match="Too many open files"):
        store.recover()


def test_the_tables_get_nothing_behind_a_record_that_they_could_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    memory, commits = MemoryTopic(), RandomCommits(3)
    store = memory_store(memory, tmp_path, "one", reasons.put)
    store.recover()
    writer = Writer(store)  # type: ignore[arg-type]
    assert writer.outcome(next_commit(commits)) is None
    added: list[object] = []

    def fail(state: object, body: bytes) -> None:
        added.append(state)
        raise RuntimeError("no such field")

    monkeypatch.setattr(store._follower.tables, "changed", fail)
    assert writer.outcome(next_commit(commits)) is None
    assert "no such field" in reasons.get(timeout=PATIENCE)
    assert "event=defect in=tables" in caplog.messages
    store._follower._submit(store._follower._add, [(None, b"x")]).result(PATIENCE)
    assert len(added) == 1
    store.stop()


def test_a_read_that_is_not_answered_because_of_a_defect_ends_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, reasons = started(tmp_path)

    def fail(query: object) -> None:
        raise RuntimeError("no such field")

    monkeypatch.setattr(store._follower.tables.tables, "run_query", fail)
    write_set = WriteSet()
    write_set.queries = [None]  # type: ignore[list-item]
    store._follower.read_rows(write_set, lambda *read: None)
    assert "no such field" in reasons.get(timeout=PATIENCE)
    assert "event=defect in=tables" in caplog.messages
    store.stop()
