"""Abuse of connections: TCP, TLS, PROXY protocol, WebSocket, CONNECT, sessions, logins and logs."""

from __future__ import annotations

import json
import socket
import ssl
from contextlib import suppress

from fuzz.network_target import REQUEST
from support.paths import VECTORS

from abuse.kinds import HERE, kind
from abuse.packets import DISCONNECT, OTHER, PINGREQ, WEBSOCKET, connect, framed, publish, subscribe, text
from abuse.target import Target, frame, reset

# --- slow and silent --------------------------------------------------------------------------------------------------


@kind("CONNECT, a byte every 0.1 s, from 250 connections", short=True)
def slow_connect(target: Target) -> None:
    target.dribble([target.open() for _ in range(250)], connect("x" * 200))


@kind("PUBLISH, a byte every 0.1 s, from 200 clients")
def slow_publish(target: Target) -> None:
    target.dribble(target.clients(200, "slow"), publish("slow", b"x" * 200))


@kind("a TLS ClientHello, a byte every 0.1 s, from 200 connections")
def slow_tls(target: Target) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    target.dribble([target.open(target.ports.tls) for _ in range(200)], outgoing.read(), OTHER)


@kind("a WebSocket request, a byte every 0.1 s, from 200 connections")
def slow_websocket(target: Target) -> None:
    target.dribble([target.open(target.ports.websocket) for _ in range(200)], REQUEST, OTHER)


@kind("a PROXY header, a byte every 0.1 s, from 200 connections")
def slow_proxy_header(target: Target) -> None:
    header = b"PROXY TCP4 192.0.2.1 192.0.2.2 40000 1883\r\n"
    target.dribble([target.open(target.ports.proxy) for _ in range(200)], header)


@kind("an HTTP request, a byte every 0.1 s, from 80 connections")
def slow_http(target: Target) -> None:
    request = b"GET /livez HTTP/1.1\r\n" + b"X-A: y\r\n" * 100
    target.dribble([target.open(target.ports.http) for _ in range(80)], request, OTHER)


@kind("nothing, from 2,500 connections")
def silent(target: Target) -> None:
    target.watch(target.connections(2500))


@kind("the beginning of a TLS handshake, from 500 connections")
def unfinished_tls(target: Target) -> None:
    lines = []
    for _ in range(500):
        with suppress(OSError):
            line = target.open(target.ports.tls)
            line.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100))
            lines.append(line)
    target.watch(lines, OTHER)


@kind("9/10 of a packet of 10 MB, from 100 clients", short=True)
def unfinished_packets(target: Target) -> None:
    lines = target.clients(100, "unfinished", 5)
    packet = publish("unfinished", b"x" * 10_000_000, version=5)[:9_000_000]
    for line in lines:
        target.push(line, packet, 5)
    target.watch(lines, 5)


# --- TCP and TLS ------------------------------------------------------------------------------------------------------


@kind("CONNECT and DISCONNECT, without a pause")
def churn(target: Target) -> None:
    number = 0
    while target.running():
        number += 1
        with suppress(OSError):
            line = target.client(f"churn{number % 2000}", clean=number % 3 > 0)
            line.sendall(subscribe([f"churn/{number % 500}/#"]) + publish(f"churn/{number}/x") + DISCONNECT)
            line.close()
            target.answered.note("CONNACK")


@kind("CONNECT, then a reset, without a pause")
def reset_storm(target: Target) -> None:
    while target.running():
        with suppress(OSError):
            line = target.open()
            line.sendall(connect(f"reset{target.random.randrange(1000)}") + subscribe(["reset/#"]))
            reset(line)
            target.answered.note("reset")


@kind("CONNECT, then the end of the sending side, from 500 clients")
def half_close(target: Target) -> None:
    lines = target.clients(500, "half")
    for line in lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_WR)
    target.watch(lines)


@kind("TLS handshakes, each followed by a close")
def tls_handshakes(target: Target) -> None:
    while target.running():
        with suppress(OSError):
            target.tls().close()
            target.answered.note("handshake")


@kind("random bytes to the TLS port")
def tls_garbage(target: Target) -> None:
    target.flood(lambda: target.open(target.ports.tls), lambda: b"\x16\x03\x01" + target.random.randbytes(2000), OTHER)


@kind("random bytes and HTTP requests to the MQTT port")
def garbage(target: Target) -> None:
    first = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"")
    target.flood(target.open, lambda: target.random.choice(first) + target.random.randbytes(500))


@kind("invalid PROXY headers", short=True)
def proxy_garbage(target: Target) -> None:
    headers = (b"PROXY TCP4 1.2.3.4 5.6.7.8 99999 1\r\n", b"PROXY " + b"x" * 200, connect("direct"))
    binary = b"\r\n\r\n\x00\r\nQUIT\n"
    target.flood(
        lambda: target.open(target.ports.proxy),
        lambda: target.random.choice((*headers, binary + target.random.randbytes(100))),
    )


@kind("connections until the broker, limited to 150 files, has none left", program=str(HERE / "few_files.py"))
def file_descriptors(target: Target) -> None:
    lines = []
    for number in range(600):
        if not target.running():
            break
        port = (target.ports.tcp, target.ports.http, target.ports.websocket, target.ports.tls)[number % 4]
        with suppress(OSError):
            lines.append(target.open(port))
    while target.running():
        with suppress(OSError):
            target.http("/readyz")
        target.pause(0.2)
    target.watch(lines, OTHER)


# --- WebSocket --------------------------------------------------------------------------------------------------------


@kind("WebSocket pings, pongs and empty continuations before CONNECT", short=True)
def websocket_empty_frames(target: Target) -> None:
    empty = (frame(9) + frame(10) + frame(9, b"x")) * 5000 + frame(2, fin=False) + frame(0, fin=False) * 5000
    target.flood(target.websocket, empty, WEBSOCKET)


@kind("WebSocket frames of 10 MB before CONNECT, 9 MB of each, from 60 connections")
def websocket_before_connect(target: Target) -> None:
    lines = []
    for _ in range(60):
        with suppress(OSError):
            line = target.websocket()
            target.push(line, frame(2, b"\x10" + b"x" * 9_000_000, size=10_000_000), WEBSOCKET)
            lines.append(line)
    target.watch(lines, WEBSOCKET)


@kind("MQTT in WebSocket frames of one byte")
def websocket_single_bytes(target: Target) -> None:
    def begin() -> socket.socket:
        line = target.websocket()
        line.sendall(frame(2, connect("bytes")))
        return line

    packets = b"".join(frame(2, bytes((byte,))) for byte in publish("single", b"x" * 100) * 20)
    target.flood(begin, packets, WEBSOCKET)


@kind("invalid WebSocket frames: not masked, reserved bits, unknown codes, text")
def websocket_invalid(target: Target) -> None:
    choices = [b"\x82\x05hello", frame(2 | 0x40, b"x"), frame(7), frame(1, b"text"), frame(8, b"\x00")]
    choices.append(frame(9, b"x" * 200))
    target.flood(target.websocket, lambda: target.random.choice(choices), WEBSOCKET)


# --- CONNECT ----------------------------------------------------------------------------------------------------------


@kind("every malformed packet of tests/vectors, again and again", short=True)
def malformed(target: Target) -> None:
    vectors = json.loads((VECTORS / "packets_malformed.json").read_text(encoding="utf-8"))["vectors"]
    number = 0
    while target.running():
        vector = vectors[number % len(vectors)]
        number += 1
        packet = bytes.fromhex(vector["hex"])
        with suppress(OSError):
            if packet[0] >> 4 == 1:
                line = target.open()
            else:
                line = target.client("malformed", vector["version"])
            target.push(line, packet, vector["version"])
            target.answered.read(line, vector["version"], 1.0)
            line.close()


@kind("CONNECT twice on one connection")
def connect_twice(target: Target) -> None:
    target.flood(lambda: target.client("twice", 5), connect("twice", 5), 5)


@kind("CONNECT of 1 MB")
def large_connect(target: Target) -> None:
    target.flood(target.open, framed(0x10, text("MQTT") + b"\5\2\0\0\0" + text("x") + bytes(1_000_000)), 5)


@kind("client ids of 65,000 bytes that are not valid", short=True)
def refused_client_ids(target: Target) -> None:
    target.flood(target.open, lambda: connect(b"\xff" * 65_000, target.random.choice((4, 5))), 5)


@kind("client ids that look like log lines")
def forged_log_lines(target: Target) -> None:
    forged = 'a" level=info event=forged client=b\nevent=forged reason="x" \x1b[31m'
    target.flood(target.open, lambda: connect(forged + str(target.random.random())), 4)
    lines = [line for line in target.broker.lines if line.split(" ", 3)[-1].lstrip().startswith("event=forged")]
    assert not lines, lines


@kind("AUTH packets of unknown methods, and re-authentication", short=True)
def auth_packets(target: Target) -> None:
    method = b"\x15" + text("SCRAM-SHA-256")
    again = framed(0xF0, b"\x19" + bytes((len(method),)) + method)
    exchange = method + b"\x16" + text("n,,n=victim,r=abcdefgh")

    def begin() -> socket.socket:
        line = target.open()
        which = target.random.choice((b"\x15" + text("NONE"), exchange))
        line.sendall(connect("auth", 5, properties=which))
        return line

    target.flood(begin, again, 5, pause=0.001)


@kind("CONNECT with the same client id, without a pause")
def takeovers(target: Target) -> None:
    def begin() -> socket.socket:
        return target.client("same", target.random.choice((4, 5)), clean=target.random.random() < 0.5)

    while target.running():
        with suppress(OSError):
            line = begin()
            line.sendall(subscribe([f"same/{target.random.randrange(100)}"], 1) + publish("same/1", b"x", 1))
            target.answered.note("CONNACK")


@kind("CONNECT with the client id of another user's session", short=True)
def stolen_client_id(target: Target) -> None:
    victim = target.client("victims-device", 5, login=("victim", "another secret"), expiry=1000, clean=False)
    victim.sendall(subscribe(["stolen"], 1, version=5))
    target.flood(target.open, connect("victims-device", 5), 5)
    target.until += 10
    victim.sendall(PINGREQ)
    received = b""
    while not received.endswith(b"\xd0\0"):
        part = victim.recv(1000)
        assert part, "the owner of the session was disconnected"
        received += part
    target.answered.note("owner still connected")


@kind("passwords that are wrong, 40 at a time", limits={})
def guessed_passwords(target: Target) -> None:
    def guess() -> bytes:
        return connect("guess", 5, login=("bystander", f"guess {target.random.random()}"))

    target.flood(target.open, guess, 5, lines=40)


@kind("right logins of one user, 100 at a time", short=True)
def logins(target: Target) -> None:
    hello = connect("", 5, login=("victim", "another secret"))
    while target.running():
        lines = []
        for _ in range(100):
            with suppress(OSError):
                line = target.open()
                line.sendall(hello)
                lines.append(line)
        for line in lines:
            target.answered.read(line, 5, 2.0)
            line.close()


@kind("lines for a log that nobody reads", short=True)
def unread_log(target: Target) -> None:
    target.broker.reading.clear()
    target.flood(target.open, lambda: connect("x" * 500, 9), 5)
    target.until += 10
    target.http("/livez")
    target.broker.reading.set()


# --- sessions and wills -----------------------------------------------------------------------------------------------


@kind("one message to 5,000 abandoned sessions, again and again")
def abandoned_sessions(target: Target) -> None:
    hello = b"".join((subscribe(["abandoned/#"], 1), DISCONNECT))
    target.until += 8  # to make the sessions
    for number in range(5000):
        with suppress(OSError):
            line = target.open()
            line.sendall(connect(f"abandoned{number}", clean=False) + hello)
            line.recv(100)
            line.close()
    target.flood(lambda: target.client("abandoner"), lambda: publish("abandoned/1", b"x" * 100, 1), pause=0.2)


@kind("4,000 sessions that all expire in the same second")
def expiring_sessions(target: Target) -> None:
    filters = [f"expiring/{number}/+" for number in range(10)]
    for number in range(4000):
        if not target.running():
            break
        with suppress(OSError):
            line = target.open()
            line.sendall(connect(f"expiring{number}", 5, expiry=2) + subscribe(filters, 1, version=5) + DISCONNECT)
            line.close()
    target.watch([])


@kind("sessions without end, until the broker has no room for more", limits={"max_sessions": 2000})
def endless_sessions(target: Target) -> None:
    number = 0
    while target.running():
        number += 1
        with suppress(OSError):
            line = target.open()
            line.sendall(connect(f"endless{number}", 5, expiry=0xFFFFFFFF))
            target.answered.read(line, 5, 1.0)
            line.close()


@kind("DISCONNECT that raises a session expiry of 0")
def raised_expiry(target: Target) -> None:
    packet = b"\xe0\x07\x00\x05\x11\xff\xff\xff\xff"
    target.flood(lambda: target.client("raised", 5), packet, 5)


@kind("wills of 60 kB, from as many sessions as the broker accepts", short=True)
def large_wills(target: Target) -> None:
    number = 0
    lines = []
    while target.running():
        number += 1
        with suppress(OSError):
            line = target.open()
            line.sendall(connect(f"will{number}", 5, will=("will/x", b"x" * 60_000, 1), expiry=1000))
            if target.answered.read(line, 5, 1.0):
                lines.append(line)


@kind("500 clients with wills disconnect at once; 1,000 subscribers")
def will_storm(target: Target) -> None:
    target.until += 3
    for number in range(1000):
        with suppress(OSError):
            target.client(f"heir{number}").sendall(subscribe(["storm/#"], number % 2))
    while target.running():
        for line in target.clients(500, "testator", will=("storm/will", b"x" * 100, 1)):
            reset(line)
        target.answered.note("500 wills")


@kind("2,000 wills with the same delay")
def delayed_wills(target: Target) -> None:
    for line in target.clients(2000, "delayed", 5, expiry=60, will=("delayed/will", b"x" * 100, 1), will_delay=1):
        reset(line)
    target.watch([])
