"""Subscriptions: SUBSCRIBE, UNSUBSCRIBE and the retained messages that answer them.

The rule kept here: a session's subscriptions, the router and the journal say
the same; a SUBACK holds one code per filter in their order [MQTT-3.8.4-6],
leaves after the commit of what it grants to a durable session, and before the
retained messages it brings.
"""

from __future__ import annotations

from typing import Final, List, Optional

from mqttbroker.connection import CLOSED, Connection
from mqttbroker.outgoing import NO_BYTES, Outgoing
from mqttbroker.packets import Suback, Subscribe, Unsuback, Unsubscribe
from mqttbroker.packets import Subscription as Request
from mqttbroker.policy import Policy, Terms
from mqttbroker.properties import encode_varint
from mqttbroker.reason_codes import (
    MALFORMED_PACKET,
    NO_SUBSCRIPTION_EXISTED,
    NOT_AUTHORIZED,
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
        policy: Policy,
    ) -> None:
        self.journal = journal
        self.router = router
        self.retained = retained
        self.terms = terms
        self.policy = policy
        self._replays: List[Replay] = []

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
            gate.sequel = Replay(self, connection, replay).run
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
        if not self.policy.may_subscribe(session.client_id, topic_filter):
            return NOT_AUTHORIZED
        old = session.subscriptions.get(wanted)
        if old is None and len(session.subscriptions) >= self.terms.max_subscriptions_per_client:
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
        replays = self._replays
        self._replays = []
        busy = False
        for replay in replays:
            if replay.ready:
                replay.step()
                busy = True
            if not replay.done:
                self._replays.append(replay)
        return busy and bool(self._replays)

    def begin(self, replay: Replay) -> None:
        """Send the first piece of a replay, and keep it if there is more."""
        replay.step()
        if not replay.done:
            self._replays.append(replay)
            replay.connection.touch()


def _check_filter(topic_filter: str) -> None:
    """What is no topic filter ends the connection, before any filter of its packet counts.

    TOPIC_FILTER_INVALID is for filters in form that are not allowed.
    """
    # [MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.7.3-1] [MQTT-4.8.2-1] [MQTT-4.8.2-2]
    if not is_valid_filter(topic_filter):
        raise MQTTError(MALFORMED_PACKET, "invalid topic filter")


class Replay:
    """The retained messages that some subscriptions of one session still have to see
    (section 3.3.1.3), sent as fast as the client takes them."""

    def __init__(
        self,
        subscriptions: Subscriptions,
        connection: Connection,
        wanted: List[Subscription],
    ) -> None:
        self.subscriptions = subscriptions
        self.connection = connection
        self._wanted = wanted
        self._scan: Optional[RetainedScan] = None

    def run(self) -> None:
        """The SUBACK is out."""
        self.subscriptions.begin(self)

    @property
    def done(self) -> bool:
        return not self._wanted or self.connection.state == CLOSED

    @property
    def ready(self) -> bool:
        """Whether the client keeps up with what it was sent."""
        connection = self.connection
        session = connection.session
        return (
            connection.state == CLOSED
            or session is None
            or (not connection.congested and len(session.queue) < REPLAY_MESSAGES)
        )

    def step(self) -> None:
        """Send a piece."""
        session = self.connection.session
        if self.done or session is None:
            return
        subscription = self._wanted[0]
        scan = self._scan
        if scan is None:
            scan = self.subscriptions.retained.scan(subscription.topic_filter)
            self._scan = scan
        for message in scan.take(REPLAY_MESSAGES, self.connection.outbound.clock.now):
            self._send(session, subscription, message)
        if scan.done:
            self._wanted.pop(0)
            self._scan = None

    def _send(self, session: Session, subscription: Subscription, message: Message) -> None:
        connection = self.connection
        own = NO_BYTES
        if subscription.identifier:
            own = b"\x0b" + encode_varint(subscription.identifier)
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
        qos = min(message.qos, subscription.qos)
        if qos > 0 and session.outlet is connection:
            entry = session.offer(copy, qos, True, own, None)
            if entry is None:
                return
            outgoing = Outgoing(message.topic.encode("utf-8"), copy, connection.outbound.clock.now)
            connection.send_delivery(entry, outgoing, False)
        elif session.outlet is connection:
            outgoing = Outgoing(message.topic.encode("utf-8"), copy, connection.outbound.clock.now)
            connection.send_at_most_once(outgoing, True, own)
