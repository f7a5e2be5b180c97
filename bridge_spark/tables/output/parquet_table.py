"""A table of Parquet files in one directory: `<batch id>.<number>.parquet`.

Any reader that lists the directory at any moment sees each batch once and completely, or not at all.  A batch of one file
is added by one rename.  For a batch of several, a new directory gets them and hard links to the existing files, and the two
directories are swapped atomically.  Small files are merged by such a swap.  A writer that is killed leaves the table as it
was before or after the step.  The marker of the newest batch is beside the directory, as some readers take every file in it
for data; it is written first and names the batch's files, so the batch is published if these are there.

`0.columns.parquet` has the table's columns and no rows: an empty table can be read, and readers that take the columns from
the first file find all of them.

Merged rows take the name of the first of the merged files; the other names disappear.  A reader that lists before the
swap and opens after it finds all rows under the one name, or gets an error for a missing file and may start again.  It
would see rows twice only if it opened all other files before the swap and the first one after it.

If the file system cannot swap directories, the files of a batch are merged to one, and those of several batches never.

Earlier versions wrote directories `batches=<first id>`, whose name some readers made a column of; `prepare` moves their
files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.files import replace_file, sync, sync_directory
from bridge_spark.tables.ingest_config import MERGE_FILES
from bridge_spark.tables.ingest_session import spark_path
from bridge_spark.tables.output.batch_table import ForeignBatch, Marker, StagingArea, TableError
from bridge_spark.tables.output.merge import can_merge, merge
from bridge_spark.tables.output.swap import can_swap, swap

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

COLUMNS_FILE = "0.columns.parquet"  # sorted before the files of batches
FORMER_MARKER = "_batches.json"
SMALL_BYTES = 32 << 20  # smaller files are merged
LISTING_S = 2.0  # how long a replaced directory is kept for readers that are listing it

_DIGITS = 10
_DATA_FILE = re.compile(rf"\d{{{_DIGITS},}}\.\d+\.parquet")
_FORMER_DIRECTORY = re.compile(r"batches=(\d+)")


@dataclass(frozen=True)
class StagedDirectory:
    """The files of a batch in a directory of the staging area."""

    path: Path

    def rows(self) -> int:
        return sum(int(pq.read_metadata(path).num_rows) for path in self.path.glob("*.parquet"))

    def __str__(self) -> str:
        return str(self.path)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class ParquetBatchTable:
    """The batches in ``directory``; the file system must rename atomically.

    ``merge_files`` small files are merged when a batch is published, None for never.
    """

    def __init__(self, directory: Path, merge_files: int | None = MERGE_FILES) -> None:
        self.directory = directory.resolve()  # a link would be swapped instead of the directory
        self.place = str(directory)
        self._merge_files = merge_files
        self._staging = StagingArea(self.directory)
        self._marker_file = marker_file(self.directory)
        self._can_swap = False
        self._retired: list[tuple[float, Path]] = []  # replaced directories, and when each may be removed

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if path.is_dir() and _FORMER_DIRECTORY.fullmatch(path.name) is None:
                raise TableError(f"{path} is not of this table: give the table a directory of its own")
        self._staging.reset()
        self._can_swap = can_swap(self._staging.path)
        former = _former_directories(self.directory)
        if former:
            self._take_over(former)

    def clean(self) -> None:
        self._remove_retired()
        self._staging.remove({path for _, path in self._retired})

    def create(self, spark: SparkSession, schema: StructType) -> None:
        columns = self.directory / COLUMNS_FILE
        known = {name.lower() for name in pq.read_schema(columns).names} if columns.exists() else set()
        if known.issuperset(name.lower() for name in schema.names) and columns.exists():
            return
        staged = StagedDirectory(self._staging.new(0))
        spark.createDataFrame([], schema).write.parquet(spark_path(staged.path))
        path = next(staged.path.glob("*.parquet"), None)
        if path is None:
            raise TableError(f"a file that was written is not in {staged}: the driver and all executors must share the disk of the tables")
        sync([path])
        os.rename(path, columns)
        sync_directory(self.directory)
        staged.discard()

    def has_batches(self) -> bool:
        return bool(_data_files(self.directory) or _former_directories(self.directory))

    def stage(self, rows: DataFrame, batch: int) -> StagedDirectory:
        self.create(rows.sparkSession, rows.schema)
        staged = self.new_directory(batch)
        rows.write.parquet(spark_path(staged.path))
        return staged

    def new_directory(self, batch: int) -> StagedDirectory:
        """A directory for the files of a batch, which does not exist yet."""
        return StagedDirectory(self._staging.new(batch))

    def committed(self, batch: int, checkpoint: str) -> Marker | None:
        marker = self._read_marker()
        if marker is None:
            if self.has_batches():
                raise TableError(f"{self.place} has batches and {self._marker_file}, which says which, is missing: restore it")
            return None
        if self._last_batch(marker) < batch:
            return None
        if marker["checkpoint"] != checkpoint:
            raise ForeignBatch(f"batch {batch} in {self.place} was made by another checkpoint")
        return marker

    def publish(self, batch: int, staged: StagedDirectory, marker: Marker) -> None:
        files = _rename_files(batch, staged.path)
        replaced = _files_of(self.directory, batch)
        if not self._can_swap and len(files) > 1:
            if not can_merge(files[0]):
                raise TableError(
                    f"{self.place}: the file system cannot swap directories, and a batch of several files with "
                    f"variants cannot be merged to one: put the table on another file system"
                )
            files = [_merged(files)]
        small = self._small_files(batch) if self._can_swap and self._merge_files is not None else []
        merges = self._merge_files is not None and len(small) >= self._merge_files
        alone = len(files) == 1 and {path.name for path in replaced} <= {files[0].name}
        sync(files)
        self._write_marker(batch, marker, [path.name for path in files])
        if merges or (self._can_swap and not alone):
            self._replace(staged.path, small if merges else [], replaced)
            return
        os.rename(files[0], self.directory / files[0].name)
        for path in replaced:
            if path.name != files[0].name:
                path.unlink()
        sync_directory(self.directory)
        staged.discard()

    def publish_empty(self, batch: int, staged: StagedDirectory | None = None) -> None:
        if staged is not None:
            staged.discard()
        published = _files_of(self.directory, batch)
        if not published:
            return
        self._write_marker(batch, self._read_marker() or {}, [])
        if len(published) == 1 or not self._can_swap:
            for path in published:
                path.unlink()
            sync_directory(self.directory)
            return
        empty = self._staging.new(batch)
        empty.mkdir()
        self._replace(empty, [], published)

    def maintain(self, batch: int) -> None:
        """Nothing to do: publishing merges."""

    def compact(self) -> int:
        """Merge the small files; return how many were merged.

        Files of the newest batch are left out, as that batch may be replaced.  Raises `OSError` if the file system
        cannot swap directories.
        """
        if not self._can_swap:
            raise OSError(
                f"{self.directory}: the file system cannot swap directories, so that merging its files "
                f'would show rows twice; use table_format = "delta"'
            )
        marker = self._read_marker()
        newest = -1 if marker is None else self._last_batch(marker)
        small = self._small_files(newest)
        if len(small) < 2:
            return 0
        staged = self._staging.new(newest)
        staged.mkdir()
        self._replace(staged, small, [])
        return len(small)

    def _replace(self, staged: Path, small: Sequence[Path], replaced: Sequence[Path]) -> None:
        """Swap the table's directory with ``staged``, after adding the table's files to it.

        The files ``small`` are merged, and ``replaced`` left out.
        """
        added: list[Path] = []
        if small:
            added.append(staged / small[0].name)
            merge(small, added[0])
        for path in self.directory.iterdir():
            if path not in small and path not in replaced and path.is_file():
                os.link(path, staged / path.name)
        self._swap(staged, added)

    def _swap(self, staged: Path, added: Sequence[Path]) -> None:
        shutil.copymode(self.directory, staged)
        sync([*added, staged])
        if not swap(staged, self.directory):
            raise OSError(f"{self.directory} cannot be swapped with {staged} any more")
        sync_directory(self.directory.parent)
        self._retired.append((time.monotonic() + LISTING_S, staged))
        self._remove_retired()

    def _take_over(self, former: Sequence[Path]) -> None:
        """Move the files of the directories of earlier versions to the table's directory."""
        try:
            known: Marker = json.loads((former[-1] / FORMER_MARKER).read_bytes())
        except FileNotFoundError:
            pass  # a kill has interrupted the move of its files
        else:
            names = [path.name for path in _files_of(former[-1], int(known["batch"]))]
            self._write_marker(int(known["batch"]), known, names)
        if self._can_swap:
            staged = self._staging.new(0)
            staged.mkdir()
            for path in [*self.directory.iterdir(), *(file for directory in former for file in _data_files(directory))]:
                if path.is_file():
                    os.link(path, staged / path.name)
            self._swap(staged, [])
            return
        for directory in former:
            for path in _data_files(directory):
                os.rename(path, self.directory / path.name)
            (directory / FORMER_MARKER).unlink(missing_ok=True)
            sync_directory(self.directory)
            directory.rmdir()

    def _small_files(self, newest: int) -> list[Path]:
        """The files below `SMALL_BYTES` that can be merged, without those of the batch ``newest``."""
        kept = _files_of(self.directory, newest)
        return [path for path in _data_files(self.directory) if path not in kept and path.stat().st_size < SMALL_BYTES and can_merge(path)]

    def _last_batch(self, marker: Marker) -> int:
        """The last published batch: that of the marker, or the one before if its files are not there yet."""
        there = all((self.directory / name).exists() for name in marker["files"])
        return int(marker["batch"]) if there else int(marker["batch"]) - 1

    def _read_marker(self) -> Marker | None:
        try:
            return dict(json.loads(self._marker_file.read_bytes()))
        except FileNotFoundError:
            return None

    def _write_marker(self, batch: int, marker: Marker, files: Sequence[str]) -> None:
        document = json.dumps({**marker, "batch": batch, "files": list(files)}, sort_keys=True)
        replace_file(self._marker_file, document.encode())

    def _remove_retired(self) -> None:
        now = time.monotonic()
        for until, path in self._retired:
            if until <= now:
                shutil.rmtree(path, ignore_errors=True)
        self._retired = [(until, path) for until, path in self._retired if until > now]


def marker_file(directory: Path) -> Path:
    """The file with the marker of the newest batch of the table in ``directory``."""
    return directory.parent / f".{directory.name}.batch.json"


def _rename_files(batch: int, staged: Path) -> list[Path]:
    """Put the batch id into the names of the data files that Spark wrote, and remove its other files."""
    renamed: list[Path] = []
    for path in sorted(staged.iterdir()):
        if path.suffix == ".parquet" and not path.name.startswith((".", "_")):
            renamed.append(path.rename(staged / f"{batch:0{_DIGITS}d}.{len(renamed)}.parquet"))
        else:
            path.unlink()
    return renamed


def _merged(files: Sequence[Path]) -> Path:
    """One file, under the name of the first, in place of several."""
    target = files[0].with_name("merged")
    merge(files, target)
    for path in files[1:]:
        path.unlink()
    return target.rename(files[0])


def _data_files(directory: Path) -> list[Path]:
    names = os.listdir(directory) if directory.is_dir() else []
    return [directory / name for name in sorted(names) if _DATA_FILE.fullmatch(name)]


def _files_of(directory: Path, batch: int) -> list[Path]:
    return sorted(directory.glob(f"{batch:0{_DIGITS}d}.*.parquet"))


def _former_directories(directory: Path) -> list[Path]:
    """The directories of earlier versions, in order of their batches."""
    if not directory.is_dir():
        return []
    found = {int(match[1]): directory / match[0] for match in map(_FORMER_DIRECTORY.fullmatch, os.listdir(directory)) if match}
    return [found[batch] for batch in sorted(found)]
