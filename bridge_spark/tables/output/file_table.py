"""Tables in formats with commits, Delta and Iceberg: executors write data files, and the driver commits their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridge_spark.tables.output.batch_table import ForeignBatch, Marker, TableError
from bridge_spark.tables.output.data_files import (
    DataFile,
    DataFileWriter,
    StagedFiles,
    arrow_schema,
    batch_prefix,
    write_rows,
)
from bridge_spark.tables.output.library_errors import library_errors, warn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


class FileTable(ABC):
    """The batches in the table ``place``; the names of a batch's files begin with `batch_prefix`.

    Its markers have the checkpoint and the batch only.  ``merge_files`` is the number of batches after which files are
    merged, None for never.
    """

    def __init__(self, place: str, merge_files: int | None) -> None:
        self.place = place
        self._merge_files = merge_files
        self._published: int | None = None  # the last batch of the checkpoint that `committed` was asked for

    def clean(self) -> None:
        """Nothing to do: each batch removes the files that it does not publish."""

    def create(self, spark: SparkSession, schema: StructType) -> None:
        """Nothing to do: the first batch makes the table."""

    def stage(self, rows: DataFrame, batch: int) -> StagedFiles:
        return self.stage_named(rows, batch_prefix(batch))

    def stage_named(self, rows: DataFrame, prefix: str) -> StagedFiles:
        """Write rows to files whose names begin with ``prefix``, for `replace`."""
        return write_rows(rows, self.writer(prefix, arrow_schema(rows)))

    def committed(self, batch: int, checkpoint: str) -> Marker | None:
        with library_errors(self.place):
            self._published, has_commits = self._last_batch(checkpoint)
            if self._has_published(batch):
                return {"checkpoint": checkpoint, "batch": self._published}
            if has_commits and self._published is None and batch > 0:
                raise ForeignBatch(f"the rows in {self.place} were made by another checkpoint")
            return None

    def publish(self, batch: int, staged: StagedFiles, marker: Marker) -> None:
        with library_errors(self.place):
            self._commit(batch, staged.files, marker["checkpoint"])

    def publish_empty(self, batch: int, staged: StagedFiles | None = None) -> None:
        if staged is not None:
            staged.discard()
        with library_errors(self.place):
            if self._has_published(batch):
                self._commit(batch, (), None)

    def maintain(self, batch: int) -> None:
        if self._merge_files is not None and batch % self._merge_files == self._merge_files - 1:
            try:
                self.compact()
            except TableError as error:
                warn(f"{error}: files are not merged now")

    def _has_published(self, batch: int) -> bool:
        return self._published is not None and self._published >= batch

    @abstractmethod
    def writer(self, prefix: str, schema: Any) -> DataFileWriter:
        """The writer of rows with the Arrow ``schema`` to files whose names begin with ``prefix``."""

    @abstractmethod
    def compact(self) -> int:
        """Merge small files and delete those that only old versions need; return how many were merged."""

    @abstractmethod
    def replace(self, prefix: str, files: Sequence[DataFile]) -> None:
        """Put ``files`` in the place of those whose names begin with ``prefix``, in one commit.

        The table exists, or there are files.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """The names of the data files of the newest version, within the table."""

    @abstractmethod
    def _last_batch(self, checkpoint: str) -> tuple[int | None, bool]:
        """The last batch of the checkpoint in the table, and whether the table has commits of any writer."""

    @abstractmethod
    def _commit(self, batch: int, files: Sequence[DataFile], checkpoint: str | None) -> None:
        """Add the files as the batch, in place of those of the batch if it was published; None: without a marker."""
