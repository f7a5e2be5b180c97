"""One segment file: what it holds, its sparse index beside it, and looking for a time in it.

The rule kept here: an index only makes things quicker.  It is never synced, so whatever it says is checked against
the batches, and a file without one is read from its beginning.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from operator import attrgetter
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from bridge_spark.log.sealed import SUFFIX, inspect, search_sealed
from bridge_spark.log.segment import (
    INDEX_ENTRY,
    INDEX_INTERVAL,
    IndexEntry,
    SegmentError,
    decode_index,
    scan,
    timestamps,
)

logger = logging.getLogger(__name__)


class Segment(NamedTuple):
    """One segment as far as it is written; `size` in bytes, times in microseconds.

    ``last_timestamp`` is the latest receipt time, whichever record has it.
    ``unsealed_size`` is what a sealed segment had before, 0 of any other.
    """

    first_offset: int
    end_offset: int
    size: int
    first_timestamp: int
    last_timestamp: int
    index_position: int  # of the last batch in the index
    index_entries: int
    unsealed_size: int = 0

    @property
    def stem(self) -> str:
        return f"{self.first_offset:020d}"

    @property
    def sealed(self) -> bool:
        return self.unsealed_size > 0

    @property
    def file(self) -> str:
        return f"{self.stem}{SUFFIX if self.sealed else '.seg'}"


class View(NamedTuple):
    """A partition as readers may see it: every segment, the last one possibly open."""

    log_start_offset: int
    high_watermark: int
    segments: Tuple[Segment, ...]

    def describe(self, partition: int) -> Dict[str, Any]:
        """The partition's part of a manifest; times in microseconds, sizes in bytes."""
        return {
            "partition": partition,
            "log_start_offset": self.log_start_offset,
            "high_watermark": self.high_watermark,
            "segments": [
                {
                    "file": part.file,
                    "first_offset": part.first_offset,
                    "end_offset": part.end_offset,
                    "bytes": part.size,
                    "first_timestamp_us": part.first_timestamp,
                    "last_timestamp_us": part.last_timestamp,
                    "sealed": part.sealed,
                }
                for part in self.segments
            ],
        }


def empty_segment(first_offset: int) -> Segment:
    return Segment(first_offset, first_offset, 0, 0, 0, 0, 0)


def extend(
    part: Segment, first_offset: int, count: int, size: int, times: Sequence[int]
) -> Tuple[Segment, Optional[IndexEntry]]:
    """`part` after one more batch, and the batch's index entry if it gets one."""
    empty = part.size == 0
    first = times[0] if empty else part.first_timestamp
    latest = max(times)
    entry = None
    if empty or part.size - part.index_position >= INDEX_INTERVAL:
        entry = IndexEntry(first_offset, part.size, first if empty else part.last_timestamp)
    longer = Segment(
        part.first_offset,
        first_offset + count,
        part.size + size,
        first,
        latest if empty else max(latest, part.last_timestamp),
        part.index_position if entry is None else part.size,
        part.index_entries + (entry is not None),
    )
    return longer, entry


def examine(path: Path, first_offset: int, end_offset: Optional[int], thorough: bool) -> Segment:
    """What a segment file holds, up to `end_offset`; mends its index.

    Stops in front of the first batch that is not good.  Unless `thorough`,
    batches that the index covers are taken to be good (readers check each).
    """
    index_path = path.with_suffix(".idx")
    before = index_path.read_bytes() if index_path.exists() else b""
    entries = [] if thorough else decode_index(before)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        part = empty_segment(first_offset)
        usable = len(entries) > 1 and entries[0].first_offset == first_offset
        if usable and entries[-1].position < size:
            last = entries[-1]
            part = part._replace(
                end_offset=last.first_offset,
                size=last.position,
                first_timestamp=entries[0].timestamp,
                last_timestamp=last.timestamp,
                index_position=last.position,
                index_entries=len(entries),
            )
        else:
            entries = []
        resumed_at = part.size
        try:
            for _, batch, data in scan(file, part.size, size, part.end_offset):
                if end_offset is not None and batch.end_offset > end_offset:
                    break
                times = timestamps(data, batch) or [part.last_timestamp]
                part, entry = extend(part, batch.first_offset, batch.count, len(data), times)
                if entry is not None:
                    entries.append(entry)
                if batch.end_offset == end_offset:
                    break
        except SegmentError as error:
            logger.warning("event=segment_cut file=%s reason=%s", path, error)
    if part.size == resumed_at > 0:
        return examine(path, first_offset, end_offset, True)
    after = b"".join(INDEX_ENTRY.pack(*entry) for entry in entries)
    if after != before:
        index_path.write_bytes(after)
    return part


def examine_sealed(path: Path) -> Segment:
    """What a sealed segment holds; raises `SegmentError` if its footer is not good, or `OSError`."""
    found = inspect(path)
    times = found.first_timestamp, found.last_timestamp
    return Segment(found.first_offset, found.end_offset, found.size, *times, 0, 0, found.unsealed_bytes)


def search(path: Path, part: Segment, timestamp: int) -> int:
    """The first offset of a segment at or after `timestamp`, which its latest record is."""
    if part.sealed:
        return search_sealed(path, timestamp)
    try:
        index = path.with_suffix(".idx").read_bytes()
    except FileNotFoundError:
        index = b""
    entries = [entry for entry in decode_index(index) if entry.position < part.size]
    place = bisect_left(entries, timestamp, key=attrgetter("timestamp")) - 1
    if place <= 0:
        return _search_from(path, part, IndexEntry(part.first_offset, 0, 0), timestamp)
    try:
        return _search_from(path, part, entries[place], timestamp)
    except SegmentError:
        # The index is never synced and may be what is wrong.
        return _search_from(path, part, IndexEntry(part.first_offset, 0, 0), timestamp)


def _search_from(path: Path, part: Segment, entry: IndexEntry, timestamp: int) -> int:
    with open(path, "rb") as file:
        for _, batch, data in scan(file, entry.position, part.size, entry.first_offset):
            for offset, received in enumerate(timestamps(data, batch), batch.first_offset):
                if received >= timestamp:
                    return offset
    return part.end_offset
