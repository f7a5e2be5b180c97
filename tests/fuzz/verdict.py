"""What a connection's two streams of bytes say about the broker: judged after the fact, by the strict codec alone.

Rule: whatever came in, what went out is a sequence of packets that the standard lets a server send to a client of
that version, and it ends where the standard says so; the first packet that the standard forbids ended the connection.
"""

from __future__ import annotations

from typing import Optional

from mqttbroker.packets import Auth, Connack, Connect, Disconnect, Packet, Publish, decode
from mqttbroker.reason_codes import CONNACK, MQTTError

FROM_SERVER = frozenset((2, 3, 4, 5, 6, 7, 9, 11, 13, 14, 15))
FROM_CLIENT = frozenset((3, 4, 5, 6, 7, 8, 10, 12, 14, 15))
CONNACK_AND_TWO = b"\x20\x02"  # a CONNACK without properties: 3.1.1


class Finding(AssertionError):
    """The broker did what it must never do."""


def offence(data: bytes) -> Optional[int]:
    """Where the first packet ends that no server may let pass; None if there is none before the client's goodbye."""
    version = 0
    position = 0
    while True:
        try:
            packet, after = decode(data, version or 5, position)
        except MQTTError:
            return _end_of(data, position)
        if packet is None or isinstance(packet, Disconnect):
            return None
        if version == 0:
            if not isinstance(packet, Connect):
                return after
            version = packet.version
        elif packet.packet_type not in FROM_CLIENT:
            return after
        position = after


def _end_of(data: bytes, position: int) -> int:
    """Where the packet at ``position`` ends by its own account, or where its length goes wrong."""
    remaining = 0
    for index in range(4):
        byte = data[position + 1 + index]
        remaining |= (byte & 127) << 7 * index
        if byte < 128:
            return min(len(data), position + 2 + index + remaining)
    return min(len(data), position + 5)


class Replies:
    """The packets that a broker sent on one connection; Finding if they are not what the standard allows."""

    def __init__(self, data: bytes, whole: bool = True) -> None:
        self.packets: list[Packet] = []
        self.version = 4 if data[:2] == CONNACK_AND_TWO else 5
        self.aliases: set[int] = set()
        position = 0
        while True:
            try:
                packet, after = decode(data, self.version, position)
            except MQTTError as error:
                raise Finding(f"sent {data[position : position + 40].hex()}, which is no packet: {error}") from None
            if packet is None:
                break
            self._next(packet)
            position = after
        if whole and position != len(data):
            raise Finding(f"closed inside a packet: {data[position : position + 40].hex()}")

    def _next(self, packet: Packet) -> None:
        last = self.packets[-1] if self.packets else None
        if packet.packet_type not in FROM_SERVER:
            raise Finding(f"sent packet type {packet.packet_type}")
        if isinstance(last, Disconnect) or (isinstance(last, Connack) and last.reason_code):
            raise Finding(f"sent packet type {packet.packet_type} after {type(last).__name__}")
        if isinstance(packet, (Disconnect, Auth)) and self.version < 5:
            raise Finding(f"sent {type(packet).__name__} to a 3.1.1 client")
        if isinstance(packet, Connack):
            if any(earlier.packet_type == CONNACK for earlier in self.packets):
                raise Finding("sent CONNACK twice")
        elif not self.connected and not isinstance(packet, Auth):
            raise Finding(f"sent packet type {packet.packet_type} before CONNACK")
        if isinstance(packet, Disconnect) and packet.reason_code < 0x80:
            raise Finding(f"sent DISCONNECT with {packet.reason_code:#x}")
        if isinstance(packet, Publish):
            self._alias(packet)
        self.packets.append(packet)

    def _alias(self, packet: Publish) -> None:
        alias = packet.properties.topic_alias
        if not packet.topic and alias not in self.aliases:
            raise Finding(f"sent topic alias {alias} before its topic")
        self.aliases.add(alias)

    @property
    def connected(self) -> bool:
        return any(isinstance(packet, Connack) and not packet.reason_code for packet in self.packets)

    @property
    def said_why(self) -> bool:
        """Whether the last word was a DISCONNECT or a refusal."""
        last = self.packets[-1] if self.packets else None
        return isinstance(last, Disconnect) or (isinstance(last, Connack) and last.reason_code != 0)


def judge(sent: bytes, received: bytes, closed: bool, whole: bool = True) -> Replies:
    """Finding unless a server may answer ``sent`` with ``received``; ``closed`` tells whether it closed then."""
    replies = Replies(received, whole)
    if offence(sent) is not None and not closed:
        raise Finding("a packet that the standard forbids did not end the connection")
    if replies.said_why and not closed:
        raise Finding("did not close after its last word")
    if closed and whole and replies.connected and replies.version == 5 and offence(sent) is not None:
        if not replies.said_why:
            raise Finding("a 5.0 client was not told why its connection ends")
    return replies


def shown(data: bytes) -> str:
    """The end of a stream, where most findings are, as hex."""
    return ("... " if len(data) > 1000 else "") + data[-1000:].hex()
