"""The ingest job's tables on disk: batches, repeats, merges, kills at each step, concurrent readers.

Tables are read by pyarrow, DuckDB and deltalake.
"""

from __future__ import annotations

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
from support.table_batches import batches, parquet_numbers, publish, stage

from bridge_spark.tables.output import parquet_table
from bridge_spark.tables.output.batch_table import BatchTable, ForeignBatch
from bridge_spark.tables.output.delta_table import DeltaBatchTable, DeltaMissing
from bridge_spark.tables.output.parquet_table import ParquetBatchTable

pytestmark = pytest.mark.one_build

KINDS = [ParquetBatchTable, DeltaBatchTable]


def by_duckdb(directory: Path) -> list[int]:
    found = duckdb.sql(f"SELECT n FROM read_parquet('{directory}/**/*.parquet', union_by_name = true) ORDER BY n")
    return [row[0] for row in found.fetchall()]


def read(table: BatchTable) -> list[int]:
    if isinstance(table, DeltaBatchTable):
        return sorted(DeltaTable(table.directory).to_pyarrow_table()["n"].to_pylist())
    assert parquet_numbers(table.directory) == by_duckdb(table.directory)
    return parquet_numbers(table.directory)


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> BatchTable:
    made: BatchTable = request.param(tmp_path / "t", merge_files=6)
    made.prepare()
    return made


def test_published_batches_are_recognised(table: BatchTable) -> None:
    assert not table.has_batches() and table.committed(0, "c") is None
    for batch in (0, 1, 5):
        assert table.committed(batch, "c") is None
        publish(table, batch)
    assert table.has_batches() and read(table) == batches(0, 1, 5)
    assert [table.committed(batch, "c") is not None for batch in (0, 4, 5, 6)] == [True, True, True, False]
    with pytest.raises(ForeignBatch):
        table.committed(5, "another")


def test_small_files_are_merged_when_batches_are_published(table: BatchTable) -> None:
    for batch in range(23):
        publish(table, batch)
        assert read(table) == batches(*range(batch + 1))
    files = DeltaTable(table.directory).file_uris() if isinstance(table, DeltaBatchTable) \
        else list(table.directory.rglob("*.parquet"))
    assert len(files) < 12
    assert table.committed(22, "c") is not None and table.committed(23, "c") is None
    assert table.compact() > 0 and read(table) == batches(*range(23))
    again = type(table)(table.directory, merge_files=6)
    again.prepare()
    publish(again, 23)
    assert read(again) == batches(*range(24))


def test_new_columns_are_null_in_older_rows(table: BatchTable) -> None:
    publish(table, 0)
    publish(table, 1, colour="red")
    publish(table, 2)
    for _ in range(2):
        if isinstance(table, DeltaBatchTable):
            rows = DeltaTable(table.directory).to_pyarrow_table()
        else:
            unified = pa.unify_schemas([pq.read_schema(path) for path in table.directory.rglob("*.parquet")])
            rows = pq.read_table(table.directory, schema=unified)
            assert duckdb.sql(f"SELECT count(colour) FROM read_parquet('{table.directory}/**/*.parquet', "
                              f"union_by_name = true)").fetchall() == [(4,)]
        assert sorted(zip(rows["n"].to_pylist(), rows["colour"].to_pylist())) == [
            (n, "red" if 1000 <= n < 2000 else None) for n in batches(0, 1, 2)]
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


def test_after_a_full_directory_comes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_table, "DIRECTORY_BYTES", 2000)
    table = ParquetBatchTable(tmp_path / "t")
    table.prepare()
    for batch in range(9):
        publish(table, batch)
    assert len(list(table.directory.iterdir())) > 2 and read(table) == batches(*range(9))
    assert table.compact() > 0 and read(table) == batches(*range(9))


def test_without_swapping_each_batch_has_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    table = ParquetBatchTable(tmp_path / "t", merge_files=2)
    table.prepare()
    for batch in (0, 1, 2, 2):
        publish(table, batch)
    assert sorted(path.name for path in table.directory.iterdir()) == [f"batches={batch}" for batch in range(3)]
    assert read(table) == batches(0, 1, 2)
    with pytest.raises(OSError, match="cannot swap directories"):
        table.compact()


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]


def test_delta_without_its_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    for use in (DeltaBatchTable.has_batches, DeltaBatchTable.compact):
        with pytest.raises(DeltaMissing, match=r"pip install 'mqttbroker\[delta\]'"):
            use(DeltaBatchTable(tmp_path / "t"))


def test_delta_batches_and_merged_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()

    def note(fd: int, call: Callable[[int], None] = os.fsync) -> None:
        synced.add(os.fstat(fd).st_ino)
        call(fd)

    monkeypatch.setattr(os, "fsync", note)
    table = DeltaBatchTable(tmp_path / "t", merge_files=4)
    table.prepare()
    log = table.directory / "_delta_log"
    for batch in range(6):
        publish(table, batch, **{f"column{batch}": 1})
        needed = {*log.glob("*.json"), *table.directory.glob("*.parquet"), log, table.directory}
        assert not {path.name for path in needed if path.stat().st_ino not in synced}, f"after batch {batch}"


# --- kills and readers at every step --------------------------------------------------------------------------------

STEPS: list[tuple[Any, str]] = [
    (os, "rename"), (os, "link"), (os, "fsync"), (parquet_table, "swap"), (parquet_table, "merge"), (shutil, "rmtree"),
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


def write(kind: type[ParquetBatchTable | DeltaBatchTable], place: Path, last: int) -> None:
    """A run of the job: write the batches that are not published yet."""
    table = kind(place, merge_files=4)
    table.prepare()
    for batch in range(last):
        if table.committed(batch, "c") is None:
            publish(table, batch)
    table.compact()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_step_loses_and_repeats_no_rows(
    kind: type[ParquetBatchTable | DeltaBatchTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = steps = 0

    def die() -> None:
        nonlocal steps
        steps += 1
        if steps == deadly:
            raise Killed

    killed = 0
    with monkeypatch.context() as patched:
        before_and_after_each_step(patched, die)
        for deadly in range(1, 1000, 3):
            place = tmp_path / str(deadly) / "t"
            steps = 0
            try:
                write(kind, place, 5)
                break
            except Killed:
                killed += 1
            known = read(kind(place)) if kind(place).has_batches() else []
            assert known == batches(*range(len(known) // 4)), f"killed at step {deadly}"
            steps = 1000
            write(kind, place, 6)
            assert read(kind(place)) == batches(*range(6)), f"killed at step {deadly}"
    assert killed > 20


@pytest.mark.parametrize("kind", KINDS)
def test_readers_at_any_step_see_complete_batches(
    kind: type[ParquetBatchTable | DeltaBatchTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look() -> None:
        if kind(tmp_path / "t").has_batches():
            seen.append(read(kind(tmp_path / "t")))

    with monkeypatch.context() as patched:
        before_and_after_each_step(patched, look)
        write(kind, tmp_path / "t", 6)
    assert len(seen) > 20 and seen == sorted(seen, key=len)
    for rows in seen:
        assert rows == batches(*range(len(rows) // 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_concurrent_reader_is_right_or_gets_an_error(
    kind: type[ParquetBatchTable | DeltaBatchTable], tmp_path: Path
) -> None:
    """An error: the file was merged into another one after the reader had listed it."""
    table = kind(tmp_path / "t", merge_files=5)
    table.prepare()
    publish(table, 0)
    published = 0
    failures: list[str] = []
    right = missing = 0

    def keep_reading() -> None:
        nonlocal right, missing
        while published < 80:
            before = published
            try:
                rows = read(table) if kind is DeltaBatchTable else parquet_numbers(table.directory)
            except FileNotFoundError:
                missing += 1
                continue
            number = len(rows) // 4
            if rows != batches(*range(number)) or number <= before:
                failures.append(f"after {before}: {rows}")
            right += 1

    reader = threading.Thread(target=keep_reading)
    reader.start()
    for batch in range(1, 81):
        publish(table, batch)
        published = batch
    reader.join()
    assert not failures and right > 5
    assert not (kind is DeltaBatchTable and missing)
