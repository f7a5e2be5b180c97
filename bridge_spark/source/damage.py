"""Reading on behind damage in a stream's file, for who asked for it (`skipCorruptBatches`).

The rule kept here: as little as possible is skipped, and what is skipped is
said, by file and offsets, on the standard error of the task.  Damage is what a
checksum or the order of offsets disproves; a file that cannot be read at all is
an error for every reader.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Optional

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.log.log_check import next_batch
from bridge_spark.log.sealed import is_sealed
from bridge_spark.source.plan import Slice
from bridge_spark.source.storage import Storage, StreamError


class CorruptSegment(StreamError):
    """A batch is damaged: the one that should begin with ``offset``.

    The next one, of a sealed file the next row group, lies behind byte ``position`` of ``part``'s file and begins with
    the offset ``after`` or a later one.
    """

    def __init__(self, file: str, part: Slice, offset: int, reason: str, position: int, after: int) -> None:
        super().__init__(f"mqtt source: {file} is corrupt at offset {offset}: {reason}")
        self.part = part
        self.offset = offset
        self.position = position
        self.after = after


def past_damage(
    storage: Storage, part: Slice, rows_of: Callable[[Slice], Iterator[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice without those of damaged batches."""
    waiting = [part]
    while waiting:
        rest = waiting.pop(0)
        try:
            yield from rows_of(rest)
        except CorruptSegment as damage:
            behind = _behind(storage, damage)
            end = damage.part.end_offset if behind is None else behind.start_offset
            if end > damage.offset:
                print(f"{damage}; skipped the offsets {damage.offset} to {end - 1} (skipCorruptBatches=true)",
                      file=sys.stderr, flush=True)
            if damage.part.end_offset < rest.end_offset:
                waiting.insert(0, replace(rest, start_offset=damage.part.end_offset))
            if behind is not None:
                waiting.insert(0, behind)


def _behind(storage: Storage, damage: CorruptSegment) -> Optional[Slice]:
    """What is left of a slice behind the damage."""
    part = damage.part
    if is_sealed(part.file):
        return replace(part, start_offset=damage.after) if damage.after < part.end_offset else None
    data = storage.read(part.partition, part.file, damage.position, part.end_position - damage.position)
    following = next_batch(data, 0, damage.after, None)
    if following is None or following.first_offset >= part.end_offset:
        return None
    return replace(part, position=damage.position + following.position,
                   start_offset=max(part.start_offset, following.first_offset))
