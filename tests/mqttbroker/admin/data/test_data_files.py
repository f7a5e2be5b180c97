"""Permissions of the data directory, its files and backups."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.auth.passwords import hash_password
from mqttbroker.auth.proven_passwords import find_key_file

STREAM = {"streams": {"all": {"filters": ["#"]}}}


def modes(directory: Path) -> Iterator[tuple[str, int]]:
    for path in directory.rglob("*"):
        yield str(path.relative_to(directory)), stat.S_IMODE(path.lstat().st_mode)


def publish(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect("permissions", clean_start=False)
        client.publish("a", b"secret", qos=1, retain=True)


@pytest.mark.parametrize(("file_mode", "files", "directories"), [("0600", 0o600, 0o700), ("0640", 0o640, 0o750)])
def test_files_are_readable_by_the_configured_users_only(tmp_path: Path, file_mode: str, files: int, directories: int) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with BrokerProcess(data_dir=data, config={"data_mode": file_mode, **STREAM}) as broker:
        publish(broker)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "mqttbroker", "backup", str(backup), "--data-dir", str(data)],
            env={**os.environ, "MQTTBROKER_DATA_MODE": file_mode},
            check=False,
        )
        assert done.returncode == 0
        for directory in (data, backup):
            found = dict(modes(directory))
            assert "mqttbroker.db" in found and any(name.endswith(".seg") for name in found)
            for name, mode in found.items():
                wanted = directories if (directory / name).is_dir() else files
                assert mode == wanted, f"{name}: {mode:04o}"


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A process that would create files for everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_every_file_of_a_broker_is_private(start_broker: Callable[..., BrokerProcess], tmp_path: Path, open_umask: None) -> None:
    data, audit, sock = tmp_path / "data", tmp_path / "audit.log", tmp_path / "mqtt.sock"
    (tmp_path / "users").write_text(f"alice:{hash_password(b'right')}\n")
    broker = start_broker(data_dir=data, config={
        "password_file": str(tmp_path / "users"), "log": {"audit_file": str(audit)},
        "bans": {"failures": 1, "first": "1h", "longest": "1h"},
        "streams": {"all": {"filters": ["a"], "partitions": 1, "segment_bytes": "1KiB", "seal": True, "dedup": True}},
        "listeners": [{}, {"type": "unix", "path": str(sock)}],
    })  # fmt: skip
    with RawClient(broker.port) as client, RawClient(broker.port) as guesser:
        assert client.connect("c", username="alice", password=b"right", clean_start=False).reason_code == 0
        client.subscribe("b")
        for _ in range(4):
            client.publish("a", bytes(1000), qos=1, retain=True)
        assert guesser.connect("g", username="bob", password=b"wrong").reason_code != 0
    request = urllib.request.Request(f"{broker.url}/streams/all/consumers/c", b'{"offsets": {"0": 1}}', method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    broker.wait_for_log("event=segment_sealed", 4 * PATIENCE)
    assert stat.S_IMODE(sock.stat().st_mode) == 0o660
    expect_private(data)
    broker.terminate()
    assert {"mqttbroker.db", "proven_passwords", "bans.jsonl", "lock"} <= {path.name for path in data.iterdir()}
    assert list(data.rglob("*.parquet")) and list(data.rglob("*.seg")) and list(data.rglob("consumers/c.json"))
    expect_private(data)
    key = find_key_file(data)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with (data / "mqttbroker.db").open("r+b") as file:
        file.write(b"damaged")
    broker.start()
    broker.wait_for_log("event=damaged_file_kept")
    expect_private(data)
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600 and audit.stat().st_size


def expect_private(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.lstat().st_mode) == wanted, path


def test_files_of_an_older_broker_are_restricted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerProcess(data_dir=data, config=STREAM) as broker:
        publish(broker)
    for path in (data / "mqttbroker.db", data / "streams"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with BrokerProcess(data_dir=data, config=STREAM) as broker:
        broker.wait_for_log("event=permissions_restricted file=.*mqttbroker.db mode=0600")
        found = dict(modes(data))
    assert found["mqttbroker.db"] == 0o600 and found["streams"] == 0o700
