"""Tunes glibc's allocator to keep freed memory for the next reads and writes.

By default glibc returns the memory of a large buffer to the system when it is freed, and the next read pays for a page
fault per page. Other allocators are left as they are.
"""

from __future__ import annotations

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1  # malloc.h
M_MMAP_THRESHOLD: Final = -3

KEPT: Final = 64 << 20  # bytes of free memory at the end of the heap that are not returned
LARGEST: Final = 32 << 20  # bytes of an allocation on the heap, glibc's maximum; larger ones are mapped and returned


def keep_freed_memory() -> bool:
    """Keep freed memory for later allocations; False if the allocator has no such option."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, KEPT))
