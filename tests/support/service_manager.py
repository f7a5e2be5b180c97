"""A service manager as systemd is one: it passes listening sockets, receives notifications and keeps descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Runs Python with the rest of the arguments, after what sd_listen_fds(3) expects: descriptors from 3 on, and variables.
_LAUNCH = """
import fcntl, os, sys
passed, names, *command = sys.argv[1:]
copies = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 100) for one in passed.split(",") if one]
for number, copy in enumerate(copies):
    os.dup2(copy, 3 + number)
    os.close(copy)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(copies)), LISTEN_FDNAMES=names)
os.execv(sys.executable, [sys.executable, "-P", *command])
"""


def program_with(sockets: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    """The program of a `BrokerProcess` that is passed these sockets, each with its name."""
    descriptors = ",".join(str(sock.fileno()) for _, sock in sockets)
    return ("-c", _LAUNCH, descriptors, ":".join(name for name, _ in sockets), "-m", "mqttbroker")


class NotifySocket:
    """The socket of NOTIFY_SOCKET. ``stored`` has the sockets that the service wants to have kept, by name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.stored: list[tuple[str, socket.socket]] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(20)

    def receive(self) -> dict[str, str]:
        """The next message that is neither a sign of life nor about stored descriptors."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 253)
            message = dict(line.split("=", 1) for line in data.decode().split("\n"))
            if "FDSTORE" in message:
                self.stored += [(message["FDNAME"], socket.socket(fileno=one)) for one in descriptors]
            elif "FDSTOREREMOVE" in message:
                self._remove(message["FDNAME"])
            elif "WATCHDOG" not in message:
                return message

    def _remove(self, name: str) -> None:
        for known, sock in self.stored:
            if known == name:
                sock.close()
        self.stored = [one for one in self.stored if one[0] != name]

    def close(self) -> None:
        for _, sock in self.stored:
            sock.close()
        self.socket.close()


def listening(address: tuple[str, int] | Path, family: int = socket.AF_INET) -> socket.socket:
    """A socket as a socket unit opens it."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, Path) else family, socket.SOCK_STREAM)
    if isinstance(address, Path):
        sock.bind(str(address))
        os.chmod(address, 0o666)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    sock.listen(4096)
    return sock
