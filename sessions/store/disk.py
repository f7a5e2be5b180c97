"""Syncing files and directories, and recognising a full disk. A new name is durable once its directory is synced."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path


def sync_file(path: Path) -> None:
    """Return when a file is on disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Return when the directory's names are on disk. Raises `OSError`."""
    sync_file(path)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, durably. Raises `OSError`."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync_directory(directory.parent)


def prove_room(directory: Path, size: int) -> None:
    """Raise `OSError` unless `size` more bytes can be written and synced there."""
    path = directory / "room"
    try:
        with open(path, "wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def is_full(error: Exception | None) -> bool:
    """Whether an error means that the disk is full or a quota is used up."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
