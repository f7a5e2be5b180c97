"""Capture files (pcap, microseconds, raw IP) of MQTT packets, with IP and TCP headers made for them.

Each packet is a TCP segment of its own, or several if it is long, between the client's address and port 1883. A record may
hold less than its segment had; Wireshark shows it as limited during capture.
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

SEGMENT: Final = 60_000  # bytes of MQTT in one segment
_PORT: Final = 1883
_RAW_IP: Final = 101
_PUSH_ACK: Final = 0x18
_TCP_HEADER: Final = 20
_Address = IPv4Address | IPv6Address

FILE_HEADER: Final = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262_144, _RAW_IP)


def _endpoint(peer: str) -> tuple[_Address, int]:
    """Address and port of a client as in the log; 127.0.0.1 and port 0 for a Unix socket."""
    host, _, port = peer.rpartition(":")
    try:
        return ip_address(host.strip("[]").partition("%")[0]), int(port)
    except ValueError:
        return IPv4Address("127.0.0.1"), 0


class Conversation:
    """The two directions of one connection; ``peer`` is the client's address as in the log."""

    def __init__(self, peer: str) -> None:
        self._client, self._port = _endpoint(peer)
        self._broker: _Address = ip_address("127.0.0.1" if self._client.version == 4 else "::1")
        self._sequence = {True: 1, False: 1}  # by whether the client sends

    def records(self, microseconds: int, from_client: bool, head: bytes, size: int) -> bytes:
        """The records of a packet of ``size`` bytes that begins with ``head``; the time is since the Unix epoch."""
        found = []
        for start in range(0, size, SEGMENT):
            length = min(SEGMENT, size - start)
            found.append(self._record(microseconds, from_client, head[start : start + length], length))
        return b"".join(found)

    def _record(self, microseconds: int, from_client: bool, data: bytes, length: int) -> bytes:
        ports = (self._port, _PORT) if from_client else (_PORT, self._port)
        sequence, answered = self._sequence[from_client], self._sequence[not from_client]
        self._sequence[from_client] = (sequence + length) & 0xFFFFFFFF
        tcp = struct.pack(">HHIIBBHHH", *ports, sequence, answered, (_TCP_HEADER // 4) << 4, _PUSH_ACK, 65_535, 0, 0)
        segment = self._ip_header(from_client, _TCP_HEADER + length) + tcp + data
        whole = len(segment) + length - len(data)
        seconds, fraction = divmod(microseconds, 1_000_000)
        return struct.pack("<IIII", seconds, fraction, len(segment), whole) + segment

    def _ip_header(self, from_client: bool, length: int) -> bytes:
        source, target = (self._client, self._broker) if from_client else (self._broker, self._client)
        if source.version == 6:
            return struct.pack(">IHBB", 6 << 28, length, 6, 64) + source.packed + target.packed
        header = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 0, 0x4000, 64, 6, 0) + source.packed + target.packed
        total = sum(struct.unpack(">10H", header))
        total = (total & 0xFFFF) + (total >> 16)
        checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
        return header[:10] + struct.pack(">H", checksum) + header[12:]
