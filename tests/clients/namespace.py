"""A network of its own for the suites: loopback only, with all ports free, and no other machine in reach.

Several suites have fixed ports, and names of public brokers, which here are loopback's.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

NAMES = ("localhost", "test.mosquitto.org")
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # netdevice(7)


def run(command: Sequence[str], hosts: Path) -> int:
    """Run ``command``, which calls `prepare` first, in the namespace; ``hosts`` is written. Returns the exit status."""
    hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in NAMES), encoding="ascii")
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return subprocess.run(["unshare", *user, "--net", "--mount", *command]).returncode


def prepare(hosts: Path) -> None:
    """Start loopback, and let NAMES resolve to it.  Raises OSError or CalledProcessError outside of a namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
