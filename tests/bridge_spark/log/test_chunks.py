"""Chunks: every record once, whatever the size of chunks and batches; damage and the end of a partition."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bridge_spark.log.chunks import ChunkReader, InSegment, Moved, Nothing, Piece, Unreadable
from bridge_spark.log.record_batch import TornBatch, decode_messages, read_batch
from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_log import StreamLogs
from sessions.message import Message


def record(number: int, size: int) -> Message:
    payload = b"%d " % number + b"x" * size
    return Message(f"t/{number % 7}", payload, number % 3, number % 5 == 0, b"", f"c{number % 4}", number, 0)


def open_logs(directory: Path, segment_bytes: int = 1 << 20) -> StreamLogs:
    logs = StreamLogs(directory / "streams", [StreamConfig("s", ["#"], segment_bytes=segment_bytes)], lambda: 1.0)
    (directory / "streams").mkdir(exist_ok=True)
    logs.recover(None)
    return logs


def append(logs: StreamLogs, batches: list[list[Message]]) -> None:
    for batch in batches:
        logs.append({("s", 0): batch})
        logs.committed()


def records_of(piece: Piece) -> tuple[list[Message], int, int]:
    """The records of the whole batches, the offset of the first, and the bytes of them all."""
    found: list[Message] = []
    position, first = 0, -1
    while position < len(piece.data):
        try:
            batch = read_batch(piece.data, position)
        except TornBatch:
            break
        first = batch.first_offset if first < 0 else first
        found += decode_messages(piece.data, batch)
        position = batch.end
    return found, first, position


def read_all(logs: StreamLogs, start: int, size: int) -> list[bytes]:
    """The payloads from an offset on, read as a reader of chunks does."""
    reader = ChunkReader(logs)
    payloads: list[bytes] = []
    offset, segment, position = start, -1, -1
    while not isinstance(answer := reader.read("s", 0, offset, segment, position, size, False), Nothing):
        assert isinstance(answer, Piece), answer
        found, first, used = records_of(answer)
        assert found and (len(answer.data) <= size + 200 or len(found) == 1)
        wanted = found[max(0, offset - first) :]
        payloads += [message.payload for message in wanted]
        offset = max(offset, first + len(found))
        segment, position = answer.segment, answer.position if answer.made else answer.position + used
    return payloads


@pytest.mark.parametrize("size", [4096, 20_000, 1 << 20])
def test_every_record_once_from_any_offset(tmp_path: Path, size: int) -> None:
    rng = random.Random(size)
    number, batches = 0, []
    for _ in range(120):
        batch = [record(number + n, rng.choice([0, 10, 200, 9000])) for n in range(rng.choice([1, 2, 30]))]
        number += len(batch)
        batches.append(batch)
    logs = open_logs(tmp_path, 300_000)
    append(logs, batches)
    assert len(logs.partition("s", 0).view.segments) > 3
    expected = [message.payload for batch in batches for message in batch]
    for start in [0, 1, number - 1, number, *(rng.randrange(number) for _ in range(5))]:
        assert read_all(logs, start, size) == expected[start:]
    logs.close()


def test_records_of_a_large_batch_are_equal(tmp_path: Path) -> None:
    logs = open_logs(tmp_path)
    records = [record(number, 100) for number in range(500)]
    append(logs, [records])
    answer = ChunkReader(logs).read("s", 0, 123, -1, -1, 4096, False)
    assert isinstance(answer, Piece) and answer.made
    found, first, _ = records_of(answer)
    assert first == 123 and len(found) > 10
    for one, other in zip(found, records[123:]):
        assert (one.topic, one.payload, one.qos, one.retain, one.publisher, one.timestamp) == (
            other.topic,
            other.payload,
            other.qos,
            other.retain,
            other.publisher,
            other.timestamp,
        )
    logs.close()


def test_behind_the_end_and_before_the_start(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, 4096)
    append(logs, [[record(number, 1000)] for number in range(20)])
    partition = logs.partition("s", 0)
    partition.drop(2)
    start = partition.view.log_start_offset
    reader = ChunkReader(logs)
    assert start > 0
    assert reader.read("s", 0, 0, -1, -1, 4096, False) == Moved(start, True)
    assert isinstance(reader.read("s", 0, 20, -1, -1, 4096, False), Nothing)
    assert isinstance(reader.read("s", 1, 0, -1, -1, 4096, False), Unreadable)
    logs.close()


def test_a_place_of_before_in_a_removed_file_is_looked_up_again(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, 4096)
    append(logs, [[record(number, 1000)] for number in range(20)])
    answer = ChunkReader(logs).read("s", 0, 19, 0, 17, 4096, False)
    assert isinstance(answer, Piece) and answer.segment > 0
    logs.close()


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_damage_is_named_and_skipped(tmp_path: Path, size: int) -> None:
    logs = open_logs(tmp_path)
    append(logs, [[record(number * 10 + n, 1000) for n in range(10)] for number in range(5)])
    segment = logs.partition("s", 0).view.segments[0]
    path = logs.partition("s", 0).directory / segment.file
    data = bytearray(path.read_bytes())
    data[data.index(b"25 xxx") + 3] ^= 1
    path.write_bytes(data)
    reader = ChunkReader(logs)
    answer = reader.read("s", 0, 20, -1, -1, size, False)
    if size == 4096:  # the batch is larger than the chunk, so the reader has to check it
        assert isinstance(answer, Unreadable) and "wrong checksum" in answer.reason and segment.file in answer.reason
    assert reader.read("s", 0, 20, -1, -1, size, True) == Moved(30, False)
    logs.close()


def test_a_sealed_segment_is_only_named(tmp_path: Path) -> None:
    logs = open_logs(tmp_path, 4096)
    append(logs, [[record(number, 1000)] for number in range(20)])
    partition = logs.partition("s", 0)
    first = partition.closed[0]
    assert partition.replace_with_sealed(first._replace(unsealed_size=first.size, size=10))
    answer = ChunkReader(logs).read("s", 0, 0, -1, -1, 4096, False)
    assert isinstance(answer, InSegment) and answer.path.name == "00000000000000000000.parquet"
    logs.close()
