"""Limits by address and of single clients: connections, connects, messages and bytes per second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.raw_client import RawClient
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.codec.packets import Connack, Publish
from mqttbroker.codec.reason_codes import CONNECTION_RATE_EXCEEDED, QUOTA_EXCEEDED
from mqttbroker.net.abuse_limits import MAX_ADDRESSES, AddressLimits, ReceiveRate

Start = Callable[..., BrokerProcess]


def test_connects_per_second() -> None:
    limits = AddressLimits()
    assert [limits.connect("a", 2, 0.0) for _ in range(22)] == [True] * 20 + [False] * 2  # ten seconds' worth at once
    assert limits.connect("b", 2, 0.0)
    assert [limits.connect("a", 2, 1.0) for _ in range(3)] == [True, True, False]
    assert [limits.connect("a", 2, 100.0) for _ in range(21)] == [True] * 20 + [False]


def test_the_table_of_addresses_is_bounded() -> None:
    limits = AddressLimits()
    for number in range(1000):
        limits.connect(f"a{number}", 1, number / 1000)
    assert len(limits.due) == 1000
    for number in range(600):
        limits.connect(f"b{number}", 1, 50.0)
    assert len(limits.due) <= 601  # full buckets are forgotten
    for number in range(MAX_ADDRESSES + 1000):
        limits.connect(f"c{number}", 1, 50.0)
    assert len(limits.due) == MAX_ADDRESSES


def test_open_connections() -> None:
    limits = AddressLimits()
    limits.add("a")
    limits.add("a")
    assert limits.is_full("a", 2) and not limits.is_full("a", 3) and not limits.is_full("b", 1)
    limits.remove("a")
    assert not limits.is_full("a", 2)
    limits.remove("a")
    assert not limits.connections


def test_rates_of_one_client() -> None:
    rate = ReceiveRate(10, 0)
    assert rate.receive(10, 1 << 30, 5.0) == pytest.approx(0)
    assert rate.receive(5, 0, 5.0) == pytest.approx(0.5)
    assert rate.receive(0, 1000, 5.5) == pytest.approx(0)
    rate = ReceiveRate(0, 1000)
    assert rate.receive(1000, 3000, 5.0) == pytest.approx(2)
    assert rate.receive(0, 0, 7.0) == pytest.approx(0)
    assert rate.receive(0, 0, 70.0) < 0


# --- brokers ------------------------------------------------------------------------------------------------------


def proxied(**limits: Any) -> dict[str, Any]:
    """A plain listener, and one on which a client has any address."""
    return {"listeners": [{"host": "127.0.0.1"}, {"port": 0, "proxy_protocol": True}], "allow_anonymous": True,
            "limits": limits}


def client_from(broker: BrokerProcess, address: str, version: int = 5) -> StreamClient:
    broker.wait_for_log("event=started")
    port = [int(line.rpartition("port=")[2]) for line in broker.lines if "event=listening type=tcp" in line][-1]
    sock = tcp_socket(port)
    sock.sendall(
        f"PROXY TCP{6 if ':' in address else 4} {address} {'::' if ':' in address else '0.0.0.0'} 7 8\r\n".encode()
    )
    return StreamClient(sock, version)


def test_connects_of_one_address(start_broker: Start) -> None:
    broker = start_broker(config=proxied(max_connect_rate_per_address=1))
    codes = []
    for number in range(13):
        with client_from(broker, f"2001:db8::{number}") as client:
            codes.append(client.connect("c").reason_code)
    assert codes[:10] == [0] * 10 and CONNECTION_RATE_EXCEEDED in codes[10:]
    with client_from(broker, "2001:db8::99", version=4) as client:
        assert client.connect("c").reason_code == 3
    with client_from(broker, "2001:db8:0:1::1") as client:
        assert client.connect("c").reason_code == 0
    broker.wait_for_log('reason="Connection rate exceeded .0x9F.: too many connects of this address" user="" listener=')


@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_connects_of_one_address_with_tls(start_broker: Start, tmp_path: Path, kind: str) -> None:
    files = CertificateFiles(tmp_path)
    broker = start_broker(config={**files.config(kind), "limits": {"max_connect_rate_per_address": 1}})
    port = int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1])
    accepted, closed = 0, 0
    for number in range(13):
        try:
            with files.client().wrap_socket(tcp_socket(port), server_hostname="localhost") as sock:
                client = StreamClient(WebSocketStream(sock) if kind == "wss" else sock)
                accepted += client.connect(f"c{number}").reason_code == 0
        except OSError:
            closed += 1
    assert accepted >= 10 and closed >= 1 and accepted + closed == 13
    broker.wait_for_log('event=refused client="" .* reason="too many connects of this address"')


def test_connections_of_one_address(start_broker: Start) -> None:
    broker = start_broker(config=proxied(max_connections_per_address=2))
    with ExitStack() as stack:
        one, two, three = [stack.enter_context(client_from(broker, "192.0.2.1")) for _ in range(3)]
        assert (one.connect("one").reason_code, two.connect("two").reason_code) == (0, 0)
        assert three.connect("three").reason_code == QUOTA_EXCEEDED
        other = stack.enter_context(client_from(broker, "192.0.2.2"))
        assert other.connect("other").reason_code == 0
        one.disconnect()
        broker.wait_for_log("event=disconnected client=one ")
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with client_from(broker, "192.0.2.1") as again:
                if again.connect("again").reason_code == 0:
                    break
        else:
            pytest.fail("the closed connection still counts")


def test_publish_rate(start_broker: Start) -> None:
    broker = start_broker(config={"limits": {"max_publish_rate": 200}})
    with RawClient(broker.port) as loud, RawClient(broker.port) as quiet:
        assert loud.connect("loud", keep_alive=1).reason_code == quiet.connect("quiet").reason_code == 0
        quiet.subscribe("t/#")
        begin = time.monotonic()
        loud.send(*(Publish(f"t/{number}", bytes(200), 0) for number in range(700)))
        for number in range(700):
            assert quiet.wait_for(Publish).topic == f"t/{number}"
        assert 2.0 < time.monotonic() - begin < 4.5  # the first second's worth comes at once
        loud.ping()  # the keep alive of a client that is not read goes on


def test_receive_rate_and_reload(start_broker: Start) -> None:
    broker = start_broker(config={"limits": {"max_receive_rate": "100KiB"}})
    with RawClient(broker.port) as slow:
        slow.connect("slow")
        begin = time.monotonic()
        assert slow.publish("t", bytes(300 * 1024), 1) < 0x80
        slow.ping()
        assert 1.5 < time.monotonic() - begin < 4.5
    text = broker.config.read_text(encoding="utf-8").replace("100KiB", "0B")
    broker.config.write_text(text, encoding="utf-8")
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=setting_changed key=limits.max_receive_rate")
    broker.wait_for_log("event=log_level")
    with RawClient(broker.port) as fast:
        fast.connect("fast")
        begin = time.monotonic()
        assert fast.publish("t", bytes(3_000_000), 1) < 0x80
        assert time.monotonic() - begin < 2


def test_many_clients_of_one_address_by_default(start_broker: Start) -> None:
    broker = start_broker()
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.port)) for _ in range(300)]
        assert all(isinstance(client.connect(f"c{n}"), Connack) for n, client in enumerate(clients))
        begin = time.monotonic()
        for client in clients:
            client.publish("t", b"x", 1)
        assert time.monotonic() - begin < 10
