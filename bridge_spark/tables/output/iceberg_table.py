"""A table in Iceberg format, through the package `pyiceberg` and any of its catalogs.

The rows of a batch and its id become visible in one commit.  The id is a property of the table,
`mqttbroker.batch.<checkpoint>`, which stays when snapshots expire, and in the summary of the snapshot.  So a repeated
batch is recognised and changes nothing, also if the catalog answered a commit with an error after it had carried it
out.  Executors write the Parquet files; the driver commits them.  Files that a killed run left uncommitted are invisible
to readers, and are deleted with old snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from bridge_spark.tables.ingest_config import EXPIRE_AFTER_S, MERGE_FILES, CatalogConfig, is_url
from bridge_spark.tables.output.batch_table import PackageMissing, TableError
from bridge_spark.tables.output.data_files import (
    PREFIX,
    DataFile,
    DataFileWriter,
    StagedFiles,
    batch_prefix,
)
from bridge_spark.tables.output.file_table import FileTable
from bridge_spark.tables.output.library_errors import library_errors

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import Table, Transaction

T = TypeVar("T")
ATTEMPTS = 6  # of a commit, and of reading the table's metadata: pyarrow repeats not all requests that S3 throttles
FIRST_WAIT_S = 0.2  # doubled after each attempt
SMALL_BYTES = 32 << 20  # smaller files are merged
MERGED_BYTES = 256 << 20  # files of this size in all are merged into one
_BATCH = "mqttbroker.batch"
_CHECKPOINT = "mqttbroker.checkpoint"
_SYNCED_IO = "bridge_spark.tables.output.synced_io.SyncedFileIO"
_LOCAL_CATALOG = {"type": "sql", "uri": "sqlite:///tables/catalog.db", "warehouse": "tables"}
_NEW_TABLE = {
    # One metadata file is written per batch: keep the last hundred, and few manifests.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
    "commit.manifest-merge.enabled": "true",
    "write.parquet.compression-codec": "zstd",
}


@dataclass(frozen=True)
class IcebergStorage:
    """The data files of an Iceberg table at ``location``, with the properties of its file system and of the table."""

    location: str
    io: Mapping[str, str] = field(repr=False)
    table: Mapping[str, str]

    def create(self, name: str) -> Any:
        return self._io().new_output(self.path(name)).create()

    def delete(self, name: str) -> None:
        self._io().delete(self.path(name))

    def path(self, name: str) -> str:
        """The full path of a data file, where the table's properties put it."""
        from pyiceberg.table.locations import load_location_provider

        return load_location_provider(self.location, dict(self.table)).new_data_location(name)

    def _io(self) -> Any:
        from pyiceberg.io import load_file_io

        return load_file_io(dict(self.io), self.location)


class IcebergBatchTable(FileTable):
    """The batches in the Iceberg table ``place``, its name in the catalog.

    Snapshots older than ``expire_after`` seconds are removed, with the files that only they need.
    """

    def __init__(
        self,
        place: str,
        catalog: CatalogConfig,
        merge_files: int | None = MERGE_FILES,
        expire_after: int = EXPIRE_AFTER_S,
    ) -> None:
        super().__init__(place, merge_files)
        self._config = catalog
        self._expire_after = expire_after

    def prepare(self) -> None:
        """Connect to the catalog."""
        with library_errors(self.place):
            catalog = self._catalog
            _repeated(lambda: catalog.table_exists(self.place))

    def has_batches(self) -> bool:
        with library_errors(self.place):
            table = self._open()
            return table is not None and table.current_snapshot() is not None

    def writer(self, prefix: str, schema: Any) -> DataFileWriter:
        with library_errors(self.place):
            table = self._with_columns(schema)
            return DataFileWriter(_storage(table), _arrow_schema(table, schema.names), prefix)

    def compact(self) -> int:
        with library_errors(self.place):
            table = self._open()
            if table is None:
                return 0
            merged = 0
            for group in _small_files(table):
                self._merge(group)
                merged += len(group)
            self._expire()
            return merged

    def replace(self, prefix: str, files: Sequence[DataFile]) -> None:
        with library_errors(self.place):
            self._change(lambda table: (_named(table, prefix), files), {}, None)

    def names(self) -> list[str]:
        with library_errors(self.place):
            table = self._open()
            return [] if table is None else [_name(file.file_path) for file in _data_files(table)]

    # --- commits --------------------------------------------------------------------------------------------------

    def _last_batch(self, checkpoint: str) -> tuple[int | None, bool]:
        table = self._open()
        return (None, False) if table is None else (_batch(table, checkpoint), table.current_snapshot() is not None)

    def _commit(self, batch: int, files: Sequence[DataFile], checkpoint: str | None) -> None:
        replaced = self._has_published(batch)
        summary = {_BATCH: str(batch), **({} if checkpoint is None else {_CHECKPOINT: checkpoint})}

        def landed(table: Table) -> bool:
            return not replaced and checkpoint is not None and _batch(table, checkpoint) == batch

        def property_of(transaction: Transaction) -> None:
            if checkpoint is not None:
                transaction.set_properties({f"{_BATCH}.{checkpoint}": str(batch)})

        self._change(lambda table: (_named(table, batch_prefix(batch)) if replaced else [], files), summary, landed, property_of)
        self._published = batch

    def _change(
        self,
        choose: Callable[[Table], tuple[Sequence[IcebergFile], Sequence[DataFile]]],
        summary: dict[str, str],
        landed: Callable[[Table], bool] | None,
        also: Callable[[Transaction], None] | None = None,
    ) -> None:
        """Remove and add files in one commit, again if another writer came first.

        An attempt of unknown result is looked for in the table before the next one; if it arrives later, the catalog
        refuses it, as the table's snapshot is another one by then.
        """
        _repeated(lambda: self._try(choose, summary, landed, also))

    def _try(
        self,
        choose: Callable[[Table], tuple[Sequence[IcebergFile], Sequence[DataFile]]],
        summary: dict[str, str],
        landed: Callable[[Table], bool] | None,
        also: Callable[[Transaction], None] | None,
    ) -> None:
        table = self._catalog.load_table(self.place)
        if landed is not None and landed(table):
            return
        removed, added = choose(table)
        if not removed and not added:
            return
        # pyiceberg's own retries would not look for the batch.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        with table.transaction() as transaction:
            if also is not None:
                also(transaction)
            update = transaction.update_snapshot(snapshot_properties=summary)
            with update.overwrite() if removed else update.merge_append() as snapshot:
                for file in removed:
                    snapshot.delete_data_file(file)
                for new in added:
                    snapshot.append_data_file(_iceberg_file(table, new))

    # --- merging and expiry ---------------------------------------------------------------------------------------

    def _merge(self, tasks: Sequence[Any]) -> None:
        """Replace files by one with the same rows in the same order."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        table = self._load()
        names = [column.name for column in table.schema().fields]
        scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())

        def batches() -> Iterator[Any]:
            for task in tasks:  # one after the other, as pyiceberg reads all tasks of a call at once
                yield from scan.to_record_batches([task])

        writer = DataFileWriter(_storage(table), _arrow_schema(table, names), "merged-")
        staged = StagedFiles([*writer.write(batches())], writer.storage)
        rows = sum(task.file.record_count for task in tasks)
        if staged.rows() != rows:
            staged.discard()
            raise TableError(f"{self.place}: {rows} rows were to be merged and {staged.rows()} were read")
        self._change(lambda _: ([task.file for task in tasks], staged.files), {}, None)

    def _expire(self) -> None:
        table = self._load()
        before = datetime.now(UTC) - timedelta(seconds=self._expire_after)
        newest = table.current_snapshot()
        if any(
            snapshot.timestamp_ms < before.timestamp() * 1000
            for snapshot in table.snapshots()
            if newest is None or snapshot.snapshot_id != newest.snapshot_id
        ):
            table.maintenance.expire_snapshots().older_than(before.replace(tzinfo=None)).commit()
            table = self._load()
        _remove_orphans(table, before)

    # --- the table ------------------------------------------------------------------------------------------------

    @cached_property
    def _catalog(self) -> Catalog:
        try:
            from pyiceberg.catalog import load_catalog
            from pyiceberg.utils.config import Config
        except ImportError:
            raise PackageMissing("table_format \"iceberg\" needs a package: pip install 'mqttbroker[iceberg]'") from None
        given = dict(self._config.properties)
        known = Config().get_catalog_config(self._config.name)
        if not given and not known:
            given = {**_LOCAL_CATALOG, "warehouse": str(Path(_LOCAL_CATALOG["warehouse"]).absolute())}
            Path(given["warehouse"]).mkdir(parents=True, exist_ok=True)
        warehouse = given.get("warehouse") or dict(known or {}).get("warehouse")
        if isinstance(warehouse, str) and (warehouse.startswith("/") or urlsplit(warehouse).scheme == "file"):
            given.setdefault("py-io-impl", _SYNCED_IO)
        return load_catalog(self._config.name, **given)

    def _open(self) -> Table | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            table = self._load()
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        if not table.spec().is_unpartitioned():
            raise TableError(f"{self.place} has partition fields: give a table without")
        return table

    def _load(self) -> Table:
        """The table as it is now.  Raises pyiceberg's errors."""
        return _repeated(lambda: self._catalog.load_table(self.place))

    def _with_columns(self, schema: Any) -> Table:
        """The table, created if needed, with every column of the Arrow ``schema`` added."""
        table = _repeated(lambda: self._created(schema))
        if any(name not in table.schema().column_names for name in schema.names):
            _repeated(lambda: self._add_columns(schema))
            table = self._load()
        return table

    def _created(self, schema: Any) -> Table:
        table = self._open()
        if table is not None:
            return table
        self._catalog.create_namespace_if_not_exists(self.place.rpartition(".")[0])
        return self._catalog.create_table_if_not_exists(self.place, schema, properties=_NEW_TABLE)

    def _add_columns(self, schema: Any) -> None:
        with self._load().update_schema() as update:
            update.union_by_name(schema)


def _repeated(call: Callable[[], T]) -> T:
    """Call until no error comes, at most `ATTEMPTS` times; that a table is not there is final."""
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    for attempt in range(ATTEMPTS):
        try:
            return call()
        except (NoSuchTableError, NoSuchNamespaceError, TableError):
            raise
        except Exception:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise AssertionError


def _batch(table: Table, checkpoint: str) -> int | None:
    """The last batch of a checkpoint that is in the table."""
    found = table.properties.get(f"{_BATCH}.{checkpoint}")
    return None if found is None else int(found)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _storage(table: Table) -> IcebergStorage:
    properties = {key: value for key, value in table.properties.items() if key.startswith("write.")}
    return IcebergStorage(table.location(), dict(table.io.properties), properties)


def _arrow_schema(table: Table, names: Sequence[str]) -> Any:
    """The columns ``names`` of the table as Arrow types with Iceberg's field ids."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return schema_to_pyarrow(table.schema().select(*names))


def _iceberg_file(table: Table, file: DataFile) -> IcebergFile:
    from pyiceberg.io.pyarrow import (
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.manifest import DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    statistics = data_file_statistics_from_parquet_metadata(
        file.metadata(), compute_statistics_plan(table.schema(), table.properties), parquet_path_to_id_mapping(table.schema())
    )
    return IcebergFile.from_args(
        content=DataFileContent.DATA,
        file_path=_storage(table).path(file.name),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        file_size_in_bytes=file.size,
        sort_order_id=None,
        spec_id=table.metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )


def _data_files(table: Table) -> list[IcebergFile]:
    return [task.file for task in table.scan().plan_files()]


def _named(table: Table, prefix: str) -> list[IcebergFile]:
    return [file for file in _data_files(table) if _name(file.file_path).startswith(prefix)]


def _small_files(table: Table) -> Iterator[list[Any]]:
    """Small files in groups to be merged, by name; files with rows that were deleted are left alone."""
    tasks = sorted(
        (task for task in table.scan().plan_files() if not task.delete_files and task.file.file_size_in_bytes < SMALL_BYTES),
        key=lambda task: _name(task.file.file_path),
    )
    group: list[Any] = []
    size = 0
    for task in tasks:
        group.append(task)
        size += task.file.file_size_in_bytes
        if size >= MERGED_BYTES:
            yield group
            group, size = [], 0
    if len(group) > 1:
        yield group


def _remove_orphans(table: Table, before: datetime) -> None:
    """Delete data files of this writer, and files of metadata, that no snapshot needs and older than ``before``."""
    from pyarrow.fs import FileSelector, FileType  # type: ignore[import-untyped]
    from pyiceberg.io.pyarrow import PyArrowFileIO

    needed = {_without_scheme(path) for path in _needed(table)}
    io = PyArrowFileIO(dict(table.io.properties))
    scheme, netloc, root = PyArrowFileIO.parse_location(table.location(), table.io.properties)
    files = io.fs_by_scheme(scheme, netloc)
    for directory in ("data", "metadata"):
        selector = FileSelector(f"{root}/{directory}", allow_not_found=True, recursive=True)
        for found in files.get_file_info(selector):
            ours = found.base_name.startswith((PREFIX, "merged-")) if directory == "data" else found.base_name.endswith(".avro")
            if (
                found.type == FileType.File
                and ours
                and _without_scheme(found.path) not in needed
                and found.mtime is not None
                and found.mtime < before
            ):
                files.delete_file(found.path)


def _needed(table: Table) -> Iterator[str]:
    """The paths of all files that a snapshot of the table names."""
    seen = set()
    for snapshot in table.snapshots():
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                yield manifest.manifest_path
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                    yield entry.data_file.file_path


def _without_scheme(path: str) -> str:
    """A path by which the same file is found under s3://, s3a:// and without a scheme."""
    if not is_url(path) and not path.startswith("file:"):
        return path.lstrip("/")
    parts = urlsplit(path)
    return f"{parts.netloc}{unquote(parts.path)}".lstrip("/")
