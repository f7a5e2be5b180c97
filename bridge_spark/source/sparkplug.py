"""Parses Sparkplug B payloads, a row per metric (Sparkplug 3.0, section 6.4).

Invalid metrics make one dead letter, after the rows of the other metrics; its reason has their numbers, from 0.  Fields
that a metric does not have are NULL; nothing is taken from earlier messages: ``name`` is NULL if a DATA message gives the
alias alone (the BIRTH message has both).

Fields are read as Protobuf reads them: a varint of 64 bits is cut to the 32 bits of a ``uint32``, a field of another wire
type is unknown, and the last value of a field counts.

A schema may have any of `FIELDS`.  One of ``long``, ``double``, ``boolean``, ``string`` and ``binary`` is filled:

| column | Sparkplug types |
|---|---|
| long | Int8 to Int64, UInt8 to UInt64 (from 2^63 on a dead letter), DateTime (milliseconds since the epoch) |
| double | Float, Double, as sent, including non-finite values |
| boolean | Boolean |
| string | String, Text, UUID |
| binary | Bytes, File; DataSet, Template, property and array types as encoded |
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.source.row_parser import BadPayload, RowParser

_VARINT, _FIXED64, _BYTES, _GROUP, _END, _FIXED32 = 0, 1, 2, 3, 4, 5
_PAYLOAD_FIELDS = {1: _VARINT, 2: _BYTES, 3: _VARINT}
_METRIC_FIELDS = {
    1: _BYTES,
    **dict.fromkeys((2, 3, 4, 5, 6, 7, 10, 11, 14), _VARINT),
    12: _FIXED32,
    13: _FIXED64,
    **dict.fromkeys((15, 16, 17, 18, 19), _BYTES),
}
"""The wire types of the fields that are read."""
_MAX_DEPTH = 100
"""Of groups within each other, as Protobuf's own parsers have it."""
_MAX_REASONS = 10
"""Most invalid metrics of a payload whose reasons are given."""
_SIGNED_BITS = {1: 8, 2: 16, 3: 32, 4: 64}
_UNSIGNED_BITS = {5: 8, 6: 16, 7: 32, 8: 64}
_TYPES = {
    1: "Int8",
    2: "Int16",
    3: "Int32",
    4: "Int64",
    5: "UInt8",
    6: "UInt16",
    7: "UInt32",
    8: "UInt64",
    9: "Float",
    10: "Double",
    11: "Boolean",
    12: "String",
    13: "DateTime",
    14: "Text",
    15: "UUID",
    16: "DataSet",
    17: "Bytes",
    18: "File",
    19: "Template",
    20: "PropertySet",
    21: "PropertySetList",
    22: "Int8Array",
    23: "Int16Array",
    24: "Int32Array",
    25: "Int64Array",
    26: "UInt8Array",
    27: "UInt16Array",
    28: "UInt32Array",
    29: "UInt64Array",
    30: "FloatArray",
    31: "DoubleArray",
    32: "BooleanArray",
    33: "StringArray",
    34: "DateTimeArray",
}
_TEXTS = (12, 14, 15)
_TIME = pa.timestamp("us", "UTC")
FIELDS = {
    "name": pa.string(),
    "alias": pa.int64(),
    "timestamp": _TIME,
    "datatype": pa.string(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "is_null": pa.bool_(),
    "is_historical": pa.bool_(),
    "is_transient": pa.bool_(),
    "seq": pa.int64(),
    "payload_timestamp": _TIME,
}
"""All fields; ``seq`` and ``payload_timestamp`` belong to the payload, the others to the metric."""

_Value = int | bytes
_UINT32 = 0xFFFFFFFF


class SparkplugParser(RowParser):
    """Parses to ``type``, a struct of some of `FIELDS`."""

    def __init__(self, type: pa.StructType) -> None:
        self.type = type
        self._names = [type.field(number).name for number in range(type.num_fields)]
        self._required = [type.field(number).name for number in range(type.num_fields) if not type.field(number).nullable]

    def one(self, payload: bytes) -> list[Any]:
        if not payload:
            raise BadPayload("empty payload")
        metrics: list[bytes] = []
        shared: dict[str, Any] = {}
        for number, value in _fields(payload, _PAYLOAD_FIELDS, "payload"):
            if isinstance(value, bytes):
                metrics.append(value)
            elif number == 1 and "payload_timestamp" in self._names:
                shared["payload_timestamp"] = _instant(value)
            elif number == 3 and "seq" in self._names:
                shared["seq"] = _long(value)
        if not metrics:
            raise BadPayload("a Sparkplug payload without metrics")
        rows: list[Any] = []
        bad: list[str] = []
        for place, metric in enumerate(metrics):
            try:
                rows.append(self._row({**_metric(metric), **shared}))
            except BadPayload as error:
                bad.append(f"metric {place}: {error}")
        if bad:
            more = f"; {len(bad) - _MAX_REASONS} more" if len(bad) > _MAX_REASONS else ""
            rows.append(BadPayload("; ".join(bad[:_MAX_REASONS]) + more))
        return rows

    def _row(self, found: dict[str, Any]) -> dict[str, Any]:
        for name in self._required:
            if found.get(name) is None:
                raise BadPayload(f"field '{name}' is missing")
        return {name: found.get(name) for name in self._names}


def _metric(data: bytes) -> dict[str, Any]:
    """One Metric: name 1, alias 2, timestamp 3, datatype 4, is_historical 5, is_transient 6, is_null 7, value 10-19."""
    found: dict[str, Any] = {"is_historical": False, "is_transient": False, "is_null": False}
    datatype = 0
    given: tuple[int, _Value] | None = None
    for number, value in _fields(data, _METRIC_FIELDS, "metric"):
        if number >= 10:
            given = number, value
        elif isinstance(value, bytes):
            found["name"] = _text(value)
        elif number == 2:
            found["alias"] = _long(value)
        elif number == 3:
            found["timestamp"] = _instant(value)
        elif number == 4:
            datatype = value & _UINT32
        else:
            found[("is_historical", "is_transient", "is_null")[number - 5]] = value != 0
    if datatype:
        if datatype not in _TYPES:
            raise BadPayload("unknown datatype")
        found["datatype"] = _TYPES[datatype]
    if not found["is_null"]:
        if given is None:
            raise BadPayload("no value")
        column, value = _value(*given, datatype)
        found[column] = value
    return found


def _value(number: int, value: _Value, datatype: int) -> tuple[str, Any]:
    """The column and value of one field: int 10, long 11, float 12, double 13, boolean 14, string 15, bytes 16,
    dataset 17, template 18, extension 19."""
    if isinstance(value, int):
        if number == 14:
            return "boolean", value != 0
        return "long", _integer(value & _UINT32, datatype, 32) if number == 10 else _integer(value, datatype, 64)
    if number in (12, 13):
        return "double", struct.unpack("<f" if number == 12 else "<d", value)[0]
    return ("string", _text(value)) if number == 15 else ("binary", value)


def _integer(value: int, datatype: int, bits: int) -> int:
    """Decode a signed type: two's complement of the field's width or, from some clients, of the type's width.

    Without a datatype the value is unsigned.
    """
    width = _SIGNED_BITS.get(datatype)
    if width is not None:
        for sign in (width, bits):
            signed = value - (1 << sign) if value >> sign - 1 == 1 else value
            if -(1 << width - 1) <= signed < 1 << width - 1:
                return signed
        raise BadPayload("does not fit its datatype")
    if datatype in _UNSIGNED_BITS and value >> _UNSIGNED_BITS[datatype]:
        raise BadPayload("does not fit its datatype")
    return _long(value)


def _fields(data: bytes, wanted: Mapping[int, int], name: str) -> Iterator[tuple[int, _Value]]:
    """The fields of the message ``name`` that have the ``wanted`` numbers and wire types.  Raises `BadPayload`."""
    malformed = BadPayload(f"not a Sparkplug {name}")
    position = 0
    groups: list[int] = []
    while position < len(data):
        start = position
        key, position = _varint(data, position, malformed)
        number, wire = key >> 3, key & 7
        value: _Value = b""
        if not 0 < number < 1 << 29 or position - start > 5:
            raise malformed
        if wire == _VARINT:
            value, position = _varint(data, position, malformed)
        elif wire == _GROUP and len(groups) < _MAX_DEPTH:
            groups.append(number)
        elif wire == _END and groups and groups.pop() == number:
            continue
        else:
            if wire == _BYTES:
                length, position = _varint(data, position, malformed)
            else:
                length = {_FIXED64: 8, _FIXED32: 4}.get(wire, -1)
            value = data[position : position + length]
            if not 0 <= length == len(value):
                raise malformed
            position += length
        if not groups and wanted.get(number) == wire:
            yield number, value
    if groups:
        raise malformed


def _varint(data: bytes, position: int, malformed: BadPayload) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
    raise malformed


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise BadPayload("not UTF-8") from None


def _long(value: int) -> int:
    if value >= 1 << 63:
        raise BadPayload("a number beyond 64 bits with sign")
    return value


def _instant(milliseconds: int) -> int:
    if milliseconds >= 253_402_300_800_000:
        raise BadPayload("a timestamp after the year 9999")
    return milliseconds * 1000
