"""Subscriptions: SUBSCRIBE, UNSUBSCRIBE and the retained messages that answer them.

The rule kept here: a session's subscriptions, the router and the journal say
the same; a SUBACK holds one code per filter in their order [MQTT-3.8.4-6],
leaves after the commit of what it grants to a durable session, and before the
retained messages it brings.
"""

from __future__ import annotations

from typing import List

from mqttbroker.connection import Connection
from mqttbroker.outgoing import NO_BYTES, Outgoing
from mqttbroker.packets import Suback, Subscribe, Unsuback, Unsubscribe
from mqttbroker.packets import Subscription as Request
from mqttbroker.policy import Policy, Terms
from mqttbroker.properties import encode_varint
from mqttbroker.reason_codes import (
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
from sessions.retained import Retained
from sessions.session import Session, Subscription
from topic_matcher.filters import is_valid_filter, parse_shared


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

    def subscribe(self, connection: Connection, session: Session, packet: Subscribe) -> None:
        """SUBSCRIBE: one reason code per filter, in their order [MQTT-3.8.4-6]."""
        identifiers = packet.properties.subscription_identifiers
        identifier = identifiers[0] if identifiers else 0
        codes: List[int] = []
        replay: List[Subscription] = []
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
        shared = None
        try:
            shared = parse_shared(wanted)
        except ValueError:
            return TOPIC_FILTER_INVALID
        topic_filter = wanted if shared is None else shared[1]
        if not is_valid_filter(topic_filter) or wanted.count("/") >= self.terms.max_topic_levels:
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

    def replay(self, connection: Connection, subscription: Subscription) -> None:
        """Send the retained messages under a new subscription (section 3.3.1.3)."""
        session = subscription.session
        if session.outlet is not connection:
            return
        now = connection.outbound.clock.now
        own = NO_BYTES
        if subscription.identifier:
            own = b"\x0b" + encode_varint(subscription.identifier)
        for message in self.retained.match(subscription.topic_filter, now):
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
            outgoing = Outgoing(message.topic.encode("utf-8"), copy, now)
            qos = min(message.qos, subscription.qos)
            if qos == 0:
                connection.send_at_most_once(outgoing, True, own)
                continue
            entry = session.offer(copy, qos, True, own, None)
            if entry is not None:
                connection.send_delivery(entry, outgoing, False)


class Replay:
    """The retained messages that some subscriptions still have to see."""

    def __init__(
        self,
        subscriptions: Subscriptions,
        connection: Connection,
        wanted: List[Subscription],
    ) -> None:
        self.subscriptions = subscriptions
        self.connection = connection
        self.wanted = wanted

    def run(self) -> None:
        for subscription in self.wanted:
            self.subscriptions.replay(self.connection, subscription)
