"""The ingest job's tables on disk: batches, repeats, merges, kills at each step, concurrent readers.

Tables are read by pyarrow, DuckDB, deltalake and pyiceberg.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from support.table_batches import MARK, batches, parquet_numbers, publish, stage

from bridge_spark.tables.ingest_config import CatalogConfig
from bridge_spark.tables.output import parquet_table
from bridge_spark.tables.output.batch_table import BatchTable, ForeignBatch, PackageMissing, TableError
from bridge_spark.tables.output.delta_table import DeltaBatchTable
from bridge_spark.tables.output.iceberg_table import IcebergBatchTable
from bridge_spark.tables.output.parquet_table import ParquetBatchTable, marker_file

pytestmark = pytest.mark.one_build


def parquet(place: Path, merge_files: int | None) -> ParquetBatchTable:
    return ParquetBatchTable(place, merge_files)


def delta(place: Path, merge_files: int | None) -> DeltaBatchTable:
    return DeltaBatchTable(str(place), merge_files)


def iceberg(place: Path, merge_files: int | None) -> IcebergBatchTable:
    place.parent.mkdir(exist_ok=True)
    return IcebergBatchTable("n.t", local_catalog(place), merge_files)


def local_catalog(place: Path) -> CatalogConfig:
    return CatalogConfig("test", {"type": "sql", "uri": f"sqlite:///{place}.db", "warehouse": str(place)})


Kind = Callable[[Path, int | None], BatchTable[Any]]
KINDS: list[Kind] = [parquet, delta, iceberg]
VERSIONED: list[Kind] = [delta, iceberg]


def by_duckdb(directory: Path) -> list[int]:
    found = duckdb.sql(f"SELECT n FROM read_parquet('{directory}/**/*.parquet', union_by_name = true) ORDER BY n")
    return [row[0] for row in found.fetchall()]


def rows_of(table: BatchTable[Any]) -> pa.Table:
    """A versioned table, read with the library of its format."""
    if isinstance(table, DeltaBatchTable):
        return DeltaTable(table.place).to_pyarrow_table()
    assert isinstance(table, IcebergBatchTable)
    config = table._config
    return load_catalog(config.name, **config.properties).load_table(table.place).scan().to_arrow()


def read(table: BatchTable[Any]) -> list[int]:
    if not isinstance(table, ParquetBatchTable):
        return sorted(rows_of(table)["n"].to_pylist())
    assert parquet_numbers(table.directory) == by_duckdb(table.directory)
    return parquet_numbers(table.directory)


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> BatchTable[Any]:
    made: BatchTable[Any] = request.param(tmp_path / "t", 6)
    made.prepare()
    return made


def test_published_batches_are_recognised(table: BatchTable[Any], tmp_path: Path) -> None:
    assert not table.has_batches() and table.committed(0, "c") is None
    for batch in (0, 1, 5):
        assert table.committed(batch, "c") is None
        publish(table, batch)
    assert table.has_batches() and read(table) == batches(0, 1, 5)
    assert [table.committed(batch, "c") is not None for batch in (0, 4, 5, 6)] == [True, True, True, False]
    with pytest.raises(ForeignBatch):
        table.committed(5, "another")


def test_small_files_are_merged_when_batches_are_published(table: BatchTable[Any], tmp_path: Path) -> None:
    for batch in range(23):
        publish(table, batch)
        assert read(table) == batches(*range(batch + 1))
    files = list(table.directory.rglob("*.parquet")) if isinstance(table, ParquetBatchTable) else table.names()
    assert len(files) < 12
    assert table.committed(22, "c") is not None and table.committed(23, "c") is None
    assert table.compact() > 0 and read(table) == batches(*range(23))
    again = {ParquetBatchTable: parquet, DeltaBatchTable: delta, IcebergBatchTable: iceberg}[type(table)](tmp_path / "t", 6)
    again.prepare()
    publish(again, 23)
    assert read(again) == batches(*range(24))


def test_new_columns_are_null_in_older_rows(table: BatchTable[Any]) -> None:
    publish(table, 0)
    publish(table, 1, colour="red")
    publish(table, 2)
    for _ in range(2):
        if not isinstance(table, ParquetBatchTable):
            rows = rows_of(table)
        else:
            unified = pa.unify_schemas([pq.read_schema(path) for path in table.directory.rglob("*.parquet")])
            rows = pq.read_table(table.directory, schema=unified)
            assert duckdb.sql(
                f"SELECT count(colour) FROM read_parquet('{table.directory}/**/*.parquet', union_by_name = true)"
            ).fetchall() == [(4,)]
        assert sorted(zip(rows["n"].to_pylist(), rows["colour"].to_pylist())) == [
            (n, "red" if 1000 <= n < 2000 else None) for n in batches(0, 1, 2)
        ]
        table.compact()


def test_a_repeated_batch_of_dead_letters_is_replaced_or_removed(tmp_path: Path) -> None:
    table = ParquetBatchTable(tmp_path / "t", merge_files=6)
    table.prepare()
    for batch in range(4):
        publish(table, batch)
    table.compact()
    publish(table, 3, rows=1, files=4)
    assert read(table) == batches(0, 1, 2, 3) and table.committed(3, "c") is not None
    table.publish_empty(3)
    assert read(table) == batches(0, 1, 2)
    publish(table, 4)
    assert read(table) == batches(0, 1, 2, 4)


def former_table(directory: Path, count: int) -> None:
    """A table as earlier versions wrote it: directories, each with its marker."""
    for batch in range(count):
        made = directory / f"batches={batch - batch % 2}"
        made.mkdir(parents=True, exist_ok=True)
        for number in (0, 1):
            values = pa.table({"n": [batch * 1000 + number * 2 + row for row in (0, 1)]})
            pq.write_table(values, made / f"{batch:010d}.{number}.parquet")
        (made / "_batches.json").write_text(json.dumps({**MARK, "batch": batch}))


@pytest.mark.parametrize("swaps", [True, False])
def test_a_table_of_an_earlier_version_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool) -> None:
    if not swaps:
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    former_table(tmp_path / "t", 5)
    (tmp_path / "t" / "_README").write_text("of a user")
    table = ParquetBatchTable(tmp_path / "t", merge_files=None)
    assert table.has_batches()
    table.prepare()
    assert not [path for path in table.directory.iterdir() if path.is_dir()] and (tmp_path / "t" / "_README").exists()
    assert read(table) == batches(*range(5))
    assert table.committed(4, "c") is not None and table.committed(5, "c") is None
    with pytest.raises(ForeignBatch):
        table.committed(4, "another")
    publish(table, 4)
    publish(table, 5)
    assert read(table) == batches(*range(6))
    table.publish_empty(5)
    assert read(table) == batches(*range(5)) and table.committed(5, "c") is not None


@pytest.mark.parametrize("swaps", [True, False])
def test_a_kill_while_a_table_is_taken_over_loses_and_repeats_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool) -> None:
    if not swaps:
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    deadly = steps = 0

    def die() -> None:
        nonlocal steps
        steps += 1
        if steps == deadly:
            raise Killed

    killed = 0
    with monkeypatch.context() as patched:
        before_and_after_each_step(patched, die)
        for deadly in range(1, 200, 2):
            place = tmp_path / str(deadly) / "t"
            former_table(place, 4)
            steps = 0
            try:
                parquet(place, 4).prepare()
                break
            except Killed:
                killed += 1
            steps = 1000
            assert parquet_numbers(place) == batches(*range(4)), f"killed at step {deadly}"
            write(parquet, place, 6, swaps)
            assert read(parquet(place, 4)) == batches(*range(6)), f"killed at step {deadly}"
    assert killed > 4


def test_without_swapping_each_batch_has_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    table = ParquetBatchTable(tmp_path / "t", merge_files=2)
    table.prepare()
    for batch in (0, 1, 2, 2):
        publish(table, batch)
    assert sorted(path.name for path in table.directory.iterdir()) == [f"{batch:010d}.0.parquet" for batch in range(3)]
    assert read(table) == batches(0, 1, 2)
    with pytest.raises(OSError, match="cannot swap directories"):
        table.compact()


def test_a_table_whose_marker_is_missing_is_refused(tmp_path: Path) -> None:
    table = ParquetBatchTable(tmp_path / "t")
    table.prepare()
    publish(table, 0)
    marker_file(table.directory).unlink()
    with pytest.raises(TableError, match=r"t has batches and .*/.t.batch.json, which says which, is missing: restore it"):
        table.committed(0, "c")


def test_a_directory_in_the_tables_directory_is_refused_and_other_files_stay(tmp_path: Path) -> None:
    table = ParquetBatchTable(tmp_path / "t", merge_files=2)
    table.prepare()
    (table.directory / "_notes.txt").write_text("of a user")
    for batch in range(5):
        publish(table, batch)
    assert (table.directory / "_notes.txt").read_text() == "of a user"
    (table.directory / "more").mkdir()
    with pytest.raises(TableError, match="t/more is not of this table: give the table a directory of its own"):
        ParquetBatchTable(tmp_path / "t").prepare()


def test_a_link_to_the_tables_directory_stays(tmp_path: Path) -> None:
    (tmp_path / "disk" / "t").mkdir(parents=True)
    (tmp_path / "t").symlink_to(tmp_path / "disk" / "t")
    table = ParquetBatchTable(tmp_path / "t")
    table.prepare()
    for batch in range(3):
        publish(table, batch)
    assert (tmp_path / "t").is_symlink() and parquet_numbers(tmp_path / "t") == batches(*range(3))


def test_leftovers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_table, "LISTING_S", 0.0)
    table = ParquetBatchTable(tmp_path / "t")
    table.prepare()
    stage(table, 0)
    table.prepare()
    publish(table, 1)
    publish(table, 2)
    stage(table, 3)
    table.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".t.batch.json", "t"]


def test_a_format_without_its_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    for use in (DeltaBatchTable.has_batches, DeltaBatchTable.compact):
        with pytest.raises(PackageMissing, match=r"pip install 'mqttbroker\[delta\]'"):
            use(DeltaBatchTable(str(tmp_path / "t")))
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(PackageMissing, match=r"pip install 'mqttbroker\[iceberg\]'"):
        IcebergBatchTable("n.t", CatalogConfig()).prepare()


def test_delta_batches_and_merged_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()

    def note(fd: int, call: Callable[[int], None] = os.fsync) -> None:
        synced.add(os.fstat(fd).st_ino)
        call(fd)

    monkeypatch.setattr(os, "fsync", note)
    table = DeltaBatchTable(str(tmp_path / "t"), merge_files=4)
    table.prepare()
    directory = tmp_path / "t"
    log = directory / "_delta_log"
    for batch in range(6):
        publish(table, batch, **{f"column{batch}": 1})
        needed = {*log.glob("*.json"), *directory.glob("*.parquet"), log, directory}
        assert not {path.name for path in needed if path.stat().st_ino not in synced}, f"after batch {batch}"


# --- kills and readers at every step --------------------------------------------------------------------------------

STEPS: list[tuple[Any, str]] = [
    (os, "rename"),
    (os, "link"),
    (os, "fsync"),
    (parquet_table, "swap"),
    (parquet_table, "merge"),
    (shutil, "rmtree"),
    (DeltaTable, "create_write_transaction"),
    (SqlCatalog, "commit_table"),
]


class Killed(BaseException):
    """Ends a writer as a kill does: no code of the tables handles it."""


def before_and_after_each_step(monkeypatch: pytest.MonkeyPatch, hook: Callable[[], None]) -> None:
    for owner, name in STEPS:

        def step(*given: Any, call: Callable[..., Any] = getattr(owner, name), **named: Any) -> Any:
            hook()
            result = call(*given, **named)
            hook()
            return result

        monkeypatch.setattr(owner, name, step)


def write(kind: Kind, place: Path, last: int, compacts: bool = True) -> None:
    """A run of the job: write the batches that are not published yet."""
    table = kind(place, 4)
    table.prepare()
    for batch in range(last):
        if table.committed(batch, "c") is None:
            publish(table, batch)
    if compacts:
        table.compact()


@pytest.mark.parametrize(
    ("kind", "every"),
    [(parquet, 3), (delta, 3), (iceberg, 41), pytest.param(iceberg, 3, marks=pytest.mark.slow(reason="as above, at more steps"))],
)
def test_a_kill_at_any_step_loses_and_repeats_no_rows(kind: Kind, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = steps = 0

    def die() -> None:
        nonlocal steps
        steps += 1
        if steps == deadly:
            raise Killed

    killed = 0
    with monkeypatch.context() as patched:
        before_and_after_each_step(patched, die)
        for deadly in range(1, 2000, every):
            place = tmp_path / str(deadly) / "t"
            steps = 0
            try:
                write(kind, place, 5)
                break
            except Killed:
                killed += 1
            known = read(kind(place, 4)) if kind(place, 4).has_batches() else []
            assert known == batches(*range(len(known) // 4)), f"killed at step {deadly}"
            steps = 2000
            write(kind, place, 6)
            assert read(kind(place, 4)) == batches(*range(6)), f"killed at step {deadly}"
    assert killed > 60 / every


@pytest.mark.parametrize("kind", KINDS)
def test_readers_at_any_step_see_complete_batches(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    steps = 0

    def look() -> None:
        nonlocal steps
        steps += 1
        if (kind is not iceberg or steps % 7 == 0) and kind(tmp_path / "t", 4).has_batches():
            seen.append(read(kind(tmp_path / "t", 4)))

    with monkeypatch.context() as patched:
        before_and_after_each_step(patched, look)
        write(kind, tmp_path / "t", 6)
    assert len(seen) > 10 and seen == sorted(seen, key=len)
    for rows in seen:
        assert rows == batches(*range(len(rows) // 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_concurrent_reader_is_right_or_gets_an_error(kind: Kind, tmp_path: Path) -> None:
    """An error: the file was merged into another one after the reader had listed it."""
    last = 20 if kind is iceberg else 80
    table = kind(tmp_path / "t", 5)
    table.prepare()
    publish(table, 0)
    published = 0
    failures: list[str] = []
    right = missing = 0

    def keep_reading() -> None:
        nonlocal right, missing
        while published < last:
            before = published
            try:
                rows = parquet_numbers(table.directory) if isinstance(table, ParquetBatchTable) else read(table)
            except FileNotFoundError:
                missing += 1
                continue
            number = len(rows) // 4
            if rows != batches(*range(number)) or number <= before:
                failures.append(f"after {before}: {rows}")
            right += 1

    reader = threading.Thread(target=keep_reading)
    reader.start()
    for batch in range(1, last + 1):
        publish(table, batch)
        published = batch
    reader.join()
    assert not failures and right > 5
    assert kind is parquet or not missing
