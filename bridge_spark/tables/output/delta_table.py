"""A table in Delta format, through the package `deltalake`.

The rows of a batch and its id become visible in one commit of the Delta log, with the batch id as transaction version
and the checkpoint's id as application id.  So a repeated batch is recognised and changes nothing.  Spark's executors
write the Parquet files; the driver commits their names.  Files that a killed run left uncommitted are invisible to
readers, and `compact` deletes them after seven days.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from bridge_spark.log.files import sync, sync_directory
from bridge_spark.tables.ingest_config import MERGE_FILES
from bridge_spark.tables.output.batch_table import ForeignBatch, Marker, StagingArea

if TYPE_CHECKING:
    from deltalake import DeltaTable

_PREFIX = "ingest-"


class DeltaMissing(Exception):
    """The package `deltalake` is not installed."""


class DeltaBatchTable:
    """The batches in the Delta table ``directory``.

    Its markers have the checkpoint and the batch only.  Methods that open the table raise `DeltaMissing` if the package
    is not installed.
    """

    def __init__(self, directory: Path, merge_files: Optional[int] = MERGE_FILES) -> None:
        self.directory = directory
        self._merge_files = merge_files
        self._staging = StagingArea(directory)

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._staging.reset()

    def clean(self) -> None:
        self._staging.remove()

    def has_batches(self) -> bool:
        return self._open() is not None

    def stage(self, batch: int) -> Path:
        return self._staging.new(batch)

    def committed(self, batch: int, checkpoint: str) -> Optional[Marker]:
        table = self._open()
        if table is None:
            return None
        version = table.transaction_version(checkpoint)
        if version is not None and version >= batch:
            return {"checkpoint": checkpoint, "batch": version}
        if version is None and table.version() > 0 and batch > 0:
            raise ForeignBatch(f"the rows in {self.directory} were made by another checkpoint")
        return None

    def publish(self, batch: int, staged: Path, marker: Marker) -> None:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction, RemoveAction

        actions: list[AddAction | RemoveAction] = []
        schema = None
        for number, path in enumerate(sorted(staged.glob("part-*.parquet"))):
            metadata = pq.read_metadata(path)
            schema = metadata.schema.to_arrow_schema().remove_metadata()
            name = f"{_PREFIX}{batch:010d}-{number}-{time.time_ns():x}.parquet"
            sync([path])
            os.rename(path, self.directory / name)
            actions.append(AddAction(
                name, (self.directory / name).stat().st_size, {}, int(time.time() * 1000), True,
                json.dumps({"numRecords": metadata.num_rows})))
        sync_directory(self.directory)
        table = self._with_columns(schema)
        table.create_write_transaction(
            actions, "append", table.schema(),
            commit_properties=CommitProperties(app_transactions=[Transaction(marker["checkpoint"], batch)]))
        self._sync_log(table.version() - 1)
        shutil.rmtree(staged, ignore_errors=True)
        if self._merge_files is not None and batch % self._merge_files == self._merge_files - 1:
            self.compact()

    def publish_empty(self, batch: int, staged: Optional[Path] = None) -> None:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)

    def compact(self) -> int:
        """Run Delta's `optimize` and `vacuum`; return how many files were merged.

        Files that no version of the last seven days needs are deleted.
        """
        table = self._open()
        if table is None:
            return 0
        merged = int(table.optimize.compact()["numFilesRemoved"])
        table.vacuum(dry_run=False, full=True)
        sync(path for path in self.directory.glob("*.parquet") if not path.name.startswith(_PREFIX))
        self._sync_log(table.version())
        return merged

    def _sync_log(self, since: int) -> None:
        """Sync the commits from the version ``since`` on, as the package does not."""
        log = self.directory / "_delta_log"
        commits = (log / f"{version:020d}.json" for version in count(max(since, 0)))
        sync([*takewhile(Path.exists, commits), log, self.directory])

    def _open(self) -> Optional[DeltaTable]:
        try:
            from deltalake import DeltaTable
        except ImportError:
            raise DeltaMissing("table_format \"delta\" needs a package: pip install 'mqttbroker[delta]'") from None
        path = str(self.directory)
        return DeltaTable(path) if DeltaTable.is_deltatable(path) else None

    def _with_columns(self, schema: Any) -> DeltaTable:
        """The table, created if needed, with every column of ``schema`` added."""
        from deltalake import DeltaTable, Schema

        table = self._open()
        if table is None:
            return DeltaTable.create(str(self.directory), schema)
        known = {field.name for field in table.schema().fields}
        new = [field for field in Schema.from_arrow(schema).fields if field.name not in known]
        if new:
            table.alter.add_columns(new)
        return table
