"""Restarts in which the listening sockets stay open: no client is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess, worker_pids
from support.command_line import one_line
from support.local_kafka import free_ports
from support.raw_client import RawClient
from support.service_manager import NotifySocket, listening, program_with
from support.stream_client import StreamClient, WebSocketStream, tcp_socket, unix_socket

from mqttbroker.codec.properties import Properties
from mqttbroker.net.passed_sockets import PassedSockets

Start = Callable[..., BrokerProcess]

pytestmark = pytest.mark.one_build
needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


class ConnectingClient:
    """A client that connects again and again, in a thread, from ``with`` to its end."""

    def __init__(self, port: int) -> None:
        self.connected = 0
        self.cut_off = 0
        self.refused: list[str] = []
        self._port = port
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ConnectingClient:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                client = RawClient(self._port)
            except OSError as error:
                self.refused.append(str(error))
                continue
            with client:
                try:
                    client.connect("again")
                    self.connected += 1
                except (AssertionError, OSError):
                    self.cut_off += 1  # as any client that is connected when the broker stops


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[NotifySocket]:
    with closing(NotifySocket(str(tmp_path / "notify"))) as opened:
        yield opened


def free_port() -> int:
    """A port that a configuration may name: a broker with port 0 has another port after each start."""
    (port,) = free_ports(1)
    return port


def broker_on(port: int, workers: int, **options: Any) -> BrokerProcess:
    broker = BrokerProcess(arguments=["--workers", str(workers)], **options)
    broker.port = port
    return broker


def restart_by_signal(broker: BrokerProcess) -> None:
    first = len(broker.lines)
    os.kill(broker.pid, signal.SIGUSR2)
    broker.wait_for_log("event=started", timeout=60, after=first)


def restart_with_new_process(broker: BrokerProcess, kill: bool = False) -> None:
    first = len(broker.lines)
    broker.restart(kill)
    broker.wait_for_log("event=started", timeout=60, after=first)


# --- nobody is refused --------------------------------------------------------------------------------------------


def restarts_by_signal(workers: int, count: int) -> None:
    with broker_on(free_port(), workers) as broker:
        broker.wait_for_log("event=started", timeout=60)
        pid = broker.pid
        with ConnectingClient(broker.port) as client:
            for _ in range(count):
                known = worker_pids(pid)
                restart_by_signal(broker)
                assert broker.running and broker.pid == pid
                assert len(worker_pids(pid)) == workers and not set(known) & set(worker_pids(pid))
        assert client.refused == [] and client.connected >= count
        with RawClient(broker.port) as last:
            last.connect("last")
        assert broker.terminate() == 0


def restarts_with_a_socket_unit(workers: int, count: int) -> None:
    with listening(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        program = program_with([("mqtt.socket", sock)])
        with broker_on(port, workers, program=program, pass_fds=[sock.fileno()]) as broker:
            broker.wait_for_log("event=sockets_passed count=1")
            broker.wait_for_log("event=started", timeout=60)
            with ConnectingClient(port) as client:
                for number in range(count):
                    restart_with_new_process(broker, kill=number % 2 == 1)
            assert client.refused == [] and client.connected >= count


def restarts_with_stored_sockets(manager: NotifySocket, workers: int, count: int) -> None:
    variables = {"NOTIFY_SOCKET": manager.address, "FDSTORE": "16"}
    port = free_port()
    with broker_on(port, workers, env=variables) as broker:
        assert manager.receive() == {"READY": "1"}
        with ConnectingClient(port) as client:
            for number in range(count):
                [(name, sock)] = manager.stored
                assert sock.getsockname() == ("127.0.0.1", port)
                broker.program, broker.pass_fds = list(program_with([(name, sock)])), (sock.fileno(),)
                restart_with_new_process(broker, kill=number % 2 == 1)
                while manager.receive() != {"READY": "1"}:
                    pass
        assert client.refused == [] and client.connected >= count


@pytest.mark.parametrize("workers", [0, 2])
def test_nobody_is_refused(manager: NotifySocket, workers: int) -> None:
    restarts_by_signal(workers, 1)
    restarts_with_a_socket_unit(workers, 1)
    restarts_with_stored_sockets(manager, workers, 1)


@pytest.mark.slow("restarts 120 brokers")
@pytest.mark.parametrize("workers", [0, 2])
def test_nobody_is_refused_in_twenty_restarts(manager: NotifySocket, workers: int) -> None:
    restarts_by_signal(workers, 20)
    restarts_with_a_socket_unit(workers, 20)
    restarts_with_stored_sockets(manager, workers, 20)


# --- SIGUSR2 ------------------------------------------------------------------------------------------------------


def test_sessions_and_sockets_of_all_kinds_outlive_a_restart_by_signal(tmp_path: Path) -> None:
    path = tmp_path / "mqtt.sock"
    properties = Properties()
    properties.session_expiry_interval = 60
    port, websocket_port = free_port(), free_port()
    listeners = [{"host": "127.0.0.1"}, {"type": "unix", "path": str(path), "mode": "0600"},
                 {"type": "ws", "host": "127.0.0.1", "port": websocket_port}]  # fmt: skip
    with broker_on(port, 0, config={"listeners": listeners}) as broker:
        broker.wait_for_log("event=started")
        with RawClient(port) as client:
            client.connect("kept", clean_start=False, properties=properties)
            client.subscribe("t", options=1)
        inode = path.stat().st_ino
        restart_by_signal(broker)
        broker.wait_for_log("event=sockets_passed count=3")
        assert path.stat().st_ino == inode
        with StreamClient(unix_socket(path)) as sender:
            sender.connect("sender")
            sender.publish("t", b"x", 1)
        with StreamClient(WebSocketStream(tcp_socket(websocket_port))) as other:
            other.connect("other")
        with RawClient(port) as client:
            assert client.connect("kept", clean_start=False).session_present
            assert client.take().payload == b"x"
        broker.terminate()
        assert not path.exists()


def test_a_restart_is_refused_while_the_configuration_is_wrong(start_broker: Start) -> None:
    broker = start_broker()
    with RawClient(broker.port) as client:
        client.connect("c")
        broker.config.write_text("limits.max_inflight = 0\n", encoding="utf-8")
        os.kill(broker.pid, signal.SIGUSR2)
        broker.wait_for_log('event=restart_refused reason=".*max_inflight')
        client.ping()


def test_a_listener_that_is_gone_after_a_restart(tmp_path: Path) -> None:
    port, other = free_port(), free_port()
    with broker_on(port, 0, config={"listeners": [{"host": "127.0.0.1"}, {"port": other}]}) as broker:
        broker.wait_for_log("event=started")
        broker.config.write_text('[[listeners]]\nhost = "127.0.0.1"\n', encoding="utf-8")
        restart_by_signal(broker)
        broker.wait_for_log(f"event=passed_socket_closed address=127.0.0.1:{other}")
        with pytest.raises(ConnectionRefusedError):
            tcp_socket(other)


def test_the_service_manager_sees_a_restart_by_signal_as_a_reload(manager: NotifySocket) -> None:
    with broker_on(free_port(), 0, env={"NOTIFY_SOCKET": manager.address}) as broker:
        assert manager.receive() == {"READY": "1"}
        restart_by_signal(broker)
        assert manager.receive()["RELOADING"] == "1"
        assert manager.receive() == {"READY": "1"}
        broker.terminate()
        assert manager.receive() == {"STOPPING": "1"}


# --- sockets that are passed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "bound", "family"),
    [
        ("127.0.0.1", "127.0.0.1", socket.AF_INET),
        ("0.0.0.0", "0.0.0.0", socket.AF_INET),
        ("", "0.0.0.0", socket.AF_INET),
        ("localhost", "127.0.0.1", socket.AF_INET),
        pytest.param("", "::", socket.AF_INET6, marks=needs_ipv6),
        pytest.param("::1", "::1", socket.AF_INET6, marks=needs_ipv6),
    ],
)
def test_a_listener_takes_the_socket_with_its_address(start_broker: Start, host: str, bound: str, family: int) -> None:
    with listening((bound, 0), family) as sock:
        port = sock.getsockname()[1]
        broker = start_broker(
            config={"listeners": [{"host": host}]},
            arguments=["--port", str(port)],
            program=program_with([("a", sock)]),
            pass_fds=[sock.fileno()],
        )
        with RawClient(port, host="::1" if bound == "::1" else "127.0.0.1") as client:
            client.connect("c")
        broker.terminate()
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_the_file_of_a_socket_unit_stays(start_broker: Start, tmp_path: Path) -> None:
    path = tmp_path / "unit.sock"
    with listening(path) as sock:
        broker = start_broker(
            config={"listeners": [{"host": "127.0.0.1"}, {"type": "unix", "path": str(path), "mode": "0600"}]},
            program=program_with([("unit", sock)]),
            pass_fds=[sock.fileno()],
        )
        broker.wait_for_log("event=started")
        with StreamClient(unix_socket(path)) as client:
            client.connect("c")
        assert path.stat().st_mode & 0o777 == 0o666  # as the unit has it
        broker.terminate()
        assert path.is_socket()


def refused(tmp_path: Path, program: Sequence[str], descriptors: Sequence[int] = ()) -> str:
    """The only line of a broker that does not start with the sockets that it is passed."""
    command = [sys.executable, "-P", *program, "serve", "--data-dir", str(tmp_path), "--port", "0", "--http-port", "off"]
    done = subprocess.run(
        [*command, "--log-level", "error"], capture_output=True, text=True, timeout=30, cwd=tmp_path, pass_fds=descriptors
    )
    assert done.returncode == 1
    return one_line(done.stderr)


def test_a_socket_that_no_listener_has(tmp_path: Path) -> None:
    with listening(("127.0.0.1", 0)) as sock:
        line = refused(tmp_path, program_with([("mqtt.socket", sock)]), [sock.fileno()])
        port = sock.getsockname()[1]
    assert line == (f"mqttbroker: LISTEN_FDS: no listener has the address 127.0.0.1:{port} of the socket 'mqtt.socket'")


def test_a_socket_that_does_not_listen(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        line = refused(tmp_path, program_with([("udp", sock)]), [sock.fileno()])
    assert line == "mqttbroker: LISTEN_FDS: descriptor 3, 'udp', is no stream socket that listens"
    with Path(os.devnull).open() as file:
        line = refused(tmp_path, program_with([("file", file)]), [file.fileno()])
    assert line == "mqttbroker: LISTEN_FDS: descriptor 3, 'file', is no socket"


def test_variables_of_another_process_are_ignored(start_broker: Start) -> None:
    broker = start_broker(env={"LISTEN_FDS": "1", "LISTEN_PID": "1", "LISTEN_FDNAMES": "x"})
    with RawClient(broker.port) as client:
        client.connect("c")
    assert "sockets_passed" not in broker.log


@pytest.mark.parametrize("count", ["x", "-1", "1.5"])
def test_a_wrong_number_of_sockets(count: str) -> None:
    environ = {"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "", "HOME": "/"}
    with pytest.raises(ValueError, match="LISTEN_FDS: must be a number from 1 on"):
        PassedSockets(environ)
    assert environ == {"HOME": "/"}
