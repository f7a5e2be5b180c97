"""Headers of the PROXY protocol, in any pieces, against a second parser."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from random import Random

from fuzz.guided.target import Target
from fuzz.verdict import Finding
from mqttbroker.net.proxy_protocol import MAX_HEADER, ProxyHeader, ProxyHeaderError

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
Result = tuple[str, str | None, int]  # state, source, size of the header


class Proxy(Target):
    modules = ("mqttbroker.net.proxy_protocol",)
    words = (b"PROXY ", b"TCP4 ", b"TCP6 ", b"UNKNOWN", b"\r\n", b"::1", b"255.255.255.255", b"65535", SIGNATURE)
    max_bytes = 400

    def check(self, data: bytes) -> None:
        whole = _read([data])
        single = _read([data[at : at + 1] for at in range(len(data))])
        if whole != single:
            raise Finding(f"{whole} in one piece, {single} byte by byte: {data!r}")
        if whole[2] > MAX_HEADER:
            raise Finding(f"a header of {whole[2]} bytes")
        expected = _expected(data)
        if whole != expected:
            raise Finding(f"{whole} instead of {expected}: {data!r}")

    def seeds(self) -> Iterator[bytes]:
        yield b"PROXY TCP4 192.0.2.1 192.0.2.2 56324 443\r\n\x10"
        yield b"PROXY TCP6 2001:db8::1 ::ffff:192.0.2.2 56324 443\r\n"
        yield b"PROXY UNKNOWN\r\n"
        yield b"PROXY UNKNOWN ffff:f...f:ffff 1 2\r\n"
        for command in (0x20, 0x21):
            for family, size in ((0, 0), (0x11, 12), (0x21, 36), (0x31, 216), (0x12, 12)):
                block = bytes(range(size)) + b"\x03\x00\x04abcd"
                yield SIGNATURE + bytes((command, family)) + len(block).to_bytes(2, "big") + block

    def changed(self, data: bytes, random: Random) -> bytes:
        """Set the length of a version 2 header to that of the data."""
        if len(data) < 16 or not data.startswith(SIGNATURE):
            return data
        return data[:14] + max(0, len(data) - 16 - random.choice((0, 0, 1, 5))).to_bytes(2, "big") + data[16:]


def _read(pieces: list[bytes]) -> Result:
    header = ProxyHeader()
    size = 0
    try:
        for piece in pieces:
            size += header.feed(piece)
            if header.complete:
                return "complete", header.source, size
    except ProxyHeaderError:
        return "refused", None, 0
    return "incomplete", None, 0


def _expected(data: bytes) -> Result:
    """The specification, by the system's parser of addresses."""
    if data.startswith(b"PROXY ") or b"PROXY ".startswith(data):
        line, end, _ = data.partition(b"\r\n")
        if not end or len(line) + 2 > 107:
            return ("refused" if len(data) >= 107 else "incomplete"), None, 0
        source = _of_line(line)
        return ("refused", None, 0) if source == "" else ("complete", source, len(line) + 2)
    if not (data.startswith(SIGNATURE) or SIGNATURE.startswith(data)):
        return "refused", None, 0
    if len(data) > 12 and data[12] not in (0x20, 0x21):
        return "refused", None, 0
    if len(data) < 16:
        return "incomplete", None, 0
    size = int.from_bytes(data[14:16], "big")
    if size > 4096:
        return "refused", None, 0
    if len(data) < 16 + size:
        return "incomplete", None, 0
    source = None if data[12] == 0x20 else _of_block(data[13], data[16 : 16 + size])
    return ("refused", None, 0) if source == "" else ("complete", source, 16 + size)


def _of_line(line: bytes) -> str | None:
    """The client's address, None if it is unknown, "" if the line is malformed."""
    fields = line.split(b" ")
    if fields[1] == b"UNKNOWN":
        return None
    if len(fields) != 6 or fields[1] not in (b"TCP4", b"TCP6"):
        return ""
    family = socket.AF_INET if fields[1] == b"TCP4" else socket.AF_INET6
    try:
        packed = [socket.inet_pton(family, field.decode("ascii")) for field in fields[2:4]]
    except (OSError, ValueError):
        return ""
    for port in fields[4:6]:
        if not port.isdigit() or str(int(port)).encode() != port or int(port) > 65535:
            return ""
    return _text(family, packed[0], int(fields[4]))


def _of_block(family: int, block: bytes) -> str | None:
    sizes = {0x00: 0, 0x11: 12, 0x12: 12, 0x21: 36, 0x22: 36, 0x31: 216, 0x32: 216}
    if family not in sizes or len(block) < sizes[family]:
        return ""
    if family >> 4 not in (1, 2):
        return None
    width = 4 if family >> 4 == 1 else 16
    kind = socket.AF_INET if width == 4 else socket.AF_INET6
    return _text(kind, block[:width], int.from_bytes(block[2 * width : 2 * width + 2], "big"))


def _text(family: int, packed: bytes, port: int) -> str:
    if packed.startswith(b"\x00" * 10 + b"\xff\xff"):
        family, packed = socket.AF_INET, packed[12:]
    # The same address may be written in several ways; the broker's is that of `ipaddress`.
    return f"{ipaddress.ip_address(socket.inet_ntop(family, packed))}:{port}"
