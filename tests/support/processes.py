"""Processes as Linux has them in /proc. One that ends meanwhile has no children, and no command."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process, or one of its threads, has started and that still run."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split())
    return found


def command_line(pid: int) -> bytes:
    """The arguments of a process, each with a zero byte behind it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
