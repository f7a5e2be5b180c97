"""The log at level ``debug``: a line for each control packet of a connection, in and out.

`PacketLog` is a layer between the transport and the `Wire` of a connection that began while the level was ``debug``;
other connections have none. Lines hold no payloads, passwords and properties.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from mqttbroker.net.left_client import unread
from mqttbroker.net.wire import Wire

log = logging.getLogger("mqttbroker.packets")

DESCRIBED = 65_536  # bytes of a packet that are parsed, and the most that are buffered of an incomplete one
_CONNECT, _PUBLISH, _SUBSCRIBE, _UNSUBSCRIBE = 1, 3, 8, 10
_NAMES = (
    "RESERVED CONNECT CONNACK PUBLISH PUBACK PUBREC PUBREL PUBCOMP SUBSCRIBE SUBACK UNSUBSCRIBE UNSUBACK PINGREQ PINGRESP DISCONNECT AUTH"
).split()
_WITH_PACKET_ID = frozenset((4, 5, 6, 7, 8, 9, 10, 11))


class Packet(NamedTuple):
    """The fields of one line. ``topic`` of a SUBSCRIBE or UNSUBSCRIBE: its filters, separated by commas, and
    ``qos`` the highest that is requested; ``size`` in bytes with the fixed header."""

    name: str
    packet_id: int
    topic: str
    qos: int
    retain: int
    size: int


class PacketScanner:
    """Finds the packets in one direction of a connection. ``version`` is 5, or 4 for the older ones."""

    def __init__(self) -> None:
        self.version = 4
        self._pending = b""  # the beginning of a packet
        self._skip = 0  # bytes of a described packet that have not arrived yet
        self._lost = False  # no packet begins where one should

    def feed(self, data: bytes) -> list[Packet]:
        """The packets whose descriptions end in ``data``."""
        found: list[Packet] = []
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data = self._pending + data[skipped:]
        position = 0
        while len(data) - position >= 2 and not self._lost:
            body, size = fixed_header(data, position)
            if size < 0:
                self._lost = True
            if size <= 0:
                break
            end = position + size
            described_end = min(end, position + DESCRIBED)
            if data[position] >> 4 == _PUBLISH:
                described_end = min(end, _end_of_packet_id(data, body))
            if len(data) < described_end:
                break
            found.append(self._describe(data[position:described_end], body - position, size))
            position = min(end, len(data))
            self._skip = end - position
        self._pending = b"" if self._lost else data[position:]
        return found

    def _describe(self, packet: bytes, body: int, size: int) -> Packet:
        kind, flags = packet[0] >> 4, packet[0] & 15
        name = _NAMES[kind]
        if kind == _PUBLISH:
            qos = (flags >> 1) & 3
            end = body + 2 + int.from_bytes(packet[body : body + 2], "big")
            packet_id = int.from_bytes(packet[end : end + 2], "big") if qos else 0
            return Packet(name, packet_id, packet[body + 2 : end].decode("utf-8", "replace"), qos, flags & 1, size)
        if kind == _CONNECT:
            level = body + 2 + int.from_bytes(packet[body : body + 2], "big")
            self.version = 5 if packet[level : level + 1] == b"\x05" else 4
        packet_id = int.from_bytes(packet[body : body + 2], "big") if kind in _WITH_PACKET_ID else 0
        topic, qos = "", 0
        if kind in (_SUBSCRIBE, _UNSUBSCRIBE):
            topic, qos = self._filters(packet, body + 2, kind == _SUBSCRIBE)
        return Packet(name, packet_id, topic, qos, 0, size)

    def _filters(self, packet: bytes, position: int, with_options: bool) -> tuple[str, int]:
        if self.version == 5:
            properties, shift = 0, 0
            while position < len(packet):
                byte = packet[position]
                position += 1
                properties |= (byte & 127) << shift
                shift += 7
                if byte < 128 or shift > 21:
                    break
            position += properties
        filters: list[str] = []
        qos = 0
        while position + 2 <= len(packet):
            end = position + 2 + int.from_bytes(packet[position : position + 2], "big")
            filters.append(packet[position + 2 : end].decode("utf-8", "replace"))
            if with_options and end < len(packet):
                qos = max(qos, packet[end] & 3)
            position = end + with_options
        return ",".join(filters), qos


def fixed_header(data: bytes, position: int) -> tuple[int, int]:
    """The position of the variable header, and the packet's size: 0 if bytes are missing, -1 if malformed."""
    remaining = 0
    for index in range(4):
        if position + 1 + index >= len(data):
            return 0, 0
        byte = data[position + 1 + index]
        remaining |= (byte & 127) << (7 * index)
        if byte < 128:
            return position + 2 + index, 2 + index + remaining
    return 0, -1


def _end_of_packet_id(data: bytes, body: int) -> int:
    """The position up to which a PUBLISH has to be received to be described."""
    return body + 4 + int.from_bytes(data[body : body + 2], "big") if len(data) >= body + 2 else body + 2


class PacketLog:
    """Logs the packets between a transport and a wire: an asyncio protocol for the one, a transport for the other."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._transport: Any = None
        self._received: PacketScanner | None = PacketScanner()
        self._sent: PacketScanner | None = PacketScanner()

    # -- the transport's protocol --------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._wire.connection_made(self)

    def data_received(self, data: bytes) -> None:
        self._log(self._received, "event=packet_received client=%s address=%s type=%s packet_id=%d topic=%s qos=%d retain=%d size=%d", data)
        self._wire.data_received(data)

    def eof_received(self) -> bool:
        return self._wire.eof_received()

    def connection_lost(self, error: Any) -> None:
        self._wire.connection_lost(error)
        self._transport = None  # a WebSocket refers to this layer

    def pause_writing(self) -> None:
        self._wire.pause_writing()

    def resume_writing(self) -> None:
        self._wire.resume_writing()

    # -- the wire's transport ------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take bytes of the socket."""
        if hasattr(self._transport, "feed"):
            self._transport.feed(data)
        else:
            self.data_received(data)

    def unread(self, limit: int) -> bytes:
        return unread(self._transport, limit)

    def write(self, data: bytes) -> None:
        self._log_sent(data)
        self._transport.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        for part in parts:
            self._log_sent(part)
        self._transport.writelines(parts)

    def get_write_buffer_size(self) -> int:
        size: int = self._transport.get_write_buffer_size()
        return size

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    def can_write_eof(self) -> bool:
        answer: bool = self._transport.can_write_eof()
        return answer

    def write_eof(self) -> None:
        self._transport.write_eof()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    # -- lines ---------------------------------------------------------------

    def _log_sent(self, data: bytes) -> None:
        self._log(self._sent, "event=packet_sent client=%s address=%s type=%s packet_id=%d topic=%s qos=%d retain=%d size=%d", data)

    def _log(self, scanner: PacketScanner | None, line: str, data: bytes) -> None:
        if scanner is None:
            return
        if not log.isEnabledFor(logging.DEBUG):
            self._received = self._sent = None  # the level was raised; the scanners do not see the bytes from now on
            return
        connection = self._wire.connection
        for packet in scanner.feed(data):
            log.debug(line, connection.client_id, connection.peer, *packet)
