"""Atomic replacement of files, also of those that operators edit."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class FileChanged(Exception):
    """A file has changed since it was read; the text is one line."""


class Contents(NamedTuple):
    """The bytes of a file, and the state of the file that had them."""

    data: bytes
    state: tuple[int, ...]


def read_contents(path: Path) -> Contents:
    """Read a file. Raises OSError."""
    with open(path, "rb") as file:
        state = _state(os.fstat(file.fileno()))
        return Contents(file.read(), state)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def replace_file(path: Path, parts: Iterable[bytes], durable: bool) -> str:
    """Replace a file by one of mode 0600 with these bytes; the reason why that failed, or "".

    ``durable``: the bytes are on the disk before the file has its name.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with open(handle, "wb") as file:
                file.writelines(parts)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        return error.strerror or str(error)
    return ""


def rewrite_file(path: Path, data: bytes, modes: int = 0o777, before: Contents | None = None) -> None:
    """Replace a file durably by one with the same owner and those of its permissions that are in ``modes``; a new file
    has mode 0600. A symbolic link stays, its target is replaced.

    Raises OSError, and FileChanged if the file is not as it was at ``before``.
    """
    path = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if path.exists():
                owner = path.stat()
                if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
                os.fchmod(file.fileno(), 0o600 | stat.S_IMODE(owner.st_mode) & modes)
            os.fsync(file.fileno())
        if before is not None and _state(os.stat(path)) != before.state:
            raise FileChanged(f"{path} was changed meanwhile")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
