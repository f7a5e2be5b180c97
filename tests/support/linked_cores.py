"""Cores of a cluster in one process: real brokers, stores, buses and links over socketpairs; their logs are lists.

The event loop runs in a thread, so that a test uses blocking clients. A commit of a core is at once in its log, and fed to
the buses of the others.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mqttbroker.cluster.bus.bus import Barrier, Bus, BusRecord, LocalReceiver
from mqttbroker.cluster.links.links import Links, link_endpoint
from mqttbroker.cluster.links.server import CORE, Hello
from mqttbroker.cluster.log.body import encode_body, published_of
from mqttbroker.config.settings import Settings
from mqttbroker.core.access.policy import AnonymousPolicy, AuthenticationChain
from mqttbroker.core.client.connection import Connection
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.wire import Endpoint, Wire
from mqttbroker.server.assembly import build_broker, listener_terms, restore
from sessions.row_kinds import MARKS
from sessions.rows import MarkRow
from sessions.store.writer import SqliteStore
from sessions.write_set import TO_ALL, TO_MEMBER, Page, WriteSet
from support.partial_port import PartialPort
from support.patience import PATIENCE
from support.raw_client import RawClient

T = TypeVar("T")
TICK = 0.05
TIMEOUT = PATIENCE


class LinkedCore:
    """The core of one shard. All methods are called on the event loop."""

    def __init__(self, cores: LinkedCores, shard: int) -> None:
        self.cores = cores
        self.shard = shard
        self.alive = True
        self.reads = False  # what other cores append from now on
        self.defects: list[Connection] = []
        loop = asyncio.get_running_loop()
        directory = cores.directory / str(shard)
        directory.mkdir(exist_ok=True)
        self.store = SqliteStore(directory / "core.db", "commit", None, apply_interval=0.01)
        recovered = self.store.recover()
        self.port = PartialPort()
        self.broker = self.port.broker = build_broker(cores.settings, recovered, cluster=self.port)
        self.broker.lifecycle.resume()
        self.broker.outbound.clock.monotonic = loop.time()
        self.scheduler = FlushScheduler(self.broker, loop, self._submit, True)
        self.links = self.port._links = Links(
            link_endpoint(self.scheduler, self.defects.append, cores.settings.longest_packet),
            shard,
            cores.count,
            lambda other: Hello(cluster="", kind=CORE, node=f"n{shard}", from_shard=shard, shard=other, version=""),
            cores.connect,
            cores.timeout,
            cores.buffer,
            self.port,
        )
        self.scheduler.update_clock()
        restore(self.broker, recovered, time.time())
        self.bus = Bus(
            self.broker,
            shard,
            cores.count,
            cores.marks[shard],
            LocalReceiver(self.broker, shard, cores.count),
            lambda log, size: None,
        )
        self.port.join_bus(Barrier(self.bus, self.broker, self.links.announce, lambda done: done(cores.ends(shard))))
        self.store.start(
            lambda write_set, error: loop.call_soon_threadsafe(self._answered, write_set, error),
            lambda write_set, pages: loop.call_soon_threadsafe(self._read_done, write_set, pages),
        )
        policy = ListenerPolicy(
            AuthenticationChain([], AnonymousPolicy(True)),
            listener_terms(cores.settings, cores.settings.listeners[0]),
            None,
            self.broker.outbound.counters,
        )
        sockets = OpenSockets(10_000, 10_000, self.broker.outbound.counters)
        self.endpoint = Endpoint(self.scheduler, policy, sockets, lambda: f"auto-{random.random()}", self.defects.append)
        self._bodies: dict[int, bytes] = {}
        self._ticks = loop.create_task(self._tick())
        self.transports: list[Any] = []

    def catch_up(self) -> None:
        """Read all logs of the others from the marks on."""
        self.reads = True
        for mark in self.bus.marks:
            for offset in range(mark.offset, len(self.cores.logs[mark.log])):
                self.feed(mark.log, offset)

    def feed(self, log: int, offset: int) -> None:
        body = self.cores.logs[log][offset]
        sections = [
            one
            for one in published_of(body).sections
            if one.destination == TO_ALL or (one.destination == TO_MEMBER and one.partition == self.shard)
        ]
        self.bus.feed([BusRecord(_mark(log, offset), _mark(log, offset + 1), sections, [], len(body))])

    def _submit(self, write_set: WriteSet) -> None:
        self._bodies[id(write_set)] = encode_body(write_set)
        self._marks = list(write_set.saved(MARKS))
        write_set.stream_messages, write_set.bus = {}, None
        write_set.saved(MARKS).clear()
        self.store.submit(write_set)

    def _answered(self, write_set: WriteSet, error: Exception | None) -> None:
        if not self.alive:
            return
        body = self._bodies.pop(id(write_set))
        if error is None:
            for mark in self._marks:
                self.cores.marks[self.shard][mark.log] = mark
            self.cores.append(self.shard, body)
        self.scheduler.update_clock()
        self.broker.commits.answered(str(error or ""), False)

    def _read_done(self, write_set: WriteSet, pages: list[Page]) -> None:
        if self.alive:
            self.scheduler.update_clock()
            self.broker.commits.read_done(write_set.queries, pages)

    async def _tick(self) -> None:
        while True:
            self.scheduler.tick()
            await asyncio.sleep(TICK)

    async def kill(self) -> None:
        """End without another word."""
        self.alive = False
        self._ticks.cancel()
        await self.links.close()
        for transport in self.transports:
            transport.abort()
        await asyncio.get_running_loop().run_in_executor(None, self.store.stop)


def _mark(log: int, offset: int) -> MarkRow:
    return MarkRow(log, offset, 0, 0, b"", 0, False)


class LinkedCores:
    """``count`` cores, one per shard, linked to each other. ``settings`` are those of the broker."""

    def __init__(self, directory: Path, count: int = 3, timeout: float = 5.0, buffer: int = 8 << 20, **settings: Any) -> None:
        self.directory = directory
        self.count = count
        self.timeout = timeout
        self.buffer = buffer
        self.settings = Settings(durability="commit", **settings)
        self.logs: list[list[bytes]] = [[] for _ in range(count)]
        self.marks: list[dict[int, MarkRow]] = [{} for _ in range(count)]
        self.cores: dict[int, LinkedCore] = {}
        self.clients: list[LinkedClient] = []
        self.cut: set[frozenset[int]] = set()  # pairs of shards without a link
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> LinkedCores:
        self._thread.start()
        for shard in range(self.count):
            self.call(self._make, shard)
        self.call(self._direct)
        self.synchronize()
        for core in self.cores.values():
            self.look(core.catch_up)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        defects = [connection.client_id for core in self.cores.values() for connection in core.defects]
        for shard in list(self.cores):
            self.kill(shard)
        for client in self.clients:
            client.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        assert not defects or error is not None, f"defects in connections of {defects}"

    # --- on the event loop ----------------------------------------------------------------------------------------

    def append(self, shard: int, body: bytes) -> None:
        self.logs[shard].append(body)
        for other in self.cores.values():
            if other.shard != shard and other.reads:
                other.feed(shard, len(self.logs[shard]) - 1)

    def ends(self, own: int) -> dict[int, int]:
        return {shard: len(log) for shard, log in enumerate(self.logs) if shard != own}

    async def connect(self, address: LinkAddress, hello: Hello, protocol: Any) -> Any:
        other = self.cores.get(address.port)
        if other is None or frozenset((hello.shard, hello.from_shard)) in self.cut:
            raise OSError("nothing is there")
        ours, theirs = socket.socketpair()
        await self.loop.connect_accepted_socket(lambda: other.links.accept(hello), theirs)
        transport, _ = await self.loop.connect_accepted_socket(lambda: protocol, ours)
        return transport

    async def _make(self, shard: int) -> None:
        self.cores[shard] = LinkedCore(self, shard)

    async def _direct(self) -> None:
        owners = {shard: LinkAddress("core", shard, "") for shard in self.cores}
        for core in self.cores.values():
            core.links.direct(owners)

    async def _synchronize(self) -> None:
        for core in self.cores.values():
            assert await core.links.synchronized(TIMEOUT), core.links.missing

    async def _restart(self, shard: int) -> None:
        await self._make(shard)
        await self._direct()
        await self.cores[shard].links.synchronized(TIMEOUT)
        self.cores[shard].catch_up()

    async def _kill(self, shard: int) -> None:
        await self.cores.pop(shard).kill()
        await self._direct()

    async def _open(self, shard: int, theirs: socket.socket) -> None:
        core = self.cores[shard]
        transport, _ = await self.loop.connect_accepted_socket(lambda: Wire(core.endpoint), theirs)
        core.transports.append(transport)

    async def _cut_link(self, one: int, other: int) -> None:
        self.cut.add(frozenset((one, other)))
        link = self.cores[one].links._links[other]
        link.abort()
        await link.lost.wait()
        await asyncio.sleep(0)

    # --- on the test's thread -------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        async def run() -> T:
            return await function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TIMEOUT)

    def look(self, function: Callable[[], T]) -> T:
        """The result of a function that is called on the event loop."""

        async def run() -> T:
            return function()

        return self.call(run)

    def synchronize(self) -> None:
        """Wait until every core has the filters of all others."""
        self.call(self._synchronize)

    def settle(self) -> None:
        """Wait until the cores have told each other what changed, and the buses have routed all that was committed."""

        async def idle() -> None:
            quiet = 0
            while quiet < 3:
                await asyncio.sleep(0.01)
                busy = any(
                    not core.broker.journal.writer_idle
                    or core.broker.journal.has_pending
                    or any(not core.bus.done for _ in (0,))
                    or any(peer._changes or peer._unanswered for peer in core.links._peers.values())
                    for core in self.cores.values()
                )
                quiet = 0 if busy else quiet + 1

        self.call(idle)

    def kill(self, shard: int) -> None:
        self.call(self._kill, shard)

    def restart(self, shard: int) -> None:
        """Start a core on the rows and marks of the one that was killed."""
        self.call(self._restart, shard)

    def cut_link(self, one: int, other: int) -> None:
        self.call(self._cut_link, one, other)

    def client(self, shard: int, client_id: str = "", version: int = 5, **fields: Any) -> LinkedClient:
        """A connected client of the core of a shard."""
        client = self.open(shard, version)
        assert client.connect(client_id, **fields).reason_code == 0
        return client

    def open(self, shard: int, version: int = 5) -> LinkedClient:
        """A connection to the core of a shard, without a CONNECT."""
        ours, theirs = socket.socketpair()
        client = LinkedClient(ours, version)
        self.clients.append(client)
        self.call(self._open, shard, theirs)
        return client


class LinkedClient(RawClient):
    """A client at one end of a socketpair."""

    def __init__(self, end: socket.socket, version: int) -> None:
        self.version = version
        self.socket = end
        self.inbox = []
        self._bytes = b""
        self._packet_id = 0
