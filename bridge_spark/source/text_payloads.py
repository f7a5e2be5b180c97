"""Parses CSV payloads and plain numbers to rows.

`one` parses one payload by the rules below; `fast` parses many and refuses them unless the result is the same.

| payload | result |
|---|---|
| CSV: a record | a row; fields by position, named by `header` or the schema |
| another number of fields, unclosed quotes | a dead letter |
| an empty field | NULL; a dead letter if the field is NOT NULL |
| a field | a value as in `typed_text`; surrounding blanks are ignored unless it is a string |
| several lines | a dead letter; with `explode` a row per non-empty line, or a dead letter if one is invalid |
| number: text of a number | a row of one value; surrounding blanks are ignored |
| empty or blank, invalid UTF-8 | a dead letter |

One byte order mark and trailing newlines are ignored.
"""

from __future__ import annotations

import csv
import io
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from bridge_spark.source import typed_text
from bridge_spark.source.row_parser import BadPayload, Refused, RowParser

_BLANKS = " \t"
_NEWLINES = "\r\n"
# The limit of module csv is global and 128 KiB by default; a payload has at most 256 MiB.
csv.field_size_limit(max(csv.field_size_limit(), 1 << 28))


class CsvParser(RowParser):
    """Parses to ``type``, a struct.  ``header`` names all fields of a record; None: the fields of ``type``."""

    def __init__(
        self,
        type: pa.StructType,
        delimiter: str = ",",
        quote: str = '"',
        header: tuple[str, ...] | None = None,
        explode: bool = False,
    ) -> None:
        self.type = type
        self._fields = [type.field(number) for number in range(type.num_fields)]
        names = header or tuple(field.name for field in self._fields)
        self._count = len(names)
        self._places = [names.index(field.name) for field in self._fields]
        self._delimiter = delimiter
        self._quote = quote
        self._explode = explode

    def one(self, payload: bytes) -> list[Any]:
        text = _text(payload).rstrip(_NEWLINES)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter, quotechar=self._quote, strict=True)
        try:
            records = [record for record in lines if record]
        except csv.Error:
            raise BadPayload("not CSV") from None
        if len(records) > 1 and not self._explode:
            raise BadPayload("more than one line")
        return [self._row(record) for record in records]

    def fast(self, payloads: pa.Array) -> pa.Array:
        texts = pc.utf8_rtrim(_texts(payloads), _NEWLINES)
        special = pc.or_(pc.match_substring(texts, self._quote), pc.match_substring_regex(texts, "[\r\n]"))
        if pc.any(special).as_py():
            raise Refused
        records = pc.split_pattern(texts, self._delimiter)
        if not pc.all(pc.equal(pc.list_value_length(records), self._count)).as_py():
            raise Refused
        columns = [self._column(pc.list_element(records, place), field) for place, field in zip(self._places, self._fields)]
        return pa.StructArray.from_arrays(columns, fields=self._fields)

    def _row(self, record: list[str]) -> dict[str, Any]:
        if len(record) != self._count:
            raise BadPayload(f"{len(record)} fields, not {self._count}")
        row = {}
        for place, field in zip(self._places, self._fields):
            text = record[place] if pa.types.is_string(field.type) else record[place].strip(_BLANKS)
            if not text and not field.nullable:
                raise BadPayload(f"field '{field.name}' is missing")
            try:
                row[field.name] = typed_text.value_of(text, field.type) if text else None
            except BadPayload as bad:
                raise BadPayload(f"field '{field.name}' {bad}") from None
        return row

    def _column(self, texts: pa.Array, field: pa.Field) -> pa.Array:
        trimmed = texts if pa.types.is_string(field.type) else pc.utf8_trim(texts, _BLANKS)
        empty = pc.equal(trimmed, "")
        if pc.any(empty).as_py():
            if not field.nullable:
                raise Refused
            trimmed = pc.if_else(empty, pa.scalar(None, pa.string()), trimmed)
        return typed_text.column_of(trimmed, field.type)


class NumberParser(RowParser):
    """Parses to ``type``, a number type or a struct of one number."""

    def __init__(self, type: pa.DataType) -> None:
        self.type = type
        self._field = type.field(0) if pa.types.is_struct(type) else None
        self._kind = type if self._field is None else self._field.type

    def one(self, payload: bytes) -> list[Any]:
        try:
            value = typed_text.value_of(_text(payload).strip(_BLANKS + _NEWLINES), self._kind)
        except BadPayload as bad:
            raise BadPayload(str(bad).replace("is not a ", "not a ")) from None
        return [value if self._field is None else {self._field.name: value}]

    def fast(self, payloads: pa.Array) -> pa.Array:
        column = typed_text.column_of(pc.utf8_trim(_texts(payloads), _BLANKS + _NEWLINES), self._kind)
        return column if self._field is None else pa.StructArray.from_arrays([column], fields=[self._field])


def _text(payload: bytes) -> str:
    try:
        text = payload.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise BadPayload("not UTF-8") from None
    if not text.strip(_BLANKS + _NEWLINES):
        raise BadPayload("empty payload")
    return text


def _texts(payloads: pa.Array) -> pa.Array:
    """The payloads as strings; raises `Refused` if one is blank or has a byte order mark."""
    try:
        texts = payloads.cast(pa.string())
    except pa.ArrowInvalid:
        raise Refused from None
    odd = pc.or_(pc.equal(pc.utf8_trim(texts, _BLANKS + _NEWLINES), ""), pc.starts_with(texts, "\ufeff"))
    if pc.any(odd).as_py():
        raise Refused
    return texts
