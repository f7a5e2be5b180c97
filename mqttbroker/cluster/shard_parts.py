"""The parts of a shard's core beside its broker: the store, the bus, retained messages of all shards, and the links to other processes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bridge_spark.log.stream_files import STREAMS
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker import __version__
from mqttbroker.cluster.bus.bus import Barrier, Bus, LocalReceiver
from mqttbroker.cluster.bus.feed import LogFeed
from mqttbroker.cluster.kafka.connection import connection
from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.links.links import Links, link_endpoint
from mqttbroker.cluster.links.server import (
    CORE,
    WORKER,
    Hello,
    LinkServer,
    client_context,
    connect_link,
    difference,
    server_context,
)
from mqttbroker.cluster.log.records import ID_BYTES, Takeover
from mqttbroker.cluster.nodes.core_control import CoreSetup, link_port
from mqttbroker.cluster.other_shards import OtherShards
from mqttbroker.cluster.retained.parts import RetainedParts
from mqttbroker.cluster.shard.ownership import State
from mqttbroker.cluster.shard.snapshot_keeper import SnapshotKeeper
from mqttbroker.cluster.shard.snapshots import SnapshotFailure, Snapshots
from mqttbroker.cluster.shard.store import KafkaStore, ShardOnNode, Sizes, Timing
from mqttbroker.cluster.shards import Shards
from mqttbroker.cluster.streams.topics import StreamSource, StreamTopics
from mqttbroker.config.settings import Settings
from mqttbroker.core.broker import Broker
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.link import Link
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.link_frames import RELEASING
from mqttbroker.net.listeners import OpenListener, defect
from mqttbroker.net.worker_clients import JoinedClients
from mqttbroker.net.worker_pool import most_sockets
from mqttbroker.net.worker_setup import listener_name
from mqttbroker.system.defects import report_defect
from sessions.message import Message
from sessions.store.interface import Recovered, StoreError

log = logging.getLogger("mqttbroker.cluster")

LEASE_PART: Final = 0.5  # of the session timeout
APPLY_INTERVAL: Final = 1.0  # seconds
MAX_WORKER_LINKS: Final = 1024  # of the workers of all nodes, to one core
LOOK_INTERVAL: Final = 0.5  # seconds between two looks at commits whose outcome is not known, the bus and the links


class Receiver(LocalReceiver):
    """Hands what the bus reads to the parts that it is for."""

    def __init__(self, broker: Broker, shard: int, shards: int, retained: RetainedParts, fail: Callable[[str], None]) -> None:
        super().__init__(broker, shard, shards)
        self._retained = retained
        self._fail = fail

    def retained(self, message: Message) -> bool:
        return self._retained.received(message)

    def marked(self, shard: int, end: int) -> None:
        self._retained.marked(shard, end)

    def failed(self, reason: str) -> None:
        self._fail(f"the logs of other shards cannot be read: {reason}")


class ShardParts:
    """The `BrokerParts` of the core of ``shard``; its files are in ``directory``.

    ``on_lost`` is called, on any thread, with the reason why this process may not go on.
    """

    clustered = True
    repaired = ""  # the next core makes damaged tables again, from a snapshot and the log

    def __init__(self, setup: CoreSetup, shard: int, directory: Path, on_lost: Callable[[str], None]) -> None:
        settings, cluster = setup.settings, setup.settings.cluster
        self.shard = shard
        self.cluster = OtherShards(shard, cluster.shards)
        self.owners: dict[int, LinkAddress] = {}
        self.nodes = 0  # in the cluster
        self.bus_lag = 0  # records of the other logs that are not routed
        self.links_missing: Sequence[int] = ()  # shards with an owner to whose core there is no link
        self.streams: StreamTopics | None = None
        self.definitions: dict[str, dict[str, Any]] = {}  # a stream is a topic of Kafka, which is not made at run time
        self.stream_logs = StreamLogs(directory / STREAMS, [])
        self._setup = setup
        self.settings = settings  # of the broker, once there is one
        self._settings = settings
        self._shards = Shards(cluster.shards)
        self._on_lost = on_lost
        self._connection = connection(cluster)
        self._directory = directory
        takeover = Takeover(setup.node, f"{setup.link_address}:{link_port(cluster.link_port, shard)}", __version__)
        self.store = KafkaStore(
            KafkaLog(self._connection, cluster.log_topic, cluster.append_timeout),
            ShardOnNode(cluster.log_topic, shard, setup.cluster, secrets.token_bytes(ID_BYTES), takeover),
            directory,
            on_lost,
            Timing(cluster.append_timeout, cluster.session_timeout * LEASE_PART, cluster.session_timeout, APPLY_INTERVAL),
            Sizes(cluster.max_record_bytes, settings.limits.max_unapplied_bytes),
            self._prepare,
        )
        self._keeper: SnapshotKeeper | None = None
        self._links: Links | None = None
        self._accepts = False  # clients
        self._listeners: Sequence[OpenListener] = ()
        self._listener_names: frozenset[str] = frozenset()
        self._links_of_clients: dict[Link, bool] = {}
        self._tls = client_context(cluster.link_cafile, cluster.link_certfile, cluster.link_keyfile)
        self._retained: RetainedParts | None = None
        self._bus: Bus | None = None
        self._feed: LogFeed | None = None
        self._server: LinkServer | None = None
        self._undecided: asyncio.Task[None] | None = None

    def direct(self, owners: dict[int, LinkAddress], nodes: int) -> None:
        """The cores that own the shards have these addresses; they are of ``nodes`` nodes."""
        self.owners, self.nodes = owners, nodes
        if self._links is not None:
            self._links.direct(owners)

    def reload(self, settings: Settings) -> None:
        """Use other limits."""
        self.settings = settings
        if self._links is not None:
            self._links.take_packets(settings.longest_packet)

    # -- snapshots ----------------------------------------------------------------

    async def _prepare(self, log_start: int) -> None:
        """Load a snapshot if the log begins behind the tables. On the loop of the log."""
        cluster = self._settings.cluster
        keeper = self._keeper = SnapshotKeeper(
            Snapshots(self._connection, cluster.id, self._setup.node, time.time),
            self.shard,
            self._shards.count,
            cluster.log_topic,
            self._directory,
            cluster.snapshot_bytes,
            cluster.snapshot_age,
            lambda: self.store.log_bytes,
            lambda: self.store.status().state is State.OWNER,
            self._derived,
            self.store.note_error,
        )
        try:
            await keeper.prepare(log_start)
        except SnapshotFailure as error:
            raise StoreError(str(error)) from None

    def request_snapshot(self) -> None:
        """Have a snapshot written soon, once this core owns the shard."""
        keeper = self._keeper
        if keeper is None:
            return

        async def request(_: KafkaLog) -> None:
            keeper.request()

        self.store.run_on_log(request)

    @property
    def snapshots_written(self) -> int:
        return 0 if self._keeper is None else self._keeper.written

    def _derived(self) -> int | None:
        """The offset before which the topics of streams have everything; None if there are no streams."""
        if not self._settings.streams:
            return None
        return 0 if self.streams is None else max(0, self.streams.position)

    # -- BrokerParts ----------------------------------------------------------------

    def recover(self) -> Recovered:
        return self.store.recover()

    def built(self, broker: Broker, scheduler: FlushScheduler) -> None:
        links = self._links = Links(
            link_endpoint(scheduler, defect, self._settings.longest_packet),
            self.shard,
            self._shards.count,
            self._hello,
            lambda address, hello, protocol: connect_link(address, self._tls, hello, protocol),
            self._settings.cluster.session_timeout,
            self._settings.cluster.link_buffer,
            self.cluster,
        )
        retained = self._retained = RetainedParts(
            broker, self._shards, self.shard, links, self._position, lambda: self.store.own_end, self._find_ends
        )
        self.cluster.join_links(links, retained)

    def _hello(self, shard: int) -> Hello:
        setup = self._setup
        return Hello(
            cluster=setup.cluster.hex(),
            kind=CORE,
            node=setup.node,
            from_shard=self.shard,
            shard=shard,
            version=__version__,
            digest=setup.digest,
        )

    def _position(self, shard: int) -> int:
        if self._bus is not None:
            return self._bus.position(shard)
        mark = self.store.marks.get(shard)
        return 0 if mark is None else mark.offset

    async def start(self, broker: Broker, scheduler: FlushScheduler) -> None:
        loop = asyncio.get_running_loop()
        links = self._links
        assert self._retained is not None and links is not None
        await self._listen(scheduler, links)
        links.direct(self.owners)
        await links.synchronized(self._settings.cluster.session_timeout)
        receiver = Receiver(broker, self.shard, self._shards.count, self._retained, self._on_lost)
        bus = self._bus = Bus(broker, self.shard, self._shards.count, self.store.marks, receiver, self._taken)
        barrier = Barrier(bus, broker, links.announce, self._find_ends)
        self.cluster.join_bus(barrier)
        reading = asyncio.Event()
        self.store.run_on_log(partial(self._run_feed, loop, bus, receiver.failed, reading))
        await reading.wait()
        caught_up = asyncio.Event()
        barrier.catch_up(caught_up.set)
        await caught_up.wait()
        broker.lifecycle.resume()
        keeper = self._keeper
        if keeper is not None:
            self.store.run_on_log(lambda _: keeper.run())
        if self._settings.streams:
            cluster = self._settings.cluster
            source = StreamSource(cluster.id, cluster.log_topic, self.shard, self._setup.cluster, self.store.first_state)
            streams = self.streams = StreamTopics(self._connection, source, self._settings.streams, self._settings.longest_packet)
            self.store.run_on_log(lambda _: streams.run())
        self._start_watch(broker, scheduler)

    async def _run_feed(
        self,
        loop: asyncio.AbstractEventLoop,
        bus: Bus,
        failed: Callable[[str], None],
        reading: asyncio.Event,
        kafka: KafkaLog,
    ) -> None:
        """On the loop of the log."""
        feed = self._feed = LogFeed(
            kafka, self.shard, self._shards.count, self._setup.cluster, self.store.marks, self._settings.cluster.max_bus_bytes,
            loop.call_soon_threadsafe, bus.feed, failed,
        )  # fmt: skip
        feed.start()
        loop.call_soon_threadsafe(reading.set)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await feed.stop()

    def _taken(self, number: int, size: int) -> None:
        if self._feed is not None:
            self._feed.taken(number, size)

    def _find_ends(self, done: Callable[[dict[int, int]], None]) -> None:
        assert self._feed is not None
        self._feed.find_ends(done)

    def _start_watch(self, broker: Broker, scheduler: FlushScheduler) -> None:
        self._undecided = asyncio.create_task(self._watch(broker, scheduler))
        report_defect(self._undecided, "undecided_commits", self._on_lost)

    async def _watch(self, broker: Broker, scheduler: FlushScheduler) -> None:
        """Close the connections that wait for a commit whose outcome is not known, and look how the bus and the links are doing."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            self._look()
            if self.store.undecided():
                scheduler.update_clock()
                broker.commits.undecided()
                scheduler.schedule()

    def _look(self) -> None:
        bus, feed, links = self._bus, self._feed, self._links
        assert bus is not None and feed is not None and links is not None
        others = (shard for shard in range(self._shards.count) if shard != self.shard)
        self.bus_lag = sum(max(0, feed.end(shard) - bus.position(shard)) for shard in others)
        self.links_missing = links.missing

    async def _listen(self, scheduler: FlushScheduler, links: Links) -> None:
        """Accept links of other cores, and later those of workers."""
        cluster = self._settings.cluster

        def worker(hello: Hello) -> Link:
            link = JoinedClients(self._listeners, scheduler, hello.node, most_sockets(), self._links_of_clients, lambda: self._accepts).link
            self._links_of_clients[link] = True
            return link

        tls = server_context(cluster.link_cafile, cluster.link_certfile, cluster.link_keyfile)
        server = self._server = LinkServer(
            cluster.link_host, link_port(cluster.link_port, self.shard), tls, self._setup.link_key, self._refusal,
            {WORKER: worker, CORE: links.accept},
        )  # fmt: skip
        await server.start()

    def _refusal(self, hello: Hello) -> str:
        """Why there is no link with this first line; "" if there can be one."""
        own, count = self.shard, self._shards.count
        if hello.kind == WORKER and not self._accepts:
            return f"shard {own} is not served yet"
        if hello.kind == WORKER and len(self._links_of_clients) >= MAX_WORKER_LINKS:
            return f"shard {own} has links of {MAX_WORKER_LINKS} workers, and takes no more"
        if hello.kind == CORE and hello.from_shard not in range(own + 1, count):
            return f"a link from shard {hello.from_shard}, which shard {own} opens or which there is not"
        return difference(hello, self._setup.cluster.hex(), own, self._setup.digest, self._listener_names)

    async def open(self, listener: OpenListener) -> None:
        listener.open_for_links()

    async def accept(self, listeners: Sequence[OpenListener], scheduler: FlushScheduler) -> None:
        self._listeners = listeners
        self._listener_names = frozenset(listener_name(index, one.listener) for index, one in enumerate(listeners))
        self._accepts = True
        log.info("event=shard_served shard=%d", self.shard)

    def stop_accepting(self) -> None:
        self._accepts = False
        if self._server is not None:
            self._server.close()
        for link in self._links_of_clients:
            link.send(RELEASING, 0, b"")

    async def stop(self) -> None:
        if self._undecided is not None:
            self._undecided.cancel()
        for link in list(self._links_of_clients):
            link.close()
        if self._links is not None:
            await self._links.close()

    @property
    def stream_problem(self) -> str:
        """Why messages are not copied to the topics of streams now; "" if they are."""
        return "" if self.streams is None else self.streams.failure

    def sys_topics(self) -> dict[str, object]:
        return {
            "cluster/nodes": self.nodes,
            "cluster/shards": self._shards.count,
            "cluster/shard": self.shard,
            "cluster/epoch": self.store.status().epoch,
            "cluster/bus_lag": self.bus_lag,
            "cluster/links_missing": " ".join(map(str, self.links_missing)) or "none",
        }

    def unready(self) -> list[str]:
        problem = self.store.status().problem
        return [f"cluster: {problem}"] if problem else []
