"""SUBSCRIBE and UNSUBSCRIBE, and the retained messages that answer them.

A session's subscriptions, the router and the journal always agree. A SUBACK has one reason code per filter in their
order [MQTT-3.8.4-6]; it leaves after the commit of the subscriptions of a persistent session and before the retained
messages.
"""

from __future__ import annotations

from functools import partial
from typing import Final, List

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
from mqttbroker.core.acknowledgements import AckGate
from mqttbroker.core.connection import Connection
from mqttbroker.core.memory_stage import MemoryStage
from mqttbroker.core.policy import Rules
from mqttbroker.core.replay import Replays
from mqttbroker.core.router import Router
from mqttbroker.core.terms import BrokerTerms
from sessions.context import SessionContext
from sessions.journal import Journal
from sessions.rows import SubscriptionRow
from sessions.session import Session, Subscription
from topic_matcher.filters import is_valid_filter, parse_shared, text_bytes

# Memory of a subscription in bytes, as measured: of one with its own node in the trie, of one with its own group, and of
# each single-level wildcard, which may be a node.
_SUBSCRIPTION_BYTES: Final = 350
_SHARED_BYTES: Final = 1000
_WILDCARD_BYTES: Final = 250

FILTER_WORK: Final = 10  # of one filter of a SUBSCRIBE or UNSUBSCRIBE, in units of `Router.work`


class Subscriptions:
    """Adds and removes subscriptions."""

    def __init__(
        self,
        context: SessionContext,
        router: Router,
        replays: Replays,
        terms: BrokerTerms,
        rules: Rules,
        memory: MemoryStage,
    ) -> None:
        self.memory = memory
        self.context = context
        self.journal: Journal = context.journal
        self.router = router
        self.replays = replays
        self.terms = terms
        self.rules = rules

    def subscribe(self, connection: Connection, session: Session, packet: Subscribe) -> None:
        """Handle a SUBSCRIBE."""
        for request in packet.subscriptions:
            _check_filter(request.topic_filter)
        self.router.work += FILTER_WORK * len(packet.subscriptions)
        identifiers = packet.properties.subscription_identifiers
        identifier = identifiers[0] if identifiers else 0
        replay: List[Subscription] = []
        codes = [
            self._subscribe_one(connection, session, request, identifier, replay) for request in packet.subscriptions
        ]
        if connection.version < 5:
            codes = [code if code < 0x80 else UNSPECIFIED_ERROR for code in codes]
        gate = AckGate(connection, SUBACK, packet.packet_id)
        gate.packet = Suback(packet.packet_id, codes).encode(connection.version)
        if replay:
            session.add_pending_retained(replay)
            gate.on_sent = partial(self.replays.begin, connection)
        self._answer(connection, session, gate)

    def _subscribe_one(
        self,
        connection: Connection,
        session: Session,
        request: Request,
        identifier: int,
        replay: List[Subscription],
    ) -> int:
        """Add one subscription, and add it to ``replay`` if it asks for retained messages; returns its reason code."""
        full_filter = request.topic_filter
        shared = parse_shared(full_filter)
        topic_filter = full_filter if shared is None else shared[1]
        terms = self.terms
        if (
            full_filter.count("/") >= terms.max_topic_levels
            or len(topic_filter.encode("utf-8")) > terms.max_topic_length
        ):
            return TOPIC_FILTER_INVALID
        if shared is not None and request.no_local:
            raise MQTTError(PROTOCOL_ERROR, "No Local on a shared subscription")  # [MQTT-3.8.3-4]
        if not self.rules.may_subscribe(session, topic_filter):
            connection.outbound.denials.log(
                "subscribe",
                full_filter,
                session.client_id,
                connection.peer,
                session.username,
                connection.terms.listener,
            )
            return terms.denial_code()
        old = session.subscriptions.get(full_filter)
        limit = terms.max_subscriptions_per_client
        counters = session.context.counters
        if old is None and len(session.subscriptions) >= limit:
            counters.limit_reached("max_subscriptions_per_client")
            return QUOTA_EXCEEDED
        if old is None and session.filter_bytes + text_bytes(full_filter) > terms.max_subscription_bytes_per_client:
            counters.limit_reached("max_subscription_bytes_per_client")
            return QUOTA_EXCEEDED
        size = subscription_memory(full_filter)
        if old is None and (
            self.memory.refuses_state
            or self.context.subscription_bytes + size > terms.max_total_subscription_bytes
        ):
            self.memory.refused_subscriptions += 1
            return QUOTA_EXCEEDED
        if len(session.pending_retained) + len(replay) >= 2 * limit:  # the same filters, subscribed again and again
            return QUOTA_EXCEEDED
        subscription = Subscription(session, full_filter, request.options, identifier)
        self.load(subscription)
        if shared is None and (request.retain_handling == 0 or (request.retain_handling == 1 and old is None)):
            replay.append(subscription)
        if session.id != 0:
            row = SubscriptionRow(session.id, full_filter, request.qos, request.options, identifier)
            self.journal.save_subscription(row)
        return request.qos

    def unsubscribe(self, connection: Connection, session: Session, packet: Unsubscribe) -> None:
        """Handle an UNSUBSCRIBE [MQTT-3.10.4-1]; messages in flight are still delivered."""
        for topic_filter in packet.topic_filters:
            _check_filter(topic_filter)
        self.router.work += FILTER_WORK * len(packet.topic_filters)
        codes: List[int] = []
        for topic_filter in packet.topic_filters:
            subscription = session.subscriptions.pop(topic_filter, None)
            if subscription is None:
                codes.append(NO_SUBSCRIPTION_EXISTED)
                continue
            session.filter_bytes -= text_bytes(topic_filter)
            self.remove(subscription)
            if session.id != 0:
                self.journal.delete_subscription(session.id, topic_filter)
            codes.append(SUCCESS)
        gate = AckGate(connection, UNSUBACK, packet.packet_id)
        gate.packet = Unsuback(packet.packet_id, codes).encode(connection.version)
        self._answer(connection, session, gate)

    def _answer(self, connection: Connection, session: Session, gate: AckGate) -> None:
        if session.id != 0 and self.journal.gated:
            self.journal.wait_for_commit(gate)
        connection.acks.submit(gate)

    def load(self, subscription: Subscription) -> None:
        """Add a subscription, without storing it, to its session and to the router."""
        session = subscription.session
        topic_filter = subscription.topic_filter
        if topic_filter not in session.subscriptions:
            session.filter_bytes += text_bytes(topic_filter)
            self.context.subscription_bytes += subscription_memory(topic_filter)
        session.subscriptions[topic_filter] = subscription
        shared = parse_shared(topic_filter)
        if shared is None:
            self.router.subscribe(subscription)
        else:
            self.router.join(shared[0], shared[1], subscription)

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription, which is no longer its session's, from the router."""
        self.context.subscription_bytes -= subscription_memory(subscription.topic_filter)
        shared = parse_shared(subscription.topic_filter)
        if shared is None:
            self.router.unsubscribe(subscription)
        else:
            self.router.leave(shared[0], shared[1], subscription.session)


def subscription_memory(topic_filter: str) -> int:
    """An upper estimate of the memory of a subscription, in bytes."""
    wildcards = _WILDCARD_BYTES * topic_filter.count("+")
    if topic_filter.startswith("$share/"):
        return _SHARED_BYTES + wildcards + 4 * text_bytes(topic_filter)
    return _SUBSCRIPTION_BYTES + wildcards + 2 * text_bytes(topic_filter)


def _check_filter(topic_filter: str) -> None:
    """Raise MQTTError for an invalid filter, before any filter of its packet takes effect.

    TOPIC_FILTER_INVALID is only for valid filters that are not allowed.
    """
    # [MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.7.3-1] [MQTT-4.8.2-1] [MQTT-4.8.2-2]
    if not is_valid_filter(topic_filter):
        raise MQTTError(MALFORMED_PACKET, "invalid topic filter")
