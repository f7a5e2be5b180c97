"""Derives the topics of streams from a shard's log: each message of a stream once, in the order of the log.

The records of a transaction are those of one part of the log, and beside them the position behind that part. So a transaction
that is not committed leaves nothing, and whoever derives next goes on behind the last one that is. A new producer of the shard
fences the one before by its epoch.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, OffsetOutOfRangeError, ProducerFenced

from bridge_spark.log.kafka_record import headers_of, stream_topic
from mqttbroker.cluster.log.body import Section, published_of
from mqttbroker.cluster.log.records import CHANGES, ForeignRecord, decode_header
from mqttbroker.cluster.log.view import OUT_OF_SEQUENCE, VALID, LogView, ViewState
from mqttbroker.config.settings import Stream
from mqttbroker.core.delivery.publisher import partition_key
from sessions.message import Message
from sessions.write_set import TO_STREAM

log = logging.getLogger("mqttbroker.cluster")

INTERVAL: Final = 0.1  # seconds from the first message of a transaction to its commit
IDLE_INTERVAL: Final = 5.0  # seconds until a position without messages is stored
TRANSACTION_BYTES: Final = 4 * 1024 * 1024  # payloads that end a transaction
BATCH_BYTES: Final = 256 * 1024
TRANSACTION_TIMEOUT: Final = 20.0  # seconds until Kafka aborts the transaction of a producer that is gone
RETRY_AFTER: Final = 0.5  # seconds
FENCED_RETRY: Final = 5.0  # seconds until a producer that was fenced tries again: the shard may be its own after all
CLOSE_TIMEOUT: Final = 5.0  # seconds
FETCH_WAIT_MS: Final = 500
FETCHED_AT_ONCE: Final = 500  # records
RECORD_OVERHEAD: Final = 64 * 1024  # bytes of what a record has beside a packet's contents

POSITION_KEY: Final = b"position"
STARTED_KEY: Final = b"started"


def most_record_bytes(max_message_bytes: int) -> int:
    """The longest record that a packet of so many bytes can become: names of headers are longer than short user properties."""
    return 2 * max_message_bytes + RECORD_OVERHEAD


def positions_topic(cluster: str) -> str:
    """The topic with the positions of all shards: one partition for each, compacted."""
    return f"{cluster}.stream-positions"


class Position(msgspec.Struct):
    """How far a shard's log is derived: a `ViewState`."""

    offset: int
    epoch: int
    owner: str  # hexadecimal
    sequence: int
    released: bool

    @classmethod
    def of(cls, state: ViewState) -> Position:
        return cls(state.end, state.epoch, state.owner.hex(), state.sequence, state.released)

    @property
    def state(self) -> ViewState:
        return ViewState(self.offset, self.epoch, bytes.fromhex(self.owner), self.sequence, self.released)


class StreamSource(NamedTuple):
    """The log that topics are derived from: ``topic`` and ``shard`` are Kafka's topic and partition, ``id`` that of the cluster's
    topics, ``cluster`` that of its records. ``initial`` is where the owner's own view of the log began."""

    id: str
    topic: str
    shard: int
    cluster: bytes
    initial: ViewState


class StreamTopics:
    """The deriver of one shard. All methods are for one event loop.

    ``connection`` are the arguments of aiokafka's clients. ``max_message_bytes`` is the longest packet of a client. The topics exist
    (`topic_setup`).
    """

    def __init__(self, connection: dict[str, Any], source: StreamSource, streams: Sequence[Stream], max_message_bytes: int) -> None:
        self.failure = ""  # why nothing is derived at the moment
        self.messages = 0  # in committed transactions
        self.position = -1  # the log is derived up to this offset, exclusive; -1 = not known yet
        self._connection = connection
        self._source = source
        self._streams = {stream.name: stream for stream in streams}
        self._max_bytes = most_record_bytes(max_message_bytes)
        self._positions = TopicPartition(positions_topic(source.id), source.shard)
        self._log = TopicPartition(source.topic, source.shard)
        self._unknown: set[str] = set()  # streams in the log without settings, each logged once

    async def run(self) -> None:
        """Derive until cancelled."""
        while True:
            wait = RETRY_AFTER
            try:
                await self._run()
            except ProducerFenced:
                self._failed("another node derives the shard's streams")
                wait = FENCED_RETRY
            except OffsetOutOfRangeError as error:
                self._failed(f"{self._source.topic}: records are missing that are not in the streams' topics yet: {error}")
                wait = FENCED_RETRY
            except (TimeoutError, KafkaError, OSError) as error:
                self._failed(repr(error))
            except Exception as error:
                self._failed(repr(error))
                log.exception("event=defect in=stream_topics")
                wait = FENCED_RETRY
            await asyncio.sleep(wait)

    def _failed(self, reason: str) -> None:
        if reason != self.failure:
            self.failure = reason
            log.warning("event=streams_not_derived shard=%d reason=%s", self._source.shard, reason)

    async def _run(self) -> None:
        producer = AIOKafkaProducer(
            **self._connection,
            client_id="mqttbroker",
            transactional_id=f"{self._source.id}-stream-{self._source.shard}",
            transaction_timeout_ms=int(TRANSACTION_TIMEOUT * 1000),
            max_request_size=self._max_bytes,
            max_batch_size=BATCH_BYTES,
            metadata_max_age_ms=30_000,
        )
        try:
            await producer.start()
            view = LogView(self._source.shard, self._source.cluster)
            state = await self._stored_position(producer)
            await self._derive(producer, view, state)
        finally:
            await close_producer(producer)

    # -- the stored position --------------------------------------------------------

    async def _stored_position(self, producer: AIOKafkaProducer) -> ViewState | None:
        """The position of the last committed transaction; None if there is none.

        The record that is written here first stands behind all transactions of the producers before, which are fenced.
        """
        name = os.urandom(8)
        await producer.begin_transaction()
        sent = await producer.send(self._positions.topic, name, STARTED_KEY, self._positions.partition)
        await producer.commit_transaction()
        end = (await sent).offset
        consumer = self._consumer("read_committed")
        await consumer.start()
        try:
            consumer.assign([self._positions])
            return await last_position(consumer, self._positions, end)
        finally:
            await consumer.stop()

    def _consumer(self, isolation: str) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **self._connection,
            client_id="mqttbroker",
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level=isolation,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            metadata_max_age_ms=30_000,
        )

    # -- transactions ---------------------------------------------------------------

    async def _derive(self, producer: AIOKafkaProducer, view: LogView, state: ViewState | None) -> None:
        consumer = self._consumer("read_uncommitted")
        await consumer.start()
        try:
            consumer.assign([self._log])
            if state is None and (await consumer.beginning_offsets([self._log]))[self._log] > 0:
                state = self._source.initial
            if state is not None:
                view.restore(state)
            consumer.seek(self._log, view.end)
            self.position = view.end
            self.failure = ""
            loop = asyncio.get_running_loop()
            stored_at = loop.time()
            while True:
                part = _Transaction(producer)
                until = stored_at + IDLE_INTERVAL
                while loop.time() < until and part.size < TRANSACTION_BYTES:
                    wait = max(0, min(int((until - loop.time()) * 1000), FETCH_WAIT_MS))
                    read = await consumer.getmany(self._log, timeout_ms=wait, max_records=FETCHED_AT_ONCE)
                    for record in read.get(self._log, ()):
                        self._add(part, view, record.offset, record.value or b"")
                    if part.count and until - loop.time() > INTERVAL:
                        until = loop.time() + INTERVAL
                if view.state.end > self.position:
                    await self._commit(producer, part, view.state)
                stored_at = loop.time()
        finally:
            await consumer.stop()

    def _add(self, part: _Transaction, view: LogView, offset: int, record: bytes) -> None:
        """Add the messages of a record of the log. Raises `BadRecord`, and `ValueError` for a body that is none."""
        for section in stream_sections(view, offset, record):
            stream = self._streams.get(section.name)
            if stream is None:
                self._skip(section.name, offset)
                continue
            place = TopicPartition(stream_topic(self._source.id, section.name), section.partition)
            for index in range(len(section.topics)):
                part.add(place, stream, section.message(index))

    def _skip(self, name: str, offset: int) -> None:
        """A stream that is no longer configured gets nothing more, as on a broker without a cluster."""
        if name not in self._unknown:
            self._unknown.add(name)
            log.warning("event=stream_not_configured stream=%s shard=%d offset=%d", name, self._source.shard, offset)

    async def _commit(self, producer: AIOKafkaProducer, part: _Transaction, state: ViewState) -> None:
        position = msgspec.json.encode(Position.of(state))
        await producer.begin_transaction()
        sent = [await producer.send_batch(batch, place.topic, partition=place.partition) for place, batch in part.batches()]
        sent.append(await producer.send(self._positions.topic, position, POSITION_KEY, self._positions.partition))
        for outcome in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(outcome, MessageSizeTooLargeError):
                topics = ", ".join(sorted({place.topic for place, _ in part.batches()}))
                raise KafkaError(f"a message is longer than max.message.bytes of {topics}")
            if isinstance(outcome, BaseException):
                raise outcome
        await producer.commit_transaction()
        self.position = state.end
        self.messages += part.count


def stream_sections(view: LogView, offset: int, record: bytes) -> list[Section]:
    """The messages for streams of a record of the log, which ``view`` reads. Raises `BadRecord`, and `ValueError` for a body that is
    none."""
    try:
        header = decode_header(record)
    except ForeignRecord:
        view.skip(offset)
        return []
    validity = view.read(offset, header)
    if validity == OUT_OF_SEQUENCE:
        log.error("event=defect in=shard_log shard=%d offset=%d reason=out_of_sequence", view.shard, offset)
    if validity != VALID or header.kind != CHANGES:
        return []
    body = view.body(header, record)
    if body is None:
        return []  # other parts of it follow
    return [one for one in published_of(body).sections if one.destination == TO_STREAM]


async def last_position(consumer: AIOKafkaConsumer, place: TopicPartition, end: int) -> ViewState | None:
    """The last committed position of a shard before the offset ``end``, None if there is none; ``consumer`` has ``place`` assigned."""
    first = (await consumer.beginning_offsets([place]))[place]
    back = 64
    while True:
        start = max(first, end - back)
        found: ViewState | None = None
        consumer.seek(place, start)
        while await consumer.position(place) < end:
            read = await consumer.getmany(place, timeout_ms=FETCH_WAIT_MS)
            for record in read.get(place, ()):
                if record.offset < end and record.key == POSITION_KEY:
                    found = msgspec.json.decode(record.value, type=Position).state
        if found is not None or start == first:
            return found
        back *= 8


class _Transaction:
    """The messages of one transaction, in batches for each partition of a topic."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self.count = 0
        self.size = 0
        self._producer = producer
        self._batches: dict[TopicPartition, list[Any]] = {}

    def add(self, place: TopicPartition, stream: Stream, message: Message) -> None:
        batches = self._batches.setdefault(place, [])
        fields = record_of(stream, message)
        if not batches or batches[-1].append(**fields) is None:
            batches.append(self._producer.create_batch())
            if batches[-1].append(**fields) is None:
                raise ValueError("an empty batch takes no record")
        self.count += 1
        self.size += message.size

    def batches(self) -> list[tuple[TopicPartition, Any]]:
        """The batches, those of one partition in their order."""
        return [(place, batch) for place, batches in self._batches.items() for batch in batches]


def record_of(stream: Stream, message: Message) -> dict[str, Any]:
    """A message as the arguments of aiokafka's batches; in a compacted topic an empty payload is a tombstone."""
    key = key_of(stream.key, message)
    return {
        "timestamp": message.timestamp // 1000,
        "key": key,
        "value": None if stream.compact and key is not None and not message.payload else message.payload,
        "headers": headers_of(message),
    }


def key_of(key: str, message: Message) -> bytes | None:
    """The key of the record: that of the stream; None for a message without that user property."""
    if key == "topic":
        return message.topic.encode("utf-8")
    return partition_key(key, message) or None


async def close_producer(producer: AIOKafkaProducer) -> None:
    """Close the connections; a transaction that is open is aborted by the next producer."""
    manager = producer._txn_manager
    ended = None if manager is None or manager.transactional_id is None else manager.wait_for_transaction_end()
    if ended is not None and ended.done():
        ended.exception()  # else asyncio logs that nobody asked for it
    with suppress(Exception):
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await producer.stop()
        return
    with suppress(Exception):
        await producer.client.close()
