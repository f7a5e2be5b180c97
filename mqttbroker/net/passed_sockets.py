"""Listening sockets that this process did not open: systemd passes them (sd_listen_fds(3)), and so does a broker that
restarts itself. A connection that comes meanwhile waits in the socket's queue.

A listener takes the sockets that have its address, whatever their names are. Sockets that a broker has bound have the
name `OWN`, so that the next broker knows them from the sockets of a systemd socket unit, which belong to systemd.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OWN = "bound-by-mqttbroker"
FIRST = 3  # the number of the first descriptor that is passed
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class ListeningSocket(NamedTuple):
    """A bound socket. ``name`` is `OWN`, or what systemd calls it."""

    sock: socket.socket
    name: str = OWN

    @property
    def address(self) -> str:
        """The address as in the log."""
        found = self.sock.getsockname()
        return f"{found[0]}:{found[1]}" if isinstance(found, tuple) else str(found)


class PassedSockets:
    """The sockets that were passed to this process and that no listener has taken yet.

    The variables are removed from ``environ``, because they are not for child processes. Raises ValueError if they, or
    a socket, are not usable.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        process, count, names, _ = (environ.pop(name, "") for name in ("LISTEN_PID", *_VARIABLES[1:]))
        self._sockets: list[ListeningSocket] = []
        if not count or process != str(os.getpid()):
            return
        if not count.isdecimal() or int(count) < 1:
            raise ValueError(f"LISTEN_FDS: must be a number from 1 on, got {count!r}")
        each = names.split(":") if names else []
        for number in range(int(count)):
            name = each[number] if number < len(each) else "unknown"
            self._sockets.append(_listening(FIRST + number, name))

    def __len__(self) -> int:
        return len(self._sockets)

    def take(self, family: int, address: Any) -> ListeningSocket | None:
        """The socket that is bound to this address of an IPv4 or IPv6 socket."""
        for found in self._sockets:
            bound = found.sock.getsockname()
            if found.sock.family == family and (bound[:2], bound[3:]) == (address[:2], address[3:]):
                return self._taken(found)
        return None

    def take_everywhere(self, port: int) -> list[ListeningSocket]:
        """The sockets that are bound to this port on all addresses: of IPv4, of IPv6, or of both."""
        wanted = (("0.0.0.0", port), ("::", port))
        tcp = [found for found in self._sockets if found.sock.family in (socket.AF_INET, socket.AF_INET6)]
        return [self._taken(found) for found in tcp if found.sock.getsockname()[:2] in wanted]

    def take_unix(self, path: Path) -> ListeningSocket | None:
        """The socket of this file, if the file is still there."""
        for found in self._sockets:
            if found.sock.family == socket.AF_UNIX and found.sock.getsockname() == str(path) and path.is_socket():
                return self._taken(found)
        return None

    def _taken(self, found: ListeningSocket) -> ListeningSocket:
        self._sockets.remove(found)
        return found

    def close(self) -> list[str]:
        """Close the sockets that no listener has taken, and return their addresses.

        Raises ValueError for a socket of systemd: it would stay open there, and connections to it would get no answer.
        """
        rest, self._sockets = self._sockets, []
        for one in rest:
            if one.name != OWN:
                raise ValueError(f"LISTEN_FDS: no listener has the address {one.address} of the socket {one.name!r}")
        addresses = [one.address for one in rest]
        for one in rest:
            one.sock.close()
        return addresses


def _listening(descriptor: int, name: str) -> ListeningSocket:
    where = f"LISTEN_FDS: descriptor {descriptor}, {name!r}"
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise ValueError(f"{where}, is no socket")
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from None
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    listens = sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family not in families or not listens:
        raise ValueError(f"{where}, is no stream socket that listens")
    sock.setblocking(False)
    return ListeningSocket(sock, name)


def pass_on(sockets: Sequence[ListeningSocket], environ: MutableMapping[str, str]) -> None:
    """Prepare this process for ``exec``: the sockets get the descriptors, and ``environ`` the variables, that
    `PassedSockets` expects. Files that had these descriptors are closed."""
    if not sockets:
        return
    last = FIRST + len(sockets)
    copies = [fcntl.fcntl(one.sock, fcntl.F_DUPFD_CLOEXEC, last) for one in sockets]
    for number, copy in enumerate(copies):
        os.dup2(copy, FIRST + number, inheritable=True)
    environ["LISTEN_PID"] = str(os.getpid())
    environ["LISTEN_FDS"] = str(len(sockets))
    environ["LISTEN_FDNAMES"] = ":".join(one.name for one in sockets)
