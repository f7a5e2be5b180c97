"""The protocol of one client, the incoming half: bytes and the time in, effects out.

The rule kept here: the packets of a connection are understood one after the
other, whatever pieces they arrive in, and the first one that the standard does
not allow ends the connection with the reason code it names, before anything
after it is looked at.

`Protocol.receive` is the hot path: it walks all complete packets of a buffer
with integer offsets, and awaits nothing.
"""

from __future__ import annotations

from typing import Callable, Final, List, Optional, cast

from mqttbroker.codec.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Subscribe,
    Unsubscribe,
    decode_body,
    encode_ack,
)
from mqttbroker.codec.reason_codes import (
    AUTH,
    CLIENT_IDENTIFIER_NOT_VALID,
    CONNECT,
    DISCONNECT,
    MALFORMED_PACKET,
    NORMAL_DISCONNECTION,
    PACKET_IDENTIFIER_NOT_FOUND,
    PACKET_TOO_LARGE,
    PINGREQ,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREL,
    SUBSCRIBE,
    UNSUBSCRIBE,
    UNSUPPORTED_PROTOCOL_VERSION,
    MQTTError,
    name,
    to_v3_connack,
)
from mqttbroker.core.broker import Broker
from mqttbroker.core.connection import (
    AUTHENTICATING,
    AWAIT_CONNECT,
    CLOSED,
    CONNECTED,
    CONNECTING,
)
from mqttbroker.core.long_packet import LONG, LongPacket, payload_start
from mqttbroker.core.publish_handler import PublishHandler
from mqttbroker.core.terms import ListenerTerms
from mqttbroker.core.topic_aliases import TopicAliases
from sessions.session import ACCEPTED, REPEATED, UNEXPECTED, UNKNOWN, Session

# Which packets a client may send, by state of its connection and packet type.
_LEGAL: Final[List[List[bool]]] = [
    # AWAIT_CONNECT: CONNECT and nothing else [MQTT-3.1.0-1]
    [False, True] + [False] * 14,
    # CONNECTING: nothing is read until the CONNACK is out
    [False] * 16,
    # CONNECTED: what flows from client to server; no second CONNECT [MQTT-3.1.0-2]
    [
        False, False, False, True, True, True, True, True,
        True, False, True, False, True, False, True, True,
    ],
    # CLOSED
    [False] * 16,
    # AUTHENTICATING: AUTH or DISCONNECT [MQTT-3.1.2-30]
    [False] * 14 + [True, True],
]  # fmt: skip

# First bytes of the four acknowledgements, which need no decoding in their short form.
_SHORT_ACKS: Final = [first in (0x40, 0x50, 0x62, 0x70) for first in range(256)]

# How the variable header of a CONNECT of version 5.0 begins.
_CONNECT_5: Final = b"\x00\x04MQTT\x05"


class Protocol(PublishHandler):
    """One client's connection.  ``new_client_id`` gives an id to a client that brings none."""

    def __init__(
        self,
        broker: Broker,
        peer: str,
        now: float,
        new_client_id: Callable[[], str],
        terms: ListenerTerms,
    ) -> None:
        super().__init__(broker, peer, terms)
        self.new_client_id = new_client_id
        self.last_received = now
        self.accepted = now
        self._partial = bytearray()  # an incomplete packet
        self._long: Optional[LongPacket] = None  # one that is incomplete and long
        self._needed = 2  # bytes it takes until looking again makes sense
        self._flags = 15  # those of a fixed header that count
        broker.clients.connections[self] = True
        broker.outbound.counters.connections += 1

    @property
    def blocked(self) -> bool:
        """Whether the owner of the socket should not read for now."""
        if self.state == CONNECTED:
            outbound = self.outbound
            return (
                self.broker.commits.backlogged
                or self._held
                or self.replies > outbound.max_backlog
                or self.acks.length > outbound.max_acks
            )
        return self.state == CONNECTING

    @property
    def _held(self) -> bool:
        """Whether the client waits for another to take its messages.

        Who has messages to acknowledge itself is read all the same: else two could wait for each other.
        """
        return self.paused_by is not None and cast(Session, self.session).packet_ids_in_use == 0

    # -- framing ------------------------------------------------------------

    def receive(self, data: bytes, now: float, start: int = 0, stop: int = -1) -> int:
        """Take bytes from the client; ``now`` is monotonic time in seconds.

        Takes ``data[start:]``, or up to the first end of a packet at ``stop`` or beyond; gives
        the position of what it did not take.
        """
        self.last_received = now
        position: int = start
        size: int = len(data)
        try:
            if self._partial:
                position = self._complete(data, position)
            elif self._long is not None:
                position = self._lengthen(self._long, data, position)
            if position < size:
                position = self._walk(data, position, size if stop < 0 else stop)
        except MQTTError as error:
            self._reject(error)
            position = size
        self.outbound.counters.bytes_received += position - start
        session = self.session
        if session is not None and session.pending_retained:
            self.touch()  # what it acknowledged may be what a replay waits for
        return position

    def resume(self) -> None:
        """Go on with what arrived while the connection was `CONNECTING`."""
        if len(self._partial) >= self._needed and self.state == CONNECTED:
            data = bytes(self._partial)
            self._partial = bytearray()
            try:
                self._walk(data, 0, len(data))
            except MQTTError as error:
                self._reject(error)

    def _complete(self, data: bytes, position: int) -> int:
        """Handle the packet that is incomplete, with what it lacks and no more; gives where that ends."""
        size: int = len(data)
        while self._partial and position < size:
            missing: int = self._needed - len(self._partial)
            end: int = position + missing
            if missing <= 0 or end > size or self.state == CONNECTING:
                end = size
            self._partial += data if end - position == size else data[position:end]
            position = end
            if len(self._partial) < self._needed or self.state == CONNECTING:
                return position
            packet = bytes(self._partial)
            self._partial = bytearray()
            self._walk(packet, 0, len(packet))
            if self._long is not None and position < size:
                return self._lengthen(self._long, data, position)
        return position

    def _lengthen(self, packet: LongPacket, data: bytes, position: int) -> int:
        """Give a long PUBLISH what it lacks and no more, and handle it when it is whole; gives where that ends."""
        size: int = len(data)
        end: int = min(size, position + packet.missing)
        packet.add(data if end - position == size else data[position:end])
        if packet.missing > 0:
            return end
        self._long = None
        if self.state != CONNECTED:
            return end
        pieces = packet.take()
        head = pieces[0]
        body: int = 1
        while head[body] >= 128:
            body += 1
        body += 1
        if payload_start(head, body, (head[0] >> 1) & 3, self.version) > len(head):
            whole = b"".join(pieces)
            self._walk(whole, 0, len(whole))
            return end
        self.take_publish(head, 0, body, packet.size, head[0], pieces[1:])
        self.outbound.counters.messages_received += 1
        return end

    def _walk(self, data: bytes, position: int, stop: int) -> int:
        """Handle the complete packets that begin before ``stop``; keep one that is incomplete.  Gives where it ended."""
        size: int = len(data)
        count: int = 0
        self._needed = 2
        largest: int = self.terms.max_packet_size
        while position < stop and size - position >= 2:
            if self.state == CONNECTING or self.state == CLOSED:
                break
            first: int = data[position]
            remaining: int = data[position + 1]
            body: int = position + 2
            if remaining >= 128:
                remaining &= 127
                shift: int = 7
                byte: int = 128
                while byte >= 128 and body < size:
                    byte = data[body]
                    body += 1
                    remaining |= (byte & 127) << shift
                    shift += 7
                    if byte >= 128 and shift > 21:
                        raise MQTTError(MALFORMED_PACKET, "Remaining Length of more than 4 bytes")
                if byte >= 128:
                    self._check_legal(first >> 4)
                    self._needed = body - position + 1
                    break
                if byte == 0:
                    raise MQTTError(MALFORMED_PACKET, "overlong Remaining Length")
            end: int = body + remaining
            if end - position > largest:
                raise _too_large(first, data, body, end - position)
            if end > size:
                self._needed = end - position
                self._check_legal(first >> 4)
                self._check_connect_size(first, data, body, self._needed)
                break
            count += 1
            kind: int = first >> 4
            if kind == PUBLISH and self.state == CONNECTED:
                self.take_publish(data, position, body, end, first)
            elif remaining == 2 and _SHORT_ACKS[first] and self.state == CONNECTED:
                packet_id: int = (data[body] << 8) | data[body + 1]
                if packet_id == 0:  # [MQTT-2.2.1-3]
                    raise MQTTError(PROTOCOL_ERROR, "acknowledgement of packet id 0")
                if first == 0x40:
                    if cast(Session, self.session).acknowledge(packet_id) == UNEXPECTED:
                        self._unexpected(kind, packet_id)
                else:
                    self._acknowledgement(kind, packet_id, 0)
            else:
                self._check_connect_size(first, data, body, end - position)
                self._control(kind, first & 15, data, body, end)
            position = end
        self.outbound.counters.messages_received += count
        if position >= stop:
            return position
        if self.state != CLOSED:
            self._keep(data[position:] if position else data)
        return size

    def _keep(self, data: bytes) -> None:
        """The beginning of a packet; the rest of it is to come."""
        if self._needed >= LONG and data[0] >> 4 == PUBLISH and self.state == CONNECTED:
            self._long = LongPacket(data, self._needed)
        else:
            self._partial += data

    def _check_connect_size(self, first: int, data: bytes, body: int, size: int) -> None:
        if self.state == AWAIT_CONNECT and size > self.broker.terms.max_connect_size:
            raise _too_large(first, data, body, size)

    # -- everything else ----------------------------------------------------

    def _check_legal(self, kind: int) -> None:
        """Raise `MQTTError` for a packet that a client may not send in this state."""
        if _LEGAL[self.state][kind]:
            return
        if self.state == AWAIT_CONNECT:
            raise MQTTError(PROTOCOL_ERROR, "the first packet is not CONNECT")
        raise MQTTError(PROTOCOL_ERROR, f"a client may not send packet type {kind} now")

    def _control(self, kind: int, flags: int, data: bytes, body: int, end: int) -> None:
        self._check_legal(kind)
        packet = decode_body(kind, flags & self._flags, data, body, end, self.version)
        if kind == PINGREQ:
            self.send(b"\xd0\x00")
            return
        if kind == CONNECT:
            self._connect(cast(Connect, packet))
            return
        if kind == AUTH:
            self.broker.connect_handler.auth(self, cast(Auth, packet))
            return
        session = self.session
        if self.state == AUTHENTICATING:
            self.broker.clients.close(self, False, "the client gave up")
            return
        assert session is not None
        if kind == SUBSCRIBE:
            self.broker.subscriptions.subscribe(self, session, cast(Subscribe, packet))
        elif kind == UNSUBSCRIBE:
            self.broker.subscriptions.unsubscribe(self, session, cast(Unsubscribe, packet))
        elif kind == DISCONNECT:
            self._disconnect(session, cast(Disconnect, packet))
        else:
            packet_id: int = (data[body] << 8) | data[body + 1]
            self._acknowledgement(kind, packet_id, data[body + 2] if end > body + 2 else 0)

    def _acknowledgement(self, kind: int, packet_id: int, reason_code: int) -> None:
        """PUBACK, PUBREC, PUBREL or PUBCOMP, already checked."""
        session = self.session
        assert session is not None
        outcome = ACCEPTED
        if kind == PUBACK:
            outcome = session.acknowledge(packet_id)
        elif kind == PUBCOMP:
            outcome = session.complete(packet_id)
        elif kind == PUBREL:
            self._release(session, packet_id)
        elif reason_code >= 0x80:
            outcome = session.publish_refused(packet_id)
        else:
            outcome = session.publish_received(packet_id)
            if outcome == REPEATED:
                self.send_pubrel(packet_id)
            elif outcome == UNKNOWN:
                self.send(
                    encode_ack(PUBREL, packet_id, PACKET_IDENTIFIER_NOT_FOUND, self.version)
                )
        if outcome == UNEXPECTED:
            self._unexpected(kind, packet_id)

    def _unexpected(self, kind: int, packet_id: int) -> None:
        """To go on would leave the delivery open for ever."""
        raise MQTTError(PROTOCOL_ERROR, f"packet type {kind} is not what packet id {packet_id} waits for")

    def _release(self, session: Session, packet_id: int) -> None:
        """PUBREL: the id is free once that is on disk; then PUBCOMP [MQTT-4.3.3-11]."""
        key: object = packet_id
        stored = session.received.get(key)
        if stored is not None:
            del session.received[key]
            if not stored and self.acks.length == 0:
                self.send_ack(PUBCOMP, packet_id)
                return
        gate = self.gate(PUBCOMP, packet_id)
        journal = self.broker.journal
        if stored is None:
            gate.reason_code = PACKET_IDENTIFIER_NOT_FOUND
            # The release that an earlier PUBREL asked for may still be on its way to the disk.
            if session.id != 0 and journal.gated and (journal.has_pending or not journal.writer_idle):
                journal.wait_for_commit(gate)
        elif stored:
            journal.remove_received(session.id, packet_id)
            if journal.gated:
                journal.wait_for_commit(gate)
        self.answer(gate)

    def _connect(self, packet: Connect) -> None:
        properties = packet.properties
        self.version = 5 if packet.version == 5 else 4
        self.client_id = packet.client_id
        self.plain_version = self.version
        if packet.version == 3:
            self._flags = 7  # in 3.1 any packet that is sent again may say so
        if packet.version == 5:
            most: int = min(properties.topic_alias_maximum, self.terms.topic_alias_maximum)
            if most > 0:
                self.topic_aliases = TopicAliases(most)
                self.plain_version = 0
            if properties.maximum_packet_size > 0:
                self.maximum_packet_size = properties.maximum_packet_size
            self.problem_information = properties.request_problem_information != 0
        if not packet.client_id:
            # 3.1.1 [MQTT-3.1.3-8]; 3.1 asks for an id always.
            if packet.version == 3 or (packet.version == 4 and not packet.clean_start):
                self.broker.connect_handler.refuse(
                    self, CLIENT_IDENTIFIER_NOT_VALID, "empty client id"
                )
                return
            self.client_id = self.new_client_id()
        self.broker.connect_handler.connect(self, packet)

    def _disconnect(self, session: Session, packet: Disconnect) -> None:
        wanted = packet.properties.session_expiry_interval
        if wanted > 0 and session.expiry_interval == 0:  # [MQTT-3.1.2-23]
            raise MQTTError(PROTOCOL_ERROR, "session expiry raised from 0 at DISCONNECT")
        if wanted >= 0:
            session.expiry_interval = min(wanted, self.broker.terms.max_session_expiry)
        # [MQTT-3.14.4-3]
        with_will = packet.reason_code != NORMAL_DISCONNECTION
        self.broker.clients.close(self, with_will, "")

    # -- the end ------------------------------------------------------------

    def too_small(self) -> None:
        # Its own DISCONNECT fits: a client that takes no CONNACK was not let in.
        self.disconnect(PACKET_TOO_LARGE, "an answer is above the client's Maximum Packet Size")

    def release(self) -> None:
        super().release()
        self._partial = bytearray()
        self._long = None
        self.topic_aliases = None

    def _reject(self, error: MQTTError) -> None:
        """The client broke the protocol: it is told why, and closed."""
        self.outbound.counters.protocol_errors += 1
        if self.state == CONNECTED:
            self.disconnect(error.reason_code, error.detail)
            return
        if self.state == AUTHENTICATING:
            self.broker.connect_handler.refuse(self, error.reason_code, error.detail)
            return
        level = error.protocol_level
        if level >= 5:
            self.send(Connack(False, error.reason_code).encode(5))
        elif level >= 0:
            code = to_v3_connack(error.reason_code)
            if code > 0 and error.reason_code == UNSUPPORTED_PROTOCOL_VERSION:
                self.send(Connack(False, code).encode(4))
        self.broker.clients.close(self, False, str(error))

    def disconnect(self, reason_code: int, detail: str) -> None:
        if self.state == CLOSED:
            return
        self.farewell(reason_code, detail, self.broker.terms.server_reference(reason_code))
        self.broker.clients.close(self, True, f"{name(reason_code)}: {detail}")

    def lost(self, why: str) -> None:
        """The socket is gone."""
        self.broker.clients.close(self, True, why)


def _too_large(first: int, data: bytes, body: int, size: int) -> MQTTError:
    """The error of a packet of ``size`` bytes; CONNACK tells it to a client that is seen to speak 5.0."""
    level = 5 if first == 0x10 and data[body : body + len(_CONNECT_5)] == _CONNECT_5 else -1
    return MQTTError(PACKET_TOO_LARGE, f"packet of {size} bytes", level)
