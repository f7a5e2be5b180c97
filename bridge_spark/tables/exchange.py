"""Two names of a file system, swapped in one step.

The rule kept here: whoever looks up either name finds one or the other, never
nothing; where the system has no such call, nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2


def exchange(one: Path, other: Path) -> bool:
    """Swap what the names stand for (Linux `renameat2`, macOS `renamex_np`);
    False, and nothing done, where the system or its file system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        first, second = os.fsencode(one), os.fsencode(other)
        if hasattr(libc, "renameat2"):
            return bool(libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0)
        return bool(libc.renamex_np(first, second, _RENAME_SWAP) == 0)
    except (AttributeError, OSError):
        return False


def can_exchange(directory: Path) -> bool:
    """Whether directories below ``directory`` can be swapped, by trying it."""
    pair = [directory / f"swap-{side}-{os.getpid()}" for side in (0, 1)]
    try:
        for path in pair:
            path.mkdir(parents=True, exist_ok=True)
        return exchange(*pair)
    finally:
        for path in pair:
            path.rmdir()
