"""Fixed headers, and encoders for PUBLISH and acknowledgements that need no packet object.

Callers are trusted to pass values that are valid for the protocol version.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from mqttbroker.codec import reason_codes as rc
from mqttbroker.codec.data_types import encode_varint

# The flags of the first byte by packet type; those of PUBLISH vary.
FLAGS: Final = bytes((0, 0, 0, 0, 0, 0, 2, 0, 2, 0, 2, 0, 0, 0, 0, 0))

# Two-byte integers, encoded; None until they are needed, as all of them take 3 MB more.
_TWO_BYTES: Final[list[bytes | None]] = [None] * 65536

# First byte and Remaining Length of the short acknowledgements, by packet type.
SHORT_ACKS: Final[list[bytes]] = [bytes((kind << 4 | FLAGS[kind], 2)) for kind in range(16)]

# First byte and Remaining Length of a PUBLISH without DUP, by flags and Remaining Length below 128.
_SHORT_PUBLISH: Final[list[bytes]] = [bytes((0x30 | flags, size)) for flags in range(8) for size in range(128)]


def two_bytes(value: i64) -> bytes:
    """A two-byte integer, encoded: a packet id is written once or twice per message."""
    known = _TWO_BYTES[value]
    if known is None:
        known = int(value).to_bytes(2, "big")
        _TWO_BYTES[value] = known
    return known


def publish_header(flags: int, remaining: int) -> bytes:
    """The fixed header of a PUBLISH without DUP; ValueError if ``remaining`` is too large."""
    if 0 <= remaining < 128:
        return _SHORT_PUBLISH[(flags & 7) << 7 | remaining]
    return encode_fixed_header(0x30 | flags, remaining)


def encode_fixed_header(first_byte: int, remaining: int) -> bytes:
    """First byte and Remaining Length; ValueError if ``remaining`` is too large."""
    if 0 <= remaining < 128:
        return (first_byte << 8 | remaining).to_bytes(2, "big")
    return first_byte.to_bytes(1, "big") + encode_varint(remaining)


def encode_publish(
    topic: bytes, payload: bytes, qos: int, retain: bool, dup: bool, packet_id: int, version: int, properties: bytes
) -> bytes:
    """Encode a PUBLISH. ``properties`` are encoded, without length prefix; below version 5 they are ignored."""
    first = rc.PUBLISH << 4 | qos << 1
    if retain:
        first |= 1
    if dup:
        first |= 8
    size = len(topic)
    head = two_bytes(size) + topic
    if qos:
        head += two_bytes(packet_id)
        size += 2
    size += 2 + len(payload)
    if version < 5:
        return encode_fixed_header(first, size) + head + payload
    prefix = encode_varint(len(properties))
    size += len(prefix) + len(properties)
    return b"".join((encode_fixed_header(first, size), head, prefix, properties, payload))


def encode_ack(packet_type: int, packet_id: int, reason_code: int, version: int) -> bytes:
    """Encode a PUBACK, PUBREC, PUBREL or PUBCOMP without properties.

    The reason code is omitted if it is 0, and below version 5.
    """
    if reason_code == 0 or version < 5:
        return SHORT_ACKS[packet_type] + two_bytes(packet_id)
    first: int = packet_type << 4 | FLAGS[packet_type]
    return (first << 32 | 0x03000000 | packet_id << 8 | reason_code).to_bytes(5, "big")


def encode_frame(packet_type: int, body: bytes) -> bytes:
    """A packet other than PUBLISH from its variable header and payload."""
    return encode_fixed_header(packet_type << 4 | FLAGS[packet_type], len(body)) + body
