"""Durable file writes.  Contents are durable after the file is synced, names after the directory is synced."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_all(fd: int, data: bytes, position: int) -> None:
    """Write all of `data` at `position`.  Raises `OSError`, after which a part of it may be written."""
    written = os.pwrite(fd, data, position)
    while written < len(data):
        written += os.pwrite(fd, data[written:], position + written)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable.  Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync(paths: Iterable[Path]) -> None:
    """Make the contents of files, and the names in directories, durable.  Raises `OSError`."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a small file atomically and durably.  Raises `OSError`."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb", buffering=0) as file:
        write_all(file.fileno(), data, 0)
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)
