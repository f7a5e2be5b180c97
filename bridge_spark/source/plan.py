"""Divides an offset range into Spark tasks.

A small range is one task, because each task costs Spark a fixed time.  A large range is divided into tasks of similar
work, preferably at batch boundaries.  Offsets are in order within a task.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from bridge_spark.log.predicates import Predicate
from bridge_spark.log.sparse_index import IndexEntry
from bridge_spark.source.offsets import Offsets
from bridge_spark.source.storage import Manifest, Segment, Storage, segment_times, segments_between

MIN_TASK_BYTES = 48 * 1024 * 1024  # a quarter of a second; a task costs Spark some 10 ms of CPU
PARSED_TASK_BYTES = 8 * 1024 * 1024  # the same if payloads are parsed
MAX_TASK_BYTES = 64 * 1024 * 1024
USUAL_TASKS = 8
ROW_BYTES = 128
"""The least work of a row, in bytes: compressed rows of sealed segments are smaller than the work they cost."""


@dataclass(frozen=True)
class Slice:
    """The rows ``start_offset`` to ``end_offset``, exclusive, of one segment file.

    They lie between the bytes ``position`` and ``end_position``, which are boundaries of batches or row groups.
    ``file_size`` bytes of the file are committed.
    """

    partition: int
    file: str
    position: int
    end_position: int
    start_offset: int
    end_offset: int
    file_size: int


class Planner:
    """Plans the reads of one stream.

    Remembers the byte positions of earlier ends, so a query at the end of the stream needs no index.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._ends: dict[int, tuple[int, str, int]] = {}
        self._indexes: dict[tuple[int, Segment], list[IndexEntry]] = {}

    def plan(
        self,
        manifest: Manifest,
        start: Offsets,
        end: Offsets,
        min_tasks: int | None = None,
        max_rows: int | None = None,
        predicate: Predicate = Predicate(),
        min_task_bytes: int = MIN_TASK_BYTES,
    ) -> list[list[Slice]]:
        """The slices of each task.

        ``manifest`` holds the whole range.  There are at least ``min_tasks`` tasks if there are as many rows; no task
        has more than ``max_rows`` rows.  Segments that cannot hold a row that matches ``predicate`` are left out.  A
        task has at least ``min_task_bytes`` of work unless the range is smaller.
        """
        self._indexes.clear()
        found = list(self._segments(manifest, start, end, predicate))
        works = [_work(segment, last - first) for _, segment, first, last in found]
        target = min(max(sum(works) / USUAL_TASKS, min_task_bytes), MAX_TASK_BYTES)
        room = target * 1.25
        pieces = [max(1, round(work / target)) for work in works]
        if min_tasks is not None and sum(works) < room * min_tasks:
            works = [float(last - first) for _, _, first, last in found]
            room = max(1.0, sum(works) / min_tasks)
            pieces = [ceil(work / room) for work in works]
        tasks: list[list[Slice]] = []
        work_left = rows_left = 0.0
        for (partition, segment, first, last), work, count in zip(found, works, pieces):
            cuts = self._cuts(partition, segment, first, last, count, max_rows)
            for begin, until in zip(cuts, cuts[1:]):
                rows, share = until - begin, work * (until - begin) / (last - first)
                if not tasks or share > work_left * 1.001 or (max_rows is not None and rows > rows_left):
                    tasks.append([])
                    work_left, rows_left = room, float(max_rows or 0)
                tasks[-1].append(self._slice(partition, segment, begin, until))
                work_left, rows_left = work_left - share, rows_left - rows
        return tasks

    def _segments(self, manifest: Manifest, start: Offsets, end: Offsets, predicate: Predicate) -> Iterator[tuple[int, Segment, int, int]]:
        """The segments that may hold matching rows: partition, segment, first and end offset to read."""
        for partition in filter(predicate.partition.contains, sorted(end)):
            state = manifest[partition]
            low, high = predicate.offsets(start[partition], end[partition])
            for segment, first, last in segments_between(self._storage, partition, state, low, high):
                if not predicate.may_match((first, last - 1)):
                    continue
                if not predicate.timestamp.unbounded:
                    times = segment_times(self._storage, partition, segment)
                    if not predicate.timestamp.may_match(*times):
                        continue
                yield partition, segment, first, last

    def _cuts(self, partition: int, segment: Segment, first: int, last: int, pieces: int, max_rows: int | None) -> list[int]:
        """The offsets, from ``first`` to ``last``, that divide the segment into pieces."""
        rows = last - first
        if max_rows is not None and rows > pieces * max_rows:
            pieces = ceil(rows / max_rows)
        cuts = [first]
        for number in range(1, min(pieces, rows)):
            cut = first + rows * number // pieces
            if max_rows is None:
                cut = self._near(partition, segment, cut, rows // (pieces * 4))
            if cut > cuts[-1]:
                cuts.append(cut)
        return [*cuts, last]

    def _near(self, partition: int, segment: Segment, offset: int, distance: int) -> int:
        """The begin of a batch at most ``distance`` before ``offset``, else ``offset``."""
        entries = self._index(partition, segment)
        number = bisect_right(entries, offset, key=lambda entry: entry.first_offset)
        begin = entries[number - 1].first_offset if number else 0
        return begin if offset - begin <= distance else offset

    def _slice(self, partition: int, segment: Segment, start: int, end: int) -> Slice:
        return Slice(
            partition,
            segment.file,
            self._position(partition, segment, start),
            self._end_position(partition, segment, end),
            start,
            end,
            segment.size,
        )

    def _position(self, partition: int, segment: Segment, offset: int) -> int:
        if offset == segment.first_offset:
            return 0
        if (known := self._ends.get(partition)) is not None and known[:2] == (offset, segment.file):
            return known[2]
        entries = self._index(partition, segment)
        number = bisect_right(entries, offset, key=lambda entry: entry.first_offset)
        return entries[number - 1].position if number else 0

    def _end_position(self, partition: int, segment: Segment, offset: int) -> int:
        if offset == segment.end_offset:
            self._ends[partition] = (offset, segment.file, segment.size)
            return segment.size
        entries = self._index(partition, segment)
        number = bisect_left(entries, offset, key=lambda entry: entry.first_offset)
        return entries[number].position if number < len(entries) else segment.size

    def _index(self, partition: int, segment: Segment) -> list[IndexEntry]:
        key = (partition, segment)
        if key not in self._indexes:
            self._indexes[key] = self._storage.index(partition, segment)
        return self._indexes[key]


def _work(segment: Segment, rows: int) -> float:
    """The cost of reading ``rows`` rows of the segment, in bytes."""
    return rows * max(segment.size / (segment.end_offset - segment.first_offset), ROW_BYTES)
