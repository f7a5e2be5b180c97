"""Stages the rows of a batch, and checks that all of them arrived."""

from __future__ import annotations

from typing import TypeVar

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.output.batch_table import BatchTable, Staged

S = TypeVar("S", bound=Staged)


def stage_counted(table: BatchTable[S], rows: DataFrame, batch: int) -> tuple[S, int]:
    """Stage the rows; return their number too.  Raises `IngestError` as `check_staged`."""
    counts = Observation()
    staged = table.stage(rows.observe(counts, F.count(F.lit(1)).alias("rows")), batch)
    number = int(counts.get["rows"])
    check_staged(staged, number)
    return staged, number


def check_staged(staged: Staged, rows: int) -> None:
    """Raise `IngestError` unless the files have all ``rows``: executors on other machines may use other disks."""
    found = staged.rows()
    if found != rows:
        raise IngestError(
            f"of {rows:,} rows that were written {found:,} are in {staged}: the driver and all executors must share the disk of the tables"
        )
