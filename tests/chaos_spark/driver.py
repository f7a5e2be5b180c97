"""The Spark driver as a process, and how far its query has come, as the files say.

Rule: it is killed where its files say that it is: a moment is waited for by looking at checkpoint, staging area and
table, never by a guess of how long Spark takes; what it was doing when it died is read from the same files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple, Optional

from support.paths import TESTS
from support.spark_session import python_path

LOOK = 0.002  # seconds between looks at the files
PATIENCE = 240.0  # seconds in which a moment must come
END_SECONDS = 60.0  # in which what is left of a driver must end

# What a kill waits for. The first four lie inside a batch.
PLANNED, WRITING, WRITTEN, PUBLISHED, BETWEEN, STARTING = (
    "planned", "writing", "written", "published", "between batches", "starting")  # fmt: skip
INSIDE = (PLANNED, WRITING, WRITTEN, PUBLISHED)
# Who is killed: all processes, Python alone, the JVM alone.
ALL, PYTHON, JVM = "all", "Python", "JVM"


class Death(NamedTuple):
    """How one life of the driver ends: at the ``moment`` of the batch after ``skip`` more, ``delay`` seconds later."""

    moment: str
    skip: int
    delay: float
    victim: str


def deaths(seed: str, count: int) -> list[Death]:
    random = Random(f"{seed}:driver")
    moments = [PLANNED, WRITING, WRITTEN, PUBLISHED] * 4 + [BETWEEN, STARTING]
    dealt: list[str] = []
    while len(dealt) < count:
        dealt += random.sample(moments, len(moments))
    found = []
    for moment in dealt[:count]:
        longest = {PLANNED: 0.3, WRITING: 0.3, BETWEEN: 0.05, STARTING: 6.0}.get(moment, 0.0)
        victim = random.choice((ALL, ALL, PYTHON, JVM))
        found.append(Death(moment, random.choice((0, 0, 1, 3)), random.uniform(0.0, longest), victim))
    return found


def told(counts: Mapping[str, int]) -> str:
    """How drivers died, in a line for the summary."""
    inside = sum(counts[moment] for moment in INSIDE)
    moments = ", ".join(f"{counts[moment]} {moment}" for moment in (*INSIDE, BETWEEN, STARTING))
    return (f"driver: {counts['kills']} kills, {inside} of them inside a batch ({moments}); "
            f"{counts['late']} whose moment did not come")


class TableFiles:
    """The files of one table: ``output``, and what lies beside it by default."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.dead_letters = output.with_name(f"{output.name}.rejected")
        self.checkpoint = output.with_name(f"{output.name}.checkpoint")
        self.staging = output.with_name(f".{output.name}.staging")

    def planned(self) -> int:
        """The last batch whose offsets are chosen; -1 if there is none."""
        return _highest(self.checkpoint / "offsets")

    def committed(self) -> int:
        """The last batch that Spark holds to be done."""
        return _highest(self.checkpoint / "commits")

    def published(self, batch: int) -> bool:
        with suppress(FileNotFoundError):
            newest = max(self.output.glob("batches=*"), key=lambda place: int(place.name.partition("=")[2]), default=None)
            return newest is not None and bool(json.loads((newest / "_batches.json").read_bytes())["batch"] >= batch)
        return False

    def visible(self) -> int:
        """How many files a reader of the table finds."""
        found = 0
        for _, directories, files in os.walk(self.output):
            directories[:] = [name for name in directories if name[0] not in "._"]
            found += sum(name.endswith(".parquet") for name in files)
        return found

    def staged(self, batch: int) -> list[str]:
        """The files of the batch that is being written; [] before the first."""
        with suppress(OSError):
            return [file for place in self.staging.glob(f"{batch}-*") for _, _, files in os.walk(place) for file in files]
        return []

    def offsets(self, batch: int) -> dict[int, int]:
        """Where the batch ends, by partition; {} for batch -1."""
        if batch < 0:
            return {}
        last = (self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1]
        return {int(partition): int(offset) for partition, offset in json.loads(last).items()}

    def done(self) -> dict[int, int]:
        """The next offset to read, by partition, once the batches that are committed count."""
        return self.offsets(self.committed())

    def state(self) -> str:
        """What the query was doing when it was killed."""
        batch = self.planned()
        if batch <= self.committed():
            return BETWEEN
        if self.published(batch):
            return PUBLISHED
        staged = self.staged(batch)
        return WRITTEN if "_SUCCESS" in staged else WRITING if staged else PLANNED


def _highest(directory: Path) -> int:
    try:
        return max((int(name) for name in os.listdir(directory) if name.isdigit()), default=-1)
    except FileNotFoundError:
        return -1


class Driver:
    """``mqttbroker ingest`` with a configuration, started anew for every life; its words go to ``log``."""

    def __init__(self, files: TableFiles, log: Path, program: tuple[str, ...] = ("-m", "mqttbroker")) -> None:
        self.files = files
        self.log = log
        self.program = program
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._left: dict[int, str] = {}

    def start(self, config: Path, *how: str) -> None:
        command = [sys.executable, "-P", *self.program, "ingest", str(config), *(how or ("--trigger", "100ms"))]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment()
            )

    @property
    def ended(self) -> Optional[int]:
        """The exit status of a driver that has ended by itself."""
        assert self._process is not None
        return self._process.poll()

    def last_words(self) -> str:
        """The line that the job itself ended with."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("mqttbroker ingest:")]
        return lines[-1] if lines else ""

    def wait_for(self, death: Death) -> bool:
        """Until the moment has come; false if the driver ends first, or it does not come."""
        deadline = time.monotonic() + PATIENCE
        if death.moment == STARTING:
            time.sleep(death.delay)
            return self.ended is None
        first = self.files.committed() + 1 + death.skip
        known, before = -1, 0
        while not self._has_come(death.moment, first, known, before):
            if death.moment == PUBLISHED and known != (batch := self.files.planned()):
                known, before = batch, self.files.visible()
            if self.ended is not None or time.monotonic() > deadline:
                return False
            time.sleep(LOOK)
        time.sleep(death.delay)
        return self.ended is None

    def _has_come(self, moment: str, first: int, known: int, before: int) -> bool:
        """``before``: files of the table when the batch ``known`` was seen to be planned."""
        files = self.files
        if moment == BETWEEN:
            return files.committed() >= first
        batch = files.planned()
        if batch < first or batch <= files.committed():
            return False
        if moment == PLANNED:
            return True
        if moment == PUBLISHED:
            return batch == known and files.visible() > before
        staged = files.staged(batch)
        return "_SUCCESS" in staged if moment == WRITTEN else bool(staged)

    def kill(self, victim: str) -> None:
        """SIGKILL for the victim; AssertionError if the rest of the driver does not end over it."""
        assert self._process is not None
        processes = family(self._process.pid)
        jvms = [pid for pid in processes if _name(pid) == "java"]
        chosen = {ALL: list(processes), PYTHON: [self._process.pid], JVM: jvms}[victim]
        for pid in chosen or processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._left.update(processes)
        assert self._wait() is not None, f"the driver still ran {END_SECONDS} s after the kill of its {victim}"

    def stop(self) -> Optional[int]:
        """SIGTERM; the exit status, None if it does not end over it."""
        assert self._process is not None
        self._left.update(family(self._process.pid))
        self._process.send_signal(signal.SIGTERM)
        return self._wait()

    def wait(self, seconds: float) -> Optional[int]:
        """Until it ends by itself; the exit status, None if it does not."""
        assert self._process is not None
        self._left.update(family(self._process.pid))
        return self._wait(seconds)

    def _wait(self, seconds: float = END_SECONDS) -> Optional[int]:
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def left_behind(self, seconds: float = 0.0) -> list[int]:
        """Processes of earlier lives that still run, after so long a time for them to end."""
        return still_there(self._left, seconds)

    def close(self) -> None:
        """End whatever is left of it."""
        if self._process is not None:
            if self._process.poll() is None:
                self._left.update(family(self._process.pid))
            for pid in self.left_behind():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


def environment() -> dict[str, str]:
    """Of the processes of a run: they find this package, and the build that is tested."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [python_path()])])}


def family(pid: int) -> dict[int, str]:
    """The process and every live one that it started, Spark's workers in their own groups too, and when each began."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += [int(child) for child in children.read_text().split()]
    return {member: _born(member) for member in found}


def still_there(processes: Mapping[int, str], seconds: float) -> list[int]:
    """Which of a `family` still run, after so long a time for them to end."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid, born in processes.items() if born and _born(pid) == born]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return left


def _born(pid: int) -> str:
    """When the process began, "" once it has ended: a number may be another process's later."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
