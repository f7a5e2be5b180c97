"""bridge_spark.log.check: damage is reported with file, position and offsets, and ends at the next undamaged batch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.damaged_log import BATCH, DAMAGES, END, batches, commit, make, open_log

from bridge_spark.log import check
from bridge_spark.log.check import check_description, check_partition, partitions, read_file, survey
from bridge_spark.log.high_watermark import published_end
from bridge_spark.log.record_batch import encode_batches, encode_lost
from bridge_spark.log.segment_names import segment_file_name, segment_offsets
from sessions.message import Message


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make(tmp_path)


@pytest.mark.parametrize("end", [END, None])
def test_an_undamaged_partition(directory: Path, end: int | None) -> None:
    before = {path: path.read_bytes() for path in directory.iterdir()}
    state = check_partition(directory, end, False)
    count = len(segment_offsets(directory))
    assert state == (0, END, count, [], [])
    assert partitions(directory.parent.parent) == [("s", 0)] and published_end(directory) == END
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("number", [0, 3, 13, 29])
def test_damage_affects_one_batch(directory: Path, damage: str, number: int) -> None:
    first, batch, data = batches(directory)[number]
    name = segment_file_name(first)
    (directory / name).write_bytes(DAMAGES[damage](data, batch))
    state = check_partition(directory, END, False)
    lost = f"offsets {batch.first_offset} to {batch.end_offset - 1}"
    (problem,) = state.problems
    assert name in problem and lost in problem
    assert state.end == (END if number < 29 else state.end)


def test_bytes_after_the_end_are_not_a_problem(directory: Path) -> None:
    """A crash leaves them; the next start cuts them off."""
    last = directory / segment_file_name(segment_offsets(directory)[-1])
    with open(last, "ab") as file:
        file.write(b"MQB1 torn")
    assert check_partition(directory, END, False).problems == []
    assert len(check_partition(directory, None, False).problems) == 1
    (directory / segment_file_name(END)).write_bytes(b"")
    assert check_partition(directory, END, False).problems == []


def test_a_missing_segment(directory: Path) -> None:
    firsts = segment_offsets(directory)
    (directory / segment_file_name(firsts[1])).unlink()
    (problem,) = check_partition(directory, END, False).problems
    assert problem == (f"{segment_file_name(firsts[2])}: offsets {firsts[1]} to {firsts[2] - 1} are missing before it")


def test_missing_offsets_at_the_end(directory: Path) -> None:
    (problem,) = check_partition(directory, END + 7, False).problems
    assert f"offsets {END} to {END + 6} are missing after it" in problem


def test_a_database_older_than_the_log(directory: Path) -> None:
    (problem,) = check_partition(directory, 100, False).problems
    assert problem.startswith("high_watermark: readers have seen offsets up to 300")
    assert check_partition(directory, 100, True).problems == []


def test_a_damaged_watermark(directory: Path) -> None:
    mark = bytearray((directory / "high_watermark").read_bytes())
    mark[12] ^= 1
    (directory / "high_watermark").write_bytes(mark)
    (problem,) = check_partition(directory, END, False).problems
    assert problem.startswith("high_watermark: damaged")
    assert published_end(directory) == 0


def test_retention_during_a_check(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that disappears is damage only if no broker runs."""
    firsts = segment_offsets(directory)

    def gone(path: Path) -> bytes:
        if path.name in map(segment_file_name, firsts[:2]):
            raise FileNotFoundError(path)
        return read_file(path)

    monkeypatch.setattr(check, "read_file", gone)
    state = check_partition(directory, END, True)
    assert (state.start, state.end, state.problems) == (firsts[2], END, [])
    with pytest.raises(FileNotFoundError):
        check_partition(directory, END, False)


def test_a_check_during_appends_ends_at_the_given_offset(tmp_path: Path) -> None:
    directory = make(tmp_path)
    logs = open_log(tmp_path, {("s", 0): END})
    for number in range(20):
        commit(logs, END + number * BATCH)
    assert check_partition(directory, END, True).problems == []
    logs.close()


def test_a_batch_inside_a_payload_is_not_the_next_batch() -> None:
    """A payload may be a piece of a segment file."""
    inner = encode_lost(20, 40)
    outer = bytearray(encode_lost(0, 10))
    messages = [Message("t", inner, 0, False, b"", "c", 1, 0)] * 10
    (batch,) = encode_batches(messages, 10)
    damaged = bytearray(batch)
    damaged[-1] ^= 1
    data = bytes(outer) + bytes(damaged) + encode_lost(20, 50)
    spans = survey(data, 0, 50)
    assert [(span.first_offset, span.end_offset, bool(span.reason)) for span in spans] == [
        (0, 10, False),
        (10, 20, True),
        (20, 50, False),
    ]


def test_unreadable_sectors_are_read_as_zeros(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory / segment_file_name(0)
    whole = path.read_bytes()
    real = os.pread

    def failing(fd: int, size: int, position: int) -> bytes:
        if position <= 4096 < position + size:
            raise OSError(5, "Input/output error")
        return real(fd, size, position)

    monkeypatch.setattr(check.os, "pread", failing)
    found = read_file(path)
    assert found == whole[:4096] + bytes(len(whole[4096:8192])) + whole[8192:]
    assert segment_file_name(0) in check_partition(directory, END, False).problems[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, "stream.json: is missing"), ("{", "stream.json: is damaged"), ("[]", "stream.json: is damaged")],
)
def test_a_damaged_stream_description(directory: Path, text: str | None, problem: str) -> None:
    path = directory.parent / "stream.json"
    assert check_description(directory.parent) is None
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    assert str(check_description(directory.parent)).startswith(problem)
