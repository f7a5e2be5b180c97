"""The rows of sealed segments as record batches, for readers that have no Arrow.

Row groups that were decoded last stay in memory: readers take many small batches from each, and often the same.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

from bridge_spark.log.archive.files import ArchiveFiles, open_files
from bridge_spark.log.archive.location import parse_location
from bridge_spark.log.record_batch import SegmentError, encode_lost, encode_rows
from bridge_spark.log.sealed.footer import RowGroup
from bridge_spark.log.sealed.reader import SealedFile

COLUMNS = ("timestamp", "flags", "topic", "payload", "client_id", "properties")
ROW_BYTES = 25  # of a row in a batch, beside its texts
OPEN_FILES = 16


class Found(NamedTuple):
    """The answer for an offset: a batch, or with ``data`` empty the offset ``end`` at which to go on.

    With a ``reason`` the records up to ``end`` are damaged; 0 if that is not known.
    """

    data: bytes
    end: int
    reason: str = ""


class _Group:
    """A decoded row group."""

    def __init__(self, first_offset: int, rows: Any) -> None:
        self.first_offset = first_offset
        self.size: int = rows.nbytes
        self._count: int = rows.num_rows
        times, flags = rows.column("timestamp"), rows.column("flags")
        self._times = _values(times, 8)
        self._flags = _values(flags, 1)
        self._columns: list[tuple[memoryview, memoryview]] = []
        for name in COLUMNS[2:]:
            column = rows.column(name)
            _, offsets, data = column.buffers()
            whole = memoryview(offsets).cast("B").cast("i") if offsets is not None else memoryview(bytes(4)).cast("i")
            start = column.offset
            self._columns.append(
                (
                    whole[start : start + self._count + 1],
                    memoryview(data).cast("B") if data is not None else memoryview(b""),
                )
            )

    def batch(self, offset: int, size: int) -> bytes:
        """The rows from `offset` on, about `size` bytes, at least one."""
        first = offset - self.first_offset
        most = min(self._count - first, max(1, size // ROW_BYTES))
        low, high = 1, most  # the number of rows
        while low < high:
            middle = (low + high + 1) // 2
            if self._bytes(first, first + middle) <= size:
                low = middle
            else:
                high = middle - 1
        end = first + low
        return encode_rows(
            offset,
            bytes(self._times[first * 8 : end * 8]),
            bytes(self._flags[first:end]),
            [(array("i", offsets[first : end + 1]), bytes(data[offsets[first] : offsets[end]])) for offsets, data in self._columns],
        )

    def _bytes(self, first: int, end: int) -> int:
        texts = sum(offsets[end] - offsets[first] for offsets, _ in self._columns)
        return texts + (end - first) * ROW_BYTES


def _values(column: Any, width: int) -> memoryview:
    data = memoryview(column.buffers()[1]).cast("B")
    return data[column.offset * width : (column.offset + len(column)) * width]


class SealedRows:
    """Rows of any sealed segments; decoded row groups take up to about `cache_bytes`."""

    def __init__(self, cache_bytes: int) -> None:
        self.cache_bytes = cache_bytes
        # With their descriptors; -1 of a file in an archive.
        self._files: OrderedDict[tuple[str, int], tuple[int, SealedFile]] = OrderedDict()
        self._archives: dict[str, ArchiveFiles] = {}  # by location
        self._groups: OrderedDict[tuple[str, int, int], _Group] = OrderedDict()

    def read(self, path: str, length: int, offset: int, size: int, location: str = "") -> Found:
        """The rows from `offset` on of the file with so many bytes, in a batch of about `size` bytes.

        With a `location`, the file is in that archive. Raises `OSError` and `ArchiveError`.
        """
        try:
            file = self._file(path, length, location)
        except SegmentError as error:
            return Found(b"", 0, str(error))
        group = next((each for each in file.footer.groups if offset < each.end_offset), None)
        for first, end in file.footer.lost:
            if first <= offset < end:
                return Found(encode_lost(offset, end), 0)
        if group is None:
            return Found(b"", file.footer.end_offset)
        if offset < group.first_offset:
            following = [first for first, _ in file.footer.lost if offset < first < group.first_offset]
            return Found(b"", min([group.first_offset, *following]))
        try:
            return Found(self._group(path, length, file, group).batch(offset, size), 0)
        except SegmentError as error:
            return Found(b"", group.end_offset, str(error))

    def _file(self, path: str, length: int, location: str) -> SealedFile:
        key = path, length
        known = self._files.get(key)
        if known is not None:
            self._files.move_to_end(key)
            return known[1]
        if location:
            descriptor, file = -1, SealedFile(partial(self._archive(location).read, path), length)
        else:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                file = SealedFile(lambda position, count: os.pread(descriptor, count, position), length)
            except BaseException:
                os.close(descriptor)
                raise
        self._files[key] = descriptor, file
        if len(self._files) > OPEN_FILES:
            _, (oldest, _) = self._files.popitem(last=False)
            if oldest >= 0:
                os.close(oldest)
        return file

    def _archive(self, location: str) -> ArchiveFiles:
        files = self._archives.get(location)
        if files is None:
            files = self._archives[location] = open_files(parse_location(location))
        return files

    def _group(self, path: str, length: int, file: SealedFile, group: RowGroup) -> _Group:
        key = path, length, group.first_offset
        known: _Group | None = self._groups.get(key)
        if known is not None:
            self._groups.move_to_end(key)
            return known
        # Records that compaction removed are rows without a topic, so that the offsets have no gap.
        parts = file.rows(COLUMNS, group.first_offset, group.end_offset, with_removed=True)
        rows = next(each for _, _, each in parts if each is not None)
        decoded = self._groups[key] = _Group(group.first_offset, rows)
        while len(self._groups) > 1 and sum(each.size for each in self._groups.values()) > self.cache_bytes:
            self._groups.popitem(last=False)
        return decoded
