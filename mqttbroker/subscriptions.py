"""Subscriptions: SUBSCRIBE, UNSUBSCRIBE and the retained messages that answer them.

The rule kept here: a session's subscriptions, the router and the journal say
the same; a SUBACK holds one code per filter in their order [MQTT-3.8.4-6],
leaves after the commit of what it grants to a durable session, and before the
retained messages it brings.
"""

from __future__ import annotations

from typing import Dict, Final, List, Optional

from mqttbroker.connection import Connection
from mqttbroker.outgoing import NO_BYTES, Outgoing
from mqttbroker.packets import Suback, Subscribe, Unsuback, Unsubscribe
from mqttbroker.packets import Subscription as Request
from mqttbroker.policy import Rules, Terms
from mqttbroker.properties import encode_varint
from mqttbroker.reason_codes import (
    MALFORMED_PACKET,
    NO_SUBSCRIPTION_EXISTED,
    PROTOCOL_ERROR,
    QUOTA_EXCEEDED,
    SUBACK,
    SUCCESS,
    TOPIC_FILTER_INVALID,
    UNSPECIFIED_ERROR,
    UNSUBACK,
    MQTTError,
)
from mqttbroker.router import Router
from sessions.journal import Journal
from sessions.message import Message
from sessions.retained import Retained, RetainedScan
from sessions.session import Session, Subscription
from topic_matcher.filters import is_valid_filter, parse_shared

# Retained messages sent to one new subscriber before anybody else gets a turn.
REPLAY_MESSAGES: Final = 200


class Subscriptions:
    """What clients asked to hear, and the changes of it."""

    def __init__(
        self,
        journal: Journal,
        router: Router,
        retained: Retained,
        terms: Terms,
        rules: Rules,
    ) -> None:
        self.journal = journal
        self.router = router
        self.retained = retained
        self.terms = terms
        self.rules = rules
        self._replays: Dict[Connection, Replay] = {}

    def subscribe(self, connection: Connection, session: Session, packet: Subscribe) -> None:
        """SUBSCRIBE: one reason code per filter, in their order [MQTT-3.8.4-6]."""
        identifiers = packet.properties.subscription_identifiers
        identifier = identifiers[0] if identifiers else 0
        codes: List[int] = []
        replay: List[Subscription] = []
        for request in packet.subscriptions:
            _check_filter(request.topic_filter)
        for request in packet.subscriptions:
            codes.append(self._subscribe_one(connection, session, request, identifier, replay))
        if connection.version < 5:
            codes = [code if code < 0x80 else UNSPECIFIED_ERROR for code in codes]
        gate = connection.gate(SUBACK, packet.packet_id)
        gate.packet = Suback(packet.packet_id, codes).encode(connection.version)
        if replay:
            session.owe_retained(replay)
            gate.sequel = Answered(self, connection).run
        if session.id != 0 and self.journal.gated:
            self.journal.hold(gate)
        connection.answer(gate)

    def _subscribe_one(
        self,
        connection: Connection,
        session: Session,
        request: Request,
        identifier: int,
        replay: List[Subscription],
    ) -> int:
        wanted = request.topic_filter
        shared = parse_shared(wanted)
        topic_filter = wanted if shared is None else shared[1]
        if (
            wanted.count("/") >= self.terms.max_topic_levels
            or len(topic_filter.encode("utf-8")) > self.terms.max_topic_length
        ):
            return TOPIC_FILTER_INVALID
        if shared is not None and request.no_local:
            raise MQTTError(PROTOCOL_ERROR, "No Local on a shared subscription")  # [MQTT-3.8.3-4]
        authorizer = self.rules.of(session.rules)
        if not authorizer.may_subscribe(session.client_id, session.username, topic_filter):
            return self.terms.denial
        old = session.subscriptions.get(wanted)
        limit = self.terms.max_subscriptions_per_client
        if old is None and len(session.subscriptions) >= limit:
            return QUOTA_EXCEEDED
        if len(session.unseen) + len(replay) >= 2 * limit:  # the same filters over and over
            return QUOTA_EXCEEDED
        subscription = Subscription(session, wanted, request.options, identifier)
        session.subscriptions[wanted] = subscription
        if shared is None:
            self.router.subscribe(subscription)
            if request.retain_handling == 0 or (request.retain_handling == 1 and old is None):
                replay.append(subscription)
        else:
            self.router.join(shared[0], shared[1], subscription)
        if session.id != 0:
            self.journal.subscribe(session.id, wanted, request.qos, request.options, identifier)
        return request.qos

    def unsubscribe(self, connection: Connection, session: Session, packet: Unsubscribe) -> None:
        """UNSUBSCRIBE [MQTT-3.10.4-1]; what is under way is still delivered."""
        codes: List[int] = []
        for topic_filter in packet.topic_filters:
            _check_filter(topic_filter)
        for topic_filter in packet.topic_filters:
            subscription = session.subscriptions.pop(topic_filter, None)
            if subscription is None:
                codes.append(NO_SUBSCRIPTION_EXISTED)
                continue
            self.withdraw(subscription)
            if session.id != 0:
                self.journal.unsubscribe(session.id, topic_filter)
            codes.append(SUCCESS)
        gate = connection.gate(UNSUBACK, packet.packet_id)
        gate.packet = Unsuback(packet.packet_id, codes).encode(connection.version)
        if session.id != 0 and self.journal.gated:
            self.journal.hold(gate)
        connection.answer(gate)

    def restore(self, subscription: Subscription) -> None:
        """Put back a subscription that the store has."""
        subscription.session.subscriptions[subscription.topic_filter] = subscription
        shared = parse_shared(subscription.topic_filter)
        if shared is None:
            self.router.subscribe(subscription)
        else:
            self.router.join(shared[0], shared[1], subscription)

    def withdraw(self, subscription: Subscription) -> None:
        """Take a subscription out of the router."""
        shared = parse_shared(subscription.topic_filter)
        if shared is None:
            self.router.unsubscribe(subscription)
        else:
            self.router.leave(shared[0], shared[1], subscription.session)

    def step(self) -> bool:
        """Go on with the retained messages that new subscribers wait for.

        A bounded piece each; true if there is more to do at once.
        """
        if not self._replays:
            return False
        replays = self._replays
        self._replays = {}
        busy = False
        for connection, replay in replays.items():
            if replay.ready and replay.step():
                busy = True
            if not replay.done:
                self._replays[connection] = replay
        return busy

    def replay(self, connection: Connection) -> None:
        """Send what the session of a connection still has to see of retained messages."""
        session = connection.session
        if session is None or not session.unseen or connection in self._replays:
            return
        replay = Replay(self.retained, self.rules, connection, session)
        if replay.ready:
            replay.step()
        if not replay.done:
            self._replays[connection] = replay
            connection.touch()


class Answered:
    """What follows a SUBACK."""

    def __init__(self, subscriptions: Subscriptions, connection: Connection) -> None:
        self.subscriptions = subscriptions
        self.connection = connection

    def run(self) -> None:
        self.subscriptions.replay(self.connection)


class Replay:
    """The retained messages that some subscriptions of one session still have to see
    (section 3.3.1.3), sent as fast as the client takes them.

    A subscription leaves ``session.unseen`` when all its messages were sent; a client that
    comes back before that begins with it again.
    """

    def __init__(
        self,
        retained: Retained,
        rules: Rules,
        connection: Connection,
        session: Session,
    ) -> None:
        self.retained = retained
        self.rules = rules
        self.connection = connection
        self.session = session
        self._current: Optional[Subscription] = None
        self._scan: Optional[RetainedScan] = None
        self._held: List[Message] = []  # taken from the scan, and to be sent first

    @property
    def done(self) -> bool:
        return not self.session.unseen or self.session.outlet is not self.connection

    @property
    def ready(self) -> bool:
        """Whether the client keeps up with what it was sent."""
        connection = self.connection
        session = self.session
        return (
            connection.ready
            and not connection.congested
            and len(session.queue) < REPLAY_MESSAGES
            and session.stored_seq == 0
            and not session.paging
            and (session.id != 0 or session.under_way < self._share)
        )

    @property
    def _share(self) -> int:
        """How much a session that keeps nothing may have under way: the rest of its window is for what is live."""
        session = self.session
        most: int = min(session.pass_maximum, session.shelf.limits.max_queued_messages)
        return max(session.send_maximum, most // 2)

    def step(self) -> bool:
        """Send a piece; false if there was nothing to do."""
        session = self.session
        if self.done:
            return False
        subscription = session.unseen[0]
        if subscription.topic_filter not in session.subscriptions:  # not any more
            session.unseen.popleft()
            return True
        scan = self._scan
        if scan is None or subscription is not self._current:
            self._current = subscription
            self._held.clear()
            scan = self.retained.scan(subscription.topic_filter)
            self._scan = scan
        if not self._held:
            self._held = scan.take(REPLAY_MESSAGES, self.connection.outbound.clock.now)
            self._held.reverse()
        before = len(self._held)
        self._send(subscription)
        after = len(self._held)
        if scan.done and not after:
            session.unseen.popleft()
            self._scan = None
        return after < before or not before

    def _send(self, subscription: Subscription) -> None:
        """Send of what is held as much as the client takes."""
        held = self._held
        session = self.session
        connection = self.connection
        restrictive: bool = self.rules.restrictive
        granted: int = subscription.qos
        own: bytes = NO_BYTES
        if subscription.identifier:
            own = b"\x0b" + encode_varint(subscription.identifier)
        ready: bool = self.ready
        while held and ready:
            message = held[-1]
            if session.queued_messages and not session.takes(message.size, session.open):
                return
            held.pop()
            if restrictive and not self.rules.may_read(session, message.topic):
                continue
            if granted == 0 or message.qos == 0:
                connection.send_retained(message, own)
                ready = connection.ready
            else:
                self._offer(message, message.qos if message.qos < granted else granted, own)
                ready = self.ready

    def _offer(self, message: Message, qos: int, own: bytes) -> None:
        """Send a message at QoS 1 or 2, or have the session keep it until it can be sent."""
        connection = self.connection
        outgoing = Outgoing(message.topic.encode("utf-8"), message, connection.outbound.clock.now)
        if connection.send_passing(outgoing, qos, True, own):
            return
        # The store counts the queue entries of a message, so this delivery gets its own.
        copy = Message(
            message.topic,
            message.payload,
            message.qos,
            True,
            message.properties,
            message.publisher,
            message.timestamp,
            message.expires_at,
        )
        entry = self.session.offer(copy, qos, True, own, None)
        if entry is not None:
            connection.send_delivery(entry, outgoing, False)


def _check_filter(topic_filter: str) -> None:
    """What is no topic filter ends the connection, before any filter of its packet counts.

    TOPIC_FILTER_INVALID is for filters in form that are not allowed.
    """
    # [MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.7.3-1] [MQTT-4.8.2-1] [MQTT-4.8.2-2]
    if not is_valid_filter(topic_filter):
        raise MQTTError(MALFORMED_PACKET, "invalid topic filter")
