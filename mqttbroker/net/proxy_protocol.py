"""The header of the PROXY protocol, versions 1 and 2: the client's address, sent by a proxy before the client's bytes.

https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt. Addresses are taken from TCP and UDP over IPv4 and IPv6;
of the type-length-value fields of version 2 only the common name of a TLS client is read.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

MAX_LINE: Final = 107  # bytes of a version 1 header
MAX_BLOCK: Final = 4096  # bytes of a version 2 header after its first 16
MAX_HEADER: Final = 16 + MAX_BLOCK

_LINE_START: Final = b"PROXY "
_SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
_LOCAL: Final = 0x20  # version 2, command LOCAL; PROXY follows
_ADDRESS_SIZES: Final = {0x00: 0, 0x11: 4, 0x12: 4, 0x21: 16, 0x22: 16, 0x31: 108, 0x32: 108}  # by family and protocol
_TLS: Final = 0x20  # section 2.2.6: flags of the client, result of the verification, and fields
_TLS_COMMON_NAME: Final = 0x22
_TLS_CERTIFICATE: Final = 0x02 | 0x04  # the client has shown a certificate, in this connection or in its session
_VERIFIED: Final = bytes(4)
_PORT: Final = re.compile(rb"0|[1-9][0-9]{0,4}")


class ProxyHeaderError(ValueError):
    """The bytes are not a PROXY protocol header."""


class ProxyHeader:
    """Parses one header in the pieces in which it arrives.

    ``source`` is the client's address and port, None if the header has none: the connection is the proxy's own (LOCAL),
    or its client has another kind of address (UNKNOWN, Unix sockets). ``common_name`` is that of the client's
    certificate, if the proxy has verified one.
    """

    def __init__(self) -> None:
        self.complete = False
        self.source: str | None = None
        self.common_name: str | None = None
        self._received = b""

    def feed(self, data: bytes) -> int:
        """Returns how many bytes of ``data`` belong to the header. Raises `ProxyHeaderError`."""
        before = len(self._received)
        received = self._received + data
        end = _end(received)
        if end < 0 or end > len(received):
            self._received = received
            return len(data)
        if received[:1] == b"P":
            self.source = _source_of_line(received[:end])
        else:
            self.source = _source_of_block(received[:end])
            self.common_name = _common_name(received[:end])
        self.complete = True
        self._received = b""
        return end - before


def _end(data: bytes) -> int:
    """The position after the header; -1 if it depends on bytes that have not arrived."""
    if data[: len(_LINE_START)] == _LINE_START[: len(data)]:
        end = data.find(b"\r\n", 0, MAX_LINE) + 2
        if end < 2 and len(data) >= MAX_LINE:
            raise ProxyHeaderError(f"more than {MAX_LINE} bytes")
        return end if end >= 2 else -1
    if data[: len(_SIGNATURE)] != _SIGNATURE[: len(data)]:
        raise ProxyHeaderError("missing")
    if len(data) > 12 and data[12] not in (_LOCAL, _LOCAL + 1):
        raise ProxyHeaderError("unknown version or command")
    if len(data) < 16:
        return -1
    size = int.from_bytes(data[14:16], "big")
    if size > MAX_BLOCK:
        raise ProxyHeaderError(f"more than {MAX_HEADER} bytes")
    return 16 + size


def _source_of_line(line: bytes) -> str | None:
    """The client's address in a version 1 header."""
    fields = line[:-2].split(b" ")
    if fields[1] == b"UNKNOWN":
        return None
    sizes = {b"TCP4": 4, b"TCP6": 16}
    if len(fields) != 6 or fields[1] not in sizes:
        raise ProxyHeaderError("malformed")
    addresses = []
    for text in fields[2:4]:
        try:
            address = ipaddress.ip_address(text.decode("ascii"))
        except ValueError:
            raise ProxyHeaderError("malformed address") from None
        if len(address.packed) != sizes[fields[1]] or b"%" in text:
            raise ProxyHeaderError("malformed address")
        addresses.append(address)
    for text in fields[4:6]:
        if not _PORT.fullmatch(text) or int(text) > 65535:
            raise ProxyHeaderError("malformed port")
    return _text(addresses[0], int(fields[4]))


def _source_of_block(block: bytes) -> str | None:
    """The client's address in a version 2 header."""
    if block[12] == _LOCAL:
        return None
    size = _ADDRESS_SIZES.get(block[13])
    if size is None:
        raise ProxyHeaderError("unknown address family")
    if len(block) < 16 + 2 * size + (4 if size in (4, 16) else 0):
        raise ProxyHeaderError("too short for its addresses")
    if size not in (4, 16):
        return None
    port = 16 + 2 * size
    return _text(ipaddress.ip_address(block[16 : 16 + size]), int.from_bytes(block[port : port + 2], "big"))


def _common_name(block: bytes) -> str | None:
    """The common name of a verified certificate in the fields of a version 2 header; None if they are malformed."""
    size = _ADDRESS_SIZES.get(block[13])
    if block[12] == _LOCAL or not size:
        return None
    tls = _field(block[16 + 2 * size + (4 if size in (4, 16) else 0) :], _TLS)
    if tls is None or len(tls) < 5 or not tls[0] & _TLS_CERTIFICATE or tls[1:5] != _VERIFIED:
        return None
    found = _field(tls[5:], _TLS_COMMON_NAME)
    try:
        return None if found is None else found.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _field(fields: bytes, kind: int) -> bytes | None:
    """The value of the first type-length-value field of this type."""
    position = 0
    while position + 3 <= len(fields):
        end = position + 3 + int.from_bytes(fields[position + 1 : position + 3], "big")
        if fields[position] == kind:
            return fields[position + 3 : end] if end <= len(fields) else None
        position = end
    return None


def _text(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return f"{mapped or address}:{port}"
