"""Writes the streams of a single broker into the empty topics of a cluster's streams; records keep their partitions and offsets."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.kafka_record import RecordError, stream_topic
from bridge_spark.log.offline import StoredPartition, StoredStream
from bridge_spark.log.stream_config import StreamLogError
from bridge_spark.log.stream_files import DESCRIPTION_FILE
from mqttbroker.cluster.kafka.log import LogFailure
from mqttbroker.cluster.streams.topic_setup import FOREVER, prepare_stream_topics
from mqttbroker.cluster.streams.topics import BATCH_BYTES, close_producer, most_record_bytes, positions_topic, record_of
from mqttbroker.cluster.transfer.store_import import ImportFailure
from mqttbroker.cluster.transfer.stream_copy import CopyFailure, PartitionCopy, TargetPartition, UnfitRecord
from mqttbroker.config.settings import Cluster, Stream
from sessions.message import Message

ROWS_AT_ONCE: Final = 4096  # of a partition that are on their way to Kafka
VOID_AT_ONCE: Final = 100_000  # records of a batch that nobody reads: compressed it is shorter than Kafka's least max.message.bytes
VOID_BATCH_BYTES: Final = 4_194_304  # of such a batch before it is compressed
TRANSACTION_TIMEOUT_MS: Final = 900_000  # the most that Kafka permits by default
DELETE_TRIES: Final = 20  # to move the begin of a partition, until all Kafka brokers know the settings of its topic
DELETE_RETRY: Final = 0.5  # seconds
RECORD_OVERHEAD: Final = 128  # bytes that Kafka counts for a record and its batch, beside key, value and headers
HEADER_OVERHEAD: Final = 10  # for a header, beside name and value

# While records are written nothing is removed; the settings of the streams follow at the end.
WHILE_IMPORTING: Final = {"cleanup.policy": "delete", "retention.ms": FOREVER, "retention.bytes": FOREVER}

T = TypeVar("T")


class CarriedStream(NamedTuple):
    """A stream in its topic; ``lost`` are ranges of offsets that damage took before, with their partitions."""

    name: str
    topic: str
    partitions: int
    records: int
    lost: list[tuple[int, int, int]]


class _Planned(NamedTuple):
    stored: StoredStream
    stream: Stream
    partitions: list[StoredPartition]


class StreamImport:
    """Imports the streams of the data directory ``data_dir`` but those in ``left_out``; ``streams`` are those of the cluster.

    ``connection`` are the arguments of aiokafka's clients, ``max_message_bytes`` is the longest packet of a client. `plan` is called
    first, then `prepare`, then `run`. All raise `ImportFailure`.
    """

    def __init__(
        self, connection: dict[str, Any], cluster: Cluster, streams: Sequence[Stream], max_message_bytes: int, data_dir: Path,
        left_out: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._connection = connection
        self._cluster = cluster
        self._streams = streams
        self._max_message_bytes = max_message_bytes
        self._directory = data_dir / "streams"
        self._left_out = set(left_out)
        self._planned: list[_Planned] = []

    def plan(self, database: Path) -> None:
        """Find the streams, and check that all their files are there. Nothing is written."""
        names = sorted(found.parent.name for found in self._directory.glob(f"*/{DESCRIPTION_FILE}"))
        if unknown := sorted(self._left_out - set(names)):
            raise ImportFailure(f"{self._directory}: has no stream {unknown[0]!r} that could be left out")
        configured = {stream.name: stream for stream in self._streams}
        for name in names:
            if name in self._left_out:
                continue
            try:
                stored = StoredStream(self._directory, name)
                partitions = [stored.partition(number) for number in range(stored.partitions)]
                for number, partition in enumerate(partitions):
                    self._check_end(database, name, number, partition.end)
                    partition.check()
            except (StreamLogError, ArchiveError) as error:
                raise ImportFailure(f"stream {name!r}: {error}") from None
            except OSError as error:
                raise ImportFailure(f"stream {name!r}: {error.filename}: {error.strerror}") from None
            if not any(partition.end for partition in partitions):
                continue
            stream = configured.get(name)
            if stream is None:
                raise ImportFailure(
                    f"stream {name!r}: {self._directory / name} has records, and the cluster's configuration no [streams.{name}]:"
                    f" add it, or leave the stream out with --leave-out {name}"
                )
            if stream.partitions != stored.partitions:
                raise ImportFailure(
                    f"stream {name!r}: has {stored.partitions} partitions in {self._directory / name} and {stream.partitions} in the"
                    f" cluster's configuration: set partitions = {stored.partitions}"
                )
            self._planned.append(_Planned(stored, stream, partitions))

    def _check_end(self, database: Path, name: str, number: int, end: int) -> None:
        """A broker that was stopped in order has committed all records of its log."""
        try:
            with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
                row = connection.execute("SELECT end_offset FROM stream_ends WHERE stream = ? AND partition = ?", (name, number)).fetchone()
        except sqlite3.Error as error:
            raise ImportFailure(f"{database}: {error}") from None
        if row is not None and row[0] != end:
            raise ImportFailure(
                f"stream {name!r}, partition {number}: ends at offset {end}, but at {row[0]} in {database}: start the broker once and"
                " stop it, then import"
            )

    async def prepare(self) -> None:
        """Create the topics that are missing, and check that those to write to are empty."""
        if self._planned:
            async with self._producers() as producers:
                await producers.end_former()
        await self._prepare_topics(WHILE_IMPORTING)
        topics = {stream_topic(self._cluster.id, one.stream.name): one.stream.partitions for one in self._planned}
        if self._streams:  # positions of a log that is gone would have records of the new one left out
            topics[positions_topic(self._cluster.id)] = self._cluster.shards
        ends = await self._ends(topics)
        for topic in topics:
            found = sum(end for place, end in ends.items() if place.topic == topic)
            if found:
                raise ImportFailure(
                    f"topic {topic}: has {found} records already; streams are imported into empty topics: delete it and begin again"
                )

    async def run(self) -> list[CarriedStream]:
        """Write all records; if it fails, the line says which topics are to be deleted."""
        if not self._planned:
            return []
        try:
            carried = []
            async with self._producers() as producers:
                for planned in self._planned:
                    carried.append(await self._copy(planned, producers))
            await self._verify()
            await self._prepare_topics({})
        except ImportFailure as error:
            topics = ", ".join(stream_topic(self._cluster.id, one.stream.name) for one in self._planned)
            raise ImportFailure(f"{error}; delete the topics {topics} and begin again") from None
        return carried

    def _producers(self) -> Producers:
        return Producers(self._connection, self._cluster.id, most_record_bytes(self._max_message_bytes))

    async def _prepare_topics(self, instead: dict[str, str]) -> None:
        cluster = self._cluster
        try:
            await prepare_stream_topics(
                self._connection, cluster.id, cluster.shards, self._streams, self._max_message_bytes, cluster.replication,
                cluster.min_insync_replicas, cluster.create_topics, instead,
            )  # fmt: skip
        except LogFailure as error:
            raise ImportFailure(str(error)) from None

    async def _copy(self, planned: _Planned, producers: Producers) -> CarriedStream:
        topic = stream_topic(self._cluster.id, planned.stream.name)
        records = 0
        lost = []
        for number, stored in enumerate(planned.partitions):
            target = KafkaPartition(producers, TopicPartition(topic, number), planned.stream)
            copy = PartitionCopy(target, stored.start)
            try:
                for rows in stored.rows():
                    for first in range(0, len(rows), ROWS_AT_ONCE):
                        await copy.add(rows[first : first + ROWS_AT_ONCE])
                await copy.finish(stored.end)
            except CopyFailure as error:
                raise ImportFailure(f"topic {topic}, partition {number}: {error}") from None
            except (StreamLogError, ArchiveError) as error:
                raise ImportFailure(f"stream {planned.stream.name!r}: {error}") from None
            except OSError as error:
                raise ImportFailure(f"stream {planned.stream.name!r}: {error.filename}: {error.strerror}") from None
            records += copy.records
            lost += [(number, first, end) for first, end in stored.lost]
        return CarriedStream(planned.stream.name, topic, len(planned.partitions), records, lost)

    async def _verify(self) -> None:
        topics = {stream_topic(self._cluster.id, one.stream.name): one.stream.partitions for one in self._planned}
        ends = await self._ends(topics)
        for planned in self._planned:
            topic = stream_topic(self._cluster.id, planned.stream.name)
            for number, stored in enumerate(planned.partitions):
                if ends[TopicPartition(topic, number)] != stored.end:
                    raise ImportFailure(
                        f"topic {topic}, partition {number}: ends at offset {ends[TopicPartition(topic, number)]}, not {stored.end}:"
                        " another program writes to it"
                    )

    async def _ends(self, topics: dict[str, int]) -> dict[TopicPartition, int]:
        """The end of each partition of topics with so many partitions."""
        places = [TopicPartition(topic, number) for topic, count in topics.items() for number in range(count)]
        if not places:
            return {}
        consumer = AIOKafkaConsumer(**self._connection, client_id="mqttbroker", group_id=None, enable_auto_commit=False)
        try:
            await consumer.start()
            return dict(await consumer.end_offsets(places))
        except (TimeoutError, KafkaError, OSError) as error:
            raise ImportFailure(f"{', '.join(topics)}: {error!r}") from None
        finally:
            await consumer.stop()


class Producers:
    """The connections to Kafka that write. The connections for gaps are made when they are needed."""

    def __init__(self, connection: dict[str, Any], cluster: str, most_bytes: int) -> None:
        self.most_bytes = most_bytes  # of a record
        self._connection = connection
        self._transactional_id = f"{cluster}-import"
        self._made: dict[str, AIOKafkaProducer] = {}
        self._admin: AIOKafkaAdminClient | None = None
        self._full_void: Any = None  # the batch with `VOID_AT_ONCE` records

    async def __aenter__(self) -> Producers:
        return self

    async def __aexit__(self, *error: object) -> None:
        for producer in self._made.values():
            await close_producer(producer)
        if self._admin is not None:
            await self._admin.close()

    async def plain(self) -> AIOKafkaProducer:
        """For records."""
        return await self._producer("plain", enable_idempotence=True, max_batch_size=BATCH_BYTES)

    async def transactional(self) -> AIOKafkaProducer:
        """For records in transactions."""
        return await self._producer(
            "transactional", transactional_id=self._transactional_id, transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            compression_type="gzip", max_batch_size=VOID_BATCH_BYTES,
        )  # fmt: skip

    async def end_former(self) -> None:
        """Have Kafka end the transaction of an import that was killed: its end would come between the records of this one.

        Raises `ImportFailure`.
        """
        try:
            producer = await self.transactional()
            await producer.begin_transaction()
            await producer.commit_transaction()
        except (TimeoutError, KafkaError, OSError) as error:
            raise ImportFailure(f"the transactional id {self._transactional_id}: {error!r}") from None

    async def void(self) -> AIOKafkaProducer:
        """For records that are deleted. Without numbers of the producer a batch is the same each time, so it is made once."""
        return await self._producer("void", acks="all", compression_type="gzip", max_batch_size=VOID_BATCH_BYTES)

    async def full_void(self) -> Any:
        if self._full_void is None:
            self._full_void = void_batch(await self.void(), VOID_AT_ONCE)
        return self._full_void

    async def admin(self) -> AIOKafkaAdminClient:
        if self._admin is None:
            self._admin = AIOKafkaAdminClient(**self._connection, client_id="mqttbroker")
            await self._admin.start()
        return self._admin

    async def _producer(self, name: str, **settings: Any) -> AIOKafkaProducer:
        if name not in self._made:
            producer = self._made[name] = AIOKafkaProducer(
                **self._connection, client_id="mqttbroker", max_request_size=self.most_bytes + VOID_BATCH_BYTES, **settings
            )
            await producer.start()
        return self._made[name]


def void_batch(producer: AIOKafkaProducer, count: int) -> Any:
    """A batch of so many empty records, which are never to be read. Their times are 0, so that no time finds them."""
    batch = producer.create_batch()
    for _ in range(count):
        if batch.append(timestamp=0, key=None, value=b"") is None:
            raise ValueError(f"{count} empty records are longer than {VOID_BATCH_BYTES} bytes")
    batch.close()
    return batch


class KafkaPartition(TargetPartition):
    """A partition of the topic of ``stream``."""

    def __init__(self, producers: Producers, place: TopicPartition, stream: Stream) -> None:
        self._producers = producers
        self._place = place
        self._stream = stream
        self._in_transaction = False

    async def append(self, messages: Sequence[Message]) -> int:
        records = [self._record(index, message) for index, message in enumerate(messages)]
        return await self._send(await self._kafka(self._producers.plain()), records)

    async def append_and_end(self, message: Message) -> int:
        record = self._record(0, message)
        producer = await self._kafka(self._producers.transactional())
        await self._kafka(producer.begin_transaction())
        offset = await self._send(producer, [record])
        await self._kafka(producer.commit_transaction())
        return offset

    async def append_void(self, count: int) -> int:
        producer = await self._kafka(self._producers.transactional())
        if not self._in_transaction:
            await self._kafka(producer.begin_transaction())
            self._in_transaction = True
        batches = []
        while count:
            batches.append(min(count, VOID_AT_ONCE))
            count -= batches[-1]
        offsets = [await self._kafka(self._send_batch(producer, void_batch(producer, size))) for size in batches]
        return offsets[0]

    async def end_void(self) -> None:
        producer = await self._kafka(self._producers.transactional())
        self._in_transaction = False
        await self._kafka(producer.abort_transaction())

    async def begin_at(self, offset: int) -> None:
        producer = await self._kafka(self._producers.void())
        full = await self._kafka(self._producers.full_void())
        reached = 0
        while reached < offset:
            count = min(VOID_AT_ONCE, offset - reached)
            batch = full if count == VOID_AT_ONCE else void_batch(producer, count)
            if await self._kafka(self._send_batch(producer, batch)) != reached:
                raise CopyFailure("another program writes to the topic")
            reached += count
        admin = await self._kafka(self._producers.admin())
        for attempt in range(DELETE_TRIES):
            try:
                await admin.delete_records({self._place: RecordsToDelete(before_offset=offset)})
                return
            except (TimeoutError, KafkaError, OSError) as error:
                if attempt == DELETE_TRIES - 1:
                    raise CopyFailure(f"the records before offset {offset} cannot be deleted: {error!r}") from None
            await asyncio.sleep(DELETE_RETRY)

    def _record(self, index: int, message: Message) -> dict[str, Any]:
        try:
            record = record_of(self._stream, message)
        except RecordError as error:
            raise UnfitRecord(index, str(error)) from None
        except IndexError:
            raise UnfitRecord(index, "malformed properties") from None
        if self._stream.compact and record["key"] is None:
            raise UnfitRecord(index, "has no key, and a topic with compaction takes none without one: set compact = false")
        size = (
            RECORD_OVERHEAD
            + len(record["key"] or b"")
            + len(record["value"] or b"")
            + sum(HEADER_OVERHEAD + len(name) + len(value) for name, value in record["headers"])
        )
        if size > self._producers.most_bytes:
            raise UnfitRecord(
                index,
                f"a record of {size} bytes, more than max.message.bytes of the topic, {self._producers.most_bytes}: raise"
                " limits.max_packet_size in the cluster's configuration",
            )
        return record

    async def _send(self, producer: AIOKafkaProducer, records: list[dict[str, Any]]) -> int:
        """Append records; returns the offset of the first."""
        first: int | None = None
        batch, count, reached = producer.create_batch(), 0, 0
        for record in [*records, None]:
            if record is not None and batch.append(**record) is not None:
                count += 1
                continue
            offset = await self._kafka(self._send_batch(producer, batch))
            if first is None:
                first = reached = offset
            if offset != reached:
                raise CopyFailure(f"a record got offset {offset}, not {reached}: another program writes to the topic")
            reached += count
            if record is not None:
                batch, count = producer.create_batch(), 1
                if batch.append(**record) is None:
                    raise ValueError("an empty batch takes no record")
        assert first is not None
        return first

    async def _send_batch(self, producer: AIOKafkaProducer, batch: Any) -> int:
        sent = await producer.send_batch(batch, self._place.topic, partition=self._place.partition)
        return int((await sent).offset)

    async def _kafka(self, request: Awaitable[T]) -> T:
        try:
            return await request
        except MessageSizeTooLargeError:
            raise CopyFailure("a record is longer than max.message.bytes of the topic") from None
        except (TimeoutError, KafkaError, OSError) as error:
            raise CopyFailure(repr(error)) from None
