"""The broker under abuse, with connections, packets in bulk, and its answers, for all kinds of abuse."""

from __future__ import annotations

import os
import re
import resource
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from fuzz.network_target import REQUEST
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles

from abuse import bystanders
from abuse.packets import Answered, connect
from mqttbroker.auth.passwords import hash_password, set_password

MIB = 1 << 20
PASSWORDS = {bystanders.LOGIN[0]: bystanders.LOGIN[1], "victim": "another secret"}
TOKEN = "secret-token-of-the-abuse-suite"
RULES = """topic readwrite #
topic deny denied/#
user bystander
topic readwrite #
user victim
topic readwrite #
"""
# Low enough for one kind of abuse to reach in seconds what it can reach at all.
BYTES = {
    "route_cache_bytes": 16,
    "max_total_outbox_bytes": 32,
    "max_total_incomplete_bytes": 32,
    "max_total_queue_memory_bytes": 32,
    "max_total_will_bytes": 8,
    "max_pending_write_bytes": 16,
    "max_retained_bytes": 32,
}
LIMITS: dict[str, Any] = {name: f"{size}MiB" for name, size in BYTES.items()} | {
    "max_connections": 3000,
    "max_half_open": 300,
    "max_sessions": 20_000,
    "connect_timeout": "3s",
    "max_retained_messages": 100_000,
    "max_transient_queue_bytes": "8MiB",
    "max_queued_bytes": "32MiB",
    "max_subscriptions_per_client": 50_000,
    "receive_maximum": 1000,
}
# Growth of resident memory that the limits allow: the bytes above, and the objects of connections, sessions,
# subscriptions and retained messages, which are limited in number.
GROWTH = (sum(BYTES.values()) + 110) * MIB


class Log(BrokerProcess):
    """A broker whose log is only read while ``reading``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reading = threading.Event()
        self.reading.set()

    def _read(self, process: Any) -> None:
        for line in process.stdout:
            with self._new_line:
                self.lines.append(line.rstrip("\n"))
                if len(self.lines) > 20_000:  # keep those of the start
                    del self.lines[1000:10_000]
                self._new_line.notify_all()
            self.reading.wait()


class Ports(NamedTuple):
    """The ports of a broker on the loopback interface; 0 where it has none."""

    tcp: int
    websocket: int = 0
    tls: int = 0
    proxy: int = 0
    http: int = 0


def start(directory: Path, seed: str, limits: Mapping[str, Any] = {}, program: str = "") -> Target:
    """A broker with a listener of each type."""
    certificates = CertificateFiles(directory)
    passwords = directory / "passwords"
    for user, password in PASSWORDS.items():
        set_password(passwords, user, hash_password(password.encode()))
    rules = directory / "rules.acl"
    rules.write_text(RULES, encoding="ascii")
    certificate = {"certfile": str(certificates.certfile), "keyfile": str(certificates.keyfile)}
    config: dict[str, Any] = {
        "allow_anonymous": True,
        "password_file": str(passwords),
        "acl_file": str(rules),
        "sys_interval": "1s",
        "limits": {**LIMITS, **limits},
        "http": {"token": TOKEN, "max_connections": 100},
        "listeners": [
            {"host": "127.0.0.1"},
            {"host": "127.0.0.1", "type": "ws", "port": 0},
            {"host": "127.0.0.1", "type": "tls", "port": 0, **certificate},
            {"host": "127.0.0.1", "port": 0, "proxy_protocol": True},
        ],
        "streams": {"abused": {"filters": ["stream/#"]}},
    }
    options: dict[str, Any] = {"program": [program]} if program else {}
    broker = Log(config=config, **options)
    broker.start()
    broker.wait_for_log("event=started")
    found = [re.search(r"event=listening type=(\w+) .*port=(\d+)", line) for line in broker.lines]
    listening = [(match[1], int(match[2])) for match in found if match]
    ports = {kind: port for kind, port in listening if port != broker.port}
    return Target(seed, Ports(broker.port, ports["ws"], ports["tls"], ports["tcp"], broker.http_port), certificates, broker)


class Target:
    """The broker under abuse, for the senders of it; sizes are in bytes, times in seconds."""

    def __init__(self, seed: str, ports: Ports, certificates: CertificateFiles | None = None, broker: Log | None = None) -> None:
        self.random = Random(seed)
        self.ports = ports
        self.answered = Answered()
        self.until = 0.0
        self._certificates = certificates
        self._broker = broker
        self._lines: list[socket.socket] = []

    # --- the process --------------------------------------------------------------------------------------------------

    @property
    def broker(self) -> Log:
        """The process, if it was made by `start`."""
        assert self._broker is not None
        return self._broker

    @property
    def resident(self) -> int:
        with suppress(OSError):
            pages = int(Path(f"/proc/{self.broker.pid}/statm").read_text(encoding="ascii").split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        return 0

    def running(self) -> bool:
        """Whether the abuse is to go on."""
        return time.monotonic() < self.until

    def pause(self, seconds: float) -> bool:
        """`running`, after ``seconds`` at most."""
        time.sleep(max(0.0, min(seconds, self.until - time.monotonic())))
        return self.running()

    def stop(self) -> None:
        """Close all connections of the abuse."""
        for line in self._lines:
            line.close()
        self._lines.clear()

    def close(self) -> None:
        self.stop()
        self.broker.reading.set()
        self.broker.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def open(self, port: int | None = None, receive_buffer: int = 0) -> socket.socket:
        """A TCP connection, to the plain listener unless another ``port`` is given."""
        line = socket.socket()
        if receive_buffer:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        line.settimeout(5.0)
        try:
            line.connect(("127.0.0.1", port or self.ports.tcp))
        except OSError:
            line.close()
            self.answered.note("not accepted")
            raise
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines.append(line)
        if len(self._lines) > 5000:
            self._lines = [found for found in self._lines if found.fileno() >= 0]
        return line

    def connections(self, count: int, port: int | None = None) -> list[socket.socket]:
        """Up to ``count`` connections, as far as the broker accepts them."""
        lines = []
        for _ in range(count):
            with suppress(OSError):
                lines.append(self.open(port))
        return lines

    def client(self, client_id: str, version: int = 4, receive_buffer: int = 0, **fields: Any) -> socket.socket:
        """A connection that has received its CONNACK; raises OSError if the broker refuses or closes it."""
        line = self.open(receive_buffer=receive_buffer)
        line.sendall(connect(client_id, version, **fields))
        data = line.recv(1 << 12)
        if len(data) < 4 or data[3]:
            code = f"{data[3]:#04x}" if len(data) > 3 else "closed"
            self.answered.note(f"CONNACK {code}")
            line.close()
            raise ConnectionRefusedError(code)
        return line

    def clients(self, count: int, prefix: str, version: int = 4, **fields: Any) -> list[socket.socket]:
        """Up to ``count`` connected clients, as far as the broker accepts them."""
        lines = []
        for number in range(count):
            if not self.running():
                break
            with suppress(OSError):
                lines.append(self.client(f"{prefix}{number}", version, **fields))
        return lines

    def websocket(self) -> socket.socket:
        line = self.open(self.ports.websocket)
        line.sendall(REQUEST)
        data = b""
        while b"\r\n\r\n" not in data:
            part = line.recv(1 << 12)
            if not part:
                raise ConnectionResetError("the broker closed the handshake")
            data += part
        return line

    def tls(self) -> ssl.SSLSocket:
        line = self.open(self.ports.tls)
        assert self._certificates is not None
        wrapped = self._certificates.client().wrap_socket(line, server_hostname="localhost")
        self._lines.append(wrapped)
        return wrapped

    def http(self, path: str, headers: str = "", token: str = "") -> bytes:
        """One GET request; returns the status line."""
        line = self.open(self.ports.http)
        if token:
            headers += f"Authorization: Bearer {token}\r\n"
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: broker\r\nConnection: close\r\n{headers}\r\n".encode())
        status = line.recv(1 << 16).partition(b"\r\n")[0]
        line.close()
        self.answered.note(f"HTTP {status[9:12].decode(errors='replace') or 'closed'}")
        return status

    # --- packets ------------------------------------------------------------------------------------------------------

    def push(self, line: socket.socket, data: bytes, version: int = 4) -> bool:
        """Send all of ``data`` and count the answers meanwhile; false if the broker closed the connection or time is
        over."""
        try:
            return self._push(line, data, version)
        finally:
            if line.fileno() >= 0:
                line.settimeout(5.0)

    def _push(self, line: socket.socket, data: bytes, version: int) -> bool:
        view = memoryview(data)
        poll = select.poll()
        poll.register(line, select.POLLIN | select.POLLOUT)
        while view:
            if not self.running():
                return False
            for _, events in poll.poll(200):
                if events & select.POLLIN and not self.answered.read(line, version):
                    return False
                if events & (select.POLLERR | select.POLLHUP):
                    self.answered.note("closed")
                    return False
                if events & select.POLLOUT:
                    line.settimeout(0.0)
                    try:
                        view = view[line.send(view[:262_144]) :]
                    except BlockingIOError:
                        pass
                    except OSError:
                        self.answered.note("closed")
                        return False
        return True

    def flood(
        self,
        begin: Callable[[], socket.socket],
        chunk: bytes | Callable[[], bytes],
        version: int = 4,
        lines: int = 1,
        pause: float = 0.0,
    ) -> None:
        """Send chunks over ``lines`` connections in turn; connections that the broker closes are opened again."""
        opened: list[socket.socket | None] = [None] * lines
        while self.running():
            for index, line in enumerate(opened):
                try:
                    line = begin() if line is None else line
                except OSError:
                    self.pause(0.02)
                    continue
                if not self.push(line, chunk if isinstance(chunk, bytes) else chunk(), version):
                    line.close()
                    line = None
                opened[index] = line
            if pause:
                self.pause(pause)

    def dribble(self, lines: list[socket.socket], data: bytes, version: int = 4) -> None:
        """Send ``data`` byte by byte over all connections, ten bytes per second each, until the end."""
        position = 0
        while lines and self.running():
            for line in list(lines):
                try:
                    line.send(data[position : position + 1])
                except OSError:
                    lines.remove(line)
                    self.answered.note("closed")
            position = min(position + 1, len(data) - 1)
            self.pause(0.1)
        for line in lines:
            if self.answered.read(line, version):
                self.answered.note("still open")

    def watch(self, lines: list[socket.socket], version: int = 4) -> None:
        """Wait until the end, and count what the connections have received and how many are open."""
        while self.pause(0.1):
            pass
        for line in lines:
            if self.answered.read(line, version):
                self.answered.note("still open")


def frame(opcode: int, payload: bytes = b"", fin: bool = True, size: int | None = None) -> bytes:
    """A masked WebSocket frame; its header announces ``size`` bytes if that is given."""
    size = len(payload) if size is None else size
    head = bytes((opcode | 0x80 * fin,))
    if size < 126:
        head += bytes((0x80 | size,))
    elif size < 65536:
        head += b"\xfe" + size.to_bytes(2, "big")
    else:
        head += b"\xff" + size.to_bytes(8, "big")
    return head + bytes(4) + payload  # a mask of zeros changes nothing


def reset(line: socket.socket) -> None:
    """Close a connection with a reset."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def raise_file_limit() -> None:
    """Allow this process as many sockets as the system lets it have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
