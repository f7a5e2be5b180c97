"""The protocol of one client: the packets that it may send in each state, and the handler of each packet.

`PacketReader` calls `Protocol` for each packet; PUBLISH packets go to the `PublishHandler`. The first packet that the
standard does not allow ends the connection with the reason code that the standard names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

from mypy_extensions import i64

from mqttbroker.codec.data_types import decode_varint
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
    CONNECT,
    DISCONNECT,
    NORMAL_DISCONNECTION,
    PACKET_IDENTIFIER_NOT_FOUND,
    PACKET_TOO_LARGE,
    PINGREQ,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBREL,
    QUOTA_EXCEEDED,
    SUBSCRIBE,
    UNSUBSCRIBE,
    UNSUPPORTED_PROTOCOL_VERSION,
    MQTTError,
    name,
    to_v3_connack,
)
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.acknowledgements import AckGate
from mqttbroker.core.client.connection import AUTHENTICATING, AWAIT_CONNECT, CONNECTED, Connection
from mqttbroker.core.packets.publish_handler import PublishHandler
from sessions.deliveries import ACCEPTED, REPEATED, UNEXPECTED, UNKNOWN
from sessions.session import Session

# Whether a client may send a packet, by state of its connection and packet type.
_ALLOWED: Final[list[list[bool]]] = [
    # AWAIT_CONNECT: CONNECT and nothing else [MQTT-3.1.0-1]
    [False, True] + [False] * 14,
    # CONNECTING: nothing is read until the CONNACK is sent
    [False] * 16,
    # CONNECTED: the packets that flow from client to server; no second CONNECT [MQTT-3.1.0-2]
    [
        False, False, False, True, True, True, True, True,
        True, False, True, False, True, False, True, True,
    ],
    # CLOSED
    [False] * 16,
    # AUTHENTICATING: AUTH or DISCONNECT [MQTT-3.1.2-30]
    [False] * 14 + [True, True],
]  # fmt: skip

# The beginning of the variable header of a version 5 CONNECT.
_CONNECT_V5: Final = b"\x00\x04MQTT\x05"


class Protocol:
    """The packets of one connection. ``new_client_id`` makes a client id for a client that sends none."""

    def __init__(self, broker: Broker, connection: Connection, new_client_id: Callable[[], str]) -> None:
        self.broker = broker
        self.connection = connection
        self.new_client_id = new_client_id
        self._publish_handler: PublishHandler | None = None
        self._flag_mask = 15  # the flags of a fixed header that are checked

    def publish_handler(self) -> PublishHandler:
        """The handler, created at the first PUBLISH: most clients of a large broker only subscribe."""
        handler = self._publish_handler
        if handler is None:
            handler = PublishHandler(self.broker, self.connection)
            self._publish_handler = handler
        return handler

    def use_publish_handler(self, handler: PublishHandler) -> None:
        """Have another handler for PUBLISH packets, before the first one."""
        self._publish_handler = handler

    # -- allowed packets --------------------------------------------------------

    def check_allowed(self, packet_type: i64) -> None:
        """Raise `MQTTError` for a packet that a client may not send in this state."""
        state = self.connection.state
        if _ALLOWED[state][packet_type]:
            return
        if state == AWAIT_CONNECT:
            raise MQTTError(PROTOCOL_ERROR, "the first packet is not CONNECT")
        raise MQTTError(PROTOCOL_ERROR, f"a client may not send packet type {packet_type} now")

    def check_connect_size(self, first: i64, data: bytes, body: i64, size: i64) -> None:
        """Raise `MQTTError` if the first packet, of ``size`` bytes, is larger than a CONNECT may be."""
        if self.connection.state == AWAIT_CONNECT and size > self.broker.terms.max_connect_size:
            raise self.too_large(first, data, body, size)

    def too_large(self, first: i64, data: bytes, body: i64, size: i64) -> MQTTError:
        """The error for a packet of ``size`` bytes; a CONNECT of version 5 is answered with a CONNACK."""
        waiting: bool = self.connection.state == AWAIT_CONNECT
        self.connection.outbound.counters.limit_reached("max_connect_size" if waiting else "max_packet_size")
        level = 5 if first == 0x10 and data[body : body + len(_CONNECT_V5)] == _CONNECT_V5 else -1
        return MQTTError(PACKET_TOO_LARGE, f"packet of {size} bytes", level)

    # -- packets ----------------------------------------------------------------

    def control(self, packet_type: i64, flags: i64, data: bytes, body: i64, end: i64) -> None:
        """Handle a packet other than PUBLISH; its variable header begins at ``body``, and it ends at ``end``."""
        self.check_allowed(packet_type)
        connection = self.connection
        broker = self.broker
        if packet_type == SUBSCRIBE or packet_type == UNSUBSCRIBE:
            self._check_filter_count(packet_type, data, body, end)
        packet = decode_body(packet_type, flags & self._flag_mask, data, body, end, connection.version)
        if packet_type == PINGREQ:
            connection.send(b"\xd0\x00")
            return
        if packet_type == CONNECT:
            connect = cast(Connect, packet)
            if connect.version == 3:
                self._flag_mask = 7  # version 3.1 allows DUP in other packets than PUBLISH
            broker.connect_handler.connect(connection, connect, self.new_client_id)
            return
        if packet_type == AUTH:
            broker.connect_handler.auth(connection, cast(Auth, packet))
            return
        session = connection.session
        if connection.state == AUTHENTICATING:
            broker.clients.close(connection, False, "the client gave up")
            return
        assert session is not None
        if packet_type == SUBSCRIBE:
            broker.subscriptions.subscribe(connection, session, cast(Subscribe, packet))
        elif packet_type == UNSUBSCRIBE:
            broker.subscriptions.unsubscribe(connection, session, cast(Unsubscribe, packet))
        elif packet_type == DISCONNECT:
            self._disconnect(session, cast(Disconnect, packet))
        else:
            packet_id: i64 = (data[body] << 8) | data[body + 1]
            self.acknowledge(packet_type, packet_id, data[body + 2] if end > body + 2 else 0)

    def _check_filter_count(self, packet_type: i64, data: bytes, body: i64, end: i64) -> None:
        """Raise `MQTTError` for more topic filters than one packet may have, before they are decoded."""
        maximum: i64 = self.broker.terms.max_filters_per_packet
        options: i64 = 1 if packet_type == SUBSCRIBE else 0
        if end - body <= maximum * (3 + options):  # a filter has at least a length and a character
            return
        position: i64 = body + 2
        if self.connection.version >= 5:
            length, position = decode_varint(data, position, end)
            position += length
        count: i64 = 0
        while position + 2 <= end:
            position += 2 + ((data[position] << 8) | data[position + 1]) + options
            count += 1
            if count > maximum:
                self.connection.outbound.counters.limit_reached("max_filters_per_packet")
                raise MQTTError(QUOTA_EXCEEDED, f"more than {maximum} topic filters in a packet")

    def acknowledge(self, packet_type: i64, packet_id: i64, reason_code: i64) -> None:
        """Handle a PUBACK, PUBREC, PUBREL or PUBCOMP of a connected client."""
        if packet_id == 0:  # [MQTT-2.2.1-3]
            raise MQTTError(PROTOCOL_ERROR, "acknowledgement of packet id 0")
        session = cast(Session, self.connection.session)
        deliveries = session.deliveries
        outcome: int = ACCEPTED
        if packet_type == PUBACK:
            if reason_code < 0x80:
                outcome = deliveries.acknowledge(packet_id)
            else:
                outcome = deliveries.refuse(packet_id, int(reason_code))
        elif packet_type == PUBCOMP:
            outcome = deliveries.complete(packet_id)
        elif packet_type == PUBREL:
            self._pubrel(session, packet_id)
        elif reason_code >= 0x80:
            outcome = deliveries.publish_refused(packet_id)
        else:
            outcome = deliveries.publish_received(packet_id)
            if outcome == REPEATED:
                self.connection.send_pubrel(packet_id)
            elif outcome == UNKNOWN:
                version = self.connection.version
                self.connection.send(encode_ack(PUBREL, packet_id, PACKET_IDENTIFIER_NOT_FOUND, version))
        if outcome == UNEXPECTED:
            # The delivery would never end.
            raise MQTTError(PROTOCOL_ERROR, f"packet type {packet_type} is not what packet id {packet_id} waits for")

    def _pubrel(self, session: Session, packet_id: i64) -> None:
        """Free the packet id, and send PUBCOMP when that is on disk [MQTT-4.3.3-11]."""
        connection = self.connection
        key: object = packet_id
        stored = session.forget_received(key)
        if stored is not None and not stored and connection.acks.length == 0:
            connection.send_ack(PUBCOMP, packet_id)
            return
        gate = AckGate(connection, PUBCOMP, packet_id)
        journal = self.broker.journal
        if stored is None:
            gate.reason_code = PACKET_IDENTIFIER_NOT_FOUND
            # An earlier PUBREL may have freed it in a batch that is not committed yet.
            if session.id != 0 and journal.gated and (journal.has_pending or not journal.writer_idle):
                journal.wait_for_commit(gate)
        elif stored:
            journal.remove_received(session.id, packet_id)
            if journal.gated:
                journal.wait_for_commit(gate)
        connection.acks.submit(gate)

    def _disconnect(self, session: Session, packet: Disconnect) -> None:
        expiry_interval = packet.properties.session_expiry_interval
        if expiry_interval > 0 and session.expiry_interval == 0:  # [MQTT-3.1.2-23]
            raise MQTTError(PROTOCOL_ERROR, "session expiry raised from 0 at DISCONNECT")
        if expiry_interval >= 0:
            session.expiry_interval = min(expiry_interval, self.broker.terms.max_session_expiry)
        # [MQTT-3.14.4-3]
        with_will = packet.reason_code != NORMAL_DISCONNECTION
        reason = "DISCONNECT" if packet.reason_code == NORMAL_DISCONNECTION else f"DISCONNECT: {name(packet.reason_code)}"
        self.broker.clients.close(self.connection, with_will, reason)

    # -- the end ----------------------------------------------------------------

    def reject(self, error: MQTTError) -> None:
        """The client violated the protocol: send it the reason and close the connection."""
        connection = self.connection
        connection.outbound.counters.protocol_errors += 1
        self.broker.bans.protocol_error(connection.peer, connection.outbound.clock.monotonic)
        if connection.state == CONNECTED:
            connection.disconnect(error.reason_code, error.detail)
            return
        if connection.state == AUTHENTICATING:
            self.broker.connect_handler.refuse(connection, error.reason_code, error.detail)
            return
        level = error.protocol_level
        if level >= 5:
            connection.send(Connack(False, error.reason_code).encode(5))
        elif level >= 0:
            code = to_v3_connack(error.reason_code)
            if code > 0 and error.reason_code == UNSUPPORTED_PROTOCOL_VERSION:
                connection.send(Connack(False, code).encode(4))
        self.broker.clients.close(connection, False, str(error))

    def lost(self, reason: str) -> None:
        """The socket is closed."""
        self.broker.clients.close(self.connection, True, reason)
        self.connection.dispose()
