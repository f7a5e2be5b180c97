"""The memory that the process may take, takes and gives back: from Linux's /proc and control groups, and from glibc.

Where a file is missing, as on other systems, a limit is unknown and the process's memory counts as 0.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from mqttbroker.config.settings import Settings
from mqttbroker.core.client.connection import MAX_DECISION_BYTES
from mqttbroker.core.memory import CONNECTION_BYTES, RETAINED_BYTES, SECURE_BYTES, WEBSOCKET_BYTES, Memory

log = logging.getLogger("mqttbroker")

AUTO_PER_CENT: Final = 60  # the rest is for copies of packets, the page cache, and the process that seals segments
RETURN_PER_CENT: Final = 75  # of ``max_memory`` taken, from which free memory is given back
RETURN_INTERVAL: Final = 0.5  # seconds at least between two times
RETURN_SHARE: Final = 0.05  # of the time at most; allocations wait for it
INTERVAL: Final = 0.25  # seconds between two looks at the memory of the process; each takes 10 µs
LEAST_PART: Final = 67_108_864  # bytes, the least that `limits.max_memory` may be
NEAR_INTERVAL: Final = 0.02  # the same while half of ``max_memory`` or more is used

# Memory of entries in tables of limited length, in bytes.
BAN_BYTES: Final = 400
REMEMBERED_BYTES: Final = 200
PRODUCER_BYTES: Final = 1250  # beside its window, of one bit for each number

UNLIMITED: Final = 1 << 60  # bytes; control groups of version 1 have a number near 2**63 for "no limit"

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes of the machine's memory, or of the control group's limit if that is less; None if neither is known."""
    found = [_machine_memory(proc), *_cgroup_limits(proc, cgroups)]
    known = [size for size in found if size is not None and 0 < size < UNLIMITED]
    return min(known, default=None)


def _machine_memory(proc: Path) -> int | None:
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_limits(proc: Path, cgroups: Path) -> list[int | None]:
    """The limits of the process's control group and of all above it, for versions 1 and 2."""
    limits: list[int | None] = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ["memory.limit_in_bytes"]
        else:
            continue
        # Inside a container the path may be that of the host, while the mount begins at the container's group.
        path = PurePosixPath(group.lstrip("/"))
        limits += [_number(root / folder / name) for folder in (path, *path.parents) for name in names]
    return limits


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


class ProcessMemory:
    """The memory of a process, by default of this one. Pages of files do not count: the kernel takes them back when it
    needs them."""

    def __init__(self, pid: int | str = "self") -> None:
        self._page = os.sysconf("SC_PAGE_SIZE")
        try:
            self._file: int | None = os.open(PROC / str(pid) / "statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    def resident(self) -> int:
        """Bytes of anonymous memory in RAM; 0 if unknown, or if the process has ended."""
        if self._file is None:
            return 0
        try:
            fields = os.pread(self._file, 256, 0).split()
        except ProcessLookupError:
            return 0
        return (int(fields[1]) - int(fields[2])) * self._page

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ProcessesMemory:
    """The memory of processes that come and go."""

    def __init__(self) -> None:
        self._known: dict[int, ProcessMemory] = {}

    def resident(self, pids: Sequence[int]) -> dict[int, int]:
        """`ProcessMemory.resident` of each."""
        for pid in self._known.keys() - set(pids):
            self._known.pop(pid).close()
        for pid in pids:
            if pid not in self._known:
                self._known[pid] = ProcessMemory(pid)
        return {pid: self._known[pid].resident() for pid in pids}


def give_back() -> float:
    """Return free memory of glibc's heap to the system: some milliseconds per GB. Returns the seconds that it took."""
    began = time.monotonic()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass  # another C library
    return time.monotonic() - began


def memory_bytes(setting: int | str | None) -> int:
    """``limits.max_memory`` in bytes; 0 = unlimited."""
    if setting is None:
        return 0
    if isinstance(setting, int):
        return setting
    available = available_memory()
    per_cent = AUTO_PER_CENT if setting == "auto" else int(setting.rstrip("%"))
    return 0 if available is None else available * per_cent // 100


def divided_memory(setting: int | str | None, processes: int) -> int | str | None:
    """``limits.max_memory`` of one of ``processes`` on a machine: a share of the machine's memory is divided among them.

    A size in bytes is that of each process. No part is less than `LEAST_PART`.
    """
    if not isinstance(setting, str):
        return setting
    total = memory_bytes(setting)
    return max(LEAST_PART, total // processes) if total else None


class MemoryWatch:
    """Tells `Memory` how much the process and its connection workers take.

    It has glibc give free memory back before that memory leads to refusals.
    """

    def __init__(
        self,
        memory: Memory,
        process: ProcessMemory,
        base: int,
        of_workers: Callable[[], int] = lambda: 0,
        unapplied: Callable[[], int] = lambda: 0,
    ) -> None:
        self._memory = memory
        self._unapplied = unapplied
        self._process = process
        self._of_workers = of_workers
        memory.base = base
        self._next_return = 0.0
        self.returning = False  # another thread gives free memory back
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look now, and again and again until `stop`."""
        near = False
        try:
            near = self.sample(loop.time())
        except Exception:
            # A defect must not end it: the limit would hold no more.
            log.exception("event=defect in=memory_watch")
        self._timer = loop.call_later(NEAR_INTERVAL if near else INTERVAL, self.start, loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def sample(self, now: float) -> bool:
        """``now`` is monotonic time in seconds; returns whether half of ``max_memory`` is used."""
        memory = self._memory
        memory.unapplied = self._unapplied()
        memory.sampled(self._process.resident() + self._of_workers())
        maximum = memory.terms.max_memory
        near = maximum > 0 and memory.resident * 100 >= maximum * RETURN_PER_CENT
        if near and now >= self._next_return and not self.returning:
            self.returning = True
            asyncio.get_running_loop().run_in_executor(None, give_back).add_done_callback(self._returned)
        return maximum > 0 and memory.used * 2 >= maximum

    def _returned(self, done: asyncio.Future[float]) -> None:
        self.returning = False
        self._next_return = done.get_loop().time() + max(RETURN_INTERVAL, done.result() / RETURN_SHARE)


def part_limits(settings: Settings) -> dict[str, int]:
    """How much memory each part may take at most, in bytes. Some limits are numbers, with the memory of each thing."""
    limits = settings.limits
    kinds = {listener.type for listener in settings.listeners}
    per_connection = CONNECTION_BYTES + (SECURE_BYTES if kinds & {"tls", "wss"} else 0)
    per_connection += WEBSOCKET_BYTES if kinds & {"ws", "wss"} else 0
    found = {
        "max_connections": limits.max_connections * per_connection,
        "max_retained_bytes": limits.max_retained_bytes + limits.max_retained_messages * RETAINED_BYTES,
        "max_pending_write_bytes": limits.max_pending_write_bytes,
        "max_unapplied_bytes": limits.max_unapplied_bytes,
        "route_cache_bytes": limits.route_cache_bytes,
        "decisions of access rules": MAX_DECISION_BYTES,
        "bans.max_entries": settings.bans.max_entries * BAN_BYTES,
        "logins.max_remembered": settings.logins.max_remembered * REMEMBERED_BYTES,
        "jwt.max_remembered_bytes": settings.jwt.max_remembered_bytes if settings.jwt.configured else 0,
        "http_callback.cache_bytes": settings.http_callback.cache_bytes if settings.http_callback.cache_ttl else 0,
        "plugin.cache_bytes": settings.plugin.cache_bytes if settings.plugin.cache_ttl else 0,
        "streams.dedup_producers": sum(
            stream.dedup_producers * (PRODUCER_BYTES + settings.producer_window // 8) for stream in settings.streams if stream.dedup
        ),
    }
    on_disk = "max_total_queued_bytes"
    names = [field.name for field in dataclasses.fields(limits) if re.fullmatch(r"max_total_\w+_bytes", field.name)]
    return found | {name: getattr(limits, name) for name in names if name != on_disk}


def memory_warning(settings: Settings) -> str:
    """One line if all parts at their limits do not fit ``max_memory``, "" otherwise or if it was not chosen."""
    maximum = memory_bytes(settings.limits.max_memory)
    found = part_limits(settings)
    if maximum == 0 or settings.limits.max_memory == "auto" or sum(found.values()) <= maximum:
        return ""
    largest = sorted(found, key=lambda name: found[name], reverse=True)[:3]
    parts = ", ".join(f"{name} {_mib(found[name])}" for name in largest)
    return (
        f"limits.max_memory: {_mib(maximum)} is less than all parts may take together, {_mib(sum(found.values()))}"
        f" ({parts}, …): requests will be refused before these limits are reached"
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
