"""Protobuf payloads: the parser returns the values that the package protobuf encodes; bad payloads and descriptor files are
one line each."""

from __future__ import annotations

import pickle
import re
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from support.ingest_jobs import parquet_rows
from support.payload_results import results
from support.protobuf import descriptor_set, message_class
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run
from bridge_spark.source.payload_options import PayloadOptionError, payload_options
from bridge_spark.source.payload_reader import PayloadReader, PayloadSchemaError
from bridge_spark.source.protobuf_payloads import ProtobufParser
from bridge_spark.source.protobuf_schemas import ProtobufSchemas, read_directory, read_file
from bridge_spark.source.schema_files import UnusableSchema
from bridge_spark.tables.config_section import ConfigError
from bridge_spark.tables.ingest_config import parse_config

pytestmark = pytest.mark.one_build

__all__ = ["spark"]

UTC = pa.timestamp("us", "UTC")
PROTO = """
syntax = "proto3";
package plant;
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";

message Reading {
  enum State { OFF = 0; ON = 1; BROKEN = -3; }
  message Part { int64 n = 1; State state = 2; Part next = 3; }
  double value = 1;
  optional float single = 2;
  int32 i32 = 3; sint64 s64 = 4; uint32 u32 = 5; fixed64 f64 = 6; uint64 u64 = 7;
  bool flag = 8; string text = 9; bytes raw = 10;
  State state = 11; repeated State states = 12;
  google.protobuf.Timestamp ts = 13; google.protobuf.Duration took = 14;
  google.protobuf.DoubleValue maybe = 15; google.protobuf.StringValue label = 16;
  google.protobuf.Struct more = 17;
  Part part = 18; repeated Part parts = 19;
  map<string, double> scores = 20; map<int32, Part> by_number = 21;
  oneof either { int64 whole = 22; string words = 23; Part piece = 24; }
  repeated int64 numbers = 25; repeated string words_of = 26;
  int64 ms = 27;
  string unused = 99;
}
message Other { string name = 1; message Inner { string name = 1; } }
"""
SET = descriptor_set(PROTO)
READING = message_class(SET, "plant.Reading")
PART = pa.struct([("n", pa.int64()), ("state", pa.string())])
READ = pa.struct(
    [
        pa.field("words", pa.string()),
        pa.field("value", pa.float64(), False),
        pa.field("single", pa.float32()),
        pa.field("i32", pa.int32()),
        pa.field("s64", pa.int64()),
        pa.field("u32", pa.int64()),
        pa.field("f64", pa.decimal128(20, 0)),
        pa.field("u64", pa.decimal128(22, 1)),
        pa.field("flag", pa.bool_()),
        pa.field("text", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("state", pa.string()),
        pa.field("states", pa.list_(pa.string())),
        pa.field("ts", UTC),
        pa.field("took", pa.duration("us")),
        pa.field("maybe", pa.float64()),
        pa.field("label", pa.string()),
        pa.field("more", pa.string()),
        pa.field("part", PART),
        pa.field("parts", pa.list_(PART)),
        pa.field("scores", pa.map_(pa.string(), pa.float64())),
        pa.field("by_number", pa.map_(pa.int32(), PART)),
        pa.field("whole", pa.int64()),
        pa.field("piece", PART),
        pa.field("numbers", pa.list_(pa.int64())),
        pa.field("words_of", pa.list_(pa.string())),
        pa.field("ms", UTC),
    ]
)
INT, LONG = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
REAL, SINGLE = st.floats(allow_nan=False), st.floats(width=32, allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TIME = st.datetimes().map(lambda time: time.replace(tzinfo=timezone.utc))
MILLIS = TIME.map(lambda time: time.replace(microsecond=time.microsecond // 1000 * 1000))
STATE = st.sampled_from(["OFF", "ON", "BROKEN"])
NUMBERED = st.fixed_dictionaries({"n": LONG, "state": STATE})
EITHER = st.one_of(
    st.just({}), *(st.fixed_dictionaries({name: value}) for name, value in (("whole", LONG), ("words", TEXT), ("piece", NUMBERED)))
)
ROWS = st.fixed_dictionaries(
    {
        "value": REAL,
        "single": st.none() | SINGLE,
        "i32": INT,
        "s64": LONG,
        "u32": st.integers(0, 2**32 - 1),
        "f64": st.integers(0, 2**64 - 1),
        "u64": st.integers(0, 2**64 - 1),
        "flag": st.booleans(),
        "text": TEXT,
        "raw": st.binary(max_size=9),
        "state": STATE,
        "states": st.lists(STATE, max_size=3),
        "ts": st.none() | TIME,
        "took": st.none() | st.timedeltas(timedelta(days=-3_000_000), timedelta(days=3_000_000)),
        "maybe": st.none() | REAL,
        "label": st.none() | TEXT,
        "part": st.none() | NUMBERED,
        "parts": st.lists(NUMBERED, max_size=3),
        "scores": st.dictionaries(TEXT, REAL, max_size=3),
        "by_number": st.dictionaries(INT, NUMBERED, max_size=3),
        "numbers": st.lists(LONG, max_size=3),
        "words_of": st.lists(TEXT, max_size=2),
        "ms": MILLIS,
    }
)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def filled(row: dict[str, Any]) -> Any:
    """The message of a row."""
    found = READING(unused="x")
    for name, value in row.items():
        target = getattr(found, name)
        if value is None:
            continue
        if name == "ts":
            target.FromDatetime(value)
        elif name == "took":
            target.FromTimedelta(value)
        elif name in ("maybe", "label"):
            target.value = value
            target.SetInParent()
        elif name in ("part", "piece"):
            json_format.ParseDict({**value, "n": str(value["n"])}, target)
            target.SetInParent()
        elif name == "parts":
            for part in value:
                json_format.ParseDict({**part, "n": str(part["n"])}, target.add())
        elif name == "by_number":
            for key, part in value.items():
                json_format.ParseDict({**part, "n": str(part["n"])}, target[key])
        elif name == "scores":
            target.update(value)
        elif name == "state":
            found.state = READING.State.Value(value)
        elif name == "states":
            target.extend(map(READING.State.Value, value))
        elif name in ("numbers", "words_of"):
            target.extend(value)
        elif name == "ms":
            found.ms = (value - EPOCH) // timedelta(milliseconds=1)
        else:
            setattr(found, name, value)
    return found


def alone(data: bytes, name: str) -> ProtobufSchemas:
    return ProtobufSchemas("plant.desc", name, data)


PARSER = ProtobufParser(READ, alone(SET, "plant.Reading"), "ms")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ROWS, EITHER), min_size=1, max_size=4))
def test_parsed_rows_equal_the_encoded_rows(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    payloads = [filled({**row, **either}).SerializeToString() for row, either in rows]
    for (row, either), (value, reason) in zip(rows, results(PARSER, payloads), strict=True):
        expected = {
            **row,
            "whole": None,
            "words": None,
            "piece": None,
            "more": None,
            **either,
            "scores": sorted(row["scores"].items()),
            "by_number": sorted(row["by_number"].items()),
            "f64": Decimal(row["f64"]),
            "u64": Decimal(row["u64"]),
        }
        assert (value, reason) == (expected, None)


@settings(max_examples=80, deadline=None)
@given(ROWS, st.data())
def test_damaged_payloads_are_a_row_or_a_reason(row: dict[str, Any], data: st.DataObject) -> None:
    good = filled(row).SerializeToString()
    place = data.draw(st.integers(0, len(good)))
    bad = good[:place] + data.draw(st.binary(max_size=12)) + good[data.draw(st.integers(place, len(good))) :]
    (_, first), (value, reason), (_, last) = results(PARSER, [good, bad, good])
    assert first is last is None and (value is None) == (reason is not None)
    assert reason is None or len(reason) < 100


def parser_of(fields: str, kind: pa.DataType, nullable: bool = True, syntax: str = "proto3", **more: Any) -> ProtobufParser:
    """Of a message with the field ``a`` of this type."""
    text = (
        f'syntax = "{syntax}"; import "google/protobuf/timestamp.proto"; import "google/protobuf/duration.proto";'
        f'import "google/protobuf/any.proto"; import "google/protobuf/struct.proto"; message M {{ {fields} }}'
    )
    return ProtobufParser(pa.struct([pa.field("a", kind, nullable)]), alone(descriptor_set(text), "M"), **more)


MALFORMED = "not a Protobuf message of the schema"
LONGEST = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"  # 2^64 - 1


@pytest.mark.parametrize(("fields", "kind", "payload", "reason"), [
    ("int64 a = 1;", pa.int64(), b"", "empty payload"),
    ("int64 a = 1;", pa.int64(), b"\x08", MALFORMED),
    ("int64 a = 1;", pa.int64(), b'{"a": 5}', MALFORMED),
    ("string a = 1;", pa.string(), b"\x0a\x7fa", MALFORMED),
    ("string a = 1;", pa.string(), b"\x0a\x01\xff", MALFORMED),
    ("uint32 a = 1;", pa.int32(), b"\x08\xff\xff\xff\xff\x0f", "field 'a' does not fit 32 bits with sign"),
    ("uint64 a = 1;", pa.int64(), b"\x08" + LONGEST, "field 'a' does not fit 64 bits with sign"),
    ("repeated uint64 a = 1;", pa.list_(pa.int64()), b"\x08\x01\x08" + LONGEST, "field 'a[]' does not fit 64 bits with sign"),
    ("map<string, uint64> a = 1;", pa.map_(pa.string(), pa.int64()), b"\x0a\x0b\x10" + LONGEST,
     "field 'a{}' does not fit 64 bits with sign"),
    ("google.protobuf.Timestamp a = 1;", UTC, b"\x0a\x0b\x08" + LONGEST[:-1] + b"\x00", "field 'a' is out of range"),
    ("google.protobuf.Timestamp a = 1;", UTC, b"\x0a\x06\x10\x80\x94\xeb\xdc\x03", "field 'a' is out of range"),
    ("google.protobuf.Timestamp a = 1;", UTC, b"\x0a\x0b\x10" + LONGEST, "field 'a' is out of range"),
    ("google.protobuf.Duration a = 1;", pa.duration("us"), b"\x0a\x0a\x08" + LONGEST[:-2] + b"\x7f", "field 'a' is out of range"),
    ("google.protobuf.Any a = 1;", pa.string(), b"\x0a\x05\x0a\x03x/y", "field 'a' has no JSON text"),
    ("M a = 1;", pa.string(), b"\x0a\x02" * 500 + b"\0\0", MALFORMED),
])  # fmt: skip
def test_a_payload_that_is_not_of_the_schema_has_a_reason(fields: str, kind: pa.DataType, payload: bytes, reason: str) -> None:
    assert results(parser_of(fields, kind), [payload]) == [(None, reason)]


def test_a_field_without_presence_has_its_default_and_others_are_null() -> None:
    other = b"\x7a\x00"  # a field that the message type does not have
    assert results(parser_of("double a = 1;", pa.float64(), False), [other]) == [({"a": 0.0}, None)]
    for fields in ("optional double a = 1;", "oneof x { double a = 1; }"):
        assert results(parser_of(fields, pa.float64()), [other, b"\x09" + bytes(8)]) == [({"a": None}, None), ({"a": 0.0}, None)]
        parser = parser_of(fields, pa.float64(), False)
        assert results(parser, [b"\x09" + bytes(8), other]) == [({"a": 0.0}, None), (None, "field 'a' is missing")]
    kind = pa.struct([pa.field("a", pa.float64(), False)])
    nested = parser_of("M b = 1; optional double c = 2; message N { optional double a = 1; } N a = 3;", kind)
    assert results(nested, [other, b"\x1a\x00"]) == [({"a": None}, None), (None, "field 'a.a' is missing")]


def test_proto2_has_required_fields_and_defaults() -> None:
    fields = "required int32 r = 2; optional string a = 1 [default = 'C']; optional M child = 3;"
    parser = parser_of(fields, pa.string(), syntax="proto2")
    assert results(parser, [b"\x10\x05", b"\x10\x05\x0a\x01F", b"\x0a\x01F", b"\x10\x05\x1a\x02\x0a\x00", b"\x10\x05\x0a\x01\xff"]) == [
        ({"a": "C"}, None),
        ({"a": "F"}, None),
        (None, "the required field 'r' is missing"),
        (None, "the required field 'r' is missing"),
        (None, "field 'a' is not UTF-8"),
    ]
    keys = parser_of("map<string, int32> a = 1;", pa.map_(pa.string(), pa.int32()), syntax="proto2")
    good, bad = b"\x0a\x05\x0a\x01k\x10\x05", b"\x0a\x05\x0a\x01\xff\x10\x05"
    assert results(keys, [good, bad, good + bad]) == [({"a": [("k", 5)]}, None), *[(None, "field 'a' is not UTF-8")] * 2]
    closed = parser_of("enum E { X = 1; Y = 2; } optional E a = 1;", pa.string(), syntax="proto2")
    assert results(closed, [b"\x08\x02", b"\x08\x07"]) == [({"a": "Y"}, None), ({"a": None}, None)]
    group = parser_of("optional group A = 1 { optional int32 n = 2; }", pa.struct([("n", pa.int32())]), syntax="proto2")
    assert results(group, [b"\x0b\x10\x05\x0c", b"\x0b\x10\x05"]) == [({"a": {"n": 5}}, None), (None, MALFORMED)]


def test_types_of_spark_that_hold_each_value_are_filled() -> None:
    texts = parser_of("google.protobuf.Struct a = 1;", pa.string())
    text = 'syntax = "proto3"; import "google/protobuf/struct.proto"; message M { google.protobuf.Struct a = 1; }'
    struct = message_class(descriptor_set(text), "M")()
    struct.a.update({"z": [1.5, None, "\u00e4"], "b": {"c": True}})
    assert results(texts, [struct.SerializeToString()]) == [({"a": '{"b": {"c": true}, "z": [1.5, null, "\\u00e4"]}'}, None)]
    enum = "enum E { X = 0; Y = 2; } E a = 1;"
    assert results(parser_of(enum, pa.string()), [b"\x08\x02", b"\x08\x09"]) == [
        ({"a": "Y"}, None),
        ({"a": "UNKNOWN_ENUM_VALUE_E_9"}, None),
    ]
    assert results(parser_of(enum, pa.int32()), [b"\x08\x09"]) == [({"a": 9}, None)]
    assert results(parser_of("uint32 a = 1;", pa.float64()), [b"\x08\xff\xff\xff\xff\x0f"]) == [({"a": 2.0**32 - 1}, None)]
    assert results(parser_of("float a = 1;", pa.float64()), [b"\x0d\0\0\xc0\x7f"])[0][1] is None  # NaN, as sent
    wrapped = parser_of("google.protobuf.Timestamp a = 1;", pa.struct([("seconds", pa.int64()), ("nanos", pa.int32())]))
    assert results(wrapped, [b"\x0a\x02\x08\x05"]) == [({"a": {"seconds": 5, "nanos": 0}}, None)]
    micros = parser_of("uint64 a = 1;", UTC, timestamps="us")
    assert results(micros, [b"\x08\x07", b"\x08" + LONGEST]) == [
        ({"a": EPOCH + timedelta(microseconds=7)}, None),
        (None, "field 'a' is out of range"),
    ]
    keyword = parser_of(
        "int32 from = 1; int32 Clear = 2; repeated M a = 3;", pa.list_(pa.struct([("from", pa.int32()), ("Clear", pa.int32())]))
    )
    assert results(keyword, [b"\x1a\x04\x08\x05\x10\x06\x1a\x00", b"\x08\x01"]) == [
        ({"a": [{"from": 5, "Clear": 6}, {"from": 0, "Clear": 0}]}, None),
        ({"a": []}, None),
    ]


@pytest.mark.parametrize(
    ("fields", "kind", "reason"),
    [
        ("string a = 1;", pa.int64(), "field 'a' is Protobuf's string, which cannot fill bigint"),
        ("int64 a = 1;", pa.int32(), "field 'a' is Protobuf's int64, which cannot fill int"),
        ("double a = 1;", pa.float32(), "field 'a' is Protobuf's double, which cannot fill float"),
        ("int64 a = 1;", UTC, "field 'a' is int64, which fills timestamp only with the option 'payloadTimestamps'"),
        ("uint64 a = 1;", pa.decimal128(20, 1), "field 'a' is Protobuf's uint64, which cannot fill decimal(20,1)"),
        ("repeated int64 a = 1;", pa.int64(), "field 'a' is Protobuf's repeated int64, which cannot fill bigint"),
        ("repeated int64 a = 1;", pa.list_(pa.string()), "field 'a[]' is Protobuf's int64, which cannot fill string"),
        ("map<string, int64> a = 1;", pa.list_(pa.int64()), "field 'a' is Protobuf's map, which cannot fill array"),
        ("map<string, int64> a = 1;", pa.map_(pa.int32(), pa.int64()), "field 'a' is Protobuf's string, which cannot fill int"),
        ("google.protobuf.Timestamp a = 1;", pa.timestamp("us"), "field 'a' is Protobuf's google.protobuf.Timestamp, which cannot"),
        ("M a = 1;", pa.struct([("x", pa.int32())]), "there is no field 'a.x'"),
        ("int64 b = 1;", pa.int64(), "there is no field 'a'"),
    ],
)
def test_a_message_type_that_cannot_fill_the_columns_is_refused(fields: str, kind: pa.DataType, reason: str) -> None:
    with pytest.raises(UnusableSchema, match=re.escape(reason)) as caught:
        parser_of(fields, kind)
    assert "\n" not in str(caught.value)


def test_the_registry_header_selects_schema_and_message() -> None:
    old = descriptor_set('syntax = "proto3"; package p; message Old { message In {} } message R { int32 n = 1; }')
    new = descriptor_set('syntax = "proto3"; package p; message R { int64 n = 1; string unit = 2; }')
    bad = descriptor_set('syntax = "proto3"; package p; message R { string n = 1; }')
    none = descriptor_set('syntax = "proto3"; package p; message Other { string n = 1; }')
    schemas = ProtobufSchemas("schemas", "p.R", by_id={1: old, 70000: new, 3: bad, 4: none})
    parser = pickle.loads(pickle.dumps(ProtobufParser(pa.struct([("n", pa.int64()), ("unit", pa.string())]), schemas)))
    assert results(
        parser,
        [
            b"\0\0\0\0\1\2\2\x08\5",
            b"\0\0\1\x11\x70\0\x08\6\x12\1C",
            b"\0\0\1\x11\x70\2\0\x08\7",
            b"\0\0\1\x11\x70\0",
            b"\0\0\0\0\3\0\x0a\1a",
            b"\0\0\0\0\4\0\x0a\1a",
            b"\0\0\0\0\2\0",
            b"\0\0\0\0\1\0",
            b"\0\0\0\0\1\4\0\0",
            b"\0\0\0\0\1\2\x20",
            b"\0\0\0\0\1",
            b"\0\0\0\0\1\1",
            b"\1\0\0\0\1\0",
            b"\0\0",
            b"",
            b"\0\0\1\x11\x70\0\x08",
        ],
    ) == [
        ({"n": 5, "unit": None}, None),
        ({"n": 6, "unit": "C"}, None),
        ({"n": 7, "unit": ""}, None),
        ({"n": 0, "unit": ""}, None),
        (None, "schema 3 cannot be used: field 'n' is Protobuf's string, which cannot fill bigint"),
        (None, "schema 4 cannot be used: there is no message type 'p.R'; there are p.Other"),
        (None, "schema 2 is unknown"),
        (None, "message 'p.Old', not 'p.R'"),
        (None, "message 'p.Old.In', not 'p.R'"),
        (None, "an unknown message index"),
        (None, "no message index after the schema id"),
        (None, "no message index after the schema id"),
        (None, "no schema id"),
        (None, "no schema id"),
        (None, "empty payload"),
        (None, MALFORMED),
    ]
    mixed = [b"\0\0\0\0\1\2\2\x08" + bytes([n]) if n % 3 else b"\0\0\1\x11\x70\0\x08" + bytes([n]) for n in range(1, 100)]
    assert [value["n"] for value, _ in results(parser, mixed)] == list(range(1, 100))
    with pytest.raises(UnusableSchema, match="no usable schema has a field 'x'"):
        ProtobufParser(pa.struct([("n", pa.int64()), ("x", pa.string())]), schemas)
    with pytest.raises(UnusableSchema, match="schema 3 cannot be used: field 'n' is Protobuf's string"):
        ProtobufParser(pa.struct([("n", pa.int64())]), ProtobufSchemas("schemas", "R", by_id={3: bad}))


def test_dead_letters_among_many_payloads() -> None:
    parser = parser_of("uint64 a = 1;", pa.int64())
    payloads = [b"\x08" + (LONGEST if n % 97 == 0 else b"\x05") if n % 89 else b"\x08" for n in range(3000)]
    found = parser.parse(pa.array(payloads, pa.binary()))
    assert found.payloads is None
    assert found.reasons.to_pylist() == [
        MALFORMED if n % 89 == 0 else "field 'a' does not fit 64 bits with sign" if n % 97 == 0 else None for n in range(3000)
    ]


def test_unusable_options_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "plant.desc"
    path.write_bytes(SET)
    (tmp_path / "bare.desc").write_bytes(descriptor_set(PROTO, imports=False))
    (tmp_path / "text.desc").write_text(PROTO)
    ids = tmp_path / "ids"
    ids.mkdir()
    (ids / "7.desc").write_bytes(b"\0")
    file = {"payloadSchemaFile": str(path)}
    for options, reason in (
        ({"payloadMessage": "R"}, "'payloadSchemaFile': 'payloadFormat' protobuf needs either this or 'payloadSchemaDirectory'"),
        (file, "'payloadMessage': 'payloadFormat' protobuf needs the name of a message type"),
        (
            {**file, "payloadMessage": "plant.R"},
            f"'payloadSchemaFile': '{path}': there is no message type 'plant.R'; there are "
            "plant.Other, plant.Other.Inner, plant.Reading, plant.Reading.Part",
        ),
        ({"payloadSchemaFile": str(tmp_path / "bare.desc"), "payloadMessage": "Reading"}, "run protoc with --include_imports"),
        ({"payloadSchemaFile": str(tmp_path / "text.desc"), "payloadMessage": "Reading"}, "not a descriptor file"),
        ({"payloadSchemaFile": str(tmp_path / "x.desc"), "payloadMessage": "Reading"}, "x.desc': No such file"),
        ({"payloadSchemaDirectory": str(tmp_path), "payloadMessage": "Reading"}, "there is no file like '12.desc'"),
        ({"payloadSchemaDirectory": str(ids), "payloadMessage": "Reading"}, f"'{ids}/7.desc': not a descriptor file"),
        ({**file, "payloadMessage": "Reading", "payloadDelimiter": ";"}, "is for 'payloadFormat' csv only"),
        ({"payloadFormat": "avro", **file, "payloadMessage": "Reading"}, "'payloadMessage': is for 'payloadFormat' protobuf only"),
    ):
        with pytest.raises(PayloadOptionError) as caught:
            payload_options({"payloadFormat": "protobuf", **options})
        assert reason in str(caught.value) and "\n" not in str(caught.value)
    read = payload_options({"payloadFormat": "protobuf", **file, "payloadMessage": "Reading"})
    for kind, reason in ((pa.struct([("x", pa.int64())]), "there is no field 'x'"), (pa.int64(), "must be a struct for Protobuf")):
        with pytest.raises(PayloadSchemaError, match=reason):
            PayloadReader(pa.schema([("value", kind), ("reason", pa.string())]), read, None)
    table = {"stream": "s", "output": "o", "schema": "n long", "format": "protobuf"}
    for keys, reason in (
        ({"message": "R"}, "tables.t.schema_file: format protobuf needs either this or 'schema_directory'"),
        ({"schema_file": str(path)}, "tables.t.message: format protobuf needs the name"),
        ({"schema_file": str(path), "message": "R"}, "tables.t.schema_file: .* there is no message type 'R'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            parse_config({"source": {"path": "d"}, "tables": {"t": {**table, **keys}}})


def test_a_short_name_must_be_unique(tmp_path: Path) -> None:
    path = tmp_path / "two.desc"
    path.write_bytes(descriptor_set('syntax = "proto3"; package p; message A { message X {} } message B { message X {} }'))
    with pytest.raises(UnusableSchema, match="more than one message type 'X'"):
        read_file(str(path), "X")
    assert read_file(str(path), "A").message == "A"
    (tmp_path / "12.desc").write_bytes(path.read_bytes())
    assert list(read_directory(str(tmp_path), "A").by_id or ()) == [12]


def test_protobuf_in_spark_and_in_a_table(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "plant.desc"
    path.write_bytes(SET)
    time = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    good = filled(
        {
            "ts": time,
            "value": 1.5,
            "took": timedelta(seconds=90),
            "u64": 2**64 - 1,
            "state": "ON",
            "scores": {"a": 2.0},
            "parts": [{"n": 7, "state": "OFF"}],
            "label": "x",
        }
    ).SerializeToString()
    StreamWriter(tmp_path / "data").append(0, [message(0, "sensors/p1", good), message(1, "sensors/p1", good[:-2])])
    ddl = (
        "ts timestamp not null, value double not null, took interval day to second, u64 decimal(20,0), state string, "
        "scores map<string,double>, parts array<struct<n: bigint>>, label string"
    )
    source = spark.read.format("mqtt").options(
        path=str(tmp_path / "data"), stream="sensors", payloadFormat="protobuf", payloadSchemaFile=str(path), payloadMessage="plant.Reading"
    )
    read = source.schema(f"offset long, value struct<{ddl}>, reason string").load()
    found = [
        row.asDict(recursive=True)
        for row in read.orderBy("offset")
        .selectExpr(
            "offset", "unix_seconds(value.ts) AS ts", "value.took", "value.u64", "value.state", "value.scores", "value.parts", "reason"
        )
        .collect()
    ]
    assert found == [
        {
            "offset": 0,
            "ts": int(time.timestamp()),
            "took": timedelta(seconds=90),
            "u64": Decimal(2**64 - 1),
            "state": "ON",
            "scores": {"a": 2.0},
            "parts": [{"n": 7}],
            "reason": None,
        },
        {"offset": 1, **dict.fromkeys(("ts", "took", "u64", "state", "scores", "parts")), "reason": MALFORMED},
    ]
    table = {
        "stream": "sensors",
        "output": str(tmp_path / "out"),
        "format": "protobuf",
        "schema": ddl,
        "schema_file": str(path),
        "message": "Reading",
        "columns": ["partition", "offset"],
    }
    [progress] = run(parse_config({"source": {"path": str(tmp_path / "data")}, "tables": {"t": table}}), once=True, session=spark)
    assert (progress.rows, progress.bad) == (1, 1)
    [row] = parquet_rows(tmp_path / "out")
    assert (row["offset"], row["ts"], row["value"], row["u64"], row["label"]) == (0, time, 1.5, Decimal(2**64 - 1), "x")
    [rejected] = parquet_rows(tmp_path / "out.rejected")
    assert (rejected["offset"], rejected["reason"], rejected["payload"]) == (1, MALFORMED, good[:-2])
