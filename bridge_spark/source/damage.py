"""Skips damaged batches (`skipCorruptBatches`).

Skips as few offsets as possible and prints each skipped range, with its file, to the task's standard error.  Damage is
a wrong checksum or an offset out of order; a file that cannot be read is an error with or without the option.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.log.check import next_batch
from bridge_spark.log.segment_names import is_sealed
from bridge_spark.source.plan import Slice
from bridge_spark.source.storage import Storage, StreamError


class CorruptSegment(StreamError):
    """The batch at ``offset`` is damaged.

    The next batch (or row group of a sealed file) lies after byte ``position`` of ``part``'s file and begins with
    offset ``after`` or later.
    """

    def __init__(self, file: str, part: Slice, offset: int, reason: str, position: int, after: int) -> None:
        super().__init__(f"mqtt source: {file} is corrupt at offset {offset}: {reason}")
        self.part = part
        self.offset = offset
        self.position = position
        self.after = after


def skip_damage(storage: Storage, part: Slice, rows_of: Callable[[Slice], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, without those of damaged batches."""
    waiting = [part]
    while waiting:
        rest = waiting.pop(0)
        try:
            yield from rows_of(rest)
        except CorruptSegment as damage:
            rest_of_slice = _after_damage(storage, damage)
            end = damage.part.end_offset if rest_of_slice is None else rest_of_slice.start_offset
            if end > damage.offset:
                print(f"{damage}; skipped the offsets {damage.offset} to {end - 1} (skipCorruptBatches=true)", file=sys.stderr, flush=True)
            if damage.part.end_offset < rest.end_offset:
                waiting.insert(0, replace(rest, start_offset=damage.part.end_offset))
            if rest_of_slice is not None:
                waiting.insert(0, rest_of_slice)


def _after_damage(storage: Storage, damage: CorruptSegment) -> Slice | None:
    """The rest of the slice after the damage; None if nothing is left."""
    part = damage.part
    if is_sealed(part.file):
        return replace(part, start_offset=damage.after) if damage.after < part.end_offset else None
    data = storage.read(part.partition, part.file, damage.position, part.end_position - damage.position)
    following = next_batch(data, 0, damage.after, None)
    if following is None or following.first_offset >= part.end_offset:
        return None
    return replace(part, position=damage.position + following.position, start_offset=max(part.start_offset, following.first_offset))
