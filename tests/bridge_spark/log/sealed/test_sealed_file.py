"""Sealed segments have the same rows and times as before, and damage is detected."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sealed_log import seal_closed, seal_segment
from support.spark_session import StreamWriter
from support.stream_reads import batches, rows, source

from bridge_spark.log.columns import SCHEMA_DDL
from bridge_spark.log.predicates import Predicate
from bridge_spark.log.record_batch import SegmentError, encode_batch
from bridge_spark.log.sealed import writer
from bridge_spark.log.sealed.footer import load_footer, search_sealed_file, verify_file
from bridge_spark.log.sealed.reader import SealedFile
from bridge_spark.log.sealed.writer import SCHEMA, ClosedSegment, seal
from bridge_spark.source import slice_reader
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.storage import StreamError
from sessions.message import Message

pytestmark = pytest.mark.one_build

START = 1_760_000_000_000_000
USER = b"\x26\x00\x01a\x00\x011"
MARKER = '{"format":"mqttbroker sealed segment"}'
CHECKSUMS = ',"data_crc32c":"00000000","footer_crc32c":"00000000"}'


def message(index: int, **fields: Any) -> Message:
    values = {
        "topic": f"sensors/{index % 5}",
        "payload": b"%d" % index,
        "qos": 1,
        "retain": False,
        "properties": b"",
        "publisher": "dev",
        "timestamp": START + index,
        **fields,
    }
    return Message(*values.values(), 0)


PROPERTIES = st.lists(
    st.sampled_from(
        [
            b"\x01\x01",
            b"\x03\x00\x04json",
            b"\x08\x00\x02re",
            b"\x09\x00\x02\x00\xff",
            USER,
            b"\x26\x00\x01a\x00\x012",
            b"\x26\x00\x02\xc3\xa9\x00\x00",
        ]
    ),
    max_size=4,
).map(b"".join)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["a", "sensors/1/temperature", "sensors/\u00fc\U0001f600", MARKER, CHECKSUMS]),
    st.binary(max_size=30),
    st.integers(0, 2),
    st.booleans(),
    PROPERTIES,
    st.sampled_from(["", "dev", "\u00e9"]),
    st.integers(START - 5, START + 5),
    st.just(0),
)
# Batches of a segment; a number stands for so many lost offsets.
SEGMENTS = st.lists(
    st.lists(st.one_of(st.lists(MESSAGES, min_size=1, max_size=9), st.integers(1, 3)), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "GROUP_ROWS", 7)


def write(data: Path, segments: list[list[Any]]) -> int:
    """Write the stream ``sensors`` with these segments and an active one after them; return its end offset."""
    writer = StreamWriter(data)
    end = 0
    for batches_of in segments:
        for batch in batches_of:
            if isinstance(batch, list):
                writer.append(0, batch)
                end += len(batch)
            else:
                end = writer.lose(0, batch)
        writer.roll(0)
    writer.append(0, [message(end, timestamp=START + 10**6)])
    return end + 1


def read(data: Path, start: int, end: int, **options: str) -> Any:
    """The rows of a range, or the text of the error."""
    found = source(data, startingOffsets=f'{{"0": {start}}}', endingOffsets=f'{{"0": {end}}}', **options)
    made = []
    try:
        for batch in batches(found):
            made += batch.to_pylist()
    except StreamError as error:
        return made, str(error)
    return made


@settings(max_examples=20, deadline=None)
@given(SEGMENTS, st.data())
def test_a_range_has_the_same_rows_before_and_after(segments: list[list[Any]], chosen: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        end = write(data, segments)
        start = chosen.draw(st.integers(0, end))
        ranges = [(0, end), (start, chosen.draw(st.integers(start, end)))]
        asked = [{"includeUserProperties": "true", "failOnDataLoss": "false"}, {}, {"filter": "sensors/#"}]
        before = [read(data, *bounds, **options) for bounds in ranges for options in asked]
        files = seal_closed(data / "streams/sensors/0")
        assert len(files) == len(segments) and not list(data.rglob(f"{0:020d}.seg"))
        assert [read(data, *bounds, **options) for bounds in ranges for options in asked] == before


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), min_size=1, max_size=8), st.integers(-10, 10))
def test_the_first_record_at_a_time_even_if_the_clock_goes_back(clock: list[list[int]], wanted: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        write(data, [[[message(0, timestamp=START + now) for now in batch] for batch in clock]])
        moments = [START + now for batch in clock for now in batch]
        (file,) = seal_closed(data / "streams/sensors/0")
        first = next((offset for offset, moment in enumerate(moments) if moment >= START + wanted), len(moments))
        assert search_sealed_file(file, START + wanted) == first
        since = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=START + wanted)
        found = rows(data, startingTimestamp=since.isoformat())
        assert [row["offset"] for row in found] == list(range(first, len(moments) + 1))


def sealed(data: Path, records: int = 60) -> Path:
    write(data, [[[message(index) for index in range(first, first + 10)] for first in range(0, records, 10)]])
    return seal_closed(data / "streams/sensors/0")[0]


def test_the_contents_of_a_footer(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path)
    writer.append(0, [message(index) for index in range(10)])
    writer.lose(0, 5)
    writer.append(0, [message(15, timestamp=START - 1)])
    size = writer.segments(0)[0].stat().st_size
    part = verify_file(seal_segment(writer.segments(0)[0], 16))
    assert (part.stream, part.partition, part.first_offset, part.end_offset, part.rows) == ("sensors", 0, 0, 16, 11)
    assert (part.first_timestamp, part.last_timestamp, part.unsealed_bytes) == (START, START + 9, size)
    assert part.lost == ((10, 15),)
    assert [(group.first_offset, group.end_offset) for group in part.groups] == [(0, 7), (7, 10), (15, 16)]


def test_damage_anywhere_is_detected(tmp_path: Path) -> None:
    """By `verify_file`; reading rows gives the right ones or an error."""
    file = sealed(tmp_path)
    whole = file.read_bytes()
    right = read(tmp_path, 0, 61)
    footer = len(whole) - load_footer(file).data_bytes
    for number, place in enumerate([*range(0, len(whole), 211), *range(len(whole) - footer, len(whole), 97)]):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << number % 8]) + whole[place + 1 :])
        with pytest.raises(SegmentError):
            verify_file(file)
        if number % 4 == 0:
            found = read(tmp_path, 0, 61)
            assert found == right or (found[0] == right[: len(found[0])] and "is corrupt at offset" in found[1]), place
    for size in (0, 7, 11, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(SegmentError):
            load_footer(file)


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    file = sealed(tmp_path)
    other = file.with_name(f"{1:020d}.parquet")
    os.rename(file, other)
    with pytest.raises(SegmentError, match="begins with offset 0"):
        load_footer(other)


def test_a_damaged_or_truncated_segment_is_not_sealed(tmp_path: Path) -> None:
    path = tmp_path / f"{0:020d}.seg"
    data = encode_batch([message(0), message(1)], 0)
    path.write_bytes(data)
    for end, content in ((3, data), (2, data[:-1]), (2, data[:-9] + b"x" + data[-8:])):
        path.write_bytes(content)
        with pytest.raises(SegmentError):
            seal(ClosedSegment(path, "s", 0, 0, end, len(content)), tmp_path / "sealed")


def test_a_written_file_is_read_back_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{0:020d}.seg"
    path.write_bytes(encode_batch([message(0), message(1)], 0))
    columns = writer.stored_columns
    made: list[pa.Table] = []

    def wrong(part: Any, of: ClosedSegment) -> pa.Table:
        made.append(columns(part, of))
        return made[0].set_column(1, SCHEMA.field("payload"), pa.array([b"0", b"x"])) if len(made) == 1 else made[-1]

    monkeypatch.setattr(writer, "stored_columns", wrong)
    with pytest.raises(SegmentError, match="rows read back differ"):
        seal(ClosedSegment(path, "s", 0, 0, 2, path.stat().st_size), path.with_name(f"{0:020d}.parquet"))


class Counting:
    """Counts the reads of a file and their bytes."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.bytes = 0

    def __call__(self, position: int, length: int) -> bytes:
        assert 0 <= position and position + length <= len(self.data)
        self.bytes += length
        return self.data[position : position + length]


def test_only_requested_columns_and_row_groups_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "GROUP_ROWS", 50)
    records = [message(index, topic=f"t{index // 50}", payload=os.urandom(4000)) for index in range(200)]
    write(tmp_path, [[records]])
    (file,) = seal_closed(tmp_path / "streams/sensors/0")

    def cost(stored: list[str], start: int, end: int, wanted: Predicate = Predicate()) -> tuple[int, list[int]]:
        reading = Counting(file)
        opened = SealedFile(reading, len(reading.data))
        before = reading.bytes
        found = [n for _, _, part in opened.rows(stored, start, end, wanted) if part for n in part["offset"].to_pylist()]
        return reading.bytes - before, found

    assert cost([], 0, 200) == (0, list(range(200)))
    few, found = cost(["topic", "timestamp", "flags"], 0, 200)
    assert found == list(range(200)) and few < 20_000
    one, found = cost(["payload"], 60, 70)
    assert found == list(range(60, 70)) and 200_000 < one < 300_000
    topic = Predicate().narrowed("topic", "=", "t2")
    assert topic is not None and cost(["payload"], 0, 200, topic)[1] == list(range(100, 150))
    late = Predicate().narrowed("timestamp", ">=", datetime.fromtimestamp((START + 150) / 1e6, UTC))
    assert late is not None and cost(["payload"], 0, 200, late)[1] == list(range(150, 200))


def test_a_segment_that_is_sealed_during_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between planning and reading, and between two reads of the same file."""
    end = write(
        tmp_path,
        [[[message(index) for index in range(first, first + 10)] for first in range(base, base + 50, 10)] for base in (0, 50)],
    )
    partition = tmp_path / "streams/sensors/0"
    monkeypatch.setattr(DirectoryStorage, "chunk_bytes", 700)
    monkeypatch.setattr(slice_reader, "ROWS", 1)
    found = source(tmp_path)
    reader = found.reader(found.schema())
    tasks = reader.partitions()

    def all_rows() -> Iterator[int]:
        for task in tasks:
            for batch in reader.read(task):
                yield from batch.column("offset").to_pylist()

    reading = all_rows()
    offsets = [next(reading) for _ in range(3)]
    seal_closed(partition)
    offsets += reading
    assert offsets == list(range(end))
    assert [row["offset"] for task in tasks for batch in reader.read(task) for row in batch.to_pylist()] == offsets


def test_a_listing_prefers_the_sealed_file(tmp_path: Path) -> None:
    write(tmp_path, [[[message(0), message(1)]]])
    path = tmp_path / f"streams/sensors/0/{0:020d}.seg"
    seal_segment(path, 2, keep=True)
    state = DirectoryStorage(str(tmp_path), "sensors").manifest()[0]
    assert [(part.file, part.end_offset) for part in state.segments] == [(f"{0:020d}.parquet", 2), (f"{2:020d}.seg", 3)]


def test_malformed_properties_are_reported_as_before_sealing(tmp_path: Path) -> None:
    write(tmp_path, [[[message(0, properties=b"\x7f\x00"), message(1, properties=USER)]]])
    before = read(tmp_path, 0, 2)
    (file,) = seal_closed(tmp_path / "streams/sensors/0")
    assert read(tmp_path, 0, 2)[1].replace(".parquet", ".seg") == before[1]
    assert pq.read_table(file).column("user_properties").to_pylist() == [None, [("a", "1")]]


# -- other readers --------------------------------------------------------------------------------------------------


EVERY = b"\x03\x00\x04json\x08\x00\x02re\x09\x00\x02\x00\xff" + USER + b"\x26\x00\x01a\x00\x012"


@pytest.fixture
def known(tmp_path: Path) -> Path:
    write(tmp_path, [[[message(0, properties=EVERY, qos=2, retain=True), message(1)]]])
    return seal_closed(tmp_path / "streams/sensors/0")[0]


def test_columns_are_those_of_the_source(known: Path) -> None:
    names = [part.split()[0] for part in SCHEMA_DDL.replace("map<string,string>", "map").split(", ")]
    assert pq.read_schema(known).names == [*names, "properties"]


def test_duckdb_reads_sealed_segments(known: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    query = f"select * exclude (timestamp), epoch_us(timestamp) from '{known}' order by \"offset\""
    first, second = duckdb.sql(query).fetchall()
    assert first == ("sensors/0", b"0", 2, True, 0, 0, "dev", "json", "re", b"\x00\xff", {"a": "2"}, "sensors", EVERY, START)
    assert second == ("sensors/1", b"1", 1, False, 0, 1, "dev", None, None, None, {}, "sensors", b"", START + 1)


def test_pandas_reads_sealed_segments(known: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(known)
    assert list(frame["payload"]) == [b"0", b"1"]
    assert frame["timestamp"][0] == pandas.Timestamp(START, unit="us", tz="UTC")
    assert list(frame["qos"]) == [2, 1] and list(frame["user_properties"]) == [[("a", "2")], []]


def test_polars_reads_sealed_segments(known: Path) -> None:
    polars = pytest.importorskip("polars")
    first = polars.read_parquet(known).row(0, named=True)
    assert (first["payload"], first["qos"], first["retain"], first["correlation_data"]) == (b"0", 2, True, b"\x00\xff")
    assert dict(first["user_properties"]) == {"a": "2"}
