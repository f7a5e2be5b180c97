"""Streams of a broker that does not run: every record once, with its offset, from segments, sealed segments and archives."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.records import stored_fields
from support.sealed_log import seal_closed, sealed_files

from bridge_spark.log.archive import jobs
from bridge_spark.log.archive.archiver import Archiver
from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.high_watermark import decode_watermark, encode_watermark
from bridge_spark.log.offline import StoredPartition, StoredStream
from bridge_spark.log.repair import repair_partition
from bridge_spark.log.sealed.compact import compact
from bridge_spark.log.segment_names import segment_offsets
from bridge_spark.log.stream_config import StreamLogDamage
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from sessions.message import Message

pytestmark = pytest.mark.one_build

TIME = 10**15  # microseconds, of the first record
PROPERTIES = b"\x03\x00\x04json\x26\x00\x01a\x00\x01b"


def message(number: int) -> Message:
    properties = PROPERTIES if number % 3 else b""
    return Message(f"lab/{number % 4}", b"%d" % number, number % 3, number % 2 == 0, properties, "sensor", TIME + number, 0)


def open_logs(data: Path, **settings: Any) -> StreamLogs:
    config = StreamConfig("s", ["lab/#"], segment_bytes=2000, **settings)
    logs = StreamLogs(data / "streams", [config], lambda: TIME / 1e6)
    logs.recover({("s", 0): 0})
    return logs


def fill(logs: StreamLogs, count: int = 120) -> list[Message]:
    found = [message(number) for number in range(count)]
    for first in range(0, count, 6):
        logs.append({("s", 0): found[first : first + 6]})
        logs.committed()
    return found


def begin_at(directory: Path, start: int) -> None:
    """Remove the sealed segments before an offset as retention does."""
    path = directory / "high_watermark"
    path.write_bytes(encode_watermark(decode_watermark(path.read_bytes())._replace(log_start_offset=start)))
    for each in sealed_files(directory):
        if int(each.stem) < start:
            each.unlink()


def stored(data: Path) -> StoredPartition:
    return StoredStream(data / "streams", "s").partition(0)


def rows(data: Path) -> dict[int, tuple[object, ...]]:
    partition = stored(data)
    partition.check()
    found = {offset: stored_fields(one) for batch in partition.rows() for offset, one in batch}
    assert list(found) == sorted(found)
    return found


def expected(messages: list[Message], start: int = 0) -> dict[int, tuple[object, ...]]:
    return {offset: stored_fields(one) for offset, one in enumerate(messages) if offset >= start}


def test_all_records_of_segments_and_sealed_segments(tmp_path: Path) -> None:
    logs = open_logs(tmp_path)
    messages = fill(logs)
    logs.close()
    directory = tmp_path / "streams" / "s" / "0"
    assert len(segment_offsets(directory)) > 3
    assert rows(tmp_path) == expected(messages)
    (directory / f"{segment_offsets(directory)[-1]:020d}.seg").open("ab").write(b"not committed")
    assert rows(tmp_path) == expected(messages)
    seal_closed(directory)
    assert sealed_files(directory)
    assert rows(tmp_path) == expected(messages)
    start = int(sealed_files(directory)[1].stem)
    begin_at(directory, start)
    assert rows(tmp_path) == expected(messages, start)
    assert (stored(tmp_path).start, stored(tmp_path).end) == (start, 120)


def test_records_that_compaction_removed_are_left_out(tmp_path: Path) -> None:
    logs = open_logs(tmp_path)
    messages = fill(logs)
    logs.close()
    directory = tmp_path / "streams" / "s" / "0"
    seal_closed(directory)
    files = sealed_files(directory)
    for each in compact(files, "topic", 0, TIME, 1000):
        os.rename(each.unfinished, directory / each.file)
    for former in files:
        former.unlink()
    last = segment_offsets(directory)[-1]
    found = rows(tmp_path)
    assert found == {offset: fields for offset, fields in expected(messages).items() if offset >= last - 4}


def test_the_archive_has_what_is_not_in_the_data_directory(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    logs = open_logs(tmp_path / "data", archive=str(archive))
    messages = fill(logs)
    directory = tmp_path / "data/streams/s/0"
    logs.close()
    seal_closed(directory)
    logs = StreamLogs(tmp_path / "data/streams", [logs.config("s")], lambda: TIME / 1e6)
    logs.recover({("s", 0): 120})
    archiver = Archiver(logs)
    archiver._process = _JobsHere()  # type: ignore[assignment]
    archiver.work()
    assert logs.partition("s", 0).archive.current.segments > 2
    logs.close()
    begin_at(directory, int(sealed_files(directory)[2].stem))
    assert rows(tmp_path / "data") == expected(messages)
    archive.rename(tmp_path / "away")
    with pytest.raises(ArchiveError, match="archive is not a directory"):
        stored(tmp_path / "data").check()
    archive.mkdir()
    with pytest.raises(StreamLogDamage, match=r"archive/s/0/0+-\d+.parquet: is missing"):
        stored(tmp_path / "data").check()


class _JobsHere:
    """Runs the archiver's jobs in this process."""

    def run_within(self, job: dict[str, Any], seconds: float) -> Any:
        return json.loads(json.dumps(jobs.run(job)))

    def close(self) -> None:
        """There is no process."""


def test_damage_is_an_error_and_lost_offsets_are_named(tmp_path: Path) -> None:
    logs = open_logs(tmp_path)
    messages = fill(logs)
    logs.close()
    directory = tmp_path / "streams" / "s" / "0"
    second = segment_offsets(directory)[1]
    path = directory / f"{second:020d}.seg"
    shutil.copytree(tmp_path / "streams", tmp_path / "other" / "streams")
    with path.open("r+b") as file:
        file.seek(60)
        file.write(b"damage")
    partition = stored(tmp_path)
    partition.check()
    with pytest.raises(StreamLogDamage, match=rf"{path.name}: wrong checksum .*: run mqttbroker repair-store"):
        list(partition.rows())
    repair_partition(directory, 120, 0, "stamp")
    partition = stored(tmp_path)
    found = {offset: stored_fields(one) for batch in partition.rows() for offset, one in batch}
    lost = [offset for first, end in partition.lost for offset in range(first, end)]
    assert lost
    assert found == {offset: fields for offset, fields in expected(messages).items() if offset not in lost}
    (tmp_path / "other" / "streams" / "s" / "0" / path.name).unlink()
    with pytest.raises(StreamLogDamage, match=rf"ends at offset {second}, not "):
        list(stored(tmp_path / "other").rows())
    first = segment_offsets(tmp_path / "other" / "streams" / "s" / "0")[0]
    (tmp_path / "other" / "streams" / "s" / "0" / f"{first:020d}.seg").unlink()
    with pytest.raises(StreamLogDamage, match=r"streams/s/0: offsets 0 to \d+ are missing"):
        stored(tmp_path / "other")
