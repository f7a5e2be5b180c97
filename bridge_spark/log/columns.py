"""Rows of a stream as Arrow columns.

The rule kept here: a value that is not asked for is not touched, and one that
is asked for is not copied one by one.  Columns are laid over the bytes of the
segment; only MQTT 5.0 properties are decoded in Python, once per distinct set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, cached_property, reduce
from typing import Any, Optional

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from bridge_spark.log.predicates import Bounds, Wanted
from bridge_spark.log.segment import QOS_MASK, RETAIN_FLAG, Batch, Columns
from topic_matcher.filters import matches

SCHEMA_DDL = (
    "topic string, payload binary, qos byte, retain boolean, partition int, offset long, timestamp timestamp, "
    "client_id string, content_type string, response_topic string, correlation_data binary, "
    "user_properties map<string,string>, stream string"
)
USER_PROPERTY_LIST_DDL = "user_property_list array<struct<key:string,value:string>>"

_PROPERTY_COLUMNS = frozenset(
    {"content_type", "response_topic", "correlation_data", "user_properties", "user_property_list"}
)
_ABSENT: dict[str, list[Any]] = {"user_properties": [], "user_property_list": []}
_RAMP = 65_536
STORED_TYPES = {
    "timestamp": pa.timestamp("us", tz="UTC"),
    "flags": pa.uint8(),
    "topic": pa.string(),
    "payload": pa.binary(),
    "client_id": pa.string(),
    "properties": pa.binary(),
}


class PropertyError(ValueError):
    """Bytes that are not the properties of a PUBLISH packet."""


class Properties:
    """The properties of one PUBLISH that have columns; None where absent."""

    __slots__ = ("content_type", "response_topic", "correlation_data", "user_properties")

    def __init__(self) -> None:
        self.content_type: Optional[str] = None
        self.response_topic: Optional[str] = None
        self.correlation_data: Optional[bytes] = None
        self.user_properties: list[tuple[str, str]] = []


def decode_properties(data: bytes) -> Properties:
    """Decode the stored properties of a PUBLISH, which stand without their
    length (MQTT 5.0, section 3.3.2.3); raises `PropertyError`."""
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
    return data[position + 2:end], end


class ColumnMaker:
    """Makes the columns of ``schema`` (a selection of the source's columns, as
    Spark wants it in Arrow) for rows of ``stream`` that match ``topic_filter``
    and are ``wanted``."""

    def __init__(
        self, schema: pa.Schema, stream: str, topic_filter: Optional[str], wanted: Wanted = Wanted()
    ) -> None:
        self._schema = schema
        self._stream = stream
        self._filter = topic_filter
        self.wanted = wanted
        self._matches: dict[str, bool] = {}
        self._by_topic = topic_filter is not None or not wanted.topic.everything
        self._names = [*self.stored, "offset"]
        self._ramp_first, self._ramp = 0, _ramp(0)
        self._constants: dict[str, tuple[Any, pa.Array]] = {}

    @property
    def columns(self) -> frozenset[str]:
        """The source's columns that are read: those asked for, and those that
        rows are chosen by."""
        return frozenset((*self._schema.names, *self.wanted.columns, *(("topic",) if self._by_topic else ())))

    @cached_property
    def stored(self) -> tuple[str, ...]:
        """The arrays of a batch of the log that these columns are made of."""
        columns = self.columns
        stored: list[str] = [name for name in ("timestamp", "topic", "payload", "client_id") if name in columns]
        if columns & {"qos", "retain"}:
            stored.append("flags")
        if columns & _PROPERTY_COLUMNS:
            stored.append("properties")
        return tuple(stored)

    def lay_over(self, buffer: pa.Buffer, batch: Batch, columns: Columns, start: int, end: int) -> pa.RecordBatch:
        """The stored columns that are needed, over the bytes of a checked
        batch, of its rows from offset ``start`` up to ``end``."""
        arrays = []
        for name in self.stored:
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
        """So many offsets from ``first`` on; batch after batch they are parts of one array."""
        skipped = first - self._ramp_first
        if not 0 <= skipped <= len(self._ramp) - count:
            self._ramp = pc.add(_ramp(max(count, _RAMP)), pa.scalar(first, pa.int64()))
            self._ramp_first, skipped = first, 0
        return self._ramp.slice(skipped, count)

    def select(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows whose topic matches the filter, and that are wanted."""
        chosen = [_within(rows.column("offset"), self.wanted.offset)]
        if "timestamp" in self.wanted.columns:
            chosen.append(_within(rows.column("timestamp").cast(pa.int64()), self.wanted.timestamp))
        if self._by_topic:
            topics = rows.column("topic").dictionary_encode()
            matching = pa.array([self._is_wanted(topic) for topic in topics.dictionary.to_pylist()], pa.bool_())
            chosen.append(matching.take(topics.indices))
        masks = [mask for mask in chosen if mask is not None]
        return rows.filter(reduce(pc.and_, masks)) if masks else rows

    def finish(self, rows: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        """All columns of the schema for ``rows`` of one partition.

        Raises `PropertyError`.
        """
        made: dict[str, pa.Array] = {name: rows.column(name) for name in rows.schema.names}
        count = rows.num_rows
        if "flags" in made:
            made["qos"] = pc.bit_wise_and(made["flags"], pa.scalar(QOS_MASK, pa.uint8())).cast(pa.int8())
            made["retain"] = pc.not_equal(
                pc.bit_wise_and(made["flags"], pa.scalar(RETAIN_FLAG, pa.uint8())), pa.scalar(0, pa.uint8()))
        if "properties" in made:
            made.update(self._property_columns(made["properties"]))
        for name, value in (("partition", partition), ("stream", self._stream)):
            if name in self._schema.names:
                made[name] = self._constant(name, value, count)
        return pa.RecordBatch.from_arrays([made[name] for name in self._schema.names], schema=self._schema)

    def _is_wanted(self, topic: str) -> bool:
        known = self._matches.get(topic)
        if known is None:
            if len(self._matches) >= 100_000:
                self._matches.clear()
            known = self._matches[topic] = (
                self.wanted.topic.holds(topic) and (self._filter is None or matches(self._filter, topic)))
        return known

    def _constant(self, name: str, value: Any, count: int) -> pa.Array:
        """``value`` in each of so many rows; one array serves all batches."""
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
            values = [[{"key": key, "value": value} for key, value in properties.user_properties]
                      for properties in decoded]
        else:
            values = [getattr(properties, name) for properties in decoded]
        return pa.array(values, self._schema.field(name).type)


def _within(values: pa.Array, bounds: Bounds[int]) -> Optional[pa.Array]:
    """Which of the values are inside; None for all."""
    masks = []
    if bounds.first is not None:
        masks.append(pc.greater_equal(values, pa.scalar(bounds.first, pa.int64())))
    if bounds.end is not None:
        masks.append(pc.less(values, pa.scalar(bounds.end, pa.int64())))
    if bounds.among is not None:
        masks.append(pc.is_in(values, pa.array(bounds.among, pa.int64())))
    return reduce(pc.and_, masks) if masks else None


@cache
def _ramp(count: int) -> pa.Array:
    """The numbers from 0 on, so many."""
    return pa.array(range(count), pa.int64())


def _zeros(count: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(bytes(4 * count))])
