"""PUBLISH packets of one client: routing, forwarding and acknowledgement. This is the hot path.

A PUBLISH takes one of four ways. The first two forward the received bytes without making a message object for them:

=========================================================  ==========================  ===============================
the packet and its route                                   function                    recipients are sent
=========================================================  ==========================  ===============================
QoS 0, no RETAIN, and the route has subscriptions only     `_forward_qos0`             the received packet
QoS 1 or 2, no RETAIN, no DUP, and nothing is to be stored `_forward_unpersisted`      received header, packet id of the
                                                                                       receiver, rest as received
any other QoS 0 (retained, a stream, a shared              `_publish_qos0`             an encoded packet (`Outgoing`)
subscription)
any other QoS 1 or 2 (retained, a stream, a persistent     `_publish_acknowledged`     an encoded packet; stored
session, queue limits that refuse, a duplicate)                                        messages are in the journal
                                                                                       before PUBACK is queued
=========================================================  ==========================  ===============================

On the first two ways each recipient is decided on by itself:

==========================================================================  ==========================================
the recipient                                                               is sent
==========================================================================  ==========================================
same protocol version, no subscription identifier, fits its packet size     the received bytes
the same, but accepts topic aliases                                         the received bytes with an alias added
`_forward_unpersisted`: not `ready`, or no packet id is free                an entry in its session's queue
a shared subscription, QoS 1: the chosen member, if its window is open      the received bytes, in the window as
                                                                            `SharedInFlight` for redelivery
any other                                                                   an encoded packet, by `fan_out.deliver`
==========================================================================  ==========================================
"""

from __future__ import annotations

from typing import Final, cast

from mypy_extensions import i64

from mqttbroker.codec.packets import encode_ack
from mqttbroker.codec.properties import PublishProperties, decode_publish_properties
from mqttbroker.codec.reason_codes import (
    MALFORMED_PACKET,
    NO_MATCHING_SUBSCRIBERS,
    PAYLOAD_FORMAT_INVALID,
    PROTOCOL_ERROR,
    PUBACK,
    PUBREC,
    QUOTA_EXCEEDED,
    RECEIVE_MAXIMUM_EXCEEDED,
    RETAIN_NOT_SUPPORTED,
    TOPIC_ALIAS_INVALID,
    TOPIC_NAME_INVALID,
    MQTTError,
)
from mqttbroker.core.access.denials import NOT_ALLOWED
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.acknowledgements import AckGate
from mqttbroker.core.client.connection import ALIAS_BYTES, Connection
from mqttbroker.core.client.outgoing import NO_BYTES, Outgoing
from mqttbroker.core.client.topic_aliases import publish_with_topic_name
from mqttbroker.core.delivery.fan_out import deliver
from mqttbroker.core.packets.long_packet import total_size
from mqttbroker.core.routing.groups import Target
from mqttbroker.core.routing.route import Route, is_reserved
from sessions.counters import Counters
from sessions.message import Message
from sessions.session import Session
from sessions.window import SharedInFlight

_MAX_DECISIONS: Final = 1000  # topics for which a connection caches whether its client may publish to them
_MAX_DECISION_TOPIC: Final = 256  # characters; decisions on longer topics are not cached
_MAX_CACHED_PROPERTIES: Final = 512  # bytes; longer properties are decoded each time
VERSION_4_PUBLISH: Final = b"\x38"  # the first byte, over links only, of a QoS 0 PUBLISH without properties (DUP is not used at QoS 0)
_NO_ALIASES: Final[dict[int, bytes]] = {}  # shared by the clients that have set none; stays empty


class PublishHandler:
    """Handles the PUBLISH packets of ``connection``.

    ``first`` is always the first byte of the packet. ``rest`` are the bytes after the packet id, or after the topic at
    QoS 0: properties and payload, the latter from ``payload`` on. ``properties`` is None for a packet without any.
    ``more`` are the pieces of a long packet that follow the first.
    """

    def __init__(self, broker: Broker, connection: Connection) -> None:
        self.broker = broker
        self.connection = connection
        self.restricted = connection.restricted
        self._aliases = _NO_ALIASES  # topics by alias, as set by the client
        # The last properties, encoded and decoded: the next ones are often the same.
        self._encoded_properties: bytes = NO_BYTES
        self._properties: PublishProperties | None = None
        self._last_route: Route | None = None

    def handle(self, data: bytes, start: i64, body: i64, end: i64, first: i64, more: list[bytes] | None = None) -> bool:
        """Handle the packet at ``data[start:end]``, whose variable header begins at ``body``.

        False if its route takes longer to build, if it has very many targets and another message is being delivered
        to as many, or if Receive Maximum is reached while acknowledgements wait for a commit: then nothing was done, and
        it is to be handled again in a later iteration of the event loop, before any other packet of this client.

        Of a long packet, ``data`` is the first piece, which holds the whole variable header, and ``end`` its size.
        """
        qos: i64 = (first >> 1) & 3
        if end - body < 2 or qos == 3 or (qos == 0 and first & 8):
            # [MQTT-3.3.1-2] [MQTT-3.3.1-4]
            raise MQTTError(MALFORMED_PACKET, "malformed PUBLISH header")
        topic_end: i64 = body + 2 + ((data[body] << 8) | data[body + 1])
        rest: i64 = topic_end + 2 if qos else topic_end
        if rest > end:
            raise MQTTError(MALFORMED_PACKET, "PUBLISH ends inside its topic or packet id")
        packet_id: i64 = (data[topic_end] << 8) | data[topic_end + 1] if qos else 0
        if qos and packet_id == 0:  # [MQTT-2.2.1-3]
            raise MQTTError(PROTOCOL_ERROR, "PUBLISH with packet id 0")
        topic: bytes = data[body + 2 : topic_end]
        payload: i64 = rest
        alias: i64 = 0
        properties: PublishProperties | None = None
        connection = self.connection
        if connection.version >= 5:
            if rest < end and data[rest] == 0:
                payload = rest + 1
            else:
                properties = self._decode_properties(data, rest, end, more)
                payload = properties.end
                alias = properties.topic_alias
            if alias or not topic:
                topic = self._resolve_alias(alias, topic)
        route = self._route(topic)
        if route is None:
            return False
        payload_size: i64 = end - payload
        if alias and properties is not None:
            encoded = properties.without_alias()
            available = data[payload:end]
            data = publish_with_topic_name(first, topic, data[topic_end:rest], encoded, available, payload_size - len(available))
            payload = len(data) - len(available)
            rest = payload - len(encoded)
            topic_end = rest - 2 if qos else rest
            body = topic_end - 2 - len(topic)
            start = 0
            end = payload + payload_size
        if self.restricted or route.reserved or first & 1 == 1:
            if self._rejects(route, first, packet_id, payload_size):
                _count(connection.outbound.counters, payload_size)
                return True
        if first == 0x30 and route.direct:
            _count(connection.outbound.counters, payload_size)
            targets = route.targets_for(connection.session)
            if route.remotes:
                targets = targets + route.remotes
            packet = data[start:end]
            self._forward_qos0(packet, rest - start, payload - start, connection.version, route, targets, properties, more)
            return True
        known: bool = False  # a message at QoS 2 with this packet id was received, and is not released
        full: bool = False
        if qos:
            session = cast(Session, connection.session)
            received = session.received
            unreleased: i64 = len(received)
            known = unreleased > 0 and packet_id in received
            if route.remaining_length != end - body:
                route.set_header(end - body, data[start + 1 : topic_end])
            if first & 9 == 0 and not known and self._needs_no_store(route, qos, session, unreleased):
                _count(connection.outbound.counters, payload_size)
                self._forward_unpersisted(data[rest:end], route, first, packet_id, payload - rest, properties, more, session)
                return True
            full = connection.version >= 5 and not known and self._receive_maximum_reached(unreleased - session.received_earlier)
        if route.large and not self.broker.publisher.fan_out.done:
            self.broker.publisher.fan_out.wait(connection)
            return False
        if full and connection.acks.length:
            # A packet that is not handled is not received, so a client that sends more at once than it may has to wait.
            connection.acks.awaited = True
            return False
        _count(connection.outbound.counters, payload_size)
        if full:  # only PUBRELs of the client's own would make room [MQTT-3.3.4-7]
            connection.outbound.counters.limit_reached("receive_maximum")
            raise MQTTError(RECEIVE_MAXIMUM_EXCEEDED, "more than Receive Maximum in flight")
        if route.work:
            self.broker.router.work += route.work
        whole: bytes = data[rest:end] if more is None else b"".join((data[rest:end], *more))
        if qos == 0:
            self._publish_qos0(whole, route, first, payload - rest, properties)
        else:
            self._publish_acknowledged(whole, route, first, packet_id, payload - rest, properties, session, known)
        return True

    def _receive_maximum_reached(self, unreleased: i64) -> bool:
        """``unreleased`` messages at QoS 2 were received on this connection: the quota of an earlier one does not count (section 4.9)."""
        connection = self.connection
        return connection.acks.unfinished + unreleased >= connection.terms.receive_maximum

    # -- forwarding received bytes ----------------------------------------------

    def _forward_qos0(
        self,
        packet: bytes,
        properties_start: i64,
        payload: i64,
        version: i64,
        route: Route,
        targets: list[Target],
        properties: PublishProperties | None,
        more: list[bytes] | None,
    ) -> None:
        """``packet`` is the whole packet, of protocol ``version``, in which ``properties_start`` and ``payload`` are positions."""
        size: i64 = len(packet)
        if more is not None:
            size += total_size(more)
        if route.work:
            self.broker.router.work += route.work
        outgoing: Outgoing | None = None
        after_length: bytes = NO_BYTES
        over_link: bytes = NO_BYTES
        for target in targets:
            receiver = target.session.connection
            if receiver is None:
                if target.session.remote:
                    target.session.deliveries.drops().slow_subscriber += 1
                continue
            connection = cast(Connection, receiver)
            if target.zero_copy and connection.zero_copy_version == version:
                if size > connection.maximum_packet_size:  # [MQTT-3.1.2-25]
                    connection.drops().too_large += 1
                elif more is None:
                    connection.send_publish(packet, size - payload, True)
                else:
                    connection.send_publish_pieces(packet, more, size, size - payload)
                continue
            if version >= 5 and target.zero_copy and more is None:
                properties_size: i64 = packet[properties_start]
                if connection.can_alias(size, properties_size):
                    if not after_length:
                        after_length = packet[properties_start + 1 :]
                    connection.send_publish_aliased(0, route.topic_bytes, 0, properties_size, after_length)
                    continue
            if connection.is_link and version < 5 and more is None:
                if not over_link:
                    over_link = VERSION_4_PUBLISH + packet[1:]
                connection.send_publish(over_link, size - payload, True)
                continue
            if outgoing is None:
                whole = packet if more is None else b"".join((packet, *more))
                message = self._message(route, whole[payload:], 0x30, properties)
                outgoing = Outgoing(route.topic_bytes, message, message.timestamp)
            connection.send_at_most_once(outgoing, False, target.subscription_ids)

    def _needs_no_store(self, route: Route, qos: i64, session: Session, unreleased: i64) -> bool:
        """Whether a new QoS 1 or 2 message is for connected clients only and may be acknowledged at once."""
        connection = self.connection
        broker = self.broker
        if not route.unpersisted or connection.acks.length or broker.refuse_when_full:
            return False
        for group in route.groups:
            if group.persistent_members:
                return False
        if qos == 1:
            return unreleased == 0
        return (
            (unreleased < connection.terms.receive_maximum or connection.version < 5)
            and not session.received_full
            and (session.id == 0 or broker.journal.gated)
        )

    def _forward_unpersisted(
        self,
        rest: bytes,
        route: Route,
        first: i64,
        packet_id: i64,
        payload: i64,
        properties: PublishProperties | None,
        more: list[bytes] | None,
        session: Session,
    ) -> None:
        publisher = self.connection
        version: i64 = publisher.version
        size: i64 = len(route.qos1_header) + 2 + len(rest)
        if more is not None:
            size += total_size(more)
        payload_size: i64 = size - len(route.qos1_header) - 2 - payload
        qos: i64 = first >> 1
        qos &= 3
        if qos == 2:
            session.add_received(packet_id, False)
        # Before the message, which the publisher may have subscribed to.
        packet_type = PUBACK if qos == 1 else PUBREC
        if route.matched:
            publisher.send_ack(packet_type, packet_id)
        else:
            publisher.send(encode_ack(packet_type, packet_id, NO_MATCHING_SUBSCRIBERS, version))
        if route.work:
            self.broker.router.work += route.work
        outgoing: Outgoing | None = None
        for target in route.targets_for(session):
            receiver = target.session
            interface = receiver.connection
            if target.zero_copy and target.qos and interface is not None and interface.ready:
                connection = cast(Connection, interface)
                granted: i64 = target.qos if target.qos < qos else qos
                receiver_id: i64 = 0
                if connection.zero_copy_version == version:
                    if size <= connection.maximum_packet_size:
                        receiver_id = receiver.deliveries.allocate_unpersisted(granted)
                    if receiver_id:
                        header = route.qos1_header if granted == 1 else route.qos2_header
                        connection.send_publish_parts(header, receiver_id, rest, size, payload_size)
                        if more is not None:
                            connection.outbox.parts += more
                        continue
                elif version >= 5 and more is None and connection.can_alias(size, rest[0]):
                    receiver_id = receiver.deliveries.allocate_unpersisted(granted)
                    if receiver_id:
                        connection.send_publish_aliased(granted << 1, route.topic_bytes, receiver_id, rest[0], rest[1:])
                        continue
            if outgoing is None:
                whole = rest if more is None else b"".join((rest, *more))
                outgoing = self._outgoing(route, whole, first, payload, properties)
            deliver(target, outgoing, None, session)
        if route.groups:
            whole = rest if more is None else b"".join((rest, *more))
            self._forward_to_groups(whole, route, first, payload, properties)

    def _forward_to_groups(self, rest: bytes, route: Route, first: i64, payload: i64, properties: PublishProperties | None) -> None:
        """`_forward_unpersisted` to one member of each shared subscription."""
        broker = self.broker
        version: i64 = self.connection.version
        size: i64 = len(route.qos1_header) + 2 + len(rest)
        outgoing: Outgoing | None = None
        for group in route.groups:
            member = broker.router.strategy.choose(group, route.topic)
            if member is None:
                continue
            session = member.session
            deliveries = session.deliveries
            if first == 0x32 and member.zero_copy and member.qos and deliveries.can_send_shared(size):
                connection = cast(Connection, session.connection)
                if connection.zero_copy_version == version and size <= connection.maximum_packet_size:
                    shared = self._shared_in_flight(route, rest, payload, properties, group.complete)
                    connection.send_publish_parts(route.qos1_header, deliveries.allocate_shared(shared), rest, size, len(rest) - payload)
                    continue
            if outgoing is None:
                outgoing = self._outgoing(route, rest, first, payload, properties)
            deliver(member, outgoing, None, self.connection.session, group.complete)

    def _shared_in_flight(
        self, route: Route, rest: bytes, payload: i64, properties: PublishProperties | None, group: object
    ) -> SharedInFlight:
        client_id = self.connection.client_id
        now: i64 = self.connection.outbound.clock.now
        if properties is None:
            return SharedInFlight(route.topic, rest, payload, NO_BYTES, client_id, now, 0, group)
        expires_at = _expiry(properties, now)
        return SharedInFlight(route.topic, rest, payload, properties.forward, client_id, now, expires_at, group)

    # -- publishing messages ----------------------------------------------------

    def _publish_qos0(self, rest: bytes, route: Route, first: i64, payload: i64, properties: PublishProperties | None) -> None:
        message = self._message(route, rest[payload:] if payload else rest, first, properties)
        outgoing = Outgoing(route.topic_bytes, message, message.timestamp)
        self.broker.publisher.publish(outgoing, route, self.connection.session, None)

    def _publish_acknowledged(
        self,
        rest: bytes,
        route: Route,
        first: i64,
        packet_id: i64,
        payload: i64,
        properties: PublishProperties | None,
        session: Session,
        known: bool,
    ) -> None:
        """Publish, and acknowledge when everything that is to be stored is on disk.

        ``known``: the session has received the packet id at QoS 2 before.
        """
        broker = self.broker
        connection = self.connection
        acks = connection.acks
        outgoing = self._outgoing(route, rest, first, payload, properties)
        message = outgoing.message
        journal = broker.journal
        publisher = broker.publisher
        if not known:
            if (route.durable or broker.refuse_when_full) and not publisher.has_room(route, message.size, session):
                self._refuse(message.qos, packet_id)
                return
            if message.qos == 2 and session.received_full:
                self._refuse(2, packet_id)
                return
        if message.qos == 1 and not route.durable and not message.retain and acks.length == 0:
            if route.matched:
                connection.send_ack(PUBACK, packet_id)
            else:
                connection.send(encode_ack(PUBACK, packet_id, NO_MATCHING_SUBSCRIBERS, connection.version))
            publisher.publish(outgoing, route, session, None)
            return
        gate: AckGate
        if message.qos == 1:
            gate = AckGate(connection, PUBACK, packet_id)
        else:
            gate = AckGate(connection, PUBREC, packet_id)
            if known:  # [MQTT-4.3.3-10]
                session.received_again(packet_id)
                if session.id != 0 and journal.gated:
                    journal.wait_for_received(gate, session.id, packet_id)
                acks.submit(gate)
                return
            session.add_received(packet_id, False)
        if connection.version >= 5 and not route.matched and not route.logged:
            gate.reason_code = NO_MATCHING_SUBSCRIBERS
        publisher.publish(outgoing, route, session, gate if journal.gated else None)
        # A message that clears nothing changes nothing on disk, and would clear what came after it if it were handled again.
        if message.qos == 2 and session.id != 0 and (gate.pending > 0 or message.retain or not journal.gated):
            session.received_stored(packet_id)
            journal.add_received(session.id, packet_id)
            if journal.gated:
                journal.wait_for_commit(gate)
        acks.submit(gate)

    def _outgoing(self, route: Route, rest: bytes, first: i64, payload: i64, properties: PublishProperties | None) -> Outgoing:
        """The message of a QoS 1 or 2 packet, with the parts of the packet that may be sent again."""
        message = self._message(route, rest[payload:] if payload else rest, first, properties)
        outgoing = Outgoing(route.topic_bytes, message, message.timestamp)
        outgoing.set_parts(self.connection.version, route.length_and_topic, route.qos1_header, rest)
        return outgoing

    def _message(self, route: Route, payload: bytes, first: i64, properties: PublishProperties | None) -> Message:
        retain: bool = first & 1 == 1
        if retain and not self.broker.terms.retain_available:  # [MQTT-3.2.2-14]
            raise MQTTError(RETAIN_NOT_SUPPORTED, "retained messages are not available")
        connection = self.connection
        now: i64 = connection.outbound.clock.now
        forward: bytes = NO_BYTES
        expires_at: int = 0
        if properties is not None:
            forward = properties.forward
            expires_at = _expiry(properties, now)
        qos: i64 = first >> 1
        return Message(route.message_topic, payload, qos & 3, retain, forward, connection.client_id, now, expires_at)

    # -- topic and properties ---------------------------------------------------

    def _route(self, topic: bytes) -> Route | None:
        """The route of a topic; None if it takes longer to build."""
        router = self.broker.router
        route = self._last_route
        if route is None or route.revision != router.revision or route.topic_bytes != topic:
            route = router.cache.get(topic)
            if route is None or route.revision != router.revision:
                if route is None:
                    refused = self._refused_route(topic)
                    if refused is not None:
                        return refused
                route = router.route_in_parts(topic, self)
                if route is None:
                    return None
            self._last_route = route
        return route

    def _refused_route(self, topic_bytes: bytes) -> Route | None:
        """An empty route, which is not cached, if the client may not publish to the topic; else None."""
        topic = self.broker.router.topic_of(topic_bytes)
        router = self.broker.router
        reserved: bool = is_reserved(topic) and router.queue_topic(topic) is None
        if reserved or (self.restricted and not self._may_publish(topic)):
            route = Route(topic, topic_bytes)
            route.reserved = True
            return route
        return None

    def _decode_properties(self, data: bytes, start: i64, end: i64, more: list[bytes] | None) -> PublishProperties:
        properties = self._properties
        after: i64 = start + len(self._encoded_properties)
        if properties is not None and after <= end and data[start:after] == self._encoded_properties:
            properties.end = after
        else:
            properties = decode_publish_properties(data, start, end)
            if properties.end - start <= _MAX_CACHED_PROPERTIES:
                self._encoded_properties = data[start : properties.end]
                self._properties = properties
        if properties.payload_format == 1:
            _check_utf8(data[properties.end : end], more)
        return properties

    def _resolve_alias(self, alias: i64, topic: bytes) -> bytes:
        """The topic name of a packet that sets or uses an alias, or has neither alias nor name."""
        if alias == 0:  # [MQTT-3.3.2-8]
            raise MQTTError(PROTOCOL_ERROR, "empty topic without alias")
        if alias > self.connection.terms.topic_alias_maximum:  # [MQTT-3.3.2-9]
            raise MQTTError(TOPIC_ALIAS_INVALID, f"topic alias {alias} is above the maximum")
        if topic:
            self._route(topic)  # raises MQTTError for an invalid topic name, before the alias is set
            if self._aliases.get(alias) != topic:
                self._set_alias(alias, topic)
            return topic
        known = self._aliases.get(alias)
        if known is None:
            raise MQTTError(PROTOCOL_ERROR, f"topic alias {alias} is not set")
        return known

    def _set_alias(self, alias: i64, topic: bytes) -> None:
        if not self._aliases:
            self._aliases = {}
        known = self._aliases.get(alias)
        grown: i64 = len(topic) + ALIAS_BYTES if known is None else len(topic) - len(known)
        if not self.connection.hold_alias(grown):
            # The alias was promised in CONNACK, so that the broker cannot just ignore it.
            raise MQTTError(QUOTA_EXCEEDED, "no memory for topic aliases")
        self._aliases[alias] = topic

    # -- refusals ---------------------------------------------------------------

    def _may_publish(self, topic: str) -> bool:
        connection = self.connection
        decisions = connection.may_publish
        decision = decisions.get(topic)
        if decision is None:
            decision = self.broker.rules.may_publish(cast(Session, connection.session), topic)
            if len(topic) <= _MAX_DECISION_TOPIC:
                if len(decisions) >= _MAX_DECISIONS:
                    connection.forget_decisions()
                connection.remember_decision(topic, decision)
        return decision

    def _rejects(self, route: Route, first: i64, packet_id: i64, size: i64) -> bool:
        """Answer a PUBLISH that is not permitted, or for which there is no room among the retained messages."""
        connection = self.connection
        qos: i64 = (first >> 1) & 3
        if route.reserved or (self.restricted and not self._may_publish(route.topic)):
            connection.drops().not_authorized += 1
            broker = self.broker
            refusal = broker.router.queue_refusal(route.topic)
            connection.outbound.denials.log(
                "publish",
                route.topic,
                connection.client_id,
                connection.peer,
                connection.username,
                connection.terms.listener,
                refusal or NOT_ALLOWED,
            )
            self._acknowledge_with(qos, packet_id, TOPIC_NAME_INVALID if refusal else broker.terms.denial_code())
            return True
        retained: bool = first & 1 != 0 and size > 0 and not route.to_queue
        if retained and self.broker.publisher.retained_full(route.topic, len(route.topic) + size):
            connection.drops().retained_full += 1
            self._acknowledge_with(qos, packet_id, QUOTA_EXCEEDED)
            return True
        return False

    def _refuse(self, qos: i64, packet_id: i64) -> None:
        """A recipient's queue has no room: refuse the message, so that the publisher sends it again later."""
        connection = self.connection
        connection.drops().refused += 1
        if connection.version >= 5:
            self._acknowledge_with(qos, packet_id, QUOTA_EXCEEDED)
        else:
            connection.disconnect(QUOTA_EXCEEDED, "no room for the message")

    def _acknowledge_with(self, qos: i64, packet_id: i64, reason_code: int) -> None:
        """Acknowledge a PUBLISH that is dropped; version 3.1.1 has no reason codes [MQTT-3.3.5-2]."""
        if qos:
            connection = self.connection
            gate = AckGate(connection, PUBACK if qos == 1 else PUBREC, packet_id)
            gate.reason_code = reason_code
            connection.acks.submit(gate)


def _count(counters: Counters, payload_size: i64) -> None:
    """A packet is handled, and not held for a later iteration."""
    counters.publish_received += 1
    counters.publish_bytes_received += payload_size


def _check_utf8(payload: bytes, more: list[bytes] | None) -> None:
    """Payload Format Indicator 1 says that the payload is UTF-8."""
    try:
        (payload if more is None else b"".join((payload, *more))).decode("utf-8")
    except UnicodeDecodeError:
        raise MQTTError(PAYLOAD_FORMAT_INVALID, "payload is not the UTF-8 it says it is")


def _expiry(properties: PublishProperties, now: i64) -> int:
    """When a message expires, 0 for never; both in microseconds since the Unix epoch."""
    return now + properties.message_expiry * 1_000_000 if properties.message_expiry >= 0 else 0
