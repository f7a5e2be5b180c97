"""Rows of a stream as Arrow columns.

Columns are zero-copy views of the segment's bytes.  Columns that are not requested are not read.  Only MQTT 5.0
properties are decoded in Python, once per distinct value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, cached_property, reduce
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from bridge_spark.log.predicates import Bounds, Predicate
from bridge_spark.log.record_batch import QOS_MASK, RETAIN_FLAG, Batch, Columns
from topic_matcher.filters import matches

SCHEMA_DDL = (
    "topic string, payload binary, qos byte, retain boolean, partition int, offset long, timestamp timestamp, "
    "client_id string, content_type string, response_topic string, correlation_data binary, "
    "user_properties map<string,string>, stream string"
)

_PROPERTY_COLUMNS = frozenset({"content_type", "response_topic", "correlation_data", "user_properties", "user_property_list"})
_ABSENT: dict[str, list[Any]] = {"user_properties": [], "user_property_list": []}
_SHARED_OFFSETS = 65_536
STORED_TYPES = {
    "timestamp": pa.timestamp("us", tz="UTC"),
    "flags": pa.uint8(),
    "topic": pa.string(),
    "payload": pa.binary(),
    "client_id": pa.string(),
    "properties": pa.binary(),
}


class PropertyError(ValueError):
    """Malformed properties of a PUBLISH packet."""


class Properties:
    """The properties of one PUBLISH that have columns; None if absent."""

    __slots__ = ("content_type", "response_topic", "correlation_data", "user_properties")

    def __init__(self) -> None:
        self.content_type: str | None = None
        self.response_topic: str | None = None
        self.correlation_data: bytes | None = None
        self.user_properties: list[tuple[str, str]] = []


def decode_properties(data: bytes) -> Properties:
    """Decode the properties of a PUBLISH, stored without their length (MQTT 5.0, section 3.3.2.3).

    Raises `PropertyError`.
    """
    properties = Properties()
    position = 0
    try:
        while position < len(data):
            identifier = data[position]
            position += 1
            if identifier == 0x01:
                position += 1
            elif identifier == 0x03:
                value, position = _binary(data, position)
                properties.content_type = value.decode()
            elif identifier == 0x08:
                value, position = _binary(data, position)
                properties.response_topic = value.decode()
            elif identifier == 0x09:
                properties.correlation_data, position = _binary(data, position)
            elif identifier == 0x26:
                name, position = _binary(data, position)
                value, position = _binary(data, position)
                properties.user_properties.append((name.decode(), value.decode()))
            else:
                raise PropertyError(f"unknown property 0x{identifier:02x}")
    except (IndexError, UnicodeDecodeError):
        raise PropertyError("malformed properties") from None
    if position != len(data):
        raise PropertyError("malformed properties")
    return properties


def _binary(data: bytes, position: int) -> tuple[bytes, int]:
    end = position + 2 + (data[position] << 8 | data[position + 1])
    if end > len(data):
        raise PropertyError("malformed properties")
    return data[position + 2 : end], end


class ColumnBuilder:
    """Builds the Arrow columns of ``schema``, a selection of the source's columns, for rows of ``stream``.

    `select` keeps the rows that match ``topic_filter`` and ``predicate``.
    """

    def __init__(self, schema: pa.Schema, stream: str, topic_filter: str | None, predicate: Predicate = Predicate()) -> None:
        self._schema = schema
        self._stream = stream
        self._filter = topic_filter
        self.predicate = predicate
        self._matches: dict[str, bool] = {}
        self._by_topic = topic_filter is not None or not predicate.topic.unbounded
        self._names = [*self.stored_columns, "offset"]
        self._first_row_offset, self._row_offsets = 0, row_numbers(0)
        self._constants: dict[str, tuple[Any, pa.Array]] = {}

    @property
    def columns(self) -> frozenset[str]:
        """The source's columns that are read: those in the schema, and those that rows are selected by."""
        return frozenset((*self._schema.names, *self.predicate.columns, *(("topic",) if self._by_topic else ())))

    @cached_property
    def stored_columns(self) -> tuple[str, ...]:
        """The columns of a record batch that are needed for `columns`."""
        columns = self.columns
        stored: list[str] = [name for name in ("timestamp", "topic", "payload", "client_id") if name in columns]
        if columns & {"qos", "retain"}:
            stored.append("flags")
        if columns & _PROPERTY_COLUMNS:
            stored.append("properties")
        return tuple(stored)

    def view_batch(self, buffer: pa.Buffer, batch: Batch, columns: Columns, start: int, end: int) -> pa.RecordBatch:
        """The stored columns and offsets of a checked batch, from ``start`` up to ``end``, as views of ``buffer``."""
        arrays = []
        for name in self.stored_columns:
            data = buffer.slice(*getattr(columns, name))
            if name in ("timestamp", "flags"):
                buffers = [None, data]
            else:
                buffers = [None, buffer.slice(*getattr(columns, f"{name}_offsets")), data]
            arrays.append(pa.Array.from_buffers(STORED_TYPES[name], batch.count, buffers))
        arrays.append(self._offsets(batch.first_offset, batch.count))
        rows = pa.RecordBatch.from_arrays(arrays, names=self._names)
        first, last = max(start, batch.first_offset), min(end, batch.end_offset)
        return rows if last - first == batch.count else rows.slice(first - batch.first_offset, last - first)

    def _offsets(self, first: int, count: int) -> pa.Array:
        """``count`` offsets from ``first`` on.  Consecutive batches share one array."""
        skipped = first - self._first_row_offset
        if not 0 <= skipped <= len(self._row_offsets) - count:
            self._row_offsets = row_numbers(max(count, _SHARED_OFFSETS), first)
            self._first_row_offset, skipped = first, 0
        return self._row_offsets.slice(skipped, count)

    def select(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that match the topic filter and the predicate."""
        chosen = [_within(rows.column("offset"), self.predicate.offset)]
        if "timestamp" in self.predicate.columns:
            chosen.append(_within(rows.column("timestamp").cast(pa.int64()), self.predicate.timestamp))
        if self._by_topic:
            topics = rows.column("topic").dictionary_encode()
            matching = pa.array([self._topic_matches(topic) for topic in topics.dictionary.to_pylist()], pa.bool_())
            chosen.append(matching.take(topics.indices))
        masks = [mask for mask in chosen if mask is not None]
        return rows.filter(reduce(pc.and_, masks)) if masks else rows

    def build(self, rows: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        """All columns of the schema for ``rows`` of one partition.  Raises `PropertyError`."""
        columns: dict[str, pa.Array] = {name: rows.column(name) for name in rows.schema.names}
        count = rows.num_rows
        if "flags" in columns:
            columns["qos"] = pc.bit_wise_and(columns["flags"], pa.scalar(QOS_MASK, pa.uint8())).cast(pa.int8())
            columns["retain"] = pc.not_equal(
                pc.bit_wise_and(columns["flags"], pa.scalar(RETAIN_FLAG, pa.uint8())), pa.scalar(0, pa.uint8())
            )
        if "properties" in columns:
            columns.update(self._property_columns(columns["properties"]))
        for name, value in (("partition", partition), ("stream", self._stream)):
            if name in self._schema.names:
                columns[name] = self._constant(name, value, count)
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)

    def _topic_matches(self, topic: str) -> bool:
        known = self._matches.get(topic)
        if known is None:
            if len(self._matches) >= 100_000:
                self._matches.clear()
            known = self._matches[topic] = self.predicate.topic.contains(topic) and (self._filter is None or matches(self._filter, topic))
        return known

    def _constant(self, name: str, value: Any, count: int) -> pa.Array:
        """A column of ``count`` equal values.  All batches share one array."""
        known, array = self._constants.get(name, (None, None))
        if array is None or known != value or len(array) < count:
            one = pa.array([value], self._schema.field(name).type)
            array = one.take(_zeros(count))
            self._constants[name] = (value, array)
        return array.slice(0, count)

    def _property_columns(self, encoded: pa.Array) -> dict[str, pa.Array]:
        names = [name for name in self._schema.names if name in _PROPERTY_COLUMNS]
        if not pc.max(pc.binary_length(encoded)).as_py():
            return {name: self._constant(name, _ABSENT.get(name), len(encoded)) for name in names}
        distinct = encoded.dictionary_encode()
        decoded = [decode_properties(data) for data in distinct.dictionary.to_pylist()]
        return {name: self._property_column(name, decoded).take(distinct.indices) for name in names}

    def _property_column(self, name: str, decoded: Sequence[Properties]) -> pa.Array:
        values: Iterable[Any]
        if name == "user_properties":
            values = [list(dict(properties.user_properties).items()) for properties in decoded]
        elif name == "user_property_list":
            values = [[{"key": key, "value": value} for key, value in properties.user_properties] for properties in decoded]
        else:
            values = [getattr(properties, name) for properties in decoded]
        return pa.array(values, self._schema.field(name).type)


def _within(values: pa.Array, bounds: Bounds[int]) -> pa.Array | None:
    """A mask of the values within the bounds; None for all."""
    masks = []
    if bounds.first is not None:
        masks.append(pc.greater_equal(values, pa.scalar(bounds.first, pa.int64())))
    if bounds.end is not None:
        masks.append(pc.less(values, pa.scalar(bounds.end, pa.int64())))
    if bounds.among is not None:
        masks.append(pc.is_in(values, pa.array(bounds.among, pa.int64())))
    return reduce(pc.and_, masks) if masks else None


def row_numbers(count: int, first: int = 0) -> pa.Array:
    """``count`` numbers from ``first`` on."""
    return pc.add(_numbers(max(count, _SHARED_OFFSETS)).slice(0, count), pa.scalar(first, pa.int64()))


@cache
def _numbers(count: int) -> pa.Array:
    return pa.array(range(count), pa.int64())


def _zeros(count: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(bytes(4 * count))])
