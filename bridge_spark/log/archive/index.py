"""The index of an archive: the file `archive_index` in a partition's directory.

It says which offsets the archive has.  A segment is entered after its object is confirmed, and taken out before its
object is removed.  The file is appended to only: records of 80 bytes, little-endian, the last one with the offset at
which the archive begins.  An incomplete record at the end is cut.  Lookups read a few records.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import google_crc32c

from bridge_spark.log.files import replace_file, sync_directory, write_all
from bridge_spark.log.record_batch import CorruptBatch
from bridge_spark.log.segment_names import archived_file_name

INDEX_FILE = "archive_index"
COMPACT_AFTER = 1000  # records of removed segments, if they are more than half

_RECORD = Struct("<QQQqqqQQQII")
_CRC_AT = _RECORD.size - 4
_BLOCK_RECORDS = 512


class ArchivedSegment(NamedTuple):
    """A segment in the archive; sizes in bytes, times in microseconds (smallest and largest)."""

    first_offset: int
    end_offset: int
    size: int
    first_timestamp: int
    last_timestamp: int
    data_crc: int  # of the sealed segment (`Footer`)

    @property
    def file(self) -> str:
        return archived_file_name(self.first_offset, self.end_offset)


class ArchiveState(NamedTuple):
    """The segments of a partition in its archive: offsets from ``start`` to before ``end``; ``size`` bytes."""

    start: int
    end: int
    segments: int
    size: int


class _Record(NamedTuple):
    """A segment, or with ``first_offset`` = ``end_offset`` only a new ``start``.

    ``latest`` is the largest time, ``total`` and ``number`` are bytes and count of all segments up to this record.
    """

    first_offset: int
    end_offset: int
    size: int
    first_timestamp: int
    last_timestamp: int
    latest: int
    total: int
    number: int
    start: int
    data_crc: int

    @property
    def segment(self) -> ArchivedSegment:
        return ArchivedSegment(*self[:5], self.data_crc)

    def is_kept(self, start: int) -> bool:
        return self.first_offset < self.end_offset and self.end_offset > start


_NONE = _Record(0, 0, 0, 0, 0, -(1 << 63), 0, 0, 0, 0)


def _encode(record: _Record) -> bytes:
    data = _RECORD.pack(*record, 0)
    crc: int = google_crc32c.value(data[:_CRC_AT])
    return data[:_CRC_AT] + crc.to_bytes(4, "little")


def _decode(data: bytes, position: int) -> _Record:
    """Raises `CorruptBatch`."""
    *values, crc = _RECORD.unpack_from(data, position)
    if google_crc32c.value(data[position : position + _CRC_AT]) != crc:
        raise CorruptBatch(position, "damaged record of the archive's index")
    return _Record(*values)


class IndexReader:
    """Lookups in the index `path`, which another process may be writing.  A missing file is an empty index.

    All methods raise `CorruptBatch` for a damaged record, and `OSError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def state(self) -> ArchiveState:
        with _Records(self.path) as records:
            return records.state()

    def between(self, start: int, end: int, limit: int | None = None) -> list[ArchivedSegment]:
        """The segments with offsets from `start` up to `end`, in order, at most `limit`."""
        with _Records(self.path) as records:
            kept = max(start, records.last.start)
            first = bisect_right(range(records.count), kept, key=lambda number: records[number].end_offset)
            found: list[ArchivedSegment] = []
            for record in records.from_(first):
                if record.first_offset >= end or len(found) == limit:
                    break
                if record.is_kept(kept):
                    found.append(record.segment)
            return found

    def size_before(self, offset: int) -> int:
        """The bytes of the segments that end at or before `offset`."""
        with _Records(self.path) as records:
            first, until = (
                bisect_right(range(records.count), each, key=lambda number: records[number].end_offset)
                for each in (records.last.start, offset)
            )
            before = records[first - 1].total if first else records[0].total - records[0].size if records.count else 0
            return max(records[until - 1].total - before, 0) if until else 0

    def check(self) -> ArchiveState:
        """Read all records; return the state."""
        with _Records(self.path) as records:
            for _ in records.from_(0):
                pass
            return records.state()

    def at_time(self, timestamp: int) -> ArchivedSegment | None:
        """The first segment with a record received at or after `timestamp`."""
        with _Records(self.path) as records:
            start = records.last.start
            first = bisect_left(range(records.count), timestamp, key=lambda number: records[number].latest)
            for record in records.from_(first):
                if record.is_kept(start) and record.last_timestamp >= timestamp:
                    return record.segment
            return None


class _Records:
    """The complete records of an open index file."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self.last = _NONE
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self._fd = -1

    def __enter__(self) -> _Records:
        if self._fd >= 0:
            try:
                self._find_last()
            except BaseException:
                os.close(self._fd)
                raise
        return self

    def _find_last(self) -> None:
        self.count = os.fstat(self._fd).st_size // _RECORD.size
        if self.count:
            try:
                self.last = self[self.count - 1]
            except CorruptBatch:  # it is being written
                self.count -= 1
                self.last = self[self.count - 1] if self.count else _NONE

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def __getitem__(self, number: int) -> _Record:
        return _decode(os.pread(self._fd, _RECORD.size, number * _RECORD.size).ljust(_RECORD.size, b"\0"), 0)

    def from_(self, number: int) -> Iterator[_Record]:
        """The records from that one on."""
        while number < self.count:
            wanted = min(self.count - number, _BLOCK_RECORDS)
            data = os.pread(self._fd, wanted * _RECORD.size, number * _RECORD.size)
            for position in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
                yield _decode(data, position)
            number += wanted

    def state(self) -> ArchiveState:
        last = self.last
        first = bisect_right(range(self.count), last.start, key=lambda number: self[number].end_offset)
        for record in self.from_(first):
            if record.is_kept(last.start):
                return ArchiveState(last.start, last.end_offset, last.number - record.number + 1, last.total - record.total + record.size)
        return ArchiveState(last.end_offset, last.end_offset, 0, 0)


class ArchiveIndex(IndexReader):
    """The index as the broker keeps it.  `current` may be read by any thread; one thread calls the other methods."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.current = ArchiveState(0, 0, 0, 0)
        self._last = _NONE
        self._size = 0

    def load(self) -> None:
        """Read and check the whole file; cut an incomplete record at its end.

        Raises `CorruptBatch` if another record is damaged, or `OSError`.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        records: list[_Record] = []
        for position in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
            try:
                records.append(_decode(data, position))
            except CorruptBatch:
                if position + 2 * _RECORD.size <= len(data):
                    raise
        self._last = records[-1] if records else _NONE
        self._size = len(records) * _RECORD.size
        if len(data) > self._size:
            os.truncate(self.path, self._size)
        kept = [record for record in records if record.is_kept(self._last.start)]
        if len(records) > max(COMPACT_AFTER, 2 * len(kept)):
            self._replace([*kept, *records[-1:]] if kept[-1:] != records[-1:] else kept)
        self.current = self.state()

    def _replace(self, records: Sequence[_Record]) -> None:
        data = b"".join(map(_encode, records))
        replace_file(self.path, data)
        self._size = len(data)

    def append(self, segment: ArchivedSegment) -> None:
        """Enter a segment, durably.  Raises `ValueError` unless it follows all others, or `OSError`."""
        last = self._last
        if segment.first_offset < last.end_offset or segment.end_offset <= segment.first_offset:
            raise ValueError(f"{segment.file} does not follow offset {last.end_offset - 1}")
        start = segment.first_offset if not self.current.segments else last.start
        self._append(
            _Record(
                *segment[:5], max(last.latest, segment.last_timestamp), last.total + segment.size, last.number + 1, start, segment.data_crc
            )
        )

    def remove_before(self, offset: int) -> None:
        """Take out, durably, the segments that end at or before `offset`.  Raises `OSError`."""
        last = self._last
        end = last.end_offset
        self._append(_Record(end, end, 0, 0, 0, last.latest, last.total, last.number, offset, 0))

    def _append(self, record: _Record) -> None:
        new = not self._size
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            try:
                write_all(fd, _encode(record), self._size)
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, self._size)
                raise
        finally:
            os.close(fd)
        if new:
            sync_directory(self.path.parent)
        self._last = record
        self._size += _RECORD.size
        self.current = self.state()

    def insert(self, segments: Sequence[ArchivedSegment]) -> None:
        """Enter segments that are missing, anywhere, durably.  Raises `OSError`."""
        entered = sorted([*self.between(0, 1 << 63), *segments])
        start = min(self.current.start, entered[0].first_offset) if self.current.segments else entered[0].first_offset
        self._replace(_records(entered, start))
        self.load()


def _records(segments: Sequence[ArchivedSegment], start: int) -> list[_Record]:
    """The records of an index of these segments."""
    records: list[_Record] = []
    last = _NONE
    for segment in segments:
        last = _Record(
            *segment[:5], max(last.latest, segment.last_timestamp), last.total + segment.size, last.number + 1, start, segment.data_crc
        )
        records.append(last)
    return records


def copy_index(directory: Path, target: Path, end: int) -> None:
    """Write to the directory `target` the index of `directory`, of the segments that end at or before `end`.

    The caller syncs the file.  Raises `CorruptBatch` or `OSError`.
    """
    index = IndexReader(directory / INDEX_FILE)
    start, segments = index.state().start, index.between(0, 1 << 63)
    if copied := [segment for segment in segments if segment.end_offset <= end]:
        (target / INDEX_FILE).write_bytes(b"".join(map(_encode, _records(copied, start))))


def repair_index(directory: Path, stamp: str) -> list[str]:
    """Set a damaged index aside and keep its undamaged records; return one line for each change.

    The broker finds the segments of the others in the archive.  Raises `OSError`.
    """
    path = directory / INDEX_FILE
    try:
        IndexReader(path).check()
        return []
    except CorruptBatch as error:
        reason = str(error)
    data = path.read_bytes()
    kept: list[_Record] = []
    for position in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
        try:
            kept.append(_decode(data, position))
        except CorruptBatch:
            continue
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    os.link(path, aside)
    start = kept[-1].start if kept else 0
    segments = [record.segment for record in kept if record.is_kept(start)]
    replace_file(path, b"".join(map(_encode, _records(segments, start))))
    return [f"{path.name}: {reason}; put aside as {aside.name}, {len(segments)} segments are known"]
