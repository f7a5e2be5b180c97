"""The C library's allocator: what reads and writes free is used for the next ones.

Rule: only glibc is told anything; any other allocator is left as it is.  By itself glibc gives the memory of a
large buffer back to the system when it is freed, and the next read pays for every page of it again.
"""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1  # malloc.h
M_MMAP_THRESHOLD: Final = -3

KEPT: Final = 64 << 20  # bytes of free memory at the end of the heap that stay with the process
LARGEST: Final = 32 << 20  # bytes; what is larger is mapped by itself and given back; glibc allows no more


def keep_freed_memory() -> bool:
    """Keep freed memory for what is allocated next; false where the allocator knows no such thing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, KEPT))
