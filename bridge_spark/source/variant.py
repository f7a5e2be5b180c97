"""Encodes JSON values as Spark's variant: a value, and the names of its fields as metadata.

The bytes are those of Spark's `parse_json`: https://github.com/apache/spark/tree/master/common/variant describes them.
Whole numbers are integers of the shortest width; other numbers without exponent, of at most 38 digits and 38 decimal
places, are decimals; all others are doubles.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.source.json_text import JsonNumber, JsonObject
from bridge_spark.source.row_parser import BadPayload

MAX_BYTES = (1 << 24) - 1
"""Of a variant's value, and of its metadata: what offsets of three bytes can express, which each Spark reads."""
TYPE = pa.struct([pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False, metadata={b"variant": b"true"})])
"""The Arrow type that Spark exchanges for a variant."""

_NULL, _TRUE, _FALSE = b"\x00", b"\x04", b"\x08"
_DOUBLE, _LONG_STRING = b"\x1c", b"\x40"
_INTEGERS = ((8, b"\x0c"), (16, b"\x10"), (32, b"\x14"), (64, b"\x18"))
"""Bits and header of the integer types."""
_DECIMALS = ((9, 4, b"\x20"), (18, 8, b"\x24"), (38, 16, b"\x28"))
"""Digits, bytes and header of the decimal types."""
_MAX_DIGITS = 38
_MAX_SHORT = 63  # bytes of a text with its length in the header


def encode(value: Any) -> dict[str, bytes]:
    """A decoded JSON value as a value of `TYPE`.  Raises `BadPayload` with the end of a sentence."""
    ids: dict[str, int] = {}
    data = _encode(value, ids)
    names = [name.encode() for name in ids]
    total = sum(map(len, names))
    width = _width(max(total, len(names)))
    metadata = bytearray([1 | width - 1 << 6])
    metadata += len(names).to_bytes(width, "little")
    metadata += _offsets(map(len, names), width)
    metadata += b"".join(names)
    if len(data) > MAX_BYTES or len(metadata) > MAX_BYTES:
        raise BadPayload("is larger than 16 MiB as a variant")
    return {"value": data, "metadata": bytes(metadata)}


def _encode(value: Any, ids: dict[str, int]) -> bytes:
    """The bytes of a value; ``ids`` gets the names of fields in the order in which they are met."""
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, JsonNumber):
        return _number(str(value))
    if isinstance(value, str):
        text = value.encode()
        if len(text) <= _MAX_SHORT:
            return bytes([len(text) << 2 | 1]) + text
        return _LONG_STRING + _size(len(text)).to_bytes(4, "little") + text
    if isinstance(value, JsonObject):
        return _object(value, ids)
    items = [_encode(item, ids) for item in value]
    wide = len(items) > 0xFF
    width = _width(sum(map(len, items)))
    header = bytes([wide << 4 | width - 1 << 2 | 3]) + len(items).to_bytes(4 if wide else 1, "little")
    return header + _offsets(map(len, items), width) + b"".join(items)


def _object(members: JsonObject, ids: dict[str, int]) -> bytes:
    places: dict[str, int] = {}
    items = []
    end = 0
    for name, value in members:
        if name in places:
            raise BadPayload("has a key that stands twice")
        ids.setdefault(name, len(ids))
        places[name] = end
        items.append(_encode(value, ids))
        end += len(items[-1])
    names = sorted(places, key=_order)
    wide = len(names) > 0xFF
    id_width, width = _width(max(map(ids.__getitem__, names), default=0)), _width(end)
    header = bytes([wide << 6 | id_width - 1 << 4 | width - 1 << 2 | 2]) + len(names).to_bytes(4 if wide else 1, "little")
    return b"".join(
        [
            header,
            *(ids[name].to_bytes(id_width, "little") for name in names),
            *(places[name].to_bytes(width, "little") for name in names),
            end.to_bytes(width, "little"),
            *items,
        ]
    )


def _order(name: str) -> bytes:
    """Spark looks fields up in the order of Java's strings, which is that of UTF-16."""
    return name.encode("utf-16-be")


def _number(text: str) -> bytes:
    if len(text) < 20 or len(text) == 20 and text[0] == "-":
        if text.lstrip("-").isdigit():
            whole = int(text)
            for bits, header in _INTEGERS:
                if -(1 << bits - 1) <= whole < 1 << bits - 1:
                    return header + whole.to_bytes(bits // 8, "little", signed=True)
    front, _, places = text.partition(".")
    if len(text) <= _MAX_DIGITS + 3 and (front.lstrip("-") + places).isdigit():
        unscaled = int(front + places)
        digits = len(str(abs(unscaled)))
        for most, size, header in _DECIMALS:
            if digits <= most and len(places) <= most:
                return header + bytes([len(places)]) + unscaled.to_bytes(size, "little", signed=True)
    double = float(text)
    if double - double != 0:
        raise BadPayload("is not a finite number")
    return _DOUBLE + struct.pack("<d", double)


def _offsets(lengths: Any, width: int) -> bytes:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return b"".join(offset.to_bytes(width, "little") for offset in offsets)


def _width(most: int) -> int:
    """Bytes of an unsigned integer up to ``most``."""
    return 1 if most <= 0xFF else 2 if most <= 0xFFFF else 3 if _size(most) else 0


def _size(count: int) -> int:
    if count > MAX_BYTES:
        raise BadPayload("is larger than 16 MiB as a variant")
    return count
