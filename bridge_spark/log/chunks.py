"""Chunks: the committed records of a partition in parts of bounded size, as record batches.

A chunk of an unsealed segment is a piece of its file. Only of a batch that is larger than a chunk, rows are copied into
a smaller one.
"""

from __future__ import annotations

import errno
import mmap
import os
from array import array
from bisect import bisect_right
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from bridge_spark.log.archive.index import INDEX_FILE, ArchivedSegment
from bridge_spark.log.archive.location import parse_location
from bridge_spark.log.check import next_batch
from bridge_spark.log.partition import Partition, PartitionView
from bridge_spark.log.record_batch import (
    CHECKED_FROM,
    HEADER_BYTES,
    Batch,
    CorruptBatch,
    SegmentError,
    encode_rows,
    read_header,
)
from bridge_spark.log.segment import Segment
from bridge_spark.log.segment_names import INDEX_SUFFIX
from bridge_spark.log.sparse_index import last_entry
from bridge_spark.log.stream_log import StreamLogs

CHECKED_AT_ONCE = 1024 * 1024  # bytes of a large batch in memory while its checksum is computed
ROW_BYTES = 25  # of a row in a batch, beside its texts


class Piece(NamedTuple):
    """Batches from byte `position` of the segment with this first offset, the last one perhaps not whole; if ``made``, one
    batch with rows of the batch at `position`."""

    data: bytes
    segment: int
    position: int
    made: bool
    file: str


class Moved(NamedTuple):
    """There is no record at the offset, but from ``offset`` on; ``expired`` if retention has removed records."""

    offset: int
    expired: bool


class Nothing(NamedTuple):
    """The offset is the end of the partition."""


class InSegment(NamedTuple):
    """The record is in this file of a segment."""

    path: Path
    segment: Segment


class InArchive(NamedTuple):
    """The record is in this segment of the archive at ``location``; ``path`` is that of `ArchiveLocation`."""

    location: str
    path: str
    segment: ArchivedSegment


class Unreadable(NamedTuple):
    """The records up to ``end``, 0 if that is not known, are damaged or missing."""

    end: int
    reason: str


class Unavailable(NamedTuple):
    """The records cannot be read at the moment; nothing says that they are damaged."""

    reason: str


Answer = Piece | Moved | Nothing | InSegment | InArchive | Unreadable | Unavailable


class ChunkReader:
    """Reads chunks of the streams of `logs`. For one thread."""

    def __init__(self, logs: StreamLogs) -> None:
        self._logs = logs
        self._checked: tuple[str, int] = ("", 0)  # path and position of the last large batch with a correct checksum

    def read(self, stream: str, number: int, offset: int, segment: int, position: int, size: int, skipping: bool) -> Answer:
        """The records from `offset` on, about `size` bytes.

        They are at or behind byte `position` of the segment with the first offset `segment`, if that still exists; -1 if
        the caller does not know. With `skipping`, the next offset that can be read, as `Moved`. Sealed and archived
        segments are only named.
        """
        while True:
            place = locate(self._logs, stream, number, offset)
            if not isinstance(place, InSegment) or place.segment.sealed:
                return place
            path, found = place
            try:
                if skipping:
                    return _next_readable(path, found, offset)
                return self._read(path, found, offset, position if segment == found.first_offset else -1, size)
            except FileNotFoundError as error:
                # Retention has removed the file, or it is sealed: then the record is somewhere else.
                if locate(self._logs, stream, number, offset) == place:
                    return Unreadable(0, f"{path.name}: {error.strerror}")
            except SegmentError as error:
                return Unreadable(0, f"{path.name}: {error}")
            except OSError as error:
                return failure(path.name, error)

    def _read(self, path: Path, segment: Segment, offset: int, position: int, size: int) -> Answer:
        if not 0 <= position < segment.size:
            position = _position_of(path, segment, offset)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while True:
                data = os.pread(descriptor, min(size, segment.size - position), position)
                batch = read_header(data)
                if batch.lost or batch.end <= len(data):
                    return Piece(data, segment.first_offset, position, False, path.name)
                if position + batch.end > segment.size:
                    raise CorruptBatch(position, "the batch reaches beyond the end of the segment")
                if batch.end_offset > offset:
                    break
                position += batch.end
                if position >= segment.size:
                    raise CorruptBatch(position, f"offset {offset} is not there")
            self._check_large(descriptor, str(path), position, batch)
            made = _rows_of_large(descriptor, position, batch, max(offset, batch.first_offset), size)
            return Piece(made, segment.first_offset, position, True, path.name)
        finally:
            os.close(descriptor)

    def _check_large(self, descriptor: int, path: str, position: int, batch: Batch) -> None:
        """Raise `CorruptBatch` unless the checksum is correct; the batch is not held in memory."""
        if self._checked == (path, position):
            return
        crc = 0
        at, end = position + CHECKED_FROM, position + batch.end
        while at < end:
            data = os.pread(descriptor, min(CHECKED_AT_ONCE, end - at), at)
            if not data:
                break
            crc = google_crc32c.extend(crc, data)
            at += len(data)
        if crc != batch.crc:
            raise CorruptBatch(position, "wrong checksum")
        self._checked = (path, position)


def failure(file: str, error: OSError) -> Answer:
    """The answer after an error of the operating system: only a failed disk is damage."""
    reason = f"{file}: {error.strerror or error}"
    return Unreadable(0, reason) if error.errno == errno.EIO else Unavailable(reason)


def locate(logs: StreamLogs, stream: str, number: int, offset: int) -> Answer:
    """Where the record with an offset is, in the data directory or the archive; `Unreadable` for an unknown partition."""
    try:
        partition = logs.partition(stream, number)
    except KeyError:
        return Unreadable(0, f"there is no stream {stream} with a partition {number}")
    found = _segment_of(partition.view, offset)
    if isinstance(found, Segment):
        return InSegment(partition.directory / found.file, found)
    # The archive is asked behind the view: then one of the two has each record.
    if isinstance(found, Moved) and found.expired and partition.archive.current.segments:
        return _in_archive(logs, stream, partition, offset, found)
    return found


def log_start(partition: Partition) -> int:
    """The first offset of a partition that is in the data directory or the archive."""
    start = partition.view.log_start_offset
    archive = partition.archive.current
    return min(start, archive.start) if archive.segments else start


def _in_archive(logs: StreamLogs, stream: str, partition: Partition, offset: int, local: Moved) -> Answer:
    """Where a record is that comes before those of the data directory, which begin at ``local``."""
    try:
        found = partition.archive.between(offset, local.offset, 1)
    except SegmentError as error:
        return Unreadable(0, f"{INDEX_FILE}: {error}")
    except OSError as error:
        return failure(INDEX_FILE, error)
    if not found:
        return local
    segment = found[0]
    if offset < segment.first_offset:
        return Moved(segment.first_offset, True)
    location = logs.archive_location(stream)
    return InArchive(location, parse_location(location).path(stream, str(partition.number), segment.file), segment)


def _segment_of(view: PartitionView, offset: int) -> Segment | Moved | Nothing:
    if offset < view.log_start_offset:
        return Moved(view.log_start_offset, True)
    if offset >= view.high_watermark:
        return Nothing()
    segments = view.segments
    index = bisect_right(segments, offset, key=attrgetter("first_offset")) - 1
    if index >= 0 and offset < segments[index].end_offset:
        return segments[index]
    return Moved(segments[index + 1].first_offset, False) if index + 1 < len(segments) else Nothing()


def _indexed_position(path: Path, segment: Segment, offset: int) -> int:
    """The position of a batch at or before the one with an offset, by the sparse index; 0 without a usable one."""
    try:
        found = last_entry(path.with_suffix(INDEX_SUFFIX), segment.index_entries, lambda e: e.first_offset <= offset)
    except OSError:
        return 0
    if found is None or not 0 < found.position < segment.size:
        return 0
    # The index is never synced, and a shortcut only.
    with open(path, "rb") as file:
        try:
            batch = read_header(os.pread(file.fileno(), HEADER_BYTES, found.position))
        except SegmentError:
            return 0
    return found.position if batch.first_offset == found.first_offset else 0


def _position_of(path: Path, segment: Segment, offset: int) -> int:
    """The position of the batch with an offset; if it is damaged, of the damage."""
    position = _indexed_position(path, segment, offset)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as data:
        return _search(data, position, segment, offset)


def _search(data: mmap.mmap, position: int, segment: Segment, offset: int) -> int:
    expected = segment.first_offset if position == 0 else 0
    while position < segment.size:
        try:
            batch = read_header(data, position, segment.size)
        except SegmentError:
            # Damage before the offset must not keep others from what is behind it.
            following = next_batch(data, position, expected, None)  # type: ignore[arg-type]
            if following is None or following.first_offset > offset:
                return position
            position = following.position
            continue
        if batch.end_offset > offset:
            break
        position, expected = batch.end, batch.end_offset
    return position


def _next_readable(path: Path, segment: Segment, offset: int) -> Answer:
    """The next offset, not before `offset`, whose batch is not damaged."""
    position = _indexed_position(path, segment, offset)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as data:
        following = next_batch(data, _search(data, position, segment, offset), offset, None)  # type: ignore[arg-type]
        while following is not None and following.lost:
            after = following.end_offset
            following = next_batch(data, following.end, after, None)  # type: ignore[arg-type]
    return Moved(segment.end_offset if following is None else following.first_offset, False)


def _rows_of_large(descriptor: int, position: int, batch: Batch, offset: int, size: int) -> bytes:
    """A batch of about `size` bytes with rows of a large one, from `offset` on, at least one."""
    count = batch.count
    first = offset - batch.first_offset
    most = min(count - first, max(1, size // ROW_BYTES))
    times_at = position + HEADER_BYTES
    flags_at = times_at + count * 8
    at = flags_at + ((count + 7) & -8)
    columns: list[tuple[int, array[int]]] = []  # the position of the bytes of a column, and offsets of the rows
    for _ in range(4):
        offsets = array("i")
        offsets.frombytes(os.pread(descriptor, (most + 1) * 4, at + first * 4))
        last = int.from_bytes(os.pread(descriptor, 4, at + count * 4), "little")
        at += ((count + 1) * 4 + 7) & -8
        columns.append((at, offsets))
        at += (last + 7) & -8
    rows = 1
    while rows < most:
        following = min(most, rows * 2)
        if _text_bytes(columns, following) + following * ROW_BYTES > size:
            break
        rows = following
    return encode_rows(
        offset,
        os.pread(descriptor, rows * 8, times_at + first * 8),
        os.pread(descriptor, rows, flags_at + first),
        [(offsets[: rows + 1], os.pread(descriptor, offsets[rows] - offsets[0], start + offsets[0])) for start, offsets in columns],
    )


def _text_bytes(columns: list[tuple[int, array[int]]], rows: int) -> int:
    return sum(offsets[rows] - offsets[0] for _, offsets in columns)
