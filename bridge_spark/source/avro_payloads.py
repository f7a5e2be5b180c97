"""Parses Avro payloads (Avro 1.12, binary encoding): one record per payload, with fastavro.

| Avro | fills |
|---|---|
| boolean; int; long | boolean; int, long, double; long |
| float; double | float, double; double |
| string, enum, uuid of a string | string |
| bytes, fixed | binary |
| date | date, int |
| timestamp-millis, -micros, -nanos (cut to microseconds) | timestamp, long |
| local-timestamp-millis, -micros, -nanos | timestamp_ntz, long |
| decimal | a decimal that holds each of its values, binary |
| record, array, map | struct, array, map with string keys |
| union of null and one type | that type, with NULL |
| union of int and long, of float and double | long, double |
| other unions | struct<member0, member1, ...>: one field per type except null; one of them is filled |
| null | any type, with NULL |

A logical type that is not in the table is its Avro type.  Fields are matched by their exact name; fields that are not
in the schema of the table are ignored.  A payload must end with its record.  Floats may be infinite or NaN, as sent.
The last of equal keys of a map counts.  fastavro takes an index of -1 in a union for its last type.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from decimal import Context, Decimal
from functools import partial
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.source.avro_schemas import MAX_DEPTH, AvroSchemas
from bridge_spark.source.fitting_schemas import use_one, use_some
from bridge_spark.source.registry_header import HEADER, id_in_header
from bridge_spark.source.row_parser import PORTION, BadPayload, Refused, RowParser
from bridge_spark.source.schema_files import UnusableSchema
from bridge_spark.source.spark_types import type_name

MAX_TYPES = 10_000
"""Most types of a schema, with each use of a named type counted."""

_PRIMITIVE = frozenset(("null", "boolean", "int", "long", "float", "double", "string", "bytes"))
_TYPES = _PRIMITIVE | {"fixed", "enum", "array", "map", "record", "error"}
_UNITS = {"millis": (1000, 1), "micros": (1, 1), "nanos": (1, 1000)}
"""Factor and divisor from a unit to microseconds."""
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31
_DAY = 86_400_000_000
_DECIMALS = Context(prec=100)

_Convert = Callable[[Any], Any] | None
"""Converts a value of fastavro to one of Arrow; None if they are the same."""


class AvroParser(RowParser):
    """Parses to ``type``, a struct.  Raises `UnusableSchema` if the schemas cannot fill it.

    With the schemas of a registry, payloads of a schema that cannot fill ``type`` are dead letters, if another one can;
    a field that a schema does not have is NULL.
    """

    def __init__(self, type: pa.StructType, schemas: AvroSchemas) -> None:
        self.type = type
        self._schemas = schemas
        self._alone: _Reader | None = None
        self._by_id: dict[int, _Reader] = {}
        self._unusable: dict[int, str] = {}
        if schemas.by_id is None:
            self._alone = use_one(schemas.alone, partial(_Plan, type=type)).reader()
        else:
            plans, self._unusable = use_some(schemas.by_id, partial(_Plan, type=type))
            self._by_id = {number: plan.reader() for number, plan in plans.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return AvroParser, (self.type, self._schemas)

    def one(self, payload: bytes) -> list[Any]:
        return [self._row(payload)]

    def fast(self, payloads: pa.Array) -> pa.Array:
        if len(payloads) > PORTION:
            raise Refused
        rows: list[Any] = []
        try:
            rows.extend(map(self._row, payloads.to_pylist()))
        except BadPayload:
            raise Refused(len(rows)) from None
        return pa.array(rows, self.type)

    def _row(self, payload: bytes) -> Any:
        if not payload:
            raise BadPayload("empty payload")
        if self._alone is not None:
            return self._alone.row(io.BytesIO(payload), len(payload))
        number = id_in_header(payload)
        reader = self._by_id.get(number)
        if reader is None:
            raise BadPayload(f"schema {number} {self._unusable.get(number, 'is unknown')}")
        file = io.BytesIO(payload)
        file.seek(HEADER)
        return reader.row(file, len(payload))


class _Reader:
    """Reads records of one schema."""

    def __init__(self, schema: Any, convert: _Convert) -> None:
        from fastavro import parse_schema, schemaless_reader

        self._schema = parse_schema(schema)
        self._decode: Any = schemaless_reader
        self._convert = convert

    def row(self, file: io.BytesIO, end: int) -> Any:
        """The record at the position of ``file``, which must end at ``end``; raises `BadPayload`."""
        try:
            value = self._decode(file, self._schema, None)
        except EOFError:
            raise BadPayload("the Avro record is incomplete") from None
        except UnicodeDecodeError:
            raise BadPayload("not UTF-8") from None
        except IndexError:  # of the list of a union, or of the bytes of a number that is cut off
            at_end = file.tell() == end
            raise BadPayload(
                "the Avro record is incomplete or has an unknown type in a union" if at_end else "an unknown type in a union"
            ) from None
        except Exception:
            raise BadPayload("not an Avro record of the schema") from None
        if file.tell() != end:
            raise BadPayload("bytes after the Avro record")
        return value if self._convert is None else self._convert(value)


class _Plan:
    """Prepares one schema for one Arrow type.

    fastavro gets a schema of the same encoding without logical types and defaults, in which each use of a named type
    is a type of its own.  Each type of a union becomes a record with one field, which is encoded as that field.
    """

    def __init__(self, schema: Any, type: pa.StructType) -> None:
        self.present: set[str] = set()
        self.absent: set[str] = set()
        self._named: dict[str, Any] = {}
        self._open: list[str] = []
        self._count = 0
        self._depth = 0
        if not isinstance(schema, dict) or schema["type"] not in ("record", "error"):
            raise UnusableSchema("the schema is not that of a record")
        self._schema, self._convert = self._field(schema, pa.field("", type, False), "")

    def reader(self) -> _Reader:
        return _Reader(self._schema, self._convert)

    def _field(self, schema: Any, field: pa.Field | None, where: str) -> tuple[Any, _Convert]:
        """The schema for fastavro and the conversion for ``field``; None: the value is not used."""
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > MAX_TYPES:
            raise UnusableSchema(f"a schema has at most {MAX_DEPTH} levels and {MAX_TYPES:,} types")
        name = schema if isinstance(schema, str) else schema.get("name", "") if isinstance(schema, dict) else ""
        schema = self._named.get(name, schema) if isinstance(schema, str) else schema
        if isinstance(schema, dict) and "name" in schema:
            if name in self._open:
                raise UnusableSchema(f"type {name!r} contains itself, for which Spark has no type")
            self._named[name] = schema
            self._open.append(name)
            found = self._type(schema, field, where)
            self._open.pop()
        else:
            found = self._type(schema, field, where)
        self._depth -= 1
        return found

    def _type(self, schema: Any, field: pa.Field | None, where: str) -> tuple[Any, _Convert]:
        if isinstance(schema, list):
            return self._union(schema, field, where)
        kind = None if field is None else field.type
        if isinstance(schema, str):
            schema = {"type": schema}
        name = schema["type"]
        if not isinstance(name, str) or name not in _TYPES:
            raise UnusableSchema(f"field {where!r} has the unknown type {name!r}")
        if name in ("record", "error"):
            return self._record(schema, kind, where)
        if name == "array":
            if kind is not None and not pa.types.is_list(kind):
                raise _unfit(schema, kind, where)
            item = None if kind is None else kind.value_field
            inner, convert = self._field(schema["items"], item, where + "[]")
            if not _least_size(inner):
                raise UnusableSchema(f"field {where!r} is an array of items without bytes, whose number has no bound")
            return {"type": "array", "items": inner}, _of_items(_required(convert, item, inner, where + "[]"))
        if name == "map":
            if kind is not None and not (pa.types.is_map(kind) and pa.types.is_string(kind.key_type)):
                raise _unfit(schema, kind, where)
            item = None if kind is None else kind.item_field
            inner, convert = self._field(schema["values"], item, where + "{}")
            convert = _required(convert, item, inner, where + "{}")
            return {"type": "map", "values": inner}, None if kind is None else _of_entries(convert)
        plain: Any = name
        if name == "fixed":
            if not _is_count(schema.get("size")):
                raise UnusableSchema(f"field {where!r} has the size {schema.get('size')!r}")
            plain = {"type": "fixed", "name": self._name(), "size": schema["size"]}
        elif name == "enum":
            plain = "int"
        return plain, None if kind is None else _scalar(schema, kind, where)

    def _name(self) -> str:
        return f"T{self._count}"

    def _record(self, schema: Any, kind: Any, where: str) -> tuple[Any, _Convert]:
        record: dict[str, Any] = {"type": "record", "name": self._name()}
        wanted = {}
        if kind is not None:
            if not pa.types.is_struct(kind):
                raise _unfit(schema, kind, where)
            wanted = {kind.field(number).name: kind.field(number) for number in range(kind.num_fields)}
        prefix = where + "." if where else ""
        fields, steps = [], []
        for item in schema["fields"]:
            name = item["name"]
            field = wanted.pop(name, None)
            inner, convert = self._field(item["type"], field, prefix + name)
            fields.append({"name": name, "type": inner})
            convert = _required(convert, field, inner, prefix + name)
            if convert is not None:
                steps.append((name, convert))
            if field is not None:
                self.present.add(prefix + name)
        for name, field in wanted.items():
            self.absent.add(prefix + name)
            if not field.nullable:
                steps.append((name, _missing(prefix + name)))
        record["fields"] = fields
        return record, _of_fields(steps) if steps else None

    def _union(self, schema: list[Any], field: pa.Field | None, where: str) -> tuple[Any, _Convert]:
        branches = [branch for branch in schema if _is_not_null(branch)]
        kind = None if field is None else field.type
        if not branches:
            return schema, None
        plain = {_primitive(branch) for branch in branches}
        if len(branches) == 1 or plain in ({"int", "long"}, {"float", "double"}):
            widest = branches[0] if len(branches) == 1 else "long" if "long" in plain else "double"
            inner, convert = self._field(widest, field, where)
            union = [inner if len(branches) == 1 and _is_not_null(branch) else _primitive(branch) for branch in schema]
            return union, _or_null(convert)
        if kind is not None:
            names = [f"member{number}" for number in range(len(branches))]
            given = [kind.field(number).name for number in range(kind.num_fields)] if pa.types.is_struct(kind) else []
            if given != names:
                raise UnusableSchema(f"field {where!r} is a union, which fills struct<{', '.join(names)}>, not {type_name(kind)}")
        union, steps = [], {}
        number = 0
        for branch in schema:
            if not _is_not_null(branch):
                union.append("null")
                continue
            member = f"member{number}"
            name = f"U{self._count}"
            part = None if kind is None else kind.field(number).with_nullable(True)
            inner_schema, convert = self._field(branch, part, f"{where}.{member}")
            union.append({"type": "record", "name": name, "fields": [{"name": member, "type": inner_schema}]})
            if convert is not None:
                steps[member] = convert
            number += 1
        return union, _or_null(_of_member(steps)) if steps else None


def _primitive(schema: Any) -> str:
    """The name of a primitive type without logical type, else an empty text."""
    if isinstance(schema, dict):
        schema = "" if "logicalType" in schema or "name" in schema else schema["type"]
    return schema if isinstance(schema, str) and schema in _PRIMITIVE else ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_not_null(branch: Any) -> bool:
    return _primitive(branch) != "null"


def _unfit(schema: Any, kind: Any, where: str) -> UnusableSchema:
    logical = schema.get("logicalType")
    name = f"{schema['type']} ({logical})" if isinstance(logical, str) else schema["type"]
    return UnusableSchema(f"field {where!r} is Avro's {name}, which cannot fill {type_name(kind)}")


def _least_size(schema: Any) -> int:
    """Least number of bytes of a value, 1 for any but 0."""
    if isinstance(schema, dict) and schema["type"] == "record":
        return max((_least_size(field["type"]) for field in schema["fields"]), default=0)
    if isinstance(schema, dict) and schema["type"] == "fixed":
        return min(int(schema["size"]), 1)
    return int(schema != "null")


# -- conversions --------------------------------------------------------------


def _scalar(schema: Any, kind: Any, where: str) -> _Convert:
    types, name, logical = pa.types, schema["type"], schema.get("logicalType")
    if name == "null":
        return None
    if name == "enum" and types.is_string(kind):
        return _of_symbols(schema["symbols"], where)
    if logical == "date" and name == "int" and types.is_date32(kind):
        return _in_range(_FIRST_DAY, _LAST_DAY, 1, 1, where)
    if name == "long" and isinstance(logical, str) and types.is_timestamp(kind):
        local, unit = logical.startswith("local-timestamp-"), logical.rpartition("timestamp-")[2]
        known = unit in _UNITS and logical in (f"timestamp-{unit}", f"local-timestamp-{unit}")
        if known and local == (kind.tz is None):
            factor, divisor = _UNITS[unit]
            return _in_range(_FIRST_DAY * _DAY, (_LAST_DAY + 1) * _DAY - 1, factor, divisor, where)
    if logical == "decimal" and name in ("bytes", "fixed") and types.is_decimal(kind):
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        if not _is_count(precision) or not _is_count(scale) or not scale <= precision:
            raise UnusableSchema(f"field {where!r} is a decimal with precision {precision!r} and scale {scale!r}")
        if kind.scale >= scale and kind.precision - kind.scale >= precision - scale:
            return _of_unscaled(precision, scale, where)
    fits = (
        types.is_boolean(kind)
        if name == "boolean"
        else types.is_int32(kind) or types.is_int64(kind) or types.is_float64(kind)
        if name == "int"
        else types.is_int64(kind)
        if name == "long"
        else types.is_float32(kind) or types.is_float64(kind)
        if name == "float"
        else types.is_float64(kind)
        if name == "double"
        else types.is_string(kind)
        if name == "string"
        else types.is_binary(kind) and name in ("bytes", "fixed")
    )
    if not fits:
        raise _unfit(schema, kind, where)
    return _int(where) if name == "int" else None


def _required(convert: _Convert, field: pa.Field | None, schema: Any, where: str) -> _Convert:
    """``convert`` with a check for NULL where the schema allows it and ``field`` does not."""
    if field is None or field.nullable or not (schema == "null" or (isinstance(schema, list) and "null" in schema)):
        return convert

    def present(value: Any) -> Any:
        if value is None:
            raise BadPayload(f"field '{where}' is missing")
        return value if convert is None else convert(value)

    return present


def _missing(where: str) -> Callable[[Any], Any]:
    def refuse(value: Any) -> Any:
        raise BadPayload(f"field '{where}' is missing")

    return refuse


def _or_null(convert: _Convert) -> _Convert:
    if convert is None:
        return None
    change = convert
    return lambda value: None if value is None else change(value)


def _of_fields(steps: list[tuple[str, Callable[[Any], Any]]]) -> Callable[[Any], Any]:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        for name, convert in steps:
            record[name] = convert(record.get(name))
        return record

    return change


def _of_member(steps: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        for name in record:
            if name in steps:
                record[name] = steps[name](record[name])
        return record

    return change


def _of_items(convert: _Convert) -> _Convert:
    if convert is None:
        return None
    change = convert
    return lambda items: [change(item) for item in items]


def _of_entries(convert: _Convert) -> Callable[[Any], Any]:
    if convert is None:
        return lambda entries: list(entries.items())
    change = convert
    return lambda entries: [(key, change(value)) for key, value in entries.items()]


def _of_symbols(symbols: list[str], where: str) -> Callable[[Any], Any]:
    names = dict(enumerate(symbols))

    def symbol(index: int) -> str:
        name = names.get(index)
        if name is None:
            raise BadPayload(f"field '{where}' is no symbol of its enum")
        return name

    return symbol


def _int(where: str) -> Callable[[Any], Any]:
    def number(value: int) -> int:
        if not -0x80000000 <= value <= 0x7FFFFFFF:
            raise BadPayload(f"field '{where}' does not fit 32 bits")
        return value

    return number


def _in_range(least: int, most: int, factor: int, divisor: int, where: str) -> Callable[[Any], Any]:
    def number(value: int) -> int:
        value = value * factor // divisor
        if not least <= value <= most:
            raise BadPayload(f"field '{where}' is out of range")
        return value

    return number


def _of_unscaled(precision: int, scale: int, where: str) -> Callable[[Any], Any]:
    limit = 10**precision

    def number(value: bytes) -> Decimal:
        unscaled = int.from_bytes(value, "big", signed=True)
        if not -limit < unscaled < limit:
            raise BadPayload(f"field '{where}' does not fit decimal({precision},{scale})")
        return Decimal(unscaled).scaleb(-scale, _DECIMALS)

    return number
