"""Network namespaces on one bridge, whose links can be cut and made slow. Linux, as root.

Packets between two places go to a fixed Ethernet address, so a link is cut by an address that nobody has: packets vanish,
and no connection ends. A slow link goes through a TAP device, where a thread holds each frame back; not every kernel has netem.
This process is at `Network.here`, and its links to all places always work.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES = 65_536
NOBODY = "02:c0:ff:ff:ff:ff"
DELAYED = "02:c0:ff:ff:ff:01"
DELAY = 0.1  # seconds
JITTER = 0.03  # seconds that a packet is sooner or later; none overtakes another
NAME = "chaos-{}-{}"  # of a namespace: the process id of its maker, and its place


class NetworkMissing(Exception):
    """Namespaces cannot be had here; the text says why."""


class Network:
    """A namespace for each of ``places``. Starts with ``with``, at whose end it is removed with all processes in it."""

    def __init__(self, places: Sequence[str]) -> None:
        number = os.getpid()
        self.places = list(places)
        self._bridge, self._tap = f"ch{number}b", f"ch{number}t"
        self._prefix = f"198.18.{number % 256}"  # of addresses for tests of networks
        self.here = f"{self._prefix}.1"
        self._delay: _Delay | None = None

    def __enter__(self) -> Network:
        if os.geteuid() != 0:
            raise NetworkMissing("network namespaces need root")
        if shutil.which("ip") is None:
            raise NetworkMissing("network namespaces need the command ip")
        _remove_leftovers()
        try:
            self._make()
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, subprocess.CalledProcessError)):
                reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
                raise NetworkMissing(f"network namespaces are not permitted here: {reason}") from None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.here}/24", "dev", self._bridge)
        self._delay = _Delay(self._tap, {self._address_bytes(place): self._hardware(place) for place in self.places})
        # It keeps its own address: frames to an address of a bridge's device are for the bridge.
        _ip("link", "set", self._tap, "master", self._bridge, "up")
        _ip("link", "set", self._bridge, "up")
        for place in self.places:
            name, outer = self._name(place), f"{self._bridge}{self._number(place)}"
            _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                outer,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "address",
                self._hardware(place),
                "netns",
                name,
            )
            _ip("link", "set", outer, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address(place)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        self.heal()
        self._delay.start()

    def close(self) -> None:
        """Remove everything; to be called again does nothing."""
        for place in self.places:
            _remove(self._name(place))
            _remove_device(f"{self._bridge}{self._number(place)}")
        if self._delay is not None:
            self._delay.close()
            self._delay = None
        _remove_device(self._bridge)

    # --- places ---------------------------------------------------------------------------------------------------

    def address(self, place: str) -> str:
        return f"{self._prefix}.{self._number(place)}"

    def command(self, place: str) -> tuple[str, ...]:
        """The words that have a command run in a place; its process has the command's own process id."""
        return "ip", "netns", "exec", self._name(place)

    def _number(self, place: str) -> int:
        return self.places.index(place) + 2

    def _name(self, place: str) -> str:
        return NAME.format(os.getpid(), place)

    def _hardware(self, place: str) -> str:
        return f"02:c0:00:00:00:{self._number(place):02x}"

    def _address_bytes(self, place: str) -> bytes:
        return bytes(map(int, self.address(place).split(".")))

    # --- links ----------------------------------------------------------------------------------------------------

    def cut(self, one: str, others: Iterable[str] = ()) -> None:
        """Drop all packets between ``one`` and the others, by default all other places."""
        for other in list(others) or self._others(one):
            self._direct(one, [other], NOBODY)
            self._direct(other, [one], NOBODY)

    def slow(self, place: str) -> None:
        """Delay what a place sends to all others."""
        self._direct(place, self._others(place), DELAYED)

    def heal(self) -> None:
        """Have all links work again."""
        for place in self.places:
            self._direct(place, self._others(place), None)

    def _others(self, place: str) -> list[str]:
        return [other for other in self.places if other != place]

    def _direct(self, place: str, others: Iterable[str], hardware: str | None) -> None:
        """Have a place send its packets for the others to this Ethernet address, by default to their own ones."""
        lines = [
            f"neigh replace {self.address(other)} lladdr {hardware or self._hardware(other)} dev eth0 nud permanent" for other in others
        ]
        _ip("-n", self._name(place), "-batch", "-", lines="\n".join(lines) + "\n")


class _Delay:
    """The TAP device ``name``: a thread sends each frame on after `DELAY`, to the Ethernet address of its IPv4 destination."""

    def __init__(self, name: str, hardware: dict[bytes, str]) -> None:
        self._hardware = {address: _bytes(text) for address, text in hardware.items()}
        self._descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._end, self._told = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            fcntl.ioctl(self._descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        os.close(self._told)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._end)
        os.close(self._descriptor)  # removes the device

    def _run(self) -> None:
        to, sender = _bytes(DELAYED), _bytes(DELAYED)
        held: deque[tuple[float, bytes]] = deque()
        last = 0.0
        while True:
            wait = max(0.0, held[0][0] - time.monotonic()) if held else None
            ready, _, _ = select.select([self._descriptor, self._end], [], [], wait)
            if self._end in ready:
                return
            now = time.monotonic()
            if ready:
                frame = os.read(self._descriptor, FRAME_BYTES)
                found = self._hardware.get(frame[30:34]) if frame[:6] == to and frame[12:14] == b"\x08\x00" else None
                if found is not None:
                    last = max(last, now + DELAY + random.uniform(-JITTER, JITTER))
                    held.append((last, found + sender + frame[12:]))
            while held and held[0][0] <= now:
                with suppress(OSError):  # as a full link, it drops
                    os.write(self._descriptor, held.popleft()[1])


def _bytes(hardware: str) -> bytes:
    return bytes.fromhex(hardware.replace(":", ""))


def _ip(*arguments: str, lines: str | None = None) -> str:
    command = ["ip", *arguments]
    return subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout


def _remove(name: str) -> None:
    """Kill the processes in a namespace, and delete it."""
    if not Path("/run/netns", name).exists():
        return
    with suppress(subprocess.CalledProcessError):
        for pid in _ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", name)


def _remove_device(name: str) -> None:
    if Path("/sys/class/net", name).exists():
        with suppress(subprocess.CalledProcessError):  # it goes with its namespace meanwhile
            _ip("link", "del", name)


def _remove_leftovers() -> None:
    """Remove what makers have left that were killed."""
    for path in Path("/run/netns").glob(NAME.format("*", "*")):
        match = re.match(NAME.format(r"(\d+)", ""), path.name)
        if match is not None and not Path("/proc", match[1]).exists():
            _remove(path.name)
            for device in Path("/sys/class/net").glob(f"ch{match[1]}b*"):
                _remove_device(device.name)
