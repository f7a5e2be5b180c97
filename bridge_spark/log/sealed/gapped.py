"""Writes sealed segments of records whose offsets have gaps: those of a Kafka topic, which has other things at some offsets.

An offset without a record is a row whose topic is null, as one that compaction removed; readers leave these rows out.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.columns import STORED_TYPES
from bridge_spark.log.record_batch import RETAIN_FLAG
from bridge_spark.log.sealed.compact import SCHEMA_OF_COMPACTED
from bridge_spark.log.sealed.footer import GAPS_ONLY, KEY, Footer, RowGroup, encode_time_index, verify_file
from bridge_spark.log.sealed.writer import (
    DICTIONARIES,
    ENCODINGS,
    GROUP_BYTES,
    GROUP_ROWS,
    STATISTICS,
    ZSTD_LEVEL,
    ChecksummedFile,
    ClosedSegment,
    StoredRows,
    stored_columns,
)
from bridge_spark.log.segment_names import sealed_file_name
from sessions.message import Message

ROW_BYTES = 25  # of a row in an unsealed segment, beside its texts
SEGMENT_OFFSETS = 10_000_000  # of a segment at most, so that its footer stays small


class GappedPartition:
    """The sealed segments of one partition, from the offset ``first`` on, in the order of their offsets; one row group is in memory.

    A segment ends behind about ``segment_bytes``. `close` makes what was added complete, and names durable files only.
    """

    def __init__(self, directory: Path, stream: str, partition: int, first: int, segment_bytes: int) -> None:
        self.end = first
        self._directory = directory
        self._stream = stream
        self._partition = partition
        self._segment_bytes = segment_bytes
        self._segment: _Segment | None = None
        self._last_time: int | None = None  # of the last record

    def __enter__(self) -> GappedPartition:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._segment is not None:  # after an error: the file is not complete
            self._segment.abandon()
            self._segment = None

    def add(self, offset: int, message: Message) -> None:
        """Add the record at an offset, which is not before `end`. Raises `OSError`."""
        self._gap(offset, message.timestamp)
        self._last_time = message.timestamp
        self._open().add(message.timestamp, message)
        self._advance()

    def close(self, end: int) -> None:
        """Let the partition end at ``end``; offsets before it without a record are gaps. Raises `OSError` or `SegmentError`."""
        self._gap(end, 0)
        if self._segment is not None:
            self._finish(self._segment)

    def _gap(self, until: int, timestamp: int) -> None:
        """Add the offsets up to ``until`` without records; ``timestamp`` is that of the next record.

        They have the time of the record before them, so that the index of times finds records only.
        """
        timestamp = timestamp if self._last_time is None else self._last_time
        while self.end < until:
            self._open().add(timestamp, None)
            self._advance()

    def _open(self) -> _Segment:
        if self._segment is None:
            place = ClosedSegment(self._directory / sealed_file_name(self.end), self._stream, self._partition, self.end, self.end, 0)
            self._segment = _Segment(place)
        return self._segment

    def _advance(self) -> None:
        self.end += 1
        segment = self._segment
        assert segment is not None
        if segment.size >= self._segment_bytes or segment.count >= SEGMENT_OFFSETS:
            self._finish(segment)

    def _finish(self, segment: _Segment) -> None:
        self._segment = None
        segment.finish()


class _Segment:
    """A sealed segment that is being written."""

    def __init__(self, place: ClosedSegment) -> None:
        self.size = 0  # bytes of the rows in an unsealed segment
        self.count = 0  # offsets
        self._place = place
        self._rows: list[Message | None] = []
        self._times: list[int] = []
        self._rows_bytes = 0
        self._groups: list[RowGroup] = []
        self._first_timestamp = 0
        self._fd = os.open(place.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._sink = ChecksummedFile(self._fd)
        self._file = pa.PythonFile(self._sink, "w")
        self._writer = pq.ParquetWriter(
            self._file, SCHEMA_OF_COMPACTED, compression="zstd", compression_level=ZSTD_LEVEL, use_dictionary=DICTIONARIES,
            column_encoding=ENCODINGS, write_statistics=STATISTICS, write_page_index=True, write_page_checksum=True,
            store_schema=False,
        )  # fmt: skip

    def add(self, timestamp: int, message: Message | None) -> None:
        """Add a record, or an offset without one."""
        size = ROW_BYTES if message is None else ROW_BYTES + message.size + len(message.publisher)
        self._rows.append(message)
        self._times.append(timestamp)
        self.count += 1
        self.size += size
        self._rows_bytes += size
        if len(self._rows) >= GROUP_ROWS or self._rows_bytes >= GROUP_BYTES:
            self._write_group()

    def finish(self) -> None:
        if self._rows:
            self._write_group()
        place = self._place
        footer = Footer(
            place.stream, place.partition, place.first_offset, place.first_offset + self.count, self._first_timestamp,
            max(group.last_timestamp for group in self._groups), self.size, (), tuple(self._groups), 0, 0, 0, GAPS_ONLY,
        )  # fmt: skip
        try:
            self._writer.add_key_value_metadata({KEY: footer.encode()})
            self._sink.hold_footer()
            self._writer.close()
            self._sink.finish()
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
        verify_file(place.path)

    def abandon(self) -> None:
        self._sink.hold_footer()  # pyarrow writes a footer, also to a file that nobody reads
        self._writer.close()
        os.close(self._fd)

    def _write_group(self) -> None:
        rows, times = self._rows, self._times
        self._rows, self._times, self._rows_bytes = [], [], 0
        first = self._place.first_offset + (self._groups[-1].end_offset - self._place.first_offset if self._groups else 0)
        values: dict[str, list[Any]] = {
            "timestamp": times,
            "flags": [0 if one is None else one.qos | (RETAIN_FLAG if one.retain else 0) for one in rows],
            "topic": [None if one is None else one.topic for one in rows],
            "payload": [b"" if one is None else one.payload for one in rows],
            "client_id": ["" if one is None else one.publisher for one in rows],
            "properties": [b"" if one is None else one.properties for one in rows],
        }
        arrays = [pa.array(values[name], kind) for name, kind in STORED_TYPES.items()]
        stored = StoredRows(first, pa.RecordBatch.from_arrays(arrays, names=list(STORED_TYPES)))
        position = self._file.tell()
        self._writer.write_table(stored_columns(stored, self._place, SCHEMA_OF_COMPACTED))
        index = encode_time_index(times)
        end = self._file.tell()
        self._file.write(index)
        if not self._groups:
            self._first_timestamp = times[0]
        self._groups.append(RowGroup(first, stored.end_offset, position, end, len(index), min(times), max(times)))
