"""The broker core driven by hand: real parts and a real store, but no socket, no loop and no clock of its own.

Rule: nothing happens that the test did not ask for. Bytes go in through `Protocol.receive`, time passes by
`advance`, and the store's answers come when `commit` or `settle` is called or, while ``eager``, with every packet.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

from mqttbroker.assembly import build_broker, listener_terms, restore
from mqttbroker.admin.control import BrokerControl
from mqttbroker.codec.packets import Connack
from mqttbroker.config.settings import Limits, Settings
from mqttbroker.core.broker import Broker
from mqttbroker.core.protocol import Protocol
from sessions.store.interface import StreamLog
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet
from support.raw_client import RawClient

START = 1_700_000_000.0


class Core:
    """A broker whose database is ``directory/core.db``; ``limits`` are those of the configuration, ``others`` are
    settings outside that section."""

    def __init__(
        self,
        directory: Path,
        durability: str = "commit",
        log: Optional[StreamLog] = None,
        others: Optional[Mapping[str, Any]] = None,
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
        self.store = SqliteStore(self.directory / "core.db", self.settings.durability, self.log)
        recovered = self.store.recover()
        self.broker: Broker = build_broker(self.settings, recovered)
        self.broker.outbound.clock.now = int(self.seconds * 1_000_000)
        restore(self.broker, recovered, self.seconds)
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.control = BrokerControl(self.broker, lambda: self.seconds)
        self.store.start(lambda *answer: self.answers.put(answer))
        self.clients: list[CoreClient] = []
        self.taken: Optional[WriteSet] = None

    # --- the store ------------------------------------------------------------------------------------------------

    def take(self) -> Optional[WriteSet]:
        """Give the writer its batch without letting it answer; `commit` or `fail` answers."""
        assert self.taken is None, "the writer has a batch"
        self.taken = self.broker.commits.next_write_set()
        return self.taken

    def commit(self) -> bool:
        """One batch through the store, the one that was taken if there is one; False if nothing waits."""
        write_set = self.taken or self.take()
        self.taken = None
        if write_set is None:
            return False
        self.store.submit(write_set)
        _, pages, error = self.answers.get(timeout=30)
        self.broker.commits.answered(pages, str(error) if error else "")
        self._resume()
        assert error is None, error
        return True

    def fail(self) -> bool:
        """One batch is rolled back, as by a full disk."""
        write_set = self.taken or self.take()
        self.taken = None
        if write_set is None:
            return False
        self.broker.commits.answered([], "disk full")
        self._resume()
        return True

    def settle(self) -> None:
        """Commit until nothing is left to write, and send what follows."""
        for _ in range(10_000):
            if not self.broker.replays.step() and not self.commit():
                return
        raise AssertionError("the broker has ever more to write")

    def _resume(self) -> None:
        for client in self.clients:
            if not client.protocol.blocked:
                client.protocol.resume()

    # --- time and life --------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass at once, and have the broker look at it."""
        self.seconds += seconds
        self.broker.outbound.clock.now = int(self.seconds * 1_000_000)
        self.broker.tick(self.seconds)
        if self.eager:
            self.settle()

    def kill(self) -> None:
        """The process is gone with all that was not committed; start another one on the same files."""
        self.store.stop()
        self._start()

    def close(self) -> None:
        self.store.stop()

    def __enter__(self) -> Core:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    # --- clients --------------------------------------------------------------------------------------------------

    def client(self, version: int = 5) -> CoreClient:
        """A network connection; CONNECT is up to the test."""
        client = CoreClient(self, version)
        self.clients.append(client)
        return client

    def connect(self, client_id: str = "", version: int = 5, **fields: Any) -> CoreClient:
        client = self.client(version)
        client.connack = client.connect(client_id, **fields)
        assert client.connack.reason_code == 0, f"refused with {client.connack.reason_code:#x}"
        return client


class _Line:
    """Stands where a socket stands in `RawClient`."""

    def __init__(self, core: Core, protocol: Protocol) -> None:
        self.core = core
        self.protocol = protocol

    def settimeout(self, seconds: float) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        self.protocol.receive(data, self.core.seconds)
        if self.core.eager:
            self.core.settle()

    def recv(self, size: int) -> bytes:
        if self.protocol.outbox:
            return self.protocol.take()
        if self.protocol.state == 3:
            return b""
        raise TimeoutError("the broker has nothing to send")

    def close(self) -> None:
        self.protocol.lost("closed by the client")
        if self.core.eager:
            self.core.settle()


class CoreClient(RawClient):
    """A client of a `Core`, with the methods of `RawClient`; what does not come at once does not come."""

    def __init__(self, core: Core, version: int) -> None:
        self.version = version
        self.core = core
        self.protocol = Protocol(core.broker, "memory", core.seconds, lambda: f"auto-{next(core.auto_ids)}", core.terms)
        self.socket: Any = _Line(core, self.protocol)
        self.inbox = []
        self._bytes = b""
        self._packet_id = 0
        self.connack: Connack = Connack(False, 0)

    @property
    def closed(self) -> bool:
        return self.protocol.state == 3

    def arrived(self) -> list[Any]:
        """Every packet that has come, and no longer waits to be taken."""
        packets: list[Any] = []
        while True:
            try:
                packets.append(self.receive())
            except (TimeoutError, ConnectionError):
                return packets


def wait_until(condition: Any, timeout: float = 10.0) -> None:
    """Poll a condition of another process until it holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
