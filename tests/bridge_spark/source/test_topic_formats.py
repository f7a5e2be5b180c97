"""`payloadFormat` `topics`: a directory that says which format and schema the payloads of which topics have."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from support.ingest_jobs import parquet_rows
from support.protobuf import descriptor_set, message_class
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run
from bridge_spark.payloads import parse_payloads
from bridge_spark.source.payload_options import PayloadOptionError, payload_options
from bridge_spark.source.payload_reader import PayloadReader, PayloadSchemaError
from bridge_spark.tables.config_section import ConfigError
from bridge_spark.tables.ingest_config import parse_config

pytestmark = pytest.mark.one_build

__all__ = ["spark"]

AVRO = {"type": "record", "name": "V", "fields": [{"name": "value", "type": "double"}, {"name": "axis", "type": "string"}]}
SET = descriptor_set('syntax = "proto3"; package plant; message Reading { double value = 1; optional int64 n = 2; }')
READING = message_class(SET, "plant.Reading")
TOPICS = """
["sensors/+/temperature"]
format = "protobuf"
schema_file = "plant.desc"
message = "plant.Reading"

["sensors/+/vibration"]
format = "avro"
schema_file = "vibration.avsc"

["sensors/p9/#"]
format = "number"
field = "value"

["sensors/+/lines"]
format = "csv"
header = ["n", "unused", "value"]
delimiter = ";"
explode = true

["sensors/#"]
format = "json"
timestamps = "ms"
"""
VALUE = pa.struct(
    [
        pa.field("value", pa.float64(), False),
        pa.field("axis", pa.string()),
        pa.field("n", pa.int64()),
        pa.field("ts", pa.timestamp("us", "UTC")),
    ]
)
DDL = "value double not null, axis string, n long, ts timestamp"


def avro(value: float, axis: str) -> bytes:
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(AVRO), {"value": value, "axis": axis})
    return file.getvalue()


MESSAGES = [
    ("sensors/p1/temperature", READING(value=1.5, n=7).SerializeToString()),
    ("sensors/p1/vibration", avro(2.5, "x")),
    ("other/p1", b"5"),
    ("sensors/p9/any", b"3.5"),
    ("sensors/p9/vibration", avro(4.5, "y")),
    ("sensors/p1/lines", b"1;;5.5\n2;;6.5\n"),
    ("sensors/p1/pressure", b'{"value": 7.5, "ts": 1000}'),
    ("sensors/p1/temperature", b"\x08"),
    ("sensors/p1/lines", b"1;2"),
    ("sensors/p1", b'{"axis": "z"}'),
    ("sensors/p1/temperature", READING(value=8.5).SerializeToString()),
]
SECOND = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
ROWS: list[tuple[int, int, Any]] = [  # index of the message, item, (value, axis, n, ts) or the reason
    (0, 0, (1.5, None, 7, None)),
    (1, 0, (2.5, "x", None, None)),
    (2, 0, "no format for the topic"),
    (3, 0, (3.5, None, None, None)),
    (4, 0, (4.5, "y", None, None)),
    (5, 0, (5.5, None, 1, None)),
    (5, 1, (6.5, None, 2, None)),
    (6, 0, (7.5, None, None, SECOND)),
    (7, 0, "not a Protobuf message of the schema"),
    (8, 0, "2 fields, not 3"),
    (9, 0, "field 'value' is missing"),
    (10, 0, (8.5, None, None, None)),
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "schemas"
    found.mkdir()
    (found / "topics.toml").write_text(TOPICS)
    (found / "plant.desc").write_bytes(SET)
    (found / "vibration.avsc").write_text(json.dumps(AVRO))
    return found


def reader(directory: Path, value: pa.DataType = VALUE) -> PayloadReader:
    schema = pa.schema([("payload", pa.binary()), ("value", value), ("reason", pa.string()), ("item", pa.int32())])
    return PayloadReader(schema, payload_options({"payloadFormat": "topics", "payloadSchemaDirectory": str(directory)}), None)


def test_each_payload_is_parsed_in_the_format_of_its_topic(directory: Path) -> None:
    made = reader(directory)
    assert made.message_schema.names == ["payload", "topic"]
    for messages, rows in ((MESSAGES, ROWS), (MESSAGES[:1], ROWS[:1]), (MESSAGES[2:3], ROWS[2:3]), ([], [])):
        batch = pa.record_batch(
            {
                "payload": pa.array([sent for _, sent in messages], pa.binary()),
                "topic": pa.array([topic for topic, _ in messages], pa.string()),
            }
        )
        found = pa.Table.from_batches(made.rows(batch), made.schema)
        found.validate(full=True)
        expected = []
        for place, item, what in rows:
            row = dict(zip(("value", "axis", "n", "ts"), what)) if isinstance(what, tuple) else None
            expected.append({"payload": MESSAGES[place][1], "value": row, "item": item, "reason": what if row is None else None})
        assert found.to_pylist() == expected


@pytest.mark.parametrize(("text", "reason"), [
    ("", 'there is no table like ["sensors/#"], a topic filter'),
    ("[a", "not TOML: "),
    ("a = 5", '["a"]: needs a format: json, csv, number, sparkplug, avro, protobuf'),
    ('["a/#/b"]\nformat = "json"', '["a/#/b"]: is not a topic filter'),
    ('["a"]\nformat = "topics"', "[\"a\"]: format: 'topics' is none of json,"),
    ('["a"]\nformat = "xml"', "[\"a\"]: format: 'xml' is none of json,"),
    ('["a"]\nformat = "json"\nschema_file = "x"', '["a"]: schema_file: is for format avro and protobuf only'),
    ('["a"]\nformat = "json"\nscheme = "x"', '["a"]: scheme: unknown key'),
    ('["a"]\nformat = "csv"\nheader = "x"', "[\"a\"]: header: 'x' is of the wrong type"),
    ('["a"]\nformat = "csv"\nexplode = "true"', "[\"a\"]: explode: 'true' is of the wrong type"),
    ('["a"]\nformat = "csv"\nfield = "x"', '["a"]: field: is the name of the field that a payload of format number fills'),
    ('["a"]\nformat = "avro"', "[\"a\"]: schema_file: format avro needs either this or 'schema_directory'"),
    ('["a"]\nformat = "avro"\nschema_file = "none.avsc"', "none.avsc': No such file"),
    ('["a"]\nformat = "protobuf"\nschema_file = "plant.desc"\nmessage = "R"', '["a"]: schema_file: '),
])  # fmt: skip
def test_an_unusable_file_is_one_line(directory: Path, text: str, reason: str) -> None:
    (directory / "topics.toml").write_text(text)
    with pytest.raises(PayloadOptionError) as caught:
        payload_options({"payloadFormat": "topics", "payloadSchemaDirectory": str(directory)})
    assert reason in str(caught.value) and f"'payloadSchemaDirectory': '{directory}/topics.toml': " in str(caught.value)
    assert "\n" not in str(caught.value)
    table = {"stream": "s", "output": "o", "schema": "n long", "format": "topics", "schema_directory": str(directory)}
    with pytest.raises(ConfigError, match=f"tables.t.schema_directory: '{directory}/topics.toml': "):
        parse_config({"source": {"path": "d"}, "tables": {"t": table}})


def test_a_directory_is_needed(directory: Path) -> None:
    for options, reason in (
        ({}, "'payloadSchemaDirectory': 'payloadFormat' topics needs the directory of the file topics.toml"),
        ({"payloadSchemaDirectory": str(directory.parent)}, f"'{directory.parent}/topics.toml': No such file"),
        ({"payloadSchemaDirectory": str(directory), "payloadExplode": "true"}, "is for 'payloadFormat' json and csv only"),
    ):
        with pytest.raises(PayloadOptionError) as caught:
            payload_options({"payloadFormat": "topics", **options})
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (pa.float64(), "must be a struct for formats by topic"),
        (
            pa.struct([("value", pa.string()), ("axis", pa.string()), ("n", pa.int64())]),
            "[\"sensors/+/temperature\"]: option 'payloadSchemaFile'",
        ),
        (pa.struct([("axis", pa.string())]), "[\"sensors/+/temperature\"]: fills no field of 'value', which has axis"),
        (
            pa.struct([("value", pa.float64()), pa.field("n", pa.int64(), False)]),
            "[\"sensors/+/vibration\"]: has no field 'n', which is NOT NULL",
        ),
    ],
)
def test_columns_that_cannot_be_filled_are_refused(directory: Path, kind: pa.DataType, reason: str) -> None:
    with pytest.raises(PayloadSchemaError) as caught:
        reader(directory, kind)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_a_field_that_no_format_has_is_refused(directory: Path) -> None:
    (directory / "topics.toml").write_text(TOPICS[: TOPICS.index('["sensors/#"]')])
    with pytest.raises(PayloadSchemaError, match="topics.toml': no topic filter has a field 'ts'"):
        reader(directory)


def test_topics_in_spark_and_in_a_table(spark: SparkSession, tmp_path: Path, directory: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(place, *sent) for place, sent in enumerate(MESSAGES)])
    source = spark.read.format("mqtt").options(
        path=str(tmp_path / "data"), stream="sensors", payloadFormat="topics", payloadSchemaDirectory=str(directory)
    )
    read = source.schema(f"offset long, item int, value struct<{DDL}>, reason string").load()
    found = [
        (row.offset, row.item, row.what or row.reason)
        for row in read.orderBy("offset", "item").selectExpr("offset", "item", "value.value AS what", "reason").collect()
    ]
    assert found == [(place, item, what if isinstance(what, str) else what[0]) for place, item, what in ROWS]
    table = {
        "stream": "sensors",
        "output": str(tmp_path / "out"),
        "format": "topics",
        "schema": DDL,
        "schema_directory": str(directory),
        "columns": ["partition", "offset"],
    }
    [progress] = run(parse_config({"source": {"path": str(tmp_path / "data")}, "tables": {"t": table}}), once=True, session=spark)
    good = [(place, item, what) for place, item, what in ROWS if isinstance(what, tuple)]
    bad = [(place, what) for place, _, what in ROWS if isinstance(what, str)]
    assert (progress.rows, progress.bad) == (len(good), len(bad))
    rows = parquet_rows(tmp_path / "out")
    assert sorted((row["offset"], row["item"], (row["value"], row["axis"], row["n"], row["ts"])) for row in rows) == good
    assert sorted((row["offset"], row["reason"]) for row in parquet_rows(tmp_path / "out.rejected")) == bad


def test_payloads_of_any_data_frame(spark: SparkSession, directory: Path) -> None:
    frame = spark.createDataFrame(
        [(place, *sent) for place, sent in enumerate(MESSAGES)] + [(99, "sensors/p1/pressure", None)],
        "place long, topic string, payload binary",
    )
    added = f"value struct<{DDL}>, reason string, item int"
    found = parse_payloads(frame, added, payloadFormat="topics", payloadSchemaDirectory=str(directory))
    assert found.columns == ["place", "topic", "payload", "value", "reason", "item"]
    rows = [
        (row.place, row.item, row.reason or (row.value.value, row.value.axis, row.value.n))
        for row in found.orderBy("place", "item").collect()
    ]
    assert rows == [(place, item, what if isinstance(what, str) else what[:3]) for place, item, what in ROWS] + [(99, 0, "empty payload")]
    for columns, options, reason in (
        ("topic string", {"payloadFormat": "json"}, "there is a column 'topic' already"),
        ("value double, reason string", {"payloadFormat": "number", "payload": "x"}, "option 'payload': unknown"),
        ("value double, reason string", {"payloadFormat": "xml"}, "'xml' is none of json"),
        ("value double, reason string, qos byte", {"payloadFormat": "number"}, "column 'qos' is missing, not a column of payloads"),
    ):
        with pytest.raises(ValueError, match=reason):
            parse_payloads(frame, columns, **options)
    with pytest.raises(ValueError, match="column 'payload' is string"):
        parse_payloads(frame.select(frame.payload.cast("string")), "value double, reason string", payloadFormat="number")
