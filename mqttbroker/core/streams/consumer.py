"""Consumers: subscriptions to streams, and what each sends its client in one event-loop iteration.

A consumer has one chunk in memory at a time, whatever the number of partitions. Its client is sent the next records
when the in-flight window, the outbox and the rates permit it, and messages of other subscriptions that wait go first.
"""

from __future__ import annotations

import logging
from typing import Final, cast

from mypy_extensions import i64

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.frames import two_bytes
from mqttbroker.codec.properties import user_property
from mqttbroker.codec.reason_codes import ADMINISTRATIVE_ACTION, IMPLEMENTATION_SPECIFIC_ERROR
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.routing.route import StreamRule
from mqttbroker.core.streams.chunk import NO_BYTES, ChunkRows, user_property_bytes
from mqttbroker.core.streams.chunk_reads import ChunkReads
from mqttbroker.core.streams.partition_reader import PartitionReader, ReaderOwner
from mqttbroker.core.streams.rights import StreamRights, matches_any
from sessions.counters import Counters
from sessions.readers.in_flight import InFlightOwner, StreamInFlight
from sessions.readers.stored_readers import StoredReader
from sessions.room import RoomUser
from sessions.session import RETAIN_AS_PUBLISHED, Session, Subscription

log = logging.getLogger("mqttbroker")

MAX_BACKLOG: Final = 262_144  # bytes in an outbox beyond which a consumer waits for the socket

ADDED_BYTES: Final = 200  # of properties that a record gets, about

TOPIC_BYTES: Final = 400  # memory of what a consumer remembers of a topic, beside the topic
MAX_TOPIC_BYTES: Final = 131_072  # of what a consumer remembers of all topics


class TopicPlan:
    """The packets of a topic for one consumer: ``field`` is the topic with its length, ``added`` the encoded properties that
    each packet has behind those of the message."""

    def __init__(self, wanted: bool, field: bytes, added: bytes) -> None:
        self.wanted = wanted
        self.field = field
        self.added = added


_REDELIVERED: Final = user_property_bytes(b"redelivered", b"1")
_UNWANTED: Final = TopicPlan(False, NO_BYTES, NO_BYTES)


class StreamConsumer(ReaderOwner):
    """One subscription of a session to a stream, while the client is connected.

    ``topic_filter`` is "" for all topics of the stream.
    """

    def __init__(
        self,
        consumers: StreamConsumers,
        session: Session,
        subscription: Subscription,
        rule: StreamRule,
        topic_filter: str,
        rights: StreamRights,
    ) -> None:
        self.consumers = consumers
        self.session = session
        self.subscription = subscription
        self.rule = rule
        self.topic_filter = topic_filter
        self.rights = rights
        self.stored: StoredReader | None = None  # the offsets, if they are stored
        self.group: InFlightOwner | None = None  # the group that the session is a member of
        self.skips_damage = False
        self.stops_when_expired = False
        self.readers: list[PartitionReader] = []
        self.closed = False
        self.blocked = False  # it has rows, and the client cannot be sent more
        self._turn = 0  # index of the reader that is asked next
        self._plans: dict[bytes, TopicPlan] = {}
        self._plan_bytes = 0
        self._partition_property: bytes = NO_BYTES
        self._partition = -1

    def add_partition(self, partition: int) -> PartitionReader:
        """Read a partition, from the offset on that the caller seeks."""
        reader = PartitionReader(self.consumers.reads, self, self.rule.name, partition)
        self.readers.append(reader)
        return reader

    def remove_partition(self, partition: int) -> None:
        """Read a partition no longer."""
        for index, reader in enumerate(self.readers):
            if reader.partition == partition:
                del self.readers[index]
                reader.close()
                break

    def reader_of(self, partition: int) -> PartitionReader | None:
        for reader in self.readers:
            if reader.partition == partition:
                return reader
        return None

    def change(self, subscription: Subscription) -> None:
        """The client subscribed again, with other options."""
        self.subscription = subscription
        self.forget_topics()

    def forget_topics(self) -> None:
        """Decide on each topic again: rules or options have changed."""
        self.consumers.reads.forget_topics(self._plan_bytes)
        self._plan_bytes = 0
        self._plans = {}
        self._partition = -1

    def close(self) -> None:
        """Read no more."""
        if not self.closed:
            self.closed = True
            self.forget_topics()
            for reader in self.readers:
                reader.close()
            self.consumers.forget(self)

    # -- readers --------------------------------------------------------------

    def has_rows(self, reader: PartitionReader) -> None:
        offsets = reader.offsets
        if offsets is not None and self.stored is not None and reader.next_offset > offsets.next_wanted:
            # The log has nothing from there on: it begins later, or it was asked for a time.
            offsets.leave_out(reader.next_offset)
            self.stored.save(offsets)
        if not self.blocked:
            self.consumers.wake(self)

    def has_room(self, reader: PartitionReader) -> None:
        self.unblock()
        self.consumers.wake(self)

    def expired(self, reader: PartitionReader, offset: int) -> None:
        name = self.rule.name
        self.consumers.counters.stream_records_missed += max(0, reader.next_offset - offset)
        log.warning(
            "event=stream_offset_expired client=%s stream=%s partition=%d offset=%d continues_at=%d",
            self.session.client_id,
            name,
            reader.partition,
            offset,
            reader.next_offset,
        )
        if self.stops_when_expired:
            self._disconnect(
                f"stream {name}, partition {reader.partition}: offset {offset} is not in the log any more, which begins"
                f" at {reader.next_offset}"
            )

    def damaged(self, reader: PartitionReader, offset: int, end: int, reason: str) -> None:
        name = self.rule.name
        until = f"{offset} to {end - 1}" if end > offset + 1 else f"{offset}"
        action = "skipped" if self.skips_damage else "stopped"
        log.error(
            "event=stream_damaged client=%s stream=%s partition=%d offsets=%s action=%s reason=%s",
            self.session.client_id,
            name,
            reader.partition,
            until.replace(" ", "_"),
            action,
            reason,
        )
        if self.skips_damage:
            if end > offset:
                self.consumers.counters.stream_records_missed += end - offset
            reader.skip_damage()
            self.has_rows(reader)
        else:
            self._disconnect(f"stream {name}, partition {reader.partition}: cannot read offset {until}: {reason}")

    def failed(self, reader: PartitionReader, reason: str) -> None:
        name = self.rule.name
        log.error(
            "event=stream_failed client=%s stream=%s partition=%d reason=%s",
            self.session.client_id,
            name,
            reader.partition,
            reason,
        )
        self._disconnect(f"stream {name}, partition {reader.partition}: {reason}")

    def _disconnect(self, detail: str) -> None:
        connection = self.session.connection
        if connection is not None:
            connection.disconnect(IMPLEMENTATION_SPECIFIC_ERROR, detail)

    def removed(self) -> None:
        """The stream was deleted."""
        connection = self.session.connection
        if connection is not None:
            connection.disconnect(ADMINISTRATIVE_ACTION, f"stream {self.rule.name} was deleted")

    # -- sending --------------------------------------------------------------

    def step(self, budget: i64) -> i64:
        """Send a part, or ask for a chunk; returns the cost, 0 if there was nothing to do."""
        connection = cast(Connection, self.session.connection)
        cost: i64 = 0
        while cost < budget and not self.closed:
            reader = self._reader_with_chunk()
            if reader is None:
                break
            if not self._accepts(connection):
                self._block(reader)
                break
            cost += self._send(connection, reader, budget - cost)
            if self.blocked:
                self._block(reader)
                break
        return cost

    def _reader_with_chunk(self) -> PartitionReader | None:
        """The reader that has a chunk. If none has one, ask for the next."""
        readers = self.readers
        count: i64 = len(readers)
        asked = False
        for reader in readers:
            if reader.has_chunk:
                return reader
            if reader.asked:
                asked = True
        if asked:
            return None
        index: i64 = 0
        while index < count:
            reader = readers[(self._turn + index) % count]
            index += 1
            if reader.ask():
                self._turn = (self._turn + index) % count
                return None
        return None

    def _accepts(self, connection: Connection) -> bool:
        """Whether the client can be sent a record at QoS 0, and no older message waits for it."""
        session = self.session
        outbox = connection.outbox
        return (
            connection.ready
            and not outbox.writing_paused
            and outbox.backlog < MAX_BACKLOG
            and not session.deliveries.queue.entries
            and session.deliveries.all_in_memory
        )

    def _block(self, reader: PartitionReader) -> None:
        self.blocked = True
        reader.set_idle(True)

    def unblock(self) -> None:
        """There may be room again."""
        if self.blocked:
            self.blocked = False
            for reader in self.readers:
                reader.set_idle(False)
            self.consumers.wake(self)

    def _send(self, connection: Connection, reader: PartitionReader, budget: i64) -> i64:
        """Send rows of a chunk while the client accepts them; returns the cost. Sets ``blocked``."""
        session = self.session
        subscription = self.subscription
        granted: i64 = subscription.qos
        as_published: bool = subscription.options & RETAIN_AS_PUBLISHED != 0
        version: i64 = connection.version
        maximum: i64 = connection.maximum_packet_size
        if reader.partition != self._partition:
            self._partition = reader.partition
            self._partition_property = user_property_bytes(b"partition", str(reader.partition).encode())
        parts: list[bytes] = []
        size: i64 = 0
        count: i64 = 0
        payload: i64 = 0
        cost: i64 = 0
        limited: bool = connection.outbox.throttle is not None
        offsets = reader.offsets
        group = self.group
        moved: bool = False  # the stored offsets are to be saved
        while cost < budget and size < MAX_BACKLOG:
            rows = reader.peek()
            if rows is None:
                break
            cost += 1
            if offsets is not None and rows.offset != offsets.next_wanted:
                if rows.offset > offsets.next_wanted:
                    offsets.leave_out(rows.offset)
                    moved = True
                if rows.offset < offsets.next_wanted:
                    reader.take()
                    continue
            topic = rows.topic
            plan = self._plans.get(topic)
            if plan is None:
                plan = self._plan(topic)
                cost += 2
            if not plan.wanted:
                if offsets is not None:
                    offsets.leave_out(rows.offset + 1)
                    moved = True
                reader.take()
                continue
            qos: i64 = min(rows.qos, granted)
            retain: bool = as_published and rows.retain
            packet_id: i64 = 0
            again: bool = False
            if offsets is not None and group is not None and qos == 1:
                if not session.deliveries.window.is_open:
                    self.blocked = True
                    break
                if not offsets.may_hand_over(rows.offset):
                    offsets.waiting = True
                    moved = True
                    self.blocked = True
                    break
                again = offsets.hand_over(rows.offset) > 0
                packet_id = session.deliveries.allocate_stream(StreamInFlight(group, offsets, rows.offset))
            elif qos:
                if session.id != 0:
                    # The session's own queue keeps the message until it is acknowledged.
                    self._flush(connection, parts, size, count, payload)
                    parts = []
                    size = count = payload = 0
                    if not session.deliveries.open or self._queue_full(rows):
                        self.blocked = True
                        break
                    if offsets is not None:
                        again = offsets.deliveries(rows.offset) > 0
                        offsets.put_into_queue(rows.offset)
                        moved = True
                    self._offer(connection, rows, qos, retain, plan, again)
                    reader.take()
                    cost += 2
                    continue
                if not self._window_has_room():
                    self.blocked = True
                    break
                packet_id = session.deliveries.allocate_unpersisted(qos)
                if packet_id == 0:
                    self.blocked = True
                    break
            added: bytes = NO_BYTES
            if version >= 5:
                added = plan.added + self._partition_property
                if not plan.added:
                    added = self._key_property(rows) + added
                if subscription.identifier:
                    added += b"\x0b" + encode_varint(subscription.identifier)
                if again:
                    added += _REDELIVERED
            first_byte: i64 = 0x30 | qos << 1 | (1 if retain else 0)
            written = rows.append_packet(parts, version, first_byte, plan.field, packet_id, added, maximum)
            if offsets is not None and qos == 0:
                offsets.leave_out(rows.offset + 1)
                moved = True
            reader.take()
            if written == 0:  # [MQTT-3.1.2-25]
                connection.drops().too_large += 1
                if qos == 1:
                    session.deliveries.acknowledge(packet_id)
                elif qos == 2:
                    session.deliveries.publish_refused(packet_id)
                continue
            size += written
            payload += rows.payload_size
            count += 1
            cost += written >> 10
            if limited:
                break
        self._flush(connection, parts, size, count, payload)
        if offsets is not None and self.stored is not None and (moved or offsets.needs_reservation):
            self.stored.save(offsets)
        if reader.has_chunk and not self._accepts(connection):
            self.blocked = True
        return cost

    def _flush(self, connection: Connection, parts: list[bytes], size: i64, count: i64, payload: i64) -> None:
        if count:
            connection.send_publish_packets(parts, size, count, payload)
            self.consumers.counters.stream_records_sent += count

    def _queue_full(self, rows: ChunkRows) -> bool:
        """Whether a persistent session's messages in flight leave no room for a record in its queue."""
        session = self.session
        size: i64 = rows.payload_size + len(rows.topic) + len(rows.properties) + ADDED_BYTES
        return session.deliveries.queued_messages > 0 and session.deliveries.queue.full(int(size))

    def _window_has_room(self) -> bool:
        """Whether a transient session's in-flight window has room; live messages have a part of it to themselves."""
        session = self.session
        window = session.deliveries.window
        most: i64 = min(i64(window.unpersisted_maximum), session.context.limits.max_queued_messages)
        return window.packet_ids_in_use < max(i64(window.send_maximum), most // 2)

    def _offer(self, connection: Connection, rows: ChunkRows, qos: i64, retain: bool, plan: TopicPlan, again: bool) -> None:
        """Put a record into the queue of a persistent session, which sends it at once."""
        properties = rows.properties
        if connection.version >= 5:
            key = plan.added or self._key_property(rows)
            mark = _REDELIVERED if again else NO_BYTES
            properties = b"".join((properties, rows.place_properties(), key, self._partition_property, mark))
        subscription_ids: bytes = NO_BYTES
        if self.subscription.identifier:
            subscription_ids = b"\x0b" + encode_varint(self.subscription.identifier)
        entry = self.session.deliveries.offer(rows.message(properties), qos, retain, subscription_ids, None)
        if entry is not None:
            connection.send_entry(entry, False)
        self.consumers.counters.stream_records_sent += 1

    def _key_property(self, rows: ChunkRows) -> bytes:
        """The user property `key` of a record whose key is not its topic."""
        key = self.rule.key
        value = rows.client_id if key == "client" else user_property(rows.properties, key.partition(":")[2].encode())
        return user_property_bytes(b"key", value)

    def plan_of(self, rows: ChunkRows) -> TopicPlan:
        """The action for a row."""
        return self._plans.get(rows.topic) or self._plan(rows.topic)

    def send_row(self, rows: ChunkRows, partition: int, qos: i64, packet_id: i64, mark: bytes) -> None:
        """Send one row at QoS 0 or 1; ``mark`` are encoded properties that a version 5 client gets behind the others."""
        session = self.session
        connection = cast(Connection, session.connection)
        subscription = self.subscription
        plan = self.plan_of(rows)
        added: bytes = NO_BYTES
        if connection.version >= 5:
            added = plan.added or self._key_property(rows)
            added += user_property_bytes(b"partition", str(partition).encode()) + mark
            if subscription.identifier:
                added += b"\x0b" + encode_varint(subscription.identifier)
        retain: bool = subscription.options & RETAIN_AS_PUBLISHED != 0 and rows.retain
        first_byte: i64 = 0x30 | qos << 1 | (1 if retain else 0)
        parts: list[bytes] = []
        maximum: i64 = connection.maximum_packet_size
        size = rows.append_packet(parts, connection.version, first_byte, plan.field, packet_id, added, maximum)
        if size == 0:  # [MQTT-3.1.2-25]
            connection.drops().too_large += 1
            if qos:
                session.deliveries.acknowledge(packet_id)
        else:
            self._flush(connection, parts, size, 1, rows.payload_size)

    def _plan(self, topic_bytes: bytes) -> TopicPlan:
        """Decide on a topic, and remember it."""
        size: int = len(topic_bytes) * 4 + TOPIC_BYTES
        if self._plan_bytes + size > MAX_TOPIC_BYTES:
            partition = self._partition
            self.forget_topics()
            self._partition = partition
        topic = topic_bytes.decode("utf-8")
        plan = _UNWANTED
        # Compaction leaves a row without a topic in place of a record that it removed.
        wanted: bool = bool(topic) and (not self.topic_filter or matches_any([self.topic_filter], topic))
        if wanted and self.rights.may_read(topic):
            added = user_property_bytes(b"key", topic_bytes) if self.rule.key == "topic" else NO_BYTES
            plan = TopicPlan(True, two_bytes(len(topic_bytes)) + topic_bytes, added)
        if self.consumers.reads.remember(size):
            self._plans[topic_bytes] = plan
            self._plan_bytes += size
        return plan


class SessionConsumers(RoomUser):
    """The consumers of one session, by filter."""

    def __init__(self) -> None:
        self.by_filter: dict[str, StreamConsumer] = {}

    def has_room(self) -> None:
        for consumer in self.by_filter.values():
            consumer.unblock()


class StreamConsumers:
    """All consumers of one broker. In each event-loop iteration one of them has its turn."""

    def __init__(self, reads: ChunkReads, outbound: Outbound) -> None:
        self.reads = reads
        self.outbound = outbound
        self.counters: Counters = outbound.counters
        self.all: dict[StreamConsumer, bool] = {}
        self._turn: StreamConsumer | None = None
        self._waiting: dict[StreamConsumer, bool] = {}  # those that have something to do, the next first

    @property
    def active(self) -> bool:
        """Whether `step` may have something to do."""
        return self._turn is not None or bool(self._waiting)

    def add(self, consumer: StreamConsumer) -> None:
        self.all[consumer] = True

    def forget(self, consumer: StreamConsumer) -> None:
        """A consumer is closed."""
        self.all.pop(consumer, None)
        self._waiting.pop(consumer, None)
        if consumer is self._turn:
            self._turn = None

    def wake(self, consumer: StreamConsumer) -> None:
        """Have `step` called in this iteration of the event loop or the next."""
        if consumer.closed or consumer.session.connection is None or consumer is self._turn:
            return
        if consumer not in self._waiting:
            self._waiting[consumer] = True
            if self.outbound.on_flush_needed is not None:
                self.outbound.on_flush_needed()

    def step(self, budget: i64) -> bool:
        """Let the consumer whose turn it is, or the next, send a part; false if none has anything to send. A record, each
        KiB of it, and a consumer that sends nothing cost 1 of the budget."""
        left: i64 = budget
        while left > 0:
            consumer = self._turn
            self._turn = None
            if consumer is None:
                if not self._waiting:
                    return False
                consumer = next(iter(self._waiting))
                del self._waiting[consumer]
            if consumer.session.connection is None or consumer.blocked:
                left -= 1
                continue
            cost = consumer.step(left)
            if cost and not consumer.closed:
                self._waiting.pop(consumer, None)
                self._turn = consumer
            left -= max(1, cost)
        return True

    def end_turn(self) -> None:
        """The next `step` is that of another consumer."""
        consumer = self._turn
        if consumer is not None:
            self._turn = None
            self._waiting[consumer] = True

    def rules_changed(self) -> None:
        """Discard all cached decisions."""
        for consumer in self.all:
            consumer.rights.changed()
            consumer.forget_topics()
