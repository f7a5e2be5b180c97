"""The Spark driver as a process.

The moment of a kill is found by polling the files of checkpoint, staging area and table, not by time.  The same files
tell what the driver was doing when it was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

from support.paths import TESTS
from support.processes import children, command_line
from support.spark_session import python_path

from bridge_spark.source.offsets import from_json
from bridge_spark.tables.output.parquet_table import marker_file

ERRORS = ("mqttbroker ingest:", "kafka_query:")  # an error line of a driver begins with one of them
LOOK = 0.002  # seconds between polls of the files
PATIENCE = 240.0  # seconds for a moment to come
END_SECONDS = 60.0  # for the other processes of a driver to end

# The moments of a kill. The first four are inside a batch.
PLANNED, WRITING, WRITTEN, PUBLISHED, BETWEEN, STARTING = (
    "planned", "writing", "written", "published", "between batches", "starting")  # fmt: skip
INSIDE = (PLANNED, WRITING, WRITTEN, PUBLISHED)
# The victims of a kill: all processes, Python alone, the JVM alone.
ALL, PYTHON, JVM = "all", "Python", "JVM"
VICTIMS = (ALL, ALL, PYTHON, JVM)
EXECUTOR = "the executor's Python"  # its processes, without which the driver goes on


class Death(NamedTuple):
    """The end of one life: ``delay`` seconds after the ``moment`` of a batch, the one after ``skip`` others."""

    moment: str
    skip: int
    delay: float
    victim: str


def deaths(seed: str, count: int, victims: Sequence[str] = VICTIMS) -> list[Death]:
    random = Random(f"{seed}:driver")
    moments = [PLANNED, WRITING, WRITTEN, PUBLISHED] * 4 + [BETWEEN, STARTING]
    found = []
    for moment, victim in zip(dealt(random, moments, count), dealt(random, victims, count)):
        longest = {PLANNED: 0.3, WRITING: 0.3, BETWEEN: 0.05, STARTING: 6.0}.get(moment, 0.0)
        found.append(Death(moment, random.choice((0, 0, 1, 3)), random.uniform(0.0, longest), victim))
    return found


def dealt(random: Random, cards: Sequence[str], count: int) -> list[str]:
    """So many cards: all of them in a random order, and again in another one."""
    found: list[str] = []
    while len(found) < count:
        found += random.sample(cards, len(cards))
    return found[:count]


def told(counts: Mapping[str, int]) -> str:
    """A line for the summary: kills by moment."""
    inside = sum(counts[moment] for moment in INSIDE)
    moments = ", ".join(f"{counts[moment]} {moment}" for moment in (*INSIDE, BETWEEN, STARTING))
    return f"driver: {counts['kills']} kills, {inside} of them inside a batch ({moments}); {counts['late']} whose moment did not come"


class TableFiles:
    """The files of one table in ``output`` and the directories beside it."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.dead_letters = output.with_name(f"{output.name}.rejected")
        self.checkpoint = output.with_name(f"{output.name}.checkpoint")
        self.staging = output.with_name(f".{output.name}.staging")

    def started(self) -> None:
        """A driver starts now."""

    def planned(self) -> int:
        """The last batch with planned offsets; -1 if none."""
        return _highest(self.checkpoint / "offsets")

    def committed(self) -> int:
        """The last batch that the checkpoint has committed."""
        return _highest(self.checkpoint / "commits")

    def published(self, batch: int) -> bool:
        with suppress(FileNotFoundError):
            newest = json.loads(marker_file(self.output).read_bytes())
            there = all((self.output / name).exists() for name in newest["files"])
            return bool(newest["batch"] - (not there) >= batch)
        return False

    def visible(self) -> int:
        """The number of files that a reader of the table finds."""
        found = 0
        for _, directories, files in os.walk(self.output):
            directories[:] = [name for name in directories if name[0] not in "._"]
            found += sum(name.endswith(".parquet") for name in files)
        return found

    def staged(self, batch: int) -> list[str]:
        """The files of a batch in the staging area."""
        with suppress(OSError):
            return [file for place in self.staging.glob(f"{batch}-*") for _, _, files in os.walk(place) for file in files]
        return []

    def written(self, batch: int) -> bool:
        """Whether the files of a batch are written."""
        return "_SUCCESS" in self.staged(batch)

    def offsets(self, batch: int) -> dict[int, int]:
        """The end offsets of a batch, by partition; {} for batch -1."""
        if batch < 0:
            return {}
        last = (self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1]
        return from_json(json.loads(last))

    def done(self) -> dict[int, int]:
        """The next offset to read after the committed batches, by partition."""
        return self.offsets(self.committed())

    def state(self) -> str:
        """The moment at which the query was killed."""
        batch = self.planned()
        if batch <= self.committed():
            return BETWEEN
        if self.published(batch):
            return PUBLISHED
        return WRITTEN if self.written(batch) else WRITING if self.staged(batch) else PLANNED


def _highest(directory: Path) -> int:
    try:
        return max((int(name) for name in os.listdir(directory) if name.isdigit()), default=-1)
    except FileNotFoundError:
        return -1


class Driver:
    """``program`` with Python's arguments, a process per life; its output goes to ``log``."""

    def __init__(self, files: TableFiles, log: Path, program: tuple[str, ...]) -> None:
        self.files = files
        self.log = log
        self.program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._left: dict[int, str] = {}

    def start(self, config: Path, *how: str) -> None:
        command = [sys.executable, "-P", *self.program, str(config), *(how or ("--trigger", "100ms"))]
        self.files.started()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment()
            )

    @property
    def ended(self) -> int | None:
        """The exit status; None while the driver runs."""
        assert self._process is not None
        return self._process.poll()

    def last_words(self) -> str:
        """The last error line of the job."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(ERRORS)]
        return lines[-1] if lines else ""

    def wait_for(self, death: Death) -> bool:
        """Wait for the moment; false if the driver ends first or the moment does not come."""
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
        """``before``: number of files in the table when batch ``known`` was first seen."""
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
        return files.written(batch) if moment == WRITTEN else bool(files.staged(batch))

    def kill(self, victim: str) -> None:
        """Kill the victim; AssertionError if the driver's other processes do not end."""
        assert self._process is not None
        processes = family(self._process.pid)
        jvms = [pid for pid in processes if _name(pid) == "java"]
        chosen = {ALL: list(processes), PYTHON: [self._process.pid], JVM: jvms}[victim]
        for pid in chosen or processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._left.update(processes)
        assert self._wait() is not None, f"the driver still ran {END_SECONDS} s after the kill of its {victim}"

    def kill_executor(self) -> None:
        """Kill the Python processes that work for Spark's executor."""
        assert self._process is not None
        for pid in family(self._process.pid):
            if b"pyspark.daemon" in command_line(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def stop(self) -> int | None:
        """Send SIGTERM; returns the exit status, or None if the driver does not end."""
        assert self._process is not None
        self._left.update(family(self._process.pid))
        self._process.send_signal(signal.SIGTERM)
        return self._wait()

    def wait(self, seconds: float) -> int | None:
        """Wait for the driver to end; returns the exit status, or None after ``seconds``."""
        assert self._process is not None
        self._left.update(family(self._process.pid))
        return self._wait(seconds)

    def _wait(self, seconds: float = END_SECONDS) -> int | None:
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def left_behind(self, seconds: float = 0.0) -> list[int]:
        """Processes of earlier lives that still run after ``seconds``."""
        return still_there(self._left, seconds)

    def close(self) -> None:
        """Kill all processes of the driver."""
        if self._process is not None:
            if self._process.poll() is None:
                self._left.update(family(self._process.pid))
            for pid in self.left_behind():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


def environment() -> dict[str, str]:
    """The environment of a run's processes: PYTHONPATH has this package and the tested build."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [python_path()])])}


def family(pid: int) -> dict[int, str]:
    """The process and its live descendants, including those in other process groups, with their start times."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return {member: _born(member) for member in found}


def still_there(processes: Mapping[int, str], seconds: float) -> list[int]:
    """The processes of a `family` that still run after ``seconds``."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid, born in processes.items() if born and _born(pid) == born]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return left


def _born(pid: int) -> str:
    """The start time of a process, "" if it has ended; tells apart processes with the same pid."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
