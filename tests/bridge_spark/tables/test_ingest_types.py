"""Types of columns in tables: variants are written, and what a payload or a table cannot hold is refused before the job starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyspark.sql import SparkSession
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run, run_backfill
from bridge_spark.tables.compact import compact
from bridge_spark.tables.ingest_config import IngestConfig, parse_config
from bridge_spark.tables.ingest_session import IngestError

pytestmark = pytest.mark.one_build

__all__ = ["spark"]


def config(tmp_path: Path, **keys: Any) -> IngestConfig:
    output = "n.t" if keys.get("table_format") == "iceberg" else str(tmp_path / "t")
    table = {"stream": "sensors", "columns": ["offset"], "output": output, "checkpoint": str(tmp_path / "checkpoint"), **keys}
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": str(tmp_path / "w")}
    return parse_config({"source": {"path": str(tmp_path / "data")}, "catalog": catalog, "tables": {"t": table}})


def test_variants_are_written_to_parquet(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    settings = config(tmp_path, schema="v variant, l array<variant>", compact_after=2)
    payloads = [b'{"v":{"a":1.5},"l":[1,null]}', b'{"v":null}', b"{}", b'{"v":[true]}']
    for number, payload in enumerate(payloads):
        writer.append(0, [message(number, "t", payload)])
        [table] = run(settings, once=True, session=spark)
        assert (table.rows, table.bad) == (1, 0)
    compact(settings)
    expected = [(0, '{"a":1.5}', "null"), (1, "null", None), (2, None, None), (3, "[true]", None)]
    found = spark.read.option("mergeSchema", "true").parquet(str(tmp_path / "t")).orderBy("offset")
    assert [tuple(row) for row in found.selectExpr("offset", "to_json(v)", "to_json(l[1])").collect()] == expected
    by_duckdb = duckdb.sql(f'SELECT "offset", v FROM read_parquet(\'{tmp_path}/t/**/*.parquet\') ORDER BY "offset"')
    assert by_duckdb.fetchall()[3] == (3, [True])
    run_backfill(settings, {0: 0}, {0: 4}, session=spark)
    again = spark.read.parquet(str(tmp_path / "t.backfill")).orderBy("offset")
    assert [tuple(row) for row in again.selectExpr("offset", "to_json(v)", "to_json(l[1])").collect()] == expected


def test_columns_that_cannot_be_read_or_held_are_refused_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0, "t", b'{"v":1}')])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"schema": "v geometry(4326)"}, "field 'v' of 'value' cannot be geometry(4326) in JSON"),
        ({"schema": "o struct<v geography(any)>"}, "field 'o.v' of 'value' cannot be geography(any) in JSON"),
        (
            {"schema": "v interval year to month"},
            "field 'v' of 'value' cannot be interval year to month, which no payload format is read to",
        ),
        ({"schema": "v variant", "format": "csv"}, "field 'v' of 'value' cannot be variant in CSV"),
        ({"schema": "v array<int>", "format": "csv"}, "field 'v' of 'value' cannot be array<int> in CSV"),
        ({"schema": "v variant", "table_format": "delta"}, "column 'v' is variant, which Delta tables cannot hold"),
        (
            {"schema": "o struct<l array<variant>>", "table_format": "iceberg"},
            "column 'o.l[]' is variant, which Iceberg tables cannot hold",
        ),
        (
            {"schema": "`a b` int", "table_format": "delta"},
            "column 'a b' has one of the characters ' ,;{}()\\n\\t=', which Delta tables cannot hold",
        ),
        (
            {"schema": "l array<struct<`x=` int>>", "table_format": "delta"},
            "in column 'l[]' field 'x=' has one of the characters ' ,;{}()\\n\\t=', which Delta tables cannot hold",
        ),
    ]
    for keys, reason in cases:
        for call in (
            lambda settings: run(settings, once=True, session=spark),
            lambda settings: run_backfill(settings, {0: 0}, {0: 1}, session=spark),
        ):
            with pytest.raises(IngestError) as caught:
                call(config(tmp_path, **keys))
            assert str(caught.value).startswith(f"ingest: tables.t.schema: {reason}"), str(caught.value)
            assert "\n" not in str(caught.value)
    assert not (tmp_path / "t").exists() and not (tmp_path / "checkpoint").exists()
    settings = config(tmp_path, schema="`a b` int, v variant", fields=["a b as a_b"], table_format="delta")
    run(settings, once=True, session=spark)
