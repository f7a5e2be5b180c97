"""A node of a cluster with one worker and without Kafka: the node's side of the worker, and cores that each have a broker
in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from mqttbroker.auth.security import Security
from mqttbroker.cluster.links.keys import key_of, new_key
from mqttbroker.cluster.links.server import WORKER, Hello, LinkServer
from mqttbroker.config.settings import Cluster, Limits, Listener, Settings
from mqttbroker.core.access.policy import AnonymousPolicy, AuthenticationChain
from mqttbroker.core.sessions.own_shard import OwnShard
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.link_frames import RELEASING
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.passed_sockets import PassedSockets
from mqttbroker.net.shared_admission import broker_admission
from mqttbroker.net.worker_clients import JoinedClients
from mqttbroker.net.worker_pool import WorkerPool
from mqttbroker.net.worker_setup import Directory, FrontSetup
from mqttbroker.server.assembly import listener_terms, node_admission
from mqttbroker.server.workers import Workers
from support.core import Core

T = TypeVar("T")


class Part:
    """A broker in memory, with the listeners of clients that a worker joins to it."""

    def __init__(self, directory: Path, listeners: list[Listener], stack: ExitStack, own: OwnShard) -> None:
        directory.mkdir(parents=True)
        self.core = stack.enter_context(Core(directory, durability="off", others={"allow_anonymous": True}))
        self.core.broker.connect_handler.own_shard = own
        self.scheduler = FlushScheduler(self.core.broker, asyncio.get_running_loop(), lambda _: None, True)
        self.sockets = OpenSockets(1000, 1000, self.core.broker.outbound.counters)
        security = Security(self.core.settings)
        self.listeners = [
            OpenListener(
                one,
                ListenerPolicy(security.policy, self.core.terms, None, self.core.broker.outbound.counters),
                broker_admission(self.scheduler, self.sockets),
                True,
            )
            for one in listeners
        ]
        for one in self.listeners:
            one.listener_policy.refuses_certificate = None  # there is no context: the node has done the handshake


class CoreEnd:
    """A core: it listens for links, and serves the clients of each."""

    def __init__(self, shard: int, shards: int, directory: Path, listeners: list[Listener], stack: ExitStack) -> None:
        self.shard = shard
        self.part = Part(directory, listeners, stack, OwnShard(shard, shards))
        self.hellos: list[Hello] = []
        self.links: list[JoinedClients] = []
        self.refusal = ""
        self.accepts = True  # clients
        self._server: LinkServer | None = None
        self.key = new_key()
        self.address = LinkAddress("127.0.0.1", 0, key_of(self.key, WORKER))

    async def listen(self) -> None:
        self._server = LinkServer(self.address.host, self.address.port, None, self.key, self._check, {WORKER: self._link})
        await self._server.start()
        self.address = self.address._replace(port=self._server.port)

    def close(self) -> None:
        """Listen no more; links stay."""
        assert self._server is not None
        self._server.close()

    def _check(self, hello: Hello) -> str:
        self.hellos.append(hello)
        return self.refusal

    def _link(self, _: Hello) -> Any:
        part = self.part
        clients = JoinedClients(part.listeners, part.scheduler, "n", 1000, {}, lambda: self.accepts)
        self.links.append(clients)
        return clients.link

    def close_links(self) -> None:
        for one in self.links:
            one.link.close()

    def release(self) -> None:
        """Take no more clients."""
        self.accepts = False
        self.close()
        for one in self.links:
            one.link.send(RELEASING, 0, b"")

    @property
    def clients(self) -> list[str]:
        return sorted(one.client_id for one in self.part.core.broker.clients.connections)


class NodeEnd:
    """The node process's side: its listeners, and the worker that accepts on them."""

    def __init__(self, settings: Settings, patience: float) -> None:
        self.settings = settings
        self._patience = patience
        self.listeners: list[OpenListener] = []
        self.workers = Workers()
        self.failures: list[str] = []
        self._admission = node_admission(settings, asyncio.get_running_loop())
        self._admission.sockets.maximum = self._admission.sockets.max_evictable = 1000
        self.counters = self._admission.counters

    async def open(self) -> None:
        for listener in self.settings.listeners:
            policy = ListenerPolicy(
                AuthenticationChain([], AnonymousPolicy(False)), listener_terms(self.settings, listener), None, self.counters
            )
            one = OpenListener(listener, policy, self._admission, True)
            await one.open(PassedSockets({}))
            self.listeners.append(one)
        self._pool = WorkerPool(
            1, self.listeners, self._admission.flush, lambda: self.settings.log, lambda: 3600.0, self.failures.append, self._front
        )
        await self.workers.start(self._pool, asyncio.Event())

    def _front(self) -> FrontSetup:
        cluster, limits = self.settings.cluster, self.settings.limits
        return FrontSetup(
            {"cluster": "c", "node": "n", "version": "1"},
            (None, None, None),
            cluster.address,
            cluster.link_port,
            self._patience,
            limits.max_half_open,
            limits.max_total_incomplete_bytes,
            limits.max_total_connect_bytes,
        )

    def direct(self, owners: dict[int, LinkAddress]) -> None:
        self._pool.direct(Directory(self.settings.cluster.shards, owners))

    async def reload(self, settings: Settings) -> list[str]:
        """Put limits and certificates in force; returns problems."""
        self.settings = settings
        for one, listener in zip(self.listeners, settings.listeners):
            one.listener_policy.terms = listener_terms(settings, listener)
        await self._pool.reload()
        return [problem for one in self.listeners for problem in await one.reload()]

    async def stop(self) -> None:
        for one in self.listeners:
            one.close()
        self.workers.stop_listening()
        await self.workers.stop()


class FrontNode:
    """A node in a thread, with ``cores`` that own one shard each. ``patience`` is how long a client waits for its core;
    ``limits`` are the node's."""

    def __init__(self, directory: Path, listeners: list[Listener], cores: int = 2, patience: float = 30.0, **limits: Any) -> None:
        self._directory = directory
        self._listeners = listeners
        self._count = cores
        self._limits = limits
        self._patience = patience
        self._stack = ExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.cores: list[CoreEnd] = []
        try:
            self.run(self._start)
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the node's loop."""

        async def running() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(running(), self._loop).result(60)

    def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the node's loop."""

        async def called() -> T:
            return work(*arguments)

        return self.run(called)

    async def _start(self) -> None:
        for shard in range(self._count):
            core = CoreEnd(shard, self._count, self._directory / f"core{shard}", self._listeners, self._stack)
            await core.listen()
            self.cores.append(core)
        host, port, _ = self.cores[0].address
        settings = Settings(
            workers=1,
            limits=Limits(**self._limits),
            listeners=tuple(self._listeners),
            cluster=Cluster(engine="kafka", node="n", link_host=host, link_port=port - 1, shards=self._count),
        )
        self.node = NodeEnd(settings, self._patience)
        await self.node.open()

    def direct(self, *owners: int) -> None:
        """Have these cores be the owners of their shards, and the others lose theirs with the links."""
        self.call(self.node.direct, {shard: self.cores[shard].address for shard in owners})
        for core in self.cores:
            if core.shard not in owners:
                self.call(core.close_links)

    def swap_owners(self) -> None:
        """Have the core of each shard be the owner of the other one, for the worker, until `direct` is called."""
        first, second = (core.address for core in self.cores)
        self.call(self.node.direct, {0: second, 1: first})

    def port(self, index: int = 0) -> int:
        port: int = self.node.listeners[index].describe()["ports"][0]
        return port

    def close(self) -> None:
        if hasattr(self, "node"):
            self.run(self.node.stop)
        self.call(lambda: [task.cancel() for task in asyncio.all_tasks() if task is not asyncio.current_task()])
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._stack.close()


def client_ids(shard: int, shards: int, count: int = 1) -> list[str]:
    """Client ids of a shard."""
    own = OwnShard(shard, shards)
    return [own.fitted(f"c{number}") for number in range(count)]
