"""Which bytes a task reads.

The rule kept here: as few tasks as keep all cores busy.  A small range is one
task (each further one costs Spark about 26 ms), a large one is cut at batches
into pieces of similar size, and offsets stay in order within a task.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Optional

from bridge_spark.offsets import Offsets
from bridge_spark.segment import IndexEntry
from bridge_spark.storage import Manifest, Segment, Storage

MIN_TASK_BYTES = 4 * 1024 * 1024
MAX_TASK_BYTES = 32 * 1024 * 1024
USUAL_TASKS = 8


@dataclass(frozen=True)
class Slice:
    """The rows ``start_offset`` up to ``end_offset``, exclusive, of one segment
    file: they lie between the bytes ``position`` and ``end_position``, which
    are boundaries of batches."""

    partition: int
    file: str
    position: int
    end_position: int
    start_offset: int
    end_offset: int


class Planner:
    """Plans reads of one stream.

    Remembers where committed ends lay, so that a stream that reads along needs
    no index.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._ends: dict[int, tuple[int, str, int]] = {}
        self._indexes: dict[tuple[int, Segment], list[IndexEntry]] = {}

    def plan(self, manifest: Manifest, start: Offsets, end: Offsets, min_tasks: Optional[int]) -> list[list[Slice]]:
        """The slices that hold the range, by task.  The range is kept in full
        by ``manifest``."""
        self._indexes.clear()
        slices = [
            self._slice(partition, segment, max(start[partition], segment.first_offset),
                        min(end[partition], segment.end_offset))
            for partition in sorted(end)
            for segment in manifest[partition].segments
            if segment.first_offset < end[partition] and start[partition] < segment.end_offset
            and start[partition] < end[partition]
        ]
        total = sum(part.end_position - part.position for part in slices)
        target = min(max(total // USUAL_TASKS, MIN_TASK_BYTES), MAX_TASK_BYTES)
        room = target + target // 2
        if min_tasks is not None and total // min_tasks < room:
            target = room = max(1, total // min_tasks)
        segments = {(partition, segment.file): segment
                    for partition, state in manifest.items() for segment in state.segments}
        pieces = [piece for part in slices
                  for piece in self._cut(part, segments[part.partition, part.file], target, room)]
        return _pack(pieces, room)

    def _slice(self, partition: int, segment: Segment, start: int, end: int) -> Slice:
        return Slice(partition, segment.file, self._position(partition, segment, start),
                     self._end_position(partition, segment, end), start, end)

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

    def _cut(self, part: Slice, segment: Segment, target: int, room: int) -> list[Slice]:
        if part.end_position - part.position <= room:
            return [part]
        pieces: list[Slice] = []
        for entry in self._index(part.partition, segment):
            if not part.start_offset < entry.first_offset < part.end_offset:
                continue
            if entry.position - part.position >= target:
                pieces.append(replace(part, end_position=entry.position, end_offset=entry.first_offset))
                part = replace(part, position=entry.position, start_offset=entry.first_offset)
        return [*pieces, part]


def _pack(pieces: list[Slice], room: int) -> list[list[Slice]]:
    tasks: list[list[Slice]] = []
    left = 0
    for piece in pieces:
        size = piece.end_position - piece.position
        if not tasks or size > left:
            tasks.append([])
            left = room
        tasks[-1].append(piece)
        left -= size
    return tasks
