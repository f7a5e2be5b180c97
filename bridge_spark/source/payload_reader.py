"""The source's columns that are parsed from payloads and topics.

A message becomes rows whose `reason` is NULL, or one row whose `reason` says why `value` is NULL; a Sparkplug payload with
valid and invalid metrics becomes both.  A schema with `value` must have `reason`, so rejected payloads cannot go unnoticed.

A user's schema may have, beside the columns of the message:

| column | type | |
|---|---|---|
| value | struct<...>, with `number` a number type | the parsed payload; NOT NULL fields must be present |
| | with `json` also variant | the payload as it is, whatever its fields |
| reason | string | why the payload could not be parsed, else NULL; required with `value` |
| rejected | binary | the payload if there is a `reason`, else NULL |
| extra | map<string,string> | JSON: the fields that are not in `value`, as JSON text; see `JsonParser` for structs |
| item | int | index of the row within its payload, from 0 |
| a level of `topicPattern` | string | |

`(partition, offset, item)` identifies a row.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from bridge_spark.source import json_payloads, sparkplug, typed_text
from bridge_spark.source.avro_payloads import AvroParser
from bridge_spark.source.avro_schemas import AvroSchemas
from bridge_spark.source.batch_bytes import pieces, row_bytes
from bridge_spark.source.json_payloads import JsonParser, VariantParser
from bridge_spark.source.payload_options import TOPICS, TOPICS_FILE, PayloadOptions
from bridge_spark.source.protobuf_payloads import ProtobufParser
from bridge_spark.source.row_parser import Parsed, RowParser
from bridge_spark.source.schema_files import UnusableSchema
from bridge_spark.source.spark_types import first_unread, is_geospatial, is_variant, type_name
from bridge_spark.source.sparkplug import SparkplugParser
from bridge_spark.source.text_payloads import CsvParser, NumberParser
from bridge_spark.source.topic_levels import TopicPattern
from bridge_spark.source.topic_parsers import TopicParsers

_NAMES = {"json": "JSON", "csv": "CSV", "sparkplug": "Sparkplug", "avro": "Avro", "protobuf": "Protobuf", "topics": "formats by topic"}
_TYPES = {
    "reason": pa.string(),
    "rejected": pa.binary(),
    "extra": json_payloads.EXTRA_TYPE,
    "item": pa.int32(),
}
PAYLOAD_COLUMNS = ("value", *_TYPES)
PARSED_BYTES = 4 * 1024 * 1024  # of payloads parsed at once, unless one is larger
ROWS_BYTES = 16 * 1024 * 1024


class PayloadSchemaError(ValueError):
    """A schema that payloads cannot fill; the message is a sentence."""


class PayloadReader:
    """Converts batches of messages to batches of ``schema``.  Raises `PayloadSchemaError`."""

    def __init__(self, schema: pa.Schema, options: PayloadOptions | None, pattern: TopicPattern | None) -> None:
        self.schema = schema
        self._pattern = pattern
        levels = pattern.names if pattern is not None else ()
        asked = [field for field in schema if field.name in (*PAYLOAD_COLUMNS, *levels)]
        self._made = {field.name for field in asked}
        self._parser: RowParser | TopicParsers | None = None
        if self._made & set(PAYLOAD_COLUMNS):
            if options is None:
                raise PayloadSchemaError(f"column {asked[0].name!r} needs the option 'payloadFormat'")
            self._parser = _checked_parser(schema, options)
        elif options is not None:
            raise PayloadSchemaError("the option 'payloadFormat' needs a schema with the columns 'value' and 'reason'")
        for field in asked:
            wanted = pa.string() if field.name in levels else _TYPES.get(field.name, field.type)
            if field.type != wanted:
                raise PayloadSchemaError(f"column {field.name!r} is {type_name(wanted)}, not {type_name(field.type)}")
        fields = [field for field in schema if field.name not in self._made]
        by_topic = isinstance(self._parser, TopicParsers) or bool(self._made.intersection(levels))
        needed = ("payload",) * (self._parser is not None) + ("topic",) * by_topic
        kinds = {"payload": pa.binary(), "topic": pa.string()}
        self.message_schema = pa.schema(fields + [pa.field(name, kinds[name]) for name in needed if name not in schema.names])
        """The columns of the messages that are needed."""

    def rows(self, messages: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of ``messages``, a batch of `message_schema`.

        Parsing takes a multiple of the payloads' bytes, and each row of a payload repeats the columns of its message.
        So few payloads are parsed at once, and a batch has at most `ROWS_BYTES` of repeated columns, or one row.
        """
        if self._parser is None:
            yield self._batch(self._message_columns(messages))
            return
        for start, end in pieces(row_bytes([messages.column("payload")], len(messages)), PARSED_BYTES):
            yield from self._parsed_rows(self._parser, messages.slice(start, end - start))

    def _parsed_rows(self, parser: RowParser | TopicParsers, messages: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        payloads = messages.column("payload")
        parsed = parser.parse(messages.column("topic"), payloads) if isinstance(parser, TopicParsers) else parser.parse(payloads)
        given, made = self._message_columns(messages), self._payload_columns(payloads, parsed)
        if parsed.payloads is None:
            yield self._batch({**given, **made})
            return
        sizes = row_bytes(given.values(), len(messages))[parsed.payloads.to_numpy()]
        for start, end in pieces(sizes, ROWS_BYTES):
            places = parsed.payloads.slice(start, end - start)
            yield self._batch(
                {
                    **{name: column.take(places) for name, column in given.items()},
                    **{name: column.slice(start, end - start) for name, column in made.items()},
                }
            )

    def _batch(self, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([columns[field.name] for field in self.schema], schema=self.schema)

    def _message_columns(self, messages: pa.RecordBatch) -> dict[str, pa.Array]:
        """The columns with the same value in all rows of a message."""
        found = {field.name: messages.column(field.name) for field in self.schema if field.name not in self._made}
        if self._pattern is not None and self._made.intersection(self._pattern.names):
            found |= _level_columns(self._pattern, messages.column("topic"))
        return found

    def _payload_columns(self, payloads: pa.Array, parsed: Parsed) -> dict[str, pa.Array]:
        made = {"value": parsed.values, "reason": parsed.reasons}
        if "extra" in self._made:
            made["value"], made["extra"] = _without_extra(parsed.values, self.schema.field("value").type)
        if "rejected" in self._made:
            places = pa.array(range(len(payloads)), pa.int32()) if parsed.payloads is None else parsed.payloads
            made["rejected"] = payloads.take(pc.if_else(parsed.reasons.is_valid(), places, pa.scalar(None, pa.int32())))
        if "item" in self._made:
            made["item"] = _items(parsed, len(payloads))
        return made


def _checked_parser(schema: pa.Schema, options: PayloadOptions) -> RowParser | TopicParsers:
    if "value" not in schema.names or "reason" not in schema.names:
        raise PayloadSchemaError("the columns 'value' and 'reason' must be asked for together")
    kind = schema.field("value").type
    extra = "extra" in schema.names
    if extra and options.format != "json":
        raise PayloadSchemaError("the column 'extra' is for JSON only")
    if options.format == "json" and is_variant(kind) and not extra:
        return VariantParser(options.explode)
    if options.format != "number" and (not pa.types.is_struct(kind) or not kind.num_fields or is_variant(kind) or is_geospatial(kind)):
        raise PayloadSchemaError(f"column 'value' must be a struct for {_NAMES[options.format]}, not {type_name(kind)}")
    return _topic_parsers(kind, options) if options.format == TOPICS else _parser(kind, options, extra)


def _topic_parsers(kind: pa.StructType, options: PayloadOptions) -> TopicParsers:
    place = f"option 'payloadSchemaDirectory': {os.path.join(options.directory, TOPICS_FILE)!r}"
    fields = [kind.field(number) for number in range(kind.num_fields)]
    absent = {field.name for field in fields}
    parsers = []
    for topic_filter, own in options.topics:
        where = f'{place}: ["{topic_filter}"]'
        filled = _filled_fields(own)
        present = [field for field in fields if filled is None or field.name in filled]
        if not present:
            raise PayloadSchemaError(f"{where}: fills no field of 'value', which has {', '.join(sorted(absent))}")
        for field in fields:
            if field not in present and not field.nullable:
                raise PayloadSchemaError(f"{where}: has no field {field.name!r}, which is NOT NULL")
        absent -= {field.name for field in present}
        try:
            parsers.append((topic_filter, _parser(pa.struct(present), own, False)))
        except PayloadSchemaError as error:
            raise PayloadSchemaError(f"{where}: {error}") from None
    for name in sorted(absent):
        raise PayloadSchemaError(f"{place}: no topic filter has a field {name!r}")
    return TopicParsers(kind, parsers)


def _filled_fields(options: PayloadOptions) -> Collection[str] | None:
    """The names of the fields that a format can fill; None for any."""
    if options.format == "number":
        return (options.field or "value",)
    if options.format == "sparkplug":
        return sparkplug.FIELDS
    if options.format == "csv":
        return options.header
    return None if options.schemas is None else options.schemas.field_names()


def _parser(kind: pa.DataType, options: PayloadOptions, extra: bool) -> RowParser:
    """Parses payloads of one format to ``kind``, and to the column `extra`."""
    fields = [kind.field(number) for number in range(kind.num_fields)] if pa.types.is_struct(kind) else []
    for field in fields:
        unread = _unread(field, options.format)
        if unread is not None:
            raise PayloadSchemaError(f"field {unread[0]!r} of 'value' cannot be {type_name(unread[1])} in {_NAMES[options.format]}")
    if options.format == "number":
        return _number_parser(kind)
    if options.format == "sparkplug":
        return _sparkplug_parser(kind)
    if options.schemas is not None:
        return _schema_parser(kind, options)
    if options.format == "json":
        return JsonParser(kind, options.timestamps, options.explode, extra)
    for field in fields:
        if options.header is not None and options.header.count(field.name) != 1:
            raise PayloadSchemaError(f"the option 'payloadHeader' names no field {field.name!r}, or names it twice")
    return CsvParser(kind, options.delimiter, options.quote, options.header, options.explode)


def _is_read_from_json(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return bool(pa.types.is_string(kind.key_type))
    return is_variant(kind) or typed_text.is_supported(kind)


def _is_plain(kind: pa.DataType) -> bool:
    return not is_variant(kind) and not is_geospatial(kind)


_IS_READ = {"json": _is_read_from_json, "avro": _is_plain, "protobuf": _is_plain}
"""Which types a format with nested values can be read to; Avro and Protobuf then have rules for each of their types."""


def _unread(field: pa.Field, format: str) -> tuple[str, pa.DataType] | None:
    """The path and type of the first value within ``field`` that cannot be read from a format; None if there is none."""
    if format == "csv":
        return None if typed_text.is_supported(field.type) else (field.name, field.type)
    return first_unread(field.type, field.name, _IS_READ[format]) if format in _IS_READ else None


def _number_parser(kind: pa.DataType) -> NumberParser:
    number = kind.field(0).type if pa.types.is_struct(kind) and kind.num_fields == 1 else kind
    types = pa.types
    if not (types.is_signed_integer(number) or types.is_floating(number) or types.is_decimal(number)):
        raise PayloadSchemaError(f"column 'value' must be of a number type, not {type_name(kind)}")
    return NumberParser(kind)


def _sparkplug_parser(kind: pa.StructType) -> SparkplugParser:
    for number in range(kind.num_fields):
        field = kind.field(number)
        if sparkplug.FIELDS.get(field.name) != field.type:
            known = ", ".join(f"{name} {type_name(type)}" for name, type in sparkplug.FIELDS.items())
            raise PayloadSchemaError(f"field {field.name!r} {type_name(field.type)} of 'value' is none of Sparkplug's {known}")
    return SparkplugParser(kind)


def _schema_parser(kind: pa.StructType, options: PayloadOptions) -> RowParser:
    schemas = options.schemas
    assert schemas is not None
    try:
        if isinstance(schemas, AvroSchemas):
            return AvroParser(kind, schemas)
        return ProtobufParser(kind, schemas, options.timestamps)
    except UnusableSchema as error:
        name = "payloadSchemaFile" if schemas.by_id is None else "payloadSchemaDirectory"
        raise PayloadSchemaError(f"option '{name}': {schemas.place!r}: {error}") from None


def _level_columns(pattern: TopicPattern, topics: pa.Array) -> dict[str, pa.Array]:
    distinct = topics.dictionary_encode()
    levels = list(zip(*map(pattern.split, distinct.dictionary.to_pylist()))) or [()] * len(pattern.names)
    return {name: pa.array(values, pa.string()).take(distinct.indices) for name, values in zip(pattern.names, levels)}


def _without_extra(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """Split off `EXTRA`, the last field of ``values``."""
    *fields, extra = values.flatten()
    bare = pa.StructArray.from_arrays(fields, fields=[kind.field(number) for number in range(kind.num_fields)], mask=values.is_null())
    return bare, extra


def _items(parsed: Parsed, count: int) -> pa.Array:
    if parsed.payloads is None:
        return pa.repeat(pa.scalar(0, pa.int32()), count)
    numbers: list[int] = []
    last = None
    for payload in parsed.payloads.to_pylist():
        numbers.append(numbers[-1] + 1 if payload == last else 0)
        last = payload
    return pa.array(numbers, pa.int32())
