"""The logs of all shards as the partitions of one Kafka topic: appends, their ends, and their records in order.

An append is one produce request with ``acks=all``, sent once: the retries of a Kafka producer would append it twice, or after
its outcome was reported as unknown. All appends of one iteration of the event loop to one Kafka broker are one request.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, Callable, Dict, Final, List, NamedTuple, Optional, Sequence, Tuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, NodeNotReadyError, OffsetOutOfRangeError, StaleMetadata, for_code
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

log = logging.getLogger("mqttbroker.cluster")

ALL_REPLICAS: Final = -1
RETRY_AFTER: Final = 0.1  # seconds, where nothing was sent yet
ANSWER_MARGIN: Final = 1.0  # seconds that a Kafka broker's answer may take beyond the time it may wait for replicas
FETCH_WAIT_MS: Final = 500
HELD_WAIT_MS: Final = 20
FETCHED_AT_ONCE: Final = 500  # records
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


OnRecord = Callable[[int, int, bytes], None]


class KafkaLog:
    """The logs in ``topic``. All methods are for the event loop that runs `start`.

    ``connection`` are the arguments of aiokafka's clients for the bootstrap servers and their security. An append takes
    ``append_timeout`` seconds at most, and `ANSWER_MARGIN` more until its outcome is reported as unknown.
    """

    def __init__(self, connection: Dict[str, Any], topic: str, append_timeout: float) -> None:
        self.topic = topic
        self._connection = connection
        self._append_timeout = append_timeout
        self._timeout_ms = int((append_timeout + ANSWER_MARGIN) * 1000)
        self._client: Optional[AIOKafkaClient] = None
        self._gathered: Dict[int, List[Tuple[int, bytes, asyncio.Future[Appended]]]] = {}  # by the leader
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: List[LogReader] = []

    async def start(self) -> int:
        """Connect; returns the number of shards. Raises `LogFailure`."""
        client = AIOKafkaClient(
            **self._connection,
            client_id="mqttbroker",
            request_timeout_ms=self._timeout_ms,
            metadata_max_age_ms=30_000,
        )
        try:
            await client.bootstrap()
            self._client = client
            return len(await client._wait_on_metadata(self.topic))
        except (KafkaError, OSError) as error:
            await client.close()
            self._client = None
            raise LogFailure(f"{self.topic}: {error!r}") from None

    async def stop(self) -> None:
        """Close all connections; appends under way are reported as unknown."""
        for reader in self._readers:
            await reader.stop()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_MARGIN)

    # -- appends ------------------------------------------------------------------

    async def append(self, shard: int, record: bytes) -> Appended:
        """Append one record."""
        leader = await self._leader(shard, self._append_timeout)
        if leader is None:
            return Appended(-1, "the log has no leader that can be reached", True)
        outcome: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        gathered = self._gathered.setdefault(leader, [])
        gathered.append((shard, record, outcome))
        if len(gathered) == 1:
            asyncio.get_running_loop().call_soon(self._send, leader)
        return await outcome

    async def _leader(self, shard: int, timeout: float) -> Optional[int]:
        """The leader of a shard's log, connected; None if there is none within so many seconds."""
        client = self._client
        until = asyncio.get_running_loop().time() + timeout
        while client is not None:
            leader = client.cluster.leader_for_partition(TopicPartition(self.topic, shard))
            if leader is not None and leader >= 0:
                with suppress(KafkaError, OSError):
                    if await client.ready(leader):
                        return int(leader)
            if asyncio.get_running_loop().time() >= until:
                break
            with suppress(KafkaError, OSError):
                await asyncio.wait_for(client.force_metadata_update(), RETRY_AFTER * 10)
            await asyncio.sleep(RETRY_AFTER)
        return None

    def _send(self, leader: int) -> None:
        task = asyncio.get_running_loop().create_task(self._produce(leader, self._gathered.pop(leader)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _produce(self, leader: int, appends: Sequence[Tuple[int, bytes, asyncio.Future[Appended]]]) -> None:
        """Send one request, and report what came of it."""
        outcomes = await self._request(leader, appends)
        for shard, _, outcome in appends:
            if not outcome.done():
                outcome.set_result(outcomes.get(shard, Appended(-1, "the answer does not name the shard")))
        if self._client is not None and any(outcome.offset < 0 for outcome in outcomes.values()):
            self._client.force_metadata_update()

    async def _request(
        self, leader: int, appends: Sequence[Tuple[int, bytes, asyncio.Future[Appended]]]
    ) -> Dict[int, Appended]:
        request = ProduceRequest(
            None,
            ALL_REPLICAS,
            int(self._append_timeout * 1000),
            [(self.topic, [(shard, encode_batch(record)) for shard, record, _ in appends])],
        )
        shards = [shard for shard, _, _ in appends]
        if self._client is None:
            return dict.fromkeys(shards, Appended(-1, "stopped", True))
        try:
            answer = await self._client.send(leader, request)
        except (NodeNotReadyError, StaleMetadata) as error:
            return dict.fromkeys(shards, Appended(-1, f"not sent: {error!r}", True))
        except (KafkaError, OSError, asyncio.TimeoutError) as error:
            return dict.fromkeys(shards, Appended(-1, repr(error)))
        return {
            partition: _outcome(code, offset)
            for _, partitions in answer.topics
            for partition, code, offset, *_ in partitions
        }

    # -- ends ---------------------------------------------------------------------

    async def ends(self, shards: Sequence[int]) -> Dict[int, int]:
        """The ends of the logs at a time after the call: records before them never go. Leaves out those that are not known."""
        return await self._offsets(shards, LATEST)

    async def starts(self, shards: Sequence[int]) -> Dict[int, int]:
        """The first offsets that the logs have. Leaves out those that are not known."""
        return await self._offsets(shards, EARLIEST)

    async def _offsets(self, shards: Sequence[int], which: int) -> Dict[int, int]:
        by_leader: Dict[int, List[int]] = {}
        for shard in shards:
            leader = await self._leader(shard, RETRY_AFTER)
            if leader is not None:
                by_leader.setdefault(leader, []).append(shard)
        found: Dict[int, int] = {}
        for leader, led in by_leader.items():
            request = OffsetRequest(-1, READ_UNCOMMITTED, [(self.topic, [(shard, which) for shard in led])])
            if self._client is None:
                break
            try:
                answer = await self._client.send(leader, request)
            except (KafkaError, OSError, asyncio.TimeoutError):
                continue
            for _, partitions in answer.topics:
                found.update((partition, offset) for partition, code, _, offset, *_ in partitions if code == 0)
        if self._client is not None and len(found) < len(shards):
            self._client.force_metadata_update()
        return found

    def reader(self, starts: Dict[int, int], on_record: OnRecord) -> LogReader:
        """A reader of the logs of these shards, from these offsets on; ``on_record(shard, offset, record)``."""
        reader = LogReader(self._connection, self.topic, starts, on_record)
        self._readers.append(reader)
        return reader


class LogReader:
    """Reads logs in the order of their offsets, and goes on with what is appended.

    ``on_pause`` is called after each call of ``on_record`` that no other follows at once. It may change ``held``, the shards whose logs
    are not read on; it is called at least every `HELD_WAIT_MS` while there are any.
    """

    def __init__(self, connection: Dict[str, Any], topic: str, starts: Dict[int, int], on_record: OnRecord) -> None:
        self.failure = ""  # why it reads no more
        self.held: set[int] = set()
        self.ends: Dict[int, int] = {}  # of the logs, as Kafka told them with the records that were read last
        self.on_pause: Optional[Callable[[], object]] = None
        self._connection = connection
        self._topic = topic
        self._starts = starts
        self._on_record = on_record
        self._task: Optional[asyncio.Task[None]] = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        try:
            await self._read()
        except OffsetOutOfRangeError as error:
            self.failure = f"{self._topic}: records are missing: {error}"
            log.error("event=log_not_read reason=%s", self.failure)
        except ValueError as error:
            self.failure = f"{self._topic}: {error}"
            log.error("event=log_not_read reason=%s", self.failure)
        except Exception as error:
            self.failure = f"{self._topic}: {error!r}"
            log.exception("event=defect in=log_reader")

    async def _read(self) -> None:
        consumer = AIOKafkaConsumer(
            **self._connection,
            client_id="mqttbroker",
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_uncommitted",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            metadata_max_age_ms=30_000,
            retry_backoff_ms=int(RETRY_AFTER * 1000),
        )
        while True:
            try:
                await consumer.start()
                break
            except KafkaError:
                await asyncio.sleep(RETRY_AFTER)
        try:
            places = {TopicPartition(self._topic, shard): start for shard, start in self._starts.items()}
            consumer.assign(list(places))
            for place, start in places.items():
                consumer.seek(place, start)
            while True:
                found = await self._fetch(consumer, list(places))
                for place, records in found.items():
                    self.ends[place.partition] = consumer.highwater(place) or 0
                    for record in records:
                        self._on_record(place.partition, record.offset, record.value or b"")
                if self.on_pause is not None:
                    self.on_pause()
        finally:
            await consumer.stop()

    async def _fetch(self, consumer: AIOKafkaConsumer, places: List[TopicPartition]) -> Dict[TopicPartition, Any]:
        if not self.held:
            return dict(await consumer.getmany(timeout_ms=FETCH_WAIT_MS, max_records=FETCHED_AT_ONCE))
        wanted = [place for place in places if place.partition not in self.held]
        if not wanted:
            await asyncio.sleep(HELD_WAIT_MS / 1000)
            return {}
        return dict(await consumer.getmany(*wanted, timeout_ms=HELD_WAIT_MS, max_records=FETCHED_AT_ONCE))


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
