"""Names of columns with dots and backticks, in all table formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from support.ingest_jobs import document
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run, run_backfill
from bridge_spark.tables.compact import compact
from bridge_spark.tables.config_section import ConfigError
from bridge_spark.tables.ingest_config import parse_config
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.jobs.backfill_range import parse_bound

pytestmark = [pytest.mark.one_build]

__all__ = ["spark"]

SCHEMA = "`PT08.S1` double not null, `a``b` long, device struct<`serial.no` string, ```` string>"
FIELDS = ["`PT08.S1`", "`a``b`", "device.`serial.no`", "device.```` as `.`"]
PAYLOAD = b'{"PT08.S1": %d.5, "a`b": %d, "device": {"serial.no": "s%d", "`": "q"}}'
NAMES = ["partition", "offset", "PT08.S1", "a`b", "serial.no", "."]


def settings(root: Path, table_format: str, **more: Any) -> dict[str, Any]:
    place = {"output": "n.t", "checkpoint": str(root / "c")} if table_format == "iceberg" else {}
    given = document(root, table_format=table_format, schema=SCHEMA, fields=FIELDS, columns=NAMES[:2], **place, **more)
    catalog = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": str(root / "warehouse")}
    return {**given, "catalog": catalog} if table_format == "iceberg" else given


def table_rows(root: Path, table_format: str, name: str = "") -> pa.Table:
    """The rows as readers other than Spark see them."""
    if table_format == "iceberg":
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("default", type="sql", uri=f"sqlite:///{root}/catalog.db", warehouse=str(root / "warehouse"))
        return catalog.load_table(f"n.t{name.replace('.', '_')}").scan().to_arrow()
    if DeltaTable.is_deltatable(str(root / f"out{name}")):
        return pa.table(DeltaTable(root / f"out{name}").to_pyarrow_table())
    return ds.dataset(root / f"out{name}").to_table()


def numbers(found: pa.Table, column: str) -> list[Any]:
    return [row[column] for row in sorted(found.to_pylist(), key=lambda row: row["offset"])]


@pytest.mark.parametrize("table_format", ["parquet", "delta", "iceberg"])
def test_dots_and_backticks(spark: SparkSession, tmp_path: Path, table_format: str) -> None:
    writer = StreamWriter(tmp_path / "data")
    aggregates = {"m": {"window": "1 second", "group_by": ["serial.no"], "values": ["PT08.S1", "a`b"]}}
    config = parse_config(
        settings(tmp_path, table_format, deduplicate_by=["a`b", "serial.no"], watermark="1 second", aggregates=aggregates)
    )
    for number in range(3):
        at = number * 10_000
        writer.append(0, [message(at + one, payload=PAYLOAD % (number, number, number)) for one in (0, 1)])
        writer.append(0, [message(at + 2, payload=b'{"PT08.S1": "text"}')])
        run(config, once=True, session=spark)
    compact(config)
    found = table_rows(tmp_path, table_format)
    assert found.schema.names == NAMES
    for column, values in (("PT08.S1", [0.5, 1.5, 2.5]), ("a`b", [0, 1, 2]), ("serial.no", ["s0", "s1", "s2"]), (".", ["q"] * 3)):
        assert numbers(found, column) == values
    windows = table_rows(tmp_path, table_format, ".m")
    assert {"serial.no", "PT08.S1_mean", "a`b_max"} <= {*windows.schema.names}
    assert {(row["serial.no"], row["PT08.S1_mean"], row["a`b_last"]) for row in windows.to_pylist()} >= {("s0", 0.5, 0)}
    run_backfill(config, parse_bound('{"0": 0}'), parse_bound('{"0": 4}'), session=spark)
    assert numbers(table_rows(tmp_path, table_format, ".backfill"), "PT08.S1") == [0.5, 1.5]
    if table_format == "parquet":
        assert duckdb.sql(f"""SELECT sum("PT08.S1") FROM '{tmp_path}/out/**/*.parquet'""").fetchall() == [(4.5,)]
        assert spark.read.parquet(f"file://{tmp_path}/out").select("`PT08.S1`", "`a``b`").count() == 3


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"fields": ["PT08.S1"]}, "schema: has no field 'PT08.S1', which 'fields' names"),
        ({"fields": ["`PT08.S1"]}, 'fields: \'`PT08.S1\' is not "FIELD" or "FIELD.FIELD as NAME"; a name with a dot is in backticks'),
        ({"fields": ["`PT08.S1` as `"]}, 'fields: .* is not "FIELD"'),
        ({"fields": ["``"]}, "fields: '``' is not"),
        ({"columns": ["topic as `"]}, "columns: 'topic as `' is not \"COLUMN\""),
    ],
)
def test_a_field_that_is_not_quoted_is_one_line(spark: SparkSession, tmp_path: Path, table: dict[str, Any], reason: str) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0)])
    with pytest.raises((ConfigError, IngestError), match=reason):
        run(parse_config(document(tmp_path, **{"schema": SCHEMA, **table})), once=True, session=spark)
    assert not (tmp_path / "out").exists()


def test_names_that_iceberg_cannot_tell_apart_are_refused_before_the_table_is_made(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0, payload=b'{"a.b": 1, "a": {"b": 2}}')])
    given = settings(tmp_path, "iceberg")
    given["tables"]["t"] |= {"schema": "`a.b` long, a struct<b long>", "fields": ["`a.b`", "a"]}
    with pytest.raises(IngestError, match="^ingest: tables.t: n.t: Invalid schema, multiple fields for name a.b") as refused:
        run(parse_config(given), once=True, session=spark)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "warehouse").exists() or not any((tmp_path / "warehouse").rglob("*.json"))
