"""The publisher: one message to everyone its route names.

The rule kept here: what must be kept of a message is in the journal, under the
gate of its acknowledgement, before the call returns; a QoS 0 copy goes out or
is counted as dropped; nobody gets more than the QoS that was granted
[MQTT-3.8.4-8].
"""

from __future__ import annotations

from typing import Optional, cast
from zlib import crc32

from mqttbroker.codec.properties import user_property
from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.connection import Connection, Outbound
from mqttbroker.core.groups import Group, Target
from mqttbroker.core.outgoing import NO_BYTES, Outgoing
from mqttbroker.core.policy import Rules
from mqttbroker.core.router import Route, Router, StreamSink
from sessions.context import REFUSE, SessionContext
from sessions.journal import Gate, Journal
from sessions.message import Message
from sessions.retained import Retained
from sessions.session import Session


class Publisher:
    """Hands messages to sessions, shared groups, streams and the retained store."""

    def __init__(
        self,
        context: SessionContext,
        router: Router,
        retained: Retained,
        outbound: Outbound,
        rules: Rules,
    ) -> None:
        self.context = context
        self.journal: Journal = context.journal
        self.router = router
        self.retained = retained
        self.outbound = outbound
        self.rules = rules

    def publish(
        self,
        message: Message,
        route: Route,
        outgoing: Outgoing,
        origin: Optional[Session],
        gate: Optional[Gate],
    ) -> None:
        """Hand a message to everyone its route names.

        ``gate`` stays shut until all that must be kept of it is on disk.
        """
        for target in route.targets:
            if target.session is origin and target.no_local:
                own = target.without_no_local
                if own is not None:
                    self.deliver(own, message, outgoing, gate, origin)
            else:
                self.deliver(target, message, outgoing, gate, origin)
        for group in route.groups:
            member = self.router.strategy.choose(group, message.topic)
            if member is not None:
                self.deliver(member, message, outgoing, gate, origin, group.complete)
        for sink in route.streams:
            self._append(sink, message, gate)
        if message.retain:
            self.retained.set(message, False, gate)

    def keeps(self, route: Route, size: int, origin: Optional[Session]) -> bool:
        """Whether a QoS 1 or 2 message need not be refused: nobody who is owed it lacks room,
        of his own as far as that counts, or on disk."""
        refuse: bool = self.context.limits.queue_full == REFUSE
        entries: int = 0
        waiting: bool = False
        for target in route.targets:
            session = target.session
            if session is origin and target.no_local:
                own = target.without_no_local
                if own is None:
                    continue
                target = own
            if target.qos == 0:
                continue
            open_now: bool = session.open
            if refuse and not session.takes(size, open_now):
                return False
            if session.id != 0:
                entries += 1
                waiting = waiting or not open_now
        for group in route.groups:
            if group.available:
                continue
            for member in group.members:
                if refuse and not member.session.takes(size, False):
                    return False
            entries += 1
            waiting = True
        return not waiting or not self.context.full(entries, entries * size)

    def deliver(
        self,
        target: Target,
        message: Message,
        outgoing: Outgoing,
        gate: Optional[Gate],
        origin: Optional[Session],
        group: Optional[Group] = None,
    ) -> None:
        """Hand a message to one of those its route names; ``origin`` waits if that one cannot follow."""
        session = target.session
        qos: int = message.qos
        if target.qos < qos:
            qos = target.qos
        retain: bool = message.retain and target.retain_as_published
        if qos == 0:
            outlet = session.connection
            if outlet is not None:
                cast(Connection, outlet).send_at_most_once(
                    outgoing, retain, target.subscription_ids
                )
            return
        entry = session.offer(message, qos, retain, target.subscription_ids, gate, group)
        if entry is not None:
            cast(Connection, session.connection).send_delivery(entry, outgoing, False)
        elif origin is not None and session.above_high_watermark:
            session.pause_publisher(origin)

    def redistribute(self, session: Session) -> None:
        """Give what a leaving member of shared subscriptions has not acknowledged to others."""
        now = self.outbound.clock.now
        for entry in session.shared_entries():
            group = cast(Group, entry.group)
            topic = entry.message.topic
            member = self.router.strategy.choose(self.router.permitted(group, topic), topic)
            if member is None or member.session is session:
                continue
            old = entry.message
            if session.id != 0 and (
                member.session.connection is None
                or member.session.id == 0
                or member.session.full(old.size)
            ):
                continue  # no better off, no longer on disk, or no room for it
            # The store knows the old one under the session that leaves.
            message = old.copy()
            outgoing = Outgoing(message.topic.encode("utf-8"), message, now)
            self.deliver(member, message, outgoing, entry.gate, None, group)
            session.withdraw(entry)

    def _append(self, sink: StreamSink, message: Message, gate: Optional[Gate]) -> None:
        rule = sink.rule
        partition: int = sink.partition
        if partition < 0:
            partition = crc32(partition_key(rule.key, message)) % rule.partitions
        self.journal.append_to_stream(rule.name, partition, message)
        if gate is not None:
            self.journal.wait_for_commit(gate)

    def publish_own(self, topic: str, payload: bytes, retain: bool) -> None:
        """Publish a message of the broker itself at QoS 0; a retained one is not stored."""
        now = self.outbound.clock.now
        message = Message(topic, payload, 0, retain, NO_BYTES, "", now, 0)
        route = self.router.route(topic.encode("utf-8"))
        outgoing = Outgoing(route.topic_bytes, message, now)
        for target in route.targets:
            self.deliver(target, message, outgoing, None, None)
        if retain:
            self.retained.set(message, True, None)

    def publish_message(self, message: Message, origin: Optional[Session]) -> None:
        """Publish a message that no connected client waits for, such as a will, in its name."""
        try:
            route = self.router.route(message.topic.encode("utf-8"))
        except MQTTError:  # a stored will whose topic passes limits set since
            self.outbound.counters.publish_dropped_denied += 1
            return
        authorizer = self.rules.of(None if origin is None else origin.rules)
        username = None if origin is None else origin.username
        if route.reserved or not authorizer.may_publish(message.publisher, username, route.topic):
            self.outbound.counters.publish_dropped_denied += 1
            return
        outgoing = Outgoing(route.topic_bytes, message, self.outbound.clock.now)
        self.publish(message, route, outgoing, origin, None)


def partition_key(key: str, message: Message) -> bytes:
    """The bytes that choose a partition: of the client id, or of a user property ("" if absent)."""
    if key == "client":
        return message.publisher.encode("utf-8")
    return user_property(message.properties, key[len("user-property:") :].encode("utf-8"))
