"""The rows of a batch as PUBLISH packets without packet identifiers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    VarcharType,
)

from bridge_spark.sink.errors import SinkError
from bridge_spark.sink.options import SinkOptions
from bridge_spark.sink.packets import field, varint
from topic_matcher.filters import has_wildcard

MAX_BYTES = 65535  # of a string or of binary data in a packet
MAX_EXPIRY = (1 << 32) - 1  # seconds

_TEXT = (StringType, VarcharType, CharType)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
# Control characters and noncharacters, which a broker may refuse (MQTT 5.0, section 1.5.4).
_REFUSED = re.compile(
    "[\0-\x1f\x7f-\x9f\ufdd0-\ufdef" + "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(17)) + "]"
)
_VARINTS = [varint(number) for number in range(4096)]
_LENGTHS = [number.to_bytes(2, "big") for number in range(20)]

PRODUCER, NUMBER = b"producer-id", b"seq"


class _Column(NamedTuple):
    """The accepted types of a column, and their description."""

    types: tuple[type[DataType], ...]
    description: str


COLUMNS = {
    "topic": _Column(_TEXT, "string"),
    "payload": _Column((*_TEXT, BinaryType), "string or binary"),
    "qos": _Column(_WHOLE, "a whole number"),
    "retain": _Column((BooleanType,), "boolean"),
    "message_expiry": _Column(_WHOLE, "a whole number of seconds"),
    "content_type": _Column(_TEXT, "string"),
    "response_topic": _Column(_TEXT, "string"),
    "correlation_data": _Column((*_TEXT, BinaryType), "string or binary"),
    "user_properties": _Column((MapType, ArrayType), "map<string,string> or array<struct<key:string,value:string>>"),
}
# Columns that are properties of MQTT 5.0, with their identifiers, in the order of the packet.
PROPERTIES = {
    "message_expiry": 0x02,
    "content_type": 0x03,
    "response_topic": 0x08,
    "correlation_data": 0x09,
    "user_properties": 0x26,
}

Row = tuple[bytes, int, bytes, bytes]
"""Topic with its length, first byte of the packet, properties without their length, and payload."""


class Packet(NamedTuple):
    """A PUBLISH: ``head`` before and ``tail`` after the packet identifier; ``row`` is its number in the partition."""

    head: bytes
    tail: bytes
    row: int
    qos: int

    @property
    def size(self) -> int:
        return len(self.head) + len(self.tail) + (2 if self.qos else 0)


def check_schema(schema: StructType, options: SinkOptions) -> None:
    """Raise `SinkError` for columns that cannot be written."""
    types = {column.name: column.dataType for column in schema.fields}
    for name, kind in types.items():
        known = COLUMNS.get(name)
        if known is None:
            similar = difflib.get_close_matches(name, COLUMNS, 1, 0.75)
            hint = f"did you mean '{similar[0]}'?" if similar else f"the columns of the sink are {', '.join(COLUMNS)}"
            raise SinkError(f"column '{name}': unknown, {hint}")
        if not isinstance(kind, known.types) or not _are_pairs(kind):
            hint = ": convert it, for example with to_json or CAST" if name == "payload" else ""
            raise SinkError(f"column '{name}': {kind.simpleString()}, not {known.description}{hint}")
        if name in PROPERTIES and options.version != 5:
            raise SinkError(f"column '{name}': MQTT 3.1.1 has no properties: set 'protocolVersion' to 5")
    if "topic" not in types and options.topic is None:
        raise SinkError("column 'topic': missing, and there is no option 'topic'")
    if "payload" not in types:
        raise SinkError("column 'payload': missing")


def _are_pairs(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, _TEXT) and isinstance(kind.valueType, _TEXT)
    if isinstance(kind, ArrayType):
        pair = kind.elementType
        return (
            isinstance(pair, StructType)
            and pair.fieldNames() == ["key", "value"]
            and all(isinstance(each.dataType, _TEXT) for each in pair.fields)
        )
    return True


class RowReader:
    """Reads rows from Arrow batches; errors name the partition and the row."""

    def __init__(self, options: SinkOptions, partition: int) -> None:
        self._options = options
        self._partition = partition
        self._first_row = 0  # of the batch

    def read(self, batch: pa.RecordBatch) -> list[Row]:
        """The rows of a batch; raises `SinkError` for a value that cannot be published."""
        names = batch.schema.names
        columns = dict(zip(names, batch.columns))
        count = batch.num_rows
        rows = list(
            zip(
                self._topics(columns.get("topic"), count),
                self._first_bytes(columns.get("qos"), columns.get("retain"), count),
                self._properties([(name, columns[name]) for name in PROPERTIES if name in columns], count),
                _bytes(columns["payload"]),
            )
        )
        self._first_row += count
        return rows

    def _refuse(self, column: str, index: int, reason: str) -> NoReturn:
        raise SinkError(f"column '{column}': {reason} (partition {self._partition}, row {self._first_row + index})")

    def _topics(self, column: pa.Array | None, count: int) -> Sequence[bytes]:
        if self._options.topic is not None:
            return [field(self._options.topic.encode())] * count
        assert column is not None
        if column.null_count:
            self._refuse("topic", column.is_null().index(True).as_py(), "NULL")
        encoded = column.dictionary_encode()
        indices = encoded.indices.to_pylist()
        known: list[bytes] = []
        for position, topic in enumerate(encoded.dictionary.to_pylist()):
            reason = unusable_topic(topic)
            if reason is not None:
                self._refuse("topic", indices.index(position), f"{topic[:100]!r} {reason}")
            known.append(field(topic.encode()))
        return [known[index] for index in indices]

    def _first_bytes(self, qos: pa.Array | None, retain: pa.Array | None, count: int) -> Sequence[int]:
        options = self._options
        levels = [options.qos] * count if qos is None else qos.to_pylist()
        flags = [options.retain] * count if retain is None else retain.to_pylist()
        found: list[int] = []
        for index, (level, flag) in enumerate(zip(levels, flags)):
            if level is None:
                level = options.qos
            elif not 0 <= level <= 2:
                self._refuse("qos", index, f"{level} is not 0, 1 or 2")
            found.append(0x30 | level << 1 | (options.retain if flag is None else flag))
        return found

    def _properties(self, columns: list[tuple[str, pa.Array]], count: int) -> Sequence[bytes]:
        if not columns:
            return [b""] * count
        found = [b""] * count
        for name, column in columns:
            identifier = bytes((PROPERTIES[name],))
            for index, value in enumerate(column.to_pylist()):
                if value is not None:
                    found[index] += b"".join(self._property(name, identifier, index, value))
        return found

    def _property(self, name: str, identifier: bytes, index: int, value: Any) -> Iterator[bytes]:
        if name == "message_expiry":
            if not 0 <= value <= MAX_EXPIRY:
                self._refuse(name, index, f"{value} is not a number of seconds from 0 to {MAX_EXPIRY}")
            yield identifier + value.to_bytes(4, "big")
        elif name == "user_properties":
            for pair in value:
                pair = tuple(pair.values()) if isinstance(pair, dict) else pair
                if pair is None or None in pair:
                    self._refuse(name, index, "a name or value is NULL")
                yield identifier + self._field(name, index, pair[0]) + self._field(name, index, pair[1])
        else:
            if name == "response_topic":
                reason = unusable_topic(value)
                if reason is not None:
                    self._refuse(name, index, f"{value[:100]!r} {reason}")
            yield identifier + self._field(name, index, value)

    def _field(self, name: str, index: int, value: str | bytes) -> bytes:
        if isinstance(value, str):
            reason = _unusable_text(value)
            if reason is not None:
                self._refuse(name, index, f"{value[:100]!r} {reason}")
            value = value.encode()
        if len(value) > MAX_BYTES:
            self._refuse(name, index, f"{len(value)} bytes are more than {MAX_BYTES}")
        return field(value)


def unusable_topic(topic: str) -> str | None:
    """Why a topic cannot be published to; None if it can."""
    if not topic:
        return "is empty"
    if has_wildcard(topic):
        return "has a wildcard: '+' and '#' are for subscriptions"
    size = len(topic.encode())
    if size > MAX_BYTES:
        return f"has {size} bytes, more than {MAX_BYTES}"
    return _unusable_text(topic)


def _unusable_text(text: str) -> str | None:
    if text.isprintable():
        return None
    found = _REFUSED.search(text)
    return None if found is None else f"has the control character U+{ord(found[0]):04X}"


def _bytes(column: pa.Array) -> list[bytes]:
    """The values as bytes, NULL as none."""
    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.view(pa.large_binary())
    values = column.to_pylist()
    return [value or b"" for value in values] if column.null_count else values


class PacketEncoder:
    """Encodes rows for one protocol version; with a ``producer`` each packet has its number as user property."""

    def __init__(self, version: int, producer: str | None) -> None:
        self._version = version
        self._numbered = b""
        if producer is not None:
            self._numbered = b"\x26" + field(PRODUCER) + field(producer.encode()) + b"\x26" + field(NUMBER)

    def encode(self, rows: Sequence[Row], number: int) -> list[Packet]:
        """The packets of rows whose first has this number."""
        numbered, has_properties = self._numbered, self._version == 5
        packets: list[Packet] = []
        for topic, first, properties, payload in rows:
            tail = payload
            if has_properties:
                if numbered:
                    digits = b"%d" % number
                    properties = numbered + _LENGTHS[len(digits)] + digits + properties
                tail = _length(len(properties)) + properties + payload
            qos = (first >> 1) & 3
            head = bytes((first,)) + _length(len(topic) + len(tail) + (2 if qos else 0)) + topic
            packets.append(Packet(head, tail, number, qos))
            number += 1
        return packets


def _length(length: int) -> bytes:
    return _VARINTS[length] if length < 4096 else varint(length)
