"""Other programs read a Parquet table as it lies, from its creation on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from support.ingest_jobs import document
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run
from bridge_spark.tables.ingest_config import IngestConfig, parse_config

pytestmark = [pytest.mark.one_build]

__all__ = ["spark"]

COLUMNS = ["topic", "qos", "offset", "received", "n", "ts", "where", "_extra"]
REJECTED = ["topic", "payload", "qos", "retain", "partition", "offset", "timestamp", "client_id", "stream", "reason"]

Table = tuple[list[str], int]  # columns and rows


def by_duckdb(directory: Path) -> Table:
    found = duckdb.sql(f"FROM '{directory}/**/*.parquet'")
    return found.columns, len(found.fetchall())


def by_polars(directory: Path) -> Table:
    found = pl.read_parquet(directory)
    return found.columns, found.height


def by_pandas(directory: Path) -> Table:
    found = pd.read_parquet(directory)
    return [*found.columns], len(found)


def by_pyarrow(directory: Path) -> Table:
    found = pq.read_table(directory)
    return found.column_names, found.num_rows


READERS: list[Callable[[Path], Table]] = [by_duckdb, by_polars, by_pandas, by_pyarrow]


def settings(root: Path) -> IngestConfig:
    return parse_config(
        document(
            root,
            schema="n long not null, ts timestamp, where struct<x double, y array<string>>",
            extra_fields="map",
            columns=["topic", "qos", "offset", "timestamp as received"],
            watermark="1 second",
            compact_after=3,
            aggregates={"m": {"window": "1 second", "values": ["n"]}},
        )
    )


def check(spark: SparkSession, root: Path, table: str, columns: list[str], rows: int) -> None:
    for reader in READERS:
        assert reader(root / table) == (columns, rows), reader
    found = spark.read.parquet(f"file://{root / table}")
    assert (found.columns, found.count()) == (columns, rows)


def test_tables_are_read_as_they_lie(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    run(settings(tmp_path), once=True, session=spark)
    windows: list[str] = ["window_start", "window_end", "topic", "count", "n_mean", "n_min", "n_max", "n_last"]
    for table, columns in (("out", COLUMNS), ("out.rejected", REJECTED), ("out.m", windows)):
        check(spark, tmp_path, table, columns, 0)
    for number in range(5):
        at = number * 10_000
        writer.append(
            0,
            [
                message(at, payload=b'{"n": 1, "ts": "2026-01-01T00:00:00Z", "where": {"y": ["a"]}, "new": 2}'),
                message(at + 1, payload=b"none"),
            ],
        )
        run(settings(tmp_path), once=True, session=spark)
        check(spark, tmp_path, "out", COLUMNS, number + 1)
        check(spark, tmp_path, "out.rejected", REJECTED, number + 1)
    assert by_duckdb(tmp_path / "out.m") == (windows, 4)
    values: Any = pl.read_parquet(tmp_path / "out")
    assert values["n"].sum() == 5 and values["where"].struct.field("y").to_list() == [["a"]] * 5


def test_columns_that_came_later_are_found_in_the_first_file(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    for more in ("", ', "later": 1.5', ""):
        writer.append(0, [message(0, payload=b'{"n": 1%s}' % more.encode())])
        run(parse_config(document(tmp_path, extra_fields="add", columns=["offset"])), once=True, session=spark)
    assert by_pandas(tmp_path / "out") == by_pyarrow(tmp_path / "out") == (["offset", "n", "later", "_extra"], 3)
    found = spark.read.parquet(f"file://{tmp_path}/out")
    assert found.where("later = 1.5").count() == 1 and found.count() == 3
    assert pl.read_parquet(tmp_path / "out", missing_columns="insert")["later"].to_list() == [None, 1.5, None]
