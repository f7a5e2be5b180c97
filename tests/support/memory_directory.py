"""Where tests put their files: in memory, if there is room.

What a process wrote survives its end there as on a disk. Only a power loss differs, which `disk.image` simulates from the calls of the
process. Syncs to a disk are most of the time of the tests of stores.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MEMORY = "/dev/shm"
ROOM = 4 << 30  # bytes, of the file system and of free memory; tests keep some hundred MB at a time


def directory_in_memory(room: int = 1 << 30) -> str | None:
    """A directory in memory with ``room`` bytes at least, else None."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return None
    free = found.f_bavail * found.f_frsize
    runs_programs = not found.f_flag & os.ST_NOEXEC
    return MEMORY if min(free, available_memory()) >= room and runs_programs and os.access(MEMORY, os.W_OK) else None


def available_memory() -> int:
    """The bytes that programs can get without swapping; 0 if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def use_memory() -> None:
    """Make temporary files of this process and of those that it starts in memory, unless TMPDIR is set."""
    if "TMPDIR" not in os.environ and (directory := directory_in_memory(ROOM)):
        os.environ["TMPDIR"] = tempfile.tempdir = directory
