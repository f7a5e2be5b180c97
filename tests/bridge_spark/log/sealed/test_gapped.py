"""Sealed segments whose offsets have gaps: readers get the records, and the broker goes on behind them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.records import stored_fields
from support.stream_reads import rows

from bridge_spark.log.check import check_partition
from bridge_spark.log.high_watermark import Watermark, encode_watermark
from bridge_spark.log.offline import StoredStream
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.sealed import gapped
from bridge_spark.log.sealed.compact import compact
from bridge_spark.log.sealed.footer import load_footer
from bridge_spark.log.sealed.gapped import GappedPartition
from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_files import write_description
from bridge_spark.log.stream_log import StreamLogs
from sessions.message import Message

pytestmark = pytest.mark.one_build

TIME = 10**15
SECOND = 1_000_000


def message(number: int, topic: str = "lab/a", payload: bytes = b"") -> Message:
    properties = b"\x26\x00\x01a\x00\x01b" if number % 2 else b""
    return Message(topic, payload or b"%d" % number, number % 3, number % 5 == 0, properties, "dev", TIME + number * SECOND, 0)


def write(data: Path, offsets: list[int], start: int, end: int, segment_bytes: int = 300) -> Path:
    """The stream ``sensors`` with one partition, as an export makes it."""
    directory = data / "streams" / "sensors" / "0"
    directory.mkdir(parents=True)
    with GappedPartition(directory, "sensors", 0, start, segment_bytes) as target:
        for offset in offsets:
            target.add(offset, message(offset))
        target.close(end)
    (directory / "high_watermark").write_bytes(encode_watermark(Watermark(end, end, 0, start)))
    write_description(directory.parent, {"name": "sensors", "partitions": 1, "filters": ["#"], "key": "topic", "format_version": 2})
    return directory


OFFSETS = [7, 8, 11, 12, 13, 20, 21, 40]


@pytest.mark.parametrize("segment_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("group_rows", [1, 3, 50_000])
def test_readers_get_the_records_with_their_offsets(
    segment_bytes: int, group_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gapped, "GROUP_ROWS", group_rows)
    directory = write(tmp_path, OFFSETS, 5, 44, segment_bytes)
    state = check_partition(directory, 44, False)
    assert (state.start, state.end, state.lost, state.problems) == (5, 44, [], [])
    found = rows(tmp_path)
    assert [(row["offset"], row["payload"], row["qos"], row["retain"]) for row in found] == [
        (offset, b"%d" % offset, offset % 3, offset % 5 == 0) for offset in OFFSETS
    ]
    assert [row["user_properties"] for row in found] == [[("a", "b")] if offset % 2 else [] for offset in OFFSETS]
    assert [row["offset"] for row in rows(tmp_path, startingOffsets='{"0": 9}')] == OFFSETS[2:]
    assert [row["offset"] for row in rows(tmp_path, startingTimestamp=str((TIME + 12 * SECOND) // 1000))] == OFFSETS[3:]
    partition = StoredStream(tmp_path / "streams", "sensors").partition(0)
    partition.check()
    assert [(offset, stored_fields(one)) for batch in partition.rows() for offset, one in batch] == [
        (offset, stored_fields(message(offset))) for offset in OFFSETS
    ]


def test_the_log_goes_on_behind_them(tmp_path: Path) -> None:
    write(tmp_path, OFFSETS, 5, 44)
    logs = StreamLogs(tmp_path / "streams", [StreamConfig("sensors", ["#"])], lambda: TIME / 1e6)
    assert logs.recover({("sensors", 0): 44}) == {("sensors", 0): 44}
    logs.append({("sensors", 0): [message(44)]})
    logs.committed()
    assert logs.offset_for_timestamp("sensors", 0, TIME + 22 * SECOND) == 40
    logs.close()
    assert [row["offset"] for row in rows(tmp_path)] == [*OFFSETS, 44]


def test_a_partition_may_be_empty(tmp_path: Path) -> None:
    directory = write(tmp_path, [], 30, 30)
    assert os.listdir(directory) == ["high_watermark"]
    logs = StreamLogs(tmp_path / "streams", [StreamConfig("sensors", ["#"])], lambda: TIME / 1e6)
    assert logs.recover({("sensors", 0): 30}) == {("sensors", 0): 30}
    logs.close()


def test_a_failure_leaves_no_file_that_looks_complete(tmp_path: Path) -> None:
    directory = tmp_path / "0"
    directory.mkdir()
    with pytest.raises(RuntimeError), GappedPartition(directory, "sensors", 0, 0, 1 << 20) as target:
        target.add(0, message(0))
        raise RuntimeError
    (found,) = directory.iterdir()
    with pytest.raises(SegmentError):
        load_footer(found)


def test_compaction_reads_them_as_segments_that_were_not_compacted(tmp_path: Path) -> None:
    directory = tmp_path / "0"
    directory.mkdir()
    with GappedPartition(directory, "sensors", 0, 0, 1) as target:
        target.add(0, message(0, "a"))
        target.add(2, message(2, "b"))
        target.add(5, Message("a", b"", 1, False, b"", "dev", TIME, 0))
        target.close(6)
    # However old a tombstone is, it must not go before the record that it is for.
    written = compact(sorted(directory.iterdir()), "topic", TIME * 2, TIME, 1000)
    assert sum(each.removed for each in written) == 1
    for each in written:
        os.rename(each.unfinished, directory / each.file)
    files = sorted(path for path in directory.iterdir() if path.name.count(".") == 2)
    assert sum(each.removed for each in compact(files, "topic", TIME * 2, TIME, 1000)) == 1, "now the tombstone goes"
