"""A stream of a cluster: the topic of Kafka that its nodes derive.

Only committed transactions are read, up to the last stable offset. Offsets have gaps, where Kafka keeps the ends of transactions.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from bridge_spark.log.columns import STORED_TYPES
from bridge_spark.log.incarnation import Incarnation
from bridge_spark.log.kafka_record import (
    CLIENT_ID,
    QOS,
    RECEIVED,
    RETAIN,
    TOPIC,
    RecordError,
    RecordFields,
    fields_of,
    stream_topic,
)
from bridge_spark.log.record_batch import RETAIN_FLAG
from bridge_spark.log.sparse_index import IndexEntry
from bridge_spark.source.consumers import Reporter, decode_report
from bridge_spark.source.kafka_options import KafkaOptions
from bridge_spark.source.plan import Slice
from bridge_spark.source.storage import (
    Manifest,
    PartitionState,
    Segment,
    SegmentGone,
    StreamError,
    UnknownStream,
)

try:
    from aiokafka import AIOKafkaConsumer, TopicPartition
    from aiokafka.errors import KafkaError, OffsetOutOfRangeError

    from bridge_spark.log.kafka_topic_id import topic_id
except ImportError:  # pragma: no cover
    AIOKafkaConsumer = None

FILE = "kafka"  # in the place of a segment file
ROW_BYTES = 1024  # what a row costs, in bytes of a segment file: this source parses each record in Python
ROWS = 4096  # of a record batch
FETCH_WAIT_MS = 500
FETCH_BYTES = 4 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
MOST_PARTITIONS = 1 << 30

_RETAIN = {b"true": RETAIN_FLAG}
_EXPECTED = (TOPIC, QOS, RETAIN, CLIENT_ID, RECEIVED)
T = TypeVar("T")


class KafkaStorage:
    """The stream's topic as a `Storage` whose partitions have one segment each, which `rows` reads.

    A failed request is repeated ``retries`` times, after ``retry_interval_s`` seconds at first. ``timeout_s``: the longest time
    without an answer. Not thread-safe; its event loop has a thread of its own, as the caller may run one, too.
    """

    chunk_bytes = FETCH_BYTES

    def __init__(self, options: KafkaOptions, stream: str, retries: int, retry_interval_s: float, timeout_s: float) -> None:
        if AIOKafkaConsumer is None:
            raise StreamError('mqtt source: Kafka needs aiokafka: pip install "mqttbroker[cluster]"')
        self._options = options
        self._stream = stream
        self._topic = stream_topic(options.cluster, stream)
        self._retries = retries
        self._retry_interval_s = retry_interval_s
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._consumer: AIOKafkaConsumer | None = None
        self._partitions: list[TopicPartition] = []
        self._reporter = Reporter(self._commit_report)

    # -- Storage ------------------------------------------------------------------

    def manifest(self) -> Manifest:
        begins, ends = self._retried(self._ends)
        manifest = Manifest((), Incarnation(self._retried(self._topic_id)))
        for place in sorted(ends):
            begin, end = begins[place], max(begins[place], ends[place])
            segments = (Segment(FILE, begin, end, (end - begin) * ROW_BYTES),) if end > begin else ()
            manifest[place.partition] = PartitionState(begin, end, segments)
        return manifest

    def offsets_at(self, timestamp: int) -> dict[int, int] | None:
        """Kafka's index finds the ends of transactions, too, whose times are those of their commits; so the records are read
        from there on."""
        _, ends = self._retried(self._ends)
        found = self._retried(lambda: self._offsets_for_times(timestamp // 1000))
        offsets: dict[int, int] = {}
        for place, end in ends.items():
            known = found.get(place)
            start = end if known is None else min(known.offset, end)
            part = Slice(place.partition, FILE, 0, 0, start, end, 0)
            offsets[place.partition] = self._first_at(part, timestamp)
        return offsets

    def _first_at(self, part: Slice, timestamp: int) -> int:
        for _, _, rows in self.rows(part, ("timestamp",)):
            late = pc.greater_equal(rows.column("timestamp").cast(pa.int64()), pa.scalar(timestamp, pa.int64()))
            position = pc.index(late, True).as_py()
            if position >= 0:
                return int(rows.column("offset")[position].as_py())
        return part.end_offset

    def rows(self, part: Slice, stored: Sequence[str]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """The first offset, the end offset and the rows of each record batch of a slice: the ``stored`` columns and ``offset``.

        Raises `StreamError`, and `SegmentGone` if retention has removed records of the slice.
        """
        place = TopicPartition(self._topic, part.partition)
        reached = part.start_offset
        self._retried(lambda: self._seek(place, reached))
        while reached < part.end_offset:
            records, position = self._retried(lambda: self._fetch(place, reached))
            records = [record for record in records if record.offset < part.end_offset]
            end = min(max(position, reached), part.end_offset)
            if records:
                yield reached, end, self._columns(records, stored)
            reached = end

    def report(self, consumer: str, offsets: Mapping[int, int]) -> None:
        self._reporter.report(consumer, offsets)

    def describe(self, partition: int, file: str) -> str:
        return f"{','.join(self._options.servers)}: topic {self._topic}, partition {partition}"

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        with suppress(Exception):
            self._call(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    # Kafka has no files.

    def read(self, partition: int, file: str, position: int, length: int) -> bytes:
        raise StreamError(f"mqtt source: {self.describe(partition, file)} is no file")

    def index(self, partition: int, segment: Segment) -> list[IndexEntry]:
        return []

    def archived(self, partition: int, start: int, end: int) -> list[Segment]:
        return []

    def archived_at(self, partition: int, timestamp: int) -> Segment | None:
        return None

    # -- requests -----------------------------------------------------------------

    async def _ends(self) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        consumer = await self._connected()
        return await consumer.beginning_offsets(self._partitions), await consumer.end_offsets(self._partitions)

    async def _topic_id(self) -> str:
        consumer = await self._connected()
        return await topic_id(consumer._client, self._topic)

    async def _offsets_for_times(self, milliseconds: int) -> dict[TopicPartition, Any]:
        consumer = await self._connected()
        return dict(await consumer.offsets_for_times(dict.fromkeys(self._partitions, milliseconds)))

    async def _seek(self, place: TopicPartition, offset: int) -> None:
        consumer = await self._connected()
        if consumer.assignment() != {place}:
            consumer.assign([place])
        consumer.seek(place, offset)

    async def _fetch(self, place: TopicPartition, reached: int) -> tuple[list[Any], int]:
        """The next records and the position behind them; waits for progress."""
        consumer = await self._connected()
        if consumer.assignment() != {place}:  # a new connection
            await self._seek(place, reached)
        records: list[Any] = []
        while True:
            found = await consumer.getmany(place, timeout_ms=FETCH_WAIT_MS, max_records=ROWS)
            records = found.get(place, [])
            position = await consumer.position(place)
            if records or position > reached:
                return records, position

    async def _connected(self) -> AIOKafkaConsumer:
        if self._consumer is not None:
            return self._consumer
        consumer = self._new_consumer(None)
        try:
            await consumer.start()
            metadata = await consumer._client.fetch_all_metadata()
            partitions = metadata.partitions_for_topic(self._topic)
            if not partitions:
                raise UnknownStream(
                    f"mqtt source: option 'stream': {','.join(self._options.servers)} has no topic "
                    f"{self._topic!r}{self._names(metadata.topics())}"
                )
            self._partitions = [TopicPartition(self._topic, number) for number in sorted(partitions)]
        except BaseException:
            with suppress(Exception):
                await consumer.stop()
            raise
        self._consumer = consumer
        return consumer

    def _new_consumer(self, group: str | None) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **self._options.connection(),
            client_id="mqttbroker-spark",
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_partition_fetch_bytes=FETCH_BYTES,
            request_timeout_ms=int(self._timeout_s * 1000),
        )

    async def _disconnect(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.stop()

    def _names(self, topics: set[str]) -> str:
        prefix = stream_topic(self._options.cluster, "")
        names = sorted(topic.removeprefix(prefix) for topic in topics if topic.startswith(prefix))
        if names:
            return f" (the cluster {self._options.cluster!r} has the streams {', '.join(names)})"
        return f" (the cluster {self._options.cluster!r} has no streams: is 'clusterId' its id?)"

    def _commit_report(self, consumer: str, report: bytes) -> None:
        """Commit the offsets of a reader as those of a consumer group, which Kafka's tools show."""
        offsets = decode_report(report, MOST_PARTITIONS)

        async def commit() -> None:
            member = self._new_consumer(consumer)
            await member.start()
            try:
                places = {TopicPartition(self._topic, number): offset for number, offset in offsets.items()}
                member.assign(list(places))
                await member.commit(places)
            finally:
                await member.stop()

        self._call(asyncio.wait_for(commit(), CONNECT_TIMEOUT_S))

    def _retried(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        wait = self._retry_interval_s
        for attempt in range(self._retries + 1):
            try:
                return self._call(asyncio.wait_for(request(), self._timeout_s))
            except OffsetOutOfRangeError:
                raise SegmentGone(f"mqtt source: {self._topic}: retention has removed records") from None
            except (TimeoutError, KafkaError, OSError) as error:
                if attempt == self._retries:
                    raise StreamError(f"mqtt source: {','.join(self._options.servers)}: {_one_line(error)}") from None
                with suppress(Exception):
                    self._call(self._disconnect())
                time.sleep(wait)
                wait = min(wait * 2, CONNECT_TIMEOUT_S)
        raise AssertionError

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="kafka", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- columns ------------------------------------------------------------------

    def _columns(self, records: list[Any], stored: Sequence[str]) -> pa.RecordBatch:
        values: dict[str, list[Any]] = {}
        try:
            if any(name not in ("payload",) for name in stored):
                _parse(records, values)
        except RecordError as error:
            raise StreamError(
                f"mqtt source: {self.describe(records[0].partition, FILE)}: a record between the offsets "
                f"{records[0].offset} and {records[-1].offset} is none of a stream: {error}"
            ) from None
        if "payload" in stored:
            values["payload"] = [record.value or b"" for record in records]
        arrays = [pa.array(values[name], _BUILT.get(name, STORED_TYPES[name])).cast(STORED_TYPES[name]) for name in stored]
        arrays.append(pa.array([record.offset for record in records], pa.int64()))
        return pa.RecordBatch.from_arrays(arrays, names=[*stored, "offset"])


_BUILT = {"timestamp": pa.int64(), "topic": pa.binary(), "client_id": pa.binary()}


def _parse(records: list[Any], values: dict[str, list[Any]]) -> None:
    """Add the columns that are in the headers of records. Raises `RecordError`."""
    topics: list[bytes] = []
    flags: list[int] = []
    clients: list[bytes] = []
    times: list[int] = []
    properties: list[bytes] = []
    for record in records:
        headers = record.headers
        try:
            (a, topic), (b, qos), (c, retain), (d, client), (e, received) = headers
            if (a, b, c, d, e) != _EXPECTED:
                raise ValueError
            flags.append(int(qos) | _RETAIN.get(retain, 0))
            times.append(int(received))
            topics.append(topic)
            clients.append(client)
            properties.append(b"")
        except ValueError:
            fields: RecordFields = fields_of(headers)
            del flags[len(properties) :], times[len(properties) :]
            topics.append(fields.topic.encode())
            flags.append(fields.qos | (RETAIN_FLAG if fields.retain else 0))
            clients.append(fields.client_id.encode())
            times.append(fields.received)
            properties.append(fields.properties)
    values.update(topic=topics, flags=flags, client_id=clients, timestamp=times, properties=properties)


def _one_line(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "Kafka did not answer in time"
    return " ".join(str(error).split()) or type(error).__name__
