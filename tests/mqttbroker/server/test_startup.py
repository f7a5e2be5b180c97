"""What a broker that cannot start says: one line with the place of the key, the user where access was denied, and a status by cause."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.command_line import one_line
from support.paths import ROOT
from support.raw_client import RawClient
from support.spark_session import python_path

TLS = '[[listeners]]\ntype = "tls"\nport = 0\ncertfile = "none.pem"\nkeyfile = "none.key"\n'
NODE = 'http.port = 0\n[cluster]\nengine = "kafka"\nbootstrap_servers = ["127.0.0.1:9"]\n'  # of a cluster
# A configuration, and the line behind the name of the file.
MISTAKES = [
    ('\nacl_file = "none.acl"\n', r":2: acl_file: none\.acl: cannot be read: No such file or directory"),
    ('password_file = "none"\n', r":1: password_file: none: cannot be read: No such file or directory"),
    (f"\n{TLS}", r":5: listeners\.0: certfile none\.pem: No such file or directory"),
    ("[[listeners]]\nport = 0\n" + TLS, r":6: listeners\.1: certfile none\.pem: No such file or directory"),
    (NODE + TLS, r":8: listeners\.0: certfile none\.pem: No such file or directory"),
    ('http.port = 0\nhttp.certfile = "none.pem"\nhttp.keyfile = "none.key"\n', r":2: http: certfile none\.pem: No such file or directory"),
    ('log.to = ["file"]\nlog.file = "none/log"\n', r":2: log\.file: none/log: No such file or directory"),
]
UNPRIVILEGED = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]


def runs_unprivileged() -> bool:
    """Whether another user may run this Python with the project's modules, which may be below root's home."""
    command = [*UNPRIVILEGED, sys.executable, "-P", "-c", "import mqttbroker.cli.main, uvloop"]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return (
        shutil.which("setpriv") is not None and subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    )


def serve(directory: Path, config: str, *arguments: str, unprivileged: bool = False) -> tuple[int, str]:
    """The exit status, and the line on stderr that is no line of the log."""
    (directory / "broker.toml").write_text(config)
    command = [sys.executable, "-P", "-m", "mqttbroker", "serve", "--config", "broker.toml", *arguments]
    if unprivileged and os.getuid() == 0:
        command = [*UNPRIVILEGED, *command]
    done = subprocess.run(
        command, cwd=directory, env={**os.environ, "PYTHONPATH": python_path()}, capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, one_line("".join(line for line in done.stderr.splitlines(True) if " event=" not in line))


@pytest.mark.one_build
@pytest.mark.parametrize(("config", "line"), MISTAKES)
def test_a_mistake_has_its_place_and_the_status_that_no_service_manager_repeats(tmp_path: Path, config: str, line: str) -> None:
    status, said = serve(tmp_path, config, "--data-dir", "data")
    assert status == 2 and re.fullmatch(f"broker\\.toml{line}", said), said
    unit = (ROOT / "conf" / "mqttbroker.service").read_text(encoding="utf-8")
    assert "\nRestart=on-failure\n" in unit and f"\nRestartPreventExitStatus={status}\n" in unit


@pytest.mark.one_build
def test_a_mistake_of_a_flag_or_variable_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQTTBROKER_ACL_FILE", "none.acl")
    status, said = serve(tmp_path, "", "--data-dir", "data")
    assert status == 2 and said == "MQTTBROKER_ACL_FILE: acl_file: none.acl: cannot be read: No such file or directory"


@pytest.mark.one_build
def test_a_port_in_use_is_no_mistake_of_the_configuration(tmp_path: Path) -> None:
    with BrokerProcess() as other:
        status, said = serve(tmp_path, f"listeners = [{{port = {other.port}}}]\nhttp.port = 'off'\n", "--data-dir", "data")
    assert status == 1 and said == f"mqttbroker: cannot listen on 127.0.0.1:{other.port}: Address already in use"


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users may enter. Each start of pytest closes its own directories to them."""
    with tempfile.TemporaryDirectory(prefix="mqttbroker-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.one_build
@pytest.mark.skipif(os.getuid() == 0 and not runs_unprivileged(), reason="needs setpriv, and a Python that other users may run")
def test_a_denied_access_names_the_user(open_directory: Path) -> None:
    uid = 12345 if os.getuid() == 0 else os.getuid()
    (open_directory / "data").mkdir(mode=0o700)
    (open_directory / "data" / "lock").touch()
    (open_directory / "rules").touch()
    (open_directory / "rules").chmod(0)
    if os.getuid() != 0:
        (open_directory / "data").chmod(0)
    status, said = serve(open_directory, "", "--data-dir", "data", "--port", "0", "--http-port", "off", unprivileged=True)
    assert status == 1 and re.fullmatch(rf"mqttbroker: data/\w+: Permission denied \(as .*uid {uid}\)", said), said
    status, said = serve(open_directory, 'acl_file = "rules"\n', "--data-dir", "other", unprivileged=True)
    assert status == 2 and re.fullmatch(rf"broker\.toml:1: acl_file: rules: .*Permission denied \(as .*uid {uid}\)", said), said


@pytest.mark.one_build
@pytest.mark.skipif(os.getuid() == 0 and not runs_unprivileged(), reason="needs setpriv, and a Python that other users may run")
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["check-config", "broker.toml"], 2),
        (["doctor", "--config", "broker.toml"], 1),
        (["support-bundle", "--config", "broker.toml", "-o", "out/bundle"], 0),
    ],
)
def test_commands_name_a_data_directory_of_another_user(open_directory: Path, words: list[str], status: int) -> None:
    (open_directory / "broker.toml").write_text('data_dir = "data"\n[[listeners]]\nport = 0\n')
    (open_directory / "out").mkdir()
    (open_directory / "out").chmod(0o777)
    (open_directory / "data").mkdir(mode=0o700 if os.getuid() == 0 else 0)
    command = [*(UNPRIVILEGED if os.getuid() == 0 else ()), sys.executable, "-P", "-m", "mqttbroker", *words]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, cwd=open_directory, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == status and "Traceback" not in done.stderr and "unexpected" not in done.stdout, done
    said = r"data_dir: data cannot be written \(as |missing: data-directory\.json: \S*data: Permission denied\n"
    assert re.search(said, done.stdout + done.stderr), done
    (open_directory / "data").chmod(0o700)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("loopback", r"allowed from this machine only (allow_anonymous = \"loopback\")"),
        (False, "allowed nowhere (allow_anonymous = false)"),
    ],
)
def test_the_reason_of_a_refused_anonymous_client_is_the_setting(setting: bool | str, reason: str) -> None:
    listeners = [{"allow_anonymous": setting, "proxy_protocol": True, "proxy_sources": ["127.0.0.0/8"]}]
    with BrokerProcess(config={"listeners": listeners}) as broker, RawClient(broker.port) as client:
        client.send(b"PROXY TCP4 192.0.2.7 192.0.2.1 4000 1883\r\n")
        assert client.connect("c").reason_code == 0x87
        broker.wait_for_log(re.escape(f"anonymous clients are {reason}"))
