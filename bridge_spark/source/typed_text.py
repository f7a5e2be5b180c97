"""Parses strings to typed values.

`value_of` parses one string by the rules below; `column_of` parses a column and accepts a subset of these strings.

| type | string |
|---|---|
| byte to long | digits with an optional sign, in range |
| float, double | decimal digits with optional fraction and exponent; finite |
| decimal | the same, if it fits without rounding |
| boolean | `true` or `false`, in any case |
| timestamp | `YYYY-MM-DD[(T| )hh:mm[:ss[.f]][Z|±hh:mm]]`; UTC without a zone; truncated to microseconds |
| timestamp_ntz | the same without a zone |
| date | `YYYY-MM-DD` |
| binary | base64 with padding |

Years run from 1 to 9999.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from datetime import date
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from bridge_spark.source.row_parser import BadPayload, Refused

FIRST_US = -62_135_596_800_000_000
"""The first microsecond of year 1."""
LAST_US = 253_402_300_799_999_999

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_TIMESTAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,9}))?)?(?:([Zz])|([+-])([0-9]{2}):?([0-9]{2}))?)?"
)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_PLAIN_INTEGER = "^-?[0-9]+$"
_PLAIN_NUMBER = r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_PLAIN_DATE = "^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}$"
_PLAIN_TIME = r"^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?"
_ZONED = _PLAIN_TIME + "(Z|[+-][0-9]{2}:[0-9]{2})$"


def is_supported(kind: pa.DataType) -> bool:
    """Whether a string can be parsed to this type."""
    types = pa.types
    return bool(
        types.is_signed_integer(kind)
        or types.is_float32(kind)
        or types.is_float64(kind)
        or types.is_boolean(kind)
        or types.is_string(kind)
        or types.is_binary(kind)
        or types.is_date32(kind)
        or types.is_timestamp(kind)
        or types.is_decimal128(kind)
    )


def value_of(text: str, kind: pa.DataType) -> Any:
    """Parse one string to a Python value that Arrow accepts for ``kind``.

    Raises `BadPayload` with the end of a sentence such as "'x' is not a date".
    """
    if pa.types.is_string(kind):
        return text
    if pa.types.is_signed_integer(kind):
        return integer(text, kind)
    if pa.types.is_floating(kind):
        return number(text, kind)
    if pa.types.is_decimal(kind):
        return decimal(text, kind)
    if pa.types.is_boolean(kind):
        word = text.lower()
        if word not in ("true", "false"):
            raise BadPayload("is neither true nor false")
        return word == "true"
    if pa.types.is_timestamp(kind):
        return timestamp(text, kind.tz is not None)
    if pa.types.is_date(kind):
        return day(text)
    return binary(text)


def integer(text: str, kind: pa.DataType) -> int:
    if not _INTEGER.fullmatch(text):
        raise BadPayload("is not a whole number")
    digits = text.lstrip("+-").lstrip("0")
    value = int(text) if len(digits) < 20 else 1 << 64
    if not -(1 << kind.bit_width - 1) <= value < 1 << kind.bit_width - 1:
        raise BadPayload(f"does not fit {kind}")
    return value


def number(text: str, kind: pa.DataType) -> float:
    if not _NUMBER.fullmatch(text):
        raise BadPayload("is not a number")
    return finite(float(text), kind)


def finite(value: float, kind: pa.DataType) -> float:
    """``value``, if it is finite as ``kind``; raises `BadPayload`."""
    try:
        held = struct.unpack("<f", struct.pack("<f", value))[0] if kind.bit_width == 32 else value
    except OverflowError:
        held = float("inf")
    if held - held != 0:
        raise BadPayload("is not a finite number")
    return value


def decimal(text: str, kind: pa.DataType) -> Decimal:
    if not _NUMBER.fullmatch(text):
        raise BadPayload("is not a number")
    try:
        return Context(prec=kind.precision, traps=[Inexact, InvalidOperation]).quantize(Decimal(text), Decimal(1).scaleb(-kind.scale))
    except (InvalidOperation, Inexact):
        raise BadPayload(f"does not fit decimal({kind.precision},{kind.scale})") from None


def timestamp(text: str, zoned: bool = True) -> int:
    """Microseconds since the epoch; ``zoned``: accept a zone (default UTC)."""
    match = _TIMESTAMP.fullmatch(text)
    if match is None or (not zoned and (match[6] or match[7])):
        raise BadPayload("is not a timestamp")
    hours, minutes, seconds = (int(part or 0) for part in match.group(2, 3, 4))
    offset_hours, offset_minutes = (int(part or 0) for part in match.group(8, 9))
    if hours > 23 or minutes > 59 or seconds > 59 or offset_hours > 23 or offset_minutes > 59:
        raise BadPayload("is not a timestamp")
    try:
        days = day(match[1])
    except BadPayload:
        raise BadPayload("is not a timestamp") from None
    offset = (offset_hours * 60 + offset_minutes) * (-1 if match[7] == "-" else 1)
    value = ((days * 24 + hours) * 60 + minutes - offset) * 60 + seconds
    return in_range(value * 1_000_000 + int((match[5] or "0")[:6].ljust(6, "0")))


def in_range(microseconds: int) -> int:
    if not FIRST_US <= microseconds <= LAST_US:
        raise BadPayload("is not a timestamp")
    return microseconds


def day(text: str) -> int:
    """Days since the epoch."""
    match = _DATE.fullmatch(text)
    try:
        if match is not None:
            return date(int(match[1]), int(match[2]), int(match[3])).toordinal() - _EPOCH_DAY
    except ValueError:
        pass
    raise BadPayload("is not a date")


def binary(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise BadPayload("is not base64") from None


def column_of(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert a column of strings to ``kind``; NULL stays NULL.  Raises `Refused` if one is or may be invalid."""
    types = pa.types
    if types.is_string(kind):
        return texts
    if types.is_signed_integer(kind):
        return _cast(texts, _PLAIN_INTEGER, kind)
    if types.is_floating(kind):
        return finite_column(_cast(texts, _PLAIN_NUMBER, pa.float64()), kind)
    if types.is_date(kind):
        return _cast(texts, _PLAIN_DATE, kind)
    if types.is_timestamp(kind):
        return _timestamps(texts, kind)
    values: list[None | bool | Decimal | bytes] = []
    try:
        for text in texts.to_pylist():
            values.append(None if text is None else value_of(text, kind))
    except BadPayload:
        raise Refused from None
    return pa.array(values, kind)


def finite_column(numbers: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert doubles to ``kind``; raises `Refused` unless all are finite."""
    column = numbers if numbers.type == kind else pc.cast(numbers, kind, safe=False)
    check(pc.is_finite(column))
    return column


def check(flags: pa.Array) -> None:
    """Raise `Refused` with the first false row; NULL counts as true."""
    if pc.all(flags, min_count=0).as_py() is False:
        raise Refused(pc.index(flags, False).as_py())


def _timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    first = texts[pc.index(texts.is_valid(), True).as_py()].as_py() if texts.null_count < len(texts) else ""
    if kind.tz is not None and (first[-1:] == "Z" or first[-6:-5] in ("+", "-")):
        column = _cast(texts, _ZONED, pa.timestamp("us", "UTC"))
    else:
        column = _cast(texts, _PLAIN_TIME + "$", pa.timestamp("us"))
    numbers = column.cast(pa.int64())
    check(pc.and_(pc.greater_equal(numbers, FIRST_US), pc.less_equal(numbers, LAST_US)))
    return numbers.cast(kind)


def _cast(texts: pa.Array, pattern: str, kind: pa.DataType) -> pa.Array:
    check(pc.match_substring_regex(texts, pattern))
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        raise Refused from None
