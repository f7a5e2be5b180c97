"""Listeners: the addresses of a host, Unix sockets and their files, and the limits of a listener."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient
from support.stream_client import StreamClient, WebSocketStream, tcp_socket, unix_socket

from mqttbroker.codec.packets import Disconnect, Publish
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED, PACKET_TOO_LARGE, SERVER_BUSY

Start = Callable[..., BrokerProcess]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def port_of(broker: BrokerProcess, kind: str) -> int:
    return int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1])


def refused(tmp_path: Path, config: str) -> str:
    """The error line of a broker that cannot listen."""
    path = tmp_path / "refused.toml"
    path.write_text(f'http.port = "off"\ndata_dir = "{tmp_path / "refused"}"\n' + config, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "mqttbroker", "serve", "--config", str(path), "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.rstrip("\n")


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        pytest.param("::1", ["::1"], marks=needs_ipv6),
        pytest.param("::", ["127.0.0.1", "::1"], marks=needs_ipv6),
        pytest.param("", ["127.0.0.1", "::1"], marks=needs_ipv6),
        ("localhost", ["localhost"]),
    ],
)
def test_the_addresses_of_a_host(start_broker: Start, host: str, addresses: list[str]) -> None:
    broker = start_broker(config={"listeners": [{"host": host}]})
    for address in addresses:
        with RawClient(broker.port, host=address) as client:
            assert client.connect("someone").reason_code == 0
    for address in {"127.0.0.1", "::1"} - set(addresses):
        if host not in ("localhost",) and (address != "::1" or has_ipv6()):
            for _ in range(5):
                with suppress(ConnectionRefusedError):
                    tcp_socket(broker.port, address).close()
                    # The broker of another test may use one port on that address, but hardly the next one, too.
                    broker = start_broker(config={"listeners": [{"host": host}]})
                    continue
                break
            else:
                pytest.fail(f"it listens on {address}")


@needs_ipv6
def test_all_addresses_of_localhost_have_the_same_port(start_broker: Start) -> None:
    broker = start_broker(config={"listeners": [{"host": "localhost"}]})
    broker.wait_for_log("event=started")
    listening = [line for line in broker.lines if "type=tcp" in line]
    known = {info[4][0] for info in socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)}
    assert len(listening) == len(known)
    assert all(f"port={broker.port}" in line for line in listening)


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(tmp_path, f"[[listeners]]\nport = {port}") == (
            f"mqttbroker: cannot listen on 127.0.0.1:{port}: Address already in use"
        )


def test_an_unknown_host_is_reported_in_one_line(tmp_path: Path) -> None:
    line = refused(tmp_path, '[[listeners]]\nhost = "nowhere.invalid"')
    assert line.startswith("mqttbroker: cannot listen on nowhere.invalid:1883: ")
    assert "Errno" not in line


# --- Unix sockets -------------------------------------------------------------------------------------------------


def unix_config(path: Path, **more: Any) -> dict[str, Any]:
    return {"listeners": [{"host": "127.0.0.1"}, {"type": "unix", "path": str(path), **more}]}


@pytest.mark.parametrize(("mode", "permissions"), [("0660", 0o660), ("600", 0o600), ("0666", 0o666)])
def test_a_unix_socket(start_broker: Start, tmp_path: Path, mode: str, permissions: int) -> None:
    path = tmp_path / "mqtt.sock"
    broker = start_broker(config=unix_config(path, mode=mode))
    broker.wait_for_log("event=started")
    assert stat.S_IMODE(path.stat().st_mode) == permissions
    with StreamClient(unix_socket(path)) as client, RawClient(broker.port) as other:
        assert client.connect("local").reason_code == 0  # anonymous from this machine
        other.connect("tcp")
        client.subscribe("unix")
        other.publish("unix", b"x", 2)
        assert client.take().payload == b"x"
    assert broker.terminate() == 0
    assert not path.exists()


def test_the_socket_file_of_a_dead_broker_is_replaced(start_broker: Start, tmp_path: Path) -> None:
    path = tmp_path / "mqtt.sock"
    broker = start_broker(config=unix_config(path))
    broker.wait_for_log("event=started")
    broker.kill()
    assert path.is_socket()
    before = len(broker.lines)
    broker.start()
    broker.wait_for_log("event=started", after=before)
    with StreamClient(unix_socket(path)) as client:
        assert client.connect("local").reason_code == 0


def test_the_socket_of_a_live_broker_is_not_replaced(start_broker: Start, tmp_path: Path) -> None:
    path = tmp_path / "mqtt.sock"
    broker = start_broker(config=unix_config(path))
    broker.wait_for_log("event=started")
    line = refused(tmp_path, f'[[listeners]]\ntype = "unix"\npath = "{path}"')
    assert line == f"mqttbroker: cannot listen on {path}: Address already in use"
    with StreamClient(unix_socket(path)) as client:
        assert client.connect("local").reason_code == 0


def test_the_socket_of_another_broker_is_not_removed(start_broker: Start, tmp_path: Path) -> None:
    path = tmp_path / "mqtt.sock"
    broker = start_broker(config=unix_config(path))
    broker.wait_for_log("event=started")
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        broker.terminate()
        assert path.exists()


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    line = refused(tmp_path, f'[[listeners]]\ntype = "unix"\npath = "{path}"')
    assert line == f"mqttbroker: cannot listen on {path}: the file exists and is not a socket"
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["missing/mqtt.sock", "x" * 200])
def test_an_invalid_socket_path_is_reported_in_one_line(tmp_path: Path, name: str) -> None:
    line = refused(tmp_path, f'[[listeners]]\ntype = "unix"\npath = "{tmp_path / name}"')
    assert line.startswith(f"mqttbroker: cannot listen on {tmp_path / name}: ")


# --- limits of one listener ---------------------------------------------------------------------------------------

OWN_LIMITS = """
limits.max_packet_size = "1KiB"
[[listeners]]
[[listeners]]
type = "ws"
port = 0
max_connections = 2
max_packet_size = "2KiB"
allow_anonymous = true
"""


def websocket(broker: BrokerProcess, version: int = 5) -> StreamClient:
    return StreamClient(WebSocketStream(tcp_socket(port_of(broker, "ws"))), version)


@pytest.mark.parametrize(("version", "code"), [(4, 3), (5, SERVER_BUSY)])
def test_connections_are_counted_for_each_listener(start_broker: Start, version: int, code: int) -> None:
    broker = start_broker(config=OWN_LIMITS)
    with websocket(broker) as first, websocket(broker) as second, RawClient(broker.port) as elsewhere:
        assert first.connect("first").reason_code == 0
        assert second.connect("second").reason_code == 0
        with websocket(broker, version) as third:
            assert third.connect("third").reason_code == code
            third.expect_closed()
        assert elsewhere.connect("elsewhere").reason_code == 0
        second.disconnect()
        with websocket(broker, version) as third:
            assert third.connect("third").reason_code == 0


def test_a_listener_has_its_own_packet_size(start_broker: Start) -> None:
    broker = start_broker(config=OWN_LIMITS)
    with websocket(broker) as large, RawClient(broker.port) as small:
        for client, limit in ((large, 2048), (small, 1024)):
            assert client.connect(f"client-{limit}").properties.maximum_packet_size == limit
            client.publish("size", bytes(limit - 20), 1)
            client.send(Publish("size", bytes(limit)))
            assert client.expect(Disconnect).reason_code == PACKET_TOO_LARGE


def test_a_listener_may_refuse_anonymous_clients(start_broker: Start, tmp_path: Path) -> None:
    path = tmp_path / "mqtt.sock"
    broker = start_broker(config=unix_config(path, allow_anonymous=False))
    broker.wait_for_log("event=started")
    with StreamClient(unix_socket(path)) as local, RawClient(broker.port) as remote:
        assert local.connect("local").reason_code == NOT_AUTHORIZED
        assert remote.connect("remote").reason_code == 0


def test_a_listener_may_accept_anonymous_clients(start_broker: Start) -> None:
    broker = start_broker(config="allow_anonymous = false\n" + OWN_LIMITS)
    with websocket(broker) as welcome, RawClient(broker.port) as refused_client:
        assert welcome.connect("welcome").reason_code == 0
        assert refused_client.connect("refused").reason_code == NOT_AUTHORIZED
