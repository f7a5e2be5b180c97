"""Where the log goes: stderr and files. The thread of a log writes to its target.

`write` of each target returns how many of the lines were lost.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

STDERR = 2


class Target(Protocol):
    """A log's destination."""

    def write(self, lines: Sequence[bytes]) -> int: ...


class Stderr:
    """The file descriptor; a blocked write to `sys.stderr` would hold its lock, even at the exit of Python."""

    def write(self, lines: Sequence[bytes]) -> int:
        """Write however long it takes."""
        data = b"".join(line + b"\n" for line in lines)
        while data:
            try:
                data = data[os.write(STDERR, data) :]
            except BlockingIOError:
                select.select([], [STDERR], [])
            except OSError:
                return 0  # stderr is closed
        return 0


def stderr_is_journal() -> bool:
    """Whether stderr is connected to the journal, which reads ``<N>`` in front of a line as its priority (sd-daemon(3))."""
    try:
        status = os.fstat(STDERR)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class LogFile:
    """A file that is appended to, and that its owner alone may read. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = self._opened()

    def _opened(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def reopen(self) -> None:
        """Use the file that has the path now. Raises OSError, and the one in use stays."""
        descriptor = self._opened()
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)

    def write(self, lines: Sequence[bytes]) -> int:
        """Write all or, on a full disk, a part."""
        data = b"".join(line + b"\n" for line in lines)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return len(lines)
        return 0
