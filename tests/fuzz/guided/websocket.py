"""WebSocket: the upgrade and the frames of one connection, down to the MQTT packets in them."""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from support.core import Core
from websockets.frames import Opcode

from fuzz.core_target import LIMITS, SESSION_EXPIRY
from fuzz.generator import Generator
from fuzz.guided.target import Target, pieces_of
from fuzz.verdict import Finding, judge
from mqttbroker.auth.security import Security
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.websocket import MAX_HEAD, WebSocket
from mqttbroker.net.wire import Endpoint, Wire
from sessions.counters import Counters
from sessions.write_set import WriteSet

INPUTS = 2000  # for one core
ORIGIN = "https://example.org"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
REQUEST = (
    "GET /mqtt HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    f"Sec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
).encode()
UUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3


class _Transport:
    def __init__(self) -> None:
        self.written = bytearray()
        self.reading = True
        self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class _WebSockets(Target):
    """A broker core with a WebSocket for each input."""

    modules = ("mqttbroker.net.websocket", "mqttbroker.net.websocket_frames")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.inputs = 0
        self.runner = asyncio.Runner()
        self.defects: list[object] = []
        self._begin()

    def _begin(self) -> None:
        place = self.directory / str(self.inputs)
        place.mkdir()
        core = self.core = Core(place, "off", **LIMITS)
        loop = self.runner.get_loop()

        def submit(write_set: WriteSet) -> None:
            core.store.submit(write_set)
            _, error = core.answers.get(timeout=30)
            assert error is None, error
            loop.call_soon(core.broker.commits.answered, "")
            if write_set.pages or write_set.queries:
                _, pages = core.reads.get(timeout=30)
                loop.call_soon(core.broker.commits.read_done, write_set.queries, pages)

        scheduler = FlushScheduler(core.broker, loop, submit, True)
        policy = ListenerPolicy(Security(core.settings).policy, core.terms, None, core.broker.outbound.counters)
        sockets = OpenSockets(1000, 1000, Counters())
        self.endpoint = Endpoint(scheduler, policy, sockets, lambda: "made", self._defect, websocket=True)

    def _defect(self, _: object) -> None:
        import sys

        self.defects.append(sys.exc_info()[1])

    def close(self) -> None:
        self.core.close()
        self.runner.close()

    def sent(self, data: bytes, pieces: list[bytes]) -> tuple[bytes, bool]:
        """The bytes that the broker sends back, and whether it closes the connection."""
        self.inputs += 1
        if self.inputs % INPUTS == 0:
            self.core.close()
            self._begin()
        answer = self.runner.run(self._converse(pieces))
        self.core.broker.tick(self.runner.get_loop().time() + SESSION_EXPIRY + 1)
        if self.defects:
            raise Finding(f"{self.defects} for {data.hex()}")
        return answer

    async def _converse(self, pieces: list[bytes]) -> tuple[bytes, bool]:
        transport = _Transport()
        terms, limits = self.endpoint.policy.terms, self.core.broker.terms
        socket = WebSocket(Wire(self.endpoint), [ORIGIN], terms.max_packet_size, limits.max_connect_size)
        socket.connection_made(transport)
        for piece in pieces:
            for _ in range(100):
                if transport.reading or transport.closed:
                    break
                await asyncio.sleep(0)
            if transport.closed:
                break
            socket.data_received(piece)
        for _ in range(50):
            await asyncio.sleep(0)
            if transport.closed or self.core.broker.journal.writer_idle and not self.core.broker.journal.has_pending:
                break
        for _ in range(5):
            await asyncio.sleep(0)
        found = bytes(transport.written), transport.closed
        socket.connection_lost(None)
        await asyncio.sleep(0)
        return found


class Upgrade(_WebSockets):
    """The HTTP request: accepted only if RFC 6455, section 4.2.1, MQTT and ``origins`` allow it."""

    max_bytes = 700
    words = (
        b"Upgrade: websocket\r\n",
        b"Connection: keep-alive, Upgrade\r\n",
        b"Sec-WebSocket-Protocol: ",
        b"mqtt",
        b"mqttv3.1",
        b"Origin: ",
        ORIGIN.encode(),
        b"GET / HTTP/1.1\r\n",
        b"Sec-WebSocket-Extensions: permessage-deflate\r\n",
        b"\r\n\r\n",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
    )

    def check(self, data: bytes) -> None:
        answer, closed = self.sent(data, pieces_of(data))
        whole = b"\r\n\r\n" in data or len(data) > MAX_HEAD
        if not whole:
            if answer:
                raise Finding(f"answered an incomplete request with {answer!r}")
            return
        status = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
        if status is None:
            raise Finding(f"answered {data!r} with {answer!r}")
        if status[1] == b"101":
            self._accepted(data, answer)
        elif not (status[1].startswith(b"4") or status[1] == b"505") or not closed:
            raise Finding(f"refused {data!r} with {answer!r}, {'closed' if closed else 'open'}")

    def _accepted(self, data: bytes, answer: bytes) -> None:
        head = data.partition(b"\r\n\r\n")[0].decode("latin-1")
        lines = head.split("\r\n")
        fields: dict[str, list[str]] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            fields.setdefault(name.lower(), []).append(value.strip(" \t"))
        listed = {name: [part.strip(" \t") for part in ",".join(values).split(",")] for name, values in fields.items()}
        key = fields.get("sec-websocket-key", [""])
        reasons = {
            "method or version": lines[0].startswith("GET ") and lines[0].endswith(" HTTP/1.1"),
            "Upgrade": "websocket" in map(str.lower, listed.get("upgrade", [])),
            "Connection": "upgrade" in map(str.lower, listed.get("connection", [])),
            "key": len(key) == 1,
            "version": fields.get("sec-websocket-version") == ["13"],
            "subprotocol": "mqtt" in listed.get("sec-websocket-protocol", []),
            "origin": fields.get("origin", [ORIGIN]) == [ORIGIN],
        }
        for name, right in reasons.items():
            if not right:
                raise Finding(f"accepted in spite of its {name}: {data!r}")
        accept = b64encode(hashlib.sha1((key[0] + UUID).encode("latin-1")).digest())
        got = answer.lower()
        if b"sec-websocket-accept: " + accept.lower() not in got or b"sec-websocket-protocol: mqtt\r\n" not in got:
            raise Finding(f"accepted with {answer!r}")
        if b"sec-websocket-extensions" in got:
            raise Finding(f"an extension was accepted: {answer!r}")

    def seeds(self) -> Iterator[bytes]:
        yield REQUEST
        yield REQUEST.replace(b"Host: h\r\n", b"Host: h\r\nOrigin: https://example.org\r\n")
        yield REQUEST.replace(b"Host: h\r\n", b"Host: h\r\nOrigin: https://example.com\r\n")
        yield REQUEST.replace(b": mqtt\r\n", b": mqttv3.1, mqtt\r\n")
        yield REQUEST.replace(b"mqtt\r\n\r\n", b"mqtt\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n")
        yield b"GET / HTTP/1.0\r\n\r\n"


def frames_in(data: bytes) -> tuple[bytes, str]:
    """The MQTT bytes of a client's frames up to the first that ends the connection, and how it ends it.

    RFC 6455, section 5. The end is "", or "close", "refused", or "long" for a frame that may be too long.
    """
    payload = bytearray()
    fragmented = False
    position = 0
    while len(data) - position >= 2:
        first, second = data[position], data[position + 1]
        code, start, length = first & 15, position + 2, second & 127
        if length >= 126:
            size = 2 if length == 126 else 8
            if len(data) - start < size:
                return bytes(payload), "incomplete"
            length = int.from_bytes(data[start : start + size], "big")
            start += size
        if second < 128:
            return bytes(payload), "refused"
        if length > 60_000:
            return bytes(payload), "long"
        if start + 4 + length > len(data):
            return bytes(payload), "incomplete"
        if first & 0x70 or code not in (0, 1, 2, 8, 9, 10) or (code > 7 and (length > 125 or first < 128)):
            return bytes(payload), "refused"
        if code == 1 or (code == 2 and fragmented) or (code == 0 and not fragmented):
            return bytes(payload), "refused"
        key, start = data[start : start + 4], start + 4
        position = start + length
        if code == 8:
            return bytes(payload), "close"
        if code < 3:
            payload += bytes(byte ^ key[at % 4] for at, byte in enumerate(data[start:position]))
            fragmented = first < 128
    return bytes(payload), ""


class Frames(_WebSockets):
    """The frames after an upgrade. A mask of zeros shows the packets to the fuzzer."""

    words = (
        b"\x82\x80",
        b"\x02\x80",
        b"\x80\x80",
        b"\x89\x80",
        b"\x8a\x80",
        b"\x88\x82\0\0\0\0\x03\xe8",
        b"\x81\x80",
        b"\xfe",
        b"\xff",
    )

    def check(self, data: bytes) -> None:
        answer, closed = self.sent(data, [REQUEST, *pieces_of(data)])
        head, _, rest = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101 "):
            raise Finding(f"no upgrade: {answer!r}")
        sent, end = frames_in(data)
        received, closing = self._payload(rest, data)
        closed = closed or closing
        if end in ("close", "refused") and not closed:
            raise Finding(f"{end}, but the connection is open: {data.hex()}")
        try:
            judge(sent, received, closed)
        except Finding as finding:
            raise Finding(f"{finding}; frames {data.hex()}") from None

    def _payload(self, data: bytes, sent: bytes) -> tuple[bytes, bool]:
        """The MQTT bytes in the broker's frames, and whether a close frame ends them."""
        payload = bytearray()
        position = 0
        closing = False
        while position < len(data):
            first, length = data[position], data[position + 1]
            start = position + 2
            if length >= 126:
                size = 2 if length == 126 else 8
                length = int.from_bytes(data[start : start + size], "big")
                start += size
            position = start + length
            if first not in (0x82, 0x88, 0x8A) or position > len(data) or closing:
                raise Finding(f"the broker sent {data.hex()} for {sent.hex()}")
            if first == 0x88:
                closing = True
            elif first == 0x82:
                payload += data[start:position]
        return bytes(payload), closing

    def seeds(self) -> Iterator[bytes]:
        for number in range(40):
            generator = Generator(f"frames:{number}")
            conversation = generator.conversation()
            if len(conversation.data) < 600:
                yield b"".join(_frame(Opcode.BINARY, piece) for piece in conversation.pieces[:20])
        hello = Generator("hello").connect(5)
        yield _frame(Opcode.BINARY, hello[:5], False) + _frame(Opcode.PING, b"x") + _frame(Opcode.CONT, hello[5:])
        yield _frame(Opcode.BINARY, hello) + _frame(Opcode.CLOSE, b"\x03\xe8")
        yield _frame(Opcode.TEXT, hello)
        yield _frame(Opcode.PONG, b"") * 3 + _frame(Opcode.BINARY, b"\xc0\x00")

    def changed(self, data: bytes, random: Random) -> bytes:
        """Another frame at the end."""
        generator = Generator(str(random.random()))
        packet = generator.client_packet(random.choice((4, 5)))
        code = random.choice((Opcode.BINARY, Opcode.BINARY, Opcode.CONT, Opcode.PING, Opcode.PONG, Opcode.CLOSE, Opcode.TEXT))
        return data + _frame(code, packet if code < 8 else packet[:125], random.random() < 0.7 or code > 7)


def _frame(code: Opcode, payload: bytes, last: bool = True) -> bytes:
    """A frame with a mask of zeros."""
    size = len(payload)
    head = (
        bytes((code | (128 if last else 0), 128 + size))
        if size < 126
        else bytes((code | (128 if last else 0), 254)) + size.to_bytes(2, "big")
    )
    return head + b"\0\0\0\0" + payload
