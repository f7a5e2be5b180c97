"""Batches of numbers in a `BatchTable`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge_spark.tables.output.batch_table import BatchTable

MARK = {"checkpoint": "c"}


def stage(table: BatchTable, batch: int, rows: int = 2, files: int = 2, **columns: Any) -> Path:
    """Write a staged batch as Spark does: ``files`` files of ``rows`` rows each."""
    staged = table.stage(batch)
    staged.mkdir()
    for number in range(files):
        values = [batch * 1000 + number * rows + row for row in range(rows)]
        pq.write_table(pa.table({"n": values, **{key: [value] * rows for key, value in columns.items()}}),
                       staged / f"part-{number}.parquet")
    (staged / "_SUCCESS").write_text("")
    (staged / ".part-0.parquet.crc").write_text("")
    return staged


def publish(table: BatchTable, batch: int, **given: Any) -> None:
    table.publish(batch, stage(table, batch, **given), MARK)


def batches(*numbers: int) -> list[int]:
    return [number * 1000 + row for number in numbers for row in range(4)]


def parquet_numbers(directory: Path) -> list[int]:
    return sorted(pq.read_table(directory)["n"].to_pylist())
