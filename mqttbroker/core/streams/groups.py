"""Groups: the partitions of a stream divided among the sessions that subscribe to ``$share/<group>/$stream/<name>``.

A group's offsets are stored, and stay when its last member has left. A member that disconnects or unsubscribes has left:
others get its partitions, and first what it did not acknowledge, in order.
"""

from __future__ import annotations

import logging
from typing import cast

from mqttbroker.codec.reason_codes import QUOTA_EXCEEDED, TOPIC_FILTER_INVALID, MQTTError
from mqttbroker.core.routing.route import StreamRule
from mqttbroker.core.streams.consumer import StreamConsumer
from mqttbroker.core.streams.partition_reader import PartitionReader
from mqttbroker.core.terms.line_limit import LineLimit
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.context import Clock
from sessions.counters import Counters
from sessions.readers.assignment import Assignment, AssignmentEvents, GroupMember
from sessions.readers.in_flight import InFlightOwner, StreamInFlight
from sessions.readers.partition_offsets import OffsetsUser, PartitionOffsets
from sessions.readers.stored_readers import StoredReader, StoredReaders
from sessions.rows import GROUP_READER
from sessions.session import Session

log = logging.getLogger("mqttbroker")


class Member(GroupMember):
    """A session that is connected, and its consumer, which reads the partitions that it owns."""

    def __init__(self, consumer: StreamConsumer) -> None:
        super().__init__()
        self.consumer = consumer


class GroupOffsets(OffsetsUser):
    """Tells a group of the commits of its offsets."""

    def __init__(self, group: StreamGroup) -> None:
        self._group = group

    def reserved(self, offsets: PartitionOffsets) -> None:
        reader = self._group.reader_of(offsets.partition)
        if reader is not None:
            reader.owner.resume(reader)

    def refused(self, offsets: PartitionOffsets) -> None:
        self._group.seek(offsets.partition)


class GroupEvents(AssignmentEvents):
    """Has the members of a group read the partitions that they own."""

    def __init__(self, group: StreamGroup) -> None:
        self._group = group

    def begin(self, partition: int, member: GroupMember) -> None:
        self._group.begin(partition, cast(Member, member).consumer)

    def pause(self, partition: int, member: GroupMember) -> None:
        self._group.pause(partition, cast(Member, member).consumer)

    def give_back(self, partition: int) -> None:
        self._group.give_back(partition)


class StreamGroup(InFlightOwner):
    """One group: its offsets, its members, and which of them reads which partition."""

    def __init__(self, stored: StoredReader, counters: Counters, lines: LineLimit) -> None:
        self.stored = stored
        self._lines = lines
        self.members: dict[Session, Member] = {}
        self.redelivered = 0  # messages that were handed over again since the start of the broker
        self.refusals = 0  # negative acknowledgements
        # Partitions that begin at a time, in µs since the epoch, and their position until that is found.
        self.times: dict[int, int] = {}
        self._before_time: dict[int, int] = {}
        self.assignment = Assignment(len(stored.partitions), GroupEvents(self))
        self._counters = counters
        user = GroupOffsets(self)
        for offsets in stored.partitions:
            offsets.user = user

    # -- members --------------------------------------------------------------

    def join(self, consumer: StreamConsumer) -> None:
        """Add the consumer of a session, in place of an older one of the same session."""
        self.leave(consumer.session)
        consumer.stored = self.stored
        consumer.group = self
        member = Member(consumer)
        self.members[consumer.session] = member
        self.assignment.join(member)
        self._log("join", consumer.session)

    def leave(self, session: Session) -> None:
        """A member has disconnected or unsubscribed."""
        member = self.members.pop(session, None)
        if member is None:
            return
        session.deliveries.disown_stream_messages(self)
        for partition in list(member.partitions):
            member.consumer.remove_partition(partition)
        self.assignment.leave(member)
        self._log("leave", session)

    def _log(self, action: str, session: Session) -> None:
        if not self._lines.permits():
            return
        row = self.stored.row
        log.info(
            "event=group_changed action=%s group=%s stream=%s client=%s user=%s members=%d",
            action,
            row.name,
            row.stream,
            session.client_id,
            session.username or "",
            len(self.members),
        )

    # -- partitions -----------------------------------------------------------

    def begin(self, partition: int, consumer: StreamConsumer) -> None:
        """A member reads a partition from now on."""
        if consumer.reader_of(partition) is None:
            reader = consumer.add_partition(partition)
            reader.offsets = self.stored.partitions[partition]
            self._seek(reader)
        consumer.consumers.wake(consumer)

    def pause(self, partition: int, consumer: StreamConsumer) -> None:
        """A member is to be sent no more of a partition, which moves when it has acknowledged what it has."""
        consumer.remove_partition(partition)
        if self.stored.partitions[partition].in_flight == 0:
            self.assignment.drained(partition)

    def give_back(self, partition: int) -> None:
        offsets = self.stored.partitions[partition]
        self.redelivered += offsets.in_flight
        self._counters.stream_records_returned += offsets.in_flight
        offsets.give_back_all()
        offsets.waiting = False
        self.stored.save(offsets)

    def reader_of(self, partition: int) -> PartitionReader | None:
        """The reader of a partition, if a member is sent it at the moment."""
        owner = self.assignment.owners[partition]
        return None if owner is None else cast(Member, owner).consumer.reader_of(partition)

    def seek(self, partition: int) -> None:
        """Read a partition again from the first offset that is wanted."""
        reader = self.reader_of(partition)
        if reader is not None:
            self._seek(reader)
            reader.owner.resume(reader)

    def _seek(self, reader: PartitionReader) -> None:
        time = self.times.get(reader.partition, -1)
        offsets = self.stored.partitions[reader.partition]
        if time >= 0 and offsets.position == self._before_time.get(reader.partition, -1):
            reader.seek_time(time)
        else:
            self.times.pop(reader.partition, None)
            reader.seek(offsets.next_wanted)

    def begin_at_time(self, time: int) -> None:
        """Begin with the messages that were received at a time, in µs since the epoch, or later."""
        for offsets in self.stored.partitions:
            self.times[offsets.partition] = time
            self._before_time[offsets.partition] = offsets.position

    # -- acknowledgements -----------------------------------------------------

    def acknowledged(self, message: StreamInFlight) -> None:
        offsets = message.offsets
        offsets.acknowledge(message.offset)
        self.stored.save(offsets)
        partition = offsets.partition
        if offsets.in_flight == 0 and self.assignment.is_paused(partition):
            self.assignment.drained(partition)

    def refused(self, message: StreamInFlight, reason_code: int) -> None:
        # To deliver it again would be out of order for its key.
        self.refusals += 1
        self.acknowledged(message)

    def detached(self, message: StreamInFlight, packet_id: int) -> None:
        message.offsets.give_back(message.offset)

    # -- resetting ------------------------------------------------------------

    def reset(self, positions: list[int]) -> None:
        """Continue at these offsets, one of each partition; nothing that is in flight counts any more."""
        self.times = {}
        for member in list(self.members.values()):
            member.consumer.session.deliveries.disown_stream_messages(self)
        self.stored.seek(positions)
        for partition in range(len(positions)):
            owner = self.assignment.owners[partition]
            if owner is not None and self.assignment.is_paused(partition):
                self.assignment.drained(partition)
            else:
                self.seek(partition)

    def close(self) -> None:
        """The group is deleted: its members are sent no more."""
        for session in list(self.members):
            member = self.members.pop(session)
            session.deliveries.disown_stream_messages(self)
            member.consumer.close()


class StreamGroups:
    """The groups of one broker."""

    def __init__(self, readers: StoredReaders, terms: BrokerTerms, counters: Counters, clock: Clock) -> None:
        self.readers = readers
        self.all: dict[int, StreamGroup] = {}  # by the id of the reader
        self._terms = terms
        self._counters = counters
        self._clock = clock
        self._lines = LineLimit(clock, log.name, "group_changes_not_logged")

    def find(self, name: str, stream: str) -> StreamGroup | None:
        stored = self.readers.group(name, stream)
        if stored is None:
            return None
        group = self.all.get(stored.row.reader_id)
        if group is None:
            group = self.all[stored.row.reader_id] = StreamGroup(stored, self._counters, self._lines)
        return group

    def check(self, name: str, rule: StreamRule, topic_filter: str) -> None:
        """Raises MQTTError if a session must not join a group with this filter, which is "" for all topics."""
        stored = self.readers.group(name, rule.name)
        if stored is None:
            if self.readers.groups(rule.name) >= self._terms.max_stream_groups:
                self._counters.limit_reached("max_stream_groups")
                raise MQTTError(QUOTA_EXCEEDED, f"stream {rule.name} has {self._terms.max_stream_groups} groups")
        elif stored.row.topic_filter != topic_filter:
            own = stored.row.topic_filter or "all topics"
            raise MQTTError(TOPIC_FILTER_INVALID, f"group {name} of stream {rule.name} reads {own}, not {topic_filter or 'all topics'}")

    def create(self, name: str, rule: StreamRule, topic_filter: str, start: str, positions: list[int]) -> StreamGroup:
        """A group that begins at these offsets, one of each partition."""
        stored = self.readers.create(GROUP_READER, 0, name, rule.name, topic_filter, start, 0, self._clock.now, positions)
        group = self.all[stored.row.reader_id] = StreamGroup(stored, self._counters, self._lines)
        return group

    def delete(self, group: StreamGroup) -> None:
        """Forget a group and its offsets."""
        group.close()
        self.all.pop(group.stored.row.reader_id, None)
        self.readers.delete(group.stored)

    def stream_removed(self, name: str) -> None:
        """A stream was deleted: so are its groups."""
        for stored in self.readers.of_stream(name):
            group = self.all.get(stored.row.reader_id)
            if group is not None:
                self.delete(group)
            else:
                self.readers.delete(stored)
