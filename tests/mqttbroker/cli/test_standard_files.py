"""Commands that are started with standard input, output or error closed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker_process import PACKAGE, BrokerProcess, worker_pids
from support.core import wait_until
from support.patience import PATIENCE
from support.raw_client import RawClient

CLOSED = [closed for count in (1, 2, 3) for closed in itertools.combinations(("<&-", ">&-", "2>&-"), count)]
COMMAND = [sys.executable, "-P", *PACKAGE]


def start(closed: tuple[str, ...], *arguments: str) -> subprocess.Popen[bytes]:
    """The command with these files closed; the others are inherited."""
    return subprocess.Popen(["sh", "-c", f'exec "$@" {" ".join(closed)}', "sh", *COMMAND, *arguments], stdin=subprocess.DEVNULL)


def standard_files(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{descriptor}") for descriptor in range(3)]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        yield process


@pytest.mark.parametrize("closed, workers", [*((each, "0") for each in CLOSED), (CLOSED[-1], "2")])
def test_a_broker_serves_and_ends_cleanly(tmp_path: Path, closed: tuple[str, ...], workers: str) -> None:
    socket = tmp_path / "mqtt.sock"
    log = tmp_path / "broker.log"
    config = tmp_path / "broker.toml"
    config.write_text(
        f'log = {{ to = ["file"], file = "{log}" }}\n[[listeners]]\ntype = "tcp"\nport = 0\n[[listeners]]\ntype = "unix"\npath = "{socket}"\n'
    )
    arguments = ["--config", str(config), "--data-dir", str(tmp_path / "data"), "--http-port", "0", "--workers", workers]
    process = start(closed, "serve", *arguments)
    try:
        wait_until(lambda: log.exists() and "event=started" in log.read_text() or process.poll() is not None)
        assert process.poll() is None
        port = int(log.read_text().split("event=listening type=tcp", 1)[1].split("port=", 1)[1].split()[0])
        pids = [process.pid, *worker_pids(process.pid)]
        assert len(pids) == 1 + int(workers)
        for pid in pids:
            files = standard_files(pid)
            assert all("socket:" not in name and str(tmp_path) not in name for name in files), files
        with RawClient(port) as client:
            client.connect()
            client.publish("t", b"x", 1, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("closed", CLOSED, ids=" ".join)
def test_pub_and_sub_end_cleanly(broker: BrokerProcess, closed: tuple[str, ...]) -> None:
    topic = "closed/" + " ".join(closed).replace("&", "")
    with RawClient(broker.port) as client:
        client.connect()
        client.subscribe(topic)
        assert start(closed, "pub", "-p", str(broker.port), "-t", topic, "-m", "x", "-q", "1", "-r").wait(PATIENCE) == 0
        assert client.take().payload == b"x"
    assert start(closed, "sub", "-p", str(broker.port), "-t", topic, "-C", "1").wait(PATIENCE) == 0


@pytest.mark.parametrize("closed", CLOSED, ids=" ".join)
def test_other_commands_end_with_their_status(tmp_path: Path, closed: tuple[str, ...]) -> None:
    assert start(closed, "--version").wait(PATIENCE) == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("nonsense = 1\n")
    assert start(closed, "check-config", str(wrong)).wait(PATIENCE) == 2
