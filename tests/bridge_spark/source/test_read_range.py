"""Start and end of reads, their tasks, and pruning by predicates; all in-process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows
from pyspark.sql.types import StructType
from support.sealed_log import seal_closed
from support.spark_session import START_US, StreamWriter, message
from support.stream_reads import OF_SENSORS, places, rows, source, stream_reader, stream_rows

from bridge_spark import datasource
from bridge_spark.datasource import SliceTask, explain
from bridge_spark.log.sparse_index import IndexEntry
from bridge_spark.source import plan
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.offsets import limit_rows
from bridge_spark.source.option_values import OptionError
from bridge_spark.source.plan import Planner
from bridge_spark.source.rate_limit import RateLimit
from bridge_spark.source.storage import Manifest, PartitionState, Segment
from bridge_spark.source.where import parse_where

pytestmark = pytest.mark.one_build

START_MS = START_US // 1000


# --- times ----------------------------------------------------------------------------------------------------------


def at(milliseconds: int) -> str:
    return str(START_MS + milliseconds)


@pytest.fixture
def stepped(tmp_path: Path) -> Path:
    """One partition whose clock steps back once: 0, 1 | 2, 50 | 3, 4 ms after the start; the other is at 10 and 20."""
    writer = StreamWriter(tmp_path, partitions=2)
    for numbers in ((0, 1), (2, 50), (3, 4)):
        writer.append(0, [message(number) for number in numbers])
        writer.roll(0)
    writer.append(1, [message(10), message(20)])
    return tmp_path


def begins(data: Path, **options: str) -> dict[str, int]:
    start = stream_reader(data, **options).initialOffset()
    return {partition: offset for partition, offset in start.items() if partition.isdigit()}


def test_starting_timestamp_with_a_clock_that_stepped_back(stepped: Path) -> None:
    for milliseconds, first, second in ((0, 0, 0), (1, 1, 0), (3, 3, 0), (11, 3, 1), (20, 3, 1)):
        assert begins(stepped, startingTimestamp=at(milliseconds)) == {"0": first, "1": second}


def test_a_time_after_the_last_record_is_refused_or_is_the_end(stepped: Path) -> None:
    with pytest.raises(OptionError, match="'startingTimestamp': partition 1 has received nothing since then"):
        begins(stepped, startingTimestamp=at(21))
    with pytest.raises(OptionError, match="'startingOffsetsByTimestamp': partition 0 .*Strategy=latest"):
        begins(stepped, startingOffsetsByTimestamp=f'{{"0": {at(51)}}}')
    lenient = {"startingOffsetsByTimestampStrategy": "latest"}
    assert begins(stepped, startingTimestamp=at(21), **lenient) == {"0": 3, "1": 2}


def test_precedence_of_starting_options(stepped: Path) -> None:
    by_offset = {"startingOffsets": '{"0": 5, "1": 0}'}
    by_partition = {"startingOffsetsByTimestamp": f'{{"0": {at(1)}}}'}
    assert begins(stepped, **by_offset) == {"0": 5, "1": 0}
    assert begins(stepped, **by_offset, **by_partition) == {"0": 1, "1": 0}
    assert begins(stepped, **by_offset, **by_partition, startingTimestamp=at(15)) == {"0": 3, "1": 1}


def test_precedence_of_ending_options(stepped: Path) -> None:
    by_offset = {"endingOffsets": '{"0": 1, "1": 0}'}
    by_partition = {"endingOffsetsByTimestamp": f'{{"0": {at(2)}}}'}
    assert places(rows(stepped, **by_offset)) == [(0, 0)]
    assert places(rows(stepped, **by_offset, **by_partition)) == [(0, 0), (0, 1)]
    assert places(rows(stepped, **by_offset, **by_partition, endingTimestamp=at(20))) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert len(rows(stepped, endingTimestamp=at(999))) == 8
    assert places(rows(stepped, startingTimestamp=at(1), endingTimestamp=at(3))) == [(0, 1), (0, 2)]
    with pytest.raises(OptionError, match="'endingTimestamp': partition 0 would end at 0, before it starts at 2"):
        rows(stepped, startingOffsets='{"0": 2}', endingTimestamp=at(0))


@pytest.mark.parametrize("option", ["startingOffsets", "startingOffsetsByTimestamp", "endingOffsets", "endingOffsetsByTimestamp"])
def test_unknown_partitions_are_refused_when_loading(stepped: Path, option: str) -> None:
    with pytest.raises(OptionError, match=f"'{option}': there is no partition 2, only 0 to 1"):
        source(stepped, **{option: '{"0": 0, "2": 0}'})


# --- rate limit ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1000)), min_size=1, max_size=6), st.integers(1, 2000))
def test_max_rows_are_divided_among_partitions(waiting: list[tuple[int, int]], limit: int) -> None:
    start = {number: first for number, (first, _) in enumerate(waiting)}
    end = {number: first + count for number, (first, count) in enumerate(waiting)}
    limited = limit_rows(start, end, limit)
    assert all(start[number] <= limited[number] <= end[number] for number in start)
    assert sum(limited.values()) - sum(start.values()) == min(limit, sum(count for _, count in waiting))


def test_a_small_batch_waits_until_the_maximum_delay() -> None:
    now = 1000.0
    rate_limit = RateLimit(10, 60_000, lambda: now)
    assert rate_limit.batch_end({0: 0}, {0: 3}, None, False) == {0: 3}
    assert rate_limit.batch_end({0: 3}, {0: 12}, None, False) == {0: 3}
    assert rate_limit.batch_end({0: 3}, {0: 12}, None, True) == {0: 12}
    now += 59.9
    assert rate_limit.batch_end({0: 3}, {0: 12}, None, False) == {0: 3}
    assert rate_limit.batch_end({0: 3}, {0: 13}, 5, False) == {0: 8}
    now += 59.9
    assert rate_limit.batch_end({0: 8}, {0: 13}, None, False) == {0: 8}
    now += 0.1
    assert rate_limit.batch_end({0: 8}, {0: 13}, None, False) == {0: 13}


def test_available_now_ignores_the_minimum(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path)
    writer.append(0, [message(n) for n in range(5)])
    options = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "4", "maxTriggerDelay": "1h"}
    reader = stream_reader(tmp_path, **options)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(4)
    assert stream_reader(tmp_path, **options, maxOffsetsPerTrigger="4").getDefaultReadLimit() == ReadMaxRows(4)
    assert reader.latestOffset({"0": 0}, limit) == {"0": 5} | OF_SENSORS
    writer.append(0, [message(n) for n in range(3)])
    assert reader.latestOffset({"0": 5}, limit) == {"0": 5} | OF_SENSORS
    assert reader.latestOffset({"0": 5}, ReadAllAvailable()) == {"0": 8} | OF_SENSORS
    reader.prepareForTriggerAvailableNow()
    assert reader.latestOffset({"0": 5}, limit) == {"0": 8} | OF_SENSORS


def test_committed_offsets_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StreamWriter(tmp_path, partitions=2).append(1, [message(n) for n in range(9)])
    told: list[Any] = []
    monkeypatch.setattr(DirectoryStorage, "report", lambda self, consumer, offsets: told.append((consumer, offsets)))
    stream_reader(tmp_path).latestOffset({"0": 0, "1": 5}, ReadAllAvailable())
    stream_reader(tmp_path, consumer="plant").latestOffset({"0": 0, "1": 7}, ReadAllAvailable())
    assert told == [("plant", {0: 0, 1: 7})]


# --- tasks ----------------------------------------------------------------------------------------------------------


class NoIndex(DirectoryStorage):
    """A storage whose segments exist in the manifest only."""

    def __init__(self) -> None:
        super().__init__("nowhere", "none")

    def index(self, partition: int, segment: Segment) -> list[IndexEntry]:
        return []


def tasks(data: Path, **options: str) -> list[list[plan.Slice]]:
    found = source(data, **options)
    return [task.slices for task in found.reader(found.schema()).partitions() if isinstance(task, SliceTask)]


def test_a_small_range_is_one_task_and_a_large_one_is_divided_at_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StreamWriter(tmp_path, partitions=4)
    for number in range(40):
        writer.append(number % 4, [message(n, payload=bytes(1000)) for n in range(100)])
    assert len(tasks(tmp_path)) == 1
    assert [len(tasks(tmp_path, minPartitions=str(count))) for count in (3, 7, 20)] == [4, 8, 20]
    monkeypatch.setattr(datasource, "MIN_TASK_BYTES", 150_000)
    cut = tasks(tmp_path)
    assert len(cut) == 8 and all(part.start_offset % 100 == 0 for task in cut for part in task)
    whole = [(partition, offset) for partition in range(4) for offset in range(1000)]
    for options in ({}, {"minPartitions": "37"}, {"maxRecordsPerPartition": "90"}):
        assert places(rows(tmp_path, **options)) == whole


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4000), st.integers(1, 40_000)), min_size=1, max_size=12),
    st.none() | st.integers(1, 60),
    st.none() | st.integers(100, 5000),
)
def test_tasks_cover_the_range_once_within_the_limits(
    sizes: list[tuple[int, int, int]], min_tasks: int | None, max_rows: int | None
) -> None:
    states: dict[int, list[Segment]] = {partition: [] for partition in range(4)}
    for partition, count, row_bytes in sizes:
        first = states[partition][-1].end_offset if states[partition] else 0
        states[partition].append(Segment(f"{first:020d}.seg", first, first + count, count * row_bytes))
    manifest = Manifest(
        {
            partition: PartitionState(0, segments[-1].end_offset if segments else 0, tuple(segments))
            for partition, segments in states.items()
        }
    )
    start = {partition: state.high_watermark // 3 for partition, state in manifest.items()}
    end = {partition: state.high_watermark for partition, state in manifest.items()}
    planned = Planner(NoIndex()).plan(manifest, start, end, min_tasks, max_rows)
    covered: dict[int, int] = dict(start)
    for part in (part for task in planned for part in task):
        assert part.start_offset == covered[part.partition] < part.end_offset
        covered[part.partition] = part.end_offset
    assert covered == end
    total = sum(end.values()) - sum(start.values())
    assert len(planned) >= min(min_tasks or 0, total)
    if max_rows is not None:
        assert all(sum(part.end_offset - part.start_offset for part in task) <= max_rows for task in planned)
    elif min_tasks is None:
        assert len(planned) <= 2 * len(sizes) + 2 * plan.USUAL_TASKS + total * 40_000 // plan.MAX_TASK_BYTES


def test_a_large_range_is_divided_evenly() -> None:
    segments = tuple(Segment(f"{n}.seg", n * 300_000, (n + 1) * 300_000, 64 << 20) for n in range(20))
    manifest = {0: PartitionState(0, 6_000_000, segments)}
    planned = Planner(NoIndex()).plan(manifest, {0: 0}, {0: 6_000_000})
    assert len(planned) == 20
    small = Planner(NoIndex()).plan(manifest, {0: 0}, {0: 400_000}, min_task_bytes=plan.PARSED_TASK_BYTES)
    counts = [sum(part.end_offset - part.start_offset for part in task) for task in small]
    assert counts == [50_000] * 8
    partitions = {number: PartitionState(0, 120_000, (Segment("0.seg", 0, 120_000, 23 << 20),)) for number in range(4)}
    few = Planner(NoIndex()).plan(partitions, dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 120_000))
    assert [len(task) for task in few] == [2, 2]


def test_explain_shows_the_range_and_the_files(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path, partitions=2)
    for _ in range(3):
        writer.append(1, [message(n) for n in range(10)])
        writer.roll(1)
    size = writer.segments(1)[0].stat().st_size
    text = explain(path=str(tmp_path), stream="sensors", startingOffsets='{"1": 12}', where="offset < 20", filter="a/#")
    assert text.splitlines() == [
        f"mqtt source: stream 'sensors' of '{tmp_path}': 1 task, 8 offsets",
        "  partition 0: nothing of 0 to 0",
        f"  partition 1: offsets 12 to 20 of 0 to 30, 1 of 3 files, at most {size:,} of {3 * size:,} bytes",
        "  rows by filter 'a/#'; row groups of sealed segments without such rows are not read",
        "  rows by where 'offset < 20'; row groups of sealed segments without such rows are not read",
    ]


# --- predicates -----------------------------------------------------------------------------------------------------


def moment(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=START_MS + milliseconds)


def stamp(milliseconds: int) -> str:
    return f"'{moment(milliseconds).isoformat()}'"


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of each read of a file from now on."""
    fetched: list[int] = []
    fetch = DirectoryStorage.read

    def counted(self: DirectoryStorage, partition: int, file: str, position: int, length: int) -> bytes:
        fetched.append(length)
        return fetch(self, partition, file, position, length)

    monkeypatch.setattr(DirectoryStorage, "read", counted)
    return fetched


CONDITIONS: list[tuple[str, Callable[[dict[str, Any]], bool]]] = [
    ("topic = 'sensors/b'", lambda row: row["topic"] == "sensors/b"),
    ("Topic in ('sensors/a', 'none')", lambda row: row["topic"] == "sensors/a"),
    ("topic LIKE 'sens%'", lambda row: row["topic"].startswith("sens")),
    ("topic > 'sensors/a'", lambda row: row["topic"] > "sensors/a"),
    ("partition=1", lambda row: row["partition"] == 1),
    ("`offset` >= 33", lambda row: row["offset"] >= 33),
    ("offset BETWEEN 20 AND 40", lambda row: 20 <= row["offset"] <= 40),
    ("offset IN (5,77, 12)", lambda row: row["offset"] in (5, 77, 12)),
    (f"timestamp > {stamp(60)}", lambda row: row["timestamp"] > moment(60)),
    (f"timestamp < TIMESTAMP {stamp(30)}", lambda row: row["timestamp"] < moment(30)),
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(CONDITIONS), min_size=1, max_size=3), st.sampled_from([{}, {"filter": "sensors/+"}]))
def test_where_gives_the_rows_that_satisfy_it(
    tmp_path: Path, chosen: list[tuple[str, Callable[[dict[str, Any]], bool]]], options: dict[str, str]
) -> None:
    if not (tmp_path / "streams").exists():
        writer = StreamWriter(tmp_path, partitions=2)
        for number in range(10):
            for partition in (0, 1):
                writer.append(partition, [message(number * 10 + n, ("sensors/a", "sensors/b", "other")[n % 3]) for n in range(10)])
            if number % 4 == 3:
                writer.roll(0)
    where = " and ".join(condition for condition, _ in chosen)
    expected = [row for row in rows(tmp_path, **options) if all(holds(row) for _, holds in chosen)]
    assert rows(tmp_path, where=where, **options) == expected
    assert stream_rows(stream_reader(tmp_path, where=where, **options), {"0": 0, "1": 0}, {"0": 100, "1": 100}) == expected


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("qos = 1", "qos is not one of the columns topic, partition, offset, timestamp"),
        ("", "nothing is not one of the columns"),
        ("topic LIKE '%a'", "LIKE takes a prefix"),
        ("topic = 5", "topic is compared with a string in single quotes, not 5"),
        ("offset = 'x'", "offset is compared with a whole number, not 'x'"),
        ("offset IN 5", "IN needs a list in parentheses"),
        ("offset IN (5", "not closed"),
        ("offset BETWEEN 5", "BETWEEN needs AND"),
        ("offset != 5", "cannot read '!= 5'"),
        ("offset = 5 OR offset = 6", "expected AND or the end before OR"),
        ("offset", "expected =, <, <=, >, >=, IN, BETWEEN or LIKE after offset"),
        ("timestamp > '2026-01-31T12:00:00'", "not a time with a time zone"),
    ],
)
def test_an_invalid_where_is_refused(where: str, reason: str) -> None:
    with pytest.raises(OptionError, match=f"^mqtt source: option 'where': .*{re.escape(reason)}") as caught:
        parse_where("where", where)
    assert "\n" not in str(caught.value)


def test_no_reader_implements_push_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reader with `pushFilters` gives wrong rows: Spark keeps its state per table."""
    StreamWriter(tmp_path)
    found = source(tmp_path, pushDownFilters="true")
    assert type(found.reader(found.schema())).pushFilters is DataSourceReader.pushFilters
    assert [record.getMessage().partition(": ")[2].partition(":")[0] for record in caplog.records] == [
        "option 'pushDownFilters' is ignored"
    ]


def test_segments_without_matching_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StreamWriter(tmp_path, partitions=2)
    for number in range(200):
        for partition in (0, 1):
            writer.append(partition, [message(number * 10 + n, payload=bytes(1000)) for n in range(10)])
        if number % 50 == 49:
            writer.roll(0)
            writer.roll(1)
    fetched = counting(monkeypatch)
    monkeypatch.setattr(DirectoryStorage, "chunk_bytes", 64 * 1024)

    def bytes_for(**options: str) -> int:
        fetched.clear()
        rows(tmp_path, **options)
        return sum(fetched)

    whole = bytes_for()
    assert whole > 4_000_000
    assert bytes_for(where="partition = 1") == whole // 2
    assert bytes_for(where="offset = 1234") < whole // 15
    assert bytes_for(where=f"timestamp >= {stamp(1900)}") < whole // 8
    assert bytes_for(where="partition = 7") == bytes_for(where="offset < 0") == 0


def test_row_groups_without_matching_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StreamWriter(tmp_path)
    for number in range(6):
        writer.append(0, [message(number * 100 + n, f"plant{number}/a", payload=os.urandom(10_000)) for n in range(100)])
        writer.roll(0)
    writer.append(0, [message(600, "plant6/a")])
    files = seal_closed(tmp_path / "streams/sensors/0")
    assert len(files) == 6
    fetched = counting(monkeypatch)

    def cost(**options: str) -> tuple[set[str], int]:
        planned = {part.file for task in tasks(tmp_path, **options) for part in task}
        fetched.clear()
        rows(tmp_path, **options)
        return planned, sum(fetched)

    everything, whole = cost()
    assert whole > 6_000_000 and len(everything) == 7
    planned, part = cost(where=f"timestamp >= {stamp(150)} AND timestamp < {stamp(250)}")
    assert planned == {files[1].name, files[2].name, f"{600:020d}.seg"} and part < whole * 0.45
    assert cost(startingTimestamp=at(150), endingTimestamp=at(250))[0] == planned - {f"{600:020d}.seg"}
    _, part = cost(filter="plant3/+")
    assert part < whole * 0.35
    _, part = cost(where="topic = 'plant3/a'")
    assert part < whole * 0.35
    found = source(tmp_path)
    few = found.reader(StructType([found.schema()["topic"], found.schema()["timestamp"]]))
    fetched.clear()
    assert sum(batch.num_rows for task in few.partitions() for batch in few.read(task)) == 601
    assert sum(fetched) < whole * 0.15
