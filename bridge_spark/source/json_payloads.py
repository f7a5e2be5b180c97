"""Parses JSON payloads to rows.

`JsonParser.one` parses one payload by the rules below.  `JsonParser.fast` parses many with Arrow and refuses them
unless the result is the same.

| payload | result |
|---|---|
| an object | a row; fields are matched by their exact name |
| a missing or null field | NULL (a variant of null if null); a dead letter if the field is NOT NULL (also in structs and arrays) |
| a field that is not in the schema, also of a struct | ignored, or an extra field; its value must be valid JSON |
| a field of the schema twice in one object | a dead letter (of other fields the last value is used) |
| a value of another type than the field | a dead letter, except that any value fills a string field, as JSON text |
| byte to long | a number in range without fraction and exponent; not `1.0`, not `"1"` |
| float, double | a finite number; not `1e999`, not `"1"` |
| decimal | a number, with or without quotes, that fits without rounding |
| boolean | true or false |
| timestamp | an ISO 8601 string as in `typed_text`, or with `timestamps` a number: s, ms or us since the epoch |
| date, binary | a string as in `typed_text` |
| struct, array, map | object, array, object; the keys of a map must be unique |
| variant | any value, also null; unique keys and finite numbers as in `variant` |
| NaN, Infinity, comments, a lone surrogate | a dead letter, as not JSON |
| white space, one byte order mark | ignored |
| an empty payload, invalid UTF-8, several values, nesting deeper than 200 | a dead letter |
| an array | a dead letter; with `explode` a row per object, or a dead letter if one is invalid or there is none |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.json as pj  # type: ignore[import-untyped]

from bridge_spark.source import typed_text, variant
from bridge_spark.source.json_text import BLANKS, MAX_DEPTH, JsonNumber, JsonObject, decode, text_of
from bridge_spark.source.row_parser import BadPayload, Refused, RowParser
from bridge_spark.source.spark_types import is_variant

EXTRA = "_extra"
EXTRA_TYPE = pa.map_(pa.string(), pa.string())
UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""Microseconds per unit of numeric timestamps."""

_MISSING = object()
"""The value of a field that an object does not have."""
_NOT_A_NUMBER = re.compile(rb"[^\w\"](?:NaN|Inf)")
_ROW = re.compile(r" in row (\d+)$")
_TEXT = re.compile(r"couldn't parse:(.+)$|: (\S+) requires (?:scale|precision) \d+$")


class JsonParser(RowParser):
    """Parses to ``type``, a struct; fields that are not nullable are NOT NULL.

    ``timestamps`` is None for strings, or one of `UNITS`.  ``extra`` adds the last field `EXTRA`: the JSON text of each
    field that is not in the schema, by its name.  Fields of structs that are not in the schema are under the name of the
    payload's field: its JSON text with these fields alone, so that their place is seen and the text is never longer than
    a small multiple of the payload.  Items of an array before such a field are null: ``{"a": [{"x": 1}, {"y": 2}]}``
    with the schema ``a array<struct<x int>>`` has the extra field ``a`` with ``[null,{"y":2}]``.
    """

    def __init__(self, type: pa.StructType, timestamps: str | None = None, explode: bool = False, extra: bool = False) -> None:
        self._fields = [type.field(number) for number in range(type.num_fields)]
        self._unit = None if timestamps is None else UNITS[timestamps]
        self._explode = explode
        self._extra = extra
        self.type = pa.struct([*self._fields, pa.field(EXTRA, EXTRA_TYPE)]) if extra else type
        self._kinds = {field.name: field.type for field in self._fields}
        self._read = pa.schema([pa.field(field.name, self._read_type(field.type)) for field in self._fields])
        self._is_fast = not any(_is_slow(field.type) for field in self._fields)

    def one(self, payload: bytes) -> list[Any]:
        value = decode(payload)
        if self._explode and type(value) is list:
            if not value:
                raise BadPayload("an array without rows")
            return [self._row(item) for item in value]
        return [self._row(value)]

    def fast(self, payloads: pa.Array) -> pa.Array:
        if not self._is_fast:
            raise Refused
        lines = _lines(payloads)
        found = None
        if self._extra:
            try:
                found = self._table(lines, len(payloads), "error")
                extra = pa.array([[]], EXTRA_TYPE).take(pa.repeat(pa.scalar(0, pa.int8()), len(payloads)))
            except Refused:
                pass
        if found is None:
            found = self._table(lines, len(payloads), "ignore")
            if self._extra:
                extra = self._extra_column(payloads)
        columns = [self._column(found.column(field.name).combine_chunks(), field) for field in self._fields]
        if self._extra:
            columns.append(extra)
        return pa.StructArray.from_arrays(
            [_one_chunk(column) for column in columns], fields=[self.type.field(number) for number in range(self.type.num_fields)]
        )

    def _table(self, lines: pa.Buffer, count: int, unknown: str) -> pa.Table:
        options = pj.ReadOptions(use_threads=False, block_size=max(lines.size, 1))
        parsing = pj.ParseOptions(explicit_schema=self._read, unexpected_field_behavior=unknown)
        try:
            found = pj.read_json(pa.BufferReader(lines), options, parsing)
        except pa.ArrowInvalid as error:
            raise Refused(_refused_row(str(error), lines)) from None
        # Each line begins and ends with a brace, so no object spans two lines and each line holds at least one.
        # If there are as many rows as lines, each line holds exactly one.
        if found.num_rows != count:
            raise Refused
        return found

    def _column(self, values: pa.Array, field: pa.Field) -> pa.Array:
        """Convert a column that Arrow has read to the field's type; raises `Refused`."""
        kind, types = field.type, pa.types
        if not field.nullable:
            typed_text.check(values.is_valid())
        if types.is_struct(kind) and values.null_count:
            with _rows_unknown():
                made = self._column(values.drop_null(), pa.field(field.name, kind))
            return made.take(_places(values))
        if types.is_struct(kind):
            fields = [kind.field(number) for number in range(kind.num_fields)]
            columns = [self._column(values.field(number), part) for number, part in enumerate(fields)]
            return pa.StructArray.from_arrays(columns, fields=fields)
        if types.is_list(kind):
            with _rows_unknown():
                items = self._column(values.values, kind.value_field)
            return pa.ListArray.from_arrays(values.offsets, items, type=kind, mask=values.is_null())
        if types.is_floating(kind):
            return typed_text.finite_column(values, kind)
        if types.is_decimal(kind):
            return _decimals(values)
        if types.is_timestamp(kind) and self._unit is not None and kind.tz is not None:
            return _instants(values, kind, self._unit)
        if types.is_timestamp(kind) or types.is_date(kind) or types.is_binary(kind):
            return typed_text.column_of(values, kind)
        return values

    def _read_type(self, kind: pa.DataType) -> pa.DataType:
        """The type that Arrow reads before `_column` converts it to ``kind``."""
        types = pa.types
        if types.is_struct(kind):
            fields = [kind.field(number) for number in range(kind.num_fields)]
            return pa.struct([pa.field(field.name, self._read_type(field.type)) for field in fields])
        if types.is_list(kind):
            return pa.list_(self._read_type(kind.value_type))
        if types.is_floating(kind) or (types.is_timestamp(kind) and self._unit is not None and kind.tz is not None):
            return pa.float64()
        if types.is_timestamp(kind) or types.is_date(kind) or types.is_binary(kind):
            return pa.string()
        return kind

    def _extra_column(self, payloads: pa.Array) -> pa.Array:
        try:
            return pa.array([self._extras(decode(payload)) for payload in payloads.to_pylist()], EXTRA_TYPE)
        except BadPayload:
            raise Refused from None

    def _extras(self, members: JsonObject) -> list[tuple[str, str]]:
        found = _unknown(members, self._kinds)
        return [] if found is None else [(name, text_of(value)) for name, value in found]

    def _row(self, value: Any) -> dict[str, Any]:
        if type(value) is not JsonObject:
            raise BadPayload("not a JSON object")
        row = self._struct(value, self._fields, "")
        if self._extra:
            row[EXTRA] = self._extras(value)
        return row

    def _struct(self, members: JsonObject, fields: list[pa.Field], where: str) -> dict[str, Any]:
        found: dict[str, Any] = {field.name: _MISSING for field in fields}
        for name, value in members:
            if name in found:
                if found[name] is not _MISSING:
                    raise BadPayload(f"field '{where}{name}' stands twice")
                found[name] = value
        for field in fields:
            found[field.name] = self._value(found[field.name], field, where + field.name)
        return found

    def _value(self, value: Any, field: pa.Field, where: str) -> Any:
        kind, types = field.type, pa.types
        if value is _MISSING or value is None and not is_variant(kind):
            if not field.nullable:
                raise BadPayload(f"field '{where}' is missing")
            return None
        if types.is_struct(kind) and not is_variant(kind):
            _expect(type(value) is JsonObject, where, "is not an object")
            return self._struct(value, [kind.field(number) for number in range(kind.num_fields)], where + ".")
        if types.is_list(kind):
            _expect(type(value) is list, where, "is not an array")
            return [self._value(item, kind.value_field, where + "[]") for item in value]
        if types.is_map(kind):
            _expect(type(value) is JsonObject, where, "is not an object")
            _expect(len({name for name, _ in value}) == len(value), where, "has a key that stands twice")
            return [(name, self._value(item, kind.item_field, where + "{}")) for name, item in value]
        try:
            return self._scalar(value, kind)
        except BadPayload as bad:
            raise BadPayload(f"field '{where}' {bad}") from None

    def _scalar(self, value: Any, kind: pa.DataType) -> Any:
        types = pa.types
        if is_variant(kind):
            return variant.encode(value)
        if types.is_string(kind):
            return value if type(value) is str else text_of(value)
        if types.is_boolean(kind):
            if type(value) is not bool:
                raise BadPayload("is neither true nor false")
            return value
        if types.is_signed_integer(kind) or types.is_floating(kind):
            if type(value) is not JsonNumber:
                raise BadPayload("is not a number")
        elif types.is_timestamp(kind) and self._unit is not None and kind.tz is not None:
            if type(value) is not JsonNumber:
                raise BadPayload("is not a number")
            return _instant(float(value), self._unit)
        elif type(value) is not str and not (types.is_decimal(kind) and type(value) is JsonNumber):
            raise BadPayload("is not a text")
        return typed_text.value_of(value, kind)


class VariantParser(RowParser):
    """Parses each payload, or with ``explode`` each item of an array, to a variant."""

    type = variant.TYPE

    def __init__(self, explode: bool = False) -> None:
        self._explode = explode

    def one(self, payload: bytes) -> list[Any]:
        value = decode(payload)
        items = value if self._explode and type(value) is list else [value]
        if not items:
            raise BadPayload("an array without rows")
        try:
            return [variant.encode(item) for item in items]
        except BadPayload as bad:
            raise BadPayload(f"the JSON value {bad}") from None


def _unknown(members: JsonObject, kinds: Mapping[str, pa.DataType]) -> JsonObject | None:
    """The members of an object whose fields have the types ``kinds``, without all that fills a field; None if there
    are none."""
    found: dict[str, Any] = {}
    for name, value in members:
        kind = kinds.get(name)
        left = value if kind is None else _left(value, kind)
        if kind is None or left is not None:
            found[name] = left
    return JsonObject(found.items()) if found else None


def _left(value: Any, kind: pa.DataType) -> JsonObject | list[Any] | None:
    """The fields in ``value`` that have no place in ``kind``, within the objects and arrays that they are in."""
    types = pa.types
    if is_variant(kind):
        return None
    if type(value) is JsonObject:
        if types.is_struct(kind):
            fields = [kind.field(number) for number in range(kind.num_fields)]
            return _unknown(value, {field.name: field.type for field in fields})
        if types.is_map(kind) and types.is_nested(kind.item_type):
            return _unknown(value, dict.fromkeys([name for name, _ in value], kind.item_type))
    elif type(value) is list and types.is_list(kind) and types.is_nested(kind.value_type):
        items = [_left(item, kind.value_type) for item in value]
        while items and items[-1] is None:
            items.pop()
        return items or None
    return None


def _expect(true: bool, where: str, otherwise: str) -> None:
    if not true:
        raise BadPayload(f"field '{where}' {otherwise}")


def _instant(number: float, unit: int) -> int:
    scaled = number * unit
    if not typed_text.FIRST_US <= scaled <= typed_text.LAST_US:
        raise BadPayload("is not a timestamp")
    return typed_text.in_range(round(scaled))


def _instants(numbers: pa.Array, kind: pa.DataType, unit: int) -> pa.Array:
    scaled = pc.multiply(numbers, float(unit))
    typed_text.check(pc.and_(pc.greater(scaled, float(typed_text.FIRST_US)), pc.less(scaled, float(typed_text.LAST_US))))
    return pc.round(scaled, round_mode="half_to_even").cast(pa.int64()).cast(kind)


def _decimals(values: pa.Array) -> pa.Array:
    """Check decimals: Arrow scales numbers without checking the precision."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        raise Refused from None
    return values


def _lines(payloads: pa.Array) -> pa.Buffer:
    """The payloads as lines for `JsonParser._table`; each begins and ends with a brace.  Raises `Refused`."""
    try:
        texts = payloads.cast(pa.string())
    except pa.ArrowInvalid:
        raise Refused from None
    if not pc.all(_braced(texts), min_count=0).as_py():
        texts = pc.utf8_trim(texts, BLANKS)
        typed_text.check(_braced(texts))
    if pc.max(pc.binary_length(texts)).as_py() > 2 * MAX_DEPTH:
        openers = pc.add(pc.count_substring(texts, "["), pc.count_substring(texts, "{"))
        typed_text.check(pc.less_equal(openers, MAX_DEPTH))
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts), "\n")[0].as_buffer()
    data = memoryview(joined).tobytes()
    if b"\0" in data or ((b"NaN" in data or b"Inf" in data) and _NOT_A_NUMBER.search(data)):
        raise Refused
    return joined


def _braced(texts: pa.Array) -> pa.Array:
    return pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))


def _refused_row(error: str, lines: pa.Buffer) -> int | None:
    """The first row that may have caused Arrow's error."""
    row, text = _ROW.search(error), _TEXT.search(error)
    if row is not None:
        return int(row[1])
    if text is None:
        return None
    data = memoryview(lines).tobytes()
    token = re.search(rb"[^\w.+-]" + re.escape((text[1] or text[2]).encode()) + rb"[^\w.+-]", data)
    return data.count(b"\n", 0, token.start()) if token is not None else None


@contextmanager
def _rows_unknown() -> Iterator[None]:
    """Drop the row of `Refused`: nested rows are not payloads."""
    try:
        yield
    except Refused:
        raise Refused from None


def _places(values: pa.Array) -> pa.Array:
    """The index of each non-NULL value among the non-NULL values."""
    there = values.is_valid()
    places = pc.subtract(pc.cumulative_sum(there.cast(pa.int32())), 1)
    return pc.if_else(there, places, pa.scalar(None, pa.int32()))


def _one_chunk(column: Any) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _is_slow(kind: pa.DataType) -> bool:
    """Whether Arrow cannot read JSON values to a type."""
    if is_variant(kind) or pa.types.is_map(kind):
        return True
    if pa.types.is_struct(kind):
        return any(_is_slow(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_list(kind)) and _is_slow(kind.value_type)
