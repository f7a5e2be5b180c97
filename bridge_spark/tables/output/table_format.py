"""The choice of a table's format by its settings."""

from __future__ import annotations

from pathlib import Path

from bridge_spark.tables.ingest_config import SinkConfig
from bridge_spark.tables.output.batch_table import BatchTable
from bridge_spark.tables.output.delta_table import DeltaBatchTable
from bridge_spark.tables.output.parquet_table import ParquetBatchTable


def open_table(sink: SinkConfig, directory: Path) -> BatchTable:
    """The table in ``directory``, in the configured format."""
    table_class = DeltaBatchTable if sink.table_format == "delta" else ParquetBatchTable
    return table_class(directory, sink.merge_files)
