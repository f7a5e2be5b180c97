"""Files that outlive a power loss: written whole, and their names on disk as well.

The rule kept here: a name counts from the sync of its directory on, contents from the sync of the file on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_all(fd: int, data: bytes, position: int) -> None:
    """Write all of `data` there; bytes of it may stand there when it raises `OSError`."""
    written = os.pwrite(fd, data, position)
    while written < len(data):
        written += os.pwrite(fd, data[written:], position + written)


def sync_directory(path: Path) -> None:
    """Put on disk which names stand in a directory.  Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync(paths: Iterable[Path]) -> None:
    """Put on disk what stands in files and which names in directories.  Raises `OSError`."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or as before."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb", buffering=0) as file:
        write_all(file.fileno(), data, 0)
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)
