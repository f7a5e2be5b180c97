"""Writes rows to the staging area with Spark, and checks that all of them arrived."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from bridge_spark.tables.ingest_session import IngestError, spark_path


def write_staged(rows: DataFrame, staged: Path) -> int:
    """Write the rows as Parquet files and return their number.  Raises `IngestError` as `check_staged`."""
    counts = Observation()
    rows.observe(counts, F.count(F.lit(1)).alias("rows")).write.parquet(spark_path(staged))
    check_staged(staged, int(counts.get["rows"]))
    return int(counts.get["rows"])


def check_staged(staged: Path, rows: int) -> None:
    """Raise `IngestError` unless the files have all ``rows``: executors on other machines may use other disks."""
    found = sum(pq.read_metadata(path).num_rows for path in staged.glob("*.parquet"))
    if found != rows:
        raise IngestError(f"of {rows:,} rows that were written {found:,} are in {staged}: "
                          f"the driver and all executors must share the disk of the tables")
