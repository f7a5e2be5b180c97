"""Merges Parquet files.

Rows keep their order and types.  A column that a file does not have is NULL in its rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

ROW_GROUP_ROWS = 256 * 1024


_SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
_VARIANT = re.compile(rb'(?:type|elementType|valueType)":"variant"')


def can_merge(path: Path) -> bool:
    """Whether a file has no variants: pyarrow would write them as structs, which readers take for another type."""
    metadata = pq.read_metadata(path).metadata or {}
    return _VARIANT.search(metadata.get(_SPARK_SCHEMA, b"")) is None


def merge(files: Sequence[Path], target: Path) -> None:
    """Write the rows of ``files`` to ``target``, with one row group in memory.

    Raises `pyarrow.ArrowInvalid` if a column has different types.
    """
    # Spark's schema in the metadata would hide columns that only later files have.
    schema = pa.unify_schemas([pq.read_schema(path).remove_metadata() for path in files])
    pending: list[pa.Table] = []
    rows = 0
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for path in files:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(ROW_GROUP_ROWS):
                    pending.append(_with_schema(pa.table(batch), schema))
                    rows += batch.num_rows
                    if rows >= ROW_GROUP_ROWS:
                        writer.write_table(pa.concat_tables(pending), ROW_GROUP_ROWS)
                        pending, rows = [], 0
        if pending:
            writer.write_table(pa.concat_tables(pending), ROW_GROUP_ROWS)


def _with_schema(table: Any, schema: Any) -> Any:
    columns = [table.column(field.name) if field.name in table.schema.names else pa.nulls(table.num_rows, field.type) for field in schema]
    return pa.table(columns, schema=schema)
