"""The ingest job's tables: duplicates, late messages, aggregates, Delta, changed settings, kills with all of it.

Tables are read without Spark; the expected rows are computed by pandas from the same messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from support.ingest_jobs import QUICK_SPARK
from support.spark_session import START_US, StreamWriter, message, spark

from bridge_spark.ingest import run
from bridge_spark.tables.ingest_config import parse_config
from bridge_spark.tables.ingest_progress import TableProgress
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.output.parquet_table import marker_file

pytestmark = pytest.mark.one_build
SLOW = pytest.mark.slow(reason="the same with Parquet runs")

__all__ = ["spark"]

START = datetime.fromtimestamp(START_US / 1e6, UTC)
SCHEMA = "device string, ts timestamp, value double not null"


def reading(number: int, device: str, second: float | None, value: float) -> Any:
    """A reading ``second`` s after `START`; None for one without a time."""
    ts = None if second is None else (START + timedelta(seconds=second)).isoformat()
    body = json.dumps({"device": device, "ts": ts, "value": value}).encode()
    at = number if second is None else max(int(second * 1000), number)
    return message(at, f"sensors/{device}", body)


def uncommit(checkpoint: Path, files: Path) -> None:
    """Leave a checkpoint as a kill does after the last batch was published and before Spark commits it."""
    last = json.loads(marker_file(files).read_text())
    for directory, first in (("offsets", last["batch"] + 1), ("commits", last["batch"])):
        for path in (checkpoint / directory).iterdir():
            if int(path.name.strip(".").removesuffix(".crc")) >= first:
                path.unlink()


def document(root: Path, **table: Any) -> dict[str, Any]:
    given = {"stream": "sensors", "schema": SCHEMA, "output": str(root / "out"), "event_time": "ts", **table}
    return {"source": {"path": str(root / "data")}, "spark": {"master": "local[2]", "conf": QUICK_SPARK}, "tables": {"t": given}}


def ingest(spark: SparkSession, settings: dict[str, Any]) -> dict[str, TableProgress]:
    return {table.name: table for table in run(parse_config(settings), once=True, session=spark)}


def rows(directory: Path) -> Any:
    if (directory / "_delta_log").exists():
        return DeltaTable(directory).to_pandas()
    if not any(directory.rglob("*.parquet")):
        return pd.DataFrame()
    return pq.read_table(directory, partitioning=None).to_pandas()


def test_duplicates_are_dropped_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(
        0,
        [
            reading(0, "a", 0, 1.0),
            reading(1, "a", 0, 1.0),
            reading(2, "b", 0, 2.0),
            reading(3, "a", None, 3.0),
            reading(4, "a", None, 3.0),
            message(5, payload=b"bad"),
            message(6, payload=b"bad"),
            reading(7, "a", 200, 4.0),
        ],
    )
    settings = document(tmp_path, watermark="1 minute", deduplicate_by=["device", "ts"])
    first = ingest(spark, settings)["t"]
    assert (first.rows, first.bad, first.duplicates, first.late) == (5, 2, 1, 0)
    # A duplicate and a new reading within the watermark, a reading before it, and a clock that is far ahead.
    writer.append(
        0,
        [
            reading(8, "a", 200, 4.0),
            reading(9, "a", 180, 5.0),
            reading(10, "c", 100, 6.0),
            message(11, payload=b"bad"),
            message(200_000, payload=b'{"ts": "2099-01-01T00:00:00Z", "value": 7}'),
        ],
    )
    second = ingest(spark, settings)["t"]
    assert (second.rows, second.bad, second.duplicates, second.late) == (2, 1, 1, 1)
    writer.append(0, [reading(13, "a", 230, 8.0)])
    assert ingest(spark, settings)["t"].rows == 1
    assert sorted(rows(tmp_path / "out")["offset"]) == [0, 2, 3, 4, 7, 9, 12, 13]
    rejected = rows(tmp_path / "out.rejected").set_index("offset").sort_index()
    assert list(rejected.index) == [5, 6, 10, 11]
    assert rejected.loc[10, "reason"].startswith("too late: the watermark was 2023-11-14T22:15:40.000")
    assert rejected.loc[10, "payload"].startswith(b'{"device": "c"')
    with pytest.raises(IngestError, match=r"deduplicate_by was \['device', 'ts'\] when .* is \['device'\] now"):
        ingest(spark, document(tmp_path, watermark="1 minute", deduplicate_by=["device"]))


def number(offset: int) -> int:
    """The number of the reading at this offset in `many`: they are partly out of order."""
    return offset - offset % 10 + offset * 7 % 10


def many(first: int, last: int, every: int = 1) -> list[Any]:
    """Messages from ``first`` up to ``last``: readings of three devices, out of order; some do not parse."""
    return [
        message(offset * every, payload=b"bad") if offset % 40 == 9 else reading(n, "abc"[n % 3], n * every, (n * 37) % 101 / 4)
        for offset in range(first, last)
        for n in [number(offset)]
    ]


def expected(readings: int, window: int, every: int = 1, group_by: Sequence[str] = ("device",)) -> Any:
    """The aggregates of `many` by pandas; ``window`` in seconds."""
    good = [number(offset) for offset in range(readings) if offset % 40 != 9]
    frame = pd.DataFrame(
        {
            "device": ["abc"[n % 3] for n in good],
            "value": [(n * 37) % 101 / 4 for n in good],
            "time": [START + timedelta(seconds=n * every) for n in good],
        }
    ).sort_values("time")
    groups = frame.groupby([pd.Grouper(key="time", freq=f"{window}s", origin="epoch"), *group_by])["value"]
    return groups.agg(["count", "mean", "min", "max", "last"])


@pytest.mark.parametrize("table_format", ["parquet", pytest.param("delta", marks=SLOW)])
def test_aggregates_over_restarts_agree_with_pandas(spark: SparkSession, tmp_path: Path, table_format: str) -> None:
    """More than two hours of readings, so that windows of an hour are closed too."""
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, many(0, 400, every=8))
    groups = {"minute": ("1 minute", ["device"]), "hour": ("1 hour", [])}
    settings = document(
        tmp_path,
        watermark="3 minutes",
        max_offsets_per_trigger=250,
        table_format=table_format,
        aggregates={name: {"window": window, "group_by": group_by} for name, (window, group_by) in groups.items()},
    )
    ingest(spark, settings)
    writer.append(0, [*many(400, 1000, every=8), reading(1000, "a", 60, 1000.0)])
    done = ingest(spark, settings)
    assert {name: table.late for name, table in done.items()} == {"t": 0, "t.minute": 1, "t.hour": 1}
    table = rows(tmp_path / "out")
    assert sorted(table["offset"]) == sorted(set(table["offset"])) and len(table) == 976
    for name, (length, group_by) in groups.items():
        found = rows(tmp_path / f"out.{name}")
        window = timedelta(minutes=1) if length == "1 minute" else timedelta(hours=1)
        assert (found["window_end"] - found["window_start"] == window).all()
        wanted = expected(1000, int(window.total_seconds()), 8, group_by).reset_index()
        wanted = wanted[wanted["time"] + window <= START + timedelta(seconds=999 * 8 - 180)]
        assert len(wanted) == {"minute": 390, "hour": 2}[name]
        columns = ["window_start", *group_by, "count", "value_mean", "value_min", "value_max", "value_last"]
        pd.testing.assert_frame_equal(
            found[columns].sort_values(columns[:2]).reset_index(drop=True),
            wanted.set_axis(columns, axis=1).reset_index(drop=True),
            check_dtype=False,
        )


def test_tables_with_state_continue_after_an_uncommitted_batch(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, many(0, 400))
    settings = document(
        tmp_path,
        watermark="1 minute",
        deduplicate_by=["device", "ts"],
        aggregates={"minute": {"window": "1 minute", "group_by": ["device"]}},
    )
    ingest(spark, settings)
    for name in ("out", "out.minute"):
        uncommit(tmp_path / f"{name}.checkpoint", tmp_path / name)
    writer.append(0, [*many(400, 600), reading(600, "a", 399, 1.0)])
    ingest(spark, settings)
    assert sorted(rows(tmp_path / "out")["offset"]) == [n for n in range(600) if n % 40 != 9]
    found = rows(tmp_path / "out.minute").set_index(["window_start", "device"])
    wanted = expected(600, 60)
    wanted = wanted[[start + timedelta(seconds=60) <= found["window_end"].max() for start, _ in wanted.index]]
    assert len(found) == len(wanted) > 20
    assert found["count"].to_dict() == wanted["count"].to_dict()


@pytest.mark.parametrize("start", ["earliest", '{"0": 1}'])
def test_late_messages_in_the_first_batch_are_dead_letters(spark: SparkSession, tmp_path: Path, start: str) -> None:
    """Spark's first watermark is in 1970, as is a clock that is not set."""
    unset = (START - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    StreamWriter(tmp_path / "data").append(0, [reading(n, "a", -unset if n < 3 else n, float(n)) for n in range(5)])
    settings = document(tmp_path, watermark="1 minute", deduplicate_by=["ts"], starting_offsets=start)
    assert ingest(spark, settings)["t"].late == len(rows(tmp_path / "out.rejected"))
    assert sorted(rows(tmp_path / "out.rejected")["offset"]) == list(range(0 if start == "earliest" else 1, 3))
    assert set(rows(tmp_path / "out.rejected")["reason"]) == {"too late: the watermark was 1970-01-01T00:00:00.000+00:00"}
    assert sorted(rows(tmp_path / "out")["offset"]) == [3, 4]


def test_retention_may_remove_published_messages(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    parquet_rows, state = (
        document(tmp_path),
        document(tmp_path, watermark="1 minute", deduplicate_by=["device"], output=str(tmp_path / "state")),
    )
    for first, last in ((0, 30), (30, 60)):
        writer.append(0, many(first, last))
        ingest(spark, {**parquet_rows, "tables": {"plain": parquet_rows["tables"]["t"], "state": state["tables"]["t"]}})
    for name in ("out", "state"):
        uncommit(tmp_path / f"{name}.checkpoint", tmp_path / name)
    writer.roll(0)
    writer.append(0, many(60, 90))
    writer.remove_before(0, 60)
    assert ingest(spark, parquet_rows)["t"].batches == 1
    assert sorted(rows(tmp_path / "out")["offset"]) == [n for n in range(90) if n % 40 != 9]
    with pytest.raises(IngestError, match="partition 0: retention has removed the offsets 30 to 59"):
        ingest(spark, state)


def test_latest_means_the_end_at_the_first_start(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    settings = document(tmp_path, starting_offsets="latest")
    for first, last in ((0, 9), (9, 19), (19, 29)):
        writer.append(0, many(first, last))
        ingest(spark, settings)
    found = [*rows(tmp_path / "out")["offset"], *rows(tmp_path / "out.rejected")["offset"]]
    assert sorted(found) == list(range(9, 29))
