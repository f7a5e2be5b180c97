"""A table as directories of Parquet files: `batches=<first id>/*.parquet`.

The rule kept here: whoever lists the table, at any moment and with any reader,
sees each batch whole or not at all, and never twice.  A directory holds
consecutive batches and never changes: the next batch is written beside it,
together with links to the files that are there, and the two directories are
swapped in one step.  So small files are merged in the same step, and a killed
writer leaves the table as it was before or after.  `_batches.json` in the
directory says which batch came last, so a repeated batch is recognised also
after its files were merged.

Merged rows take the name of the first of their files, and the other names go.
So a reader that lists and opens while this happens finds all rows under the
one name, or is told that a file it has listed is not there, and may start
again.  It would see rows twice only if it had opened each of the other files
before the swap, and the first one, which it had listed before, after it.

Where the file system cannot swap directories, each batch has its own, which
comes by one rename, and nothing is merged.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from bridge_spark.log.files import sync, sync_directory
from bridge_spark.tables.exchange import can_exchange, exchange

MARK = "_batches.json"
MERGE_FILES = 200
"""So many small files of one directory are merged."""
SMALL_BYTES = 32 << 20
"""A file that is not merged any more."""
DIRECTORY_BYTES = 1 << 30
"""So much in a directory begins the next one."""
LISTING_S = 2.0
"""A directory that was swapped out stays for readers that are listing it."""


_DIGITS = 10


class ForeignBatch(Exception):
    """A directory holds batches that another checkpoint made."""


class BatchTable:
    """The batches in ``directory``; the file system must rename atomically.

    A mark is a JSON object; its "checkpoint" says whose batches these are.

    One writer at a time, batch ids never fall.  The staging area beside the
    directory is hidden from readers that walk the parent.
    """

    def __init__(self, directory: Path, merge_files: Optional[int] = MERGE_FILES) -> None:
        self.directory = directory
        self._merge_files = merge_files
        self._staging = directory.parent / f".{directory.name}.staging"
        self._swaps = False
        self._retired: list[tuple[float, Path]] = []

    def prepare(self) -> None:
        """Create the directory, and remove what an earlier run has left behind."""
        self.directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir()
        self._swaps = can_exchange(self._staging)

    def clean(self) -> None:
        """Remove what nobody can be reading, the rest goes with the next run."""
        self._remove_retired()
        kept = {path for _, path in self._retired}
        if self._staging.is_dir():
            for path in self._staging.iterdir():
                if path not in kept:
                    shutil.rmtree(path, ignore_errors=True)
            if not kept:
                self._staging.rmdir()

    def has_batches(self) -> bool:
        return self._newest() is not None

    def stage(self, batch: int) -> Path:
        """A place to write the batch's files, not there yet."""
        self._staging.mkdir(parents=True, exist_ok=True)
        place = self._staging / f"{batch}-{os.getpid()}-{time.monotonic_ns()}"
        return place

    def done(self, batch: int, checkpoint: str) -> Optional[dict[str, Any]]:
        """What `publish` was given with the batch, or the newest one if that
        is later; None for a batch that did not come yet.

        Raises `ForeignBatch` for one of another checkpoint.
        """
        newest = self._newest()
        mark = None if newest is None else _read_mark(newest)
        if mark is None or mark["batch"] < batch:
            return None
        if mark["checkpoint"] != checkpoint:
            raise ForeignBatch(f"batch {batch} in {self.directory} was made by another checkpoint")
        return mark

    def publish(self, batch: int, staged: Path, mark: dict[str, Any]) -> None:
        """Make the staged files the batch, durably; a batch that was published
        last is replaced."""
        added = _named(batch, staged)
        newest = self._newest()
        if newest is not None and (self._is_batch_in(newest, batch) or self._grows(newest)):
            self._swap(newest, batch, staged, mark)
            return
        _write_mark(staged, batch, mark)
        sync([*added, staged / MARK, staged])
        os.rename(staged, self.directory / f"batches={batch}")
        sync_directory(self.directory)

    def withdraw(self, batch: int, staged: Optional[Path] = None) -> None:
        """The batch has no rows: drop what was staged and what stands there."""
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        newest = self._newest()
        if newest is not None and self._is_batch_in(newest, batch):
            empty = self.stage(batch)
            empty.mkdir()
            self._swap(newest, batch, empty, _read_mark(newest) or {})

    def compact(self) -> int:
        """Merge the small files of each directory, save those of the newest
        batch, which may have to be replaced; returns how many went into others.

        Raises `OSError` where the file system cannot swap directories.
        """
        if not self._swaps:
            raise OSError(f"{self.directory}: the file system cannot swap directories, so that merging its files "
                          f"would show rows twice; use table_format = \"delta\"")
        merged = 0
        for place in self._places():
            mark = _read_mark(place) or {"batch": -1}
            small = self._mergeable(place, int(mark["batch"]) if place == self._newest() else None)
            if len(small) > 1:
                staged = self.stage(int(mark["batch"]))
                staged.mkdir()
                self._swap(place, int(mark["batch"]), staged, mark, small)
                merged += len(small)
        return merged

    def _swap(
        self, place: Path, batch: int, staged: Path, mark: dict[str, Any], small: Optional[Sequence[Path]] = None
    ) -> None:
        """Let ``staged`` take the place, with the files of other batches in it."""
        from bridge_spark.tables.merge import merge

        added = sorted(staged.glob("*.parquet"))
        if small is None:
            small = self._mergeable(place, batch)
            replaced = _files_of(place, batch)
            if self._merge_files is None or len(small) < self._merge_files or not self._swaps:
                small = []
        else:
            replaced = []
        if small:
            target = staged / small[0].name
            merge(small, target)
            added.append(target)
        for path in _data_files(place):
            if path not in small and path not in replaced:
                os.link(path, staged / path.name)
        _write_mark(staged, batch, mark)
        sync([*added, staged / MARK, staged])
        if not exchange(staged, place):
            aside = self.stage(batch)
            os.rename(place, aside)
            os.rename(staged, place)
            staged = aside
        sync_directory(self.directory)
        self._retired.append((time.monotonic() + LISTING_S, staged))
        self._remove_retired()

    def _grows(self, place: Path) -> bool:
        return self._swaps and sum(path.stat().st_size for path in _data_files(place)) < DIRECTORY_BYTES

    def _mergeable(self, place: Path, newest: Optional[int]) -> list[Path]:
        """The small files, without those of the batch ``newest``."""
        kept = [] if newest is None else _files_of(place, newest)
        return [path for path in _data_files(place) if path not in kept and path.stat().st_size < SMALL_BYTES]

    def _is_batch_in(self, place: Path, batch: int) -> bool:
        mark = _read_mark(place)
        return mark is not None and mark["batch"] >= batch

    def _places(self) -> list[Path]:
        found = self.directory.glob("batches=*") if self.directory.is_dir() else iter(())
        return sorted(found, key=lambda path: int(path.name.removeprefix("batches=")))

    def _newest(self) -> Optional[Path]:
        places = self._places()
        return places[-1] if places else None

    def _remove_retired(self) -> None:
        now = time.monotonic()
        for until, path in self._retired:
            if until <= now:
                shutil.rmtree(path, ignore_errors=True)
        self._retired = [(until, path) for until, path in self._retired if until > now]


def _named(batch: int, staged: Path) -> list[Path]:
    """Give the files that Spark has written names that tell their batch."""
    named = []
    for number, path in enumerate(sorted(staged.iterdir())):
        if path.suffix == ".parquet" and not path.name.startswith((".", "_")):
            named.append(path.rename(staged / f"{batch:0{_DIGITS}d}.{number}.parquet"))
        else:
            path.unlink()
    return named


def _data_files(place: Path) -> list[Path]:
    return sorted(place.glob("*.parquet"))


def _files_of(place: Path, batch: int) -> list[Path]:
    return sorted(place.glob(f"{batch:0{_DIGITS}d}.*.parquet"))


def _read_mark(place: Path) -> Optional[dict[str, Any]]:
    try:
        return dict(json.loads((place / MARK).read_bytes()))
    except FileNotFoundError:
        return None


def _write_mark(place: Path, batch: int, mark: dict[str, Any]) -> None:
    (place / MARK).write_text(json.dumps({**mark, "batch": batch}, sort_keys=True))
