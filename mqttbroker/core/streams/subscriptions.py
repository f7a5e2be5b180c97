"""Subscriptions to streams: what a SUBSCRIBE may ask for, and their consumers while the client is connected.

A persistent session's subscription continues where it stood when the client disconnected. The same SUBSCRIBE again
changes only its options; one with another start begins there.
"""

from __future__ import annotations

import logging
from typing import Final, cast

from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import IMPLEMENTATION_SPECIFIC_ERROR, TOPIC_FILTER_INVALID, MQTTError
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.routing.route import StreamRule
from mqttbroker.core.streams.chunk_reads import ChunkReads
from mqttbroker.core.streams.consumer import SessionConsumers, StreamConsumer, StreamConsumers
from mqttbroker.core.streams.filter import (
    EARLIEST,
    OFFSETS,
    QUEUE,
    REPLAY,
    TIME,
    Start,
    StreamFilter,
    parse_from,
    parse_offset,
    parse_stream_filter,
    reads_stream,
)
from mqttbroker.core.streams.groups import StreamGroup, StreamGroups
from mqttbroker.core.streams.rights import StreamRights
from mqttbroker.core.streams.work_queues import QueueConsumer, WorkQueues
from sessions.context import Clock
from sessions.readers.partition_offsets import OffsetsUser, PartitionOffsets
from sessions.readers.stored_readers import StoredReader, StoredReaders
from sessions.rows import SUBSCRIPTION_READER
from sessions.session import Session, Subscription
from topic_matcher.filters import covers, overlap

log = logging.getLogger("mqttbroker")

START_PROPERTY: Final = "stream-offset"
EXPIRED_PROPERTY: Final = "stream-on-expired"
DAMAGE_PROPERTY: Final = "stream-on-damage"
# Bits of `ReaderRow.options`.
SKIPS_DAMAGE: Final = 1
STOPS_WHEN_EXPIRED: Final = 2

ADJUSTED_PROPERTY: Final = "stream-offset-expired"  # of a SUBACK
# Bytes of what a SUBACK says about streams; what a client asked for beyond has its reason code only. A string of MQTT has
# at most 65,535 bytes.
MAX_SAID_BYTES: Final = 32768


class StreamRequest:
    """What a SUBSCRIBE packet says about streams, and what its SUBACK is to say."""

    def __init__(self, properties: Properties) -> None:
        self.start: str | None = None
        self.on_expired = "nearest"
        self.on_damage = "stop"
        self._reasons: list[str] = []
        self._adjusted: list[str] = []
        self._room = MAX_SAID_BYTES
        for name, value in properties.user_properties:
            if name == START_PROPERTY:
                self.start = value
            elif name == EXPIRED_PROPERTY:
                self.on_expired = value
            elif name == DAMAGE_PROPERTY:
                self.on_damage = value

    def add_reason(self, text: str) -> None:
        """Say in the Reason String why a stream is not read."""
        if self._has_room(text):
            self._reasons.append(text)

    def add_adjusted(self, text: str) -> None:
        """Say in a user property which offsets were taken in the place of those that the client asked for."""
        if self._has_room(text):
            self._adjusted.append(text)

    def _has_room(self, text: str) -> bool:
        size = len(text.encode("utf-8")) + 2
        if size > self._room:
            return False
        self._room -= size
        return True

    def describe(self, properties: Properties) -> None:
        """Put what there is to say into the properties of the SUBACK."""
        if self._reasons:
            properties.reason_string = "; ".join(self._reasons)
        for text in self._adjusted:
            properties.user_properties.append((ADJUSTED_PROPERTY, text))


class StreamPlan:
    """A subscription that may be opened: its stream, the filter in it ("" for all topics), its rights and its start.

    ``text`` is what the client asked for as a start, "" if nothing. ``offsets`` are the first ones by partition, empty if ``start`` is a
    time.
    """

    def __init__(
        self,
        full_filter: str,
        group: str,
        rule: StreamRule,
        topic_filter: str,
        rights: StreamRights,
        start: Start,
        text: str,
    ) -> None:
        self.full_filter = full_filter
        self.group = group
        self.queue = ""  # the name of the queue, if it is one
        self.rule = rule
        self.topic_filter = topic_filter
        self.rights = rights
        self.start = start
        self.text = text
        self.offsets: dict[int, int] = {}
        self.skips_damage = False
        self.stops_when_expired = False


class _Start:
    """Where a subscription stands, and what its client asked for."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.skips_damage = False
        self.stops_when_expired = False
        self.offsets: dict[int, int] = {}  # by partition, while the client is disconnected; -1: the end of the partition


class _FailedCommits(OffsetsUser):
    """Tells the consumer of a persistent session of a failed commit."""

    def __init__(self, consumer: StreamConsumer) -> None:
        self._consumer = consumer

    def reserved(self, offsets: PartitionOffsets) -> None:
        pass  # messages in the session's queue need no reservation

    def refused(self, offsets: PartitionOffsets) -> None:
        reader = self._consumer.reader_of(offsets.partition)
        if reader is not None and not self._consumer.closed:
            reader.seek(offsets.next_wanted)
            self._consumer.resume(reader)


class _SessionStreams(SessionConsumers):
    """The consumers of a session, and the places of its subscriptions by filter."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, _Start] = {}


class StreamSubscriptions:
    """The subscriptions to streams of one broker; ``unavailable`` is why there can be none, or ""."""

    def __init__(
        self,
        streams: list[StreamRule],
        rules: Rules,
        reads: ChunkReads,
        consumers: StreamConsumers,
        clock: Clock,
        stored: StoredReaders,
        groups: StreamGroups,
        queues: WorkQueues,
        unavailable: str,
    ) -> None:
        self.queues = queues
        self.stored = stored
        self.groups = groups
        self.streams = streams
        self.rules = rules
        self.reads = reads
        self.consumers = consumers
        self.clock = clock
        self.unavailable = unavailable

    # -- SUBSCRIBE ------------------------------------------------------------

    def plan(self, session: Session, full_filter: str, request: StreamRequest, denied: int) -> StreamPlan:
        """What a SUBSCRIBE to a filter asks for; `reads_stream` must hold for it.

        Raises MQTTError with the reason code of its SUBACK, which is ``denied`` if the client lacks the rights.
        """
        if self.unavailable:
            raise MQTTError(IMPLEMENTATION_SPECIFIC_ERROR, self.unavailable)
        try:
            parsed = parse_stream_filter(full_filter)
        except ValueError as error:
            raise MQTTError(TOPIC_FILTER_INVALID, str(error)) from None
        queue = parsed.name if parsed.kind == QUEUE else ""
        if queue:
            parsed.name = self.queues.stream_of(queue).name
        rule = self._find(parsed)
        filters = rule.filters if not parsed.topic_filter else [parsed.topic_filter]
        root, name = ("$queue", queue) if queue else ("$stream", rule.name)
        rights = StreamRights(self.rules, session, root, name, filters)
        if not rights.may_subscribe:
            raise MQTTError(denied, f"no access to {root[1:]} {name}")
        if queue:
            self.queues.check(queue, parsed.topic_filter)
        if parsed.group:
            self.groups.check(parsed.group, rule, parsed.topic_filter)
        text = parsed.start if parsed.kind == REPLAY else request.start or ""
        try:
            start = parse_from(text, self.clock.now) if parsed.kind == REPLAY else parse_offset(text or "latest")
        except ValueError as error:
            raise MQTTError(IMPLEMENTATION_SPECIFIC_ERROR, str(error)) from None
        plan = StreamPlan(full_filter, parsed.group, rule, parsed.topic_filter, rights, start, text)
        plan.queue = queue
        plan.skips_damage = _choose(DAMAGE_PROPERTY, request.on_damage, "stop", "skip")
        plan.stops_when_expired = _choose(EXPIRED_PROPERTY, request.on_expired, "nearest", "refuse")
        self._place(plan, request)
        return plan

    def _find(self, parsed: StreamFilter) -> StreamRule:
        """The stream of a filter; the whole name of a stream in place of a replay's filter is taken out of ``parsed``."""
        name = parsed.name
        topic_filter = parsed.topic_filter
        if not name:
            for rule in self.streams:
                if rule.name == topic_filter:
                    parsed.topic_filter = ""
                    return rule
            for rule in self.streams:
                for own in rule.filters:
                    if covers(own, topic_filter):
                        return rule
            raise MQTTError(TOPIC_FILTER_INVALID, f"no stream keeps all topics of {topic_filter}")
        for rule in self.streams:
            if rule.name == name:
                if topic_filter:
                    for own in rule.filters:
                        if overlap(own, topic_filter):
                            return rule
                    raise MQTTError(TOPIC_FILTER_INVALID, f"stream {name} keeps no topic of {topic_filter}")
                return rule
        raise MQTTError(TOPIC_FILTER_INVALID, f"there is no stream {name}")

    def _place(self, plan: StreamPlan, request: StreamRequest) -> None:
        """Set the first offsets; those that are not in the log are replaced by the nearest, or refused."""
        start = plan.start
        if start.kind == TIME:
            return
        rule = plan.rule
        wrong: list[str] = []
        for partition in start.offsets:
            if partition >= rule.partitions:
                reason = f"stream-offset: stream {rule.name} has no partition {partition}"
                raise MQTTError(IMPLEMENTATION_SPECIFIC_ERROR, reason)
        for partition in range(rule.partitions):
            bounds = self.reads.bounds(rule.name, partition)
            if start.kind != OFFSETS:
                plan.offsets[partition] = bounds[0] if start.kind == EARLIEST else bounds[1]
                continue
            offset = start.offsets.get(partition, start.offsets.get(-1, -1))
            if offset < 0:
                reason = f"stream-offset has no offset of partition {partition}"
                raise MQTTError(IMPLEMENTATION_SPECIFIC_ERROR, reason)
            nearest = min(max(offset, bounds[0]), bounds[1])
            plan.offsets[partition] = nearest
            if nearest != offset:
                wrong.append(f"{partition}={nearest}")
                if plan.stops_when_expired:
                    reason = f"stream {rule.name}, partition {partition}: offset {offset} is not among {bounds[0]} to {bounds[1]}"
                    raise MQTTError(IMPLEMENTATION_SPECIFIC_ERROR, reason)
        if wrong:
            request.add_adjusted(f"{plan.full_filter} offset:{','.join(wrong)}")

    def open(self, session: Session, subscription: Subscription, plan: StreamPlan) -> None:
        """Begin to read for a subscription, or go on with one that the client has already."""
        streams = session.deliveries.room_user
        if streams is None:
            streams = session.deliveries.room_user = _SessionStreams()
        assert isinstance(streams, _SessionStreams)
        if plan.queue:
            self._consume(streams, session, subscription, plan)
            return
        if plan.group:
            self._join(streams, session, subscription, plan)
            return
        if session.id != 0:
            self._open_stored(streams, session, subscription, plan)
            return
        filter_text = plan.full_filter
        place = streams.places.get(filter_text)
        consumer = streams.by_filter.get(filter_text)
        if place is None or consumer is None or (plan.text and place.text != plan.text):
            if consumer is not None:
                consumer.close()
            place = streams.places[filter_text] = _Start(plan.text)
            consumer = self._consumer(streams, session, subscription, plan)
            for partition in range(plan.rule.partitions):
                reader = consumer.add_partition(partition)
                if plan.start.kind == TIME:
                    reader.seek_time(plan.start.time)
                else:
                    reader.seek(plan.offsets[partition])
        else:
            consumer.change(subscription)
        consumer.skips_damage = place.skips_damage = plan.skips_damage
        consumer.stops_when_expired = place.stops_when_expired = plan.stops_when_expired
        self.consumers.wake(consumer)

    def _positions(self, plan: StreamPlan) -> list[int]:
        """The first offset of each partition; before a time is found, that of the log."""
        stream = plan.rule.name
        if plan.start.kind == TIME:
            return [self.reads.bounds(stream, partition)[0] for partition in range(plan.rule.partitions)]
        return [plan.offsets[partition] for partition in range(plan.rule.partitions)]

    def _open_stored(self, streams: _SessionStreams, session: Session, subscription: Subscription, plan: StreamPlan) -> None:
        """`open` for a persistent session, whose offsets are stored."""
        filter_text = plan.full_filter
        consumer = streams.by_filter.get(filter_text)
        stored = self.stored.subscription(session.id, filter_text)
        if stored is not None and stored.row.stream != plan.rule.name:
            self.stored.delete(stored)
            stored = None
        restarts: bool = stored is None or (plan.text != "" and plan.text != stored.row.start)
        options: int = (SKIPS_DAMAGE if plan.skips_damage else 0) | (STOPS_WHEN_EXPIRED if plan.stops_when_expired else 0)
        if stored is None:
            stored = self.stored.create(
                SUBSCRIPTION_READER,
                session.id,
                filter_text,
                plan.rule.name,
                plan.topic_filter,
                plan.text,
                options,
                self.clock.now,
                self._positions(plan),
            )
        else:
            stored.change(plan.text or stored.row.start, options)
            if restarts:
                stored.seek(self._positions(plan))
        if consumer is not None and not restarts:
            consumer.change(subscription)
        else:
            if consumer is not None:
                consumer.close()
            consumer = self._consumer(streams, session, subscription, plan)
            self._read_stored(consumer, stored, plan.start.time if restarts and plan.start.kind == TIME else -1)
        consumer.skips_damage = plan.skips_damage
        consumer.stops_when_expired = plan.stops_when_expired
        self.consumers.wake(consumer)

    def _read_stored(self, consumer: StreamConsumer, stored: StoredReader, time: int) -> None:
        """Read from the stored offsets on, or from a time unless it is -1."""
        consumer.stored = stored
        place = _FailedCommits(consumer)
        for offsets in stored.partitions:
            offsets.user = place
            reader = consumer.add_partition(offsets.partition)
            reader.offsets = offsets
            if time >= 0:
                reader.seek_time(time)
            else:
                reader.seek(offsets.next_wanted)

    def _join(self, streams: _SessionStreams, session: Session, subscription: Subscription, plan: StreamPlan) -> None:
        """`open` for a member of a group."""
        consumer = streams.by_filter.get(plan.full_filter)
        if consumer is not None:
            consumer.change(subscription)
        else:
            group = self.groups.find(plan.group, plan.rule.name)
            if group is None:
                positions = self._positions(plan)
                group = self.groups.create(plan.group, plan.rule, plan.topic_filter, plan.text, positions)
                if plan.start.kind == TIME:
                    group.begin_at_time(plan.start.time)
            consumer = self._consumer(streams, session, subscription, plan)
            group.join(consumer)
        consumer.skips_damage = plan.skips_damage
        consumer.stops_when_expired = plan.stops_when_expired
        self.consumers.wake(consumer)

    def _consume(self, streams: _SessionStreams, session: Session, subscription: Subscription, plan: StreamPlan) -> None:
        """`open` for a consumer of a queue."""
        consumer = streams.by_filter.get(plan.full_filter)
        if consumer is not None:
            consumer.change(subscription)
            return
        queue = self.queues.open(plan.queue, plan.topic_filter)
        made = QueueConsumer(self.consumers, session, subscription, plan.rule, plan.topic_filter, plan.rights, queue)
        streams.by_filter[plan.full_filter] = made
        self.consumers.add(made)
        queue.join(made)

    def _consumer(self, streams: SessionConsumers, session: Session, subscription: Subscription, plan: StreamPlan) -> StreamConsumer:
        consumer = StreamConsumer(self.consumers, session, subscription, plan.rule, plan.topic_filter, plan.rights)
        streams.by_filter[plan.full_filter] = consumer
        self.consumers.add(consumer)
        return consumer

    # -- the end of a subscription, and pauses of its client ------------------

    def close(self, session: Session, full_filter: str) -> None:
        """The subscription has ended."""
        stored = self.stored.subscription(session.id, full_filter) if session.id != 0 else None
        if stored is not None:
            self.stored.delete(stored)
        streams = session.deliveries.room_user
        if streams is None:
            return
        assert isinstance(streams, _SessionStreams)
        streams.places.pop(full_filter, None)
        consumer = streams.by_filter.pop(full_filter, None)
        if consumer is not None:
            self._close(consumer)
        if not streams.places and not streams.by_filter:
            session.deliveries.room_user = None

    def _close(self, consumer: StreamConsumer) -> None:
        if consumer.group is not None:
            cast(StreamGroup, consumer.group).leave(consumer.session)
        consumer.close()

    def disconnected(self, session: Session) -> None:
        """The client has disconnected: remember where its subscriptions stand."""
        streams = session.deliveries.room_user
        if streams is None:
            return
        assert isinstance(streams, _SessionStreams)
        for filter_text, consumer in streams.by_filter.items():
            place = streams.places.get(filter_text)
            if place is not None:
                for reader in consumer.readers:
                    place.offsets[reader.partition] = reader.next_offset
            self._close(consumer)
        streams.by_filter.clear()

    def resumed(self, session: Session) -> None:
        """The client of a session has connected again."""
        for filter_text, subscription in session.subscriptions.items():
            if reads_stream(filter_text):
                self._resume(session, filter_text, subscription)

    def _resume(self, session: Session, filter_text: str, subscription: Subscription) -> None:
        streams = session.deliveries.room_user
        place: _Start | None = None
        if streams is not None:
            assert isinstance(streams, _SessionStreams)
            place = streams.places.get(filter_text)
        request = StreamRequest(Properties())
        try:
            plan = self.plan(session, filter_text, request, TOPIC_FILTER_INVALID)
        except MQTTError as error:
            log.warning("event=stream_not_resumed client=%s filter=%s reason=%s", session.client_id, filter_text, error.detail)
            return
        stored = self.stored.subscription(session.id, filter_text) if session.id != 0 else None
        if stored is not None:
            plan.text = ""
            plan.skips_damage = stored.row.options & SKIPS_DAMAGE != 0
            plan.stops_when_expired = stored.row.options & STOPS_WHEN_EXPIRED != 0
        if place is not None:
            plan.text = place.text
            plan.skips_damage = place.skips_damage
            plan.stops_when_expired = place.stops_when_expired
        self.open(session, subscription, plan)
        streams = session.deliveries.room_user
        assert isinstance(streams, _SessionStreams)
        if place is not None:
            for reader in streams.by_filter[filter_text].readers:
                offset = place.offsets.get(reader.partition, -1)
                if offset >= 0:
                    reader.seek(offset)

    def stream_removed(self, name: str) -> None:
        """A stream was deleted, and is not among ``streams`` any more: disconnect the clients that read it."""
        for consumer in list(self.consumers.all):
            if consumer.rule.name == name:
                consumer.removed()
        self.groups.stream_removed(name)
        self.queues.stream_removed(name)


def _choose(name: str, value: str, no: str, yes: str) -> bool:
    """Whether the value of a user property is ``yes``. Raises MQTTError unless it is one of the two."""
    if value != no and value != yes:
        raise MQTTError(IMPLEMENTATION_SPECIFIC_ERROR, f"{name} is {no} or {yes}")
    return value == yes
