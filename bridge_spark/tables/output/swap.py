"""Atomic swap of two directories.

A lookup of either name finds one of the two directories at any moment.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2


def swap(one: Path, other: Path) -> bool:
    """Swap two directories by Linux `renameat2` or macOS `renamex_np`.

    Returns False, without a change, if the system or the file system does not support it.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        first, second = os.fsencode(one), os.fsencode(other)
        if hasattr(libc, "renameat2"):
            return bool(libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0)
        return bool(libc.renamex_np(first, second, _RENAME_SWAP) == 0)
    except (AttributeError, OSError):
        return False


def can_swap(directory: Path) -> bool:
    """Whether directories below ``directory`` can be swapped, by trying it."""
    pair = [directory / f"swap-{side}-{os.getpid()}" for side in (0, 1)]
    try:
        for path in pair:
            path.mkdir(parents=True, exist_ok=True)
        return swap(*pair)
    finally:
        for path in pair:
            path.rmdir()
