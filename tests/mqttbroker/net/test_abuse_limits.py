"""Limits by address and of single clients: connections, connects, messages and bytes per second."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.core import wait_until
from support.metric_samples import drops, samples
from support.raw_client import RawClient
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.auth.passwords import hash_password
from mqttbroker.codec.packets import Connack, Connect, Pingreq, Pingresp, Publish
from mqttbroker.codec.reason_codes import CONNECTION_RATE_EXCEEDED, QUOTA_EXCEEDED
from mqttbroker.net.abuse_limits import AddressLimits, HalfOpen
from sessions.counters import Counters

Start = Callable[..., BrokerProcess]


def test_open_connections() -> None:
    limits = AddressLimits()
    limits.add("a")
    limits.add("a")
    assert limits.is_full("a", 2) and not limits.is_full("a", 3) and not limits.is_full("b", 1)
    limits.remove("a")
    assert not limits.is_full("a", 2)
    limits.remove("a")
    assert not limits.connections


class Socket:
    """A half-open connection."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_the_oldest_half_open_connections_are_closed() -> None:
    half_open = HalfOpen(Counters())
    sockets = [Socket() for _ in range(8)]
    for number, one in enumerate(sockets):
        half_open.add(one, f"a{number % 2}", 5, 2)
    # Two of each address: the first ones of each were closed for the next.
    assert [socket.aborted for socket in sockets] == [True] * 4 + [False] * 4 and len(half_open) == 4
    half_open.remove(sockets[4])
    half_open.remove(sockets[4])
    for address in ("b", "c", ""):
        half_open.add(Socket(), address, 5, 2)
    assert sockets[5].aborted and not sockets[6].aborted and len(half_open) == 5
    assert half_open.counters.limits_reached == {"max_half_open_per_address": 4, "max_half_open": 1}
    for one in [*half_open._all]:
        half_open.remove(one)
    assert not half_open._by_address


# --- brokers ------------------------------------------------------------------------------------------------------


def proxied(**limits: Any) -> dict[str, Any]:
    """A plain listener, and one on which a client has any address."""
    return {"listeners": [{"host": "127.0.0.1"}, {"port": 0, "proxy_protocol": True}], "allow_anonymous": True, "limits": limits}


def port_of(broker: BrokerProcess, kind: str) -> int:
    """The port of the last listener of a type."""
    return [int(line.rpartition("port=")[2]) for line in broker.lines if f"event=listening type={kind}" in line][-1]


def reached(broker: BrokerProcess, limit: str) -> float:
    """How often clients have reached a limit."""
    return samples(broker.get("/metrics")).get(f"mqttbroker_limits_reached_total/{limit}", 0)


def client_from(broker: BrokerProcess, address: str, version: int = 5) -> StreamClient:
    broker.wait_for_log("event=started")
    sock = tcp_socket(port_of(broker, "tcp"))
    sock.sendall(f"PROXY TCP{6 if ':' in address else 4} {address} {'::' if ':' in address else '0.0.0.0'} 7 8\r\n".encode())
    return StreamClient(sock, version)


def answers(clients: Sequence[RawClient]) -> Counter[tuple[int, int]]:
    """The clients send CONNECT one after the other, and then wait: how often each version got each reason code.

    So a limit of one per second is reached, however slow the machine is.
    """
    for number, client in enumerate(clients):
        client.send(Connect(f"c{number}", client.version))
    return Counter((client.version, client.expect(Connack).reason_code) for client in clients)


def test_connects_of_one_address(start_broker: Start) -> None:
    broker = start_broker(config=proxied(max_connect_rate_per_address=1))
    with ExitStack() as stack:
        found = answers([stack.enter_context(client_from(broker, f"2001:db8::{number}", 5 - number % 2)) for number in range(40)])
        assert found[5, 0] + found[4, 0] >= 10 and found[5, CONNECTION_RATE_EXCEEDED] and found[4, 3]
        assert found.keys() <= {(5, 0), (4, 0), (5, CONNECTION_RATE_EXCEEDED), (4, 3)}
        other = stack.enter_context(client_from(broker, "2001:db8:0:1::1"))
        assert other.connect("c").reason_code == 0
    broker.wait_for_log('reason="Connection rate exceeded .0x9F.: too many connects of this address" user="" listener=')


@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_connects_of_one_address_with_tls(start_broker: Start, tmp_path: Path, kind: str) -> None:
    files = CertificateFiles(tmp_path)
    limits = {"max_connect_rate_per_address": 1, "connect_timeout": "1h"}
    broker = start_broker(config={**files.config(kind), "limits": limits})
    port = int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1])
    accepted, closed = 0, 0
    with ExitStack() as stack:
        # All are open before the first handshake, which takes some time.
        for number, opened in enumerate([stack.enter_context(tcp_socket(port)) for _ in range(40)]):
            try:
                sock = stack.enter_context(files.client().wrap_socket(opened, server_hostname="localhost"))
                client = StreamClient(WebSocketStream(sock) if kind == "wss" else sock)
                accepted += client.connect(f"c{number}").reason_code == 0
            except OSError:
                closed += 1
    assert accepted >= 10 and closed >= 1 and accepted + closed == 40
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

        def accepted() -> bool:
            with client_from(broker, "192.0.2.1") as again:
                return again.connect("again").reason_code == 0

        wait_until(accepted)  # until the closed connection counts no more


def test_publish_rate(start_broker: Start) -> None:
    broker = start_broker(config={"limits": {"max_publish_rate": 200}})
    with RawClient(broker.port) as loud, RawClient(broker.port) as quiet:
        assert loud.connect("loud", keep_alive=1).reason_code == quiet.connect("quiet").reason_code == 0
        quiet.subscribe("t/#")
        begin = time.monotonic()
        loud.send(*(Publish(f"t/{number}", bytes(200), 0) for number in range(700)), Pingreq())
        for number in range(700):
            assert quiet.wait_for(Publish).topic == f"t/{number}"
        loud.expect(Pingresp)  # its keep alive does not end while it is not read
        assert time.monotonic() - begin > 2.0  # the first second's worth comes at once


def test_receive_rate_and_reload(start_broker: Start) -> None:
    broker = start_broker(config={"limits": {"max_receive_rate": "100KiB"}})
    with RawClient(broker.port) as slow:
        slow.connect("slow")
        begin = time.monotonic()
        assert slow.publish("t", bytes(300 * 1024), 1) < 0x80
        slow.ping()
        assert time.monotonic() - begin > 1.5
    text = broker.config.read_text(encoding="utf-8").replace("100KiB", "0B")
    broker.config.write_text(text, encoding="utf-8")
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=setting_changed key=limits.max_receive_rate")
    broker.wait_for_log("event=reloaded")
    with RawClient(broker.port) as fast:
        fast.connect("fast")
        before = reached(broker, "max_receive_rate")
        assert fast.publish("t", bytes(3_000_000), 1) < 0x80
        assert reached(broker, "max_receive_rate") == before >= 1


def test_many_clients_of_one_address_by_default(start_broker: Start) -> None:
    broker = start_broker()
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.port)) for _ in range(300)]
        assert all(isinstance(client.connect(f"c{n}"), Connack) for n, client in enumerate(clients))
        for client in clients:
            client.publish("t", b"x", 1)


def test_connects_of_one_listener(start_broker: Start) -> None:
    """A listener overrides the limit; connects of all its addresses count together."""
    config = proxied()
    config["listeners"][1]["max_connect_rate"] = 1
    broker = start_broker(config=config)
    with ExitStack() as stack:
        found = answers([stack.enter_context(client_from(broker, f"192.0.2.{number}", 5 - number % 2)) for number in range(40)])
    assert found[5, 0] + found[4, 0] >= 10 and found[5, CONNECTION_RATE_EXCEEDED] + found[4, 3] >= 1
    for number in range(20):
        with RawClient(broker.port) as plain:
            assert plain.connect("d").reason_code == 0
    assert reached(broker, "max_connect_rate") >= 1


def readable(sockets: list[socket.socket]) -> list[socket.socket]:
    return select.select(sockets, [], [], 0)[0]


@pytest.mark.parametrize("kind", ["tcp", "tls", "ws"])
def test_half_open_connections_of_one_address(start_broker: Start, tmp_path: Path, kind: str) -> None:
    files = CertificateFiles(tmp_path)
    config = files.config(kind) if kind == "tls" else {"listeners": [{"host": "127.0.0.1"}, {"port": 0, "type": kind}]}
    broker = start_broker(config={**config, "limits": {"max_half_open_per_address": 5, "connect_timeout": "1h"}})
    broker.wait_for_log("event=started")
    port = port_of(broker, kind)
    with ExitStack() as stack:
        sockets = [stack.enter_context(tcp_socket(port)) for _ in range(8)]
        wait_until(lambda: len(readable(sockets)) == 3)
        # Workers accept side by side, so any three may be the oldest that the broker knows.
        assert readable(sockets) == sockets[:3] or "TEST_WORKERS" in os.environ
        assert all(sock.recv(1) == b"" for sock in readable(sockets))
        found = samples(broker.get("/metrics"))
        assert found["mqttbroker_limits_reached_total/max_half_open_per_address"] == 3
        stream: Any = stack.enter_context(tcp_socket(port))
        if kind == "tls":
            stream = stack.enter_context(files.client().wrap_socket(stream, server_hostname="localhost"))
        client = StreamClient(WebSocketStream(stream) if kind == "ws" else stream)
        assert client.connect("c").reason_code == 0
        stack.enter_context(tcp_socket(port))
        client.ping()  # it is no longer half-open


@pytest.mark.parametrize("kind", ["tcp", "ws"])
@pytest.mark.parametrize("limits", [{"max_delivery_rate": 100}, {"max_send_rate": "10400B"}], ids=str)
def test_delivery_rate(start_broker: Start, kind: str, limits: dict[str, int]) -> None:
    broker = start_broker(config={
        "listeners": [{"host": "127.0.0.1"}, {"port": 0, "type": kind, **limits}], "allow_anonymous": True,
    })  # fmt: skip
    broker.wait_for_log("event=started")
    with RawClient(broker.port) as publisher, tcp_socket(port_of(broker, kind)) as sock:
        client = StreamClient(WebSocketStream(sock) if kind == "ws" else sock)
        client.connect("slow")
        client.subscribe("t/#")
        publisher.connect("fast")
        begin = time.monotonic()
        publisher.send(*(Publish(f"t/{number:03}", bytes(95), 1, packet_id=number + 1) for number in range(250)))
        for number in range(250):
            assert client.take().topic == f"t/{number:03}"
        assert time.monotonic() - begin > 1.2  # the first second's worth comes at once
        client.ping()
        name = next(iter(limits))
        assert samples(broker.get("/metrics"))[f"mqttbroker_limits_reached_total/{name}"] >= 1


def test_publish_rate_of_a_user_and_of_a_listener(start_broker: Start, tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(f"alice:{hash_password(b'x')}\nbob:{hash_password(b'x')}\n")
    broker = start_broker(config={
        "password_file": str(users),
        "limits": {"max_publish_rate_per_user": 200, "max_receive_rate_per_listener": "1MiB"},
    })  # fmt: skip
    with ExitStack() as stack:
        one, two, other = (stack.enter_context(RawClient(broker.port)) for _ in range(3))
        for client, name in ((one, "alice"), (two, "alice"), (other, "bob")):
            assert client.connect(f"c-{client.socket.getsockname()[1]}", username=name, password=b"x").reason_code == 0
        begin = time.monotonic()
        for client in (one, two):
            client.send(*(Publish("t", b"", 0) for _ in range(250)))
        other.ping()  # it does not wait for them
        one.ping()
        two.ping()
        assert time.monotonic() - begin > 1.2  # 500 messages of one user, of which 200 may come at once
        begin = time.monotonic()
        other.publish("u", bytes(2_500_000), 1)
        other.ping()
        assert time.monotonic() - begin > 1.0
        found = samples(broker.get("/metrics"))
        assert found["mqttbroker_limits_reached_total/max_publish_rate_per_user"] >= 1
        assert found["mqttbroker_limits_reached_total/max_receive_rate_per_listener"] >= 1


def test_rate_to_all_clients_of_a_listener(start_broker: Start) -> None:
    """100 of 300 messages may pass at once; the others wait, and none is lost. The other listener has no limit."""
    limited = {"host": "127.0.0.1", "port": 0, "max_delivery_rate_per_listener": 100}
    broker = start_broker(config={"listeners": [{"host": "127.0.0.1", "port": 0}, limited]})
    port = int(broker.wait_for_log(rf"event=listening type=tcp .*port=(?!{broker.port}\b)(\d+)")[1])
    with ExitStack() as stack:
        publisher, free = stack.enter_context(RawClient(broker.port)), stack.enter_context(RawClient(broker.port))
        clients = [stack.enter_context(RawClient(port)) for _ in range(3)]
        for number, client in enumerate((publisher, free, *clients)):
            client.connect(f"c{number}")
            client.subscribe(f"t/{number}", options=1)
        begin = time.monotonic()
        publisher.send(*(
            Publish(f"t/{topic}", b"%d" % number, 1, packet_id=4 * number + topic) for number in range(100) for topic in (1, 2, 3, 4)
        ))  # fmt: skip
        for client in (free, *clients):
            assert [int(client.take().payload) for _ in range(100)] == list(range(100))
        assert time.monotonic() - begin > 1.5
        found = samples(broker.get("/metrics"))
        assert found["mqttbroker_limits_reached_total/max_delivery_rate_per_listener"] >= 1
        assert drops(found, "rate") == 0


def test_a_fleet_behind_one_nat_reconnects_at_once_by_default(start_broker: Start) -> None:
    broker = start_broker()
    devices = 1500

    async def connect(number: int, version: int) -> tuple[int, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        writer.write(Connect(f"d{number}", version, False, 60).encode(version))
        answer = await asyncio.wait_for(reader.readexactly(4), 60)
        return answer[3], writer

    async def fleet() -> list[int]:
        found = await asyncio.gather(*(connect(number, 5 - number % 2) for number in range(devices)))
        for _, writer in found:
            writer.close()
        return [code for code, _ in found]

    for _ in range(3):
        assert asyncio.run(fleet()) == [0] * devices
    found = samples(broker.get("/metrics"))
    assert not [name for name in found if name.startswith("mqttbroker_limits_reached_total")]
    assert found["mqttbroker_bans_started_total/reconnects"] == found["mqttbroker_bans"] == 0
