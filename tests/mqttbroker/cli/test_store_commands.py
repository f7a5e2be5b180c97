"""The commands on a data directory: exit statuses, output, and the choice of the directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.command_line import one_line, run
from support.full_store import CHANGES, overwrite
from support.raw_client import RawClient

from mqttbroker.admin.data.repair import DATABASE
from mqttbroker.cli.store_commands import COMMANDS


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    with BrokerProcess(tmp_path / "data", {"streams": {"s": {"filters": ["#"]}}}) as broker:
        client = RawClient(broker.port)
        client.connect("c")
        assert client.publish("t", b"x", 1, True) == 0
        client.close()
    return tmp_path / "data"


def test_check_repair_backup_and_restore(data_dir: Path, tmp_path: Path) -> None:
    done = run("check-store", "data", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mqttbroker.db: 0 sessions, ") and "1 retained messages" in lines[0]
    assert lines[-1] == "no problems" and len([line for line in lines if "streams/s/" in line]) == 4
    assert one_line(run("repair-store", "data", cwd=tmp_path).stdout) == "nothing to repair"

    done = run("backup", "copy", "--data-dir", "data", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "1 retained messages" in one_line(done.stdout)
    done = run("restore", "copy", "--data-dir", "again", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "1 retained messages" in one_line(done.stdout)
    assert run("check-store", "again", cwd=tmp_path).returncode == 0

    overwrite(data_dir / DATABASE, 1, CHANGES["zeros"])
    done = run("check-store", "data", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.endswith("\n1 problems\n")
    assert "problem: mqttbroker.db: file is not a database" in done.stdout
    done = run("repair-store", "data", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "put aside as mqttbroker.db.corrupt-" in done.stdout
    assert run("check-store", "data", cwd=tmp_path).returncode == 0


def test_the_default_directory_is_that_of_the_configuration(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "broker.toml").write_text('data_dir = "data"\n')
    for arguments in (["--config", "broker.toml"], ["--data-dir", "data"], ["data"]):
        assert "1 retained" in run("check-store", *arguments, cwd=tmp_path).stdout
    environment = {"MQTTBROKER_DATA_DIR": "data"}
    assert "1 retained" in run("check-store", cwd=tmp_path, env=environment).stdout
    done = run("backup", "copy", "--config", "broker.toml", cwd=tmp_path)
    assert done.returncode == 0


FAILS = [
    (["check-store", "nowhere"], 1, "mqttbroker check-store: nowhere: No such file or directory"),
    (["repair-store", "nowhere"], 1, "mqttbroker repair-store: nowhere: No such file or directory"),
    (["backup", "copy", "--data-dir", "nowhere"], 1, "mqttbroker backup: nowhere/mqttbroker.db: there is none"),
    (["backup", ".", "--data-dir", "."], 1, "mqttbroker backup: "),
    (["restore", "nowhere", "--data-dir", "x"], 1, "mqttbroker restore: nowhere: no backup, it has no backup.json"),
    (["check-store", "a", "--data-dir", "b"], 2, "mqttbroker check-store: DIR or --data-dir, not both"),
    (["check-store", "a", "b"], 2, "mqttbroker: unrecognized arguments: b"),
    (["backup"], 2, "mqttbroker backup: the following arguments are required: DIR"),
    (["restore"], 2, "mqttbroker restore: the following arguments are required: BACKUP"),
    (["check-store", "--config", "none.toml"], 2, "none.toml: cannot be read"),
]


@pytest.mark.parametrize(("arguments", "status", "text"), FAILS)
def test_failures_are_one_line(tmp_path: Path, arguments: list[str], status: int, text: str) -> None:
    (tmp_path / "file").touch()
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert one_line(done.stderr).startswith(text)


def test_the_directory_of_a_running_broker_is_not_repaired(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data"):
        done = run("repair-store", "data", cwd=tmp_path)
        assert done.returncode == 1 and "in use by another process" in one_line(done.stderr)
        assert run("check-store", "data", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help(tmp_path: Path, command: str) -> None:
    done = run(command, "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--data-dir" in done.stdout
