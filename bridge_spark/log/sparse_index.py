"""The sparse index of a segment: offset, file position and time of about one batch in 64 KiB.

The index file is never synced. Readers check every entry against the batches.
"""

from __future__ import annotations

from struct import Struct
from typing import List, NamedTuple

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


def decode_index(data: bytes) -> List[IndexEntry]:
    """The entries before the first invalid one."""
    entries: List[IndexEntry] = []
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
