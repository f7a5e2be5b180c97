"""Parses Sparkplug B payloads, a row per metric (Sparkplug 3.0, section 6.4).

One invalid metric makes the whole payload a dead letter.  Fields that a metric does not have are NULL; nothing is taken
from earlier messages: ``name`` is NULL if a DATA message gives the alias alone (the BIRTH message has both).

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
from collections.abc import Iterator
from typing import Any, Optional, Union

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.source.row_parser import BadPayload, RowParser

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIGNED_BITS = {1: 8, 2: 16, 3: 32, 4: 64}
_UNSIGNED_BITS = {5: 8, 6: 16, 7: 32, 8: 64}
_TYPES = {
    1: "Int8", 2: "Int16", 3: "Int32", 4: "Int64", 5: "UInt8", 6: "UInt16", 7: "UInt32", 8: "UInt64", 9: "Float",
    10: "Double", 11: "Boolean", 12: "String", 13: "DateTime", 14: "Text", 15: "UUID", 16: "DataSet", 17: "Bytes",
    18: "File", 19: "Template", 20: "PropertySet", 21: "PropertySetList", 22: "Int8Array", 23: "Int16Array",
    24: "Int32Array", 25: "Int64Array", 26: "UInt8Array", 27: "UInt16Array", 28: "UInt32Array", 29: "UInt64Array",
    30: "FloatArray", 31: "DoubleArray", 32: "BooleanArray", 33: "StringArray", 34: "DateTimeArray",
}
_TEXTS = (12, 14, 15)
_TIME = pa.timestamp("us", "UTC")
FIELDS = {
    "name": pa.string(), "alias": pa.int64(), "timestamp": _TIME, "datatype": pa.string(), "long": pa.int64(),
    "double": pa.float64(), "boolean": pa.bool_(), "string": pa.string(), "binary": pa.binary(),
    "is_null": pa.bool_(), "is_historical": pa.bool_(), "is_transient": pa.bool_(),
    "seq": pa.int64(), "payload_timestamp": _TIME,
}
"""All fields; ``seq`` and ``payload_timestamp`` belong to the payload, the others to the metric."""

_Value = Union[int, bytes]


class _Fixed(bytes):
    """A fixed-width value of 4 or 8 bytes."""

    __slots__ = ()


class SparkplugParser(RowParser):
    """Parses to ``type``, a struct of some of `FIELDS`."""

    def __init__(self, type: pa.StructType) -> None:
        self.type = type
        self._names = [type.field(number).name for number in range(type.num_fields)]
        self._required = [type.field(number).name for number in range(type.num_fields)
                          if not type.field(number).nullable]

    def one(self, payload: bytes) -> list[Any]:
        if not payload:
            raise BadPayload("empty payload")
        metrics: list[bytes] = []
        seq = sent = None
        for number, value in _fields(payload):
            if number == 1:
                sent = _instant(_whole(value))
            elif number == 2:
                metrics.append(_part(value))
            elif number == 3:
                seq = _long(_whole(value))
        if not metrics:
            raise BadPayload("a Sparkplug payload without metrics")
        return [self._row({**_metric(metric), "seq": seq, "payload_timestamp": sent}) for metric in metrics]

    def _row(self, found: dict[str, Any]) -> dict[str, Any]:
        for name in self._required:
            if found.get(name) is None:
                raise BadPayload(f"field '{name}' is missing")
        return {name: found.get(name) for name in self._names}


def _metric(data: bytes) -> dict[str, Any]:
    """One Metric: name 1, alias 2, timestamp 3, datatype 4, is_historical 5, is_transient 6, is_null 7, value 10-19."""
    found: dict[str, Any] = {"is_historical": False, "is_transient": False, "is_null": False}
    datatype = 0
    given: Optional[tuple[int, _Value]] = None
    for number, value in _fields(data):
        if number == 1:
            found["name"] = _text(value)
        elif number == 2:
            found["alias"] = _long(_whole(value))
        elif number == 3:
            found["timestamp"] = _instant(_whole(value))
        elif number == 4:
            datatype = _whole(value)
        elif number in (5, 6, 7):
            found[("is_historical", "is_transient", "is_null")[number - 5]] = _whole(value) != 0
        elif 10 <= number <= 19:
            given = number, value
    if datatype:
        if datatype not in _TYPES:
            raise BadPayload("a metric of an unknown datatype")
        found["datatype"] = _TYPES[datatype]
    if given is None and not found["is_null"]:
        raise BadPayload("a metric without a value")
    if given is not None and not found["is_null"]:
        column, value = _value(*given, datatype)
        found[column] = value
    return found


def _value(number: int, value: _Value, datatype: int) -> tuple[str, Any]:
    """The column and value of one field: int 10, long 11, float 12, double 13, boolean 14, string 15, bytes 16,
    dataset 17, template 18, extension 19."""
    if number in (10, 11):
        return "long", _integer(_whole(value), datatype, 32 if number == 10 else 64)
    if number in (12, 13):
        if not isinstance(value, _Fixed) or len(value) != (4 if number == 12 else 8):
            raise BadPayload("not a Sparkplug payload")
        return "double", struct.unpack("<f" if number == 12 else "<d", value)[0]
    if number == 14:
        return "boolean", _whole(value) != 0
    if number == 15:
        return "string", _text(value)
    return "binary", _part(value)


def _integer(value: int, datatype: int, bits: int) -> int:
    """Decode a signed type: two's complement of the field's width or, from some clients, of the type's width.

    Without a datatype the value is unsigned.
    """
    if value >> bits:
        raise BadPayload("not a Sparkplug payload")
    width = _SIGNED_BITS.get(datatype)
    if width is not None:
        for sign in (width, bits):
            signed = value - (1 << sign) if value >> sign - 1 == 1 else value
            if -(1 << width - 1) <= signed < 1 << width - 1:
                return signed
        raise BadPayload("a metric that does not fit its datatype")
    if datatype in _UNSIGNED_BITS and value >> _UNSIGNED_BITS[datatype]:
        raise BadPayload("a metric that does not fit its datatype")
    return _long(value)


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """The fields of a protobuf message: number, and an integer or bytes; raises `BadPayload`."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            whole, position = _varint(data, position)
            yield number, whole
            continue
        if wire == _BYTES:
            length, position = _varint(data, position)
        else:
            length = {_FIXED64: 8, _FIXED32: 4}.get(wire, -1)
        end = position + length
        if length < 0 or end > len(data) or number == 0:
            raise BadPayload("not a Sparkplug payload")
        yield number, data[position:end] if wire == _BYTES else _Fixed(data[position:end])
        position = end


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
    raise BadPayload("not a Sparkplug payload")


def _whole(value: _Value) -> int:
    if isinstance(value, bytes):
        raise BadPayload("not a Sparkplug payload")
    return value


def _part(value: _Value) -> bytes:
    if type(value) is not bytes:
        raise BadPayload("not a Sparkplug payload")
    return value


def _text(value: _Value) -> str:
    try:
        return _part(value).decode("utf-8")
    except UnicodeDecodeError:
        raise BadPayload("not a Sparkplug payload") from None


def _long(value: int) -> int:
    if value >= 1 << 63:
        raise BadPayload("a number beyond 64 bits with sign")
    return value


def _instant(milliseconds: int) -> int:
    if milliseconds >= 253_402_300_800_000:
        raise BadPayload("a timestamp after the year 9999")
    return milliseconds * 1000
