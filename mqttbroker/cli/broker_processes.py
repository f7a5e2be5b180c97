"""The processes of a broker on this machine, and their CPU time. Linux only."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PARTS = ("mqttbroker: worker", "mqttbroker: shard")  # titles of processes whose parent is the broker
_LISTEN = "0A"


class UnknownCpu(Exception):
    """The CPU time cannot be had; one line."""


class BrokerCpu:
    """The processes of a broker: the one given, and those that it had started then."""

    def __init__(self, pid: int) -> None:
        self.pids = process_tree(pid)
        self.name = title(pid)
        self.seconds()

    def seconds(self) -> float:
        """Their CPU time so far, user and system. Raises UnknownCpu."""
        try:
            # The clock of a process, as clock_getcpuclockid(3) computes it.
            return sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in self.pids) / 1e9
        except OSError:
            raise UnknownCpu("a process of the broker has ended") from None


def broker_of(connection: socket.socket) -> BrokerCpu:
    """The broker at the other end of a connected socket. Raises UnknownCpu."""
    if sys.platform != "linux":
        raise UnknownCpu("needs Linux")
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int | None = struct.unpack("3i", credentials)[0]
    else:
        here, there = connection.getsockname(), connection.getpeername()
        if here[0] != there[0]:
            raise UnknownCpu(f"{there[0]} is not this machine")
        inode = _inode(there[1], here[1])
        pid = None if inode is None else _owner(inode)
    if not pid:
        raise UnknownCpu("its process is in a container, or is another user's: give --broker-pid, or run this as that user")
    parents = dict(_parents())
    while title(pid).startswith(_PARTS) and parents.get(pid):
        pid = parents[pid]
    return BrokerCpu(pid)


def process_tree(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    parents = dict(_parents())
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def lock_holder(path: Path) -> int | None:
    """The process that has locked a file with flock(2); None if none has, or it is in another container. Raises OSError."""
    inode = path.stat().st_ino
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        words = line.split()
        if words[1] == "FLOCK" and int(words[5].rpartition(":")[2]) == inode and int(words[4]) > 0:
            return int(words[4])
    return None


def _inode(local_port: int, remote_port: int) -> str | None:
    """The inode of the socket with these ports, or of one that listens on the first; None if there is none."""
    listening = None
    for name in ("tcp", "tcp6"):
        try:
            rows = [line.split() for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]]
        except OSError:
            continue
        for row in rows:
            local, remote, state, inode = row[1], row[2], row[3], row[9]
            if int(local.rpartition(":")[2], 16) != local_port:
                continue
            if int(remote.rpartition(":")[2], 16) == remote_port and inode != "0":
                return inode
            if state == _LISTEN:
                listening = inode
    return listening


def _owner(inode: str) -> int | None:
    """The process that has this socket open; None if that cannot be seen."""
    target = f"socket:[{inode}]"
    for pid in _pids():
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(entry.path) == target:
                    return pid
        except OSError:
            continue  # it has ended, or is another user's
    return None


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _parents() -> Iterator[tuple[int, int]]:
    """Each process and its parent."""
    for pid in _pids():
        try:
            # The name, in parentheses, may have spaces.
            yield pid, int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[1])
        except OSError:
            continue


def title(pid: int) -> str:
    """The name of a process, or the title that it has given itself; "" if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        return words[0] if len(words) == 1 else Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
