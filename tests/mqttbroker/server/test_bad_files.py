"""Mistakes in every kind of file: named with file, line and reason at start, in check-config and on reload, where what
was in force stays."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess, to_toml
from support.certificates import CertificateFiles, revocation_list
from support.command_line import one_line, run
from support.metric_samples import samples
from support.raw_client import RawClient
from support.stream_client import StreamClient, tcp_socket

from mqttbroker.auth.passwords import hash_password
from mqttbroker.cli.main import main

# File, what is in it, and the problem that is reported; % stands for the file.
MISTAKES = [
    ("broker.toml", "# limits\n\nlimits.receive_maximum = 'many'\n",
     r'%:3: limits\.receive_maximum: must be a whole number, got \\?"many'),
    ("broker.toml", "a = 1\nb = = 2\n", r"%: not TOML: .*line 2"),
    ("broker.toml", "\nunknown_key = 1\n", r"%:2: unknown_key: "),
    ("broker.toml", "x = '\xff'\n", r"%:1: not UTF-8"),
    ("users", "alice:x\n", r"password_file: %:1: "),
    ("users", "# users\n\nalice\n", r"password_file: %:3: "),
    ("users", "a:$7$x\n", r"password_file: %:1: "),
    ("users", "\n\xff\n", r"password_file: %:2: not UTF-8"),
    ("users", None, r"password_file: %: cannot be read: No such file"),
    ("acl", "topic read a\ntopic fly b\n", r"acl_file: %:2: "),
    ("acl", "user a\npattern read a/#/b\n", r"acl_file: %:2: "),
    ("acl", "nonsense\n", r"acl_file: %:1: "),
    ("acl", "\n\n\xff\n", r"acl_file: %:3: not UTF-8"),
    ("acl", None, r"acl_file: %: cannot be read: No such file"),
    ("server.pem", "not PEM\n", r"certfile % .*not PEM"),
    ("server.pem", None, r"certfile %: No such file"),
    ("server.key", "not PEM\n", r"keyfile %: not PEM"),
    ("server.key", None, r"keyfile %: No such file"),
    ("ca.pem", "not PEM\n", r"cafile %: "),
    ("ca.pem", None, r"cafile %: No such file"),
    ("revoked.pem", "not PEM\n", r"crlfile %: "),
    ("revoked.pem", None, r"crlfile %: No such file"),
    ("token", "", r"http\.token_file: %: is empty"),
    ("token", None, r"http\.token_file: %: No such file"),
]  # fmt: skip


FIRST = {name: text for name, text, _ in reversed(MISTAKES)}  # with which a process is started, too


class Files:
    """The valid files of a broker in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificates = CertificateFiles(directory)
        (directory / "users").write_text(f"alice:{hash_password(b'secret')}\n")
        (directory / "acl").write_text("topic readwrite #\nuser alice\ntopic readwrite #\n")
        (directory / "token").write_text("word\n")
        (directory / "revoked.pem").write_bytes(revocation_list(self.certificates.authority, lasts=timedelta(days=9)))
        self.config: dict[str, Any] = {
            "allow_anonymous": True,
            "password_file": str(directory / "users"),
            "acl_file": str(directory / "acl"),
            "http": {"token_file": str(directory / "token")},
            **self.certificates.config(client_certificate="optional", crlfile=str(directory / "revoked.pem")),
        }

    def spoil(self, path: Path, text: str | None) -> None:
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="latin-1")


def pattern(problem: str, path: Path) -> str:
    return problem.replace("%", re.escape(str(path)))


def login(broker: BrokerProcess, port: int, files: Files) -> int:
    """The reason code for a client with TLS and a password, which uses most of the files."""
    with files.certificates.client("alice").wrap_socket(tcp_socket(port), server_hostname="localhost") as sock:
        return StreamClient(sock).connect("c", username="alice", password=b"secret").reason_code


@pytest.mark.parametrize(("name", "text", "problem"), MISTAKES)
def test_check_config_and_start_name_the_mistake(
    tmp_path: Path, name: str, text: str | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Files(tmp_path)
    config = tmp_path / "broker.toml"
    files.config["http"]["port"] = files.config["listeners"][0]["port"] = 0
    config.write_text(to_toml(files.config | {"data_dir": str(tmp_path / "data")}))
    files.spoil(tmp_path / name, text)
    expected = pattern(problem, tmp_path / name)
    assert main(["check-config", str(config)]) == 2
    assert re.search(expected, one_line(capsys.readouterr().err))
    if text == FIRST[name]:
        done = run("serve", "--config", str(config), cwd=tmp_path)
        assert done.returncode in (1, 2) and re.search(expected, done.stderr.splitlines()[-1]), done.stderr


def test_a_reload_with_a_mistake_keeps_what_was_in_force(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    files = Files(tmp_path)
    broker = start_broker(config=files.config)
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    token = {"Authorization": "Bearer word"}
    assert login(broker, port, files) == 0
    for name, text, problem in MISTAKES:
        path = broker.config if name == "broker.toml" else tmp_path / name
        good = path.read_bytes()
        files.spoil(path, text)
        after = len(broker.lines)
        os.kill(broker.pid, signal.SIGHUP)
        reported = pattern(problem, path)
        broker.wait_for_log(f"event=reload_failed .*({reported})", after=after)
        assert login(broker, port, files) == 0, name
        with RawClient(broker.port) as client:
            assert client.connect("plain").reason_code == 0 and client.publish("a/b", b"", 1) < 0x80
        warnings = json.loads(broker.get("/readyz"))["warnings"]
        assert any(re.search(reported, warning) for warning in warnings), (name, warnings)
        assert samples(broker.get("/metrics", token))["mqttbroker_reload_problems"] == len(warnings)
        path.write_bytes(good)
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=certificates_reloaded", after=len(broker.lines))
    assert "warnings" not in json.loads(broker.get("/readyz"))
