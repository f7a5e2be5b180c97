"""Appends to logs and reads of them, whatever single Kafka brokers do: what is acknowledged is there once, and others do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from support.fake_kafka import TOPIC, FakeKafka
from support.patience import PATIENCE

from mqttbroker.cluster.kafka import brokers as kafka_brokers
from mqttbroker.cluster.kafka import reader as log_reader
from mqttbroker.cluster.kafka.log import Appended, KafkaLog, LogFailure
from mqttbroker.cluster.kafka.reader import LogReader

pytestmark = pytest.mark.one_build

APPEND_TIMEOUT = 20.0  # no test waits for it


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def started(kafka: FakeKafka, timeout: float = APPEND_TIMEOUT) -> AsyncIterator[KafkaLog]:
    log = KafkaLog(kafka.connection, TOPIC, timeout)
    assert await log.start() == len(kafka.logs)
    try:
        yield log
    finally:
        await log.stop()


def read(log: KafkaLog, *shards: int) -> tuple[LogReader, list[tuple[int, int, bytes]]]:
    found: list[tuple[int, int, bytes]] = []
    reader = log.reader(dict.fromkeys(shards, 0), lambda *record: found.append(record))
    reader.start()
    return reader, found


async def test_what_is_appended_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch, partitions=2)
    async with started(kafka) as log:
        _, found = read(log, 0, 1)
        assert [await log.append(0, b"a"), await log.append(1, b"b"), await log.append(0, b"c")] == [Appended(0), Appended(0), Appended(1)]
        assert await log.ends([0, 1]) == {0: 2, 1: 1} and await log.starts([0]) == {0: 0}
        await until(lambda: sorted(found) == [(0, 0, b"a"), (0, 1, b"c"), (1, 0, b"b")])


async def test_a_leader_that_is_isolated_is_left_as_soon_as_another_one_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    loop = asyncio.get_running_loop()
    async with started(kafka) as log:
        _, found = read(log, 0)
        await log.append(0, b"a")
        kafka.isolated.add(1)
        lost = asyncio.create_task(log.append(0, b"b"))
        await asyncio.sleep(0.2)
        assert not lost.done()
        kafka.leaders[0] = 2
        kafka.fenced = {1}
        elected = loop.time()
        answer = await lost
        assert answer.offset == -1 and not answer.refused
        ends: dict[int, int] = {}
        while not ends:
            ends = await log.ends([0])
        assert await log.append(0, b"c") == Appended(1)
        await until(lambda: found == [(0, 0, b"a"), (0, 1, b"c")])
        assert loop.time() - elected < 3.0


async def test_a_broker_that_is_isolated_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first metadata, nor those that look for a leader, nor the logs that others lead."""
    kafka = FakeKafka(monkeypatch, partitions=3)
    kafka.isolated.add(3)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with started(kafka) as log:
        _, found = read(log, 0, 1, 2)
        waiting = asyncio.create_task(log.append(2, b"c"))
        for number in range(20):
            assert await log.append(0, b"a%d" % number) == Appended(number)
        kafka.leaders[1] = 1
        while (await log.append(1, b"b")).offset < 0:
            pass
        await until(lambda: len(found) == 21)
        assert loop.time() - began < 3.0
        kafka.leaders[2] = 1
        assert (await waiting).offset in (-1, 0)


async def test_a_broker_that_is_cut_off_from_the_others_is_outvoted(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    kafka.behind[1] = {0: 1}
    kafka.leaders[0] = 2
    async with started(kafka) as log:
        assert await log.append(0, b"a") == Appended(0)


async def test_an_append_without_a_leader_is_refused_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    async with started(kafka, 0.3) as log:
        kafka.leaders[0] = -1
        assert (await log._brokers.refresh(), log._brokers.leader(0)) == (True, None)
        answer = await log.append(0, b"a")
        assert answer.refused and "no leader" in answer.reason
        assert await log.ends([0]) == {}
        kafka.leaders[0] = 3
        await log.ends([0])
        assert await log.append(0, b"a") == Appended(0)


async def test_an_append_that_is_not_answered_is_unknown_and_a_new_connection_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqttbroker.cluster.kafka.log.ANSWER_MARGIN", 0.1)
    kafka = FakeKafka(monkeypatch)
    async with started(kafka, 0.2) as log:
        kafka.hears = False
        answer = await log.append(0, b"a")
        assert answer.offset == -1 and not answer.refused and "no answer" in answer.reason
        kafka.hears = True
        assert await log.append(0, b"b") == Appended(1)


async def test_a_defect_leaves_no_append_without_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    async with started(kafka) as log:

        async def fail(*arguments: object) -> None:
            raise RuntimeError("the handler is closed")

        monkeypatch.setattr(log._brokers, "send", fail)
        answer = await log.append(0, b"a")
        assert answer.offset == -1 and not answer.refused and "the handler is closed" in answer.reason


async def test_a_cancelled_append_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    async with started(kafka) as log:
        kafka.leaders[0] = -1
        await log._brokers.refresh()
        appending = asyncio.create_task(log.append(0, b"a"))
        await asyncio.sleep(0.15)
        appending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await appending


async def test_stopping_ends_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    async with started(kafka) as log:
        _, found = read(log, 0)
        await log.append(0, b"a")
        await until(lambda: len(found) == 1)
        kafka.isolated |= {1, 2, 3}
        appending = asyncio.create_task(log.append(0, b"b"))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5.0):
            await log.stop()
            answer = await appending
        assert answer.offset == -1 and not answer.refused


async def test_no_kafka_or_no_topic_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    with pytest.raises(LogFailure, match="^absent: UnknownTopicOrPartitionError$"):
        await KafkaLog(kafka.connection, "absent", 0.2).start()
    kafka.refused |= {1, 2, 3}
    with pytest.raises(LogFailure, match="^fake: no Kafka broker answers: .*fake:[123]: .*refused"):
        await KafkaLog(kafka.connection, TOPIC, 0.2).start()
    kafka.refused -= {2}
    kafka.isolated |= {3}
    kafka.leaders[0] = 2
    async with started(kafka) as log:
        assert await log.append(0, b"a") == Appended(0)


# -- reading ------------------------------------------------------------------------


async def test_a_held_log_is_not_read_on_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "FETCHED_AT_ONCE", 10)
    kafka = FakeKafka(monkeypatch, count=1, partitions=2)
    kafka.logs[0] = [b"%d" % number for number in range(100)]
    async with started(kafka) as log:
        found: list[tuple[int, int, bytes]] = []
        reader = log.reader({0: 0, 1: 0}, lambda *record: found.append(record))

        def hold() -> None:
            if len(found) >= 25:
                reader.held = {0}

        reader.on_pause = hold
        reader.start()
        await until(lambda: 0 in reader.held)
        held = len(found)
        assert held <= 40
        for number in range(5):
            await log.append(1, b"x%d" % number)
        await until(lambda: sum(1 for one in found if one[0] == 1) == 5)
        assert len(found) == held + 5 and reader.ends[0] == 100
        reader.on_pause, reader.held = None, set()
        await until(lambda: [one[1] for one in found if one[0] == 0] == list(range(100)))


async def test_a_log_that_was_held_goes_on_behind_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    async with started(kafka) as log:
        reader, found = read(log, 0)
        await log.append(0, b"read")
        await until(lambda: len(found) == 1)
        reader.held = {0}
        for number in range(1, 5):
            await log.append(0, b"known %d" % number)
        reader.skip_to(0, 5)
        reader.skip_to(0, 3)  # never back
        reader.held = set()
        await log.append(0, b"new")
        await until(lambda: len(found) > 1 and found[-1] == (0, 5, b"new"))
        # A fetch that was under way when the log was held may have had the first of them.
        assert [record for _, _, record in found if record.startswith(b"known")] in ([], [b"known 1"])


async def test_records_that_are_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    kafka.logs[0], kafka.starts[0] = [b"a"] * 10, 5
    async with started(kafka) as log:
        reader, _ = read(log, 0)
        await until(lambda: bool(reader.failure))
        assert reader.failure.startswith("fake: records are missing: ") and "partition 0, offset 0" in reader.failure


async def test_a_damaged_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka(monkeypatch)
    kafka.logs[0] = [b"abcdefgh"]
    whole = kafka.fetched
    monkeypatch.setattr(kafka, "fetched", lambda *place: whole(*place).replace(b"abcd", b"abce"))
    async with started(kafka) as log:
        reader, _ = read(log, 0)
        await until(lambda: bool(reader.failure))
        assert reader.failure == "fake: a batch of records before offset 1 has a wrong checksum"


async def test_a_defect_in_the_question_to_one_kafka_broker_leaves_the_answers_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = FakeKafka(monkeypatch)
    connect = kafka.connect

    async def fail(host: str, port: int, **options: object) -> object:
        if port == 2:
            raise RuntimeError("the handler is closed")
        return await connect(host, port, **options)

    monkeypatch.setattr(kafka_brokers, "create_conn", fail)
    async with started(kafka) as log:
        assert await log.append(0, b"a") == Appended(0)
    assert any(line.startswith("event=defect in=metadata address=fake:2") for line in caplog.messages)
