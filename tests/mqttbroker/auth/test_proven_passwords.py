"""Passwords that are remembered: the records, the file, the key, and files that others could have made."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqttbroker.auth import proven_passwords
from mqttbroker.auth.proven_passwords import (
    FILE,
    KEY_BYTES,
    MAGIC,
    PROOF_BYTES,
    RECORD_BYTES,
    KeyFileError,
    ProvenPasswords,
    find_key_file,
    is_in_memory,
    read_key,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a tmpfs is needed for the key")


@pytest.fixture
def data_dir(path_on_disk: Path) -> Iterator[Path]:
    yield path_on_disk
    find_key_file(path_on_disk).unlink(missing_ok=True)


def run(action: Callable[[ProvenPasswords], None], data_dir: Path, capacity: int = 100) -> None:
    """One life of a broker."""

    async def live() -> None:
        proven = ProvenPasswords(capacity)
        proven.load(data_dir, None, asyncio.get_running_loop())
        action(proven)
        proven.stop()

    asyncio.run(live())


def test_a_password_is_proven_for_its_user_and_line_only() -> None:
    proven = ProvenPasswords(10)
    proven.add("alice", "$hash", b"secret")
    assert proven.has("alice", "$hash", b"secret")
    for user, line, password in (
        ("alice", "$hash", b"no"),
        ("alice", "$other", b"secret"),
        ("bob", "$hash", b"secret"),
        ("alic", "e$hash", b"secret"),
    ):
        assert not proven.has(user, line, password)
    proven.forget("alice", "$hash")
    assert not proven.has("alice", "$hash", b"secret")


def test_a_new_password_replaces_that_of_the_same_line() -> None:
    proven = ProvenPasswords(10)
    proven.add("alice", "$hash", b"one")
    proven.add("alice", "$hash", b"two")
    assert len(proven) == 1 and proven.has("alice", "$hash", b"two") and not proven.has("alice", "$hash", b"one")


def test_the_one_used_longest_ago_is_forgotten() -> None:
    proven = ProvenPasswords(2)
    for user in ("a", "b"):
        proven.add(user, "$hash", b"x")
    assert proven.has("a", "$hash", b"x")
    proven.add("c", "$hash", b"x")
    assert [proven.has(user, "$hash", b"x") for user in "abc"] == [True, False, True]


def test_a_capacity_of_zero_remembers_nothing(data_dir: Path) -> None:
    run(lambda proven: proven.add("alice", "$hash", b"x"), data_dir, 0)
    assert not list(data_dir.iterdir())


def test_passwords_are_remembered_after_a_restart(data_dir: Path) -> None:
    run(lambda proven: [proven.add(f"user {n}", "$hash", b"%d" % n) for n in range(50)] and None, data_dir)
    found: list[bool] = []

    def check(proven: ProvenPasswords) -> None:
        found.extend(proven.has(f"user {n}", "$hash", b"%d" % n) for n in range(50))
        found.append(not proven.has("user 1", "$changed", b"1") and not proven.has("user 1", "$hash", b"2"))

    run(check, data_dir)
    assert found == [True] * 51
    file = data_dir / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_size == len(MAGIC) + PROOF_BYTES + 50 * RECORD_BYTES
    assert b"user" not in file.read_bytes()[len(MAGIC) :]
    key = find_key_file(data_dir)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and is_in_memory(key) and not is_in_memory(data_dir)
    assert key.read_bytes() not in file.read_bytes()


async def test_changes_are_written_soon(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven_passwords, "WRITE_INTERVAL", 0.01)
    proven, other = ProvenPasswords(10), ProvenPasswords(10)
    proven.load(data_dir, None, asyncio.get_running_loop())
    proven.add("alice", "$hash", b"x")
    while not (data_dir / FILE).exists():
        await asyncio.sleep(0.01)
    other.load(data_dir, None, asyncio.get_running_loop())  # as after SIGKILL
    assert other.has("alice", "$hash", b"x")
    proven.stop()
    other.stop()


@pytest.mark.parametrize("how", ["key", "flip", "cut", "junk", "link"])
def test_a_file_of_another_key_or_a_changed_one_is_worthless(data_dir: Path, how: str) -> None:
    run(lambda proven: proven.add("alice", "$hash", b"x"), data_dir)
    file = data_dir / FILE
    data = file.read_bytes()
    if how == "key":
        find_key_file(data_dir).unlink()
    elif how == "link":
        file.rename(data_dir / "elsewhere")
        file.symlink_to(data_dir / "elsewhere")
    else:
        file.write_bytes({"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-10], "junk": b"junk"}[how])
    lengths: list[int] = []
    run(lambda proven: lengths.append(len(proven)), data_dir)
    assert lengths == [0]


@pytest.mark.parametrize("how", ["link", "fifo", "wide", "linked", "short", "disk"])
def test_a_key_file_that_others_could_know_is_refused(data_dir: Path, how: str) -> None:
    path = find_key_file(data_dir)
    other = path.with_suffix(".other")
    try:
        if how == "link":
            other.write_bytes(b"k" * KEY_BYTES)
            path.symlink_to(other)
        elif how == "fifo":
            os.mkfifo(path, 0o600)
        elif how == "disk":
            path = data_dir / "key"
        else:
            path.write_bytes(b"k" * (KEY_BYTES - (how == "short")))
            path.chmod(0o644 if how == "wide" else 0o600)
            if how == "linked":
                os.link(path, other)
        with pytest.raises(KeyFileError):
            read_key(path, data_dir)
    finally:
        other.unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_key_file_of_another_user_is_refused(data_dir: Path) -> None:
    path = find_key_file(data_dir)
    path.write_bytes(b"k" * KEY_BYTES)
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(KeyFileError, match="not a file of this user alone|Permission denied"):
        read_key(path, data_dir)


def test_without_a_tmpfs_there_is_no_key(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven_passwords, "is_in_memory", lambda path: False)
    with pytest.raises(KeyFileError, match=r"set logins\.key_file"):
        find_key_file(data_dir)
    monkeypatch.undo()
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{data_dir}:/dev/shm")  # on a disk
    assert find_key_file(data_dir).parent == Path("/dev/shm")


def test_a_disk_that_takes_nothing_is_logged_once(data_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fill(proven: ProvenPasswords) -> None:
        (data_dir / FILE).mkdir()
        for number in range(3):
            proven.add("alice", "$hash", b"%d" % number)
            proven._start_write()

    run(fill, data_dir)
    assert caplog.text.count("event=proven_passwords_not_written") == 1
    assert [path.name for path in data_dir.iterdir()] == [FILE]


def test_a_defect_of_its_thread_is_logged(data_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven_passwords, "replace_file", lambda *arguments, **options: 1 // 0)
    run(lambda proven: proven.add("alice", "$hash", b"secret"), data_dir)
    assert "event=defect in=proven_passwords" in caplog.text and "ZeroDivisionError" in caplog.text
