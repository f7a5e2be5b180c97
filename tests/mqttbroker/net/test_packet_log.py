"""The lines of connections at the levels ``info`` and ``debug``."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.raw_client import RawClient
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.auth.passwords import hash_password
from mqttbroker.codec import packets as p
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import BAD_USER_NAME_OR_PASSWORD
from mqttbroker.net.packet_log import DESCRIBED, Packet, PacketScanner

Start = Callable[..., BrokerProcess]

FILTERS = [p.Subscription("a/+", 1), p.Subscription("b/#", 2), p.Subscription("c", 0)]
PROPERTIES = Properties()
PROPERTIES.user_properties = [("x", "y" * 200)]


def described(version: int) -> list[tuple[bytes, Packet]]:
    """Packets of a client, and how they are described."""
    named = PROPERTIES if version == 5 else None
    made: list[tuple[p.Packet | bytes, tuple[Any, ...]]] = [
        (p.Connect("c", version, username="u", password=b"secret"), ("CONNECT", 0, "", 0, 0)),
        (p.Subscribe(7, FILTERS, named), ("SUBSCRIBE", 7, "a/+,b/#,c", 2, 0)),
        (p.Unsubscribe(8, ["a/+", "d"], named), ("UNSUBSCRIBE", 8, "a/+,d", 0, 0)),
        (p.Publish("t/ü", b"payload", 0, True, False, 0, named), ("PUBLISH", 0, "t/ü", 0, 1)),
        (p.Publish("t", bytes(20_000), 1, False, False, 9), ("PUBLISH", 9, "t", 1, 0)),
        (p.Publish("u", b"", 2, False, True, 65535), ("PUBLISH", 65535, "u", 2, 0)),
        (p.Puback(9), ("PUBACK", 9, "", 0, 0)),
        (p.Pubrel(10), ("PUBREL", 10, "", 0, 0)),
        (p.Pingreq(), ("PINGREQ", 0, "", 0, 0)),
        (p.Disconnect(), ("DISCONNECT", 0, "", 0, 0)),
    ]
    found = []
    for packet, fields in made:
        data = packet if isinstance(packet, bytes) else packet.encode(version)
        found.append((data, Packet(*fields, len(data))))
    return found


@pytest.mark.parametrize("version", [4, 5])
def test_packets_in_any_pieces(version: int) -> None:
    pairs = described(version)
    data, expected = b"".join(pair[0] for pair in pairs), [pair[1] for pair in pairs]
    assert PacketScanner().feed(data) == expected
    for cut in [*range(2000), *range(2000, len(data), 97)]:
        scanner = PacketScanner()
        assert scanner.feed(data[:cut]) + scanner.feed(data[cut:]) == expected
    scanner = PacketScanner()
    assert [packet for index in range(len(data)) for packet in scanner.feed(data[index : index + 1])] == expected


def test_long_packets_are_not_kept() -> None:
    scanner = PacketScanner()
    large = p.Publish("t", bytes(1_000_000), 1, False, False, 3).encode(5)
    assert scanner.feed(large[:100]) == [Packet("PUBLISH", 3, "t", 1, 0, len(large))]
    assert scanner._pending == b""
    assert scanner.feed(large[100:] + b"\xc0\x00") == [Packet("PINGREQ", 0, "", 0, 0, 2)]
    many = p.Subscribe(4, [p.Subscription("f" * 1000, 1)] * 1000).encode(4)
    kept = 0
    found = []
    for start in range(0, len(many), 1000):
        found += scanner.feed(many[start : start + 1000])
        kept = max(kept, len(scanner._pending))
    assert kept <= DESCRIBED and [(packet.name, packet.packet_id, packet.size) for packet in found] == [("SUBSCRIBE", 4, len(many))]


@given(st.binary(max_size=500), st.integers(1, 50))
def test_any_bytes_are_described_the_same_in_any_pieces(data: bytes, size: int) -> None:
    scanner = PacketScanner()
    pieces = [packet for start in range(0, len(data), size) for packet in scanner.feed(data[start : start + size])]
    assert pieces == PacketScanner().feed(data)


# --- brokers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "ws", "tls", "wss"])
def test_lines_of_packets(start_broker: Start, tmp_path: Path, kind: str) -> None:
    files = CertificateFiles(tmp_path)
    config = files.config(kind) if kind in ("tls", "wss") else {"listeners": [{"host": "127.0.0.1"}, {"type": kind, "port": 0}]}
    broker = start_broker(config={**config, "log": {"level": "debug"}})
    broker.wait_for_log("event=started")
    port = [int(line.rpartition("port=")[2]) for line in broker.lines if f"event=listening type={kind} " in line][-1]
    sock: Any = tcp_socket(port)
    if kind in ("tls", "wss"):
        sock = files.client().wrap_socket(sock, server_hostname="localhost")
    payload = b"%x" % random.getrandbits(200) + bytes(3_000_000)
    with StreamClient(WebSocketStream(sock) if kind in ("ws", "wss") else sock) as client:
        client.connect("seen", username="somebody", password=b"hunter2")
        client.subscribe("a/+", "b")
        client.publish("a/1", payload, 1)
        assert client.take().payload == payload
        client.disconnect()
    size = len(p.Publish("a/1", payload, 1, False, False, 2).encode(5))
    for line in (
        'event=packet_received client="" address=127.0.0.1:\\d+ type=CONNECT packet_id=0 topic="" qos=0 retain=0 size=',
        "event=packet_sent client=seen address=\\S+ type=CONNACK ",
        "event=packet_received client=seen address=\\S+ type=SUBSCRIBE packet_id=1 topic=a/.,b qos=2 retain=0 size=",
        f"event=packet_received client=seen address=\\S+ type=PUBLISH packet_id=2 topic=a/1 qos=1 retain=0 size={size}$",
        f"event=packet_sent client=seen address=\\S+ type=PUBLISH packet_id=1 topic=a/1 qos=1 retain=0 size={size}$",
        "event=packet_sent client=seen address=\\S+ type=PUBACK packet_id=2 ",
        "event=packet_received client=seen address=\\S+ type=PUBACK packet_id=1 ",
        "event=packet_received client=seen address=\\S+ type=DISCONNECT ",
    ):
        broker.wait_for_log(line)
    assert "hunter2" not in broker.log and payload[:20].decode() not in broker.log
    assert broker.log.count("type=PUBLISH") == 2
    assert all(" event=" in line for line in broker.lines)


def test_a_client_that_does_not_read(start_broker: Start) -> None:
    broker = start_broker(config={"log": {"level": "debug"}})
    payload, count = bytes(1_000_000), 20
    with RawClient(broker.port) as slow, RawClient(broker.port) as publisher:
        slow.connect("slow")
        slow.subscribe("a")
        publisher.connect("publisher")
        for _ in range(count):
            publisher.publish("a", payload, 1)
        for _ in range(count):
            assert slow.take().payload == payload
        slow.ping()


def test_lines_of_connections(start_broker: Start, tmp_path: Path) -> None:
    users = tmp_path / "users.txt"
    users.write_text(f"alice:{hash_password(b'secret')}\n", encoding="utf-8")
    broker = start_broker(config={"password_file": str(users), "allow_anonymous": False})
    with RawClient(broker.port) as client:
        client.connect("pump", username="alice", password=b"secret")
        client.disconnect(4)
    with RawClient(broker.port) as client:
        assert client.connect("pump", username="mallory x", password=b"no").reason_code == BAD_USER_NAME_OR_PASSWORD
    listener = r"listener=127.0.0.1:\d+$"
    broker.wait_for_log(r"event=connected client=pump address=\S+ version=5 clean_start=True keep_alive=0 user=alice " + listener)
    broker.wait_for_log(r'event=disconnected client=pump address=\S+ reason="DISCONNECT: .*" user=alice ' + listener)
    broker.wait_for_log(r'event=refused client=pump address=\S+ reason=".*" user="mallory x" ' + listener)
    assert "event=packet" not in broker.log


def test_the_level_is_that_of_the_beginning_of_a_connection(start_broker: Start) -> None:
    broker = start_broker(config={"log": {"level": "info"}})

    def change(before: str, after: str) -> None:
        text = broker.config.read_text(encoding="utf-8").replace(before, after)
        broker.config.write_text(text, encoding="utf-8")
        first = len(broker.lines)
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log(f"event=log_level to={after}", after=first)

    with RawClient(broker.port) as early:
        early.connect("early")
        change("info", "debug")
        early.ping()
        with RawClient(broker.port) as late:
            late.connect("late")
            late.ping()
            broker.wait_for_log("event=packet_sent client=late .*type=PINGRESP")
            change("debug", "info")
            first = len(broker.lines)
            late.publish("t", b"", 1)
            late.ping()
            early.ping()
        broker.wait_for_log("event=disconnected client=late", after=first)
        assert not [line for line in broker.lines[first:] if "event=packet" in line]
    assert not [line for line in broker.lines if "event=packet" in line and "client=early" in line]
