"""``mqttbroker doctor``: each check finds what it is for, on real files, ports and limits."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.broker_process import BrokerProcess, to_toml
from support.paths import ROOT

from mqttbroker.cli import doctor
from mqttbroker.cli.doctor import OK, PROBLEM, WARNING, Finding
from mqttbroker.cli.main import main

pytestmark = pytest.mark.one_build


@pytest.fixture
def tmp_path(path_on_disk: Path) -> Path:
    return path_on_disk  # a data directory in memory gets a warning


@pytest.fixture
def find(tmp_path: Path) -> Iterator[Callable[..., dict[str, list[Finding]]]]:
    """Runs all checks on a configuration whose listener and data directory are free; returns the findings by check."""
    (tmp_path / "data").mkdir(mode=0o700)
    config = tmp_path / "broker.toml"

    def run(**tables: Any) -> dict[str, list[Finding]]:
        plain = {"data_dir": str(tmp_path / "data"), "listeners": [{"port": 0}], "http": {"port": 0}, **tables}
        config.write_text(to_toml(plain))
        config.chmod(0o600)
        found: dict[str, list[Finding]] = {}
        for finding in doctor.findings(config, None):
            found.setdefault(finding.check, []).append(finding)
            assert (finding.state == OK) == (finding.cure == "") and "\n" not in finding.text + finding.cure
        return found

    yield run


def states(findings: list[Finding]) -> list[str]:
    return [finding.state for finding in findings]


def test_a_good_machine_has_no_problem(find: Callable[..., dict[str, list[Finding]]]) -> None:
    found = find()
    assert PROBLEM not in states([each for one in found.values() for each in one])
    assert {"build", "configuration", "open files", "port", "data directory", "disk space", "fsync", "clock"} <= set(found)
    assert states(found["configuration"]) == [OK] and states(found["port"]) == [OK, OK]
    assert 0.0 < float(found["fsync"][0].text.partition(" ms")[0]) < 60_000


def test_a_port_in_use_is_a_problem_unless_the_broker_has_it(
    find: Callable[..., dict[str, list[Finding]]], tmp_path: Path, start_broker: Callable[..., BrokerProcess]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = find(listeners=[{"port": port}])["port"]
        assert states(found) == [PROBLEM, OK] and f"sport = :{port}" in found[0].cure
    assert states(find(listeners=[{"host": "192.0.2.1", "port": 0}])["port"])[0] == PROBLEM
    broker = start_broker(data_dir=tmp_path / "data")
    found = find(listeners=[{"port": broker.port}], http={"port": broker.http_port})["port"]
    assert states(found) == [OK, OK] and "a broker runs on this data directory" in found[0].text


def test_the_limit_of_open_files(find: Callable[..., dict[str, list[Finding]]], tmp_path: Path) -> None:
    assert states(find(limits={"max_connections": 10, "max_half_open": 10}, http={"port": "off"})["open files"]) == [OK]

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    command = [sys.executable, "-P", "-m", "mqttbroker", "doctor", "--config", str(tmp_path / "broker.toml"), "--json"]
    done = subprocess.run(command, preexec_fn=few, capture_output=True, text=True, cwd=tmp_path, timeout=50, check=False)
    (found,) = [each for each in json.loads(done.stdout) if each["check"] == "open files"]
    assert found["state"] == WARNING and "the hard limit is 256" in found["text"] and "LimitNOFILE=" in found["cure"]
    assert done.returncode == 0 and done.stderr == ""


def test_files_that_others_may_read(find: Callable[..., dict[str, list[Finding]]], tmp_path: Path) -> None:
    for name in ("users", "token"):
        (tmp_path / name).write_text("alice:$6$YQ==$" + "A" * 86 + "==\n" if name == "users" else "t\n")
        (tmp_path / name).chmod(0o644)
    files = {"password_file": str(tmp_path / "users"), "http": {"port": 0, "token_file": str(tmp_path / "token")}}
    found = find(**files)["secrets"]
    assert states(found) == [WARNING, WARNING] and found[0].cure == f"chmod o-rwx {tmp_path / 'token'}"
    for name in ("users", "token"):
        (tmp_path / name).chmod(0o640)
    assert states(find(**files)["secrets"]) == [OK]
    find(http={"port": 0, "access": [{"name": "a", "role": "admin", "token": "t"}]})
    (tmp_path / "broker.toml").chmod(0o644)
    found = [each for each in doctor.findings(tmp_path / "broker.toml", None) if each.check == "secrets"]
    assert states(found) == [WARNING] and str(tmp_path / "broker.toml") in found[0].text
    (tmp_path / "data").chmod(0o777)
    assert PROBLEM in states(find()["data directory"])


@pytest.mark.parametrize(("days", "state"), [(-1, PROBLEM), (10, WARNING), (100, OK)])
def test_certificates_that_expire(find: Callable[..., dict[str, list[Finding]]], tmp_path: Path, days: int, state: str) -> None:
    expires = datetime.now(UTC) + timedelta(days=days)
    certificate = trustme.CA().issue_cert("localhost", not_after=expires)
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    (tmp_path / "both.pem").chmod(0o600)
    files = {"certfile": str(tmp_path / "both.pem"), "keyfile": str(tmp_path / "both.pem")}
    found = find(listeners=[{"port": 0, "type": "tls", **files}])["certificate"]
    assert states(found) == [state] and f"{expires:%Y-%m-%d}" in found[0].text


def test_a_clock_behind_the_data(find: Callable[..., dict[str, list[Finding]]], tmp_path: Path) -> None:
    (tmp_path / "data" / "file").write_text("")
    later = time.time() + 3600
    os.utime(tmp_path / "data" / "file", (later, later))
    found = find()["clock"]
    assert states(found) == [PROBLEM] and re_seconds(found[0].text) > 3500
    assert doctor.clock_is_synchronised() in (True, False, None)


def re_seconds(text: str) -> float:
    return float(text.split(" is ")[1].split(" s ")[0])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
def test_file_systems() -> None:
    assert doctor.file_system(Path("/dev/shm")) == "tmpfs"
    assert doctor.file_system(Path("/proc/self")) == "proc"
    assert doctor.file_system(ROOT) not in ("", "proc")


def test_a_disk_that_takes_no_file_is_a_problem(find: Callable[..., dict[str, list[Finding]]], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = find()["fsync"]
    assert states(found) == [PROBLEM] and "No space left on device" in found[0].text
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(doctor.SLOW_FSYNC * 1.5))
    assert states(find()["fsync"]) == [WARNING]


def test_mistakes_of_the_configuration_are_problems(
    find: Callable[..., dict[str, list[Finding]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert states(find(password_file=str(tmp_path / "none"))["configuration"]) == [PROBLEM]
    (tmp_path / "broker.toml").write_text("durabilty = 'x'\n[limits]\nmax_inflight = 0\n")
    assert main(["doctor", "--config", str(tmp_path / "broker.toml")]) == 1
    out = capsys.readouterr().out
    assert "broker.toml:1: durabilty: unknown key, did you mean durability?" in out
    assert "broker.toml:3: limits.max_inflight" in out and out.count("cure: ") >= 2
    assert main(["doctor", "--config", str(tmp_path / "broker.toml"), "--json"]) == 1
    assert {each["state"] for each in json.loads(capsys.readouterr().out)} >= {PROBLEM}
