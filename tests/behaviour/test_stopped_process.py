"""A broker whose processes were stopped for a while (SIGSTOP, a frozen container, a suspended machine)."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.core import Core
from support.manual_loop import Loop
from support.raw_client import RawClient
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.codec.packets import Connack, Connect, Disconnect, Pingreq, Pingresp
from mqttbroker.core.terms.deadline import Deadline
from mqttbroker.net.flush import FlushScheduler

DEADLINE = 4  # seconds: keep alive, and the time for a CONNECT
STOPPED = 1.75 * DEADLINE


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BrokerProcess]]:
    """One without connection workers, and one with two."""
    files = CertificateFiles(tmp_path_factory.mktemp("tls"))
    tls = {"certfile": str(files.certfile), "keyfile": str(files.keyfile)}
    config = {
        "listeners": [{"type": "tcp", "port": 0}, {"type": "ws", "port": 0}, {"type": "wss", "port": 0, **tls}],
        "limits": {"connect_timeout": f"{DEADLINE}s"},
        "worker_timeout": f"{DEADLINE}s",
    }
    with ExitStack() as stack:
        started = [stack.enter_context(BrokerProcess(config=config, arguments=["--workers", count])) for count in ("0", "2")]
        for broker in started:
            broker.wait_for_log("event=started")
        yield started


@contextmanager
def stopped(brokers: list[BrokerProcess]) -> Iterator[None]:
    """All processes of the brokers are stopped for `STOPPED` seconds at least."""
    began = time.monotonic()
    with ExitStack() as stack:
        for broker in brokers:
            stack.enter_context(broker.stopped())
        yield
        time.sleep(max(0.0, began + STOPPED - time.monotonic()))


def open_client(broker: BrokerProcess, kind: str) -> RawClient:
    sock: Any = tcp_socket(int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1]))
    if kind == "wss":
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    return StreamClient(WebSocketStream(sock) if kind in ("ws", "wss") else sock)


def test_clients_that_ping_meanwhile_stay_and_silent_ones_are_closed_afterwards(brokers: list[BrokerProcess]) -> None:
    with ExitStack() as stack:

        def opened(*kinds: str) -> list[RawClient]:
            return [stack.enter_context(open_client(broker, kind)) for broker in brokers for kind in kinds]

        pinging, silent = opened(*3 * ("tcp", "ws", "wss")), opened("tcp")
        for client in (*pinging, *silent):
            client.connect(keep_alive=DEADLINE)
        late, nobody = opened("tcp", "ws", "wss"), opened("tcp")
        for client in pinging:
            client.ping()
        with stopped(brokers):
            for client in pinging:
                client.send(Pingreq())
            for client in late:
                client.send(Connect("", 5))
        for client in pinging:
            client.expect(Pingresp)
        for client in late:
            assert client.expect(Connack).reason_code == 0
        for client in silent:
            assert client.wait_for(Disconnect).reason_code == 0x8D
        for client in nobody:
            client.expect_closed()


# --- step by step -----------------------------------------------------------------------------------------------------


def scheduler_of(core: Core) -> tuple[FlushScheduler, Loop]:
    loop = Loop()
    loop.now = core.seconds
    return FlushScheduler(core.broker, loop, lambda write_set: None, True), loop


def test_only_time_in_which_the_process_runs_is_silence(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client, half_open = core.connect("c", keep_alive=100), core.client()
        scheduler, loop = scheduler_of(core)
        scheduler.tick()
        for _ in range(3):
            loop.now += 1000.0  # stopped
            scheduler.tick()
            assert not client.closed and not half_open.closed
            for _ in range(2):
                loop.now += 1.0
                scheduler.tick()
        for second in range(10):
            loop.now += 1.0
            scheduler.tick()
        assert half_open.closed and not client.closed
        for second in range(133):
            loop.now += 1.0
            scheduler.tick()
        assert not client.closed
        for second in range(3):
            loop.now += 1.0
            scheduler.tick()
        assert client.closed


def test_a_deadline_that_is_late_gives_time_to_read() -> None:
    loop = Loop()
    ended: list[str] = []
    timers: list[tuple[float, Any]] = []

    def call_later(seconds: float, call: Any) -> Any:
        timers.append((loop.now + seconds, call))
        return None

    loop.call_later = call_later  # type: ignore[method-assign]
    Deadline(loop, 10.0, ended.append, "over")
    due, call = timers.pop()
    assert due == 10.0
    loop.now = 70.0
    call()
    assert ended == []
    due, call = timers.pop()
    assert due == 80.0
    loop.now = 80.5
    call()
    assert ended == ["over"] and timers == []
