"""The filter of fail2ban finds the addresses of failed logins in the log of a broker, and no others."""

from __future__ import annotations

import configparser
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.paths import ROOT
from support.raw_client import RawClient
from support.tools import needs, program

from mqttbroker.auth.passwords import hash_password

pytestmark = pytest.mark.one_build

FILTER = ROOT / "conf" / "fail2ban" / "mqttbroker.conf"
FAIL2BAN = program("fail2ban-regex")
FORGED = 'x address=192.0.2.66:1 reason="Bad User Name or Password'


@pytest.fixture
def log(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> list[str]:
    """The lines of a broker after two failed logins, one right one, a refused publication, and a forged client id."""
    passwords = tmp_path / "passwords"
    passwords.write_text(f"alice:{hash_password(b'right')}\n")
    broker = start_broker(config={"password_file": str(passwords), "sys_interval": "0s"})
    with RawClient(broker.port) as client:
        assert client.connect("fine", username="alice", password=b"right").reason_code == 0
    for version, client_id in ((5, FORGED), (4, "device")):
        with RawClient(broker.port, version) as client:
            assert client.connect(client_id, username="alice", password=b"wrong").reason_code != 0
    with RawClient(broker.port) as client:
        client.connect(FORGED, username="alice", password=b"right")
    broker.wait_for_log(r"event=refused client=device ")
    broker.wait_for_log(r"event=disconnected client=\"x address")
    return list(broker.lines)


def test_the_expression_matches_failed_logins_only(log: list[str]) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(FILTER)
    expression = re.compile(parser["Definition"]["failregex"].replace("<HOST>", r"(?P<host>[0-9a-fA-F.:]+?)"))
    found = [expression.search(line.partition(" ")[2]) for line in log]  # fail2ban removes the time
    assert [match["host"] for match in found if match is not None] == ["127.0.0.1", "127.0.0.1"]
    six = 'info event=refused client=a address=2001:db8::7:99 reason="Bad User Name or Password (0x86): x" user=a'
    match = expression.search(six)
    assert match is not None and match["host"] == "2001:db8::7"


@needs("fail2ban")
def test_fail2ban_finds_them(log: list[str], tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"{line}\n" for line in log))
    done = subprocess.run([str(FAIL2BAN), str(file), str(FILTER)], capture_output=True, text=True)
    assert re.search(r"Failregex: 2 total", done.stdout), done.stdout + done.stderr
