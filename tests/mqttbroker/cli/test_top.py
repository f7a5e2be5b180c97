"""``mqttbroker top`` on a terminal: what it shows, and what its keys do."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_client import ACCESS
from support.broker_process import BrokerProcess
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.cli.main import main
from mqttbroker.cli.top import Sample, aligned, number, rates
from mqttbroker.codec.packets import Disconnect

pytestmark = pytest.mark.one_build


class Terminal:
    """A command on a terminal of 120 columns and 30 lines."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mqttbroker", *words], stdin=slave, stdout=slave, stderr=slave,
            env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"}, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.output = b""

    def wait_for(self, pattern: str, seconds: float = PATIENCE) -> None:
        """Wait until the output from now on matches; what was matched, and all before it, is forgotten."""
        deadline = time.monotonic() + seconds
        while True:
            found = re.search(pattern, self.output.decode(errors="replace"), re.DOTALL)
            if found is not None:
                self.output = self.output.decode(errors="replace")[found.end() :].encode()
                return
            left = deadline - time.monotonic()
            assert left > 0, f"the terminal did not show {pattern!r}: {self.output!r}"
            if select.select([self.master], [], [], left)[0]:
                self.output += os.read(self.master, 1 << 16)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> int:
        """Wait for the end of the command; returns its exit status."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    os.read(self.master, 1 << 16)
                except OSError:
                    break  # the command has closed the terminal
        status = self.process.wait(PATIENCE)
        os.close(self.master)
        return status


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config={"http": {"access": ACCESS}}) as process:
        yield process


def test_top_shows_clients_and_disconnects_one(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client, RawClient(broker.port) as other:
        client.connect("press-7")
        other.connect("mixer-3")
        terminal = Terminal("top", "--url", broker.url, "--token", "t-admin", "--interval", "0.3", "--sort", "client_id")
        terminal.wait_for(r"clients 2.*msg/s in.*CLIENT.*mixer-3.*127\.0\.0\.1.*press-7")
        with RawClient(broker.port) as third:
            third.connect("added-1")
            terminal.wait_for("added-1")
        terminal.press("/pre")
        terminal.wait_for("search: .*pre")
        terminal.press("\r")
        terminal.press("\r")
        terminal.wait_for("client_id .*press-7.*messages_sent")
        terminal.press("\x1b")
        terminal.wait_for("CLIENT")
        terminal.press("/press\r")
        terminal.wait_for("search: .*press")
        terminal.press("d")
        terminal.wait_for("disconnect press-7\\?")
        terminal.press("y")
        client.expect(Disconnect)
        terminal.wait_for("press-7 was disconnected")
        terminal.press("q")
        assert terminal.close() == 0
        other.ping()


def test_top_says_when_the_broker_is_away_and_when_it_is_back() -> None:
    with BrokerProcess(config={"http": {"access": ACCESS}}) as broker:
        terminal = Terminal("top", "--url", broker.url, "--token", "t-viewer", "--interval", "0.2")
        terminal.wait_for("CLIENT")
        broker.terminate()
        terminal.wait_for("is it running|cannot be read")
        broker.start()
        with RawClient(broker.port) as client:
            client.connect("back-again")
            terminal.wait_for("back-again")
        terminal.press("q")
        assert terminal.close() == 0


def test_top_ends_when_its_terminal_is_gone_also_without_sighup(broker: BrokerProcess) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        terminal = Terminal("top", "--url", f"http://127.0.0.1:{broker.http_port}", "--token", "t-admin")
    finally:
        signal.signal(signal.SIGHUP, before)
    terminal.wait_for("clients")
    os.close(terminal.master)
    assert terminal.process.wait(20) is not None


def test_without_a_terminal_and_as_json(broker: BrokerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    to = ["--url", broker.url, "--token", "t-viewer"]
    assert main(["top", *to, "--interval", "0.1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rates"]["publish_received"] == 0.0 and shown["status"]["clients_connected"] == 0
    assert main(["top", *to]) == 2 and "needs a terminal" in capsys.readouterr().err
    assert main(["top", "--url", "http://127.0.0.1:1", "--json"]) == 3
    assert main(["top", "--interval", "0", *to]) == 2


def test_rates_and_numbers() -> None:
    def sample(received: int, at: float) -> Sample:
        totals = dict.fromkeys(("publish_sent", "bytes_received", "bytes_sent", "connections"), 5)
        status: dict[str, Any] = {"totals": {**totals, "publish_received": received}}
        return Sample(status, at)

    assert rates(sample(100, 10.0), sample(300, 12.0))["publish_received"] == 100.0
    assert rates(sample(300, 10.0), sample(1, 12.0))["publish_received"] == 0.0  # a restart
    assert [number(value) for value in (0, 0.5, 12, 999, 12_345, 4e6, 1.2e9, 5e15)] == [
        "0",
        "0.5",
        "12",
        "999",
        "12.3k",
        "4.0M",
        "1.2G",
        "5000.0T",
    ]
    line = aligned(["x" * 300, "user", "10.0.0.1:1", "5s", "1", "2", "3"], 100)
    assert len(line) <= 100 and "x…" in line


def test_completion_knows_the_options_of_top_pub_and_sub(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert all(option in script for option in ("--interval", "--will-topic", "--stdin-line", "--filter-out"))
