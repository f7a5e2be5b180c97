"""Batches of numbers in a `BatchTable`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge_spark.tables.output.batch_table import BatchTable
from bridge_spark.tables.output.data_files import StagedFiles, batch_prefix
from bridge_spark.tables.output.parquet_table import ParquetBatchTable

MARK = {"checkpoint": "c"}


def stage(table: BatchTable[Any], batch: int, rows: int = 2, files: int = 2, **columns: Any) -> Any:
    """Write a staged batch as Spark does: ``files`` files of ``rows`` rows each."""
    parts = []
    for number in range(files):
        values = [batch * 1000 + number * rows + row for row in range(rows)]
        parts.append(pa.table({"n": values, **{key: [value] * rows for key, value in columns.items()}}))
    if not isinstance(table, ParquetBatchTable):
        writer = table.writer(batch_prefix(batch), parts[0].schema)
        return StagedFiles([file for part in parts for file in writer.write(part.to_batches())], writer.storage)
    staged = table.new_directory(batch)
    staged.path.mkdir()
    for number, part in enumerate(parts):
        pq.write_table(part, staged.path / f"part-{number}.parquet")
    (staged.path / "_SUCCESS").write_text("")
    (staged.path / ".part-0.parquet.crc").write_text("")
    return staged


def publish(table: BatchTable[Any], batch: int, **given: Any) -> None:
    table.publish(batch, stage(table, batch, **given), MARK)
    table.maintain(batch)


def batches(*numbers: int) -> list[int]:
    return [number * 1000 + row for number in numbers for row in range(4)]


def parquet_numbers(directory: Path) -> list[int]:
    return sorted(pq.read_table(directory)["n"].to_pylist())
