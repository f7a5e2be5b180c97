"""The feed of a bus: valid records of other shards' logs, from a mark on, no more than there is room for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.kafka import KafkaCluster

from mqttbroker.cluster.bus.bus import BusRecord, first_mark
from mqttbroker.cluster.bus.feed import FeedBatches, LogFeed
from mqttbroker.cluster.kafka import reader as log_reader
from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import CHANGES, NO_EPOCH, RELEASE, TAKEOVER, Header, encode_record
from sessions.message import Message
from sessions.rows import MarkRow
from sessions.write_set import BusMessages, WriteSet

CLUSTER, A, B = b"cluster1", b"owner--a", b"owner--b"
WAIT_S = 60.0


def takeover(log: int, owner: bytes, epoch: int) -> bytes:
    return encode_record(Header(TAKEOVER, log, CLUSTER, owner, epoch, 0), b"")


def published(log: int, owner: bytes, epoch: int, sequence: int, *topics: str, share: int = -1) -> bytes:
    write_set = WriteSet()
    if topics:
        write_set.stream_messages = {("measurements", 3): [Message(topic, b"x", 1, False, b"", "p", 1, 0) for topic in topics]}
        messages = [Message(topic, b"x" * 100, 1, False, b"", "p", 1, 0) for topic in topics]
        write_set.bus = BusMessages()
        if share < 0:
            write_set.bus.to_all = messages
        else:
            write_set.bus.to_members = {("$share/g/#", share): messages}
    return encode_record(Header(CHANGES, log, CLUSTER, owner, epoch, sequence), encode_body(write_set))


LOG = [
    takeover(1, A, NO_EPOCH),
    published(1, A, 0, 1, "a", "b"),
    published(1, A, 0, 1, "a", "b"),  # appended twice
    published(1, A, 0, 2),
    published(1, A, 0, 3, "c", share=2),
    takeover(1, B, 0),
    published(1, A, 0, 4, "void"),
    published(1, B, 5, 1, "d", share=0),
    encode_record(Header(RELEASE, 1, CLUSTER, B, 5, 2), b""),
]
TOPICS = [[b"a", b"b"], [b"d"]]


def topics(records: list[BusRecord]) -> list[list[bytes]]:
    return [section.topics for record in records for section in record.sections]


def test_what_is_void_or_for_others_is_passed_over_and_reading_goes_on_at_each_mark() -> None:
    marks = [first_mark(1)]
    batches = FeedBatches(0, marks[0], CLUSTER)
    found: list[BusRecord] = []
    for offset, record in enumerate(LOG):
        one = batches.read(offset, record)
        found += [one] if one is not None else []
        end = batches.pass_on()
        marks.append(end.after if end is not None else one.after if one is not None else marks[-1])
    assert topics(found) == TOPICS and batches.void == 2
    assert marks[-1] == MarkRow(1, 9, 0, 5, B, 2, True)
    assert batches.read(3, LOG[3]) is None  # read before
    for start, mark in enumerate(marks):
        again = FeedBatches(0, mark, CLUSTER)
        rest = [again.read(offset, LOG[offset]) for offset in range(start, len(LOG))]
        assert topics([one for one in rest if one is not None]) == [
            section.topics for record in found if record.before.offset >= start for section in record.sections
        ]


def test_a_record_of_another_log_is_named() -> None:
    with pytest.raises(ValueError, match="shard 1, offset 0: a record of shard 2 in the log of shard 1"):
        FeedBatches(0, first_mark(1), CLUSTER).read(0, takeover(2, A, NO_EPOCH))


def test_bytes_of_another_program_are_passed_over() -> None:
    batches = FeedBatches(0, first_mark(1), CLUSTER)
    log = [b"{}", b"", *LOG[:1], b"MQ" + bytes(60), LOG[1].replace((0).to_bytes(8, "little"), (2).to_bytes(8, "little"), 1)]
    found = [batches.read(offset, record) for offset, record in enumerate(log)]
    assert topics([one for one in found if one is not None]) == TOPICS[:1] and batches.void == 3


@pytest.mark.one_build
async def test_logs_in_kafka_are_read_as_far_as_there_is_room(kafka: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "FETCHED_AT_ONCE", 10)
    await kafka.create_topic("feed", 3)
    connection = {"bootstrap_servers": kafka.bootstrap}
    log = KafkaLog(connection, "feed", 5.0)
    await log.start()
    received: list[BusRecord] = []
    loop = asyncio.get_running_loop()
    failures: list[str] = []
    feed = LogFeed(log, 0, 3, CLUSTER, {}, 3 * 2000, loop.call_soon, received.extend, failures.append)
    try:
        for record in LOG:
            assert (await log.append(1, record)).offset >= 0
        feed.start()
        await until(lambda: any(one.after.offset == len(LOG) for one in received))
        assert topics(received) == TOPICS
        for sequence in range(100):
            record = takeover(2, A, NO_EPOCH) if sequence == 0 else published(2, A, 0, sequence, "e", "f")
            await log.append(2, record)
        ends: asyncio.Future[dict[int, int]] = loop.create_future()
        feed.find_ends(ends.set_result)
        assert await ends == {1: len(LOG), 2: 100}
        # Log 2 waits for room, log 1 does not wait for it.
        await until(lambda: sum(one.size for one in received if one.before.log == 2) > 2000)
        await log.append(1, takeover(1, A, 5))
        await until(lambda: any(one.before.log == 1 and one.after.offset > len(LOG) for one in received))
        assert max(one.after.offset for one in received if one.before.log == 2) < 100
        taken = 0
        while max(one.after.offset for one in received if one.before.log == 2) < 100:
            for one in received[taken:]:
                feed.taken(one.before.log, one.size)
            taken = len(received)
            await asyncio.sleep(0.01)
        assert (feed.end(1), feed.end(2)) == (len(LOG) + 1, 100)
        assert sum(len(section.topics) for one in received if one.before.log == 2 for section in one.sections) == 198
        assert not failures
    finally:
        await feed.stop()
        await log.stop()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


async def test_a_defect_that_leaves_a_search_for_ends_without_an_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients would wait for the answer for ever, and the core with them while it starts."""
    loop = asyncio.get_running_loop()
    log = KafkaLog({}, "feed", 5.0)

    async def fail(shards: object) -> dict[int, int]:
        raise RuntimeError("the handler is closed")

    monkeypatch.setattr(log, "ends", fail)
    failure: asyncio.Future[str] = loop.create_future()
    feed = LogFeed(log, 0, 2, CLUSTER, {}, 3 * 2000, loop.call_soon, lambda records: None, failure.set_result)
    feed.find_ends(lambda ends: None)
    async with asyncio.timeout(WAIT_S):
        assert "the handler is closed" in await failure
    await feed.stop()
