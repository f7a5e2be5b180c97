"""Whether a file has other contents than before."""

from __future__ import annotations

from pathlib import Path


def file_version(path: Path) -> tuple[int, int, int] | None:
    """Changes with the contents of a file; None if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
