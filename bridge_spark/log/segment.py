"""One segment file: its extent, its sparse index, its recovery, and lookups by time and of times.

The sparse index is only a shortcut.  Its entries are checked against the batches, and without an index the file is read
from its beginning.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from bridge_spark.log.record_batch import SegmentError, scan_batches, timestamps
from bridge_spark.log.sealed.footer import load_footer, search_sealed_file
from bridge_spark.log.segment_names import INDEX_SUFFIX, compacted_file_name, generation_of, segment_file_name
from bridge_spark.log.sparse_index import INDEX_ENTRY, INDEX_INTERVAL, IndexEntry, decode_index, last_entry

logger = logging.getLogger(__name__)


class Segment(NamedTuple):
    """The written part of one segment; sizes in bytes, times in microseconds.

    ``last_timestamp`` is the latest receipt time of all its records.  ``unsealed_size`` is the size of a sealed segment
    before it was sealed, 0 if the segment is not sealed.  ``generation``: how often it was compacted.
    """

    first_offset: int
    end_offset: int
    size: int
    first_timestamp: int
    last_timestamp: int
    index_position: int  # position of the last indexed batch
    index_entries: int
    unsealed_size: int = 0
    generation: int = 0

    @property
    def stem(self) -> str:
        return f"{self.first_offset:020d}"

    @property
    def sealed(self) -> bool:
        return self.unsealed_size > 0

    @property
    def file(self) -> str:
        if not self.sealed:
            return segment_file_name(self.first_offset)
        return compacted_file_name(self.first_offset, self.generation)


def empty_segment(first_offset: int) -> Segment:
    return Segment(first_offset, first_offset, 0, 0, 0, 0, 0)


def append_batch(segment: Segment, first_offset: int, count: int, size: int, times: Sequence[int]) -> tuple[Segment, IndexEntry | None]:
    """The segment after appending a batch of `count` records and `size` bytes, and the batch's index entry, if any."""
    empty = segment.size == 0
    first = times[0] if empty else segment.first_timestamp
    latest = max(times)
    entry = None
    if empty or segment.size - segment.index_position >= INDEX_INTERVAL:
        entry = IndexEntry(first_offset, segment.size, first if empty else segment.last_timestamp)
    longer = Segment(
        segment.first_offset,
        first_offset + count,
        segment.size + size,
        first,
        latest if empty else max(latest, segment.last_timestamp),
        segment.index_position if entry is None else segment.size,
        segment.index_entries + (entry is not None),
    )
    return longer, entry


def recover_segment(path: Path, first_offset: int, end_offset: int | None, thorough: bool) -> Segment:
    """The extent of a segment file up to `end_offset`, or up to the first damaged batch; rebuilds its index if needed.

    Unless `thorough`, batches covered by the index are not checked; readers check each batch.
    """
    index_path = path.with_suffix(INDEX_SUFFIX)
    before = index_path.read_bytes() if index_path.exists() else b""
    entries = [] if thorough else decode_index(before)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        segment = empty_segment(first_offset)
        usable = len(entries) > 1 and entries[0].first_offset == first_offset
        if usable and entries[-1].position < size:
            last = entries[-1]
            segment = segment._replace(
                end_offset=last.first_offset,
                size=last.position,
                first_timestamp=entries[0].timestamp,
                last_timestamp=last.timestamp,
                index_position=last.position,
                index_entries=len(entries),
            )
        else:
            entries = []
        resumed_at = segment.size
        try:
            for _, batch, data in scan_batches(file, segment.size, size, segment.end_offset):
                if end_offset is not None and batch.end_offset > end_offset:
                    break
                times = timestamps(data, batch) or [segment.last_timestamp]
                segment, entry = append_batch(segment, batch.first_offset, batch.count, len(data), times)
                if entry is not None:
                    entries.append(entry)
                if batch.end_offset == end_offset:
                    break
        except SegmentError as error:
            logger.warning("event=segment_cut file=%s reason=%s", path, error)
    if segment.size == resumed_at > 0:
        return recover_segment(path, first_offset, end_offset, True)
    after = b"".join(INDEX_ENTRY.pack(*entry) for entry in entries)
    if after != before:
        index_path.write_bytes(after)
    return segment


def read_sealed_segment(path: Path) -> Segment:
    """The extent of a sealed segment.  Raises `SegmentError` if its footer is damaged, or `OSError`."""
    footer = load_footer(path)
    times = footer.first_timestamp, footer.last_timestamp
    generation = generation_of(path.name)
    return Segment(footer.first_offset, footer.end_offset, footer.size, *times, 0, 0, footer.unsealed_bytes, generation)


def search_segment(path: Path, segment: Segment, timestamp: int) -> int:
    """The first offset received at or after `timestamp`, which must not be later than the segment's latest record."""
    if segment.sealed:
        return search_sealed_file(path, timestamp)
    start = IndexEntry(segment.first_offset, 0, 0)
    try:
        found = last_entry(path.with_suffix(INDEX_SUFFIX), segment.index_entries, lambda entry: entry.timestamp < timestamp)
    except FileNotFoundError:
        found = None
    if found is not None and 0 < found.position < segment.size:
        try:
            return _search_from(path, segment, found, timestamp)
        except SegmentError:
            # The index is never synced, so the index may be wrong instead of the batches.
            pass
    return _search_from(path, segment, start, timestamp)


def receipt_time(path: Path, size: int, first_offset: int, offset: int) -> int:
    """When the record `offset` of an unsealed segment of `size` bytes was received, in microseconds.

    Raises `SegmentError` if its batch is damaged or lost, and `OSError`.
    """
    entries = _index_entries(path, size)
    place = bisect_right(entries, offset, key=attrgetter("first_offset")) - 1
    start = entries[place] if place >= 0 else IndexEntry(first_offset, 0, 0)
    with open(path, "rb") as file:
        for _, batch, data in scan_batches(file, start.position, size, start.first_offset):
            if offset < batch.end_offset and not batch.lost:
                return timestamps(data, batch)[offset - batch.first_offset]
    raise SegmentError(size, f"offset {offset} is not there")


def _index_entries(path: Path, size: int) -> list[IndexEntry]:
    """The index entries of the first `size` bytes of a segment.  Raises `OSError`."""
    return [entry for entry in decode_index(path.with_suffix(INDEX_SUFFIX).read_bytes()) if entry.position < size]


def _search_from(path: Path, segment: Segment, entry: IndexEntry, timestamp: int) -> int:
    with open(path, "rb") as file:
        for _, batch, data in scan_batches(file, entry.position, segment.size, entry.first_offset):
            for offset, received in enumerate(timestamps(data, batch), batch.first_offset):
                if received >= timestamp:
                    return offset
    return segment.end_offset
