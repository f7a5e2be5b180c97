"""Rows of sealed segments as record batches, in this process and from the process that the broker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.record_batch import decode_messages, read_batch
from bridge_spark.log.sealed.row_process import RowProcess
from bridge_spark.log.sealed.rows import SealedRows
from bridge_spark.log.sealed.writer import ClosedSegment, seal
from bridge_spark.log.segment import Segment
from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_log import StreamLogs
from sessions.message import Message

COUNT = 3000


def record(number: int) -> Message:
    properties = b"\x26\x00\x01a\x00\x01b" if number % 3 == 0 else b""
    payload = b"%d " % number + b"x" * (number % 50)
    return Message(f"t/{number % 7}", payload, number % 3, number % 5 == 0, properties, f"c{number % 4}", number, 0)


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Path, int]:
    """A sealed segment and its length."""
    logs = StreamLogs(tmp_path / "streams", [StreamConfig("s", ["#"])], lambda: 1.0)
    (tmp_path / "streams").mkdir()
    logs.recover(None)
    for first in range(0, COUNT, 100):
        logs.append({("s", 0): [record(number) for number in range(first, first + 100)]})
        logs.committed()
    partition = logs.partition("s", 0)
    segment: Segment = partition.view.segments[0]
    target = tmp_path / "00000000000000000000.parquet"
    seal(ClosedSegment(partition.directory / segment.file, "s", 0, 0, COUNT, segment.size), target)
    logs.close()
    return target, target.stat().st_size


@pytest.mark.parametrize("size", [4096, 50_000, 1 << 24])
def test_all_rows_are_those_that_were_sealed(sealed: tuple[Path, int], size: int) -> None:
    rows = SealedRows(1 << 20)
    offset = 0
    while offset < COUNT:
        data, end, reason = rows.read(str(sealed[0]), sealed[1], offset, size)
        assert not reason and end == 0 and len(data) <= size + 200
        batch = read_batch(data)
        assert batch.first_offset == offset and batch.end == len(data)
        for number, found in enumerate(decode_messages(data, batch), offset):
            made = record(number)
            for name in ("topic", "payload", "qos", "retain", "properties", "publisher", "timestamp"):
                assert getattr(found, name) == getattr(made, name), (number, name)
        offset = batch.end_offset
    assert rows.read(str(sealed[0]), sealed[1], COUNT, size) == (b"", COUNT, "")


def test_damage_is_named(sealed: tuple[Path, int]) -> None:
    path, length = sealed
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    found = SealedRows(1 << 20).read(str(path), length, 0, 4096)
    assert not found.data and found.reason and found.end == COUNT


def test_rows_of_an_archive_in_a_directory(sealed: tuple[Path, int], tmp_path: Path) -> None:
    path, length = sealed
    rows = SealedRows(1 << 20)
    here = rows.read(str(path), length, 7, 4096)
    archived = tmp_path / "archive" / "s" / "0" / "x.parquet"
    archived.parent.mkdir(parents=True)
    archived.write_bytes(path.read_bytes())
    assert rows.read(str(archived), length, 7, 4096, str(tmp_path / "archive")) == here
    process = RowProcess()
    try:
        assert process.read(str(archived), length, 7, 4096, str(tmp_path / "archive")) == here
        with pytest.raises(FileNotFoundError):
            process.read(str(archived.with_name("missing")), length, 7, 4096, str(tmp_path / "archive"))
        with pytest.raises(ArchiveError, match="is not a directory"):
            process.read(str(tmp_path / "none" / "s" / "0" / "x"), length, 7, 4096, str(tmp_path / "none"))
    finally:
        process.close()


def test_the_process_answers_the_same_and_is_started_again(sealed: tuple[Path, int]) -> None:
    rows, process = SealedRows(1 << 20), RowProcess()
    try:
        for offset in (0, 1000, 2999):
            here = rows.read(str(sealed[0]), sealed[1], offset, 4096)
            assert process.read(sealed[0], sealed[1], offset, 4096) == here
        process.kill()
        with pytest.raises(OSError, match="has ended"):
            while True:
                process.read(sealed[0], sealed[1], 0, 4096)
        assert process.read(sealed[0], sealed[1], 5, 4096).data
        with pytest.raises(FileNotFoundError):
            process.read(sealed[0].with_name("missing"), 10, 0, 4096)
    finally:
        process.close()
