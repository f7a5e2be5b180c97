"""The logs of all shards as the partitions of one Kafka topic: appends, their ends, and their records in order.

An append is one produce request with ``acks=all``, sent once: the retries of a Kafka producer would append it twice, or after
its outcome was reported as unknown. All appends of one iteration of the event loop to one Kafka broker are one request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from aiokafka.errors import KafkaError, NodeNotReadyError, for_code
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from mqttbroker.cluster.kafka.brokers import ASK_TIMEOUT, ASKS, KafkaBrokers
from mqttbroker.cluster.kafka.reader import RETRY_AFTER, LogReader, OnRecord

log = logging.getLogger("mqttbroker.cluster")

ALL_REPLICAS: Final = -1
APPENDS: Final = "append"  # the purpose of a connection
LATE: Final = 0.5  # seconds after which it is looked whether the Kafka broker that owes an answer still leads
ANSWER_MARGIN: Final = 1.0  # seconds that a Kafka broker's answer may take beyond the time it may wait for replicas
BATCH_OVERHEAD: Final = 1024  # bytes of a batch of one record, at most, beside the record

LATEST: Final = -1  # in ListOffsets
EARLIEST: Final = -2
READ_UNCOMMITTED: Final = 0

# Errors that a Kafka broker finds before it appends anything. All others may come from a record that is in the log: also
# NOT_LEADER_OR_FOLLOWER, which answers an append whose broker stops leading while it waits for the replicas.
NOT_APPENDED: Final = {
    2: "CORRUPT_MESSAGE",
    10: "MESSAGE_TOO_LARGE",
    17: "INVALID_TOPIC_EXCEPTION",
    18: "RECORD_LIST_TOO_LARGE",
    19: "NOT_ENOUGH_REPLICAS",
    21: "INVALID_REQUIRED_ACKS",
    29: "TOPIC_AUTHORIZATION_FAILED",
    31: "CLUSTER_AUTHORIZATION_FAILED",
    43: "UNSUPPORTED_FOR_MESSAGE_FORMAT",
    87: "INVALID_RECORD",
}


class Appended(NamedTuple):
    """The outcome of an append: its ``offset``; else -1, the ``reason``, and whether it is certain that nothing was appended."""

    offset: int
    reason: str = ""
    refused: bool = False


class LogFailure(Exception):
    """The logs cannot be read; the text is one line."""


class KafkaLog:
    """The logs in ``topic``. All methods are for the event loop that runs `start`.

    ``connection`` are the arguments of aiokafka's clients for the bootstrap servers and their security. An append takes
    ``append_timeout`` seconds at most, and `ANSWER_MARGIN` more until its outcome is reported as unknown. It is unknown as soon as
    another Kafka broker is found to lead the log.
    """

    def __init__(self, connection: dict[str, Any], topic: str, append_timeout: float) -> None:
        self.topic = topic
        self._append_timeout = append_timeout
        self._connection = connection
        self._brokers = KafkaBrokers(connection, topic)
        self._stopped = False
        self._gathered: dict[int, list[tuple[int, bytes, asyncio.Future[Appended]]]] = {}  # by the leader
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: list[LogReader] = []

    async def start(self) -> int:
        """Connect; returns the number of shards. Raises `LogFailure`."""
        brokers = self._brokers = KafkaBrokers(self._connection, self.topic)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._append_timeout
        answered = await brokers.refresh()
        while answered and not brokers.partitions and loop.time() < until:
            await asyncio.sleep(RETRY_AFTER)
            answered = await brokers.refresh()
        if brokers.partitions:
            return brokers.partitions
        await brokers.close()
        raise LogFailure(f"{self.topic}: {brokers.problem}")

    async def stop(self) -> None:
        """Close all connections; appends under way are reported as unknown."""
        self._stopped = True
        for reader in self._readers:
            await reader.stop()
        await self._brokers.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_MARGIN)

    # -- appends ------------------------------------------------------------------

    async def append(self, shard: int, record: bytes) -> Appended:
        """Append one record."""
        leader = await self._leader(shard, APPENDS, self._append_timeout)
        if leader is None:
            return Appended(-1, "the log has no leader that can be reached", True)
        outcome: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        gathered = self._gathered.setdefault(leader, [])
        gathered.append((shard, record, outcome))
        if len(gathered) == 1:
            asyncio.get_running_loop().call_soon(self._send, leader)
        return await outcome

    async def _leader(self, shard: int, purpose: str, timeout: float) -> int | None:
        """The leader of a shard's log, connected for this purpose; None if there is none within so many seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while not self._stopped:
            leader = self._brokers.leader(shard)
            if leader is not None:
                with suppress(KafkaError, OSError):
                    await self._brokers.connect(leader, purpose)
                    return leader
            if loop.time() >= until:
                break
            with suppress(KafkaError):
                await self._brokers.refresh()
            if self._brokers.leader(shard) in (None, leader):
                await asyncio.sleep(RETRY_AFTER)
        return None

    def _send(self, leader: int) -> None:
        task = asyncio.get_running_loop().create_task(self._produce(leader, self._gathered.pop(leader)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _produce(self, leader: int, appends: Sequence[tuple[int, bytes, asyncio.Future[Appended]]]) -> None:
        """Send one request, and report what came of it."""
        try:
            outcomes = await self._answered(leader, appends)
        except Exception as error:
            log.exception("event=defect in=append")
            outcomes = dict.fromkeys((shard for shard, _, _ in appends), Appended(-1, f"a defect: {error!r}"))
        for shard, _, outcome in appends:
            if not outcome.done():
                outcome.set_result(outcomes.get(shard, Appended(-1, "the answer does not name the shard")))
        if any(outcome.offset < 0 for outcome in outcomes.values()):
            self._brokers.refresh_soon()

    async def _answered(self, leader: int, appends: Sequence[tuple[int, bytes, asyncio.Future[Appended]]]) -> dict[int, Appended]:
        """The outcomes of one request, by shard. The request is given up when another Kafka broker leads one of the logs."""
        request = asyncio.get_running_loop().create_task(self._request(leader, appends))
        while not request.done():
            await asyncio.wait([request], timeout=LATE)
            if not request.done():
                with suppress(KafkaError):
                    await self._brokers.refresh()
                if any(self._brokers.leader(shard) not in (leader, None) for shard, _, _ in appends):
                    self._brokers.give_up(leader, APPENDS)
                    await asyncio.wait([request])
        return request.result()

    async def _request(self, leader: int, appends: Sequence[tuple[int, bytes, asyncio.Future[Appended]]]) -> dict[int, Appended]:
        request = ProduceRequest(
            None,
            ALL_REPLICAS,
            int(self._append_timeout * 1000),
            [(self.topic, [(shard, encode_batch(record)) for shard, record, _ in appends])],
        )
        shards = [shard for shard, _, _ in appends]
        try:
            answer = await self._brokers.send(leader, APPENDS, request, self._append_timeout + ANSWER_MARGIN)
        except NodeNotReadyError as error:
            return dict.fromkeys(shards, Appended(-1, f"not sent: {error!r}", True))
        except (KafkaError, OSError) as error:
            return dict.fromkeys(shards, Appended(-1, repr(error)))
        return {partition: _outcome(code, offset) for _, partitions in answer.topics for partition, code, offset, *_ in partitions}

    # -- ends ---------------------------------------------------------------------

    async def ends(self, shards: Sequence[int]) -> dict[int, int]:
        """The ends of the logs at a time after the call: records before them never go. Leaves out those that are not known."""
        return await self._offsets(shards, LATEST)

    async def starts(self, shards: Sequence[int]) -> dict[int, int]:
        """The first offsets that the logs have. Leaves out those that are not known."""
        return await self._offsets(shards, EARLIEST)

    async def _offsets(self, shards: Sequence[int], which: int) -> dict[int, int]:
        brokers = self._brokers
        by_leader: dict[int, list[int]] = {}
        for shard in shards:
            leader = brokers.leader(shard)
            if leader is not None:
                by_leader.setdefault(leader, []).append(shard)
        found: dict[int, int] = {}
        for answer in await asyncio.gather(*(self._offsets_of(leader, led, which) for leader, led in by_leader.items())):
            found.update(answer)
        if len(found) < len(shards) and not self._stopped:
            with suppress(KafkaError):
                await brokers.refresh()
        return found

    async def _offsets_of(self, leader: int, shards: list[int], which: int) -> dict[int, int]:
        request = OffsetRequest(-1, READ_UNCOMMITTED, [(self.topic, [(shard, which) for shard in shards])])
        try:
            answer = await self._brokers.send(leader, ASKS, request, ASK_TIMEOUT)
        except (KafkaError, OSError):
            return {}
        return {partition: offset for _, partitions in answer.topics for partition, code, _, offset, *_ in partitions if code == 0}

    def reader(self, starts: dict[int, int], on_record: OnRecord) -> LogReader:
        """A reader of the logs of these shards, from these offsets on; ``on_record(shard, offset, record)``."""
        reader = LogReader(self._brokers, self.topic, starts, on_record)
        self._readers.append(reader)
        return reader


def encode_batch(record: bytes) -> bytes:
    """A record batch of Kafka with one record, without a key."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=len(record) + BATCH_OVERHEAD,
    )
    builder.append(0, timestamp=None, key=None, value=record, headers=[])
    return bytes(builder.build())


def _outcome(code: int, offset: int) -> Appended:
    if code == 0:
        return Appended(offset)
    if code in NOT_APPENDED:
        return Appended(-1, NOT_APPENDED[code], True)
    return Appended(-1, f"{for_code(code).__name__}")
