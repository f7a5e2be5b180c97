"""After a power loss at any moment, acknowledged messages are there and nothing else is served.

`make power-loss` is a longer run of the same.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from disk.fixtures import directory, layer  # noqa: F401 - fixtures
from disk.image import Disk
from disk.layer import CREATE, MKDIR, RENAME, SYNC, TRUNCATE, UNLINK, WRITE, Call, Layer, calls
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
        layer.fail("sync", errno.EIO, "*/log/*", 31)
        layer.fail("write", errno.EIO, "*/log/*.log", 57)
        layer.fail("write", errno.EIO, "*/log/*.new", 5000)
        layer.fail("sync", errno.EIO, "*-wal", 3)
        layer.fail("sync", errno.EIO, "*.seg", 7)
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


def call(kind: int, path: str, inode: int = 0, offset: int = 0, data: bytes = b"", error: int = 0, to: str = "") -> Call:
    return Call(kind, 0, 0, error, inode, offset, str(ROOT / path), str(ROOT / to), memoryview(data))


MADE = [call(CREATE, "f", 1), call(SYNC, "."), call(WRITE, "f", 1, 0, b"a" * 1536)]


def disk_after(made: list[Call]) -> Disk:
    disk = Disk(ROOT)
    for one in made:
        disk.apply(one)
    return disk


def left_by(disk: Disk, directory: Path) -> Iterator[Path]:
    """Directories as a power loss may leave them; each is removed before the next."""
    for number in range(STATES):
        disk.leave(directory / "left", Random(number))
        yield directory / "left"
        shutil.rmtree(directory / "left")


def states(directory: Path, made: list[Call], name: str = "f") -> set[object]:
    """Every content that the file may have after a power loss; None if it may be missing."""
    paths = (left / name for left in left_by(disk_after(made), directory))
    return {path.read_bytes() if path.exists() else None for path in paths}


def names(disk: Disk, directory: Path) -> set[tuple[str, ...]]:
    """Every set of names that the directory may have after a power loss."""
    return {tuple(sorted(path.name for path in left.iterdir())) for left in left_by(disk, directory)}


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


def test_of_preallocated_space_each_sector_is_old_or_new_until_the_sync(directory: Path) -> None:
    zeros, a, b = bytes(512), b"a" * 512, b"b" * 512
    space = [call(CREATE, "f", 1), call(SYNC, "."), call(TRUNCATE, "f", 1, 1536)]
    assert states(directory, space) == {b"", zeros * 3}
    one = [*space, call(SYNC, "f", 1), call(WRITE, "f", 1, 0, a + a)]
    assert states(directory, one) == {first + second + zeros for first in (zeros, a) for second in (zeros, a)}
    two = [*one, call(SYNC, "f", 1), call(WRITE, "f", 1, 512, b + b)]
    assert states(directory, two) == {a + first + second for first in (a, b) for second in (zeros, b)}
    assert states(directory, [*two, call(SYNC, "f", 1)]) == {a + b + b}


def test_what_is_written_behind_a_sync_may_survive_in_any_order(directory: Path) -> None:
    zeros, a, b, c = bytes(512), b"a" * 512, b"b" * 512, b"c" * 512
    space = [call(CREATE, "f", 1), call(SYNC, "."), call(WRITE, "f", 1, 0, zeros * 3), call(SYNC, "f", 1)]
    synced = [*space, call(WRITE, "f", 1, 0, a), call(SYNC, "f", 1)]
    later = [*synced, call(WRITE, "f", 1, 512, b), call(WRITE, "f", 1, 1024, c)]
    assert states(directory, later) == {a + second + third for second in (zeros, b) for third in (zeros, c)}


def test_a_file_that_is_used_again_under_another_name_is_under_one_of_its_names(directory: Path) -> None:
    old = [call(CREATE, "1.log", 1), call(WRITE, "1.log", 1, 0, b"old"), call(SYNC, "1.log", 1), call(SYNC, ".")]
    used = [call(RENAME, "1.log", to="next.new"), call(WRITE, "next.new", 1, 0, b"new"), call(SYNC, "next.new", 1)]
    moved = [*old, *used, call(RENAME, "next.new", to="9.log")]
    assert names(disk_after(moved), directory) == {("1.log",), ("next.new",), ("9.log",)}
    assert states(directory, moved, "9.log") == {None, b"new"}
    assert names(disk_after([*moved, call(SYNC, ".")]), directory) == {("9.log",)}


def test_a_renamed_file_replaces_another_whole_or_not_at_all(directory: Path) -> None:
    old = [call(CREATE, "f", 1), call(WRITE, "f", 1, 0, b"old"), call(SYNC, "f", 1), call(SYNC, ".")]
    fresh = [call(CREATE, "f.new", 2), call(WRITE, "f.new", 2, 0, b"new"), call(SYNC, "f.new", 2)]
    assert states(directory, [*old, *fresh, call(RENAME, "f.new", to="f")]) == {b"old", b"new"}
    assert states(directory, [*old, *fresh, call(RENAME, "f.new", to="f"), call(SYNC, ".")]) == {b"new"}
    without_sync = [*old, *fresh[:2], call(RENAME, "f.new", to="f"), call(SYNC, ".")]
    assert states(directory, without_sync) >= {b"", b"new"}


def test_a_name_that_is_given_again_has_none_of_the_files_or_one(directory: Path) -> None:
    first = [call(CREATE, "f", 1), call(WRITE, "f", 1, 0, b"1"), call(SYNC, "f", 1), call(UNLINK, "f")]
    second = [call(CREATE, "f", 2), call(WRITE, "f", 2, 0, b"2"), call(SYNC, "f", 2)]
    assert states(directory, first + second) == {None, b"1", b"2"}


EACH_CALL = """
import ctypes, os, sys
folder = sys.argv[1] + "/d"
os.mkdir(folder)
file = os.open(folder + "/f", os.O_RDWR | os.O_CREAT)
os.posix_fallocate(file, 0, 8192)
os.posix_fallocate(file, 4096, 4096)
os.pwrite(file, b"a" * 5000, 1000)
os.pwritev(file, [b"b" * 100, b"c" * 200], 7000)
os.write(file, b"d" * 10)
libc = ctypes.CDLL(None)
def fallocate(mode, offset, length):
    return libc.fallocate(file, mode, ctypes.c_long(offset), ctypes.c_long(length))
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE = 1, 2, 8
assert fallocate(KEEP_SIZE, 8192, 8192) == 0 and os.fstat(file).st_size == 8192
assert fallocate(KEEP_SIZE | PUNCH_HOLE, 2000, 100) == 0
assert fallocate(COLLAPSE_RANGE, 4096, 4096) != 0
os.fdatasync(file)
os.truncate(folder + "/f", 8000)
os.rename(folder + "/f", folder + "/g")
os.fsync(os.open(folder, os.O_RDONLY))
os.close(os.open(folder + "/h", os.O_WRONLY | os.O_CREAT))
os.unlink(folder + "/h")
"""


def test_the_layer_records_what_a_process_does(directory: Path, layer: Layer) -> None:
    subprocess.run([sys.executable, "-c", EACH_CALL, str(layer.root)], env={**os.environ, **layer.env}, check=True)
    disk = Disk(layer.root)
    recorded = list(calls(layer.log))
    for one in recorded:
        disk.apply(one)
    disk.expect(layer.root)
    assert {one.kind for one in recorded} == {CREATE, MKDIR, RENAME, SYNC, TRUNCATE, UNLINK, WRITE}
    # The directory below the root was synced, its own name was not.
    assert names(disk, directory) == {(), ("d",)}


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
