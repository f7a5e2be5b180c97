"""The choice of a table's format by its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge_spark.tables.ingest_config import SinkConfig, is_url
from bridge_spark.tables.output.batch_table import BatchTable
from bridge_spark.tables.output.delta_table import DeltaBatchTable
from bridge_spark.tables.output.iceberg_table import IcebergBatchTable
from bridge_spark.tables.output.parquet_table import ParquetBatchTable


def open_table(sink: SinkConfig, place: str) -> BatchTable[Any]:
    """The table at ``place``, in the configured format."""
    if sink.table_format == "iceberg":
        return IcebergBatchTable(place, sink.catalog, sink.merge_files, sink.expire_after)
    if sink.table_format == "delta":
        return DeltaBatchTable(place, sink.merge_files, sink.expire_after, sink.storage)
    return ParquetBatchTable(Path(place), sink.merge_files)


def open_dead_letters(sink: SinkConfig, place: str) -> BatchTable[Any]:
    """The dead letters of a table: Parquet in a directory, otherwise in the table's format."""
    return ParquetBatchTable(Path(place), sink.merge_files) if in_directory(sink, place) else open_table(sink, place)


def in_directory(sink: SinkConfig, place: str) -> bool:
    """Whether a table that belongs to another is a directory; such tables are Parquet."""
    return sink.table_format != "iceberg" and not is_url(place)
