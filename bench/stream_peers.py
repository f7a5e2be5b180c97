"""Redis Streams and RabbitMQ beside this broker: durable appends, and a group of four that reads and acknowledges.

Every client here is the same loop: it sends a batch of `BATCH` records on each of `CONNECTIONS` connections, or takes as
many from a group, and sends the next when all are acknowledged. Only the bytes differ, so the server decides.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from runner import cpu_ns, descendants, free_port

CONNECTIONS = 10
BATCH = 100
MEMBERS = 4
START_SECONDS = 90.0
STALL_SECONDS = 30.0
REST_SECONDS = 1.0
"""After the last acknowledgement, so that CPU time includes what a server writes later."""


class Line:
    """A connection that has ``due`` answers to get."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rest = b""
        self.due = 0
        self.taken = 0
        self.tags: set[int] = set()

    def receive(self) -> bytes:
        """What was received, behind what the last call left in `rest`."""
        more = self.sock.recv(1 << 20)
        if not more:
            raise SystemExit("streams: the server closed a connection")
        data, self.rest = self.rest + more, b""
        return data


class Server(ABC):
    """A server in a directory of its own, as a context manager; `process` is the one whose CPU time counts."""

    name = ""
    process: subprocess.Popen[bytes]

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bench-streams-"))
        self.port = free_port()

    def __enter__(self) -> Server:
        self.start()
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.prepare()
                return self
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    self.__exit__()
                    raise SystemExit(f"streams: {self.name} does not start: {self.log()}") from None
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-300:]

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def cpu_seconds(self) -> float:
        return sum(map(cpu_ns, descendants(self.process.pid))) / 1e9

    @abstractmethod
    def start(self) -> None:
        """Start the process."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the stream or queue, and a group that begins with the first record. Raises OSError until it listens."""

    @abstractmethod
    def publisher(self) -> Line:
        """A connection that may publish."""

    @abstractmethod
    def batch(self, payload: bytes) -> bytes:
        """The bytes that publish `BATCH` records."""

    @abstractmethod
    def answers(self, line: Line) -> int:
        """Receive; returns how many records are acknowledged as stored."""


class Peer(Server):
    """A server whose group is read by `read_group`; ``has_groups`` says whether it has groups at all."""

    has_groups = True

    @abstractmethod
    def member(self, number: int) -> Line:
        """A connection that takes part in the group, and has asked for records."""

    @abstractmethod
    def take(self, line: Line) -> int:
        """Receive; acknowledge the records that came, and ask for more; returns how many came."""


def append(server: Server, records: int, payload: bytes) -> tuple[float, float]:
    """Store so many records; returns the seconds until the last acknowledgement and the CPU seconds."""
    lines = [server.publisher() for _ in range(CONNECTIONS)]
    data = server.batch(payload)
    used, begun = server.cpu_seconds(), time.perf_counter()
    to_send, left = records // BATCH, records // BATCH * BATCH
    with selectors.DefaultSelector() as selector:
        for line in lines:
            line.sock.setblocking(True)
            selector.register(line.sock, selectors.EVENT_READ, line)
            if to_send:
                line.sock.sendall(data)
                line.due, to_send = BATCH, to_send - 1
        while left:
            ready = selector.select(STALL_SECONDS)
            if not ready:
                raise SystemExit(f"streams: {server.name} acknowledged nothing for {STALL_SECONDS:g} s")
            for key, _ in ready:
                line = key.data
                count = server.answers(line)
                line.due, left = line.due - count, left - count
                if line.due == 0 and to_send:
                    line.sock.sendall(data)
                    line.due, to_send = BATCH, to_send - 1
    seconds = time.perf_counter() - begun
    time.sleep(REST_SECONDS)
    used = server.cpu_seconds() - used
    for line in lines:
        line.sock.close()
    return seconds, used


def read_group(server: Peer, records: int) -> tuple[float, float]:
    """Have a group of `MEMBERS` take so many records; returns the seconds and the CPU seconds, as `append`."""
    used, begun = server.cpu_seconds(), time.perf_counter()
    lines = [server.member(number) for number in range(MEMBERS)]
    with selectors.DefaultSelector() as selector:
        for line in lines:
            line.sock.setblocking(True)
            selector.register(line.sock, selectors.EVENT_READ, line)
        left = records // BATCH * BATCH
        while left > 0:
            ready = selector.select(STALL_SECONDS)
            if not ready:
                raise SystemExit(f"streams: {server.name} delivered nothing for {STALL_SECONDS:g} s, {left} are missing")
            for key, _ in ready:
                left -= server.take(key.data)
    if left:
        raise SystemExit(f"streams: {server.name} delivered {-left} records twice")
    seconds = time.perf_counter() - begun
    time.sleep(REST_SECONDS)
    used = server.cpu_seconds() - used
    for line in lines:
        line.sock.close()
    return seconds, used


# --- Redis ------------------------------------------------------------------------------------------------------------

ENTRY_ID = re.compile(rb"\*2\r\n\$\d+\r\n(\d+-\d+)\r\n\*4\r\n")
ENTRIES = re.compile(rb"\*1\r\n\*2\r\n\$1\r\ns\r\n\*(\d+)\r\n")
LAST_FIELD = b"\r\n$7\r\npayload\r\n"
VALUE = re.compile(rb"\$(\d+)\r\n")


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Redis(Peer):
    """Redis with an append-only file. XADD is answered after the sync with ``always``, before it with ``everysec``."""

    def __init__(self, fsync: str) -> None:
        super().__init__()
        self.name = f"Redis {fsync}"
        self.fsync = fsync

    def start(self) -> None:
        self.process = self.run([
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", "",
            "--appendonly", "yes", "--appendfsync", self.fsync,
        ])  # fmt: skip

    def prepare(self) -> None:
        with self.connect() as sock:
            sock.sendall(command(b"XGROUP", b"CREATE", b"s", b"g", b"0", b"MKSTREAM"))
            if not sock.recv(100).startswith(b"+OK"):
                raise OSError("no group")

    def publisher(self) -> Line:
        return Line(self.connect())

    def batch(self, payload: bytes) -> bytes:
        return command(b"XADD", b"s", b"*", b"topic", b"bench/history/0001", b"payload", payload) * BATCH

    def answers(self, line: Line) -> int:
        data = line.receive()
        if b"-" in data[:1] or b"\r\n-" in data:
            raise SystemExit(f"streams: {self.name}: {data[:100]!r}")
        *answers, line.rest = data.split(b"\r\n")
        line.taken += len(answers)
        done, line.taken = divmod(line.taken, 2)  # the length, and the id
        return done

    def _ask(self, line: Line, acknowledged: list[bytes]) -> None:
        member = b"m%d" % line.due
        request = command(b"XREADGROUP", b"GROUP", b"g", member, b"COUNT", b"%d" % BATCH, b"BLOCK", b"20000",
                          b"STREAMS", b"s", b">")  # fmt: skip
        if acknowledged:
            request = command(b"XACK", b"s", b"g", *acknowledged) + request
        line.sock.sendall(request)

    def member(self, number: int) -> Line:
        line = Line(self.connect())
        line.due = number
        self._ask(line, [])
        return line

    def take(self, line: Line) -> int:
        data = line.receive()
        found = ENTRY_ID.findall(data)
        announced = ENTRIES.search(data)
        last = data.rfind(LAST_FIELD)
        size = VALUE.match(data, last + len(LAST_FIELD)) if last >= 0 else None
        if (
            announced is None
            or len(found) < int(announced[1])
            or data.count(LAST_FIELD) < len(found)
            or size is None
            or len(data) < size.end() + int(size[1]) + 2
        ):
            line.rest = data
            return 0
        self._ask(line, found)
        return len(found)


# --- RabbitMQ ---------------------------------------------------------------------------------------------------------


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def long(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def table(**entries: bytes) -> bytes:
    return long(b"".join(short(name.replace("_", "-").encode()) + b"S" + long(text) for name, text in entries.items()))


def frame(kind: int, channel: int, body: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(body)) + body + b"\xce"


def method(channel: int, class_id: int, method_id: int, arguments: bytes) -> bytes:
    return frame(1, channel, struct.pack(">HH", class_id, method_id) + arguments)


class RabbitMQ(Peer):
    """RabbitMQ with publisher confirms and consumer acknowledgements, over AMQP 0-9-1. A quorum queue is synced, a stream
    is not, and has no consumers that share it."""

    PREFETCH = 1000
    DELIVERY = b"\x00\x3c\x00\x3c\x06member"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.name = f"RabbitMQ {kind}"
        self.kind = kind.encode()
        self.has_groups = kind != "stream"
        self.epmd: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        names, here = str(free_port()), str(self.directory)
        environment = {
            "HOME": here, "RABBITMQ_NODENAME": f"bench{self.port}@localhost", "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port), "RABBITMQ_DIST_PORT": str(free_port()), "RABBITMQ_MNESIA_BASE": here,
            "RABBITMQ_LOG_BASE": here, "RABBITMQ_CONFIG_FILE": f"{here}/none", "RABBITMQ_CONF_ENV_FILE": f"{here}/none",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{here}/none", "RABBITMQ_ENABLED_PLUGINS_FILE": f"{here}/plugins",
            "ERL_EPMD_PORT": names, "ERL_EPMD_ADDRESS": "127.0.0.1",
            # Its threads would otherwise spin while they wait, and their CPU time would count.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
        }  # fmt: skip
        (self.directory / "plugins").write_text("[].\n")
        self.epmd = self.run(["epmd", "-port", names, "-address", "127.0.0.1"])
        self.process = self.run([rabbitmq_program() or ""], environment)

    def __exit__(self, *_: object) -> None:
        try:
            for pid in reversed(descendants(self.process.pid)[1:]):
                os.kill(pid, 15)
        except OSError:
            pass
        super().__exit__()
        if self.epmd is not None:
            self.epmd.terminate()
            self.epmd.wait(10)

    def _call(self, sock: socket.socket, request: bytes) -> bytes:
        """Send a method; returns the frame of the answer."""
        sock.sendall(request)
        head = sock.recv(7, socket.MSG_WAITALL)
        if len(head) < 7:
            raise OSError("closed")
        body = sock.recv(struct.unpack(">I", head[3:])[0] + 1, socket.MSG_WAITALL)
        if body[:4] in (b"\x00\x0a\x00\x32", b"\x00\x14\x00\x28"):  # connection.close, channel.close
            raise SystemExit(f"streams: {self.name}: {body!r}")
        return body

    def _open(self) -> socket.socket:
        sock = self.connect()
        sock.settimeout(20)
        self._call(sock, b"AMQP\x00\x00\x09\x01")
        self._call(sock, method(0, 10, 11, table() + short(b"PLAIN") + long(b"\0guest\0guest") + short(b"en_US")))
        sock.sendall(method(0, 10, 31, struct.pack(">HIH", 100, 131072, 0)))
        self._call(sock, method(0, 10, 40, short(b"/") + short(b"") + b"\0"))
        self._call(sock, method(1, 20, 10, short(b"")))
        return sock

    def prepare(self) -> None:
        with self._open() as sock:
            self._call(sock, method(1, 50, 10, b"\0\0" + short(b"s") + b"\x02" + table(x_queue_type=self.kind)))

    def publisher(self) -> Line:
        sock = self._open()
        self._call(sock, method(1, 85, 10, b"\0"))
        return Line(sock)

    def batch(self, payload: bytes) -> bytes:
        publish = method(1, 60, 40, b"\0\0" + short(b"") + short(b"s") + b"\0")
        persistent = frame(2, 1, struct.pack(">HHQHB", 60, 0, len(payload), 0x1000, 2))
        return (publish + persistent + frame(3, 1, payload)) * BATCH

    def answers(self, line: Line) -> int:
        data = line.receive()
        done = at = 0
        while len(data) - at >= 8:
            (size,) = struct.unpack_from(">I", data, at + 3)
            if len(data) - at < size + 8:
                break
            kind = data[at + 7 : at + 11]
            if kind != b"\x00\x3c\x00\x50":  # basic.ack
                raise SystemExit(f"streams: {self.name}: {data[at : at + size + 8]!r}")
            tag, multiple = struct.unpack_from(">QB", data, at + 11)
            if not line.tags:
                line.tags = set(range(line.taken + 1, line.taken + BATCH + 1))
                line.taken += BATCH
            left = {each for each in line.tags if each > tag} if multiple else line.tags - {tag}
            done += len(line.tags) - len(left)
            line.tags = left
            at += size + 8
        line.rest = data[at:]
        return done

    def member(self, number: int) -> Line:
        sock = self._open()
        self._call(sock, method(1, 60, 10, struct.pack(">IHB", 0, self.PREFETCH, 0)))
        sock.sendall(method(1, 60, 20, b"\0\0" + short(b"s") + short(b"member") + b"\0" + table()))
        return Line(sock)

    def take(self, line: Line) -> int:
        data = line.receive()
        count = data.count(self.DELIVERY)
        line.rest = data[-(len(self.DELIVERY) - 1) :]
        line.taken += count
        if count:
            line.sock.sendall(method(1, 60, 80, struct.pack(">QB", line.taken, 1)))
        return count


def rabbitmq_program() -> str | None:
    # Not the wrapper in PATH, which changes the user.
    return shutil.which("rabbitmq-server", path="/usr/lib/rabbitmq/bin")


def installed() -> list[Callable[[], Peer]]:
    """Functions that make each server that is installed; says which are not."""
    found: list[Callable[[], Peer]] = []
    missing = []
    if shutil.which("redis-server") is not None:
        found += [lambda: Redis("always"), lambda: Redis("everysec")]
    else:
        missing.append("redis-server")
    if rabbitmq_program() is not None and shutil.which("epmd") is not None:
        found += [lambda: RabbitMQ("quorum"), lambda: RabbitMQ("stream")]
    else:
        missing.append("rabbitmq-server")
    if missing:
        print(f"bench: goes on without {' and '.join(missing)} (apt-get install {' '.join(missing)})", file=sys.stderr)
    return found
