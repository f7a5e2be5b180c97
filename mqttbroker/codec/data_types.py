"""The data types that packets are made of (section 1.5), decoded and encoded.

Decoders read no byte at or beyond ``end`` and raise `MQTTError` with 0x81 for data that is malformed. Encoders raise
ValueError for values that are too large.
"""

from __future__ import annotations

import re
from typing import Final

from mqttbroker.codec.reason_codes import MALFORMED_PACKET, MQTTError

MAX_VARINT: Final = 268_435_455

# Control characters and noncharacters, which a receiver may refuse (1.5.4). U+0000 is forbidden [MQTT-1.5.4-2].
_REFUSED: Final = re.compile(
    "[\0-\x1f\x7f-\x9f\ufdd0-\ufdef" + "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(17)) + "]"
)

_ONE_BYTE: Final[list[bytes]] = [value.to_bytes(1, "big") for value in range(256)]


def decode_varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """Decode a Variable Byte Integer (1.5.5); returns its value and the position after it."""
    if pos >= end:
        raise MQTTError(MALFORMED_PACKET, "packet ends inside a variable byte integer")
    byte = data[pos]
    pos += 1
    if byte < 128:
        return byte, pos
    value = byte & 127
    shift = 7
    while shift <= 21:
        if pos >= end:
            raise MQTTError(MALFORMED_PACKET, "packet ends inside a variable byte integer")
        byte = data[pos]
        pos += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if byte == 0:
                raise MQTTError(MALFORMED_PACKET, "overlong variable byte integer")  # [MQTT-1.5.5-1]
            return value, pos
        shift += 7
    raise MQTTError(MALFORMED_PACKET, "variable byte integer of more than four bytes")


def encode_varint(value: int) -> bytes:
    """Encode a Variable Byte Integer in its shortest form; ValueError outside 0..268,435,455."""
    if 0 <= value < 128:
        return _ONE_BYTE[value]
    if value < 0 or value > MAX_VARINT:
        raise ValueError(f"not a variable byte integer: {value}")
    if value < 16_384:
        return ((value & 127 | 128) << 8 | value >> 7).to_bytes(2, "big")
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_binary(data: bytes, pos: int, end: int) -> tuple[bytes, int]:
    """Decode Binary Data with its two-byte length (1.5.6); returns it and the position after it."""
    start = pos + 2
    if start > end:
        raise MQTTError(MALFORMED_PACKET, "packet ends inside a length")
    stop = start + (data[pos] << 8 | data[pos + 1])
    if stop > end:
        raise MQTTError(MALFORMED_PACKET, "packet ends inside a field")
    return data[start:stop], stop


def decode_utf8(data: bytes, pos: int, end: int) -> tuple[str, int]:
    """Decode a UTF-8 Encoded String with its two-byte length (1.5.4); returns it and the position after it."""
    raw, pos = decode_binary(data, pos, end)
    return text_of(raw), pos


def text_of(raw: bytes) -> str:
    """The text of a UTF-8 Encoded String (1.5.4); MQTTError for characters that are not allowed."""
    try:
        # Python's strict decoder rejects surrogates and does not strip U+FEFF.
        text = raw.decode("utf-8")  # [MQTT-1.5.4-1] [MQTT-1.5.4-3]
    except UnicodeDecodeError:
        raise MQTTError(MALFORMED_PACKET, "string is not UTF-8") from None
    # No refused character is printable, and `isprintable` is fast.
    if not text.isprintable():
        found = _REFUSED.search(text)
        if found is not None:
            raise MQTTError(MALFORMED_PACKET, f"U+{ord(found[0]):04X} in a string")
    return text


def encode_binary(value: bytes) -> bytes:
    """Encode Binary Data with its length; ValueError above 65,535 bytes."""
    size = len(value)
    if size > 65_535:
        raise ValueError(f"field of {size} bytes does not fit a two-byte length")
    return size.to_bytes(2, "big") + value


def encode_utf8(text: str) -> bytes:
    """Encode a UTF-8 Encoded String with its length; ValueError above 65,535 bytes."""
    return encode_binary(text.encode("utf-8"))
