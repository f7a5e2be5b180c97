"""The PROXY protocol: its headers in all pieces, and brokers behind a proxy."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.config_files import problems, write
from support.core import wait_until
from support.metric_samples import samples
from support.stream_client import StreamClient, WebSocketStream, tcp_socket, unix_socket

from mqttbroker.codec.packets import Connect
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED
from mqttbroker.net.proxy_protocol import MAX_BLOCK, MAX_LINE, ProxyHeader, ProxyHeaderError

Start = Callable[..., BrokerProcess]

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
V4 = socket.inet_aton("203.0.113.7") + socket.inet_aton("10.0.0.1") + struct.pack("!HH", 50000, 1883)
V6 = socket.inet_pton(socket.AF_INET6, "2001:db8::7") + bytes(16) + struct.pack("!HH", 50000, 1883)
MAPPED = socket.inet_pton(socket.AF_INET6, "::ffff:203.0.113.7") + bytes(16) + struct.pack("!HH", 50000, 1883)


def block(command: int, family: int, data: bytes, size: int | None = None) -> bytes:
    """A version 2 header."""
    return SIGNATURE + struct.pack("!BBH", command, family, len(data) if size is None else size) + data


HEADERS = [
    (b"PROXY TCP4 203.0.113.7 10.0.0.1 50000 1883\r\n", "203.0.113.7:50000"),
    (b"PROXY TCP4 255.255.255.255 255.255.255.255 65535 65535\r\n", "255.255.255.255:65535"),
    (b"PROXY TCP4 1.2.3.4 5.6.7.8 0 0\r\n", "1.2.3.4:0"),
    (b"PROXY TCP6 2001:db8::7 ::1 50000 1883\r\n", "2001:db8::7:50000"),
    (
        b"PROXY TCP6 " + b" ".join([b":".join([b"ffff"] * 8)] * 2) + b" 65535 65535\r\n",
        ":".join(["ffff"] * 8) + ":65535",
    ),
    (b"PROXY TCP6 ::ffff:203.0.113.7 ::1 50000 1883\r\n", "203.0.113.7:50000"),
    (b"PROXY UNKNOWN\r\n", None),
    (b"PROXY UNKNOWN " + b"f" * 91 + b"\r\n", None),
    (block(0x21, 0x11, V4), "203.0.113.7:50000"),
    (block(0x21, 0x12, V4), "203.0.113.7:50000"),
    (block(0x21, 0x21, V6), "2001:db8::7:50000"),
    (block(0x21, 0x21, MAPPED), "203.0.113.7:50000"),
    (block(0x21, 0x11, V4 + b"\x04\x00\x03abc"), "203.0.113.7:50000"),
    (block(0x21, 0x11, V4.ljust(MAX_BLOCK, b"\0")), "203.0.113.7:50000"),
    (block(0x21, 0x31, bytes(216)), None),
    (block(0x21, 0x00, b""), None),
    (block(0x21, 0x00, b"anything"), None),
    (block(0x20, 0x00, b""), None),
    (block(0x20, 0xFF, V4), None),  # the family of LOCAL is ignored
]

WRONG = [
    (Connect("no-header").encode(5), "missing"),
    (b"\x16\x03\x01\x02\x00", "missing"),  # TLS
    (b"GET / HTTP/1.1\r\n\r\n", "missing"),
    (b"PROXY_TCP4", "missing"),
    (b"proxy TCP4 1.2.3.4 5.6.7.8 1 2\r\n", "missing"),
    (b"PROXY \r\n", "malformed"),
    (b"PROXY TCP5 1.2.3.4 5.6.7.8 1 2\r\n", "malformed"),
    (b"PROXY UNKNOWNS\r\n", "malformed"),
    (b"PROXY TCP4 1.2.3.4 5.6.7.8 1\r\n", "malformed"),
    (b"PROXY TCP4  1.2.3.4 5.6.7.8 1 2\r\n", "malformed"),
    (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2 \r\n", "malformed"),
    (b"PROXY TCP4 1.2.3.04 5.6.7.8 1 2\r\n", "malformed address"),
    (b"PROXY TCP4 1.2.3 5.6.7.8 1 2\r\n", "malformed address"),
    (b"PROXY TCP4 ::1 ::1 1 2\r\n", "malformed address"),
    (b"PROXY TCP6 1.2.3.4 5.6.7.8 1 2\r\n", "malformed address"),
    (b"PROXY TCP6 fe80::1%lo ::1 1 2\r\n", "malformed address"),
    (b"PROXY TCP4 \xb9.2.3.4 5.6.7.8 1 2\r\n", "malformed address"),
    (b"PROXY TCP4 1.2.3.4 5.6.7.8 65536 2\r\n", "malformed port"),
    (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 -2\r\n", "malformed port"),
    (b"PROXY TCP4 1.2.3.4 5.6.7.8 01 2\r\n", "malformed port"),
    (b"PROXY UNKNOWN " + b"f" * 92 + b"\r\n", "more than 107 bytes"),
    (b"PROXY TCP4 ".ljust(MAX_LINE, b"1"), "more than 107 bytes"),
    (SIGNATURE[:-1] + b"\r", "missing"),
    (SIGNATURE + b"\x11", "unknown version or command"),
    (SIGNATURE + b"\x22", "unknown version or command"),
    (block(0x21, 0x13, V4), "unknown address family"),
    (block(0x21, 0x41, V4), "unknown address family"),
    (block(0x21, 0x11, V4[:-1]), "too short for its addresses"),
    (block(0x21, 0x21, V4), "too short for its addresses"),
    (block(0x21, 0x31, bytes(215)), "too short for its addresses"),
    (block(0x21, 0x11, b"", MAX_BLOCK + 1), "more than 4112 bytes"),
]


# --- headers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "source"), HEADERS)
def test_headers_in_one_and_two_pieces(data: bytes, source: str | None) -> None:
    after = b"\x10\x0c\x00\x04MQTT"
    for cut in range(len(data) + 1):
        header = ProxyHeader()
        if cut < len(data):
            assert header.feed(data[:cut]) == cut and not header.complete
            cut_used = cut
        else:
            cut_used = 0
        assert header.feed(data[cut_used:] + after) == len(data) - cut_used
        assert header.complete and header.source == source


@pytest.mark.parametrize(("data", "source"), HEADERS)
def test_headers_byte_by_byte(data: bytes, source: str | None) -> None:
    header = ProxyHeader()
    for index in range(len(data)):
        assert not header.complete and header.feed(data[index : index + 1]) == 1
    assert header.complete and header.source == source


@pytest.mark.parametrize(("data", "reason"), WRONG)
def test_wrong_headers_in_one_and_two_pieces(data: bytes, reason: str) -> None:
    for cut in range(len(data) + 1):
        header = ProxyHeader()
        with pytest.raises(ProxyHeaderError) as error:
            header.feed(data[:cut])
            header.feed(data[cut:])
        assert str(error.value) == reason


@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(lambda end: b"PROXY TCP4 " + end),
        st.binary(max_size=200).map(lambda end: SIGNATURE + end),
        st.tuples(st.sampled_from([data for data, _ in HEADERS]), st.integers(0, 60), st.binary(min_size=1, max_size=3)).map(
            lambda edit: edit[0][: edit[1]] + edit[2] + edit[0][edit[1] + len(edit[2]) :]
        ),
    ),
    st.integers(1, 40),
)
def test_any_bytes_give_the_same_in_one_piece_and_in_many(data: bytes, size: int) -> None:
    def outcome(pieces: list[bytes]) -> tuple[bool, str | None, int, str]:
        header, used = ProxyHeader(), 0
        try:
            for piece in pieces:
                if not header.complete:
                    used += header.feed(piece)
        except ProxyHeaderError as error:
            return False, None, 0, str(error)
        return header.complete, header.source, used, ""

    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert outcome([data]) == outcome(pieces)


# --- brokers ------------------------------------------------------------------------------------------------------

CLIENT = HEADERS[0][0]


def config(**listener: Any) -> dict[str, Any]:
    """A listener for the tests themselves, and one behind a proxy."""
    return {
        "listeners": [{"host": "127.0.0.1"}, {"port": 0, "proxy_protocol": True, **listener}],
        "allow_anonymous": True,
    }


def port_of(broker: BrokerProcess, kind: str = "tcp") -> int:
    broker.wait_for_log("event=started")
    ports = [int(line.rpartition("port=")[2]) for line in broker.lines if f"event=listening type={kind} " in line]
    return ports[-1]


def open_socket(broker: BrokerProcess, header: bytes, kind: str = "tcp") -> socket.socket:
    sock = tcp_socket(port_of(broker, kind))
    sock.sendall(header)
    return sock


@pytest.mark.parametrize("header", [HEADERS[0][0], HEADERS[12][0], HEADERS[13][0]], ids=["v1", "v2", "v2-long"])
@pytest.mark.parametrize("kind", ["tcp", "ws", "tls", "wss", "unix"])
def test_every_kind_of_listener(start_broker: Start, tmp_path: Path, kind: str, header: bytes) -> None:
    files = CertificateFiles(tmp_path)
    more: dict[str, Any] = {"type": kind}
    if kind in ("tls", "wss"):
        more |= {"certfile": str(files.certfile), "keyfile": str(files.keyfile)}
    if kind == "unix":
        more = {"type": kind, "path": str(tmp_path / "s")}
    settings = config(**more)
    if kind == "unix":
        del settings["listeners"][1]["port"]
    broker = start_broker(config=settings)
    broker.wait_for_log("event=started")
    sock: Any = unix_socket(tmp_path / "s") if kind == "unix" else tcp_socket(port_of(broker, kind))
    sock.sendall(header)
    if kind in ("tls", "wss"):
        sock = files.client().wrap_socket(sock, server_hostname="localhost")
    with StreamClient(WebSocketStream(sock) if kind in ("ws", "wss") else sock) as client:
        assert client.connect("behind").reason_code == 0
        client.subscribe("t")
        client.publish("t", b"x" * 100_000, 2)
        assert client.take().payload == b"x" * 100_000
    broker.wait_for_log("event=connected client=behind address=203.0.113.7:50000 ")
    broker.wait_for_log("event=disconnected client=behind address=203.0.113.7:50000 ")


def test_header_and_connect_in_one_segment(start_broker: Start) -> None:
    broker = start_broker(config=config())
    for header, source in HEADERS[:4] + HEADERS[8:12]:
        sock = open_socket(broker, header + Connect("together", 5).encode(5))
        with StreamClient(sock) as client:
            assert client.receive().reason_code == 0  # type: ignore[attr-defined]
        broker.wait_for_log(f"event=connected client=together address={source} ")


def test_header_byte_by_byte(start_broker: Start) -> None:
    broker = start_broker(config=config())
    for header in (CLIENT, HEADERS[12][0]):
        with tcp_socket(port_of(broker)) as sock:
            for index in range(len(header)):
                sock.sendall(header[index : index + 1])
                time.sleep(0.002)
            assert StreamClient(sock).connect("slow").reason_code == 0


LOCAL, UNKNOWN = HEADERS[17][0], HEADERS[6][0]


@pytest.mark.parametrize(
    ("header", "welcome"),
    [
        (CLIENT, False),  # through a proxy on this machine
        (b"PROXY TCP4 127.0.0.1 127.0.0.1 5000 1883\r\n", True),
        (b"PROXY TCP6 ::1 ::1 5000 1883\r\n", True),
        (LOCAL, False),
        (UNKNOWN, False),
        (HEADERS[14][0], False),  # a Unix socket of the proxy
    ],
)
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_loopback(start_broker: Start, tmp_path: Path, header: bytes, welcome: bool, kind: str) -> None:
    path = tmp_path / "s"
    settings: dict[str, Any] = {"listeners": [{"host": "127.0.0.1"}, {"port": 0, "proxy_protocol": True}]}
    if kind == "unix":
        settings["listeners"][1] = {"type": "unix", "path": str(path), "proxy_protocol": True}
    broker = start_broker(config=settings)
    broker.wait_for_log("event=started")
    sock = unix_socket(path) if kind == "unix" else tcp_socket(port_of(broker))
    sock.sendall(header)
    with StreamClient(sock) as client:
        assert client.connect("c").reason_code == (0 if welcome else NOT_AUTHORIZED)


def expect_closed(sock: socket.socket) -> None:
    with suppress(ConnectionResetError):
        assert sock.recv(1) == b""


def refusals(broker: BrokerProcess) -> list[str]:
    return [line.partition('reason="')[2].partition('"')[0] for line in broker.lines if "event=refused" in line]


def test_wrong_headers_close_the_connection_with_one_line(start_broker: Start) -> None:
    broker = start_broker(config=config())
    for number, (data, reason) in enumerate(WRONG):
        with open_socket(broker, data) as sock:
            expect_closed(sock)
        wait_until(lambda: len(refusals(broker)) > number)
        assert refusals(broker)[number:] == [f"PROXY header: {reason}"]
    found = samples(broker.get("/metrics"))
    assert found["mqttbroker_handshakes_failed_total/proxy"] == len(WRONG)


def test_a_header_that_does_not_arrive_in_time(start_broker: Start) -> None:
    broker = start_broker(config={**config(), "limits": {"connect_timeout": "2s"}})
    with (
        open_socket(broker, CLIENT[:-1]) as partial,
        open_socket(broker, b"") as silent,
        open_socket(broker, CLIENT) as whole,
    ):
        expect_closed(partial)
        expect_closed(silent)
        broker.wait_for_log('reason="PROXY header: not received in time"')
        expect_closed(whole)
    broker.wait_for_log('address=203.0.113.7:50000 reason="no CONNECT in time"')
    with open_socket(broker, CLIENT[:5]):
        pass
    broker.wait_for_log('reason="PROXY header: closed by the client"')


def test_sources(start_broker: Start) -> None:
    broker = start_broker(config=config(host="", proxy_sources=["10.0.0.0/8", "::1", "127.0.0.2"]))
    with open_socket(broker, CLIENT) as sock:
        expect_closed(sock)
    broker.wait_for_log('reason="PROXY header: not from proxy_sources"')
    sock = socket.create_connection(("127.0.0.1", port_of(broker)), 5, ("127.0.0.2", 0))
    sock.sendall(CLIENT)
    with StreamClient(sock) as client:
        assert client.connect("c").reason_code == 0


def test_unfinished_headers_are_half_open(start_broker: Start) -> None:
    broker = start_broker(config={**config(), "limits": {"max_half_open": 10}})
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(open_socket(broker, CLIENT[:10]))
        with open_socket(broker, CLIENT) as sock:
            assert StreamClient(sock).connect("in-time").reason_code == 0
        wait_until(lambda: samples(broker.get("/metrics"))["mqttbroker_connections_evicted_total"] >= 80)


def test_many_connections_at_once(start_broker: Start) -> None:
    broker = start_broker(config=config())
    port = port_of(broker)
    failures: list[Any] = []

    def connect(part: int) -> None:
        for number in range(60):
            with tcp_socket(port) as sock:
                sock.sendall(CLIENT)
                if StreamClient(sock).connect(f"c{part}-{number}").reason_code:
                    failures.append((part, number))

    threads = [threading.Thread(target=connect, args=(part,)) for part in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path, '[[listeners]]\nproxy_sources = ["10.0.0.0/8"]')
    assert problems(path) == [f"{path}: listeners.0.proxy_sources: needs proxy_protocol"]
    path = write(tmp_path, '[[listeners]]\nproxy_protocol = true\nproxy_sources = ["10.0.0.0/33"]')
    assert len(problems(path)) == 1 and "10.0.0.0/33" in problems(path)[0]
    path = write(tmp_path, '[[listeners]]\ntype = "unix"\npath = "s"\nproxy_protocol = true\nproxy_sources = ["10.0.0.1"]')
    assert problems(path) == [f'{path}: listeners.0.proxy_sources: a listener of type "unix" has none']
