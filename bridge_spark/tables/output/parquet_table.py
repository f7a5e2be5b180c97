"""A table of Parquet files in directories: `batches=<first id>/*.parquet`.

Any reader that lists the table at any moment sees each batch once and completely, or not at all.  A directory has
consecutive batches and is never changed: the next batch is written to a new directory, together with hard links to the
existing files, and the two directories are swapped atomically.  Small files are merged in the same step.  A writer
that is killed leaves the table as it was before or after the swap.  `_batches.json` in the directory names the last
batch, so that a repeated batch is recognised even after its files were merged.

Merged rows take the name of the first of the merged files; the other names disappear.  A reader that lists before the
swap and opens after it finds all rows under the one name, or gets an error for a missing file and may start again.  It
would see rows twice only if it opened all other files before the swap and the first one after it.

If the file system cannot swap directories, each batch has its own directory, which is created by one rename, and files
are not merged.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.files import sync, sync_directory
from bridge_spark.tables.ingest_config import MERGE_FILES
from bridge_spark.tables.ingest_session import spark_path
from bridge_spark.tables.output.batch_table import ForeignBatch, Marker, StagingArea
from bridge_spark.tables.output.merge import can_merge, merge
from bridge_spark.tables.output.swap import can_swap, swap

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MARKER_FILE = "_batches.json"
SMALL_BYTES = 32 << 20  # smaller files are merged
DIRECTORY_BYTES = 1 << 30  # a larger directory gets no further batches
LISTING_S = 2.0  # how long a replaced directory is kept for readers that are listing it

_DIGITS = 10


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

    ``merge_files`` small files of a directory are merged when a batch is published, None for never.
    """

    def __init__(self, directory: Path, merge_files: Optional[int] = MERGE_FILES) -> None:
        self.directory = directory
        self.place = str(directory)
        self._merge_files = merge_files
        self._staging = StagingArea(directory)
        self._can_swap = False
        self._retired: list[tuple[float, Path]] = []  # replaced directories, and when each may be removed

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._staging.reset()
        self._can_swap = can_swap(self._staging.path)

    def clean(self) -> None:
        self._remove_retired()
        self._staging.remove({path for _, path in self._retired})

    def has_batches(self) -> bool:
        return self._newest() is not None

    def stage(self, rows: DataFrame, batch: int) -> StagedDirectory:
        staged = self.new_directory(batch)
        rows.write.parquet(spark_path(staged.path))
        return staged

    def new_directory(self, batch: int) -> StagedDirectory:
        """A directory for the files of a batch, which does not exist yet."""
        return StagedDirectory(self._staging.new(batch))

    def committed(self, batch: int, checkpoint: str) -> Optional[Marker]:
        newest = self._newest()
        marker = None if newest is None else _read_marker(newest)
        if marker is None or marker["batch"] < batch:
            return None
        if marker["checkpoint"] != checkpoint:
            raise ForeignBatch(f"batch {batch} in {self.directory} was made by another checkpoint")
        return marker

    def publish(self, batch: int, staged: StagedDirectory, marker: Marker) -> None:
        self._publish(batch, staged.path, marker)

    def _publish(self, batch: int, staged: Path, marker: Marker) -> None:
        added = _rename_files(batch, staged)
        newest = self._newest()
        if newest is not None and (self._has_batch(newest, batch) or self._has_room(newest)):
            self._replace(newest, batch, staged, marker)
            return
        _write_marker(staged, batch, marker)
        sync([*added, staged / MARKER_FILE, staged])
        os.rename(staged, self.directory / f"batches={batch}")
        sync_directory(self.directory)

    def publish_empty(self, batch: int, staged: Optional[StagedDirectory] = None) -> None:
        if staged is not None:
            staged.discard()
        newest = self._newest()
        if newest is not None and self._has_batch(newest, batch):
            empty = self._staging.new(batch)
            empty.mkdir()
            self._replace(newest, batch, empty, _read_marker(newest) or {})

    def maintain(self, batch: int) -> None:
        """Nothing to do: publishing merges."""

    def compact(self) -> int:
        """Merge the small files of each directory; return how many were merged.

        Files of the newest batch are left out, as that batch may be replaced.  Raises `OSError` if the file system
        cannot swap directories.
        """
        if not self._can_swap:
            raise OSError(f"{self.directory}: the file system cannot swap directories, so that merging its files "
                          f"would show rows twice; use table_format = \"delta\"")
        merged = 0
        for directory in self._directories():
            marker = _read_marker(directory) or {"batch": -1}
            small = self._small_files(directory, int(marker["batch"]) if directory == self._newest() else None)
            if len(small) > 1:
                staged = self._staging.new(int(marker["batch"]))
                staged.mkdir()
                self._replace(directory, int(marker["batch"]), staged, marker, small)
                merged += len(small)
        return merged

    def _replace(
        self, directory: Path, batch: int, staged: Path, marker: Marker, small: Optional[Sequence[Path]] = None
    ) -> None:
        """Replace ``directory`` by ``staged``, after adding the files of the other batches to it.

        ``small`` are the files to merge; None merges the directory's small files if there are enough.
        """
        added = sorted(staged.glob("*.parquet"))
        if small is None:
            small = self._small_files(directory, batch)
            replaced = _files_of(directory, batch)
            if self._merge_files is None or len(small) < self._merge_files or not self._can_swap:
                small = []
        else:
            replaced = []
        if small:
            target = staged / small[0].name
            merge(small, target)
            added.append(target)
        for path in _data_files(directory):
            if path not in small and path not in replaced:
                os.link(path, staged / path.name)
        _write_marker(staged, batch, marker)
        sync([*added, staged / MARKER_FILE, staged])
        if not swap(staged, directory):
            aside = self._staging.new(batch)
            os.rename(directory, aside)
            os.rename(staged, directory)
            staged = aside
        sync_directory(self.directory)
        self._retired.append((time.monotonic() + LISTING_S, staged))
        self._remove_retired()

    def _has_room(self, directory: Path) -> bool:
        return self._can_swap and sum(path.stat().st_size for path in _data_files(directory)) < DIRECTORY_BYTES

    def _small_files(self, directory: Path, newest: Optional[int]) -> list[Path]:
        """The files below `SMALL_BYTES` that can be merged, without those of the batch ``newest``."""
        kept = [] if newest is None else _files_of(directory, newest)
        return [path for path in _data_files(directory) if path not in kept and path.stat().st_size < SMALL_BYTES
                and can_merge(path)]

    def _has_batch(self, directory: Path, batch: int) -> bool:
        marker = _read_marker(directory)
        return marker is not None and marker["batch"] >= batch

    def _directories(self) -> list[Path]:
        found = self.directory.glob("batches=*") if self.directory.is_dir() else iter(())
        return sorted(found, key=lambda path: int(path.name.removeprefix("batches=")))

    def _newest(self) -> Optional[Path]:
        directories = self._directories()
        return directories[-1] if directories else None

    def _remove_retired(self) -> None:
        now = time.monotonic()
        for until, path in self._retired:
            if until <= now:
                shutil.rmtree(path, ignore_errors=True)
        self._retired = [(until, path) for until, path in self._retired if until > now]


def _rename_files(batch: int, staged: Path) -> list[Path]:
    """Put the batch id into the names of the data files that Spark wrote, and remove its other files."""
    renamed = []
    for number, path in enumerate(sorted(staged.iterdir())):
        if path.suffix == ".parquet" and not path.name.startswith((".", "_")):
            renamed.append(path.rename(staged / f"{batch:0{_DIGITS}d}.{number}.parquet"))
        else:
            path.unlink()
    return renamed


def _data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.parquet"))


def _files_of(directory: Path, batch: int) -> list[Path]:
    return sorted(directory.glob(f"{batch:0{_DIGITS}d}.*.parquet"))


def _read_marker(directory: Path) -> Optional[Marker]:
    try:
        return dict(json.loads((directory / MARKER_FILE).read_bytes()))
    except FileNotFoundError:
        return None


def _write_marker(directory: Path, batch: int, marker: Marker) -> None:
    (directory / MARKER_FILE).write_text(json.dumps({**marker, "batch": batch}, sort_keys=True))
