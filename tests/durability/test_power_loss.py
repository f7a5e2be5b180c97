"""After a power loss at any moment, acknowledged messages are there and nothing else is served.

`make power-loss` is a longer run of the same.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from random import Random

import pytest
from disk.fixtures import directory  # noqa: F401 - a fixture
from disk.image import Disk
from disk.layer import CREATE, MKDIR, RENAME, SYNC, TRUNCATE, UNLINK, WRITE, Call, Layer
from disk.run import PowerLoss

ROOT = Path("/disk")
STATES = 80


def test_a_power_loss_loses_and_repeats_nothing_acknowledged(directory: Path) -> None:
    loss = PowerLoss(directory, "short", messages=150)
    loss.lose(loss.moments(40), whole=2)
    assert loss.judged >= 40


def test_a_power_loss_after_disk_failures_loses_nothing_acknowledged(directory: Path) -> None:
    """A failed sync may or may not have written, and the next one does not write the same bytes again."""

    def faults(layer: Layer) -> None:
        layer.fail("sync", errno.EIO, "*-wal", 9)
        layer.fail("sync", errno.EIO, "*.seg", 37)
        layer.fail("write", errno.ENOSPC, "*.seg", 41)
        layer.fail("write", errno.EIO, "*-wal", 301)
        layer.fail("sync", errno.EIO, "*/streams/*[0-9]", 7)

    loss = PowerLoss(directory, "faults", messages=120, faults=faults)
    failed = [number for number, call in enumerate(loss.calls) if call.error]
    assert failed
    behind = [number + steps for number in failed for steps in range(1, 9)]
    chosen = Random("behind").sample(behind, min(40, len(behind)))
    loss.lose(sorted({*chosen, *loss.moments(8)}), whole=1)


# -- the model of a disk ----------------------------------------------------------------------------------------------


def call(
    kind: int, path: str, inode: int = 0, offset: int = 0, data: bytes = b"", error: int = 0, to: str = ""
) -> Call:
    return Call(kind, 0, 0, error, inode, offset, str(ROOT / path), str(ROOT / to), memoryview(data))


MADE = [call(CREATE, "f", 1), call(SYNC, "."), call(WRITE, "f", 1, 0, b"a" * 1536)]


def states(directory: Path, calls: list[Call], name: str = "f") -> set[object]:
    """Every content that the file may have after a power loss; None if it may be missing."""
    disk = Disk(ROOT)
    for one in calls:
        disk.apply(one)
    found: set[object] = set()
    for number in range(STATES):
        disk.leave(directory / "left", Random(number))
        path = directory / "left" / name
        found.add(path.read_bytes() if path.exists() else None)
        shutil.rmtree(directory / "left")
    return found


def test_synced_writes_survive(directory: Path) -> None:
    assert states(directory, [*MADE, call(SYNC, "f", 1)]) == {b"a" * 1536}


def test_each_sector_that_was_not_synced_may_survive(directory: Path) -> None:
    a, zeros = b"a" * 512, bytes(512)
    found = states(directory, MADE)
    assert {b"", a, a + a, zeros + a, zeros + a + a, a + zeros + a, zeros + zeros + a, a + a + a} == found


@pytest.mark.parametrize("later", [[], [call(SYNC, "f", 1)], [call(WRITE, "f", 1, 1536, b"b"), call(SYNC, "f", 1)]])
def test_writes_before_a_failed_sync_may_be_lost_for_ever(directory: Path, later: list[Call]) -> None:
    found = states(directory, [*MADE, call(SYNC, "f", 1, error=errno.EIO), *later])
    end = b"b" if len(later) == 2 else b""
    assert {b"a" * 1536 + end, (bytes(1536) if end else b"") + end} <= found


def test_writes_repeated_after_a_failed_sync_survive_the_next_sync(directory: Path) -> None:
    failed = call(SYNC, "f", 1, error=errno.EIO)
    assert states(directory, [*MADE, failed, call(WRITE, "f", 1, 0, b"b" * 1536), call(SYNC, "f", 1)]) == {b"b" * 1536}


def test_a_truncation_may_be_lost_until_its_sync(directory: Path) -> None:
    cut = [*MADE, call(SYNC, "f", 1), call(TRUNCATE, "f", 1, 100)]
    assert states(directory, cut) == {b"a" * 1536, b"a" * 100}
    assert states(directory, [*cut, call(SYNC, "f", 1)]) == {b"a" * 100}


def test_names_may_be_lost_until_their_directory_is_synced(directory: Path) -> None:
    new = [call(MKDIR, "d"), call(CREATE, "d/f", 1), call(WRITE, "d/f", 1, 0, b"a"), call(SYNC, "d/f", 1)]
    assert states(directory, new, "d/f") == states(directory, [*new, call(SYNC, "d")], "d/f") == {None, b"a"}
    there = [*new, call(SYNC, "d"), call(SYNC, ".")]
    assert states(directory, there, "d/f") == {b"a"}
    moved = [*there, call(RENAME, "d/f", to="d/g")]
    assert states(directory, moved, "d/f") == states(directory, moved, "d/g") == {None, b"a"}
    assert states(directory, [*moved, call(SYNC, "d")], "d/g") == {b"a"}
    assert states(directory, [*there, call(UNLINK, "d/f")], "d/f") == {None, b"a"}
    assert states(directory, [*there, call(UNLINK, "d/f"), call(SYNC, "d")], "d/f") == {None}
