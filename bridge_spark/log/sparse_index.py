"""The sparse index of a segment: offset, file position and time of about one batch in 64 KiB.

The index file is never synced. Readers check every entry against the batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import NamedTuple

INDEX_ENTRY = Struct("<QQq")
INDEX_INTERVAL = 64 * 1024


class IndexEntry(NamedTuple):
    """The batch of `first_offset` begins at `position` of the segment.

    Every earlier record was received at or before `timestamp`, in microseconds.
    In the first entry of a segment `timestamp` is the first record's own.
    """

    first_offset: int
    position: int
    timestamp: int


def decode_index(data: bytes) -> list[IndexEntry]:
    """The entries before the first invalid one."""
    entries: list[IndexEntry] = []
    whole = len(data) - len(data) % INDEX_ENTRY.size
    for values in INDEX_ENTRY.iter_unpack(data[:whole]):
        entry = IndexEntry(*values)
        if entries:
            last = entries[-1]
            if entry.first_offset <= last.first_offset or entry.position - last.position < INDEX_INTERVAL:
                break
        elif entry.position != 0:
            break
        entries.append(entry)
    return entries


def last_entry(path: Path, count: int, is_before: Callable[[IndexEntry], bool]) -> IndexEntry | None:
    """The last entry of an index file that satisfies `is_before`, among the first `count`; None if none does.

    `is_before` must hold for all entries up to some entry, and for none after it. Reads O(log n) entries; the caller
    must check the entry against its batch. Raises `OSError`.
    """
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        low, high = 0, min(os.fstat(descriptor).st_size // INDEX_ENTRY.size, count)
        found: IndexEntry | None = None
        while low < high:
            middle = (low + high) // 2
            data = os.pread(descriptor, INDEX_ENTRY.size, middle * INDEX_ENTRY.size)
            if len(data) < INDEX_ENTRY.size:
                high = middle
                continue
            entry = IndexEntry(*INDEX_ENTRY.unpack(data))
            if is_before(entry):
                low, found = middle + 1, entry
            else:
                high = middle
    return found
