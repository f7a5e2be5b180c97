"""A table in Delta format, on local disk or in object storage, through the package `deltalake`.

The rows of a batch and its id become visible in one commit of the Delta log, with the batch id as transaction version
and the checkpoint's id as application id.  So a repeated batch is recognised and changes nothing, also if the storage
answered a commit with an error after it had carried it out.  Executors write the Parquet files; the driver commits
their names.  Files that a killed run left uncommitted are invisible to readers, and are deleted with old versions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_spark.log.files import sync
from bridge_spark.tables.ingest_config import EXPIRE_AFTER_S, MERGE_FILES, is_url
from bridge_spark.tables.output.batch_table import PackageMissing, TableError
from bridge_spark.tables.output.data_files import (
    PREFIX,
    DataFile,
    DataFileWriter,
    SyncedFile,
    batch_prefix,
)
from bridge_spark.tables.output.delta_statistics import statistics
from bridge_spark.tables.output.file_table import FileTable
from bridge_spark.tables.output.library_errors import library_errors

if TYPE_CHECKING:
    from deltalake import DeltaTable

COMMIT_ATTEMPTS = 5


@dataclass(frozen=True)
class DeltaStorage:
    """The files of a Delta table at ``place``; ``options`` are `storage_options` of deltalake."""

    place: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def create(self, name: str) -> Any:
        if not is_url(self.place):
            return SyncedFile(Path(self.place) / name)
        # deltalake's pyarrow file hands over buffers that its own file refuses.
        return self._files()._handler.open_output_stream(name, None)

    def delete(self, name: str) -> None:
        if is_url(self.place):
            self._files().delete_file(name)
        else:
            (Path(self.place) / name).unlink()

    def _files(self) -> Any:
        from deltalake.fs import DeltaStorageHandler

        return DeltaStorageHandler(self.place, dict(self.options))


class DeltaBatchTable(FileTable):
    """The batches in the Delta table at ``place``, a directory or a URL.

    Files that only versions older than ``expire_after`` seconds need are deleted.
    """

    def __init__(
        self,
        place: str,
        merge_files: int | None = MERGE_FILES,
        expire_after: int = EXPIRE_AFTER_S,
        options: Mapping[str, str] = {},
    ) -> None:
        super().__init__(place, merge_files)
        self._expire_after = expire_after
        self._options = dict(options)
        self._storage = DeltaStorage(place, self._options)
        self._directory = None if is_url(place) else Path(place)

    def prepare(self) -> None:
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def has_batches(self) -> bool:
        with library_errors(self.place):
            return self._open() is not None

    def writer(self, prefix: str, schema: Any) -> DataFileWriter:
        return DataFileWriter(self._storage, schema, prefix)

    def compact(self) -> int:
        with library_errors(self.place):
            table = self._open()
            if table is None:
                return 0
            merged = int(table.optimize.compact()["numFilesRemoved"])
            table.vacuum(self._expire_after // 3600, enforce_retention_duration=False, dry_run=False, full=True)
            if self._directory is not None:
                sync(path for path in self._directory.glob("*.parquet") if not path.name.startswith(PREFIX))
                self._sync_log(table.version())
            return merged

    def replace(self, prefix: str, files: Sequence[DataFile]) -> None:
        with library_errors(self.place):
            table = self._with_columns(files) if files else self._open()
            if table is not None:
                self._write(table, _removals(table, prefix) + _additions(table, files), None)

    def names(self) -> list[str]:
        with library_errors(self.place):
            table = self._open()
            return [] if table is None else list(_sizes(table))

    def _last_batch(self, checkpoint: str) -> tuple[int | None, bool]:
        table = self._open()
        return (None, False) if table is None else (table.transaction_version(checkpoint), table.version() > 0)

    def _commit(self, batch: int, files: Sequence[DataFile], checkpoint: str | None) -> None:
        from deltalake import Transaction
        from deltalake.exceptions import DeltaError

        self._check(files)
        replaced = self._has_published(batch)
        for attempt in range(COMMIT_ATTEMPTS):
            table = self._with_columns(files) if files else self._open()
            assert table is not None
            if not replaced and checkpoint is not None and table.transaction_version(checkpoint) == batch:
                return
            removed = _removals(table, batch_prefix(batch)) if replaced else []
            # The version of a batch that is replaced is in the log already, and a second one would be a conflict.
            version = None if replaced or checkpoint is None else Transaction(checkpoint, batch)
            try:
                self._write(table, removed + _additions(table, files), version)
                break
            except (DeltaError, OSError):
                # The commit may be in the log all the same: the next attempt looks.
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
                time.sleep(0.2 * 2**attempt)
        self._published = batch

    def _write(self, table: DeltaTable, actions: Sequence[Any], version: Any | None) -> None:
        from deltalake import CommitProperties

        if not actions:
            return
        before = table.version()
        table.create_write_transaction(
            list(actions),
            "append",
            table.schema(),
            commit_properties=CommitProperties(app_transactions=None if version is None else [version]),
        )
        self._sync_log(before)

    def _check(self, files: Sequence[DataFile]) -> None:
        """Check that the files are on this disk, if the table is: executors on other machines may use other disks."""
        if self._directory is None:
            return
        for file in files:
            path = self._directory / file.name
            if not path.exists() or path.stat().st_size != file.size:
                raise TableError(
                    f"{path} was written by an executor and is not there: the driver and all executors "
                    f"must share the disk of the tables, or the tables must be in object storage"
                )

    def _sync_log(self, since: int) -> None:
        """Sync the commits of a local table from the version ``since`` on, as the package does not."""
        if self._directory is None:
            return
        log = self._directory / "_delta_log"
        commits = (log / f"{version:020d}.json" for version in count(max(since, 0)))
        sync([*takewhile(Path.exists, commits), log, self._directory])

    def _open(self) -> DeltaTable | None:
        try:
            from deltalake import DeltaTable
        except ImportError:
            raise PackageMissing("table_format \"delta\" needs a package: pip install 'mqttbroker[delta]'") from None
        if not DeltaTable.is_deltatable(self.place, self._options):
            return None
        table = DeltaTable(self.place, storage_options=self._options)
        if table.metadata().partition_columns:
            raise TableError(f"{self.place} has partition columns: give a table without")
        return table

    def _with_columns(self, files: Sequence[DataFile]) -> DeltaTable:
        """The table, created if needed, with every column of the files added."""
        from deltalake import DeltaTable, Schema

        schema = files[0].metadata().schema.to_arrow_schema().remove_metadata()
        table = self._open()
        if table is None:
            return DeltaTable.create(self.place, schema, storage_options=self._options)
        known = {column.name for column in table.schema().fields}
        new = [column for column in Schema.from_arrow(schema).fields if column.name not in known]
        if new:
            table.alter.add_columns(new)
        return table


def _additions(table: DeltaTable, files: Sequence[DataFile]) -> list[Any]:
    from deltalake.transaction import AddAction

    now = int(time.time() * 1000)
    properties = table.metadata().configuration
    return [AddAction(file.name, file.size, {}, now, True, statistics(file, properties)) for file in files]


def _removals(table: DeltaTable, prefix: str) -> list[Any]:
    from deltalake.transaction import RemoveAction

    now = int(time.time() * 1000)
    return [RemoveAction(name, True, now, size) for name, size in _sizes(table).items() if name.startswith(prefix)]


def _sizes(table: DeltaTable) -> dict[str, int]:
    """The data files of a table by name, with their sizes in bytes."""
    actions = table.get_add_actions(flatten=True)
    names, sizes = (actions.column(column).to_pylist() for column in ("path", "size_bytes"))
    return dict(zip(names, sizes))
