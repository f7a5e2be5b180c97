"""A layer between a process and its disk, preloaded into a broker process (``preload.c``).

It records the calls of the process below one directory in their order, and makes calls fail on request.
"""

from __future__ import annotations

import atexit
import errno
import functools
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

SOURCE = Path(__file__).with_name("preload.c")
CREATE, TRUNCATE, WRITE, SYNC, RENAME, UNLINK, MKDIR = range(1, 8)
_RECORD = Struct("=QQQqiiIIII")


class Call(NamedTuple):
    """One call; times in ns of CLOCK_MONOTONIC. ``error`` is for SYNC only; ``offset`` of a TRUNCATE is the size."""

    kind: int
    began: int
    ended: int
    error: int
    inode: int
    offset: int
    path: str
    other: str
    data: memoryview


@functools.cache
def library() -> Path:
    """The compiled layer, deleted when this process ends. RuntimeError without Linux or a C compiler."""
    if sys.platform != "linux":
        raise RuntimeError("the layer is for Linux")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler")
    directory = tempfile.mkdtemp(prefix="mqttbroker-disk-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    built = Path(directory) / "preload.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O2",
        "-Wall",
        "-Werror",
        "-o",
        str(built),
        str(SOURCE),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return built


class Layer:
    """The layer of one process, for calls below ``root``. Its record and its rules are files in ``directory``."""

    def __init__(self, root: Path, directory: Path, record: bool = False) -> None:
        self.root = root
        self.log = directory / "disk.log"
        self.control = directory / "disk.control"
        self.control.touch()
        self.env = {"LD_PRELOAD": str(library()), "DISK_ROOT": str(root), "DISK_CONTROL": str(self.control)}
        if record:
            self.env["DISK_LOG"] = str(self.log)

    def fail(self, kind: str, code: int, pattern: str = "*", every: int = 1) -> None:
        """Make each ``every``-th write, sync, open, truncate, unlink or rename of a path fail with ``code``."""
        assert code in errno.errorcode
        self._write_rules([*self._rules(), f"fail {kind} {code} {every} {pattern}"])

    def end_failures(self) -> None:
        """End all failures."""
        self._write_rules([line for line in self._rules() if not line.startswith("fail")])

    def set_clock(self, seconds: float) -> None:
        """Set the wall clock of the process ahead by so much."""
        self._write_rules([*(line for line in self._rules() if not line.startswith("clock")), f"clock {seconds}"])

    def _rules(self) -> list[str]:
        return self.control.read_text().splitlines()

    def _write_rules(self, lines: list[str]) -> None:
        """Replace the file atomically, as the process may be reading it."""
        fresh = self.control.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self.control)


def calls(log: Path) -> Iterator[Call]:
    """The calls that a `Layer` recorded, without an incomplete record at the end."""
    with open(log, "rb") as file:
        everything = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at = 0
    while at + _RECORD.size <= len(everything):
        began, ended, inode, offset, kind, error, path, other, data, _ = _RECORD.unpack_from(everything, at)
        at += _RECORD.size
        if at + path + other + data > len(everything):
            return
        names = bytes(everything[at : at + path + other]).decode()
        at += path + other
        yield Call(kind, began, ended, error, inode, offset, names[:path], names[path:], everything[at : at + data])
        at += data
