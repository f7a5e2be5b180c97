"""A table as one directory of Parquet files per batch: `batch=<id>/`.

The rule kept here: whoever lists the directory, at any moment and with any
reader, sees each batch whole or not at all, and never twice.  A batch is
written and synced outside the table and moves in by one rename.  A batch that
is repeated after a kill is the same rows again, so what already stands there
is left alone, or is exchanged in one step if the table's settings changed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from pathlib import Path
from typing import Any, Optional

MARK = "_batch.json"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class ForeignBatch(Exception):
    """A directory holds batches that another checkpoint made."""


class BatchTable:
    """The batches in ``directory``; the file system must rename atomically.

    One writer at a time.  The staging area beside the directory is hidden from
    readers that walk the parent.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._staging = directory.parent / f".{directory.name}.staging"

    def prepare(self) -> None:
        """Create the directory, and remove what a killed run has left behind."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.clean()

    def clean(self) -> None:
        """Empty the staging area."""
        shutil.rmtree(self._staging, ignore_errors=True)

    def has_batches(self) -> bool:
        return self.directory.is_dir() and any(self.directory.glob("batch=*"))

    def stage(self, batch: int) -> Path:
        """A place to write the batch's files, not there yet."""
        self._staging.mkdir(parents=True, exist_ok=True)
        place = self._staging / f"{batch}-{os.getpid()}"
        shutil.rmtree(place, ignore_errors=True)
        return place

    def mark(self, batch: int) -> Optional[dict[str, Any]]:
        """What `publish` was given with a batch that is there."""
        try:
            mark = json.loads((self._place(batch) / MARK).read_bytes())
        except FileNotFoundError:
            return None
        return dict(mark)

    def publish(self, batch: int, staged: Path, mark: dict[str, Any]) -> None:
        """Make the staged files the batch, durably."""
        for path in list(staged.iterdir()):
            if path.name.startswith((".", "_")):
                path.unlink()
        (staged / MARK).write_text(json.dumps(mark, sort_keys=True))
        for path in [*staged.iterdir(), staged]:
            _sync(path)
        place = self._place(batch)
        if place.exists():
            _exchange(staged, place)
        else:
            os.rename(staged, place)
        _sync(self.directory)
        shutil.rmtree(staged, ignore_errors=True)

    def withdraw(self, batch: int, staged: Optional[Path] = None) -> None:
        """The batch has no rows: drop what was staged and what stands there."""
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        place = self._place(batch)
        if place.exists():
            gone = self.stage(batch)
            os.rename(place, gone)
            _sync(self.directory)
            shutil.rmtree(gone, ignore_errors=True)

    def _place(self, batch: int) -> Path:
        return self.directory / f"batch={batch}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(staged: Path, place: Path) -> None:
    """Swap two directories in one step; where the system cannot, readers miss
    the batch for a moment, and a kill in it is mended by the repeated batch."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        renamed = libc.renameat2(_AT_FDCWD, os.fsencode(staged), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE)
    except (AttributeError, OSError):
        renamed = -1
    if renamed != 0:
        aside = staged.with_name(staged.name + "-old")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(place, aside)
        os.rename(staged, place)
        shutil.rmtree(aside, ignore_errors=True)
