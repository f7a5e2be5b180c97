"""Avro payloads: the parser returns the values that fastavro encodes; bad payloads and schemas are one line each."""

from __future__ import annotations

import io
import json
import os
import pickle
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from support.ingest_jobs import parquet_rows
from support.payload_results import results
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run
from bridge_spark.source.avro_payloads import AvroParser
from bridge_spark.source.avro_schemas import AvroSchemas, read_directory, read_file
from bridge_spark.source.payload_options import PayloadOptionError, payload_options
from bridge_spark.source.payload_reader import PayloadReader, PayloadSchemaError
from bridge_spark.source.schema_files import MAX_BYTES, UnusableSchema
from bridge_spark.tables.config_section import ConfigError
from bridge_spark.tables.ingest_config import parse_config

pytestmark = pytest.mark.one_build

__all__ = ["spark"]

UTC = pa.timestamp("us", "UTC")


def record(*fields: tuple[str, Any], name: str = "Reading") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": field, "type": type} for field, type in fields]}


def logical(name: str, type: str = "long", **more: Any) -> dict[str, Any]:
    return {"type": type, "logicalType": name, **more}


INNER = record(("n", "long"), ("unit", {"type": "enum", "name": "Unit", "symbols": ["C", "F"]}), name="Inner")
WRITTEN = record(
    ("unused", ["null", {"type": "map", "values": "double"}]),
    ("flag", "boolean"),
    ("small", "int"),
    ("wide", "int"),
    ("big", "long"),
    ("single", "float"),
    ("double", "double"),
    ("text", "string"),
    ("raw", "bytes"),
    ("code", {"type": "fixed", "name": "Code", "size": 4}),
    ("maybe", ["null", "double"]),
    ("last", ["string", "null"]),
    ("whole", ["null", "int", "long"]),
    ("day", logical("date", "int")),
    ("ms", logical("timestamp-millis")),
    ("us", logical("timestamp-micros")),
    ("local", ["null", logical("local-timestamp-micros")]),
    ("price", logical("decimal", "bytes", precision=38, scale=10)),
    ("inner", INNER),
    ("again", ["null", "Inner"]),
    ("list", {"type": "array", "items": ["null", "Inner"]}),
    ("days", {"type": "map", "values": {"type": "array", "items": logical("date", "int")}}),
    ("either", ["null", "long", "string", {"type": "array", "items": "int"}]),
)
STRUCT = pa.struct([("n", pa.int64()), ("unit", pa.string())])
READ = pa.struct(
    [
        pa.field("either", pa.struct([("member0", pa.int64()), ("member1", pa.string()), ("member2", pa.list_(pa.int32()))])),
        pa.field("flag", pa.bool_(), False),
        pa.field("small", pa.int32()),
        pa.field("wide", pa.int64()),
        pa.field("big", pa.int64()),
        pa.field("single", pa.float64()),
        pa.field("double", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("code", pa.binary()),
        pa.field("maybe", pa.float64()),
        pa.field("last", pa.string()),
        pa.field("whole", pa.int64()),
        pa.field("day", pa.date32()),
        pa.field("ms", UTC),
        pa.field("us", UTC),
        pa.field("local", pa.timestamp("us")),
        pa.field("price", pa.decimal128(38, 10)),
        pa.field("inner", STRUCT),
        pa.field("again", STRUCT),
        pa.field("list", pa.list_(STRUCT)),
        pa.field("days", pa.map_(pa.string(), pa.list_(pa.date32()))),
    ]
)
INT, LONG = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
REAL = st.floats(allow_nan=False)
TEXT, DAY = st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.dates()
LOCAL = st.datetimes()
TIME = LOCAL.map(lambda time: time.replace(tzinfo=timezone.utc))
PART = st.fixed_dictionaries({"n": LONG, "unit": st.sampled_from("CF")})
ROWS = st.fixed_dictionaries(
    {
        "unused": st.none() | st.dictionaries(TEXT, REAL, max_size=2),
        "flag": st.booleans(),
        "small": INT,
        "wide": INT,
        "big": LONG,
        "single": st.floats(width=32, allow_nan=False),
        "double": REAL,
        "text": TEXT,
        "raw": st.binary(max_size=9),
        "code": st.binary(min_size=4, max_size=4),
        "maybe": st.none() | REAL,
        "last": st.none() | TEXT,
        "whole": st.none() | LONG,
        "day": DAY,
        "us": TIME,
        "local": st.none() | LOCAL,
        "ms": TIME.map(lambda time: time.replace(microsecond=time.microsecond // 1000 * 1000)),
        "price": st.integers(1 - 10**38, 10**38 - 1).map(lambda number: Decimal((number < 0, tuple(map(int, str(abs(number)))), -10))),
        "inner": PART,
        "again": st.none() | PART,
        "list": st.lists(st.none() | PART, max_size=3),
        "days": st.dictionaries(TEXT, st.lists(DAY, max_size=2), max_size=2),
        "either": st.none() | LONG | TEXT | st.lists(INT, max_size=2),
    }
)


def encode(schema: Any, row: Any) -> bytes:
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(schema), row)
    return file.getvalue()


def alone(schema: Any) -> AvroSchemas:
    return AvroSchemas("reading.avsc", fastavro.parse_schema(schema))


def registry(**schemas: Any) -> AvroSchemas:
    return AvroSchemas("schemas", by_id={int(name[1:]): fastavro.parse_schema(schema) for name, schema in schemas.items()})


PARSER = AvroParser(READ, alone(WRITTEN))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_parsed_rows_equal_the_encoded_rows(rows: list[dict[str, Any]]) -> None:
    for row, (value, reason) in zip(rows, results(PARSER, [encode(WRITTEN, row) for row in rows]), strict=True):
        either, days = row["either"], list(row["days"].items())
        number = next((place for place, kind in enumerate((int, str, list)) if isinstance(either, kind)), None)
        union = None if number is None else {f"member{place}": either if place == number else None for place in range(3)}
        expected = {**row, "either": union, "days": days}
        del expected["unused"]
        assert (value, reason) == (expected, None)


@settings(max_examples=80, deadline=None)
@given(ROWS, st.data())
def test_damaged_payloads_are_a_row_or_a_reason(row: dict[str, Any], data: st.DataObject) -> None:
    good = encode(WRITTEN, row)
    place = data.draw(st.integers(0, len(good)))
    bad = good[:place] + data.draw(st.binary(max_size=12)) + good[data.draw(st.integers(place, len(good))) :]
    (_, first), (value, reason), (_, last) = results(PARSER, [good, bad, good])
    assert first is last is None and (value is None) == (reason is not None)
    assert reason is None or len(reason) < 100
    if place < len(good):  # no encoding is the beginning of another
        assert results(PARSER, [good[:place]])[0][1] is not None


LONGEST = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"  # 2^63 - 1
MANY_NAMES = {"type": "map", "values": "null"}


@pytest.mark.parametrize(
    ("schema", "kind", "payload", "reason"),
    [
        ("long", pa.int64(), b"", "empty payload"),
        ("long", pa.int64(), b"\x80", "the Avro record is incomplete or has an unknown type in a union"),
        ("long", pa.int64(), b"\x02\x02", "bytes after the Avro record"),
        ("double", pa.float64(), b"\0\0\0", "the Avro record is incomplete"),
        ("string", pa.string(), LONGEST + b"a", "the Avro record is incomplete"),
        ("string", pa.string(), b"\x01abc", "the Avro record is incomplete"),
        ("string", pa.string(), b"\x02\xff", "not UTF-8"),
        ({"type": "array", "items": "int"}, pa.list_(pa.int32()), LONGEST + b"\x02", "the Avro record is incomplete"),
        (MANY_NAMES, pa.map_(pa.string(), pa.int32()), LONGEST + b"\x02a", "the Avro record is incomplete"),
        (["null", "int"], pa.int32(), b"\x04\x02", "an unknown type in a union"),
        ("int", pa.int32(), b"\xfe\xff\xff\xff\xff\x01", "field 'a' does not fit 32 bits"),
        ("int", pa.float64(), b"\xfe\xff\xff\xff\xff\x01", "field 'a' does not fit 32 bits"),
        ({"type": "enum", "name": "E", "symbols": ["x", "y"]}, pa.string(), b"\x04", "field 'a' is no symbol of its enum"),
        ({"type": "enum", "name": "E", "symbols": ["x", "y"]}, pa.string(), b"\x01", "field 'a' is no symbol of its enum"),
        (logical("timestamp-millis"), UTC, LONGEST, "field 'a' is out of range"),
        (logical("date", "int"), pa.date32(), b"\xfe\xff\xff\xff\x0f", "field 'a' is out of range"),
        (logical("decimal", "bytes", precision=2, scale=1), pa.decimal128(5, 2), b"\x02\x64", "field 'a' does not fit decimal(2,1)"),
    ],
)
def test_a_payload_that_is_not_of_the_schema_has_a_reason(schema: Any, kind: pa.DataType, payload: bytes, reason: str) -> None:
    parser = AvroParser(pa.struct([("a", kind)]), alone(record(("a", schema))))
    assert results(parser, [payload]) == [(None, reason)]


def test_null_in_a_required_field_is_a_reason() -> None:
    kind = pa.struct([pa.field("a", pa.struct([pa.field("b", pa.int32(), False)]))])
    schema = record(("a", ["null", record(("b", ["null", "int"]), name="B")]))
    parser = AvroParser(kind, alone(schema))
    payloads = [encode(schema, {"a": a}) for a in (None, {"b": 1}, {"b": None})]
    assert results(parser, payloads) == [({"a": None}, None), ({"a": {"b": 1}}, None), (None, "field 'a.b' is missing")]


def test_types_of_spark_that_hold_each_value_are_filled() -> None:
    for schema, kind, value, expected in (
        ("int", pa.float64(), -5, -5.0),
        ("float", pa.float32(), 1.5, 1.5),
        (logical("timestamp-millis"), pa.int64(), datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc), 1000),
        (logical("date", "int"), pa.int32(), date(1970, 1, 3), 2),
        (logical("decimal", "bytes", precision=4, scale=1), pa.decimal128(6, 3), Decimal("-12.5"), Decimal("-12.500")),
        (
            {"type": "fixed", "name": "F", "size": 8, "logicalType": "decimal", "precision": 4, "scale": 0},
            pa.decimal128(4, 0),
            Decimal(-12),
            Decimal(-12),
        ),
        (["null", "float", "double"], pa.float64(), 1.5, 1.5),
        (["long"], pa.int64(), 7, 7),
        ("null", pa.string(), None, None),
        (logical("uuid", "string"), pa.string(), "1b4e28ba-2fa1-11d2-883f-0016d3cca427", "1b4e28ba-2fa1-11d2-883f-0016d3cca427"),
        (logical("no-such-type", "int"), pa.int32(), 4, 4),
    ):
        parser = AvroParser(pa.struct([("a", kind)]), alone(record(("z", "int"), ("a", schema))))
        assert results(parser, [encode(record(("z", "int"), ("a", schema)), {"z": 1, "a": value})]) == [({"a": expected}, None)]
    nanos = AvroParser(pa.struct([("a", UTC)]), alone(record(("a", logical("timestamp-nanos")))))
    [(value, _)] = results(nanos, [encode(record(("a", "long")), {"a": -1999})])
    assert value["a"] == datetime(1970, 1, 1, tzinfo=timezone.utc) - timedelta(microseconds=2)


@pytest.mark.parametrize(
    ("schema", "kind", "reason"),
    [
        ("string", pa.int64(), "field 'a' is Avro's string, which cannot fill bigint"),
        ("long", pa.int32(), "field 'a' is Avro's long, which cannot fill int"),
        ("long", UTC, "field 'a' is Avro's long, which cannot fill timestamp"),
        (logical("local-timestamp-micros"), UTC, "field 'a' is Avro's long (local-timestamp-micros), which cannot fill"),
        (logical("decimal", "bytes", precision=9, scale=2), pa.decimal128(9, 3), "field 'a' is Avro's bytes (decimal), which cannot"),
        ("int", pa.list_(pa.int32()), "field 'a' is Avro's int, which cannot fill array"),
        ({"type": "array", "items": "int"}, pa.list_(pa.string()), "field 'a[]' is Avro's int, which cannot fill string"),
        ({"type": "map", "values": "int"}, pa.map_(pa.int32(), pa.int32()), "field 'a' is Avro's map, which cannot fill map"),
        (["null", "int", "string"], pa.string(), "field 'a' is a union, which fills struct<member0, member1>, not string"),
        ({"type": "array", "items": "null"}, pa.list_(pa.int32()), "field 'a' is an array of items without bytes"),
        ({"type": "array", "items": record(name="Nothing")}, pa.list_(pa.int32()), "field 'a[]' is Avro's record"),
        ({"type": "fixed", "name": "F", "size": -1}, pa.binary(), "field 'a' has the size -1"),
        (logical("decimal", "bytes"), pa.decimal128(9, 3), "field 'a' is a decimal with precision None and scale 0"),
        (["null", "Reading"], pa.int32(), "type 'Reading' contains itself, for which Spark has no type"),
    ],
)
def test_a_schema_that_cannot_fill_the_columns_is_refused(schema: Any, kind: pa.DataType, reason: str) -> None:
    with pytest.raises(UnusableSchema) as caught:
        AvroParser(pa.struct([("a", kind)]), alone(record(("a", schema))))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_schemas_of_unused_fields_are_bounded_too() -> None:
    kind = pa.struct([("a", pa.int32())])
    for schema in (
        {"type": "array", "items": record(("x", "null"), name="Empty")},
        {"type": "array", "items": {"type": "fixed", "name": "None", "size": 0}},
        {"type": "array", "items": "Reading"},
    ):
        with pytest.raises(UnusableSchema, match="without bytes|contains itself"):
            AvroParser(kind, alone(record(("a", "int"), ("b", schema))))
    deep: Any = "int"
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    wide: Any = "int"
    for level in range(20):  # two uses of each named type: 2^20 types
        wide = record(("x", wide), ("y", f"L{level - 1}" if level else "int"), name=f"L{level}")
    for schema in (deep, wide):
        with pytest.raises(UnusableSchema, match="at most 64 levels and 10,000 types"):
            AvroParser(kind, alone(record(("a", "int"), ("b", schema))))


def test_the_registry_header_selects_the_schema() -> None:
    old, new = record(("n", "int")), record(("unit", "string"), ("n", "long"))
    parser = AvroParser(pa.struct([("n", pa.int64()), ("unit", pa.string())]), registry(_1=old, _70000=new, _3=record(("n", "string"))))
    parser = pickle.loads(pickle.dumps(parser))
    assert results(
        parser,
        [
            b"\0\0\0\0\1" + encode(old, {"n": 5}),
            b"\0\0\1\x11\x70" + encode(new, {"unit": "C", "n": 2**40}),
            b"\0\0\0\0\3\2a",
            b"\0\0\0\0\2\2",
            b"\1\0\0\0\1\2",
            b"\0\0\0\1",
            b"\0\0\0\0\1",
            b"",
        ],
    ) == [
        ({"n": 5, "unit": None}, None),
        ({"n": 2**40, "unit": "C"}, None),
        (None, "schema 3 cannot be used: field 'n' is Avro's string, which cannot fill bigint"),
        (None, "schema 2 is unknown"),
        (None, "no schema id"),
        (None, "no schema id"),
        (None, "the Avro record is incomplete"),
        (None, "empty payload"),
    ]
    required = AvroParser(pa.struct([pa.field("unit", pa.string(), False)]), registry(_1=old, _2=new))
    assert results(required, [b"\0\0\0\0\1\2", b"\0\0\0\0\2\2C\2"]) == [(None, "field 'unit' is missing"), ({"unit": "C"}, None)]
    with pytest.raises(UnusableSchema, match="no usable schema has a field 'x'"):
        AvroParser(pa.struct([("n", pa.int64()), ("x", pa.string())]), registry(_1=old, _2=new))
    with pytest.raises(UnusableSchema, match="schema 1 cannot be used: field 'n' is Avro's int"):
        AvroParser(pa.struct([("n", pa.string())]), registry(_1=old))


def test_files_of_schemas(tmp_path: Path) -> None:
    def write(name: str, schema: Any) -> str:
        path = tmp_path / name
        path.write_text(schema if isinstance(schema, str) else json.dumps(schema), encoding="utf-8")
        return str(path)

    write("plant.Inner.avsc", {**INNER, "namespace": "plant"})
    path = write("reading.avsc", record(("inner", "plant.Inner"), ("again", ["null", "plant.Inner"])))
    parser = AvroParser(pa.struct([("inner", STRUCT), ("again", STRUCT)]), read_file(path))
    assert results(parser, [b"\2\2\0"]) == [({"inner": {"n": 1, "unit": "F"}, "again": None}, None)]
    with pytest.raises(UnusableSchema, match="there is no file like '12.avsc'"):
        read_directory(str(tmp_path))
    write("7.avsc", record(("inner", "plant.Inner")))
    assert list(read_directory(str(tmp_path)).by_id or ()) == [7]
    for name, text, reason in (
        ("a.json", "{}", "ends with .avsc"),
        ("a.avsc", "{", "not JSON"),
        ("b.avsc", "[" * 5000, "nested deeper"),
        ("c.avsc", '{"type": "record", "name": "c", "fields": 5}', "not an Avro schema"),
        ("d.avsc", json.dumps(record(("a", "b.C"))), "type 'b.C' is defined neither here nor in 'b.C.avsc'"),
        ("e.avsc", "5", "not the schema of a record"),
        ("f.avsc", '{"type": "record", "name": "f", "fields": [{}]}', "not an Avro schema"),
        ("g.avsc", "\ud800", "not JSON"),
    ):
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(UnusableSchema, match=reason) as caught:
            read_file(str(tmp_path / name))
        assert name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UnusableSchema, match="No such file"):
        read_file(str(tmp_path / "h.avsc"))
    os.mkfifo(tmp_path / "i.avsc")
    with pytest.raises(UnusableSchema, match="not a regular file"):
        read_file(str(tmp_path / "i.avsc"))
    write("j.avsc", {**record(("text", "string")), "doc": "x" * MAX_BYTES})
    with pytest.raises(UnusableSchema, match="larger than 16 MiB"):
        read_file(str(tmp_path / "j.avsc"))
    (tmp_path / "link.avsc").symlink_to(path)
    assert read_file(str(tmp_path / "link.avsc")).alone == read_file(path).alone


def test_unusable_options_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "reading.avsc"
    path.write_text(json.dumps(record(("n", "long"))))
    for options, reason in (
        ({}, "'payloadSchemaFile': 'payloadFormat' avro needs either this or 'payloadSchemaDirectory'"),
        ({"payloadSchemaFile": str(path), "payloadSchemaDirectory": str(tmp_path)}, "needs either this or"),
        ({"payloadSchemaFile": str(tmp_path / "x.avsc")}, f"'payloadSchemaFile': '{tmp_path}/x.avsc': No such file"),
        ({"payloadSchemaDirectory": str(tmp_path)}, f"'payloadSchemaDirectory': '{tmp_path}': there is no file like"),
        ({"payloadFormat": "json", "payloadSchemaFile": str(path)}, "is for 'payloadFormat' avro and protobuf only"),
    ):
        with pytest.raises(PayloadOptionError) as caught:
            payload_options({"payloadFormat": "avro", **options})
        assert reason in str(caught.value) and "\n" not in str(caught.value)
    options_read = payload_options({"payloadFormat": "avro", "payloadSchemaFile": str(path)})
    for kind, reason in ((pa.struct([("x", pa.int64())]), "there is no field 'x'"), (pa.int64(), "must be a struct for Avro")):
        with pytest.raises(PayloadSchemaError, match=reason):
            PayloadReader(pa.schema([("value", kind), ("reason", pa.string())]), options_read, None)
    table = {"stream": "s", "output": "o", "schema": "n long", "format": "avro"}
    for keys, reason in (
        ({}, "tables.t.schema_file: format avro needs either this or 'schema_directory'"),
        ({"schema_file": str(tmp_path / "x.avsc")}, f"tables.t.schema_file: '{tmp_path}/x.avsc': No such file"),
        ({"format": "csv", "schema_directory": "d"}, "tables.t.schema_directory: is for format avro, protobuf and topics only"),
    ):
        with pytest.raises(ConfigError, match=reason):
            parse_config({"source": {"path": "d"}, "tables": {"t": {**table, **keys}}})


def test_avro_in_spark_and_in_a_table(spark: SparkSession, tmp_path: Path) -> None:
    schema = record(("ts", logical("timestamp-millis")), ("value", ["null", "double"]), ("tags", {"type": "map", "values": "string"}))
    schemas = tmp_path / "schemas"
    schemas.mkdir()
    (schemas / "12.avsc").write_text(json.dumps(schema))
    time = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    good = b"\0\0\0\0\x0c" + encode(schema, {"ts": time, "value": 1.5, "tags": {"plant": "p1"}})
    StreamWriter(tmp_path / "data").append(
        0, [message(0, "sensors/p1", good), message(1, "sensors/p1", good[:-2]), message(2, "sensors/p1", b"\0\0\0\0\x0d\0")]
    )
    ddl = "ts timestamp not null, value double, tags map<string,string>"
    source = spark.read.format("mqtt").options(
        path=str(tmp_path / "data"), stream="sensors", payloadFormat="avro", payloadSchemaDirectory=str(schemas)
    )
    read = source.schema(f"offset long, value struct<{ddl}>, reason string").load()
    found = [
        row.asDict(recursive=True)
        for row in read.orderBy("offset")
        .selectExpr("offset", "unix_seconds(value.ts) AS ts", "value.value", "value.tags", "reason")
        .collect()
    ]
    assert found == [
        {"offset": 0, "ts": int(time.timestamp()), "value": 1.5, "tags": {"plant": "p1"}, "reason": None},
        {"offset": 1, "ts": None, "value": None, "tags": None, "reason": "the Avro record is incomplete"},
        {"offset": 2, "ts": None, "value": None, "tags": None, "reason": "schema 13 is unknown"},
    ]
    table = {
        "stream": "sensors",
        "output": str(tmp_path / "out"),
        "format": "avro",
        "schema": ddl,
        "schema_directory": str(schemas),
        "columns": ["partition", "offset"],
    }
    [progress] = run(parse_config({"source": {"path": str(tmp_path / "data")}, "tables": {"t": table}}), once=True, session=spark)
    assert (progress.rows, progress.bad) == (1, 2)
    [row] = parquet_rows(tmp_path / "out")
    assert (row["offset"], row["ts"], row["value"], row["tags"]) == (0, time, 1.5, [("plant", "p1")])
    rejected = parquet_rows(tmp_path / "out.rejected")
    assert [(row["offset"], row["reason"], row["payload"]) for row in rejected] == [
        (1, "the Avro record is incomplete", good[:-2]),
        (2, "schema 13 is unknown", b"\0\0\0\0\x0d\0"),
    ]
