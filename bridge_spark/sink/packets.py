"""MQTT packets that a publisher sends and receives, versions 3.1.1 and 5.0."""

from __future__ import annotations

from typing import NamedTuple

from sessions.reason_names import REASON_NAMES

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, PINGRESP, DISCONNECT = 2, 3, 4, 5, 6, 7, 13, 14

PINGREQ = b"\xc0\x00"
GOODBYE = b"\xe0\x00"

NO_MATCHING_SUBSCRIBERS = 0x10
QUOTA_EXCEEDED = 0x97

_REASONS_311 = {
    1: "unacceptable protocol version",
    2: "identifier rejected",
    3: "Server unavailable",
    4: "bad user name or password",
    5: "not authorized",
}
# A later attempt may succeed.
TRANSIENT = frozenset({0x88, 0x89, 0x8B, 0x8D, 0x96, 0x97, 0x98, 0x9F})
_TRANSIENT_311 = frozenset({3})

# Width of a property's value; 0: a length and bytes; -1: two of those.
_WIDTHS = {
    0x11: 4, 0x12: 0, 0x13: 2, 0x15: 0, 0x16: 0, 0x1A: 0, 0x1C: 0, 0x1F: 0, 0x21: 2, 0x22: 2, 0x24: 1, 0x25: 1, 0x26: -1,
    0x27: 4, 0x28: 1, 0x29: 1, 0x2A: 1,
}  # fmt: skip
_REASON_STRING, _RECEIVE_MAXIMUM, _MAXIMUM_QOS, _RETAIN_AVAILABLE, _MAXIMUM_PACKET_SIZE = 0x1F, 0x21, 0x24, 0x25, 0x27

# A Maximum Packet Size above this is none: packets of MQTT are no larger.
LARGEST_PACKET = 268_435_460


class BadPacket(Exception):
    """The peer does not send MQTT."""


class Capabilities(NamedTuple):
    """The broker's limits, from its CONNACK."""

    receive_maximum: int = 65535
    maximum_qos: int = 2
    retain_available: bool = True
    maximum_packet_size: int = LARGEST_PACKET


class Refusal(NamedTuple):
    """A reason code from 0x80 on (3.1.1: a return code above 0) as text; ``transient``: a later attempt may succeed."""

    code: int
    text: str
    transient: bool


def varint(value: int) -> bytes:
    """A Variable Byte Integer of up to 268,435,455."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(value: bytes) -> bytes:
    """A string or binary value with its length."""
    return len(value).to_bytes(2, "big") + value


def connect(version: int, client_id: str, user: str | None, password: bytes | None, keep_alive: int) -> bytes:
    """A CONNECT with clean start."""
    flags = 2 | (0x80 if user is not None else 0) | (0x40 if password is not None else 0)
    body = field(b"MQTT") + bytes((version, flags)) + keep_alive.to_bytes(2, "big")
    body += (b"\x00" if version == 5 else b"") + field(client_id.encode())
    body += field(user.encode()) if user is not None else b""
    body += field(password) if password is not None else b""
    return b"\x10" + varint(len(body)) + body


def acknowledgement(first: int, packet_id: int) -> bytes:
    """A PUBREL (``first`` 0x62) with success."""
    return bytes((first, 2)) + packet_id.to_bytes(2, "big")


def next_packet(data: bytes, position: int) -> tuple[int, int, int] | None:
    """The first byte of the packet at ``position``, and start and end of the rest; None if it is incomplete."""
    length, at, shift = 0, position + 1, 0
    while True:
        if at >= len(data):
            return None
        byte = data[at]
        at += 1
        length |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 21:
            raise BadPacket("a length of more than four bytes")
    return None if at + length > len(data) else (data[position], at, at + length)


def read_connack(version: int, body: bytes) -> tuple[Refusal | None, Capabilities]:
    """The contents of a CONNACK."""
    if len(body) < 2:
        raise BadPacket("a CONNACK that is too short")
    code = body[1]
    found = _properties(body, 2) if version == 5 and len(body) > 2 else {}
    if code:
        return refusal(version, code, found), Capabilities()
    default = Capabilities()
    return None, Capabilities(
        _number(found, _RECEIVE_MAXIMUM, default.receive_maximum),
        _number(found, _MAXIMUM_QOS, default.maximum_qos),
        _number(found, _RETAIN_AVAILABLE, 1) == 1,
        _number(found, _MAXIMUM_PACKET_SIZE, default.maximum_packet_size),
    )


def read_acknowledgement(body: bytes) -> tuple[int, Refusal | None]:
    """The packet id of a PUBACK, PUBREC or PUBCOMP, and the refusal."""
    if len(body) < 2:
        raise BadPacket("an acknowledgement that is too short")
    code = body[2] if len(body) > 2 else 0
    packet_id = body[0] << 8 | body[1]
    if code < 0x80:
        return packet_id, None
    return packet_id, refusal(5, code, _properties(body, 3) if len(body) > 3 else {})


def read_disconnect(body: bytes) -> Refusal:
    return refusal(5, body[0] if body else 0, _properties(body, 1) if len(body) > 1 else {})


def refusal(version: int, code: int, properties: dict[int, bytes]) -> Refusal:
    """The refusal for a reason code (3.1.1: a return code of CONNACK)."""
    if version != 5:
        return Refusal(code, f"{code} {_REASONS_311.get(code, 'unknown')}", code in _TRANSIENT_311)
    text = f"0x{code:02X} {REASON_NAMES.get(code, 'unknown')}"
    said = properties.get(_REASON_STRING, b"").decode("utf-8", "replace")
    return Refusal(code, f"{text} ({' '.join(said.split())[:200]})" if said else text, code in TRANSIENT)


def _number(properties: dict[int, bytes], identifier: int, default: int) -> int:
    value = properties.get(identifier)
    return default if value is None else int.from_bytes(value, "big")


def _properties(body: bytes, position: int) -> dict[int, bytes]:
    """The values by identifier; of a repeated one the last."""
    found: dict[int, bytes] = {}
    try:
        length, position = _varint_at(body, position)
        end = position + length
        while position < end:
            identifier = body[position]
            width = _WIDTHS[identifier]
            position += 1
            for _ in range(2 if width == -1 else 1):
                size = width
                if width <= 0:
                    size = body[position] << 8 | body[position + 1]
                    position += 2
                found[identifier] = body[position : position + size]
                position += size
    except (IndexError, KeyError):
        raise BadPacket("malformed properties") from None
    return found


def _varint_at(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
