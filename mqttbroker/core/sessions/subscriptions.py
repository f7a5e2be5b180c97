"""SUBSCRIBE and UNSUBSCRIBE, and the retained messages that answer them.

A session's subscriptions, the router and the journal always agree. A SUBACK has one reason code per filter in their
order [MQTT-3.8.4-6]; it leaves after the commit of the subscriptions of a persistent session and before the retained
messages. A packet with very many filters is handled in parts, and its client is not read meanwhile.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from functools import partial
from typing import Final

from mqttbroker.codec.packets import Suback, Subscribe, Unsuback, Unsubscribe
from mqttbroker.codec.packets import Subscription as Request
from mqttbroker.codec.reason_codes import (
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
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.client.acknowledgements import AckGate
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.core.delivery.replay import Replays
from mqttbroker.core.delivery.turns import LongWork, Turns
from mqttbroker.core.routing.groups import RemoteMember
from mqttbroker.core.routing.router import Router
from mqttbroker.core.streams.filter import reads_stream
from mqttbroker.core.streams.subscriptions import StreamPlan, StreamRequest, StreamSubscriptions
from mqttbroker.core.terms.memory_stage import MemoryStage
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.context import SessionContext
from sessions.journal import Journal
from sessions.row_kinds import SUBSCRIPTIONS
from sessions.session import (
    AWAITS_RETAINED,
    NO_LOCAL,
    RETAIN_AS_PUBLISHED,
    Session,
    Subscription,
    shard_of_core,
)
from topic_matcher.filters import is_valid_filter, parse_shared, text_bytes

log = logging.getLogger("mqttbroker")

# Memory of a subscription in bytes, as measured: of one with its own node in the trie, of one with its own group, and of
# each single-level wildcard, which may be a node.
_SUBSCRIPTION_BYTES: Final = 350
_SHARED_BYTES: Final = 1000
_WILDCARD_BYTES: Final = 250
_STREAM_BYTES: Final = 4000  # of one that reads a stream, without chunks

FREE_REPLAYS: Final = 100  # subscriptions of a session that may wait for their retained messages in any case

FILTER_WORK: Final = 10  # of one filter of a SUBSCRIBE or UNSUBSCRIBE, in units of `Router.work`
HANDLED_AT_ONCE: Final = 200  # filters of one packet; more are handled in parts
PART_FILTER_WORK: Final = 3  # of one filter in a part

_UNLIMITED: Final = 1 << 60


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
        turns: Turns,
        streams: StreamSubscriptions,
        cluster: ClusterPort | None,
    ) -> None:
        self.cluster = cluster
        self.streams = streams
        self.memory = memory
        self.turns = turns
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
            if request.no_local and parse_shared(request.topic_filter) is not None:
                raise MQTTError(PROTOCOL_ERROR, "No Local on a shared subscription")  # [MQTT-3.8.3-4]
        work = _Subscribing(self, connection, session, packet)
        cluster = self.cluster
        if cluster is not None:
            connection.wait_for_turn()
            work.in_turns = True
            cluster.subscribe(work, session, [request.topic_filter for request in packet.subscriptions])
            return
        self._handle(work, len(packet.subscriptions))

    def unsubscribe(self, connection: Connection, session: Session, packet: Unsubscribe) -> None:
        """Handle an UNSUBSCRIBE [MQTT-3.10.4-1]; messages in flight are still delivered."""
        for topic_filter in packet.topic_filters:
            _check_filter(topic_filter)
        self._handle(_Unsubscribing(self, connection, session, packet), len(packet.topic_filters))

    def _handle(self, packet: _FilterPacket, count: int) -> None:
        if count <= HANDLED_AT_ONCE:
            self.router.work += FILTER_WORK * count
            packet.step(_UNLIMITED)
        else:
            packet.connection.wait_for_turn()
            packet.in_turns = True
            self.turns.add(packet)

    def subscribe_one(
        self,
        connection: Connection,
        session: Session,
        request: Request,
        identifier: int,
        replay: list[Subscription],
        stream_request: StreamRequest,
    ) -> int:
        """Add one subscription, and add it to ``replay`` if it asks for retained messages; returns its reason code.

        ``stream_request`` is what its packet says about streams.
        """
        full_filter = request.topic_filter
        shared = parse_shared(full_filter)
        topic_filter = full_filter if shared is None else shared[1]
        terms = self.terms
        if full_filter.count("/") >= terms.max_topic_levels or len(topic_filter.encode("utf-8")) > terms.max_topic_length:
            return TOPIC_FILTER_INVALID
        stream_plan: StreamPlan | None = None
        if reads_stream(full_filter):
            try:
                stream_plan = self.streams.plan(session, full_filter, stream_request, NOT_AUTHORIZED)
            except MQTTError as error:
                return self._refuse_stream(connection, session, full_filter, stream_request, error)
        elif not self.rules.may_subscribe(session, topic_filter):
            self._log_denial(connection, session, full_filter)
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
        if old is None and self.memory.refuses_state:
            self.memory.refused_subscriptions += 1
            return QUOTA_EXCEEDED
        if old is None and self.context.subscription_bytes + size > terms.max_total_subscription_bytes:
            counters.limit_reached("max_total_subscription_bytes")
            return QUOTA_EXCEEDED
        # The same filters, subscribed again and again. What waits takes no more memory than the subscriptions.
        if len(session.pending_retained) + len(replay) >= 2 * len(session.subscriptions) + FREE_REPLAYS:
            return QUOTA_EXCEEDED
        options: int = request.options
        if stream_plan is not None and (stream_plan.queue or (stream_plan.group and session.id == 0)) and (request.qos == 2):
            # What is handed over must be known after the connection. A queue may give it to another client then.
            options = options & ~3 | 1
        if connection.bridge:
            options |= RETAIN_AS_PUBLISHED if shared is not None else RETAIN_AS_PUBLISHED | NO_LOCAL
        subscription = Subscription(session, full_filter, options, identifier)
        self.load(subscription)
        if old is not None:
            subscription.options |= old.options & AWAITS_RETAINED  # an earlier replay of the filter goes on
        if stream_plan is not None:
            self.streams.open(session, subscription, stream_plan)
        elif shared is None and (request.retain_handling == 0 or (request.retain_handling == 1 and old is None)):
            replay.append(subscription)
            # If nothing matches, there need be no second change of the row.
            if session.id != 0 and self.replays.sources.may_match(topic_filter, self.context.clock.now):
                subscription.options |= AWAITS_RETAINED
        if session.id != 0:
            self.journal.save(SUBSCRIPTIONS, subscription.row())
        return subscription.qos

    def _log_denial(self, connection: Connection, session: Session, full_filter: str) -> None:
        connection.outbound.denials.log(
            "subscribe",
            full_filter,
            session.client_id,
            connection.peer,
            session.username,
            connection.terms.listener,
        )

    def _refuse_stream(self, connection: Connection, session: Session, full_filter: str, request: StreamRequest, error: MQTTError) -> int:
        """Log why a stream is not read; returns the reason code."""
        if error.reason_code == NOT_AUTHORIZED:
            self._log_denial(connection, session, full_filter)
            code = self.terms.denial_code()
            if code == NOT_AUTHORIZED:
                request.add_reason(error.detail)
            return code
        if connection.outbound.denials.may_log():
            log.warning(
                "event=stream_refused client=%s address=%s filter=%s reason=%s user=%s",
                session.client_id,
                connection.peer,
                full_filter,
                error.detail,
                session.username or "",
            )
        request.add_reason(error.detail)
        return error.reason_code

    def unsubscribe_one(self, session: Session, topic_filter: str) -> int:
        """Remove one subscription; returns its reason code."""
        subscription = session.subscriptions.pop(topic_filter, None)
        if subscription is None:
            return NO_SUBSCRIPTION_EXISTED
        session.filter_bytes -= text_bytes(topic_filter)
        self.remove(subscription)
        if session.id != 0:
            self.journal.remove(SUBSCRIPTIONS, (session.id, topic_filter))
        return SUCCESS

    def answer(self, connection: Connection, session: Session, gate: AckGate) -> None:
        """Send the acknowledgement, after the commit if the session is stored."""
        if session.id != 0 and self.journal.gated:
            self.journal.wait_for_commit(gate, len(gate.packet or b""))
        connection.acks.submit(gate)

    def load(self, subscription: Subscription) -> None:
        """Add a subscription, without storing it, to its session and to the router."""
        session = subscription.session
        topic_filter = subscription.topic_filter
        new: bool = topic_filter not in session.subscriptions
        if new:
            session.filter_bytes += text_bytes(topic_filter)
            self.context.subscription_bytes += subscription_memory(topic_filter)
        session.subscriptions[topic_filter] = subscription
        if reads_stream(topic_filter):
            return
        shared = parse_shared(topic_filter)
        if shared is None:
            self.router.subscribe(subscription)
        elif session.remote:
            shard = shard_of_core(session.client_id)
            away = RemoteMember(subscription, shard, shard)
            self.router.join_remote(shared[0], shared[1], shard, [away])
        else:
            self.router.join(shared[0], shared[1], subscription)
        if new and self.cluster is not None and not session.remote:
            self.cluster.filter_added(topic_filter)

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription, which is no longer its session's, from the router."""
        self.context.subscription_bytes -= subscription_memory(subscription.topic_filter)
        if reads_stream(subscription.topic_filter):
            self.streams.close(subscription.session, subscription.topic_filter)
            return
        shared = parse_shared(subscription.topic_filter)
        if shared is None:
            self.router.unsubscribe(subscription)
        else:
            self.router.leave(shared[0], shared[1], subscription.session)
        if self.cluster is not None and not subscription.session.remote:
            self.cluster.filter_removed(subscription.topic_filter)


def subscription_memory(topic_filter: str) -> int:
    """An upper estimate of the memory of a subscription, in bytes."""
    wildcards = _WILDCARD_BYTES * topic_filter.count("+")
    if reads_stream(topic_filter):
        return _STREAM_BYTES + 2 * text_bytes(topic_filter)
    if topic_filter.startswith("$share/"):
        return _SHARED_BYTES + wildcards + 4 * text_bytes(topic_filter)
    return _SUBSCRIPTION_BYTES + wildcards + 2 * text_bytes(topic_filter)


class _FilterPacket(LongWork):
    """A SUBSCRIBE or UNSUBSCRIBE whose filters are valid."""

    def __init__(self, owner: Subscriptions, connection: Connection, session: Session, count: int) -> None:
        self.owner = owner
        self.connection = connection
        self.session = session
        self.codes: list[int] = []
        self.in_turns = False  # the client is not read until all filters are handled
        self._count = count
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    def step(self, budget: int) -> int:
        codes = self.codes
        start: int = len(codes)
        end: int = min(self._count, start + 1 + budget // PART_FILTER_WORK)
        if self.connection.closed:  # it waits for no answer
            self._done = True
            self.abandoned()
            return 1
        while len(codes) < end:
            codes.append(self.handle(len(codes)))
        if end == self._count:
            self._done = True
            self.finish()
            if self.in_turns:
                self.connection.take_turn()
        return PART_FILTER_WORK * (end - start)

    @abstractmethod
    def handle(self, number: int) -> int:
        """Handle one filter; returns its reason code."""

    @abstractmethod
    def finish(self) -> None:
        """Send the acknowledgement."""

    def abandoned(self) -> None:
        """The connection is closed before all filters are handled; those that are stay in the session."""


class _Subscribing(_FilterPacket):
    def __init__(self, owner: Subscriptions, connection: Connection, session: Session, packet: Subscribe) -> None:
        super().__init__(owner, connection, session, len(packet.subscriptions))
        self.packet = packet
        self._replay: list[Subscription] = []
        self._stream_request = StreamRequest(packet.properties)
        identifiers = packet.properties.subscription_identifiers
        self._identifier = identifiers[0] if identifiers else 0

    def handle(self, number: int) -> int:
        request = self.packet.subscriptions[number]
        return self.owner.subscribe_one(self.connection, self.session, request, self._identifier, self._replay, self._stream_request)

    def finish(self) -> None:
        connection = self.connection
        codes = self.codes
        if connection.version < 5:
            codes = [code if code < 0x80 else UNSPECIFIED_ERROR for code in codes]
        gate = AckGate(connection, SUBACK, self.packet.packet_id)
        gate.packet = self._suback(codes)
        if self._replay:
            self.session.add_pending_retained(self._replay)
            gate.on_sent = partial(self.owner.replays.begin, connection)
        self.owner.answer(connection, self.session, gate)

    def abandoned(self) -> None:
        if self._replay and not self.session.ended:
            self.session.add_pending_retained(self._replay)

    def _suback(self, codes: list[int]) -> bytes:
        """The SUBACK, with its properties if the client wants them and they fit [MQTT-3.1.2-29] [MQTT-3.9.2-1]."""
        connection = self.connection
        suback = Suback(self.packet.packet_id, codes)
        if connection.version >= 5 and connection.problem_information:
            self._stream_request.describe(suback.properties)
            packet = suback.encode(5)
            if len(packet) <= connection.maximum_packet_size:
                return packet
            suback = Suback(self.packet.packet_id, codes)
        return suback.encode(connection.version)


class _Unsubscribing(_FilterPacket):
    def __init__(self, owner: Subscriptions, connection: Connection, session: Session, packet: Unsubscribe) -> None:
        super().__init__(owner, connection, session, len(packet.topic_filters))
        self.packet = packet

    def handle(self, number: int) -> int:
        return self.owner.unsubscribe_one(self.session, self.packet.topic_filters[number])

    def finish(self) -> None:
        gate = AckGate(self.connection, UNSUBACK, self.packet.packet_id)
        gate.packet = Unsuback(self.packet.packet_id, self.codes).encode(self.connection.version)
        self.owner.answer(self.connection, self.session, gate)


def _check_filter(topic_filter: str) -> None:
    """Raise MQTTError for an invalid filter, before any filter of its packet takes effect.

    TOPIC_FILTER_INVALID is only for valid filters that are not allowed.
    """
    # [MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.7.3-1] [MQTT-4.8.2-1] [MQTT-4.8.2-2]
    if not is_valid_filter(topic_filter):
        raise MQTTError(MALFORMED_PACKET, "invalid topic filter")
