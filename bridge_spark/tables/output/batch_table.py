"""The interface of both table formats, and their staging area."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Optional, Protocol

Marker = dict[str, Any]
"""The commit marker of a batch, a JSON object; "checkpoint" is the id of the checkpoint that the batch comes from."""


class ForeignBatch(Exception):
    """The table has batches from another checkpoint."""


class BatchTable(Protocol):
    """A table that is written in batches.

    There is one writer at a time, and batch ids never decrease.
    """

    directory: Path

    def prepare(self) -> None:
        """Create the directory and remove leftovers of an earlier run."""

    def clean(self) -> None:
        """Remove files that no reader can be using.  The next run removes the rest."""

    def has_batches(self) -> bool:
        """Whether any batch was published."""

    def stage(self, batch: int) -> Path:
        """A new path, which does not exist yet, to write the files of a batch to."""

    def committed(self, batch: int, checkpoint: str) -> Optional[Marker]:
        """The marker of the batch, or of the newest one if that is later; None if the batch was not published.

        Raises `ForeignBatch` if it comes from another checkpoint.
        """

    def publish(self, batch: int, staged: Path, marker: Marker) -> None:
        """Make the staged files visible and durable as the batch."""

    def publish_empty(self, batch: int, staged: Optional[Path] = None) -> None:
        """Discard the staged files, as the batch has no rows."""

    def compact(self) -> int:
        """Merge small files; return how many were merged."""


class StagingArea:
    """The hidden directory beside a table where files are written before they are published."""

    def __init__(self, table: Path) -> None:
        self.path = table.parent / f".{table.name}.staging"

    def reset(self) -> None:
        """Create it, empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()

    def new(self, batch: int) -> Path:
        """A new path in it, which does not exist yet."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path / f"{batch}-{os.getpid()}-{time.monotonic_ns()}"

    def remove(self, kept: Collection[Path] = ()) -> None:
        """Remove everything but the paths ``kept``."""
        if self.path.is_dir():
            for path in self.path.iterdir():
                if path not in kept:
                    shutil.rmtree(path, ignore_errors=True)
            if not kept:
                self.path.rmdir()
