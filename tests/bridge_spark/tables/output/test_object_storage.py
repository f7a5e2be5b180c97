"""Delta and Iceberg tables on S3: throttling, commits of unknown result, several writers, versions that expire.

The server is localbucket; tables are read by deltalake, pyiceberg, Polars and DuckDB.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.utils.config import Config
from support.s3_server import ACCESS_KEY, REGION, SECRET_KEY, S3Server, s3_server
from support.table_batches import MARK, batches, publish, stage

from bridge_spark.tables.ingest_config import CatalogConfig
from bridge_spark.tables.output import data_files, iceberg_table
from bridge_spark.tables.output.batch_table import BatchTable, TableError
from bridge_spark.tables.output.data_files import DataFileWriter
from bridge_spark.tables.output.delta_table import DeltaBatchTable, DeltaStorage
from bridge_spark.tables.output.iceberg_table import IcebergBatchTable

pytestmark = pytest.mark.one_build


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3", "lake") as server:
        yield server


def delta(server: S3Server, merge_files: int = 3) -> DeltaBatchTable:
    return DeltaBatchTable("s3://lake/t", merge_files, options=server.delta_options())


def iceberg(server: S3Server, merge_files: int = 3) -> IcebergBatchTable:
    return IcebergBatchTable("n.t", catalog_of(server), merge_files)


def catalog_of(server: S3Server) -> CatalogConfig:
    return CatalogConfig(
        "test",
        {
            "type": "sql",
            "uri": f"sqlite:///{server.root.parent}/catalog.db",
            "warehouse": "s3://lake/warehouse",
            **server.iceberg_properties(),
        },
    )


Kind = Callable[..., BatchTable[Any]]
KINDS: list[Kind] = [delta, iceberg]
DELTA_ELSE_SLOW = [delta, pytest.param(iceberg, marks=pytest.mark.slow(reason="takes 10 s; other tests commit likewise"))]
ICEBERG_ELSE_SLOW = [pytest.param(delta, marks=pytest.mark.slow(reason="takes 5 s; other tests commit likewise")), iceberg]


def rows_of(server: S3Server, table: BatchTable[Any]) -> pa.Table:
    if isinstance(table, DeltaBatchTable):
        return DeltaTable(table.place, storage_options=server.delta_options()).to_pyarrow_table()
    return load_catalog("test", **catalog_of(server).properties).load_table(table.place).scan().to_arrow()


def numbers(server: S3Server, table: BatchTable[Any]) -> list[int]:
    return sorted(rows_of(server, table)["n"].to_pylist())


@pytest.mark.parametrize("kind", KINDS)
def test_batches_columns_merges_and_old_versions_on_s3(s3: S3Server, kind: Kind) -> None:
    table = kind(s3)
    table.prepare()
    assert not table.has_batches()
    for batch in range(4):
        assert table.committed(batch, "c") is None
        publish(table, batch, **({"colour": "red"} if batch == 3 else {}))
    assert table.committed(3, "c") is not None and numbers(s3, table) == batches(*range(4))
    found = dict(zip(rows_of(s3, table)["n"].to_pylist(), rows_of(s3, table)["colour"].to_pylist()))
    assert {n for n, colour in found.items() if colour == "red"} == {*batches(3)}
    stage(table, 4)  # files of a killed run
    monkeyed: Any = table
    monkeyed._expire_after = 0
    table.compact()
    kept = [key for key in s3.keys("lake") if key.endswith(".parquet")]
    assert len(kept) == 1 and numbers(s3, table) == batches(*range(4))
    by_polars = (
        polars.read_delta(table.place, storage_options=s3.delta_options())
        if kind is delta
        else polars.scan_iceberg(
            load_catalog("test", **catalog_of(s3).properties).load_table("n.t"),
            storage_options={key.lower(): value for key, value in s3.delta_options().items()},
        ).collect()
    )
    assert sorted(by_polars["n"].to_list()) == batches(*range(4))
    connection = duckdb.connect()
    found = connection.execute(f"SELECT n FROM read_parquet('{s3.root}/lake/{kept[0]}') ORDER BY n").fetchall()
    assert [row[0] for row in found] == batches(*range(4))


@pytest.mark.parametrize("kind", DELTA_ELSE_SLOW)
def test_requests_that_are_throttled_are_repeated(s3: S3Server, kind: Kind) -> None:
    table = kind(s3)
    s3.fail("GET|PUT|HEAD|POST", "/lake/", every=4 if kind is delta else 9)
    table.prepare()
    for batch in range(3):
        assert table.committed(batch, "c") is None
        publish(table, batch)
    assert s3.failed() > 3 and numbers(s3, table) == batches(0, 1, 2)


def test_a_delta_commit_of_unknown_result_is_there_once(s3: S3Server) -> None:
    """The storage carries the write of the log out, and answers 503 until the package gives up."""
    table = delta(s3)
    table.prepare()
    publish(table, 0)
    assert table.committed(1, "c") is None
    staged = stage(table, 1)
    s3.fail("PUT", "_delta_log/.*json", done=True, times=1)
    table.publish(1, staged, MARK)
    assert s3.failed() == 1 and numbers(s3, table) == batches(0, 1)
    assert table.committed(1, "c") is not None and table.committed(2, "c") is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_whose_answer_is_lost_is_there_once(s3: S3Server, kind: Kind, landed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table = kind(s3)
    table.prepare()
    publish(table, 0)
    owner: Any = DeltaTable if kind is delta else SqlCatalog
    name = "create_write_transaction" if kind is delta else "commit_table"
    commit = getattr(owner, name)
    attempts = 0

    def lose_the_answer(*given: Any, **named: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts > 1:
            return commit(*given, **named)
        if landed:
            commit(*given, **named)
        raise DeltaError("the connection broke") if kind is delta else CommitStateUnknownException("it broke")

    assert table.committed(1, "c") is None
    staged = stage(table, 1)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lose_the_answer)
        table.publish(1, staged, MARK)
    assert attempts == (1 if landed else 2)
    assert numbers(s3, table) == batches(0, 1) and table.committed(1, "c") is not None


def test_an_iceberg_commit_that_arrives_late_is_refused(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt seems to fail, and reaches the catalog after the second one."""
    table = iceberg(s3)
    table.prepare()
    publish(table, 0)
    assert table.committed(1, "c") is None
    staged = stage(table, 1)
    delayed: list[Callable[[], Any]] = []
    commit = SqlCatalog.commit_table

    def delay(*given: Any) -> Any:
        if delayed:
            return commit(*given)
        delayed.append(lambda: commit(*given))
        raise CommitStateUnknownException("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(SqlCatalog, "commit_table", delay)
        table.publish(1, staged, MARK)
    with pytest.raises(CommitFailedException):
        delayed[0]()
    assert numbers(s3, table) == batches(0, 1)


@pytest.mark.parametrize("kind", DELTA_ELSE_SLOW)
def test_writers_of_one_table_lose_nothing(s3: S3Server, kind: Kind) -> None:
    """Each has a checkpoint of its own; on S3 a Delta commit is a conditional write."""
    kind(s3).prepare()
    publish(kind(s3), 0)
    failures: list[BaseException] = []

    def write(writer: int) -> None:
        table = kind(s3, merge_files=100)
        try:
            for batch in range(4):
                table.publish(batch, stage(table, 100 * writer + batch), {"checkpoint": f"c{writer}"})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert numbers(s3, kind(s3)) == batches(0, *range(100, 104), *range(200, 204))


@pytest.mark.parametrize("kind", ICEBERG_ELSE_SLOW)
def test_a_repeated_batch_of_dead_letters_is_replaced_or_removed(s3: S3Server, kind: Kind) -> None:
    table = kind(s3)
    table.prepare()
    for batch in (0, 1):
        table.committed(batch, "c")
        publish(table, batch)
    again = kind(s3)
    assert again.committed(1, "c") is not None
    publish(again, 1, rows=1, files=4)
    assert numbers(s3, table) == batches(0, 1)
    again = kind(s3)
    assert again.committed(1, "c") is not None
    again.publish_empty(1)
    assert numbers(s3, table) == batches(0)
    again.publish_empty(2)
    publish(again, 3)
    assert numbers(s3, table) == batches(0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_one_line_without_credentials(s3: S3Server, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (iceberg_table, data_files):
        monkeypatch.setattr(module, "FIRST_WAIT_S", 0.001)
    (s3.root / "lake").rmdir()
    table = kind(s3)
    with pytest.raises((TableError, OSError)) as caught:
        table.prepare()
        publish(table, 0)
    if kind is iceberg:
        assert "\n" not in str(caught.value) and table.place in str(caught.value)
    assert SECRET_KEY not in str(caught.value) and ACCESS_KEY not in str(caught.value)
    assert SECRET_KEY not in repr(DeltaStorage(table.place, s3.delta_options())) + repr(catalog_of(s3))


def test_credentials_from_the_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.delta_options().items():
        monkeypatch.setenv(name, value)
    table = DeltaBatchTable("s3://lake/t")
    publish(table, 0)
    assert numbers(s3, table) == batches(0)
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__URI", f"sqlite:///{s3.root.parent}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__WAREHOUSE", "s3://lake/warehouse")
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__S3__ENDPOINT", s3.url)
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__S3__REGION", REGION)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    here = IcebergBatchTable("n.t", CatalogConfig("here"))
    here.prepare()
    publish(here, 0)
    assert here.names() and [key for key in s3.keys("lake") if key.startswith("warehouse/n/t/data/ingest-")]


def test_a_writer_begins_a_new_file_when_one_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "FILE_BYTES", 20_000)
    monkeypatch.setattr(data_files, "ROW_GROUP_ROWS", 1000)
    schema = pa.schema([("n", pa.int64()), ("missing", pa.string())])
    writer = DataFileWriter(DeltaStorage(str(tmp_path)), schema, "x-")
    parts = [pa.record_batch([pa.array(range(start, start + 700), pa.int32())], ["n"]) for start in range(0, 14_000, 700)]
    files = list(writer.write(parts))
    assert len(files) > 1 and sum(file.rows for file in files) == 14_000
    assert all((tmp_path / file.name).stat().st_size == file.size for file in files)
    assert sorted(pq.read_table(tmp_path)["n"].to_pylist()) == [*range(14_000)]
    assert [file.metadata().num_rows for file in files] == [file.rows for file in files]
