"""Columns of the ingest job from topics, nested payloads, unknown fields and Sparkplug metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run
from bridge_spark.source.payload_options import PAYLOAD_FORMATS
from bridge_spark.tables.ingest_config import FORMATS, parse_config

pytestmark = pytest.mark.one_build

__all__ = ["spark"]

JSON = {
    "topic": "sensors/{plant}/{machine}/json",
    "schema": "ts timestamp not null, reading struct<value double, unit string>",
    "fields": ["ts", "reading.value", "reading.unit as unit"],
    "timestamps": "ms",
    "extra_fields": "map",
    "explode": True,
    "columns": ["offset"],
}
METRICS = {"filter": "spBv1.0/#", "format": "sparkplug", "columns": ["offset", "timestamp as received"]}
# Two metrics, {name "t", datatype Double, 1.5} and {alias 7, datatype Boolean, true}, and seq 9.
SPARKPLUG = bytes.fromhex("120e 0a0174 200a 69000000000000f83f 1206 1007 200b 7001 1809")
# {name "u", datatype UInt32, int_value -12 in 64 bits}, {alias 8, datatype Int8, 300}, {alias 9, long_value 5}.
MIXED = bytes.fromhex("1210 0a0175 2007 50f4ffffffffffffffff01 1207 1008 2001 50ac02 1204 1009 5805")


def rows(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(directory).to_pylist()
    return sorted(found, key=lambda row: (row["offset"], row.get("item", 0)))


def test_columns_of_topics_payloads_and_metrics(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(
        0,
        [
            message(0, "sensors/p1/m1/json", b'{"ts": 1700000000123, "reading": {"value": 1.5, "unit": "C", "q": [1.0]}, "new": 2}'),
            message(1, "sensors/p2/m1/json", b'[{"ts": 0}, {"ts": 1, "reading": null}]'),
            message(2, "sensors/p2/m1/json", b'[{"ts": 0}, {"reading": null}]'),
            message(3, "spBv1.0/g/NDATA/n", SPARKPLUG),
            message(4, "spBv1.0/g/NDATA/n", SPARKPLUG[:-1]),
            message(5, "elsewhere", b"{}"),
            message(6, "spBv1.0/g/NDATA/n", MIXED),
        ],
    )
    tables = {name: {"stream": "sensors", "output": str(tmp_path / name), **keys} for name, keys in (("json", JSON), ("metrics", METRICS))}
    for name, counts in (("json", (3, 1)), ("metrics", (4, 2))):
        config = {"source": {"path": str(tmp_path / "data")}, "tables": {name: tables[name]}}
        [table] = run(parse_config(config), once=True, session=spark)
        assert (table.rows, table.bad) == counts
    time = [datetime.fromtimestamp(seconds, UTC) for seconds in (1_700_000_000.123, 0, 0.001)]
    names = ("offset", "plant", "machine", "item", "ts", "value", "unit", "_extra")
    found = rows(tmp_path / "json")
    assert [tuple(row[name] for name in names) for row in found] == [
        (0, "p1", "m1", 0, time[0], 1.5, "C", [("reading", '{"q":[1.0]}'), ("new", "2")]),
        (1, "p2", "m1", 0, time[1], None, None, []),
        (1, "p2", "m1", 1, time[2], None, None, []),
    ]
    [bad] = rows(tmp_path / "json.rejected")
    assert (bad["offset"], bad["reason"], bad["payload"]) == (
        2,
        "field 'ts' is missing",
        b'[{"ts": 0}, {"reading": null}]',
    )
    names = ("offset", "item", "name", "alias", "datatype", "long", "double", "boolean", "seq")
    assert [tuple(row[name] for name in names) for row in rows(tmp_path / "metrics")] == [
        (3, 0, "t", None, "Double", None, 1.5, None, 9),
        (3, 1, None, 7, "Boolean", None, None, True, 9),
        (6, 0, "u", None, "UInt32", 4294967284, None, None, None),
        (6, 1, None, 9, None, 5, None, None, None),
    ]
    bad, mixed = rows(tmp_path / "metrics.rejected")
    assert (bad["offset"], bad["reason"], bad["payload"]) == (4, "not a Sparkplug payload", SPARKPLUG[:-1])
    assert (mixed["offset"], mixed["reason"], mixed["payload"]) == (6, "metric 1: does not fit its datatype", MIXED)


def test_all_formats_but_raw_are_parsed_by_the_source(spark: SparkSession) -> None:
    assert {*FORMATS} == {*PAYLOAD_FORMATS, "raw"}
    from bridge_spark.tables.rows.payloads import SchemaError, payload_schema, source_schema

    def config(**keys: Any) -> Any:
        return parse_config({"source": {"path": "d"}, "tables": {"t": {"stream": "s", "output": "o", **keys}}}).tables[0].payload

    schema = payload_schema(config(format="number"))
    assert schema == StructType().add("value", "double", False)
    assert source_schema(config(format="number"), schema).fieldNames()[-3:] == ["value", "reason", "rejected"]
    for keys, reason in (
        ({"schema": "a int", "fields": ["b"]}, "no field 'b'"),
        ({"schema": "a int", "fields": ["a.b"]}, "no field 'a.b'"),
        ({"schema": "plant int", "topic": "s/{plant}"}, "two columns are named 'plant'"),
        ({"schema": "a string", "format": "number"}, "number type"),
    ):
        with pytest.raises(SchemaError, match=reason):
            payload_schema(config(**keys))
