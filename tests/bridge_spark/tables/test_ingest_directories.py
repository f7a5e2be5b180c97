"""The ingest job's directories: unusual names, unusable disks, missing files, ranges of a backfill.

Tables are read without Spark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrameWriter, SparkSession
from support.broker_process import to_toml
from support.ingest_jobs import document, parquet_rows
from support.sealed_log import seal_segment
from support.spark_session import START_US, StreamWriter, message, spark

from bridge_spark.ingest import main, run, run_backfill
from bridge_spark.tables.compact import main as compact
from bridge_spark.tables.ingest_config import parse_config
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.jobs import backfill
from bridge_spark.tables.output import range_table
from bridge_spark.tables.output.parquet_table import ParquetBatchTable

pytestmark = pytest.mark.one_build

__all__ = ["spark"]


def test_directories_with_unusual_names(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "50% größer #1 [a]"
    StreamWriter(root / "data").append(0, [message(0), message(1, payload=b"bad")])
    config = parse_config(document(root))
    run(config, once=True, session=spark)
    run_backfill(config, {0: 0}, {0: 2}, session=spark)
    for place in ("out", "out.backfill"):
        assert [[row["offset"] for row in parquet_rows(root / name)] for name in (place, f"{place}.rejected")] == [
            [0],
            [1],
        ]
    assert [path.name for path in tmp_path.iterdir()] == [root.name]


def test_a_backfill_by_offsets_reads_only_named_partitions(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data", partitions=3)
    for partition in range(3):
        writer.append(partition, [message(n) for n in range(6)])
    writer.roll(1)
    writer.append(1, [message(6)])
    writer.remove_before(1, 6)
    config = parse_config(document(tmp_path))
    run_backfill(config, {0: 1}, {0: 3}, session=spark)
    run_backfill(config, {0: 3, 2: 0}, {0: 3, 2: 1}, session=spark)
    assert [(row["partition"], row["offset"]) for row in parquet_rows(tmp_path / "out.backfill")] == [
        (0, 1),
        (0, 2),
        (2, 0),
    ]
    with pytest.raises(IngestError, match="there is no partition 3, only 0 to 2"):
        run_backfill(config, {3: 0}, {3: 1}, session=spark)


def at(milliseconds: float) -> str:
    """The time of receipt of message ``milliseconds``, as an argument of the command."""
    return str(datetime.fromtimestamp(START_US / 1e6, UTC) + timedelta(milliseconds=milliseconds))


def write_segments(data: Path) -> None:
    """Write messages 0 to 199, even ones to partition 0, in segments of 40 with an index entry per 16; some bad."""
    writer = StreamWriter(data, partitions=2)
    for partition in (0, 1):
        for first in range(0, 100, 4):
            writer.append(
                partition,
                [
                    message(n, payload=b"bad" if n % 60 == 50 else b'{"n": %d, "more": "%s"}' % (n, b"x" * 4000))
                    for n in range(first * 2 + partition, first * 2 + 8, 2)
                ],
            )
            if first % 40 == 36:
                writer.roll(partition)
    seal_segment(writer.segments(0)[0], 40)


def everything(directory: Path) -> list[int]:
    """The messages of a table and its dead letters."""
    places = [(row["partition"], row["offset"]) for part in (directory, Path(f"{directory}.rejected")) for row in parquet_rows(part)]
    return sorted(2 * offset + partition for partition, offset in places)


IN_TIME = [
    (at(36.001), at(140.001), range(37, 141)),
    (at(140.001), at(146), range(141, 146)),
    (at(-9), at(30), range(30)),
]
IN_OFFSETS: list[tuple[str, str, Sequence[int]]] = [
    ('{"0": 5, "1": 95}', '{"0": 77, "1": 99}', [*range(10, 154, 2), *range(191, 199, 2)]),
    ('{"0": 77}', '{"0": 79}', [154, 156]),
    ('{"1": 0}', '{"1": 1}', [1]),
]


@pytest.mark.parametrize(
    ("ranges", "overlaps"),
    [
        (IN_TIME, [(at(140), at(141)), (at(0), at(36.002)), (at(-9), at(200)), ('{"0": 99}', '{"0": 100}')]),
        (IN_OFFSETS, [('{"0": 76}', '{"0": 77}'), ('{"0": 99, "1": 0}', '{"0": 99, "1": 96}'), (at(199), at(200))]),
    ],
    ids=["time", "offsets"],
)
def test_backfills_have_exactly_the_messages_of_their_range(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ranges: list[tuple[str, str, Sequence[int]]],
    overlaps: list[tuple[str, str]],
) -> None:
    """Ranges end inside segments and record batches; the first is read twice."""
    write_segments(tmp_path / "data")
    config = tmp_path / "ingest.toml"
    config.write_text(to_toml(document(tmp_path)))
    monkeypatch.setattr("bridge_spark.ingest.run_backfill", partial(run_backfill, session=spark))
    wanted: set[int] = set()
    for begin, end, messages in (ranges[0], *ranges):
        assert main([str(config), "--backfill", begin, end]) == 0
        bad = len([n for n in messages if n % 60 == 50])
        assert capsys.readouterr().out.startswith(f"t: {len(messages) - bad} rows, {bad} bad, 1 batches in ")
        wanted |= {*messages}
        assert everything(tmp_path / "out.backfill") == sorted(wanted)
        assert {row["n"] for row in parquet_rows(tmp_path / "out.backfill")} == {n for n in wanted if n % 60 != 50}
    for begin, end in overlaps:
        assert main([str(config), "--backfill", begin, end]) == 1
        assert re.fullmatch(
            rf"mqttbroker ingest: {config}: tables\.t: the range overlaps {tmp_path}/out\.backfill\S*/range=\S+, "
            r"whose rows would be there twice: .*\n",
            capsys.readouterr().err,
        )
    assert everything(tmp_path / "out.backfill") == sorted(wanted) and not (tmp_path / "out").exists()


def test_fields_named_like_directories_keep_their_values(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0, payload=b'{"range": 7.5, "batches": 8.5}')])
    config = parse_config(document(tmp_path, schema="range double, batches double", fields=["range as distance", "batches"]))
    run(config, once=True, session=spark)
    run_backfill(config, {0: 0}, {0: 1}, session=spark)
    for place in ("out", "out.backfill"):
        [row] = parquet_rows(tmp_path / place)
        assert (row["distance"], row["batches"]) == (7.5, 8.5)
        assert spark.read.parquet(str(tmp_path / place)).select("distance", "batches").collect() == [(7.5, 8.5)]


def test_a_directory_that_cannot_be_created_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0)])
    (tmp_path / "file").touch()
    config = tmp_path / "ingest.toml"
    config.write_text(
        f"[source]\npath = '{tmp_path}/data'\n[tables.t]\nstream = 'sensors'\nschema = 'n long'\noutput = '{tmp_path}/file/out'\n"
    )
    assert compact([str(config)]) == 1
    assert re.fullmatch(rf"mqttbroker compact: {config}: tables\.t: .*'{tmp_path}/file/out\.checkpoint'\n", capsys.readouterr().err)


def test_an_output_or_a_backfill_that_cannot_be_written_is_one_line(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0)])
    (tmp_path / "file").touch()
    config = parse_config(document(tmp_path, dead_letters=str(tmp_path / "file" / "bad")))
    with pytest.raises(IngestError, match=r"tables\.t: .*file/bad'"):
        run(config, once=True, session=spark)
    config = parse_config(document(tmp_path, deduplicate_by=["n"], watermark="1 minute"))
    monkeypatch.setattr(range_table, "sync_directory", lambda _: os.stat(tmp_path / "away"))
    with pytest.raises(IngestError, match=r"tables\.t: .*/away'"):
        run_backfill(config, {0: 0}, {0: 1}, session=spark)
    monkeypatch.setattr(backfill, "dead_letters", lambda *_: os.stat(tmp_path / "gone"))
    StreamWriter(tmp_path / "data", "bad").append(0, [message(0, payload=b"bad")])
    config = parse_config(document(tmp_path, stream="bad", deduplicate_by=["n"], watermark="1 minute"))
    with pytest.raises(IngestError, match=r"tables\.t: .*/gone'"):
        run_backfill(config, {0: 0}, {0: 1}, session=spark)
    assert not list(tmp_path.glob(".*.backfill.staging")) and spark._jsparkSession.sharedState().cacheManager().isEmpty()


def test_offsets_are_synced_before_the_batch_is_published(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(n) for n in range(20)])
    synced: set[int] = set()
    published: list[int] = []

    def note(fd: int, call: Callable[[int], None] = os.fsync) -> None:
        synced.add(os.fstat(fd).st_ino)
        call(fd)

    def publish(table: ParquetBatchTable, batch: int, *given: Any, call: Callable[..., None] = ParquetBatchTable.publish) -> None:
        checkpoint = tmp_path / "out.checkpoint"
        needed = [checkpoint / "metadata", checkpoint / "offsets" / str(batch), checkpoint / "offsets", checkpoint]
        assert {path.stat().st_ino for path in needed} <= synced
        published.append(batch)
        call(table, batch, *given)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(ParquetBatchTable, "publish", publish)
    run(parse_config(document(tmp_path, max_offsets_per_trigger=10)), once=True, session=spark)
    assert published == [0, 1]


def test_files_that_executors_wrote_to_other_disks_are_an_error(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(directory: Path) -> dict[str, Any]:
        StreamWriter(directory / "data").append(0, [message(0), message(60_000), message(1, payload=b"bad")])
        return document(directory, watermark="1 second", aggregates={"minute": {"window": "1 minute", "values": ["n"]}})

    settings, of_aggregates = prepared(tmp_path), prepared(tmp_path / "minute")
    elsewhere = ".out.staging"
    empty = True

    def write(frames: Any, place: str, call: Callable[..., None] = DataFrameWriter.parquet) -> None:
        call(frames, place)
        if elsewhere in place:
            for path in Path(place.removeprefix("file://")).glob("*.parquet"):
                if empty or pq.read_metadata(path).num_rows:
                    path.unlink()

    monkeypatch.setattr(DataFrameWriter, "parquet", write)
    with pytest.raises(IngestError, match=r"a file that was written is not in .*\.out\.staging.* share the disk"):
        run(parse_config(settings), once=True, session=spark)
    empty = False
    # The query of the aggregates may end before that of the rows fails, so it has a stream and tables of its own.
    for elsewhere, its in (
        (".out.staging", settings),
        (".out.rejected.staging", settings),
        (".out.minute.staging", of_aggregates),
    ):
        with pytest.raises(IngestError, match=rf"of \d rows that were written 0 are in .*{elsewhere}.* share the disk"):
            run(parse_config(its), once=True, session=spark)
    with pytest.raises(IngestError, match="of 2 rows that were written 0 are in"):
        elsewhere = ".out.backfill.staging"
        run_backfill(parse_config(settings), {0: 0}, {0: 3}, session=spark)
    elsewhere = "none"
    for its in (settings, of_aggregates):
        run(parse_config(its), once=True, session=spark)
    assert [row["offset"] for row in parquet_rows(tmp_path / "out")] == [0, 1] and len(parquet_rows(tmp_path / "out.rejected")) == 1
    assert pq.read_table(tmp_path / "minute" / "out.minute")["count"].to_pylist() == [1]
