"""Permissions of the data directory, its files and backups."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

STREAM = {"streams": {"all": {"filters": ["#"]}}}


def modes(directory: Path) -> Iterator[tuple[str, int]]:
    for path in directory.rglob("*"):
        yield str(path.relative_to(directory)), stat.S_IMODE(path.lstat().st_mode)


def publish(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect("permissions", clean_start=False)
        client.publish("a", b"secret", qos=1, retain=True)


@pytest.mark.parametrize(("file_mode", "files", "directories"), [("0600", 0o600, 0o700), ("0640", 0o640, 0o750)])
def test_files_are_readable_by_the_configured_users_only(
    tmp_path: Path, file_mode: str, files: int, directories: int
) -> None:
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
