"""After a power loss or a crash at any call of a store, every reported commit is there, and no refused one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from disk import committing
from disk.fixtures import directory  # noqa: F401 - a fixture
from disk.image import Disk
from disk.layer import WRITE, Layer, calls

from mqttbroker.admin.data.repair import check, repair

MOMENTS = 60

Faults = list[tuple[str, int, str, int]]
# The calls that fail: kind, error, path below the data directory, and every how many. Segments of the log are written
# under the name with which they were opened.
FAULTS: dict[str, Faults] = {
    "none": [],
    "sync of the log": [("sync", errno.EIO, "log/*", 13)],
    "write of the log": [("write", errno.EIO, "log/*", 13)],
    "log full": [("write", errno.ENOSPC, "log/*", 31)],
    "directory of the log": [("sync", errno.EIO, "log", 3)],
    "renaming of segments": [("rename", errno.EIO, "log/*", 3)],
    "opening of segments": [("open", errno.EMFILE, "log/*", 3)],
    "removal of segments": [("unlink", errno.EIO, "log/*", 2)],
    "sync of the write-ahead log": [("sync", errno.EIO, "*-wal", 3)],
    "write of the write-ahead log": [("write", errno.EIO, "*-wal", 199)],
    "sync of the database": [("sync", errno.EIO, "*.db", 5)],
    "sync of the streams": [("sync", errno.EIO, "*.seg", 23)],
    "write of the streams": [("write", errno.ENOSPC, "*.seg", 11)],
    "everything now and then": [("sync", errno.EIO, "*", 41), ("write", errno.EIO, "*", 199)],
}


Judge = Callable[[Path, committing.Expected], None]


def recovers(left: Path, wanted: committing.Expected) -> None:
    committing.check(left / "data", wanted)


class Recorded:
    """The calls of a process that committed below ``directory``, with failures of its disk."""

    def __init__(self, directory: Path, faults: Faults, runs: int = 2, commits: int = 120) -> None:
        self.directory = directory
        self.root = directory / "disk"
        self.root.mkdir()
        layer = Layer(self.root, directory, record=True)
        for kind, code, pattern, every in faults:
            layer.fail(kind, code, f"{self.root}/data/{pattern}", every)
        path = os.pathsep.join(sys.path)
        done = subprocess.run(
            [sys.executable, committing.__file__, str(self.root), str(runs), str(commits)],
            env={**os.environ, **layer.env, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        self.calls = list(calls(layer.log))
        disk = Disk(self.root)
        for call in self.calls:
            disk.apply(call)
        disk.expect(self.root)
        shutil.rmtree(self.root)

    def lose_power(self, count: int, seed: str, judge: Judge | None = None, ways: Sequence[str] = ("killed", "power lost")) -> None:
        """At so many moments, judge what a power loss may leave, and what a kill leaves."""
        numbers = range(len(self.calls) + 1)
        moments = sorted(Random(seed).sample(numbers, min(count, len(numbers))))
        disk, applied, report = Disk(self.root), 0, b""
        for number in moments:
            for call in self.calls[applied:number]:
                disk.apply(call)
                if call.kind == WRITE and call.path.endswith(committing.REPORTED):
                    report += bytes(call.data)
            applied = number
            for how in ways:
                left = self.directory / "left"
                if how == "killed":
                    disk.leave_everything(left)
                else:
                    disk.leave(left, Random(f"{seed}:{number}"))
                self._check(number, how, report, judge or recovers)

    def _check(self, number: int, how: str, report: bytes, judge: Judge) -> None:
        left = self.directory / "left"
        try:
            judge(left, committing.expected(report))
        except Exception as error:
            last = [f"{call.path} {call.kind} {call.error or ''}" for call in self.calls[max(0, number - 4) : number]]
            raise AssertionError(f"{how} before call {number} of {len(self.calls)}, after {last}: {error}") from error
        shutil.rmtree(left)


SLOW = pytest.mark.slow(reason="one fault of the disk after the other")
QUICK = ("none", "everything now and then")


@pytest.mark.parametrize("fault", [*QUICK, *(pytest.param(name, marks=SLOW) for name in FAULTS if name not in QUICK)])
def test_a_power_loss_or_a_kill_takes_no_reported_commit(directory: Path, fault: str) -> None:
    Recorded(directory, FAULTS[fault]).lose_power(MOMENTS, fault)


@pytest.mark.slow(reason="a start and a stop for every five commits")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("every", [5, 7, 11])
@pytest.mark.parametrize("pattern", ["*-wal", "*.db", "log/*", "log", "*.seg", "*"])
def test_failed_syncs_of_starts_and_stops_take_no_reported_commit(directory: Path, pattern: str, every: int) -> None:
    faults = [("sync", errno.EIO, pattern, every if pattern != "*" else 4 * every + 1)]
    Recorded(directory, faults, runs=15, commits=5).lose_power(1000, f"{pattern}:{every}", ways=["power lost"])


def zero_first_page(data: Path, rng: Random) -> None:
    database = data / committing.DATABASE
    if database.exists():
        with open(database, "r+b") as file:
            file.write(bytes(4096))


def overwrite_pages(data: Path, rng: Random) -> None:
    database = data / committing.DATABASE
    pages = database.stat().st_size // 4096 if database.exists() else 0
    for _ in range(min(pages - 1, rng.choice((1, 2, 5)))):
        with open(database, "r+b") as file:
            file.seek(rng.randrange(1, pages) * 4096)
            file.write(rng.choice((bytes(4096), rng.randbytes(4096))))


@pytest.mark.parametrize("how", ["killed", "power lost"])
@pytest.mark.parametrize("damage", [zero_first_page, overwrite_pages])
def test_a_repair_of_the_database_keeps_the_streams(directory: Path, how: str, damage: Callable[[Path, Random], None]) -> None:
    """The commit log has what a power loss takes from a stream."""

    def judge(left: Path, wanted: committing.Expected) -> None:
        damage(left / "data", Random(str(wanted.done[-1:])))
        repair(left / "data", "the test has damaged it")
        committing.check_repaired(left / "data", wanted)
        assert check(left / "data").problems == []

    Recorded(directory, [], commits=80).lose_power(20, "repair", judge, [how])


def test_a_repair_of_a_damaged_log_ends_with_a_store_that_starts(directory: Path) -> None:
    def judge(left: Path, wanted: committing.Expected) -> None:
        rng = Random(str(wanted.done[-1:]))
        found = sorted((left / "data" / "log").glob("*.log")) if (left / "data" / "log").exists() else []
        if not found:
            return
        damaged = rng.choice(found)
        data = bytearray(damaged.read_bytes())
        at, length = rng.randrange(len(data)), rng.choice((1, 100, 600))
        data[at : at + length] = rng.randbytes(length)[: len(data) - at]
        damaged.write_bytes(data)
        repair(left / "data")
        store, logs = committing.open_store(left / "data")
        store.recover()
        store.stop()
        logs.close()
        assert check(left / "data").problems == []

    Recorded(directory, [], commits=80).lose_power(20, "damaged log", judge)


@pytest.mark.slow(reason="every moment of longer runs")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_power_loss_at_every_moment(directory: Path, fault: str, seed: int) -> None:
    Recorded(directory, FAULTS[fault], runs=3, commits=300).lose_power(10**6, f"{fault}:{seed}")
