"""Subscriptions: SUBSCRIBE, UNSUBSCRIBE and the retained messages that answer them.

The rule kept here: a session's subscriptions, the router and the journal say
the same; a SUBACK holds one code per filter in their order [MQTT-3.8.4-6],
leaves after the commit of what it grants to a durable session, and before the
retained messages it brings.
"""

from __future__ import annotations

from typing import List

from mqttbroker.codec.packets import Suback, Subscribe, Unsuback, Unsubscribe
from mqttbroker.codec.packets import Subscription as Request
from mqttbroker.codec.reason_codes import (
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
from mqttbroker.core.connection import Connection
from mqttbroker.core.policy import Rules, Terms
from mqttbroker.core.replay import Replays
from mqttbroker.core.router import Router
from sessions.journal import Journal
from sessions.session import Session, Subscription
from topic_matcher.filters import is_valid_filter, parse_shared


class Subscriptions:
    """What clients asked to hear, and the changes of it."""

    def __init__(
        self,
        journal: Journal,
        router: Router,
        replays: Replays,
        terms: Terms,
        rules: Rules,
    ) -> None:
        self.journal = journal
        self.router = router
        self.terms = terms
        self.rules = rules
        self.replays = replays

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
            session.add_pending_retained(replay)
            gate.sequel = Answered(self.replays, connection).run
        if session.id != 0 and self.journal.gated:
            self.journal.wait_for_commit(gate)
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
        if len(session.pending_retained) + len(replay) >= 2 * limit:  # the same filters over and over
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
            self.journal.save_subscription(session.id, wanted, request.qos, request.options, identifier)
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
                self.journal.delete_subscription(session.id, topic_filter)
            codes.append(SUCCESS)
        gate = connection.gate(UNSUBACK, packet.packet_id)
        gate.packet = Unsuback(packet.packet_id, codes).encode(connection.version)
        if session.id != 0 and self.journal.gated:
            self.journal.wait_for_commit(gate)
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


class Answered:
    """What follows a SUBACK."""

    def __init__(self, replays: Replays, connection: Connection) -> None:
        self.replays = replays
        self.connection = connection

    def run(self) -> None:
        self.replays.begin(self.connection)


def _check_filter(topic_filter: str) -> None:
    """What is no topic filter ends the connection, before any filter of its packet counts.

    TOPIC_FILTER_INVALID is for filters in form that are not allowed.
    """
    # [MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.7.3-1] [MQTT-4.8.2-1] [MQTT-4.8.2-2]
    if not is_valid_filter(topic_filter):
        raise MQTTError(MALFORMED_PACKET, "invalid topic filter")
