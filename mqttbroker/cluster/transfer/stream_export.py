"""Makes the streams of a single broker of a cluster's topics; records keep their partitions and offsets.

Messages that cores have acknowledged and not copied to the topics are read from their logs, and come behind the records of the topics. Nothing is
written to Kafka.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from bridge_spark.log.files import replace_file, sync_directory, write_all
from bridge_spark.log.high_watermark import WATERMARK_FILE, Watermark, encode_watermark
from bridge_spark.log.incarnation import Earlier, Incarnation, write_incarnation
from bridge_spark.log.kafka_record import RecordError, fields_of, stream_topic
from bridge_spark.log.kafka_topic_id import topic_id
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.stream_config import FORMAT_WITHOUT_ARCHIVE, can_seal
from bridge_spark.log.stream_files import DESCRIPTION_FILE
from mqttbroker.cluster.kafka.log import KafkaLog, LogFailure
from mqttbroker.cluster.log.view import LogView
from mqttbroker.cluster.streams.topics import TRANSACTION_TIMEOUT, last_position, positions_topic, stream_sections
from mqttbroker.cluster.transfer.offline_shards import follow
from mqttbroker.config.settings import Stream
from sessions.message import Message

FETCH_WAIT_MS: Final = 500
FETCH_BYTES: Final = 4_194_304  # of a partition, in one answer of Kafka; a longer record comes alone
ROWS_AT_ONCE: Final = 4096
STALLED: Final = 60.0  # seconds without progress, after which Kafka is given up
SETTLED_WAIT: Final = TRANSACTION_TIMEOUT + 40.0  # seconds until Kafka has ended the transactions of cores that were killed
LOOK_INTERVAL: Final = 0.5  # seconds between two looks whether it has

T = TypeVar("T")
Key = tuple[str, int]  # stream and partition


class ExportedStream(NamedTuple):
    """A stream in its directory; ``late`` of the ``records`` were in no topic yet."""

    name: str
    topic: str
    partitions: int
    records: int
    late: int


class _Bounds(NamedTuple):
    """A partition of a topic: its first offset, and the end of everything that is committed."""

    start: int
    end: int


class StreamExport:
    """Exports the topics of ``streams`` but those in ``left_out`` to the directory ``directory``, which is made.

    ``connection`` are the arguments of aiokafka's clients, ``id`` is that of the cluster's topics. `plan` is called first, then `run`.
    Both raise `LogFailure`, one line; `run` raises `OSError`, too.
    """

    def __init__(
        self, connection: dict[str, Any], id: str, streams: Sequence[Stream], directory: Path, left_out: Sequence[str] = ()
    ) -> None:
        self.ends: dict[Key, int] = {}  # of the partitions that were written
        self._connection = connection
        self._id = id
        self._directory = directory
        self._configured = {stream.name: stream for stream in streams}
        self._left_out = set(left_out)
        self._partitions: dict[str, int] = {}  # of the topics of streams
        self._has_positions = False
        self._records: dict[str, int] = {}  # by stream
        self._late: dict[str, int] = {}

    async def plan(self) -> None:
        """Find the topics, and check that each one can be exported."""
        prefix = stream_topic(self._id, "")
        admin = AIOKafkaAdminClient(**self._connection, client_id="mqttbroker")
        try:
            await admin.start()
            topics = set(await admin.list_topics())
            names = sorted(topic.removeprefix(prefix) for topic in topics if topic.startswith(prefix))
            self._has_positions = positions_topic(self._id) in topics
            described = await admin.describe_topics([prefix + name for name in names]) if names else []
            found = {one["topic"].removeprefix(prefix): len(one["partitions"]) for one in described}
        except (TimeoutError, KafkaError, OSError) as error:
            raise LogFailure(f"topics of streams: {error!r}") from None
        finally:
            await admin.close()
        if unknown := sorted(self._left_out - set(names)):
            raise LogFailure(f"there is no topic {prefix}{unknown[0]} that could be left out")
        for name in names:
            if name in self._left_out:
                continue
            stream = self._configured.get(name)
            if stream is None:
                raise LogFailure(
                    f"topic {prefix}{name}: the configuration has no [streams.{name}]: add it, or leave the stream out with"
                    f" --leave-out {name}"
                )
            if stream.partitions != found[name]:
                raise LogFailure(
                    f"topic {prefix}{name}: has {found[name]} partitions, and the stream {stream.partitions} in the configuration:"
                    f" set partitions = {found[name]}"
                )
            if not can_seal():
                raise LogFailure(f'topic {prefix}{name}: streams need pyarrow: pip install "mqttbroker[parquet]"')
            self._partitions[name] = found[name]

    async def run(self, log: KafkaLog, record_cluster: bytes, log_ends: dict[int, int]) -> list[ExportedStream]:
        """Write all records; ``log`` has the logs of the shards, up to ``log_ends``, and ``record_cluster`` is in each of their records."""
        if not self._partitions:
            return []
        places = [
            TopicPartition(stream_topic(self._id, name), number)
            for name, count in self._partitions.items() for number in range(count)
        ]  # fmt: skip
        positions = [TopicPartition(positions_topic(self._id), shard) for shard in log_ends if self._has_positions]
        consumer = self._consumer("read_committed")
        try:
            await self._kafka(consumer.start())
            bounds = await self._bounds(consumer, [*places, *positions])
            for name, count in self._partitions.items():
                self._describe(self._configured[name])
                await self._remember_topic(
                    consumer, name, [bounds[TopicPartition(stream_topic(self._id, name), number)].end for number in range(count)]
                )
                for number in range(count):
                    place = TopicPartition(stream_topic(self._id, name), number)
                    await self._copy(consumer, self._configured[name], place, bounds[place])
            starts, views = await self._views(consumer, positions, bounds, log, record_cluster)
        finally:
            await consumer.stop()
        await self._follow(log, starts, views, log_ends)
        for (name, number), end in self.ends.items():
            start = bounds[TopicPartition(stream_topic(self._id, name), number)].start
            _write_watermark(self._directory / name / str(number), start, end)
        for name in self._partitions:
            sync_directory(self._directory / name)
        sync_directory(self._directory)
        return [
            ExportedStream(name, stream_topic(self._id, name), count, self._records.get(name, 0), self._late.get(name, 0))
            for name, count in self._partitions.items()
        ]

    # -- topics ---------------------------------------------------------------------

    async def _bounds(self, consumer: AIOKafkaConsumer, places: list[TopicPartition]) -> dict[TopicPartition, _Bounds]:
        """The offsets of each partition, once no transaction is open."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLED_WAIT
        uncommitted = self._consumer("read_uncommitted")
        try:
            await self._kafka(uncommitted.start())
            while True:
                stable = await self._kafka(consumer.end_offsets(places))
                ends = await self._kafka(uncommitted.end_offsets(places))
                waiting = [place for place in places if stable[place] < ends[place]]
                if not waiting:
                    break
                if loop.time() > until:
                    raise LogFailure(
                        f"topic {waiting[0].topic}, partition {waiting[0].partition}: a transaction is open at offset"
                        f" {stable[waiting[0]]}, which Kafka has not ended for {SETTLED_WAIT:.0f} s"
                    )
                await asyncio.sleep(LOOK_INTERVAL)
            starts = await self._kafka(consumer.beginning_offsets(places))
        finally:
            await uncommitted.stop()
        return {place: _Bounds(starts[place], ends[place]) for place in places}

    async def _copy(self, consumer: AIOKafkaConsumer, stream: Stream, place: TopicPartition, bounds: _Bounds) -> None:
        """Write the records of one partition."""
        from bridge_spark.log.sealed.gapped import GappedPartition  # needs pyarrow

        directory = self._directory / stream.name / str(place.partition)
        directory.mkdir()
        loop = asyncio.get_running_loop()
        count = 0
        try:
            with GappedPartition(directory, stream.name, place.partition, bounds.start, stream.segment_bytes) as target:
                consumer.assign([place])
                consumer.seek(place, bounds.start)
                reached, since = bounds.start, loop.time()
                while reached < bounds.end:
                    read = await self._kafka(consumer.getmany(place, timeout_ms=FETCH_WAIT_MS, max_records=ROWS_AT_ONCE))
                    for record in read.get(place, ()):
                        if record.offset < bounds.end:
                            target.add(record.offset, _message(place, record))
                            count += 1
                    before, reached = reached, await self._kafka(consumer.position(place))
                    if reached > before:
                        since = loop.time()
                    elif loop.time() - since > STALLED:
                        raise LogFailure(f"topic {place.topic}, partition {place.partition}: Kafka has sent nothing for {STALLED:.0f} s")
                target.close(bounds.end)
        except SegmentError as error:
            raise LogFailure(f"{directory}: {error}") from None
        self.ends[stream.name, place.partition] = bounds.end
        self._records[stream.name] = self._records.get(stream.name, 0) + count

    # -- messages in the logs only -----------------------------------------------------

    async def _views(
        self, consumer: AIOKafkaConsumer, positions: list[TopicPartition], bounds: dict[TopicPartition, _Bounds], log: KafkaLog,
        record_cluster: bytes,
    ) -> tuple[dict[int, int], dict[int, LogView]]:  # fmt: skip
        """From where on each log is not in the topics, and the views that read it from there on."""
        shards = [place.partition for place in positions]
        log_starts = await log.starts(shards) if shards else {}
        starts: dict[int, int] = {}
        views: dict[int, LogView] = {}
        for place in positions:
            shard = place.partition
            consumer.assign([place])
            state = await self._kafka(last_position(consumer, place, bounds[place].end))
            view = views[shard] = LogView(shard, record_cluster)
            if state is not None:
                view.restore(state)
            starts[shard] = view.end
            if shard not in log_starts:
                raise LogFailure(f"{log.topic}, partition {shard}: no start is known; has it a leader that can be reached?")
            if log_starts[shard] > view.end:
                raise LogFailure(
                    f"{log.topic}, partition {shard}: begins at offset {log_starts[shard]}, but only the records before {view.end}"
                    " are in the topics of streams: start the nodes, and stop them when no node warns of streams"
                )
        return starts, views

    async def _follow(self, log: KafkaLog, starts: dict[int, int], views: dict[int, LogView], ends: dict[int, int]) -> None:
        """Write the messages that no core has copied."""
        with ExitStack() as stack:
            targets: dict[Key, Any] = {}
            ignored: dict[str, int] = {}

            def read(shard: int, offset: int, record: bytes) -> None:
                for section in stream_sections(views[shard], offset, record):
                    count = len(section.topics)
                    if section.name not in self._partitions:
                        ignored[section.name] = ignored.get(section.name, 0) + count
                        continue
                    target = self._target((section.name, section.partition), targets, stack)
                    for index in range(count):
                        target.add(target.end, section.message(index))
                    self._late[section.name] = self._late.get(section.name, 0) + count

            await follow(log, starts, ends, read, lambda: None)
            if unknown := sorted(set(ignored) - self._left_out):
                raise LogFailure(
                    f"{log.topic}: has {ignored[unknown[0]]} messages of stream {unknown[0]!r}, which has no topic: start the nodes once"
                )
            for key, target in targets.items():
                target.close(target.end)
                self.ends[key] = target.end
        for name, count in self._late.items():
            self._records[name] = self._records.get(name, 0) + count

    def _target(self, key: Key, targets: dict[Key, Any], stack: ExitStack) -> Any:
        from bridge_spark.log.sealed.gapped import GappedPartition  # needs pyarrow

        if key not in targets:
            if key not in self.ends:
                raise ValueError(f"stream {key[0]!r} has no partition {key[1]}")
            directory = self._directory / key[0] / str(key[1])
            segment_bytes = self._configured[key[0]].segment_bytes
            targets[key] = stack.enter_context(GappedPartition(directory, *key, self.ends[key], segment_bytes))
        return targets[key]

    # -- files and requests -----------------------------------------------------------

    def _describe(self, stream: Stream) -> None:
        directory = self._directory / stream.name
        directory.mkdir(parents=True)
        description = {
            "name": stream.name, "partitions": stream.partitions, "filters": list(stream.filters), "key": stream.key,
            "format_version": FORMAT_WITHOUT_ARCHIVE,
        }  # fmt: skip
        replace_file(directory / DESCRIPTION_FILE, (json.dumps(description, indent=2) + "\n").encode())

    async def _remember_topic(self, consumer: AIOKafkaConsumer, name: str, ends: list[int]) -> None:
        """Let readers of the topic go on in the directory, with the offsets that they have reached."""
        known = await self._kafka(topic_id(consumer._client, stream_topic(self._id, name)))
        if known:
            write_incarnation(self._directory / name, Incarnation("", (Earlier(known, tuple(ends)),)))

    def _consumer(self, isolation: str) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **self._connection, client_id="mqttbroker", group_id=None, enable_auto_commit=False, auto_offset_reset="none",
            isolation_level=isolation, fetch_max_wait_ms=FETCH_WAIT_MS, max_partition_fetch_bytes=FETCH_BYTES,
        )  # fmt: skip

    async def _kafka(self, request: Awaitable[T]) -> T:
        try:
            return await request
        except (TimeoutError, KafkaError) as error:
            raise LogFailure(f"topics of streams: {error!r}") from None


def _message(place: TopicPartition, record: Any) -> Message:
    try:
        fields = fields_of(record.headers)
    except RecordError as error:
        raise LogFailure(
            f"topic {place.topic}, partition {place.partition}, offset {record.offset}: is no record of a stream: {error}"
        ) from None
    return Message(fields.topic, record.value or b"", fields.qos, fields.retain, fields.properties, fields.client_id, fields.received, 0)


def _write_watermark(directory: Path, start: int, end: int) -> None:
    fd = os.open(directory / WATERMARK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        write_all(fd, encode_watermark(Watermark(end, end, 0, start)), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(directory)
