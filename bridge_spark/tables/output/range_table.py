"""A table of ranges that `--backfill` wrote, each of which is replaced as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bridge_spark.log.files import sync, sync_directory
from bridge_spark.tables.ingest_config import SinkConfig
from bridge_spark.tables.output.batch_table import Staged, TableError
from bridge_spark.tables.output.data_files import StagedFiles
from bridge_spark.tables.output.file_table import FileTable
from bridge_spark.tables.output.parquet_table import StagedDirectory
from bridge_spark.tables.output.swap import swap
from bridge_spark.tables.output.table_format import in_directory, open_table
from bridge_spark.tables.recorded_columns import RANGE_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FILES = "range-"


class RangeTable(Protocol):
    """A table of ranges by name.  All methods may raise `TableError` or `OSError`."""

    place: str

    def ranges(self) -> Iterator[tuple[str, str]]:
        """The names of the ranges in the table, and where each is."""

    def stage(self, rows: DataFrame, name: str) -> Staged:
        """Write the rows of a range to files that no reader sees."""

    def replace(self, name: str, staged: Any | None) -> None:
        """Create or replace the range ``name`` atomically; None removes it."""


class RangeDirectories:
    """The ranges as directories of Parquet files in ``directory``, staged in the directory ``staging``."""

    def __init__(self, directory: Path, staging: Path) -> None:
        self.place = str(directory)
        self._directory = directory
        self._staging = staging

    def ranges(self) -> Iterator[tuple[str, str]]:
        return ((path.name, str(path)) for path in self._directory.glob(f"{RANGE_PREFIX}*_*"))

    def stage(self, rows: DataFrame, name: str) -> StagedDirectory:
        from bridge_spark.tables.ingest_session import spark_path

        staged = StagedDirectory(self._aside("staged"))
        rows.write.parquet(spark_path(staged.path))
        return staged

    def replace(self, name: str, staged: StagedDirectory | None) -> None:
        target = self._directory / name
        if staged is None:
            if target.exists():
                os.rename(target, self._aside("replaced"))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in staged.path.iterdir():
            if path.name.startswith((".", "_")):
                path.unlink()
        sync([*staged.path.iterdir(), staged.path])
        if target.exists() and not swap(staged.path, target):
            shutil.rmtree(target)
        if not target.exists():
            os.rename(staged.path, target)
        sync_directory(target.parent)

    def _aside(self, kind: str) -> Path:
        path = self._staging / f"{self._directory.name}-{kind}-{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        return path


class RangeFiles:
    """The ranges in a Delta or Iceberg table: the names of a range's files begin with it."""

    def __init__(self, table: FileTable) -> None:
        self.place = table.place
        self._table = table

    def ranges(self) -> Iterator[tuple[str, str]]:
        for file in sorted({file.rpartition("-")[0] for file in self._table.names()}):
            if not file.startswith(_FILES):
                raise TableError(f"{self.place} has files of another writer, whose ranges are unknown: give another 'backfill'")
            name = RANGE_PREFIX + file.removeprefix(_FILES).replace("~", ",")
            yield name, f"{self.place} ({name})"

    def stage(self, rows: DataFrame, name: str) -> StagedFiles:
        return self._table.stage_named(rows, _file_prefix(name))

    def replace(self, name: str, staged: StagedFiles | None) -> None:
        if (staged is not None and staged.files) or self._table.names():
            self._table.replace(_file_prefix(name), () if staged is None else staged.files)


def open_ranges(sink: SinkConfig, place: str, staging: Path) -> RangeTable:
    """The ranges at ``place``: directories of Parquet files, or a table of the configured format."""
    table = None if in_directory(sink, place) else open_table(sink, place)
    return RangeFiles(table) if isinstance(table, FileTable) else RangeDirectories(Path(place), staging)


def _file_prefix(name: str) -> str:
    return _FILES + name.removeprefix(RANGE_PREFIX).replace(",", "~") + "-"
