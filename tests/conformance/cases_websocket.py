"""MQTT over WebSocket (section 6)."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
from typing import Any

from conformance.script import (
    CONNACK,
    CONNECT,
    LIMIT,
    PINGREQ,
    PINGRESP,
    PUBLISH,
    SUBACK,
    SUBSCRIBE,
    Actor,
    Case,
    Link,
    Run,
    Step,
    a,
    b,
)
from conformance.wire import Packet

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class WebSocket:
    """The socket interface that ``Link`` uses, over WebSocket: each ``sendall`` sends one binary frame."""

    def __init__(self, port: int, offer: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), LIMIT)
        key = base64.b64encode(os.urandom(16))
        self.socket.sendall(
            b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: " + key + b"\r\nSec-WebSocket-Protocol: " + offer.encode() + b"\r\n\r\n"
        )
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            data = self.socket.recv(4096)
            assert data, "closed within the handshake"
            self.buffer += data
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        status, *lines = head.split(b"\r\n")
        self.status = int(status.split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if self.status == 101:
            accept = base64.b64encode(hashlib.sha1(key + GUID).digest())
            assert self.headers[b"sec-websocket-accept"] == accept, "Sec-WebSocket-Accept does not fit the key"

    def frame(self, data: bytes, opcode: int = BINARY, final: bool = True) -> None:
        mask = os.urandom(4)
        size = len(data)
        length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
        self.socket.sendall(bytes((final << 7 | opcode,)) + length + mask + masked)

    def sendall(self, data: bytes) -> None:
        self.frame(data)

    def recv(self, size: int) -> bytes:
        """The payload of the next frame; b"" if the broker has closed."""
        while True:
            frame = self._frame()
            if frame is None:
                self.buffer += self.socket.recv(size)
                if not self.buffer:
                    return b""
                continue
            opcode, data = frame
            if opcode == CLOSE:
                return b""
            assert opcode in (CONTINUATION, BINARY, PONG), f"a frame of opcode {opcode} [MQTT-6.0.0-1]"
            if opcode != PONG:
                return data

    def _frame(self) -> tuple[int, bytes] | None:
        head = self.buffer
        if len(head) < 2:
            return None
        assert not head[1] & 0x80, "a masked frame from the server"
        size, start = head[1] & 127, 2
        if size >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(head[2:start], "big")
        if len(head) < start + size:
            return None
        self.buffer = head[start + size :]
        return head[0] & 15, head[start : start + size]

    def settimeout(self, seconds: float) -> None:
        self.socket.settimeout(seconds)

    def close(self) -> None:
        self.socket.close()


def opened(actor: Actor, offer: str = "mqtt") -> Step:
    """Open a WebSocket connection with the subprotocol ``mqtt``."""

    def step(run: Run) -> None:
        web = WebSocket(run.port, offer)
        link: Any = Link.__new__(Link)
        link.version, link.socket, link.buffer, link.limit, link.aliases = run.version, web, b"", 1 << 28, {}
        run.links[actor.name] = link
        assert web.status == 101, f"the handshake was answered by {web.status}"
        assert web.headers.get(b"sec-websocket-protocol") == b"mqtt", f"subprotocol in {web.headers}"

    return step


def framed(actor: Actor, packets: list[Packet], size: int, fragments: bool = False) -> Step:
    """Send packets in frames of ``size`` bytes: messages, or fragments of one message."""

    def step(run: Run) -> None:
        web: Any = run.links[actor.name].socket
        data = b"".join(packet.encode(run.version, run.own) for packet in packets)
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        for number, part in enumerate(parts):
            if fragments:
                web.frame(part, CONTINUATION if number else BINARY, number == len(parts) - 1)
            else:
                web.frame(part)

    return step


def raw(actor: Actor, data: bytes, opcode: int) -> Step:
    def step(run: Run) -> None:
        web: Any = run.links[actor.name].socket
        web.frame(data, opcode)

    return step


def gone(run: Run) -> None:
    """The broker closes, after any packets."""
    while run.receive("a") is not None:
        pass


TALK = [CONNECT(), SUBSCRIBE(1, ("~/t", 1)), PUBLISH("~/t", b"x" * 300), PINGREQ]
ANSWER = a.get(CONNACK(), SUBACK(1, 1), PUBLISH("~/t", b"x" * 300), PINGRESP)

CASES = [
    Case("websocket-subprotocol", "6.0.0-4 6.0.0-3", "6.0.0-4 6.0.0-3", [
        opened(a), a.send(CONNECT()), a.get(CONNACK()), a.idle(), opened(b, "other, mqtt"), b.send(CONNECT("~b")),
        b.get(CONNACK()), b.idle(),
    ], broker="websocket"),
    Case("websocket-frames-of-any-size", "6.0.0-2 6.0.0-1", "6.0.0-2 6.0.0-1", [
        *(step for size in (1, 2, 7, 64, 100_000) for step in (opened(a), framed(a, TALK, size), ANSWER)),
    ], broker="websocket"),
    Case("websocket-fragments", "6.0.0-2", "6.0.0-2", [
        *(step for size in (1, 5, 200) for step in (opened(a), framed(a, TALK, size, fragments=True), ANSWER)),
    ], broker="websocket"),
    Case("websocket-frames-that-are-not-binary", "6.0.0-1", "6.0.0-1 4.13.1-1", [
        opened(a), raw(a, b"\x10", TEXT), a.dropped(), opened(a), a.send(CONNECT()), a.get(CONNACK()),
        raw(a, b"\xc0\0", TEXT),
        gone,
    ], broker="websocket"),
    Case("websocket-control-frames-between", "6.0.0-2", "6.0.0-2", [
        opened(a), a.send(CONNECT()), a.get(CONNACK()), raw(a, b"hello", PING), a.idle(),
    ], broker="websocket"),
    Case("websocket-closes-with-the-connection", "3.14.4-2", "3.14.4-2", [
        opened(a), a.send(CONNECT()), a.get(CONNACK()), a.leave(), opened(a), a.send(CONNECT()), a.get(CONNACK()),
        a.send(CONNECT()), a.ended(0x82),
    ], broker="websocket"),
]  # fmt: skip
