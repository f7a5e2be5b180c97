"""Consumers: subscriptions to streams, and what each sends its client in one event-loop iteration.

A consumer has one chunk in memory at a time, whatever the number of partitions. Its client is sent the next records
when the in-flight window, the outbox and the rates permit it, and messages of other subscriptions that wait go first.
"""

from __future__ import annotations

import logging
from typing import Final, cast

from mypy_extensions import i64

from mqttbroker.codec.frames import two_bytes
from mqttbroker.codec.reason_codes import ADMINISTRATIVE_ACTION, IMPLEMENTATION_SPECIFIC_ERROR
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.routing.route import StreamRule
from mqttbroker.core.streams.chunk import NO_BYTES, ChunkRows, user_property_bytes
from mqttbroker.core.streams.chunk_reads import ChunkReads
from mqttbroker.core.streams.partition_reader import PartitionReader, ReaderOwner
from mqttbroker.core.streams.rights import StreamRights, matches_any
from mqttbroker.core.streams.row_packets import REDELIVERED, RowPackets, TopicPlan
from sessions.counters import Counters
from sessions.readers.in_flight import InFlightOwner, StreamInFlight
from sessions.readers.partition_offsets import PartitionOffsets
from sessions.readers.stored_readers import StoredReader
from sessions.room import RoomUser
from sessions.session import Session, Subscription

log = logging.getLogger("mqttbroker")

MAX_BACKLOG: Final = 262_144  # bytes in an outbox beyond which a consumer waits for the socket

ADDED_BYTES: Final = 200  # of properties that a record gets, about

TOPIC_BYTES: Final = 400  # memory of what a consumer remembers of a topic, beside the topic
MAX_TOPIC_BYTES: Final = 131_072  # of what a consumer remembers of all topics


_UNWANTED: Final = TopicPlan(False, NO_BYTES, NO_BYTES)
_WAITS: Final = -1  # in the place of the cost of a row that cannot be sent now


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
        self._moved = False  # the stored offsets are to be saved
        self._turn = 0  # index of the reader that is asked next
        self._plans: dict[bytes, TopicPlan] = {}
        self._plan_bytes = 0
        self._partition = -1  # of `_partition_property`
        self._partition_property: bytes = NO_BYTES

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

    def resume(self, reader: PartitionReader) -> None:
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
        packets = self.consumers.packets
        packets.begin(connection, self.subscription, self.rule.key, self._property_of(reader.partition))
        limited: bool = connection.outbox.throttle is not None
        offsets = reader.offsets
        cost: i64 = 0
        while cost < budget and packets.size < MAX_BACKLOG:
            rows = reader.peek()
            if rows is None:
                break
            cost += 1
            if offsets is not None and rows.offset != offsets.next_wanted and self._was_sent(offsets, rows.offset):
                reader.take()
                continue
            topic = rows.topic
            plan = self._plans.get(topic)
            if plan is None:
                plan = self._plan(topic)
                cost += 2
            if not plan.wanted:
                self._leave_out(offsets, rows.offset + 1)
                reader.take()
                continue
            more = self._send_next(connection, reader, rows, plan)
            if more == _WAITS:
                self.blocked = True
                break
            cost += more
            if limited and packets.size:
                break
        packets.flush(connection)
        if offsets is not None and self.stored is not None and (self._moved or offsets.needs_reservation):
            self._moved = False
            self.stored.save(offsets)
        if reader.has_chunk and not self._accepts(connection):
            self.blocked = True
        return cost

    def _property_of(self, partition: int) -> bytes:
        """The user property `partition`, encoded."""
        if partition != self._partition:
            self._partition = partition
            self._partition_property = user_property_bytes(b"partition", str(partition).encode())
        return self._partition_property

    def _was_sent(self, offsets: PartitionOffsets, offset: int) -> bool:
        """Whether a row that is not at `next_wanted` is not wanted again. If it is behind that, the log lacks what is between."""
        if offset > offsets.next_wanted:
            self._leave_out(offsets, offset)
        return offset < offsets.next_wanted

    def _leave_out(self, offsets: PartitionOffsets | None, end: int) -> None:
        if offsets is not None:
            offsets.leave_out(end)
            self._moved = True

    def _send_next(self, connection: Connection, reader: PartitionReader, rows: ChunkRows, plan: TopicPlan) -> i64:
        """Send the row of `peek`, and take it; returns its cost beyond 1, or `_WAITS`."""
        deliveries = self.session.deliveries
        offsets = reader.offsets
        group = self.group
        qos: i64 = min(rows.qos, i64(self.subscription.qos))
        packet_id: i64 = 0
        mark: bytes = NO_BYTES
        if qos == 1 and group is not None and offsets is not None:
            if not self._may_hand_over(offsets, rows.offset):
                return _WAITS
            if offsets.hand_over(rows.offset) > 0:
                mark = REDELIVERED
            packet_id = deliveries.allocate_stream(StreamInFlight(group, offsets, rows.offset))
        elif qos and deliveries.session_id != 0:
            return self._put_into_queue(connection, reader, rows, plan, qos)
        elif qos:
            packet_id = deliveries.allocate_unpersisted(qos) if self._window_has_room() else 0
            if packet_id == 0:
                return _WAITS
        else:
            self._leave_out(offsets, rows.offset + 1)
        written = self.consumers.packets.add(rows, plan, qos, packet_id, mark)
        reader.take()
        if written == 0:
            self._drop_too_large(connection, qos, packet_id)
        return written >> 10

    def _may_hand_over(self, offsets: PartitionOffsets, offset: int) -> bool:
        """Whether a member of a group can be sent a row at QoS 1: its window is open, and the offset is reserved."""
        if not self.session.deliveries.window.is_open:
            return False
        if not offsets.may_hand_over(offset):
            offsets.waiting = True
            self._moved = True
            return False
        return True

    def _put_into_queue(self, connection: Connection, reader: PartitionReader, rows: ChunkRows, plan: TopicPlan, qos: i64) -> i64:
        """`_send_next` to a persistent session, whose queue keeps the message until it is acknowledged."""
        deliveries = self.session.deliveries
        packets = self.consumers.packets
        packets.flush(connection)
        if not deliveries.open or self._queue_full(rows):
            return _WAITS
        offsets = reader.offsets
        mark: bytes = NO_BYTES
        if offsets is not None:
            if offsets.deliveries(rows.offset) > 0:
                mark = REDELIVERED
            offsets.put_into_queue(rows.offset)
            self._moved = True
        entry = deliveries.offer(packets.message(rows, plan, mark), qos, packets.retains(rows), packets.subscription_ids, None)
        if entry is not None:
            connection.send_entry(entry, False)
        self.consumers.counters.stream_records_sent += 1
        reader.take()
        return 2

    def _drop_too_large(self, connection: Connection, qos: i64, packet_id: i64) -> None:
        """Complete a message as if it had been sent [MQTT-3.1.2-25]."""
        connection.drops().too_large += 1
        if qos == 1:
            self.session.deliveries.acknowledge(packet_id)
        elif qos == 2:
            self.session.deliveries.publish_refused(packet_id)

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

    def plan_of(self, rows: ChunkRows) -> TopicPlan:
        """The action for a row."""
        return self._plans.get(rows.topic) or self._plan(rows.topic)

    def send_row(self, rows: ChunkRows, partition: int, qos: i64, packet_id: i64, mark: bytes) -> None:
        """Send one row at QoS 0 or 1; ``mark`` are encoded properties that a version 5 client gets behind the others."""
        connection = cast(Connection, self.session.connection)
        packets = self.consumers.packets
        packets.begin(connection, self.subscription, self.rule.key, self._property_of(partition))
        if packets.add(rows, self.plan_of(rows), qos, packet_id, mark) == 0:
            self._drop_too_large(connection, qos, packet_id)
        packets.flush(connection)

    def _plan(self, topic_bytes: bytes) -> TopicPlan:
        """Decide on a topic, and remember it."""
        size: int = len(topic_bytes) * 4 + TOPIC_BYTES
        if self._plan_bytes + size > MAX_TOPIC_BYTES:
            self.forget_topics()
        topic = topic_bytes.decode("utf-8")
        plan = _UNWANTED
        # Compaction leaves a row without a topic in place of a record that it removed.
        wanted: bool = bool(topic) and (not self.topic_filter or matches_any([self.topic_filter], topic))
        if wanted and self.rights.may_read(topic):
            key = user_property_bytes(b"key", topic_bytes) if self.rule.key == "topic" else NO_BYTES
            plan = TopicPlan(True, two_bytes(len(topic_bytes)) + topic_bytes, key)
        if self.consumers.reads.remember(size):
            self._plans[topic_bytes] = plan
            self._plan_bytes += size
        return plan


class SessionConsumers(RoomUser):
    """The consumers of one session, by filter."""

    def __init__(self) -> None:
        self.by_filter: dict[str, StreamConsumer] = {}

    def resume(self) -> None:
        for consumer in self.by_filter.values():
            consumer.unblock()


class StreamConsumers:
    """All consumers of one broker. In each event-loop iteration one of them has its turn."""

    def __init__(self, reads: ChunkReads, outbound: Outbound) -> None:
        self.reads = reads
        self.outbound = outbound
        self.counters: Counters = outbound.counters
        self.packets = RowPackets(self.counters)
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
