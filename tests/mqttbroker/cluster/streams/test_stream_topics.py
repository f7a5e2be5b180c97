"""The topics of streams: each message of a valid record once, in order, through kills of the process that derives them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator

import pyarrow as pa
import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from support import stream_deriver
from support.kafka import KafkaCluster
from support.stream_deriver import CLUSTER, MAX_MESSAGE_BYTES, STREAM, stream_topics

from bridge_spark.log.columns import ColumnBuilder
from bridge_spark.log.kafka_record import fields_of
from bridge_spark.source import offsets
from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import parse_options
from bridge_spark.source.plan import Planner
from bridge_spark.source.slice_reader import read_slices
from mqttbroker.cluster.kafka.log import KafkaLog, LogFailure
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import (
    CHANGES,
    NO_EPOCH,
    RELEASE,
    TAKEOVER,
    Header,
    Takeover,
    encode_record,
    encode_takeover,
)
from mqttbroker.cluster.log.view import LogView
from mqttbroker.cluster.streams.topic_setup import prepare_stream_topics, topic_settings
from mqttbroker.cluster.streams.topics import StreamSource, StreamTopics, _Transaction, key_of, record_of
from mqttbroker.config.settings import Stream
from sessions.message import Message
from sessions.write_set import BusMessages, WriteSet

pytestmark = [pytest.mark.one_build]

WAIT_S = 60.0


def message(number: int, properties: bytes = b"", topic: str = "lab/a", payload: bytes = b"") -> Message:
    return Message(topic, payload or str(number).encode(), number % 3, False, properties, "sensor", 1_000_000 + number, 0)


class LogWriter:
    """Writes records to shard 0 as its owners do."""

    def __init__(self, kafka: KafkaLog) -> None:
        self.epoch = NO_EPOCH
        self.sequence = 0
        self.written = 0  # messages of valid records
        self._kafka = kafka

    async def append(self, kind: int, epoch: int, sequence: int, body: bytes) -> int:
        record = encode_record(Header(kind, 0, CLUSTER, b"ownerown", epoch, sequence), body)
        async with asyncio.timeout(WAIT_S):
            while (outcome := await self._kafka.append(0, record)).offset < 0:
                assert kind != TAKEOVER, outcome.reason  # any other record may be repeated: the second is void
        return outcome.offset

    async def take_over(self) -> None:
        self.epoch = await self.append(TAKEOVER, self.epoch, 0, encode_takeover(Takeover("node", "", "")))
        self.sequence = 0

    async def publish(self, count: int) -> None:
        """A record with so many messages, which alternate between the partitions, beside others that concern no stream."""
        self.sequence += 1
        numbers = range(self.written, self.written + count)
        body = body_of([message(number) for number in numbers])
        await self.append(CHANGES, self.epoch, self.sequence, body)
        self.written += count

    async def release(self) -> None:
        self.sequence += 1
        await self.append(RELEASE, self.epoch, self.sequence, b"")


def body_of(messages: list[Message]) -> bytes:
    """Messages of the stream; even numbers in partition 0."""
    write_set = WriteSet()
    write_set.stream_messages = {("removed", 0): messages}
    write_set.bus = BusMessages()
    write_set.bus.to_all = messages
    write_set.bus.to_members = {("$share/G/#", 1): messages}
    for partition in (0, 1):
        chosen = [one for number, one in enumerate(messages) if int(one.payload) % 2 == partition]
        if chosen:
            write_set.stream_messages["lab", partition] = chosen
    return encode_body(write_set)


@contextlib.asynccontextmanager
async def log_of(kafka: KafkaCluster) -> AsyncIterator[tuple[str, str, LogWriter]]:
    """The id of a new cluster, the topic of its logs, and a writer that owns shard 0; the streams' topics are there."""
    cluster = f"t{uuid.uuid4().hex[:8]}"
    topic = f"{cluster}.log"
    await kafka.create_topic(topic, 1)
    await prepare(kafka, cluster, STREAM)
    log = KafkaLog({"bootstrap_servers": kafka.bootstrap}, topic, 4.0)
    await log.start()
    try:
        writer = LogWriter(log)
        await writer.take_over()
        yield cluster, topic, writer
    finally:
        await log.stop()


async def prepare(kafka: KafkaCluster, cluster: str, stream: Stream, create: bool = True) -> None:
    await prepare_stream_topics({"bootstrap_servers": kafka.bootstrap}, cluster, 1, [stream], MAX_MESSAGE_BYTES, 3, 2, create)


async def committed(kafka: KafkaCluster, cluster: str, count: int) -> list[list[ConsumerRecord]]:
    """The records of each partition of the stream's topic, once there are so many, and all that are committed then."""
    places = [TopicPartition(f"{cluster}.stream.lab", partition) for partition in range(2)]
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, isolation_level="read_committed", auto_offset_reset="earliest")
    await consumer.start()
    found: list[list[ConsumerRecord]] = [[], []]
    try:
        consumer.assign(places)
        async with asyncio.timeout(WAIT_S):
            while sum(map(len, found)) < count:
                for place, records in (await consumer.getmany(timeout_ms=200)).items():
                    found[place.partition] += records
        ends = await consumer.end_offsets(places)
        for place in places:
            while await consumer.position(place) < ends[place]:
                for record in (await consumer.getmany(place, timeout_ms=200)).get(place, []):
                    found[place.partition].append(record)
    finally:
        await consumer.stop()
    return found


def rows_by_source(kafka: KafkaCluster, cluster: str) -> list[tuple[int, str, int, int]]:
    """Payload, topic, QoS and receipt time in µs of all rows, as tasks of the Spark source read them."""
    options = parse_options(
        {
            "kafka.bootstrap.servers": ",".join(kafka.bootstrap),
            "clusterId": cluster,
            "stream": "lab",
            "filter": "lab/+",
        }
    )
    storage = open_storage(options)
    try:
        manifest = storage.manifest()
        start, end = offsets.earliest(manifest), offsets.latest(manifest)
        schema = pa.schema([("payload", pa.binary()), ("topic", pa.string()), ("qos", pa.int8()), ("timestamp", pa.timestamp("us", "UTC"))])
        builder = ColumnBuilder(schema, "lab", options.topic_filter)
        tasks = Planner(storage).plan(manifest, start, end, max_rows=7)
        assert len(tasks) > 4
        batches = [batch for task in tasks for batch in read_slices(storage, task, builder, True)]
    finally:
        storage.close()
    columns = pa.Table.from_batches(batches).set_column(3, "timestamp", pa.Table.from_batches(batches).column("timestamp").cast(pa.int64()))
    return [(int(row["payload"]), row["topic"], row["qos"], row["timestamp"]) for row in columns.to_pylist()]


def numbers(records: list[ConsumerRecord]) -> list[int]:
    return [int(record.value) for record in records]


@contextlib.asynccontextmanager
async def deriving(topics: StreamTopics) -> AsyncIterator[StreamTopics]:
    task = asyncio.create_task(topics.run())
    try:
        yield topics
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_derived(topics: StreamTopics, position: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while topics.position < position:
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect what clients of Kafka leave: CPython 3.11 fails in `ast.parse` if it collects them there."""
    yield
    gc.collect()


def test_each_message_of_valid_records_is_in_the_topic_once_and_in_order(kafka: KafkaCluster) -> None:
    async def run() -> None:
        async with log_of(kafka) as (cluster, topic, writer):
            await writer.publish(10)
            async with deriving(stream_topics(kafka.bootstrap, cluster, topic)) as topics:
                await writer.publish(10)
                await until_derived(topics, 3)
                assert topics.messages == 20
            # While none derives: a repeated append, an owner that was deposed, and its successor.
            body = body_of([message(1000), message(1001)])
            await writer.append(CHANGES, writer.epoch, writer.sequence, body)
            old_epoch, old_sequence = writer.epoch, writer.sequence
            await writer.release()
            await writer.take_over()
            await writer.append(CHANGES, old_epoch, old_sequence + 1, body)
            await writer.publish(10)
            first, second = (stream_topics(kafka.bootstrap, cluster, topic) for _ in range(2))
            async with deriving(first):
                await until_derived(first, 8)
                async with deriving(second):  # a shard that has moved
                    await writer.publish(10)
                    await until_derived(second, 9)
                    await writer.publish(10)
                    await until_derived(second, 10)
                    async with asyncio.timeout(WAIT_S):
                        while not first.failure:
                            await asyncio.sleep(0.01)
            found = await committed(kafka, cluster, writer.written)
            assert [numbers(records) for records in found] == [list(range(0, 50, 2)), list(range(1, 50, 2))]
            record = found[1][3]
            assert record.key == b"lab/a"
            assert record.timestamp == 1000
            assert fields_of(record.headers) == ("lab/a", 1, False, "sensor", 1_000_007, b"")
            assert await asyncio.to_thread(rows_by_source, kafka, cluster) == [
                (number, "lab/a", number % 3, 1_000_000 + number) for number in [*range(0, 50, 2), *range(1, 50, 2)]
            ]

    asyncio.run(run())


@pytest.mark.slow("kills the process 15 times: 1 minute")
def test_a_process_that_is_killed_leaves_nothing_out_and_nothing_twice(kafka: KafkaCluster) -> None:
    async def run() -> None:
        async with log_of(kafka) as (cluster, topic, writer):
            command = [sys.executable, stream_deriver.__file__, ",".join(kafka.bootstrap), cluster, topic]
            stop = False

            async def publish() -> None:
                while not stop:
                    await writer.publish(7)
                    if writer.sequence % 50 == 0:
                        await writer.take_over()

            publishing = asyncio.create_task(publish())
            for number in range(15):
                process = subprocess.Popen(command, stdout=subprocess.PIPE)
                assert process.stdout is not None
                await asyncio.to_thread(process.stdout.readline)
                await asyncio.sleep(0.037 * (number % 7))
                process.kill()
                process.wait()
                process.stdout.close()
            stop = True
            await publishing
            async with deriving(stream_topics(kafka.bootstrap, cluster, topic)):
                found = await committed(kafka, cluster, writer.written)
            assert [numbers(records) for records in found] == [list(range(0, writer.written, 2)), list(range(1, writer.written, 2))]

    asyncio.run(run())


@pytest.mark.slow("kills Kafka brokers: 1 minute")
def test_a_kafka_broker_that_is_killed_leaves_nothing_out_and_nothing_twice(kafka: KafkaCluster) -> None:
    async def run() -> None:
        async with log_of(kafka) as (cluster, topic, writer):
            async with deriving(stream_topics(kafka.bootstrap, cluster, topic)):
                for number in range(1, 4):
                    for _ in range(20):
                        await writer.publish(7)
                    kafka.broker(number).kill()
                    await writer.publish(7)
                    await asyncio.to_thread(kafka.broker(number).start)
                    await asyncio.to_thread(kafka.broker(number).wait_until_listening)
                    await kafka.in_sync(topic, 0, 3)
                for _ in range(20):
                    await writer.publish(7)
                found = await committed(kafka, cluster, writer.written)
                assert [numbers(records) for records in found] == [list(range(0, writer.written, 2)), list(range(1, writer.written, 2))]

    asyncio.run(run())


@pytest.mark.slow("needs Kafka")
def test_topics_get_the_settings_of_streams_and_keep_others(kafka: KafkaCluster) -> None:
    async def settings_of(cluster: str) -> dict[str, str]:
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        await admin.start()
        try:
            resource = ConfigResource(ConfigResourceType.TOPIC, f"{cluster}.stream.lab")
            (answer,) = await admin.describe_configs([resource])
            return {entry[0]: entry[1] for entry in answer.resources[0][4]}
        finally:
            await admin.close()

    async def run() -> None:
        cluster = f"t{uuid.uuid4().hex[:8]}"
        with pytest.raises(LogFailure, match="create_topics is false"):
            await prepare(kafka, cluster, STREAM, create=False)
        await prepare(kafka, cluster, STREAM)
        before = await settings_of(cluster)
        assert (before["retention.ms"], before["min.insync.replicas"]) == ("-1", "2")
        await prepare(kafka, cluster, Stream("lab", ("lab/#",), 2, retention_age=60.0, retention_bytes=10_000))
        after = await settings_of(cluster)
        assert (after["retention.ms"], after["retention.bytes"]) == ("60000", "5000")
        assert after["min.insync.replicas"] == "2"
        with pytest.raises(LogFailure, match="has 2 partitions, not 3"):
            await prepare(kafka, cluster, Stream("lab", ("lab/#",), 3))

    asyncio.run(run())


def test_the_settings_of_a_compacted_stream() -> None:
    settings = topic_settings(Stream("lab", ("#",), compact=True, compact_tombstones=60.0), 1000)
    assert settings["cleanup.policy"] == "compact"
    assert settings["delete.retention.ms"] == "60000"
    limited = topic_settings(Stream("lab", ("#",), compact=True, retention_age=60.0), 1000)
    assert limited["cleanup.policy"] == "compact,delete"


def test_the_key_is_that_of_the_stream() -> None:
    one = message(1, b"\x26\x00\x04site\x00\x01x")
    assert key_of("topic", one) == b"lab/a"
    assert key_of("client", one) == b"sensor"
    assert key_of("user-property:site", one) == b"x"
    assert key_of("user-property:other", one) is None


def test_an_empty_payload_is_a_tombstone_of_a_compacted_stream_only() -> None:
    empty = Message("lab/a", b"", 1, False, b"", "sensor", 0, 0)
    assert record_of(Stream("lab", ("#",), compact=True), empty)["value"] is None
    assert record_of(Stream("lab", ("#",)), empty)["value"] == b""
    assert record_of(Stream("lab", ("#",), compact=True, key="user-property:a"), empty)["value"] == b""


async def test_bytes_of_another_program_are_passed_over() -> None:
    view = LogView(0, CLUSTER)
    topics = StreamTopics({}, StreamSource("c", "c.log", 0, CLUSTER, view.state), [STREAM], MAX_MESSAGE_BYTES)
    topics._add(_Transaction(None), view, 4, b"{}")  # type: ignore[arg-type]
    assert view.end == 5
