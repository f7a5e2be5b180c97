"""The interface of all table formats, and the staging area of tables in directories."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Marker = dict[str, Any]
"""The commit marker of a batch, a JSON object; "checkpoint" is the id of the checkpoint that the batch comes from."""


class TableError(Exception):
    """A table cannot be read or written; the text is one line."""


class PackageMissing(TableError):
    """The package that writes a table's format is not installed."""


class ForeignBatch(Exception):
    """The table has batches from another checkpoint."""


class Staged(Protocol):
    """The files of a batch that is not published."""

    def rows(self) -> int:
        """The number of rows in the files."""

    def discard(self) -> None:
        """Remove the files, as far as possible."""


S = TypeVar("S", bound=Staged)


class BatchTable(Protocol[S]):
    """A table that is written in batches.

    There is one writer at a time, and batch ids never decrease.  ``place`` is a directory, a URL, or the name of a
    table in a catalog.  All methods may raise `TableError` or `OSError`.
    """

    place: str

    def prepare(self) -> None:
        """Make the table's directory, and remove leftovers of an earlier run."""

    def clean(self) -> None:
        """Remove files that no reader can be using.  The next run removes the rest."""

    def create(self, spark: SparkSession, schema: StructType) -> None:
        """Let readers find the table with these columns, without rows, where the format has such tables."""

    def has_batches(self) -> bool:
        """Whether any batch was published."""

    def stage(self, rows: DataFrame, batch: int) -> S:
        """Write the rows of a batch to files that no reader sees."""

    def committed(self, batch: int, checkpoint: str) -> Marker | None:
        """The marker of the batch, or of the newest one if that is later; None if the batch was not published.

        Raises `ForeignBatch` if it comes from another checkpoint.
        """

    def publish(self, batch: int, staged: S, marker: Marker) -> None:
        """Make the staged files visible and durable as the batch, in place of the batch if it was published last."""

    def publish_empty(self, batch: int, staged: S | None = None) -> None:
        """Discard the staged files, as the batch has no rows, and the batch if it was published last."""

    def maintain(self, batch: int) -> None:
        """Merge small files if it is time for it.  The batch is in this table and in all that belong to it."""

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
