"""Many small Parquet files made into few, row by row the same.

The rule kept here: the rows keep their order and their types; a column that
only some files have is NULL in the rows of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

ROW_GROUP_ROWS = 256 * 1024


def merge(files: Sequence[Path], target: Path) -> None:
    """Write the rows of ``files`` to ``target``, holding one row group in
    memory.  Raises `pyarrow.ArrowInvalid` for types that do not fit together."""
    # Spark's own description of a file's columns would hide those that came later.
    schema = pa.unify_schemas([pq.read_schema(path).remove_metadata() for path in files])
    waiting: list[pa.Table] = []
    rows = 0
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for path in files:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(ROW_GROUP_ROWS):
                    waiting.append(_fitted(pa.table(batch), schema))
                    rows += batch.num_rows
                    if rows >= ROW_GROUP_ROWS:
                        writer.write_table(pa.concat_tables(waiting), ROW_GROUP_ROWS)
                        waiting, rows = [], 0
        if waiting:
            writer.write_table(pa.concat_tables(waiting), ROW_GROUP_ROWS)


def _fitted(table: Any, schema: Any) -> Any:
    columns = [table.column(field.name) if field.name in table.schema.names else pa.nulls(table.num_rows, field.type)
               for field in schema]
    return pa.table(columns, schema=schema)
