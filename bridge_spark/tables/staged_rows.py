"""Rows that Spark writes where no reader looks yet.

The rule kept here: nothing is published that did not arrive whole on the disk of the tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bridge_spark.tables.ingest_session import IngestError, spark_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write(rows: DataFrame, staged: Path) -> int:
    """Let Spark write the rows there, and count them; raises as `check_written`."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    counts = Observation()
    rows.observe(counts, F.count(F.lit(1)).alias("rows")).write.parquet(spark_path(staged))
    check_written(staged, int(counts.get["rows"]))
    return int(counts.get["rows"])


def check_written(staged: Path, rows: int) -> None:
    """Raise `IngestError` unless all that Spark has written is there: executors may write to disks of their own."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    found = sum(pq.read_metadata(path).num_rows for path in staged.glob("*.parquet"))
    if found != rows:
        raise IngestError(f"of {rows:,} rows that were written {found:,} are in {staged}: "
                          f"the driver and all executors must share the disk of the tables")
