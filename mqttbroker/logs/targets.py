"""Where the log goes: stderr, files, syslog and the journal of systemd. The thread of a log writes to its target.

`write` of each target returns how many of the lines were lost.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

STDERR = 2
JOURNAL_SOCKET = "/run/systemd/journal/socket"
MAX_DATAGRAM = 8192  # bytes of a line to syslog, and to the journal; a longer one is cut


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


class Datagrams:
    """A socket that gets each line as a datagram: the path of a Unix socket, or host and port of a UDP one.

    It is opened again if it fails, as when the daemon behind it was started again.
    """

    def __init__(self, address: str | tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def write(self, lines: Sequence[bytes]) -> int:
        return sum(not (self._sent(line[:MAX_DATAGRAM]) or self._sent(line[:MAX_DATAGRAM])) for line in lines)

    def _sent(self, line: bytes) -> bool:
        try:
            if self._socket is None:
                self._socket = self._opened()
            self._socket.send(line)
        except OSError:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
            return False
        return True

    def _opened(self) -> socket.socket:
        if isinstance(self._address, str):
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            address: str | tuple[str, int] = self._address
        else:
            family, _, _, _, found = socket.getaddrinfo(*self._address, type=socket.SOCK_DGRAM)[0]
            opened, address = socket.socket(family, socket.SOCK_DGRAM), found  # type: ignore[assignment]
        try:
            opened.connect(address)
        except OSError:
            opened.close()
            raise
        return opened
