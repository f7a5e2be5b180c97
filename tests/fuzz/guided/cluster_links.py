"""Links of a cluster: the lines before a link, the frames of workers, and what cores tell each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from support.core import Core

from fuzz.core_target import LIMITS
from fuzz.guided.target import Target, pieces_of
from fuzz.verdict import Finding
from mqttbroker.cluster.links import messages
from mqttbroker.cluster.links.keys import key_of, proof
from mqttbroker.cluster.links.peer import Peer
from mqttbroker.cluster.links.server import CONNECTS, MAX_LINE, WORKER, Hello, LinkServer, _Greeted, _Greeting
from mqttbroker.cluster.retained.pages import PageRequest, RetainedAnswer, decode_page, decode_request
from mqttbroker.codec.frames import encode_publish
from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.packets.core_link import SHARED_TOPIC, LinkHandler
from mqttbroker.net.acceptor import Handshake
from mqttbroker.net.link_frames import (
    FAILED,
    HEADER_BYTES,
    HOLDS,
    JOINED,
    OPENED,
    READY,
    SECURED,
    STATUS,
    FrameHandler,
    FrameReader,
    LinkError,
    data_prefix,
    number_bytes,
)
from mqttbroker.net.worker_setup import (
    Failed,
    Holds,
    Joined,
    Opened,
    Secured,
    decode_problems,
    decode_status,
    from_worker,
)

KEY = "00" * 32


class _Transport:
    """Collects what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_extra_info(self, name: str) -> Any:
        return ("192.0.2.1", 1) if name == "peername" else None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol


class Lines(Target):
    """Any bytes of the side that connects, and of the one that accepts: nothing escapes, and without the key there is no link."""

    modules = ("mqttbroker.cluster.links.server", "mqttbroker.cluster.links.keys")
    words = (b'"protocol":2', b'"nonce":"', b'"proof":"', b'"ok":true', b'"error":"', b'"kind":"worker"', b"\n", b"\\u00fc")
    max_bytes = 2 * MAX_LINE

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.loop.close()

    def check(self, data: bytes) -> None:
        self.loop.run_until_complete(self._check(data))

    async def _check(self, data: bytes) -> None:
        server = LinkServer("", 0, None, KEY, lambda _: "", {WORKER: lambda _: self._accepted(data)})
        task = asyncio.current_task()
        assert task is not None
        greeted, transport = _Greeted(server, Handshake(task)), _Transport()
        greeted.connection_made(transport)
        for piece in pieces_of(data):
            greeted.data_received(piece)
        if len(greeted._received) > MAX_LINE:
            raise Finding(f"{len(greeted._received)} bytes of a line are kept")
        greeted.connection_lost(None)
        if server.half_open or greeted._timeout is not None:
            raise Finding("a closed connection is half-open")
        greeting, transport = _Greeting(b"{}", KEY), _Transport()
        greeting.connection_made(transport)
        for piece in pieces_of(data):
            greeting.data_received(piece)
        greeting.connection_lost(None)
        if greeting.answered.exception() is None:
            raise Finding(f"a link to who does not know the key: {data!r}")

    def _accepted(self, data: bytes) -> Any:
        raise Finding(f"a link of who does not know the key: {data!r}")

    def seeds(self) -> Iterator[bytes]:
        hello = msgspec.json.encode(Hello(cluster="ab", kind=WORKER, node="n", shard=1, version="1", nonce="00"))
        yield hello + b"\n"
        yield hello + b'\n{"proof":"%s"}\nmore' % proof(key_of(KEY, WORKER), CONNECTS, hello, b"").encode()
        yield b'{"nonce":"00"}\n{"ok":true,"proof":"00"}\nmore'
        yield b'{"error":"no"}\n'
        yield b"x" * (MAX_LINE + 1)


class _Frames(FrameHandler):
    def __init__(self) -> None:
        self.found: list[tuple[int, int, bytes]] = []

    def handle(self, kind: int, number: int, data: bytes, start: int, end: int) -> None:
        self.found.append((kind, number, data[start:end]))


LARGEST = 4096  # bytes of a body
DECODERS: dict[int, Any] = {
    JOINED: Joined.decode, OPENED: Opened.decode, SECURED: Secured.decode, FAILED: Failed.decode, HOLDS: Holds.decode,
    STATUS: decode_status, READY: decode_problems,
}  # fmt: skip


class Frames(Target):
    """Frames in any pieces, against a second parser; and the bodies that a worker sends."""

    modules = ("mqttbroker.net.link_frames", "mqttbroker.net.worker_setup")
    words = tuple(bytes([kind]) for kind in DECODERS) + (b"false", b"null", b'"tcp-1"', b"[[", b"subjectAltName")
    max_bytes = 2 * LARGEST

    def check(self, data: bytes) -> None:
        whole, pieces = self._read([data]), self._read(pieces_of(data))
        expected = self._expected(data)
        if not whole == pieces == expected:
            raise Finding(f"{whole} in one piece, {pieces} in several, {expected} expected: {data!r}")
        for kind, _, body in whole[0]:
            if kind in DECODERS:
                try:
                    from_worker(DECODERS[kind], body)
                except LinkError:
                    pass

    def _read(self, pieces: list[bytes]) -> tuple[list[tuple[int, int, bytes]], bool]:
        frames = _Frames()
        reader = FrameReader(frames, LARGEST)
        try:
            for piece in pieces:
                reader.feed(piece)
                while reader.read(2):
                    pass
        except LinkError:
            return frames.found, True
        return frames.found, False

    def _expected(self, data: bytes) -> tuple[list[tuple[int, int, bytes]], bool]:
        found = []
        while len(data) >= HEADER_BYTES:
            length = int.from_bytes(data[5:9], "big")
            if length > LARGEST:
                return found, True
            end = HEADER_BYTES + length
            if end > len(data):
                break
            found.append((data[0], int.from_bytes(data[1:5], "big"), data[HEADER_BYTES:end]))
            data = data[end:]
        return found, False

    def seeds(self) -> Iterator[bytes]:
        bodies = [
            (JOINED, Joined("tcp-1", "192.0.2.1:5", False, False, None, None).encode()),
            (JOINED, Joined("tls-2", "x", True, True, "cn", Secured(0, False, {}, (b"x",), b"y")).encode()),
            (OPENED, Opened(0, "192.0.2.1:5").encode()), (SECURED, Secured(0, True, None, (), None).encode()),
            (FAILED, Failed(0, "x", True, "no").encode()), (HOLDS, Holds(1, 2, 3, 4, 5, {"max_half_open": 1}).encode()),
            (STATUS, b"1.5"), (READY, b'["no"]'), (1, b"\x10\x00"),
        ]  # fmt: skip
        frames = [data_prefix(kind, 1) + number_bytes(len(body)) + body for kind, body in bodies]
        yield from frames
        yield b"".join(frames)

    def changed(self, data: bytes, random: Random) -> bytes:
        """Set the length of the first frame to that of the data."""
        if len(data) < HEADER_BYTES:
            return data
        return data[:5] + number_bytes(len(data) - HEADER_BYTES) + data[HEADER_BYTES:]


class _Owner:
    """The core that has the other one for a peer."""

    def __init__(self, core: Core) -> None:
        self.broker = core.broker

    def all_changes(self) -> Iterator[messages.Change]:
        return iter(())

    def members(self, key: str) -> tuple[messages.MemberState, ...]:
        return ()

    def schedule(self) -> None:
        """Nothing is told."""

    def peer_message(self, shard: int, topic: str, payload: bytes) -> None:
        for decode in (decode_request, decode_page):
            try:
                decode(payload)
            except (msgspec.MsgspecError, UnicodeDecodeError):  # as its users do
                pass

    def peer_synchronized(self) -> None:
        """Nothing waits for that."""


INPUTS = 500  # for one core


class Messages(Target):
    """Packets of another core: whatever they are, the link goes on or is closed, and no exception escapes."""

    modules = ("mqttbroker.core.packets.core_link", "mqttbroker.cluster.links.peer", "mqttbroker.cluster.links.messages")
    words = (messages.TOPIC, SHARED_TOPIC, b"$core/retained/request", b"\xa6update", b"\xa4done", b"\xa4ping", b"\xa4pong")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.inputs = 0
        self._begin()

    def _begin(self) -> None:
        place = self.directory / str(self.inputs)
        place.mkdir()
        self.core = Core(place, "off", **LIMITS)
        self.peer = Peer(_Owner(self.core), 1)

    def close(self) -> None:
        self.core.close()

    def check(self, data: bytes) -> None:
        self.inputs += 1
        if self.inputs % INPUTS == 0:
            self.close()
            self._begin()
        try:
            messages.decode(data)
        except MQTTError:
            pass
        client = self.core.client()
        connection = client.connection
        client.protocol.use_publish_handler(LinkHandler(self.core.broker, connection, self.peer))
        self.peer.up(connection)
        for piece in pieces_of(data):
            if not connection.closed:
                client.socket.sendall(piece)
        self.peer.down()
        client.close()
        self.core.clients.remove(client)

    def seeds(self) -> Iterator[bytes]:
        def packet(topic: bytes, payload: bytes) -> bytes:
            return encode_publish(topic, payload, 0, False, False, 0, 5, b"")

        state = messages.MemberState(1, messages.CONNECTED, 0)
        stored = messages.MemberState(2, messages.PERSISTENT, 5)
        changes = [
            messages.Change(messages.BEGIN), messages.Change(messages.ADD, "a/#"), messages.Change(messages.GROUP, "g/t", (state,)),
            messages.Change(messages.GROUP, "h/t", (state, stored)), messages.Change(messages.END),
            messages.Change(messages.REMOVE, "a/#"),
        ]  # fmt: skip
        for message in (messages.Update(1, tuple(changes)), messages.Done(1), messages.Ping(), messages.Pong()):
            yield packet(messages.TOPIC, messages.encode(message))
        shared = packet(b"t", b"payload")
        yield packet(SHARED_TOPIC, b"\x00\x03g/t" + shared)
        yield packet(SHARED_TOPIC, b"\x00\x03g/t")
        yield packet(b"$core/retained/request", msgspec.msgpack.encode(PageRequest(1, "#", "", 1000, {0: 5})))
        row = ("t", b"x", 0, b"", "c", 1, 0)
        yield packet(b"$core/retained/answer", msgspec.msgpack.encode(RetainedAnswer(1, "", True, {0: 5}, [row])))
        yield packet(b"$core/\xff", b"") + packet(b"a/b", b"x")
        # Inputs that once ended with an exception.
        yield packet(messages.TOPIC, b"\x93\xa6update\x01\x91\x93\x02\xa1\xff\x90")
        yield from (packet(SHARED_TOPIC, end) for end in (b"\x00\x01\xff", b"\x00\x03g/t0", b"\x00\x03g/t0\x05\x00\x09"))
        yield packet(SHARED_TOPIC, b"\x00\x03g/t" + packet(b"\xff", b""))
        yield b"\x31\x06\x00\x01ax\x00\x00"
        yield b"\xc0\x00\xe0\x00"
