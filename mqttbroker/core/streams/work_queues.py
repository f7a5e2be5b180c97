"""Work queues (``$queue/<name>``): each message of a stream to one of the consumers, whichever has room.

A message is leased to its consumer: it is done when the PUBACK arrives. A negative PUBACK, a lost connection or the end
of the lease returns it, and it is delivered again before new messages. After too many deliveries it goes to another
stream, the dead letters, in the commit that ends it in the queue. Messages in flight are in memory by offset only.
"""

from __future__ import annotations

import logging
from typing import Final, cast
from zlib import crc32

from mypy_extensions import i64

from mqttbroker.codec.reason_codes import QUOTA_EXCEEDED, TOPIC_FILTER_INVALID, MQTTError
from mqttbroker.codec.reason_codes import name as reason_name
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.delivery.publisher import partition_key
from mqttbroker.core.delivery.turns import LongWork, Turns
from mqttbroker.core.routing.route import StreamRule
from mqttbroker.core.streams.chunk import NO_BYTES, ChunkRows, user_property_bytes
from mqttbroker.core.streams.chunk_reads import ChunkReads
from mqttbroker.core.streams.consumer import StreamConsumer, StreamConsumers
from mqttbroker.core.streams.partition_reader import PartitionReader, ReaderOwner
from mqttbroker.core.streams.rights import StreamRights
from mqttbroker.core.terms.line_limit import LineLimit
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.context import Clock
from sessions.counters import Counters
from sessions.journal import Journal
from sessions.readers.in_flight import InFlightOwner, StreamInFlight
from sessions.readers.partition_offsets import OffsetsUser, PartitionOffsets
from sessions.readers.stored_readers import StoredReader, StoredReaders
from sessions.rows import QUEUE_READER
from sessions.session import Session, Subscription

log = logging.getLogger("mqttbroker")

LEASES_AT_ONCE: Final = 1000  # leases that one tick ends
CONSUMERS_PER_WORK: Final = 8  # that are asked for a message, in a unit of work
RETRY_SECONDS: Final = 10.0  # until records that could not be read are asked for again


class QueueRule:
    """A queue of the configuration: the stream that it reads, seconds that a lease takes, the most deliveries of a
    message, the stream of its dead letters ("" = they are dropped), and whether clients may publish to the queue."""

    def __init__(self, name: str, stream: str, lease: float, max_deliveries: int, dead_letter: str, allow_publish: bool) -> None:
        self.name = name
        self.stream = stream
        self.lease = lease
        self.max_deliveries = max_deliveries
        self.dead_letter = dead_letter
        self.allow_publish = allow_publish


class _QueueOffsets(OffsetsUser):
    """Tells a queue of the commits of its offsets."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def reserved(self, offsets: PartitionOffsets) -> None:
        self._queue.wake()

    def refused(self, offsets: PartitionOffsets) -> None:
        self._queue.go_back(offsets)


class _QueueReaders(ReaderOwner):
    """Reads the partitions of a queue's stream."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def has_rows(self, reader: PartitionReader) -> None:
        offsets = reader.offsets
        assert offsets is not None
        if reader.next_offset > offsets.next_wanted:
            self._queue.leave_out(offsets, int(reader.next_offset))
        self._queue.wake()

    def resume(self, reader: PartitionReader) -> None:
        self._queue.wake()

    def expired(self, reader: PartitionReader, offset: int) -> None:
        self._queue.lost(reader, offset, int(reader.next_offset), "retention removed the records")

    def damaged(self, reader: PartitionReader, offset: int, end: int, reason: str) -> None:
        self._queue.lost(reader, offset, end, reason)
        reader.skip_damage()
        self._queue.wake()

    def failed(self, reader: PartitionReader, reason: str) -> None:
        self._queue.retry_later(reader, reason)


class Lease:
    """The session that has a message, and when it must be acknowledged, in monotonic seconds in which the process runs."""

    def __init__(self, session: Session, due: float) -> None:
        self.session = session
        self.due = due


class Returned:
    """The session that had a message, and why it was returned."""

    def __init__(self, session: Session | None, reason: str) -> None:
        self.session = session
        self.reason = reason


class WorkQueue(InFlightOwner):
    """A queue, or one of its filters: its offsets, consumers and leases."""

    def __init__(
        self,
        rule: QueueRule,
        streams: list[StreamRule],
        stored: StoredReader,
        reads: ChunkReads,
        journal: Journal,
        counters: Counters,
        clock: Clock,
        turns: Turns,
        lines: LineLimit,
    ) -> None:
        self.rule = rule
        self.stored = stored
        self._lines = lines
        self.consumers: dict[Session, QueueConsumer] = {}
        self.redeliveries = 0  # since the start of the broker
        self.dead_letters = 0  # likewise
        self._streams = streams
        self._reads = reads
        self._journal = journal
        self._counters = counters
        self._clock = clock
        self._turns = turns
        self._work = _QueueWork(self)
        self._owner = _QueueReaders(self)
        self._readers: list[PartitionReader] = []
        self._retries: dict[PartitionReader, float] = {}  # readers that failed, and when they try again, in monotonic s
        self._order: list[QueueConsumer] = []  # the consumers; empty if they have changed
        self._asked = 0  # consumers that were asked for the last row
        self._woken = False  # since the last step began
        self._turn = 0  # index of the consumer that is asked first
        self._reader_turn = 0  # likewise of the readers
        self._in_vain = 0  # readers that were visited one after the other without a row that could be handled
        self._leases: dict[StreamInFlight, Lease] = {}  # in the order in which they end
        self._returned: dict[tuple[int, int], Returned] = {}  # messages that wait, by partition and offset
        user = _QueueOffsets(self)
        for offsets in stored.partitions:
            offsets.user = user

    @property
    def full_name(self) -> str:
        return "$queue/" + self.stored.row.name

    @property
    def in_flight(self) -> int:
        """The number of messages that consumers have."""
        return len(self._leases)

    @property
    def depth(self) -> int:
        """The number of records that are not acknowledged, those in flight and those that no filter matches included."""
        depth: int = 0
        for offsets in self.stored.partitions:
            start, end = self._reads.bounds(self.stored.row.stream, offsets.partition)
            depth += len(offsets.pending) + max(0, end - max(start, offsets.position))
        return depth

    # -- consumers ------------------------------------------------------------

    def join(self, consumer: QueueConsumer) -> None:
        self.consumers[consumer.session] = consumer
        self._order = []
        self._open()
        self.wake()

    def leave(self, session: Session) -> None:
        """A consumer has disconnected or unsubscribed: what it has goes to others."""
        if self.consumers.pop(session, None) is None:
            return
        self._order = []
        for message in session.deliveries.disown_stream_messages(self):
            self._return(message, "the consumer has left")
        if not self.consumers:
            self._close_if_idle()

    def _open(self) -> None:
        if self._readers:
            return
        for offsets in self.stored.partitions:
            reader = PartitionReader(self._reads, self._owner, self.stored.row.stream, offsets.partition)
            reader.offsets = offsets
            reader.seek(offsets.next_wanted)
            self._readers.append(reader)

    def _close_if_idle(self) -> None:
        """Read no more unless messages are to become dead letters."""
        for offsets in self.stored.partitions:
            if offsets.returned and offsets.certain_deliveries(offsets.next_wanted) >= self.rule.max_deliveries:
                return
        self.close()

    def close(self) -> None:
        """Read no more."""
        for reader in self._readers:
            reader.close()
        self._readers = []
        self._retries = {}

    def wake(self) -> None:
        """Something may be sent that could not be sent before."""
        self._woken = True
        if self._readers and self._work.done:
            self._work.waits = False
            self._turns.add(self._work)

    # -- sending --------------------------------------------------------------

    def step(self, budget: int) -> int:
        """Send what the consumers have room for; returns the cost, 0 if nothing can be done now."""
        if self._woken:
            self._woken = False
            self._in_vain = 0
        readers = list(self._readers)
        count: int = len(readers)
        cost: int = 0  # of rows that were handled
        asking: int = 0  # of those that must wait
        visited: int = 0
        while visited < count and cost + asking < budget:
            reader = readers[(self._reader_turn + visited) % count]
            visited += 1
            reader.set_idle(False)
            while cost + asking < budget and not reader.closed:
                rows = reader.peek()
                if rows is None:
                    reader.ask()
                    break
                self._asked = 0
                if not self._handle(reader, rows):
                    reader.set_idle(True)
                    asking += self._asked // CONSUMERS_PER_WORK
                    break
                cost += 1 + self._asked // CONSUMERS_PER_WORK
                if reader.peek() is rows:
                    reader.take()
            offsets = reader.offsets
            if offsets is not None and offsets.needs_reservation:
                self.stored.save(offsets)
        self._reader_turn += visited
        self._in_vain = 0 if cost else self._in_vain + visited
        if self._in_vain < count:
            return max(1, cost + asking)
        if not self._woken:
            self._work.waits = True
            if not self.consumers:
                self._close_if_idle()
        return 0

    def _handle(self, reader: PartitionReader, rows: ChunkRows) -> bool:
        """Send a row, or leave it out; false if it must wait."""
        offsets = cast(PartitionOffsets, reader.offsets)
        offset: int = int(rows.offset)
        if offset != offsets.next_wanted:
            if offset > offsets.next_wanted:
                self.leave_out(offsets, offset)
            if offset < offsets.next_wanted:
                return True
        topic_filter = self.stored.row.topic_filter
        before: int = offsets.deliveries(offset)
        if not rows.topic:  # compaction has removed the record
            offsets.leave_out(offset + 1)
            self.stored.save(offsets)
            return True
        if offsets.certain_deliveries(offset) >= self.rule.max_deliveries:
            self._end(offsets, rows)
            return True
        wanted = not topic_filter
        if not self.consumers:
            return False
        if not self._order:
            self._order = list(self.consumers.values())
        consumers = self._order
        count: int = len(consumers)
        returned = self._returned.get((offsets.partition, offset))
        last: Session | None = None if returned is None else returned.session
        found: QueueConsumer | None = None
        index: int = 0
        while index < count:
            consumer = consumers[(self._turn + index) % count]
            index += 1
            if not consumer.wants(rows):
                continue
            wanted = True
            if consumer.accepts():
                found = consumer
                if consumer.session is not last:  # the one that had it before gets it again only if no other can
                    break
        self._asked = index
        if found is not None:
            if not self._send(found, offsets, rows, before):
                return False
            self._turn = (self._turn + index) % count
            return True
        if wanted:
            return False
        offsets.leave_out(offset + 1)
        self.stored.save(offsets)
        return True

    def _send(self, consumer: QueueConsumer, offsets: PartitionOffsets, rows: ChunkRows, before: int) -> bool:
        """Lease a row to a consumer; false if its offset is not reserved yet."""
        offset: int = int(rows.offset)
        qos: i64 = min(rows.qos, i64(consumer.subscription.qos), 1)
        if qos == 0:
            offsets.leave_out(offset + 1)
            self.stored.save(offsets)
            consumer.send_row(rows, offsets.partition, 0, 0, NO_BYTES)
            return True
        if not offsets.may_hand_over(offset):
            offsets.waiting = True
            self.stored.save(offsets)
            return False
        offsets.hand_over(offset)
        self._returned.pop((offsets.partition, offset), None)
        message = StreamInFlight(self, offsets, offset)
        self._leases[message] = Lease(consumer.session, self._clock.monotonic - self._clock.stopped + self.rule.lease)
        packet_id = consumer.session.deliveries.allocate_stream(message)
        mark: bytes = NO_BYTES
        if before:
            self.redeliveries += 1
            mark = user_property_bytes(b"redelivered", b"1") + user_property_bytes(b"delivery-count", str(before + 1).encode())
        consumer.send_row(rows, offsets.partition, 1, packet_id, mark)
        return True

    def leave_out(self, offsets: PartitionOffsets, end: int) -> None:
        """The log has no record from the next wanted offset up to this one any more."""
        before = offsets.returned
        offsets.leave_out(end)
        self.stored.save(offsets)
        if offsets.returned < before:
            for key in list(self._returned):
                if key[0] == offsets.partition and key[1] < end:
                    del self._returned[key]

    # -- the end of a delivery ------------------------------------------------

    def acknowledged(self, message: StreamInFlight) -> None:
        self._leases.pop(message, None)
        message.offsets.acknowledge(message.offset)
        self.stored.save(message.offsets)

    def refused(self, message: StreamInFlight, reason_code: int) -> None:
        self._return(message, f"refused: {reason_name(reason_code)}")

    def detached(self, message: StreamInFlight, packet_id: int) -> None:
        self._return(message, "the consumer has left")

    def end_leases(self) -> None:
        """Return the messages whose leases have ended."""
        now = self._clock.monotonic - self._clock.stopped
        ended: list[StreamInFlight] = []
        for message, lease in self._leases.items():
            if lease.due > now or len(ended) >= LEASES_AT_ONCE:
                break
            ended.append(message)
        for message in ended:
            message.owner = None  # its packet id stays in use until the client acknowledges it
            self._return(message, "the lease ended")

    def _return(self, message: StreamInFlight, reason: str) -> None:
        lease = self._leases.pop(message, None)
        offsets = message.offsets
        offsets.give_back(message.offset)
        session: Session | None = None if lease is None else lease.session
        self._returned[(offsets.partition, message.offset)] = Returned(session, reason)
        self._counters.stream_records_returned += 1
        self.stored.save(offsets)
        self.go_back(offsets)

    def go_back(self, offsets: PartitionOffsets) -> None:
        """Read a partition again from the first offset that is wanted."""
        self._open()
        for reader in self._readers:
            if reader.offsets is offsets and reader.next_offset > offsets.next_wanted:
                reader.seek(offsets.next_wanted)
        self.wake()

    def _end(self, offsets: PartitionOffsets, rows: ChunkRows) -> None:
        """A message was delivered too often: it becomes a dead letter."""
        offset: int = int(rows.offset)
        deliveries: int = offsets.deliveries(offset)
        returned = self._returned.pop((offsets.partition, offset), None)
        reason = "the broker was restarted" if returned is None else returned.reason
        offsets.put_into_queue(offset)
        self.stored.save(offsets)
        self.dead_letters += 1
        target: StreamRule | None = None
        for rule in self._streams:
            if rule.name == self.rule.dead_letter:
                target = rule
        if self._lines.permits():
            self._log_dead_letter(offsets, offset, deliveries, target, reason)
        if target is None:
            return
        added = b"".join((
            user_property_bytes(b"dead-letter-reason", reason.encode()),
            user_property_bytes(b"delivery-count", str(deliveries).encode()),
            user_property_bytes(b"dead-letter-queue", self.full_name.encode()),
            user_property_bytes(b"dead-letter-offset", b"%d:%d" % (offsets.partition, offset)),
        ))  # fmt: skip
        message = rows.message(rows.properties + added)
        key = message.topic.encode("utf-8") if target.key == "topic" else partition_key(target.key, message)
        self._journal.append_to_stream(target.name, crc32(key) % target.partitions, message)

    def _log_dead_letter(self, offsets: PartitionOffsets, offset: int, deliveries: int, target: StreamRule | None, reason: str) -> None:
        log.warning(
            "event=dead_letter queue=%s partition=%d offset=%d deliveries=%d dead_letter_stream=%s reason=%s",
            self.full_name,
            offsets.partition,
            offset,
            deliveries,
            "" if target is None else target.name,
            reason,
        )

    def retry_later(self, reader: PartitionReader, reason: str) -> None:
        """Records cannot be read at the moment."""
        self._retries[reader] = self._clock.monotonic + RETRY_SECONDS
        log.error(
            "event=queue_read_failed queue=%s partition=%d offset=%d retry_seconds=%d reason=%s",
            self.full_name,
            reader.partition,
            reader.next_offset,
            RETRY_SECONDS,
            reason,
        )

    def retry(self) -> None:
        """Read again with the readers that failed `RETRY_SECONDS` ago."""
        now = self._clock.monotonic
        for reader, due in list(self._retries.items()):
            if due <= now:
                del self._retries[reader]
                if not reader.closed:
                    reader.seek(cast(PartitionOffsets, reader.offsets).next_wanted)
                    self.wake()

    def lost(self, reader: PartitionReader, offset: int, end: int, reason: str) -> None:
        """Records cannot be read any more."""
        if end > offset:
            self._counters.stream_records_missed += end - offset
        log.error(
            "event=queue_records_lost queue=%s partition=%d offset=%d end=%d reason=%s",
            self.full_name,
            reader.partition,
            offset,
            end,
            reason,
        )

    def reset(self, positions: list[int]) -> None:
        """Continue at these offsets, one of each partition; nothing that is in flight counts any more."""
        for message in self._leases:
            message.owner = None
        self._leases = {}
        self._returned = {}
        self.stored.seek(positions)
        for reader in self._readers:
            reader.seek(positions[reader.partition])
        self.wake()


class _QueueWork(LongWork):
    """The work of one queue, done in parts."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self.waits = True  # nothing can be done until `WorkQueue.wake`

    @property
    def done(self) -> bool:
        return self.waits

    def step(self, budget: int) -> int:
        return self._queue.step(budget)


class QueueConsumer(StreamConsumer):
    """A consumer of a queue. The queue reads and chooses; this sends."""

    def __init__(
        self,
        consumers: StreamConsumers,
        session: Session,
        subscription: Subscription,
        rule: StreamRule,
        topic_filter: str,
        rights: StreamRights,
        queue: WorkQueue,
    ) -> None:
        super().__init__(consumers, session, subscription, rule, topic_filter, rights)
        self.queue = queue

    def wants(self, rows: ChunkRows) -> bool:
        """Whether filter and rights let the client have the row."""
        return self.plan_of(rows).wanted

    def accepts(self) -> bool:
        """Whether the client has room for a message."""
        connection = self.session.connection
        return (
            connection is not None
            and not self.closed
            and self._accepts(cast(Connection, connection))
            and self.session.deliveries.window.is_open
        )

    def unblock(self) -> None:
        """There may be room again."""
        self.queue.wake()

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.queue.leave(self.session)


class WorkQueues:
    """The queues of one broker, by name and filter."""

    def __init__(
        self,
        rules: list[QueueRule],
        streams: list[StreamRule],
        readers: StoredReaders,
        reads: ChunkReads,
        journal: Journal,
        counters: Counters,
        clock: Clock,
        turns: Turns,
        terms: BrokerTerms,
    ) -> None:
        self.rules: dict[str, QueueRule] = {rule.name: rule for rule in rules}
        self.all: dict[str, WorkQueue] = {}  # by name, with the filter if there is one
        self._streams = streams
        self._readers = readers
        self._reads = reads
        self._journal = journal
        self._counters = counters
        self._clock = clock
        self._turns = turns
        self._terms = terms
        self._lines = LineLimit(clock, log.name, "dead_letters_not_logged")

    def stream_of(self, name: str) -> StreamRule:
        """The stream of a queue. Raises MQTTError if there is no such queue or no such stream."""
        rule = self.rules.get(name)
        if rule is None:
            raise MQTTError(TOPIC_FILTER_INVALID, f"there is no queue {name}")
        for stream in self._streams:
            if stream.name == rule.stream:
                return stream
        raise MQTTError(TOPIC_FILTER_INVALID, f"queue {name} has no stream {rule.stream}")

    def check(self, name: str, topic_filter: str) -> None:
        """Raises MQTTError if a client must not make a queue with this filter, which is "" for all topics."""
        stream = self.stream_of(name).name
        full_name = queue_name(name, topic_filter)
        if topic_filter and self._readers.queue(full_name, stream) is None:
            if self._readers.queues(stream) >= self._terms.max_stream_groups:
                self._counters.limit_reached("max_stream_groups")
                raise MQTTError(QUOTA_EXCEEDED, f"stream {stream} has {self._terms.max_stream_groups} queues")

    def open(self, name: str, topic_filter: str) -> WorkQueue:
        """The queue, which begins with the oldest message of its stream if it is new. Raises MQTTError."""
        full_name = queue_name(name, topic_filter)
        queue = self.all.get(full_name)
        if queue is not None:
            return queue
        stream = self.stream_of(name)
        stored = self._readers.queue(full_name, stream.name)
        starts = [self._reads.bounds(stream.name, partition)[0] for partition in range(stream.partitions)]
        if stored is None:
            stored = self._readers.create(QUEUE_READER, 0, full_name, stream.name, topic_filter, "earliest", 0, self._clock.now, starts)
        queue = WorkQueue(
            self.rules[name],
            self._streams,
            stored,
            self._reads,
            self._journal,
            self._counters,
            self._clock,
            self._turns,
            self._lines,
        )
        self.all[full_name] = queue
        return queue

    def open_all(self) -> None:
        """Open the queues of the configuration, so that messages wait in them before the first consumer."""
        for name in self.rules:
            try:
                self.open(name, "")
            except MQTTError as error:
                log.warning("event=queue_without_stream queue=%s reason=%s", name, error.detail)
        for stored in list(self._readers.by_id.values()):
            row = stored.row
            name = row.name.partition("/")[0]
            if row.kind == QUEUE_READER and row.topic_filter and name in self.rules:
                if self.rules[name].stream == row.stream:
                    self.open(name, row.topic_filter)

    def stream_removed(self, name: str) -> None:
        """A stream was deleted: so are its queues, until there is one of its name again."""
        for full_name, queue in list(self.all.items()):
            if queue.stored.row.stream == name:
                queue.close()
                del self.all[full_name]
                self._readers.delete(queue.stored)

    def tick(self) -> None:
        """Return the messages whose leases have ended, and read again what could not be read."""
        for queue in self.all.values():
            queue.end_leases()
            queue.retry()


def queue_name(name: str, topic_filter: str) -> str:
    """The name of a queue with its filter."""
    return f"{name}/{topic_filter}" if topic_filter else name
