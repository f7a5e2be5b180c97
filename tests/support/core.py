"""The broker core in memory, driven step by step: real components and a real store, without socket, loop and clock.

Data comes in through `PacketReader.receive` and time passes in `advance`. The store answers in `commit` and `settle`;
while ``eager``, after every packet.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from mqttbroker.admin.control.control import controls_of
from mqttbroker.auth.security import Security
from mqttbroker.codec.packets import Connack
from mqttbroker.config.settings import Limits, Settings
from mqttbroker.core.access.policy import (
    AnonymousPolicy,
    AuthenticationChain,
    AuthenticationPolicy,
    AuthenticationRequest,
    Authenticator,
    Identity,
)
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.client_wire import ClientWire
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.core.packets.packet_reader import PacketReader
from mqttbroker.core.packets.protocol import Protocol
from mqttbroker.server.assembly import build_broker, listener_terms, restore
from sessions.store.interface import StreamLog
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet
from support.patience import PATIENCE
from support.raw_client import RawClient

START = 1_700_000_000.0


class AcceptAll(Authenticator):
    """An authenticator that accepts every password."""

    def __init__(self) -> None:
        super().__init__("accept_all")

    def authenticate(self, request: AuthenticationRequest) -> None:
        if request.username is None:
            request.ignore()
        else:
            request.accept(Identity(request.username))


class Core:
    """A broker with its database in ``directory/core.db``. ``limits`` are settings of that section, ``others`` of the
    other sections."""

    def __init__(
        self,
        directory: Path,
        durability: str = "commit",
        log: StreamLog | None = None,
        others: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        self.directory = directory
        self.log = log
        self.settings = Settings(durability=durability, limits=Limits(**limits), **(others or {}))
        self.terms = listener_terms(self.settings, self.settings.listeners[0])
        self.eager = True
        self.seconds = START
        self.auto_ids = count(1)
        self._start()

    def _start(self) -> None:
        self.store = SqliteStore(self.directory / "core.db", self.settings.durability, self.log, apply_interval=0.01)
        recovered = self.store.recover()
        security = Security(self.settings)
        self.policy: AuthenticationPolicy = security.policy
        self.broker: Broker = build_broker(self.settings, recovered, security, self.port())
        self._set_clock()
        self.assembled()
        restore(self.broker, recovered, self.seconds)
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.control = controls_of(self.broker, lambda: self.seconds)
        self.reads: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.store.start(lambda *answer: self.answers.put(answer), lambda *read: self.reads.put(read))
        self.clients: list[CoreClient] = []
        self.taken: WriteSet | None = None

    def port(self) -> ClusterPort | None:
        """The port of the next broker to its cluster; for subclasses."""
        return None

    def assembled(self) -> None:
        """Called with the new broker before rows are restored; for subclasses."""

    def _set_clock(self) -> None:
        clock = self.broker.outbound.clock
        clock.now = int(self.seconds * 1_000_000)
        clock.monotonic = self.seconds

    # --- the store ------------------------------------------------------------------------------------------------

    def take(self) -> WriteSet | None:
        """Start a commit; `commit` or `fail` ends it."""
        assert self.taken is None, "a commit is in progress"
        self.taken = self.broker.commits.next_write_set()
        while self.taken is None and self.broker.journal.closing:
            self.taken = self.broker.commits.next_write_set()
        return self.taken

    def commit(self) -> bool:
        """Commit one write set: the one of `take`, or the next; false if there is none."""
        write_set = self.taken or self.take()
        self.taken = None
        if write_set is None:
            return False
        self.store.submit(write_set)
        _, error = self.answers.get(timeout=PATIENCE)
        self.broker.commits.answered(str(error) if error else "")
        if error is None and (write_set.pages or write_set.queries):
            _, pages = self.reads.get(timeout=PATIENCE)
            self.broker.commits.read_done(write_set.queries, pages)
        self._resume()
        assert error is None, error
        return True

    def fail(self) -> bool:
        """`commit`, but the write set is rolled back as on a full disk."""
        write_set = self.taken or self.take()
        self.taken = None
        if write_set is None:
            return False
        self.broker.commits.answered("disk full")
        self._resume()
        return True

    def settle(self) -> None:
        """Commit until there is nothing to write, and continue replays."""
        for _ in range(10_000):
            halted = any(client.connection.halted and not client.closed for client in self.clients)
            if halted:
                self._resume()
            if not self.broker.turns.step() and not self.broker.replays.step() and not self.commit() and not halted:
                return
        raise AssertionError("the broker does not stop writing")

    def _resume(self) -> None:
        for client in self.clients:
            client.connection.go_on()
            if not client.connection.blocked:
                client.reader.resume()

    # --- time and life --------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Move the clock and have the broker do the work that is due."""
        self.seconds += seconds
        self._set_clock()
        self.broker.tick(self.seconds)
        if self.eager:
            self.settle()

    def kill(self) -> None:
        """Lose uncommitted changes, and start another broker on the same files."""
        self.store.stop()
        self._start()

    def close(self) -> None:
        self.store.stop()

    def __enter__(self) -> Core:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- clients --------------------------------------------------------------------------------------------------

    def client(self, version: int = 5) -> CoreClient:
        """A network connection without a CONNECT."""
        client = CoreClient(self, version)
        self.clients.append(client)
        return client

    def connect(self, client_id: str = "", version: int = 5, **fields: Any) -> CoreClient:
        client = self.client(version)
        client.connack = client.connect(client_id, **fields)
        assert client.connack.reason_code == 0, f"refused with {client.connack.reason_code:#x}"
        return client


class MemoryWire(ClientWire):
    """The wire of a client without a socket."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core

    @property
    def worker(self) -> int:
        return 0

    @property
    def certificate(self) -> Any:
        return None

    @property
    def loud(self) -> bool:
        return False

    def admit(self) -> AuthenticationPolicy:
        return self.core.policy

    def abort_if_client_left(self) -> bool:
        return False

    def resume_sending_in(self, seconds: float) -> None:
        """`Connection.resume_sending` is up to the test."""

    def flush(self) -> None:
        """The test takes what the outbox has."""

    def resume_reading(self) -> None:
        """`Core._resume` does."""

    def failed(self) -> None:
        raise AssertionError("a defect")


class _MemorySocket:
    """The socket of a `RawClient`: sends to the packet reader and receives from the outbox."""

    def __init__(self, client: CoreClient) -> None:
        self.client = client

    def settimeout(self, seconds: float) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        core = self.client.core
        self.client.reader.receive(data, core.seconds)
        if core.eager:
            core.settle()

    def recv(self, size: int) -> bytes:
        connection = self.client.connection
        if connection.outbox.parts:
            return connection.outbox.drain()
        if connection.closed:
            return b""
        raise TimeoutError("the broker has nothing to send")

    def close(self) -> None:
        self.client.protocol.lost("closed by the client")
        if self.client.core.eager:
            self.client.core.settle()


class CoreClient(RawClient):
    """A client of a `Core`, with the methods of `RawClient`. Nothing is awaited: packets are there or are not sent."""

    def __init__(self, core: Core, version: int) -> None:
        self.version = version
        self.core = core
        self.connection = core.broker.accept("memory", core.terms, core.seconds)
        self.connection.wire = MemoryWire(core)
        self.protocol = Protocol(core.broker, self.connection, lambda: f"auto-{next(core.auto_ids)}")
        self.reader = PacketReader(self.protocol)
        self.socket: Any = _MemorySocket(self)
        self.inbox = []
        self._bytes = b""
        self._packet_id = 0
        self.connack: Connack = Connack(False, 0)

    @property
    def closed(self) -> bool:
        return self.connection.closed

    def arrived(self) -> list[Any]:
        """All packets that were sent to the client and not read yet."""
        packets: list[Any] = []
        while True:
            try:
                packets.append(self.receive())
            except (TimeoutError, ConnectionError):
                return packets


class _BelievesUserNames(Authenticator):
    def authenticate(self, request: AuthenticationRequest) -> None:
        request.accept(Identity(request.username))


def believe_user_names(core: Core) -> None:
    """Accept every client as the user that it claims to be."""
    chain = AuthenticationChain([_BelievesUserNames("test")], AnonymousPolicy(True))
    core.policy = chain


def wait_until(condition: Any, timeout: float = PATIENCE) -> None:
    """Poll a condition that another process fulfils."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
