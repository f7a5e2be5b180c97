"""Parquet files that Spark's executors write straight to a table's storage, in Python.

Executors need no shared disk and no Hadoop file system for the storage.  The driver gets a line per file, with the
file's footer, and commits the files; it never holds rows.  A task that fails or runs twice leaves files that no
commit names.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import uuid4

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.files import sync_directory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PREFIX = "ingest-"  # of the names of all files of batches
FILE_BYTES = 64 << 20  # a larger file gets no further rows; a task holds one in memory
ROW_GROUP_ROWS = 256 * 1024
ROW_GROUP_BYTES = 64 << 20  # of Arrow data in memory
ATTEMPTS = 5  # to store a file
FIRST_WAIT_S = 0.2  # doubled after each attempt
_COLUMNS = "name string, rows long, size long, footer binary, nan array<int>"
_ARROW_COLUMNS = pa.schema(
    [("name", pa.string()), ("rows", pa.int64()), ("size", pa.int64()), ("footer", pa.binary()), ("nan", pa.list_(pa.int32()))]
)


def batch_prefix(batch: int) -> str:
    """The beginning of the names of a batch's files."""
    return f"{PREFIX}{batch:010d}-"


class LeafColumn(NamedTuple):
    """A column of Parquet: its ``number``, the names of the structs that it is in and its own, its type, and whether it is
    in an array or a map."""

    number: int
    path: tuple[str, ...]
    kind: pa.DataType
    repeated: bool


def leaf_columns(schema: pa.Schema) -> Iterator[LeafColumn]:
    """The columns of a Parquet file with a schema, in order."""
    found = chain.from_iterable(_leaves(field.type, (field.name,), False) for field in schema)
    return (LeafColumn(number, *leaf) for number, leaf in enumerate(found))


def _leaves(kind: pa.DataType, path: tuple[str, ...], repeated: bool) -> Iterator[tuple[Any, ...]]:
    types = pa.types
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _leaves(kind.field(number).type, (*path, kind.field(number).name), repeated)
    elif types.is_list(kind):
        yield from _leaves(kind.value_type, path, True)
    elif types.is_map(kind):
        yield from _leaves(kind.key_type, path, True)
        yield from _leaves(kind.item_type, path, True)
    else:
        yield path, kind, repeated


class Storage(Protocol):
    """Where a table's files are.  It is sent to executors, so it must be picklable."""

    def create(self, name: str) -> Any:
        """A new file open for writing, whose contents are durable once it is closed."""

    def delete(self, name: str) -> None:
        """Delete a file.  Raises any exception of the storage."""


@dataclass(frozen=True)
class DataFile:
    """A Parquet file, with the metadata of its footer.

    ``nan`` are the numbers of the leaf columns with NaN, which the bounds in the footer leave out.
    """

    name: str
    rows: int
    size: int
    footer: bytes = field(repr=False)
    nan: Sequence[int] = ()

    def metadata(self) -> Any:
        """The footer as pyarrow's `FileMetaData`."""
        return pq.read_metadata(pa.BufferReader(self.footer))


@dataclass(frozen=True)
class StagedFiles:
    """The files of a batch in a storage."""

    files: Sequence[DataFile]
    storage: Storage

    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def discard(self) -> None:
        for file in self.files:
            with suppress(Exception):
                self.storage.delete(file.name)


class SyncedFile(io.FileIO):
    """A new file on local disk that is synced when it is closed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, "xb")
        self._directory = path.parent

    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())
            super().close()
            sync_directory(self._directory)


@dataclass(frozen=True)
class DataFileWriter:
    """Writes rows to new files whose names begin with ``prefix``; columns get the types of ``schema``.

    ``names`` are those of the rows' columns in their order, if Spark has others for them.
    """

    storage: Storage
    schema: Any
    prefix: str
    names: Sequence[str] = ()

    def write(self, batches: Iterable[Any]) -> Iterator[DataFile]:
        """Write Arrow record batches; yield each file when it is stored."""
        groups = _row_groups(self._named(batches), self.schema)
        group = next(groups, None)
        while group is not None:
            rows = 0
            nan: set[int] = set()
            sink = pa.BufferOutputStream()
            writer = pq.ParquetWriter(sink, self.schema, compression="zstd")
            while group is not None and sink.tell() < FILE_BYTES:
                writer.write_table(group, ROW_GROUP_ROWS)
                rows += group.num_rows
                nan.update(_with_nan(group))
                group = next(groups, None)
            writer.close()
            footer = pa.BufferOutputStream()
            writer.writer.metadata.write_metadata_file(footer)
            content = sink.getvalue()
            yield DataFile(self._store(content), rows, content.size, footer.getvalue().to_pybytes(), sorted(nan))

    def _named(self, batches: Iterable[Any]) -> Iterable[Any]:
        return (batch.rename_columns(list(self.names)) for batch in batches) if self.names else batches

    def _store(self, content: Any) -> str:
        """Store a file under a new name; again if the storage fails, as pyarrow does not repeat each request."""
        for attempt in range(ATTEMPTS):
            name = f"{self.prefix}{uuid4().hex}.parquet"
            try:
                with closing(self.storage.create(name)) as file:
                    file.write(content.to_pybytes())
                return name
            except OSError:
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(FIRST_WAIT_S * 2**attempt)
        raise AssertionError

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The function for `DataFrame.mapInArrow`."""
        for file in self.write(batches):
            yield pa.RecordBatch.from_pylist([vars(file)], _ARROW_COLUMNS)


def write_rows(rows: DataFrame, writer: DataFileWriter) -> StagedFiles:
    """Let the executors write the rows."""
    # mapInArrow takes a dot in a column's name for a field of a struct.
    numbered = rows.toDF(*map(str, range(len(rows.columns))))
    written = numbered.mapInArrow(replace(writer, names=tuple(rows.columns)), _COLUMNS).collect()
    return StagedFiles([DataFile(row.name, row.rows, row.size, bytes(row.footer), row.nan) for row in written], writer.storage)


def arrow_schema(rows: DataFrame) -> Any:
    """The Arrow schema of a table's rows: every column may have NULL, as columns can be left out later."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.schema([field.with_nullable(True) for field in to_arrow_schema(rows.schema, timezone="UTC")])


def _with_nan(table: Any) -> Iterator[int]:
    """The numbers of the leaf columns with NaN, without those in arrays and maps."""
    for leaf in leaf_columns(table.schema):
        if pa.types.is_floating(leaf.kind) and not leaf.repeated:
            column = table.column(leaf.path[0])
            for name in leaf.path[1:]:
                column = pc.struct_field(column, name)
            if pc.any(pc.is_nan(column)).as_py():
                yield leaf.number


def _row_groups(batches: Iterable[Any], schema: Any) -> Iterator[Any]:
    pending: list[Any] = []
    rows = size = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROW_GROUP_ROWS):
            part = batch.slice(start, ROW_GROUP_ROWS)
            pending.append(part)
            rows, size = rows + part.num_rows, size + part.nbytes
            if rows >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
                yield _table(pending, schema)
                pending, rows, size = [], 0, 0
    if rows:
        yield _table(pending, schema)


def _table(batches: Sequence[Any], schema: Any) -> Any:
    table = pa.Table.from_batches(batches)
    columns = [
        table.column(field.name).cast(field.type) if field.name in table.schema.names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
