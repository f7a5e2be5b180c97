"""Parses Protobuf payloads (proto2, proto3 and editions): one message per payload, with the package protobuf.

| Protobuf | fills |
|---|---|
| int32, sint32, sfixed32 | int, long, double |
| int64, sint64, sfixed64 | long, a decimal of 19 digits |
| uint32, fixed32 | long, double, int if it fits, a decimal of 10 digits |
| uint64, fixed64 | a decimal of 20 digits, long if it fits |
| any of these | timestamp, with the option `payloadTimestamps` |
| float; double | float, double; double |
| bool; bytes | boolean; binary |
| string | string |
| enum | string (the name; of an unknown value UNKNOWN_ENUM_VALUE_<type>_<number>), int |
| repeated, map | array, map |
| message | struct, or string: its JSON text |
| google.protobuf.Timestamp, Duration | also timestamp, interval day to second; cut to microseconds |
| google.protobuf.DoubleValue and other wrappers | also as the type that they wrap |

Fields are matched by their exact name; fields that are not in the schema of the table are ignored.  A field with
presence (optional, oneof, message) is NULL if it is absent and has no default; one without has its default value, as the
language says.  Entries of a map are in the order of the keys.  A payload without a required field of proto2, or with a
string that is not UTF-8, is a dead letter, and so is an empty payload, which clears a retained message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from operator import attrgetter, methodcaller
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from bridge_spark.source import typed_text
from bridge_spark.source.fitting_schemas import use_one, use_some
from bridge_spark.source.json_payloads import UNITS
from bridge_spark.source.protobuf_schemas import MessageType, ProtobufSchemas, message_type
from bridge_spark.source.registry_header import HEADER, id_in_header
from bridge_spark.source.row_parser import PORTION, BadPayload, Parsed, Refused, RowParser
from bridge_spark.source.schema_files import UnusableSchema
from bridge_spark.source.spark_types import type_name

_WRAPPERS = frozenset(
    f"google.protobuf.{name}Value" for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_TIMESTAMP, _DURATION = "google.protobuf.Timestamp", "google.protobuf.Duration"
_MOST_SECONDS = 315_576_000_000
"""Of a Duration, in both directions."""
_MAX_PASSES = 16
"""Most times that a group of payloads is parsed again without those that are known to be bad."""
_MAX_PATH = 64
"""Most indexes in the registry's header: levels of nested types."""

_Convert = Callable[[list[Any]], pa.Array]
"""Converts values of one field, None for NULL; raises `_BadRow`."""


class _BadRow(Exception):
    """The value at ``row`` makes its payload a dead letter; ``rows`` has the reasons of this and of further rows."""

    def __init__(self, row: int, reason: str, rows: dict[int, str] | None = None) -> None:
        super().__init__(row, reason)
        self.row = row
        self.reason = reason
        self.rows = rows or {row: reason}


class ProtobufParser(RowParser):
    """Parses to ``type``, a struct.  ``timestamps`` is one of `UNITS`, or None.

    Raises `UnusableSchema` if the schemas cannot fill it.  With the schemas of a registry, payloads of a schema that
    cannot fill ``type`` are dead letters, if another one can; a field that a schema does not have is NULL.
    """

    def __init__(self, type: pa.StructType, schemas: ProtobufSchemas, timestamps: str | None = None) -> None:
        self.type = type
        self._schemas = schemas
        self._timestamps = timestamps
        self._alone: _Reader | None = None
        self._by_id: dict[int, _Reader] = {}
        self._unusable: dict[int, str] = {}

        def use(data: bytes) -> _Reader:
            return _Reader(message_type(data, schemas.message), type, timestamps)

        if schemas.by_id is None:
            assert schemas.alone is not None
            self._alone = use_one(schemas.alone, use)
        else:
            self._by_id, self._unusable = use_some(schemas.by_id, use)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProtobufParser, (self.type, self._schemas, self._timestamps)

    def parse(self, payloads: pa.Array) -> Parsed:
        """As in `RowParser`, but the cost depends little on the share of dead letters."""
        found = [self._portion(payloads.slice(start, PORTION)) for start in range(0, len(payloads), PORTION)]
        if not found:
            return super().parse(payloads)
        values, reasons, _ = zip(*found)
        return Parsed(pa.concat_arrays(values), pa.concat_arrays(reasons), None)

    def _portion(self, payloads: pa.Array) -> Parsed:
        given = payloads.to_pylist()
        reasons: list[str | None] = [None] * len(given)
        good = list(range(len(given)))
        for _ in range(_MAX_PASSES):
            try:
                values = self._values([given[row] for row in good])
            except _BadRow as bad:
                for row, reason in bad.rows.items():
                    reasons[good[row]] = reason
                good = [place for row, place in enumerate(good) if row not in bad.rows]
                continue
            if len(good) < len(given):
                numbers = iter(range(len(good)))
                values = values.take(pa.array([None if reason else next(numbers) for reason in reasons], pa.int32()))
            return Parsed(values, pa.array(reasons, pa.string()), None)
        return super().parse(payloads)

    def one(self, payload: bytes) -> list[Any]:
        try:
            return [self._values([payload])[0].as_py()]
        except _BadRow as bad:
            raise BadPayload(bad.reason) from None

    def fast(self, payloads: pa.Array) -> pa.Array:
        if len(payloads) > PORTION:
            raise Refused
        try:
            return self._values(payloads.to_pylist())
        except _BadRow as bad:
            raise Refused(bad.row) from None

    def _values(self, payloads: list[bytes]) -> pa.Array:
        if self._alone is not None:
            return self._alone.values(payloads, payloads)
        rows: dict[int, list[int]] = {}
        for row, payload in enumerate(payloads):
            try:
                number = id_in_header(payload)
            except BadPayload as bad:
                raise _BadRow(row, str(bad)) from None
            rows.setdefault(number, []).append(row)
        pieces = []
        for number, places in rows.items():
            reader = self._by_id.get(number)
            if reader is None:
                raise _BadRow(places[0], f"schema {number} {self._unusable.get(number, 'is unknown')}")
            own = payloads if len(rows) == 1 else [payloads[row] for row in places]
            try:
                pieces.append(reader.values(own, reader.without_header(own)))
            except _BadRow as bad:
                raise _BadRow(places[bad.row], bad.reason) from None
        if len(pieces) == 1:
            return pieces[0]
        order = {row: place for place, row in enumerate(chain.from_iterable(rows.values()))}
        return pa.concat_arrays(pieces).take(pa.array([order[row] for row in range(len(payloads))]))


class _Reader:
    """Reads messages of one type to a struct.  Raises `UnusableSchema` if it cannot fill ``kind``.

    ``present`` and ``absent`` are the fields of ``kind`` that the type has and has not.
    """

    def __init__(self, message: MessageType, kind: pa.StructType, timestamps: str | None) -> None:
        plan = _Plan(message.pool, timestamps)
        descriptor = message.new.DESCRIPTOR
        self._convert = plan.struct(descriptor, kind, "")
        self.present, self.absent = plan.present, plan.absent
        self._decode: Callable[[bytes], Any] = message.new.FromString
        self._checks_required = _has_required(descriptor, set())
        self._name = descriptor.full_name
        self._paths = {_encoded_path(path): name for path, name in message.paths.items()}
        self._path = None if message.path is None else _encoded_path(message.path)

    def without_header(self, payloads: list[bytes]) -> list[bytes]:
        """Payloads without the registry's header, which names the message by its path; raises `_BadRow`."""
        path = self._path
        if path is not None:
            end = HEADER + len(path)
            found = [payload[end:] for payload in payloads if payload[HEADER:end] == path]
            if len(found) == len(payloads):
                return found
        return [self._without_header(row, payload) for row, payload in enumerate(payloads)]

    def _without_header(self, row: int, payload: bytes) -> bytes:
        position, numbers = _zigzags(payload, HEADER)
        if position < 0:
            raise _BadRow(row, "no message index after the schema id")
        path = _encoded_path(numbers)
        if path != self._path:
            raise _BadRow(row, f"message {self._paths[path]!r}, not {self._name!r}" if path in self._paths else "an unknown message index")
        return payload[position:]

    def values(self, payloads: list[bytes], messages: list[bytes]) -> pa.Array:
        """``messages`` are ``payloads`` without their header; raises `_BadRow`."""
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        if not all(payloads):
            raise _BadRow(payloads.index(b""), "empty payload")
        found: list[Any] = []
        bad: dict[int, str] = {}
        rest = iter(messages)
        while len(found) < len(messages):
            try:
                found.extend(map(self._decode, rest))
            except DecodeError:
                bad[len(found)] = "not a Protobuf message of the schema"
                found.append(None)
        if bad:
            raise _BadRow(*next(iter(bad.items())), bad)
        if self._checks_required and not all(map(methodcaller("IsInitialized"), found)):
            row = next(row for row, message in enumerate(found) if not message.IsInitialized())
            name = found[row].FindInitializationErrors()[0].rpartition(".")[2]
            raise _BadRow(row, f"the required field {name!r} is missing")
        return self._convert(found)


class _Plan:
    """Makes the conversions of one message type to one Arrow type."""

    def __init__(self, pool: Any, timestamps: str | None) -> None:
        self.present: set[str] = set()
        self.absent: set[str] = set()
        self._pool = pool
        self._timestamps = timestamps

    def struct(self, descriptor: Any, kind: pa.StructType, where: str) -> _Convert:
        """Converts messages, of which none is None."""
        prefix = where + "." if where else ""
        fields = [kind.field(number) for number in range(kind.num_fields)]
        columns: list[_Convert] = []
        for field in fields:
            name = prefix + field.name
            found = descriptor.fields_by_name.get(field.name)
            if found is None:
                self.absent.add(name)
                columns.append(_Absent(field, name))
                continue
            self.present.add(name)
            columns.append(self._field(found, field, name))
        return lambda messages: pa.StructArray.from_arrays([column(messages) for column in columns], fields=fields)

    def _field(self, found: Any, field: pa.Field, where: str) -> _Convert:
        kind = field.type
        if _is_map(found):
            if not pa.types.is_map(kind):
                raise _unfit(found, kind, where)
            key, item = (found.message_type.fields_by_name[name] for name in ("key", "value"))
            keys, items = self._value(key, kind.key_type, where), self._value(item, kind.item_type, where + "{}")
            return _Entries(found.name, kind, keys, items, where)
        if found.is_repeated:
            if not pa.types.is_list(kind):
                raise _unfit(found, kind, where)
            return _Items(found.name, kind, self._value(found, kind.value_type, where + "[]"))
        return _Single(found, field, self._value(found, kind, where), where)

    def _value(self, found: Any, kind: pa.DataType, where: str) -> _Convert:
        types = pa.types
        if found.message_type is not None:
            return self._message(found, kind, where)
        if found.enum_type is not None:
            if types.is_string(kind):
                return _Names(found.enum_type)
            if types.is_int32(kind):
                return lambda values: pa.array(values, kind)
            raise _unfit(found, kind, where)
        name = _kind_name(found)
        if name in _WHOLE:
            bits, signed = _WHOLE[name]
            return self._whole(found, kind, bits, signed, where)
        if name == "string" and types.is_string(kind):
            return lambda values: _texts(values, where)
        fits = (
            types.is_float32(kind) or types.is_float64(kind)
            if name == "float"
            else types.is_float64(kind)
            if name == "double"
            else types.is_boolean(kind)
            if name == "bool"
            else types.is_binary(kind) and name == "bytes"
        )
        if not fits:
            raise _unfit(found, kind, where)
        return lambda values: pa.array(values, kind)

    def _whole(self, found: Any, kind: pa.DataType, bits: int, signed: bool, where: str) -> _Convert:
        types = pa.types
        if types.is_timestamp(kind) and kind.tz is not None:
            if self._timestamps is None:
                raise UnusableSchema(
                    f"field {where!r} is {_kind_name(found)}, which fills {type_name(kind)} only with the option 'payloadTimestamps'"
                )
            return _Instants(UNITS[self._timestamps], kind, signed, where)
        digits = {32: 10, 64: 19 if signed else 20}[bits]
        decimal = types.is_decimal128(kind) and kind.scale >= 0 and kind.precision - kind.scale >= digits
        if types.is_int32(kind) and bits == 32 or types.is_int64(kind):
            if signed or kind.bit_width > bits:
                return lambda values: pa.array(values, kind)
            return _Narrow(kind, where)
        if decimal or types.is_float64(kind) and bits == 32:
            sent = pa.int64() if signed or bits == 32 else pa.uint64()
            return lambda values: pa.array(values, sent).cast(kind)
        raise _unfit(found, kind, where)

    def _message(self, found: Any, kind: pa.DataType, where: str) -> _Convert:
        types, descriptor = pa.types, found.message_type
        if descriptor.full_name == _TIMESTAMP and types.is_timestamp(kind) and kind.tz is not None:
            return _Seconds(kind, typed_text.FIRST_US // 1_000_000, typed_text.LAST_US // 1_000_000, where, False)
        if descriptor.full_name == _DURATION and types.is_duration(kind):
            return _Seconds(kind, -_MOST_SECONDS, _MOST_SECONDS, where, True)
        if types.is_string(kind) and descriptor.full_name != "google.protobuf.StringValue":
            return _JsonTexts(self._pool, where)
        if descriptor.full_name in _WRAPPERS and not types.is_struct(kind):
            return _Wrapped(self._value(descriptor.fields_by_name["value"], kind, where))
        if not types.is_struct(kind):
            raise _unfit(found, kind, where)
        return _Messages(self.struct(descriptor, kind, where), kind)


# -- fields of messages -------------------------------------------------------


class _Absent:
    """A field that the message type does not have."""

    def __init__(self, field: pa.Field, where: str) -> None:
        self._field = field
        self._where = where

    def __call__(self, messages: list[Any]) -> pa.Array:
        if messages and not self._field.nullable:
            raise _BadRow(0, f"field '{self._where}' is missing")
        return pa.nulls(len(messages), self._field.type)


class _Single:
    """A field that is not repeated."""

    def __init__(self, found: Any, field: pa.Field, convert: _Convert, where: str) -> None:
        self._get = attrgetter(found.name)
        self._is_present = methodcaller("HasField", found.name) if _can_be_null(found) else None
        self._required = not field.nullable
        self._convert = convert
        self._where = where

    def __call__(self, messages: list[Any]) -> pa.Array:
        values = list(map(self._get, messages))
        if self._is_present is not None:
            present = list(map(self._is_present, messages))
            if not all(present):
                if self._required:
                    reason = f"field '{self._where}' is missing"
                    bad = {row: reason for row, given in enumerate(present) if not given}
                    raise _BadRow(min(bad), reason, bad)
                values = [value if given else None for value, given in zip(values, present)]
        return self._convert(values)


class _Items:
    """A repeated field."""

    def __init__(self, name: str, kind: pa.ListType, convert: _Convert) -> None:
        self._get = attrgetter(name)
        self._kind = kind
        self._convert = convert

    def __call__(self, messages: list[Any]) -> pa.Array:
        lists = list(map(self._get, messages))
        offsets = _offsets(lists)
        items = _in_rows(offsets, self._convert, list(chain.from_iterable(lists)))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, type=self._kind)


class _Entries:
    """A map field."""

    def __init__(self, name: str, kind: pa.MapType, keys: _Convert, items: _Convert, where: str) -> None:
        self._get = attrgetter(name)
        self._kind = kind
        self._keys = keys
        self._items = items
        self._where = where

    def __call__(self, messages: list[Any]) -> pa.Array:
        maps = list(map(self._get, messages))
        try:
            sorted_keys = list(map(sorted, maps))
            items = [entries[key] for entries, keys in zip(maps, sorted_keys) for key in keys]
        except (TypeError, UnicodeError):  # as in `_texts`
            row = next(row for row, entries in enumerate(maps) if any(isinstance(key, bytes) for key in entries))
            raise _BadRow(row, f"field '{self._where}' is not UTF-8") from None
        offsets = _offsets(sorted_keys)
        return pa.MapArray.from_arrays(
            pa.array(offsets, pa.int32()),
            _in_rows(offsets, self._keys, list(chain.from_iterable(sorted_keys))),
            _in_rows(offsets, self._items, items),
            type=self._kind,
        )


def _offsets(parts: Iterable[Sequence[Any]]) -> list[int]:
    return list(accumulate(map(len, parts), initial=0))


def _in_rows(offsets: list[int], convert: _Convert, values: list[Any]) -> pa.Array:
    """Convert the values of all rows; a `_BadRow` is that of the row."""
    try:
        return convert(values)
    except _BadRow as bad:
        row = next(row for row, end in enumerate(offsets[1:]) if bad.row < end)
        raise _BadRow(row, bad.reason) from None


# -- values -------------------------------------------------------------------


class _Messages:
    """Messages, to a struct."""

    def __init__(self, convert: _Convert, kind: pa.StructType) -> None:
        self._convert = convert
        self._kind = kind

    def __call__(self, values: list[Any]) -> pa.Array:
        places = [place for place, value in enumerate(values) if value is not None]
        if len(places) == len(values):
            return self._convert(values)
        try:
            found = self._convert([values[place] for place in places])
        except _BadRow as bad:
            raise _BadRow(places[bad.row], bad.reason) from None
        numbers = iter(range(len(places)))
        return found.take(pa.array([None if value is None else next(numbers) for value in values], pa.int32()))


class _Wrapped:
    """Messages such as `DoubleValue`, to the type that they wrap."""

    def __init__(self, convert: _Convert) -> None:
        self._convert = convert

    def __call__(self, values: list[Any]) -> pa.Array:
        return self._convert([None if value is None else value.value for value in values])


class _JsonTexts:
    """Messages, to JSON text."""

    def __init__(self, pool: Any, where: str) -> None:
        self._pool = pool
        self._where = where

    def __call__(self, values: list[Any]) -> pa.Array:
        from google.protobuf.json_format import MessageToJson  # type: ignore[import-untyped]

        texts: list[str | None] = []
        for row, value in enumerate(values):
            try:
                texts.append(
                    None
                    if value is None
                    else MessageToJson(value, preserving_proto_field_name=True, indent=None, sort_keys=True, descriptor_pool=self._pool)
                )
            except Exception:  # also TypeError for an Any of an unknown type, ValueError for times out of range
                raise _BadRow(row, f"field '{self._where}' has no JSON text") from None
        return _texts(texts, self._where)


class _Names:
    """Values of an enum, to their names."""

    def __init__(self, enum: Any) -> None:
        self._names = {number: value.name for number, value in enum.values_by_number.items()}
        self._unknown = f"UNKNOWN_ENUM_VALUE_{enum.name}_"

    def __call__(self, values: list[Any]) -> pa.Array:
        encoded = pa.array(values, pa.int32()).dictionary_encode()
        names = [self._names.get(number) or f"{self._unknown}{number}" for number in encoded.dictionary.to_pylist()]
        return pa.array(names, pa.string()).take(encoded.indices)


class _Seconds:
    """Timestamps and durations, to microseconds."""

    def __init__(self, kind: pa.DataType, least: int, most: int, where: str, negative_nanos: bool) -> None:
        self._kind = kind
        self._least = least
        self._most = most
        self._where = where
        self._least_nanos = -999_999_999 if negative_nanos else 0

    def __call__(self, values: list[Any]) -> pa.Array:
        seconds = pa.array([None if value is None else value.seconds for value in values], pa.int64())
        nanos = pa.array([None if value is None else value.nanos for value in values], pa.int64())
        reason = f"field '{self._where}' is out of range"
        _check_range(seconds, self._least, self._most, reason)
        _check_range(nanos, self._least_nanos, 999_999_999, reason)
        return pc.add(pc.multiply(seconds, 1_000_000), pc.divide(nanos, 1000)).cast(self._kind)


class _Instants:
    """Whole numbers since the epoch, to timestamps."""

    def __init__(self, factor: int, kind: pa.DataType, signed: bool, where: str) -> None:
        self._factor = factor
        self._kind = kind
        self._sent = pa.int64() if signed else pa.uint64()
        self._where = where

    def __call__(self, values: list[Any]) -> pa.Array:
        numbers = pa.array(values, self._sent)
        least = typed_text.FIRST_US // self._factor if pa.types.is_signed_integer(self._sent) else 0
        _check_range(numbers, least, typed_text.LAST_US // self._factor, f"field '{self._where}' is out of range")
        return pc.multiply(numbers.cast(pa.int64()), self._factor).cast(self._kind)


class _Narrow:
    """Whole numbers without sign, to a type of as many bits with sign."""

    def __init__(self, kind: pa.DataType, where: str) -> None:
        self._kind = kind
        self._where = where

    def __call__(self, values: list[Any]) -> pa.Array:
        numbers = pa.array(values, pa.uint64())
        most = (1 << self._kind.bit_width - 1) - 1
        _check_range(numbers, 0, most, f"field '{self._where}' does not fit {self._kind.bit_width} bits with sign")
        return numbers.cast(self._kind)


def _check_range(numbers: pa.Array, least: int, most: int, reason: str) -> None:
    """Raise `_BadRow` for the first number out of range; NULL is in range."""
    if not len(numbers) or numbers.null_count == len(numbers):
        return
    extremes = pc.min_max(numbers)
    if extremes["min"].as_py() < least or extremes["max"].as_py() > most:
        row = next(row for row, number in enumerate(numbers.to_pylist()) if number is not None and not least <= number <= most)
        raise _BadRow(row, reason)


def _texts(values: list[Any], where: str) -> pa.Array:
    """Strings; those of proto2, which are not checked when a message is decoded, are bytes if they are not UTF-8."""
    try:
        return pa.array(values, pa.string())
    except (pa.ArrowException, UnicodeError):
        row = next((row for row, value in enumerate(values) if isinstance(value, bytes)), 0)
        raise _BadRow(row, f"field '{where}' is not UTF-8") from None


# -- descriptors --------------------------------------------------------------

_WHOLE = {
    "int32": (32, True),
    "sint32": (32, True),
    "sfixed32": (32, True),
    "uint32": (32, False),
    "fixed32": (32, False),
    "int64": (64, True),
    "sint64": (64, True),
    "sfixed64": (64, True),
    "uint64": (64, False),
    "fixed64": (64, False),
}
"""Bits, and whether there is a sign."""


def _kind_name(found: Any) -> str:
    """The name of a field's type in a `.proto` file."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto  # type: ignore[import-untyped]

    return str(FieldDescriptorProto.Type.Name(found.type)).removeprefix("TYPE_").lower()


def _is_map(found: Any) -> bool:
    return found.message_type is not None and bool(found.message_type.GetOptions().map_entry)


def _can_be_null(found: Any) -> bool:
    return bool(found.has_presence) and not found.has_default_value


def _has_required(descriptor: Any, seen: set[str]) -> bool:
    """Whether the type, or one within it, has a required field."""
    if descriptor.full_name in seen:
        return False
    seen.add(descriptor.full_name)
    return any(
        field.is_required or (field.message_type is not None and _has_required(field.message_type, seen)) for field in descriptor.fields
    )


def _unfit(found: Any, kind: pa.DataType, where: str) -> UnusableSchema:
    named = found.message_type or found.enum_type
    name = "map" if _is_map(found) else named.full_name if named is not None else _kind_name(found)
    repeated = "repeated " if found.is_repeated and not _is_map(found) and not where.endswith("[]") else ""
    return UnusableSchema(f"field {where!r} is Protobuf's {repeated}{name}, which cannot fill {type_name(kind)}")


# -- the registry's message index ---------------------------------------------


def _encoded_path(path: tuple[int, ...]) -> bytes:
    """The number of indexes and the indexes, each as a zigzag varint; one 0 for the path 0, as most writers do."""
    if path == (0,):
        return b"\0"
    data = bytearray()
    for number in (len(path), *path):
        rest = number << 1
        while rest > 0x7F:
            data.append(rest & 0x7F | 0x80)
            rest >>= 7
        data.append(rest)
    return bytes(data)


def _zigzags(data: bytes, position: int) -> tuple[int, tuple[int, ...]]:
    """The position after a path, and the path; the position is negative for other data."""
    position, count = _zigzag(data, position)
    if position < 0 or not 0 <= count <= _MAX_PATH:
        return -1, ()
    numbers = []
    for _ in range(count):
        position, number = _zigzag(data, position)
        if position < 0 or number < 0:
            return -1, ()
        numbers.append(number)
    return position, tuple(numbers) or (0,)


def _zigzag(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while 0 <= position < len(data) and shift < 35:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return position, (value >> 1) ^ -(value & 1)
        shift += 7
    return -1, 0
