"""Encoded packets to one of the two brokers of a relay, until the link sends them."""

from __future__ import annotations

from mqttbroker.codec.packets import Packet, encode_ack


class PacketOutput:
    """``version`` is that of the protocol. Code that encodes packets by itself appends their bytes to ``pieces``."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.pieces: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def send(self, packet: Packet) -> None:
        self.pieces.append(packet.encode(self.version))

    def acknowledge(self, kind: int, packet_id: int, code: int = 0) -> None:
        """Send PUBACK, PUBREC, PUBREL or PUBCOMP."""
        self.pieces.append(encode_ack(kind, packet_id, code, self.version))

    def drain(self) -> bytes:
        """All bytes, which are removed."""
        data = b"".join(self.pieces)
        self.pieces.clear()
        return data
