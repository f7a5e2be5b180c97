"""A partition with three segments on disk, and ways to damage it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bridge_spark.log.record_batch import Batch, decode_messages, iter_batches
from bridge_spark.log.segment_names import segment_file_name, segment_offsets
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from sessions.message import Message

KEY = ("s", 0)
END = 300
BATCH = 10


def make(data_dir: Path, end: int = END) -> Path:
    """Write the stream ``s`` below a data directory; return its partition's directory."""
    logs = open_log(data_dir, {})
    for first in range(0, end, BATCH):
        commit(logs, first)
    logs.close()
    directory = data_dir / "streams" / "s" / "0"
    assert len(segment_offsets(directory)) >= 3
    return directory


def open_log(data_dir: Path, ends: dict[tuple[str, int], int] | None) -> StreamLogs:
    config = StreamConfig("s", ["sensors/#"], segment_bytes=5000)
    logs = StreamLogs(data_dir / "streams", [config], lambda: 1e6)
    logs.recover(ends)
    return logs


def commit(logs: StreamLogs, first: int) -> None:
    records = [Message("sensors/1", b"%d" % offset, 1, False, b"", "dev", 10**12 + offset, 0) for offset in range(first, first + BATCH)]
    logs.append({KEY: records})
    logs.sync()
    logs.committed()


def batches(directory: Path) -> list[tuple[int, Batch, bytes]]:
    """Every batch, as (first offset of its segment, batch, bytes of the segment)."""
    found = []
    for first in segment_offsets(directory):
        data = (directory / segment_file_name(first)).read_bytes()
        found += [(first, batch, data) for batch in iter_batches(data)]
    return found


def records(directory: Path) -> dict[int, bytes]:
    """The payload at each offset."""
    found: dict[int, bytes] = {}
    for _, batch, data in batches(directory):
        if not batch.lost:
            for offset, message in enumerate(decode_messages(data, batch), batch.first_offset):
                found[offset] = message.payload
    return found


EVERYTHING = {offset: b"%d" % offset for offset in range(END)}


def _poke(at: int, value: bytes) -> Callable[[bytes, Batch], bytes]:
    def change(data: bytes, batch: Batch) -> bytes:
        position = batch.position + at
        return data[:position] + value + data[position + len(value) :]

    return change


# Ways to damage a batch in its file.
DAMAGES: dict[str, Callable[[bytes, Batch], bytes]] = {
    "magic": _poke(0, b"X"),
    "length": _poke(4, b"\xff\xff\xff\x7f"),
    "short length": _poke(4, b"\0\1\0\0"),
    "checksum": _poke(8, b"\1\2\3\4"),
    "count": _poke(12, b"\0\0\0\0"),
    "offset": _poke(16, b"\xee"),
    "version": _poke(24, b"\x09"),
    "body": _poke(150, b"\0\xff\0\xff"),
    "zeros": lambda data, batch: data[: batch.position] + bytes(batch.end - batch.position) + data[batch.end :],
    "cut out": lambda data, batch: data[: batch.position] + data[batch.end :],
    "lost bytes": lambda data, batch: data[: batch.position + 50] + data[batch.position + 58 :],
    "more bytes": lambda data, batch: data[: batch.position + 50] + b"MQB1" * 2 + data[batch.position + 50 :],
}
