"""The protocol of one client, its PUBLISHes: one packet in, copies and an acknowledgement out.

The rule kept here: what came in leaves as it came wherever the standard lets it, and no object is made for such a
message; whatever has to be kept of any other is in the journal before its acknowledgement is queued.

This is the hot path: integer offsets into the buffer, and nothing is awaited.
"""

from __future__ import annotations

from typing import Dict, Final, List, Optional, cast

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
    MQTTError,
)
from mqttbroker.core.broker import Broker
from mqttbroker.core.connection import AckGate, Connection
from mqttbroker.core.long_packet import total
from mqttbroker.core.outgoing import NO_BYTES, Outgoing
from mqttbroker.core.router import Route
from mqttbroker.core.terms import ListenerTerms
from mqttbroker.core.topic_aliases import named_publish
from sessions.message import Message
from sessions.session import Session
from sessions.window import SharedInFlight

# Topics for which a connection remembers whether its client may publish to them.
_MAX_DECISIONS: Final = 1000
_LONG_TOPIC: Final = 256  # characters; longer ones are judged each time
_LONG_SECTION: Final = 512  # bytes of properties; more are understood each time
_NO_ALIASES_SET: Final[Dict[int, bytes]] = {}  # by a client that has set none yet


class PublishHandler(Connection):
    """A connection that takes PUBLISHes."""

    def __init__(self, broker: Broker, peer: str, terms: ListenerTerms) -> None:
        super().__init__(broker.outbound, peer, terms)
        self.broker = broker
        self.restricted = broker.rules.of(terms.rules).restrictive
        self.aliases = _NO_ALIASES_SET
        # The last properties of a PUBLISH, as they came and as understood: the next ones are often the same.
        self.section: bytes = NO_BYTES
        self.found: Optional[PublishProperties] = None
        self.last_route: Optional[Route] = None

    def release(self) -> None:
        super().release()
        self.aliases.clear()
        self.last_route = None

    def take_publish(
        self, data: bytes, start: int, body: int, end: int, first: int, more: Optional[List[bytes]] = None
    ) -> None:
        """A PUBLISH at ``data[start:end]`` whose variable header begins at ``body``.

        Of a long one ``data`` holds that header, and ``more`` the pieces that follow ``data``.
        """
        qos: int = (first >> 1) & 3
        if end - body < 2 or qos == 3 or (qos == 0 and first & 8):
            # [MQTT-3.3.1-2] [MQTT-3.3.1-4]
            raise MQTTError(MALFORMED_PACKET, "malformed PUBLISH header")
        topic_end: int = body + 2 + ((data[body] << 8) | data[body + 1])
        rest: int = topic_end + 2 if qos else topic_end
        if rest > end:
            raise MQTTError(MALFORMED_PACKET, "PUBLISH ends inside its topic or packet id")
        packet_id: int = (data[topic_end] << 8) | data[topic_end + 1] if qos else 0
        if qos and packet_id == 0:  # [MQTT-2.2.1-3]
            raise MQTTError(PROTOCOL_ERROR, "PUBLISH with packet id 0")
        topic: bytes = data[body + 2 : topic_end]
        payload: int = rest
        alias: int = 0
        found: Optional[PublishProperties] = None
        if self.version >= 5:
            if rest < end and data[rest] == 0:
                payload = rest + 1
            else:
                found = self._properties(data, rest, end, more)
                payload = found.next
                alias = found.topic_alias
            if alias or not topic:
                topic = self._named(alias, topic)
        route = self._route(topic)
        self.outbound.counters.publish_received += 1
        self.outbound.counters.publish_bytes_received += end - start
        if alias and found is not None:
            # From here on it is as if it had come with its topic's name.
            section = found.named()
            given = data[payload:end]
            size: int = end - payload
            data = named_publish(first, topic, data[topic_end:rest], section, given, size - len(given))
            payload = len(data) - len(given)
            rest = payload - len(section)
            topic_end = rest - 2 if qos else rest
            body = topic_end - 2 - len(topic)
            start = 0
            end = payload + size
        judged: bool = self.restricted or route.reserved or first & 1 == 1
        if judged and self._turned_down(route, first, packet_id, end - payload):
            return
        if first == 0x30 and route.direct:
            self._forward(data[start:end], rest - start, payload - start, route, found, more)
            return
        if qos:
            if route.remaining_length != end - body:
                route.set_header(end - body, data[start + 1 : topic_end])
            if first & 9 == 0 and self._passes(route, qos, packet_id):
                self._pass_on(data[rest:end], route, first, packet_id, payload - rest, found, more)
                return
        tail: bytes = data[rest:end] if more is None else b"".join((data[rest:end], *more))
        self._publish(tail, route, first, packet_id, payload - rest, found)

    def _publish(
        self,
        tail: bytes,
        route: Route,
        first: int,
        packet_id: int,
        payload: int,
        found: Optional[PublishProperties],
    ) -> None:
        """Any PUBLISH, by way of the message that it is; ``tail`` is all that follows its packet id."""
        if first & 6:
            outgoing = self._outgoing(route, tail, first, payload, found)
            self._acknowledged_publish(outgoing.message, route, outgoing, packet_id)
        else:
            message = self._message(route, tail[payload:] if payload else tail, first, found)
            outgoing = Outgoing(route.topic_bytes, message, message.timestamp)
            self.broker.publisher.publish(outgoing.message, route, outgoing, self.session, None)

    def _message(
        self, route: Route, payload: bytes, first: int, found: Optional[PublishProperties]
    ) -> Message:
        """The application message of a PUBLISH with that first byte."""
        retain: bool = first & 1 == 1
        if retain and not self.broker.terms.retain_available:  # [MQTT-3.2.2-14]
            raise MQTTError(RETAIN_NOT_SUPPORTED, "retained messages are not available")
        now: int = self.outbound.clock.now
        properties: bytes = NO_BYTES
        expires_at: int = 0
        if found is not None:
            properties = found.forward
            expires_at = _expiry(found, now)
        return Message(
            route.topic,
            payload,
            (first >> 1) & 3,
            retain,
            properties,
            self.client_id,
            now,
            expires_at,
        )

    def _forward(
        self,
        packet: bytes,
        section: int,
        payload: int,
        route: Route,
        found: Optional[PublishProperties],
        more: Optional[List[bytes]],
    ) -> None:
        """QoS 0, not retained: what came in is what goes out, wherever it may.

        Its properties begin at ``section`` of it, and its payload at ``payload``.
        """
        version: int = self.version
        size: int = len(packet)
        if more is not None:
            size += total(more)
        session = self.session
        outgoing: Optional[Outgoing] = None
        rest: bytes = NO_BYTES
        for target in route.targets:
            outlet = target.session.connection
            if outlet is None:
                continue
            connection = cast(Connection, outlet)
            if target.session is session and target.no_local:
                own = target.without_no_local
                if own is None:
                    continue
                target = own
            if target.zero_copy and connection.plain_version == version:
                if size <= connection.maximum_packet_size:
                    if more is None:
                        connection.send_publish(packet, True)
                    else:
                        connection.send_pieces(packet, more, size)
                else:
                    self.outbound.counters.publish_dropped_too_large += 1
                continue
            if version >= 5 and target.zero_copy and more is None and connection.renames(size, packet[section]):
                if not rest:
                    rest = packet[section + 1 :]
                connection.send_renamed(0, route.topic_bytes, 0, packet[section], rest)
                continue
            if outgoing is None:
                whole = packet if more is None else b"".join((packet, *more))
                message = self._message(route, whole[payload:], 0x30, found)
                outgoing = Outgoing(route.topic_bytes, message, message.timestamp)
            connection.send_at_most_once(outgoing, False, target.subscription_ids)

    def _passes(self, route: Route, qos: int, packet_id: int) -> bool:
        """Whether a QoS 1 or 2 message of this route goes to connected clients alone and is at once
        acknowledged."""
        if not route.unpersisted or self.acks.length or self.broker.refuse_when_full:
            return False
        for group in route.groups:
            if group.persistent_members:
                return False
        session = cast(Session, self.session)
        received = session.received
        if qos == 1:
            return not received
        return (
            (len(received) < self.terms.receive_maximum or self.version < 5)
            and packet_id not in received
            and (session.id == 0 or self.broker.journal.gated)
        )

    def _pass_on(
        self,
        tail: bytes,
        route: Route,
        first: int,
        packet_id: int,
        payload: int,
        found: Optional[PublishProperties],
        more: Optional[List[bytes]],
    ) -> None:
        """QoS 1 or 2 that nobody keeps: what came in is what goes out, but for the packet id.

        ``tail`` is what follows that, and ``more`` what follows that of a long packet; in it the payload begins
        at ``payload``.
        """
        version: int = self.version
        size: int = len(route.qos1_header) + 2 + len(tail)
        if more is not None:
            size += total(more)
        qos: int = first >> 1
        qos &= 3
        session = cast(Session, self.session)
        if qos == 2:
            session.received[packet_id] = False
        outgoing: Optional[Outgoing] = None
        for target in route.targets:
            receiver = target.session
            if receiver is session and target.no_local:
                own = target.without_no_local
                if own is None:
                    continue
                target = own
            outlet = receiver.connection
            if target.zero_copy and target.qos and outlet is not None and outlet.ready:
                connection = cast(Connection, outlet)
                granted: int = target.qos if target.qos < qos else qos
                if connection.plain_version == version:
                    number = receiver.allocate_unpersisted(granted) if size <= connection.maximum_packet_size else 0
                    if number:
                        head = route.qos1_header if granted == 1 else route.qos2_header
                        connection.send_numbered(head, number, tail, size)
                        if more is not None:
                            connection.outbox += more
                        continue
                elif version >= 5 and more is None and connection.renames(size, tail[0]):
                    number = receiver.allocate_unpersisted(granted)
                    if number:
                        connection.send_renamed(granted << 1, route.topic_bytes, number, tail[0], tail[1:])
                        continue
            if outgoing is None:
                whole = tail if more is None else b"".join((tail, *more))
                outgoing = self._outgoing(route, whole, first, payload, found)
            self.broker.publisher.deliver(target, outgoing.message, outgoing, None, session)
        if route.groups:
            self._share(tail if more is None else b"".join((tail, *more)), route, first, payload, found)
        kind = PUBACK if qos == 1 else PUBREC
        if route.matched:
            self.send_ack(kind, packet_id)
        else:
            self.send(encode_ack(kind, packet_id, NO_MATCHING_SUBSCRIBERS, version))

    def _share(
        self,
        tail: bytes,
        route: Route,
        first: int,
        payload: int,
        found: Optional[PublishProperties],
    ) -> None:
        """`_pass_on` to one member of each shared subscription."""
        version: int = self.version
        size: int = len(route.qos1_header) + 2 + len(tail)
        outgoing: Optional[Outgoing] = None
        for group in route.groups:
            member = self.broker.router.strategy.choose(group, route.topic)
            if member is None:
                continue
            session = member.session
            if first == 0x32 and member.zero_copy and member.qos and session.can_send_shared(size):
                connection = cast(Connection, session.connection)
                if (
                    connection.plain_version == version
                    and size <= connection.maximum_packet_size
                ):
                    number = session.allocate_shared(self._loan(route, tail, payload, found, group.complete))
                    connection.send_numbered(route.qos1_header, number, tail, size)
                    continue
            if outgoing is None:
                outgoing = self._outgoing(route, tail, first, payload, found)
            self.broker.publisher.deliver(
                member, outgoing.message, outgoing, None, self.session, group.complete
            )

    def _loan(
        self,
        route: Route,
        tail: bytes,
        payload: int,
        found: Optional[PublishProperties],
        group: object,
    ) -> SharedInFlight:
        now: int = self.outbound.clock.now
        topic = route.topic
        if found is None:
            return SharedInFlight(topic, tail, payload, NO_BYTES, self.client_id, now, 0, group)
        expires_at = _expiry(found, now)
        return SharedInFlight(topic, tail, payload, found.forward, self.client_id, now, expires_at, group)

    def _outgoing(
        self,
        route: Route,
        tail: bytes,
        first: int,
        payload: int,
        found: Optional[PublishProperties],
    ) -> Outgoing:
        """The message of a packet that ends in ``tail``, with the parts of it that may be used again."""
        message = self._message(route, tail[payload:] if payload else tail, first, found)
        outgoing = Outgoing(route.topic_bytes, message, message.timestamp)
        outgoing.reuse(self.version, route.length_and_topic, route.qos1_header, tail)
        return outgoing

    def _acknowledged_publish(
        self, message: Message, route: Route, outgoing: Outgoing, packet_id: int
    ) -> None:
        """QoS 1 and 2: publish, and acknowledge when all that must be kept is on disk."""
        broker = self.broker
        session = self.session
        assert session is not None
        if (
            self.version >= 5
            and self.unanswered + len(session.received) >= self.terms.receive_maximum
            and packet_id not in session.received
        ):
            # [MQTT-3.3.4-9]
            raise MQTTError(RECEIVE_MAXIMUM_EXCEEDED, "more than Receive Maximum in flight")
        journal = broker.journal
        gate: AckGate
        if (
            (route.durable or broker.refuse_when_full)
            and packet_id not in session.received
            and not broker.publisher.keeps(route, message.size, session)
        ):
            self._refuse_publish(message.qos, packet_id)
            return
        if message.qos == 1 and not route.durable and not message.retain and self.acks.length == 0:
            broker.publisher.publish(message, route, outgoing, session, None)
            if route.targets:
                self.send_ack(PUBACK, packet_id)
            else:
                self.send(encode_ack(PUBACK, packet_id, NO_MATCHING_SUBSCRIBERS, self.version))
            return
        if message.qos == 1:
            gate = self.gate(PUBACK, packet_id)
        else:
            gate = self.gate(PUBREC, packet_id)
            if packet_id in session.received:  # [MQTT-4.3.3-10]
                if session.id != 0 and journal.gated:
                    journal.wait_for_received(gate, session.id, packet_id)
                self.answer(gate)
                return
            session.received[packet_id] = False
        if self.version >= 5 and not route.matched:
            gate.reason_code = NO_MATCHING_SUBSCRIBERS
        broker.publisher.publish(
            message, route, outgoing, session, gate if journal.gated else None
        )
        if message.qos == 2 and session.id != 0 and (gate.pending > 0 or not journal.gated):
            session.received[packet_id] = True
            journal.add_received(session.id, packet_id)
            if journal.gated:
                journal.wait_for_commit(gate)
        self.answer(gate)

    def _route(self, topic: bytes) -> Route:
        router = self.broker.router
        route = self.last_route
        if route is None or route.revision != router.revision or route.topic_bytes != topic:
            route = router.cache.get(topic)
            if route is None or route.revision != router.revision:
                route = router.route(topic)
            self.last_route = route
        return route

    def _properties(
        self, data: bytes, start: int, end: int, more: Optional[List[bytes]]
    ) -> PublishProperties:
        """The properties at ``start``; those that are the same as the last ones are not decoded again."""
        found = self.found
        after: int = start + len(self.section)
        if found is not None and after <= end and data[start:after] == self.section:
            found.next = after
        else:
            found = decode_publish_properties(data, start, end)
            if found.next - start <= _LONG_SECTION:
                self.section = data[start : found.next]
                self.found = found
        if found.payload_format == 1:
            _check_text(data[found.next : end], more)
        return found

    def _named(self, alias: int, topic: bytes) -> bytes:
        """The topic of a packet with a topic alias, which it sets or uses, or without both."""
        if alias == 0:  # [MQTT-3.3.2-8]
            raise MQTTError(PROTOCOL_ERROR, "empty topic without alias")
        if alias > self.terms.topic_alias_maximum:  # [MQTT-3.3.2-9]
            raise MQTTError(TOPIC_ALIAS_INVALID, f"topic alias {alias} is above the maximum")
        if topic:
            self._route(topic)  # refuses a topic that is none
            if not self.aliases:
                self.aliases = {}
            self.aliases[alias] = topic
            return topic
        known = self.aliases.get(alias)
        if known is None:
            raise MQTTError(PROTOCOL_ERROR, f"topic alias {alias} is not set")
        return known

    def _may_publish(self, topic: str) -> bool:
        decisions = self.may_publish
        decision = decisions.get(topic)
        if decision is None:
            authorizer = self.broker.rules.of(self.terms.rules)
            decision = authorizer.may_publish(self.client_id, self.username, topic)
            if len(topic) <= _LONG_TOPIC:
                if not decisions or len(decisions) >= _MAX_DECISIONS:
                    decisions = self.may_publish = {}
                decisions[topic] = decision
        return decision

    def _turned_down(self, route: Route, first: int, packet_id: int, size: int) -> bool:
        """Answer a PUBLISH that this client may not make, or that finds no room as a retained one."""
        counters = self.outbound.counters
        qos: int = (first >> 1) & 3
        if route.reserved or (self.restricted and not self._may_publish(route.topic)):
            counters.publish_dropped_denied += 1
            self._turn_down(qos, packet_id, self.broker.terms.denial_code())
            return True
        if first & 1 and size > 0 and self.broker.retained_full(route.topic, size):
            counters.publish_dropped_retained += 1
            self._turn_down(qos, packet_id, QUOTA_EXCEEDED)
            return True
        return False

    def _turn_down(self, qos: int, packet_id: int, reason_code: int) -> None:
        """A PUBLISH that is not taken: 5.0 is told, 3.1.1 has no word for it [MQTT-3.3.5-2]."""
        if qos:
            gate = self.gate(PUBACK if qos == 1 else PUBREC, packet_id)
            gate.reason_code = reason_code
            self.answer(gate)

    def _refuse_publish(self, qos: int, packet_id: int) -> None:
        """There is no room for a message: its publisher keeps it."""
        self.outbound.counters.publish_refused += 1
        if self.version >= 5:
            self._turn_down(qos, packet_id, QUOTA_EXCEEDED)
        else:
            self.disconnect(QUOTA_EXCEEDED, "no room for the message")


def _check_text(payload: bytes, more: Optional[List[bytes]]) -> None:
    """Payload Format Indicator 1 promises UTF-8."""
    try:
        (payload if more is None else b"".join((payload, *more))).decode("utf-8")
    except UnicodeDecodeError:
        raise MQTTError(PAYLOAD_FORMAT_INVALID, "payload is not the UTF-8 it says it is")


def _expiry(found: PublishProperties, now: int) -> int:
    """When a message expires, 0 for never; both in µs since the Unix epoch."""
    return now + found.message_expiry * 1_000_000 if found.message_expiry >= 0 else 0
