"""Notifications to systemd, received from a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.patience import PATIENCE
from support.raw_client import RawClient
from support.service_manager import NotifySocket

from mqttbroker.system.service_manager import ServiceManager

Start = Callable[..., BrokerProcess]


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NotifySocket]:
    opened = NotifySocket(str(tmp_path / "notify") if request.param == "file" else f"@mqttbroker-test-{os.getpid()}")
    yield opened
    opened.close()


@pytest.mark.one_build
def test_start_reload_and_stop_are_reported(start_broker: Start, manager: NotifySocket) -> None:
    broker = start_broker(config={"sys_interval": "0s"}, env={"NOTIFY_SOCKET": manager.address})
    assert manager.receive() == {"READY": "1"}
    with RawClient(broker.port) as client:
        client.connect("c")
    for text in ("limits.max_inflight = 5\n", "limits.max_inflight = 0\n"):  # a reload that fails ends, too
        broker.config.write_text(text)
        before = time.monotonic_ns() // 1000
        os.kill(broker.pid, signal.SIGHUP)
        begun = manager.receive()
        assert begun.keys() == {"RELOADING", "MONOTONIC_USEC"} and begun["RELOADING"] == "1"
        assert before <= int(begun["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        assert manager.receive() == {"READY": "1"}
    assert broker.terminate() == 0
    assert manager.receive() == {"STOPPING": "1"}
    assert "service_manager_not_notified" not in broker.log


@pytest.mark.one_build
def test_loop_that_hangs_sends_no_signs_of_life(start_broker: Start, tmp_path: Path) -> None:
    manager = NotifySocket(str(tmp_path / "notify"))
    broker = start_broker(env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "100000"})
    messages = [manager.socket.recv(4096) for _ in range(5)]
    assert messages.count(b"READY=1") == 1 and messages.count(b"WATCHDOG=1") == 4
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        manager.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            while True:
                manager.socket.recv(4096)
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    manager.socket.settimeout(20)
    assert manager.socket.recv(4096) == b"WATCHDOG=1"
    manager.close()


def test_broker_runs_without_a_manager_that_answers(start_broker: Start, tmp_path: Path) -> None:
    broker = start_broker(env={"NOTIFY_SOCKET": str(tmp_path / "none"), "WATCHDOG_USEC": "1000"})
    broker.wait_for_log("event=service_manager_not_notified reason=.*No such file")
    with RawClient(broker.port) as client:
        assert client.connect("c").reason_code == 0
    assert broker.terminate() == 0
    assert broker.log.count("service_manager_not_notified") == 1


def test_child_processes_do_not_notify() -> None:
    environ = {"NOTIFY_SOCKET": "/run/systemd/notify", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    ServiceManager(environ)
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(("variables", "alive"), [
    ({"WATCHDOG_USEC": "1000"}, True),
    ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid())}, True),
    ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, False),  # for another process
    ({"WATCHDOG_USEC": "x"}, False),
    ({}, False),
])  # fmt: skip
def test_signs_of_life_are_sent_if_they_are_expected(variables: dict[str, str], alive: bool, tmp_path: Path) -> None:
    manager = NotifySocket(str(tmp_path / "notify"))
    task = ServiceManager({"NOTIFY_SOCKET": manager.address, **variables}).keep_alive()

    async def run() -> bool:
        try:
            await asyncio.wait_for(task, 0.2 if alive else PATIENCE)
        except TimeoutError:
            return True
        return False

    assert asyncio.run(run()) is alive
    manager.socket.setblocking(False)
    if alive:
        assert manager.socket.recv(4096) == b"WATCHDOG=1"
    else:
        with pytest.raises(BlockingIOError):
            manager.socket.recv(4096)
    manager.close()
