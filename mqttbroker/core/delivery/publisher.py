"""The publisher: hands one message to all recipients of its route.

Everything to be stored is in the journal, under the gate of the publisher's acknowledgement, before the call returns,
or is added to the same batch by a `FanOut`. A QoS 0 copy is queued, or dropped and counted. No subscriber gets a higher
QoS than it was granted [MQTT-3.8.4-8].
"""

from __future__ import annotations

from typing import Final, cast
from zlib import crc32

from mqttbroker.codec.properties import user_property
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.core.delivery.deduplication import Deduplication
from mqttbroker.core.delivery.fan_out import FanOut, deliver
from mqttbroker.core.delivery.turns import LongWork, Turns
from mqttbroker.core.routing.groups import Group, Member, RemoteMember
from mqttbroker.core.routing.route import Route, StreamSink
from mqttbroker.core.routing.router import Router
from mqttbroker.core.terms.memory_stage import MemoryStage
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.context import REFUSE, SessionContext
from sessions.delivery import Delivery
from sessions.journal import IN_ANOTHER_LOG, Gate, Journal
from sessions.message import Message
from sessions.message_queue import MessageQueue
from sessions.retained import Retained
from sessions.session import Session

REDISTRIBUTED_AT_ONCE: Final = 200  # queued messages of a session that leaves shared subscriptions
PASS_ON_WORK: Final = 4  # of one of them
MEMBERS_PER_WORK: Final = 16  # of a shared subscription, of which one is chosen


class Publisher:
    """Hands messages to sessions, shared subscriptions, streams and the retained messages."""

    def __init__(
        self,
        context: SessionContext,
        router: Router,
        retained: Retained,
        outbound: Outbound,
        rules: Rules,
        deduplication: Deduplication,
        terms: BrokerTerms,
        memory: MemoryStage,
        turns: Turns,
        cluster: ClusterPort | None,
    ) -> None:
        self.terms = terms
        self.memory = memory
        self.context = context
        self.journal: Journal = context.journal
        self.router = router
        self.retained = retained
        self.outbound = outbound
        self.rules = rules
        self.deduplication = deduplication
        self.turns = turns
        self.fan_out = FanOut(self.journal, turns)
        self.cluster = cluster

    def publish(self, outgoing: Outgoing, route: Route, publisher: Session | None, gate: Gate | None) -> None:
        """Hand a message to all recipients of its route; ``gate`` opens when all entries and records are stored.

        If the route is `large`, only while `fan_out` is done. A repeat for a stream that recognises repeats goes to no
        recipient: the first one had all of them.
        """
        message = outgoing.message
        streams = route.streams
        if route.deduplicated:
            username = publisher.username if publisher is not None else None
            streams = self.deduplication.streams_for(route, message, username, gate)
            if not streams:
                return
        self.distribute(outgoing, route, publisher, gate)
        for group in route.groups:
            member = self.router.strategy.choose(group, message.topic)
            if member is not None:
                self._give(member, outgoing, gate, publisher, group.complete)
        if route.remotes and message.qos == 0:
            for target in route.remotes:
                deliver(target, outgoing, None, None)
        for sink in streams:
            self._append(sink, message, gate)
        if route.logged and (message.qos or message.retain):
            self.journal.publish_to_shards(message)
            if gate is not None:
                self.journal.wait_for_commit(gate)
        if message.retain and not route.to_queue:
            cluster = self.cluster
            if cluster is None:
                self.retained.set(message, False, gate)
            else:
                cluster.retain(message, gate)

    def distribute(self, outgoing: Outgoing, route: Route, publisher: Session | None, gate: Gate | None) -> None:
        """Hand a message to the targets of its route; if that is `large`, only while `fan_out` is done."""
        if route.large:
            self.fan_out.begin(outgoing, route.targets, publisher, gate)
        else:
            for target in route.targets_for(publisher):
                deliver(target, outgoing, gate, publisher)

    def _give(
        self,
        member: Member,
        outgoing: Outgoing,
        gate: Gate | None,
        publisher: Session | None,
        group: Group,
    ) -> None:
        """Hand a message to a member of a shared subscription, who may be on another core of a cluster."""
        if not member.session.remote:
            deliver(member, outgoing, gate, publisher, group)
            return
        shard = cast(RemoteMember, member).shard
        if outgoing.message.qos == 0:
            if self.cluster is not None:
                self.cluster.send_shared(shard, group, outgoing)
            return
        # In the log: the other core stores it with the position behind it, so that it is given to one member once.
        self.journal.publish_to_member(group.full_name, shard, outgoing.message)
        if gate is not None:
            self.journal.wait_for_commit(gate)

    def give_to_group(self, key: str, message: Message) -> bool:
        """Give a member of this core a message that another core chose it for; ``key`` is the name and filter of the group.

        If all members here have left, one of another core gets it. False if there is none that may read it.
        """
        router = self.router
        group: Group | None = router.groups.get(key)
        if group is None:
            return False
        local = group.local_members()
        topic = message.topic
        left = True
        for member in local.members:
            if not member.session.ended:
                left = False
                break
        chosen = router.strategy.choose(router.permitted(group if left else local, topic), topic)
        if chosen is None:
            return False
        self._give(chosen, Outgoing(topic.encode("utf-8"), message, self.outbound.clock.now), IN_ANOTHER_LOG, None, group)
        return True

    def retained_full(self, topic: str, size: int) -> bool:
        """Whether retaining a message of ``size`` bytes would exceed a limit of this core."""
        if self.cluster is not None and not self.cluster.retains(topic):
            return False
        retained = self.retained
        old = retained.get(topic)
        if old is None and len(retained) >= self.terms.max_retained_messages:
            return True
        more: int = size - (0 if old is None else old.size)
        if more <= 0:
            return False
        if self.memory.refuses_state:
            self.memory.refused_retained += 1
            return True
        if retained.size + more <= self.terms.max_retained_bytes:
            return False
        self.outbound.counters.limit_reached("max_retained_bytes")
        return True

    def has_room(self, route: Route, size: int, publisher: Session) -> bool:
        """Whether a QoS 1 or 2 message of ``size`` bytes fits: neither a recipient's queue nor the limit of all queues
        on disk refuses it."""
        context = self.context
        refuse: bool = context.limits.queue_full == REFUSE
        recipients: int = len(route.targets) + len(route.groups)
        if not refuse and not context.full(recipients, recipients * size):
            return True
        entries: int = 0
        some_wait: bool = False  # an entry will wait on disk, instead of being sent at once
        for target in route.targets_for(publisher):
            if target.qos == 0:
                continue
            deliveries = target.session.deliveries
            open_now: bool = deliveries.open
            if refuse and not deliveries.queue.has_room(size, open_now):
                return False
            if deliveries.session_id != 0:
                entries += 1
                some_wait = some_wait or not open_now
        for group in route.groups:
            if group.available:
                continue
            for member in group.members:
                if refuse and not member.session.deliveries.queue.has_room(size, False):
                    return False
            entries += 1
            some_wait = True
        return not some_wait or not context.full(entries, entries * size)

    def redistribute(self, session: Session) -> None:
        """Deliver to other members the messages that a leaving member of shared subscriptions has not acknowledged."""
        deliveries = session.deliveries
        if session.id == 0 and len(deliveries.queue.entries) > REDISTRIBUTED_AT_ONCE:
            self.turns.add(_Redistribution(self, deliveries.shared_in_flight(), deliveries.give_up_queue()))
            return
        for entry in deliveries.shared_entries():
            group = cast(Group, entry.group)
            topic = entry.message.topic
            member = self.router.strategy.choose(self.router.permitted(group, topic), topic)
            if member is None or member.session is session:
                continue
            if session.id != 0 and not _takes_stored(member, entry):
                continue  # it would not be sent sooner, would not be on disk any more, or would be dropped
            self._deliver_again(entry, member, group)
            deliveries.withdraw(entry)

    def pass_on(self, entry: Delivery) -> int:
        """`redistribute` one entry of a session that has ended and was not stored; returns the cost."""
        if entry.group is None:
            return 1
        group = cast(Group, entry.group)
        topic = entry.message.topic
        member = self.router.strategy.choose(self.router.permitted(group, topic), topic)
        if member is not None:
            self._deliver_again(entry, member, group)
        return PASS_ON_WORK + len(group.members) // MEMBERS_PER_WORK

    def _deliver_again(self, entry: Delivery, member: Member, group: Group) -> None:
        # A copy, because the store knows the message under the leaving session's entry.
        message = entry.message.copy()
        outgoing = Outgoing(message.topic.encode("utf-8"), message, self.outbound.clock.now)
        self._give(member, outgoing, entry.gate, None, group)

    def _append(self, sink: StreamSink, message: Message, gate: Gate | None) -> None:
        rule = sink.rule
        partition: int = sink.partition
        if partition < 0:
            partition = crc32(partition_key(rule.key, message)) % rule.partitions
        self.journal.append_to_stream(rule.name, partition, message)
        if gate is not None:
            self.journal.wait_for_commit(gate)


class _Redistribution(LongWork):
    """The messages of shared subscriptions that an ended session, which was not stored, has not acknowledged."""

    def __init__(self, publisher: Publisher, in_flight: list[Delivery], queue: MessageQueue) -> None:
        self._publisher = publisher
        self._in_flight = in_flight
        self._in_flight.reverse()
        self._queue = queue

    @property
    def done(self) -> bool:
        return not self._in_flight and not self._queue.entries

    def step(self, budget: int) -> int:
        cost: int = 0
        while cost < budget and not self.done:
            cost += self._publisher.pass_on(self._in_flight.pop() if self._in_flight else self._queue.pop())
        return cost


def _takes_stored(member: Member, entry: Delivery) -> bool:
    """Whether a member would be sent a message now that is stored for another, and have it stored."""
    session = member.session
    if session.remote:
        remote = cast(RemoteMember, member)
        return remote.connected and remote.persistent
    return session.connection is not None and session.id != 0 and not session.deliveries.queue.full(entry.message.size)


def partition_key(key: str, message: Message) -> bytes:
    """The bytes that a partition is chosen by: the client id, or a user property (empty if absent)."""
    if key == "client":
        return message.publisher.encode("utf-8")
    return user_property(message.properties, key[len("user-property:") :].encode("utf-8"))
