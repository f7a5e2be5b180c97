"""The node process of a cluster: `mqttbroker serve` with `[cluster]`.

It joins the cluster, starts the core processes of the shards that it owns or follows, and the connection workers, which accept
clients and give each to the core of its shard, on whatever node that is. It handles no message itself. SIGTERM moves its shards to
other nodes and ends; SIGHUP reloads settings in all its processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Dict, List, Optional

import uvloop
from setproctitle import setproctitle

from mqttbroker import __version__, build_kind, config_check
from mqttbroker.admin.access import access_list
from mqttbroker.admin.control_runner import ControlRunner
from mqttbroker.admin.data_files import restrict, set_umask
from mqttbroker.admin.http import HttpServer
from mqttbroker.assembly import build_broker, listener_terms
from mqttbroker.auth.security import Security, http_ban_terms
from mqttbroker.cluster.checks import KafkaUnreachable, prepare_topics
from mqttbroker.cluster.core_control import CoreSetup, Owners, Snapshot, link_port
from mqttbroker.cluster.core_processes import FOLLOW, NOTHING, SERVE, ShardCore
from mqttbroker.cluster.kafka_connection import connection
from mqttbroker.cluster.kafka_log import LogFailure
from mqttbroker.cluster.link_keys import key_of, new_key
from mqttbroker.cluster.link_server import CORE, WORKER
from mqttbroker.cluster.membership import Directory, Membership, NodeInfo, Refused
from mqttbroker.cluster.stream_topic_setup import prepare_stream_topics
from mqttbroker.cluster_http import ClusterMetrics, ClusterRoutes
from mqttbroker.config.load import ConfigError, log_warning
from mqttbroker.config.settings import Listener, Log, Settings
from mqttbroker.file_limit import client_sockets
from mqttbroker.log_levels import LogLevels
from mqttbroker.logs import close, configure_log, file_problem
from mqttbroker.net import worker_setup
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.passed_sockets import PassedSockets
from mqttbroker.net.tls import http_context
from mqttbroker.net.wire import FlushScheduler
from mqttbroker.net.worker_pool import WorkerPool
from mqttbroker.net.worker_setup import FrontSetup, listener_name
from mqttbroker.reload import Reloader
from mqttbroker.service_manager import ServiceManager
from mqttbroker.workers import Workers
from sessions.store.interface import Recovered

log = logging.getLogger("mqttbroker.cluster")

KAFKA_RETRY = 1.0  # seconds between attempts to reach Kafka at the start
KAFKA_LOGGED = 10.0  # seconds after which the same reason is logged again
MOVE_PATIENCE = 15.0  # seconds in which a living owner has to release a shard that moves
DRAIN_TIMEOUT = 30.0  # seconds that a node waits at its end for other nodes to follow its shards
CLIENT_PATIENCE = 2.0  # seconds that a client waits for the core of its shard, beside the session timeout


class ClusterNode:
    """One node. ``reread`` loads the settings again. Raises ConfigError if a file that the settings name cannot be used."""

    def __init__(
        self, settings: Settings, reread: Callable[[], Settings], manager: ServiceManager, passed: PassedSockets
    ) -> None:
        self.settings = settings
        self.cluster = settings.cluster
        self.name = settings.cluster.node_name
        self.reread = reread
        self.manager = manager
        self.passed = passed
        self.started_at = time.time()
        self.security = Security(settings)
        self.connection = connection(settings.cluster)
        self.stopping = asyncio.Event()
        self.failure = ""
        self.draining = False
        self.pins: Dict[int, tuple[str, float]] = {}
        self.record_cluster = b""
        self.link_key = new_key()
        self.kafka_problem = "Kafka is not reached yet"
        self.directory: Optional[Directory] = None
        self.membership: Optional[Membership] = None
        self.listeners: List[OpenListener] = []
        self.workers = Workers()
        self.pool: Optional[WorkerPool] = None
        self.http: Optional[HttpServer] = None
        self._core_settings = settings  # those that cores are started with
        self.cores = [
            ShardCore(
                shard, self._core_setup, self._owners, lambda: self.reloader.settings.worker_timeout, self._core_changed
            )
            for shard in range(self.cluster.shards)
        ]

    # -- start and stop ------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        restrict(self.settings.data_dir, self.settings.data_mode)
        self._make_parts(loop)
        tasks: List[asyncio.Task[None]] = []
        try:
            self._open_http()
            for listener in self.settings.listeners:
                await self._open_listener(listener)
            for address in self.passed.close():
                log.info("event=passed_socket_closed address=%s", address)
            tasks += [asyncio.create_task(one) for one in (self.manager.keep_alive(), self._pass_reloads(), self._refresh_revocations())]
            await self._start_workers()  # as long as there is no Kafka they refuse clients
            if await self._until_stopping(self._prepare_kafka()):
                return
            assert self.pool is not None
            await self.pool.reload()  # the id of the cluster, which links need, is known now
            tasks.append(asyncio.create_task(self._be_member()))
            tasks.append(asyncio.create_task(self._tell_manager()))
            log.info("event=started version=%s build=%s node=%s", __version__, build_kind(), self.name)
            await self.stopping.wait()
            self.manager.stopping()
            if not self.failure:
                await self._drain()
        finally:
            await self._close(tasks)
        if self.failure:
            raise OSError(self.failure)

    def _make_parts(self, loop: asyncio.AbstractEventLoop) -> None:
        # Listeners and their admission are made for a broker; this one has no clients, and no rows.
        self.broker = build_broker(self.settings, Recovered([], [], [], [], [], 1, 1, 1), self.security)
        self.scheduler = FlushScheduler(self.broker, loop, lambda _: None, True)
        self.sockets = OpenSockets(
            client_sockets(self.settings), self.settings.limits.max_half_open, self.broker.outbound.counters
        )
        self.reloader = Reloader(
            self.reread, self.settings, self.broker, self.security, self.sockets, self.listeners, self.manager,
            LogLevels(loop, self.settings.log.level, dict(self.settings.log.levels)),
        )
        self.runner = ControlRunner(loop, self.scheduler.update_clock, self.reloader.reload)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self.reloader.start)
        loop.add_signal_handler(
            signal.SIGUSR2, log.error, "event=restart_refused reason=%s", "not available in a cluster: stop and start the node"
        )

    async def _until_stopping(self, work: Any) -> bool:
        """Await something, or the end; whether the node stops."""
        working, stopped = asyncio.create_task(work), asyncio.create_task(self.stopping.wait())
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not working.done():
            working.cancel()
            return True
        working.result()
        return self.stopping.is_set()

    async def _prepare_kafka(self) -> None:
        """Return when Kafka has the topics as they must be. Raises ConfigError if they never will be."""
        cluster = self.cluster
        logged, logged_at = "", 0.0
        while True:
            try:
                self.record_cluster = await prepare_topics(self.connection, cluster)
                await self._prepare_streams()
                self.kafka_problem = ""
                return
            except (KafkaUnreachable, LogFailure) as error:
                self.kafka_problem = str(error)
                now = asyncio.get_running_loop().time()
                if self.kafka_problem != logged or now - logged_at > KAFKA_LOGGED:
                    log.error("event=kafka_not_ready reason=%s", error)
                    logged, logged_at = self.kafka_problem, now
            await asyncio.sleep(KAFKA_RETRY)

    async def _prepare_streams(self) -> None:
        cluster = self.cluster
        await prepare_stream_topics(
            self.connection, cluster.id, cluster.shards, self._core_settings.streams, self._core_settings.longest_packet,
            cluster.replication, cluster.min_insync_replicas, cluster.create_topics,
        )  # fmt: skip

    async def _be_member(self) -> None:
        """Be a member of the cluster; the node ends if it cannot be one."""
        self.membership = Membership(
            self.connection, f"{self.cluster.id}.nodes", self.cluster.session_timeout, self.cluster.shards,
            self.cluster.standbys, self.describe, self._assigned,
        )  # fmt: skip
        try:
            await self.membership.run()
        except Refused as error:
            self.fail(f"cluster: {error}")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("event=defect in=membership")
            self.fail(f"cluster: {error!r}")

    def fail(self, reason: str) -> None:
        """Stop, with an error."""
        self.failure = self.failure or reason
        self.stopping.set()

    async def _tell_manager(self) -> None:
        """Tell the service manager when clients are served the first time."""
        while self.unready():
            await asyncio.sleep(0.1)
        self.manager.ready()

    async def _drain(self) -> None:
        """Have other nodes take over the shards of this one, as far as there are any."""
        membership = self.membership
        if membership is None or not membership.joined:
            return
        self.draining = True
        membership.changed()
        until = asyncio.get_running_loop().time() + DRAIN_TIMEOUT
        while any(core.role == SERVE or core.owns for core in self.cores):
            directory = self.directory
            if directory is None or all(one.draining for name, one in directory.members.items() if name != self.name):
                return
            if asyncio.get_running_loop().time() >= until:
                log.warning("event=drain_ended reason=%s", f"after {DRAIN_TIMEOUT:g} s other nodes do not follow all shards")
                return
            await asyncio.sleep(0.05)
        log.info("event=drained node=%s", self.name)

    async def _close(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self.reloader.stop()
        for listener in self.listeners:
            listener.close()
        self.workers.stop_listening()
        await asyncio.gather(*(core.stop() for core in self.cores))
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self.membership is not None:
            await self.membership.leave()
        await self.workers.stop()
        self.runner.close()
        if self.http is not None:
            self.http.stop()

    # -- shards ------------------------------------------------------------------

    def describe(self) -> NodeInfo:
        """What this node says of itself in the cluster."""
        http = self.http
        url = ""
        if http is not None:
            scheme = "http" if self.settings.http.certfile is None else "https"
            host = self.settings.http.host if self.settings.http.host not in ("", "0.0.0.0", "::") else self.cluster.address
            url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{http.port}"
        return NodeInfo(
            self.name,
            self.started_at,
            self.cluster.address,
            self.cluster.link_port,
            __version__,
            url,
            {core.shard: core.epoch for core in self.cores if core.claims},
            [core.shard for core in self.cores if core.runs and core.role != NOTHING and not core.claims],
            [core.shard for core in self.cores if core.role == FOLLOW and core.warm],
            self.draining,
            self.pins,
            [core.shard for core in self.cores if core.failed],
            self.link_key,
        )

    def _assigned(self, directory: Directory) -> None:
        """Give each shard its core and its role as the leader of the group says."""
        self.directory = directory
        self.pins = directory.pins
        for core, (owner, standbys) in zip(self.cores, directory.shards):
            if owner == self.name:
                others = [info for name, info in directory.members.items() if name != self.name]
                lives = any(core.shard in info.owned for info in others)
                core.take_role(SERVE, MOVE_PATIENCE if lives else 0.0, directory.generation)
            else:
                core.take_role(FOLLOW if self.name in standbys else NOTHING, 0.0, directory.generation)
        owners = self._owners()
        assert owners is not None
        for core in self.cores:
            core.tell_owners(owners)
        if self.pool is not None:
            self.pool.direct(worker_setup.Directory(owners.shards, self._addresses(directory, WORKER)))

    def _owners(self) -> Optional[Owners]:
        """Where the cores are that own the shards, as far as the directory says."""
        directory = self.directory
        if directory is None:
            return None
        return Owners(self.cluster.shards, self._addresses(directory, CORE), len(directory.members))

    def _addresses(self, directory: Directory, kind: str) -> Dict[int, LinkAddress]:
        """Where processes of a kind have links to the owners of the shards."""
        found = {}
        for shard, (owner, _) in enumerate(directory.shards):
            if owner in directory.members:
                info = directory.members[owner]
                found[shard] = LinkAddress(info.address, link_port(info.link_port, shard), key_of(info.link_key, kind))
        return found

    def _core_changed(self, core: ShardCore) -> None:
        """Have the shards assigned anew if a core of this node lost one, or can take over one that is to move here."""
        directory, membership = self.directory, self.membership
        if directory is None or membership is None or self.stopping.is_set() and not self.draining:
            return
        owner, standbys = directory.shards[core.shard]
        lost = owner == self.name and not core.owns
        if lost or (directory.moving and core.warm and self.name in standbys):
            membership.changed()

    def move(self, shard: int, node: str) -> str:
        """Have ``node`` own a shard from now on; returns why that cannot be, or "". An operator's choice lasts while the node lives."""
        directory, membership = self.directory, self.membership
        if directory is None or membership is None:
            return "this node is not in the cluster yet"
        if not 0 <= shard < self.cluster.shards:
            return f"there is no shard {shard}, they are 0 to {self.cluster.shards - 1}"
        if node not in directory.members:
            return f"there is no node {node}, there are {', '.join(sorted(directory.members))}"
        if directory.members[node].draining:
            return f"node {node} is draining"
        self.pins = {**self.pins, shard: (node, time.time())}
        membership.changed()
        return ""

    def drain(self, on: bool) -> None:
        """Have other nodes take over all shards of this one, or let it have shards again."""
        self.draining = on
        if self.membership is not None:
            self.membership.changed()

    def write_snapshots(self) -> None:
        """Have the cores of this node that own a shard write snapshots soon."""
        for core in self.cores:
            if core.owns:
                core.send(Snapshot())

    # -- settings ----------------------------------------------------------------

    def digest(self) -> str:
        """Of the settings that all nodes must have in common."""
        settings = self.settings
        common = [
            self.cluster.id, self.cluster.shards, [listener.type for listener in settings.listeners],
            [(stream.name, stream.partitions, stream.key, stream.dedup) for stream in settings.streams],
        ]  # fmt: skip
        return sha256(json.dumps(common).encode()).hexdigest()[:16]

    def _core_setup(self) -> str:
        cluster = self.cluster
        return CoreSetup(
            self._core_settings, self.record_cluster, self.name, cluster.address, self.digest(), self.link_key
        ).encode()

    async def _pass_reloads(self) -> None:
        """Have the cores reload whenever this process has reloaded."""
        while True:
            await self.reloader.reloaded.wait()
            try:
                self._core_settings = self.reread()
            except ConfigError:
                continue  # the reloader has said so
            for core in self.cores:
                core.reload()
            if not self.kafka_problem:
                try:
                    await self._prepare_streams()
                except LogFailure as error:
                    log.error("event=reload_failed reason=%s", error)

    async def _refresh_revocations(self) -> None:
        while True:
            crl = self.reloader.settings.crl
            await asyncio.sleep(crl.refresh_interval or 3600.0)
            for listener in self.listeners:
                await listener.refresh_revocations(crl.expiry_warning)

    # -- listeners, workers, HTTP ------------------------------------------------------

    async def _open_listener(self, listener: Listener) -> None:
        policy = ListenerPolicy(
            self.security.policy_of(listener),
            listener_terms(self.settings, listener, self.security.rules_of(listener)),
            listener.max_connections,
            self.broker.outbound.counters,
            listener.max_half_open or 0,
        )
        open_listener = OpenListener(listener, policy, self.scheduler, self.sockets, True)
        await open_listener.open(self.passed)
        await open_listener.refresh_revocations(self.settings.crl.expiry_warning)
        self.listeners.append(open_listener)

    async def _start_workers(self) -> None:
        settings = self.settings
        count = max(1, settings.worker_count)

        def log_settings() -> Log:
            return replace(settings.log, level=self.reloader.settings.log.level, levels=self.reloader.settings.log.levels)

        def front() -> FrontSetup:
            return self._front(self.reloader.settings, count)

        pool = self.pool = WorkerPool(
            count, self.listeners, self.scheduler, log_settings, lambda: self.reloader.settings.worker_timeout, self.fail, front
        )
        self.reloader.workers = pool
        for listener in self.listeners:
            listener.on_reloaded = pool.reload
        await self.workers.start(pool, self.stopping)

    def _front(self, settings: Settings, workers: int) -> FrontSetup:
        """What each of the workers needs to send clients to the cores."""
        cluster = self.cluster
        return FrontSetup(
            {
                "cluster": self.record_cluster.hex(),
                "node": self.name,
                "version": __version__,
                "listeners": tuple(listener_name(index, one) for index, one in enumerate(settings.listeners)),
                "digest": self.digest(),
            },
            (cluster.link_cafile, cluster.link_certfile, cluster.link_keyfile),
            cluster.address,
            cluster.link_port,
            cluster.session_timeout + CLIENT_PATIENCE,
            max(1, settings.limits.max_half_open // workers),
            settings.limits.max_total_incomplete_bytes // workers,
            settings.limits.max_total_connect_bytes // workers,
        )

    def unready(self) -> List[str]:
        """The reasons why clients should not connect to this node now."""
        if self.kafka_problem:
            return [f"kafka: {self.kafka_problem}"]
        if self.stopping.is_set() or self.draining:
            return ["cluster: this node is draining"]
        if self.membership is None or self.directory is None or not self.membership.joined:
            return ["cluster: this node is not a member yet"]
        without = [str(shard) for shard, (owner, _) in enumerate(self.directory.shards) if owner is None]
        reasons = [f"cluster: shards without an owner: {', '.join(without)}"] if without else []
        return reasons + [reason for core in self.cores if (reason := core.unready())]

    def _warnings(self) -> List[str]:
        """Problems that keep no client away; called on the HTTP server's thread."""
        return [f"reload: {problem}" for problem in self.reloader.problems] + [
            warning for core in self.cores for warning in core.warnings()
        ]

    def _open_http(self) -> None:
        settings = self.settings.http
        if settings.port is None:
            return
        where = f"{settings.host}:{settings.port}"

        async def readiness() -> List[str]:
            return await asyncio.wrap_future(self.runner.call(self.unready))

        try:
            context = http_context(settings)
            metrics = ClusterMetrics(self, self.runner)
            self.http = HttpServer(
                settings.host, settings.port, None, metrics.render, readiness,
                access_list(self.settings, self.security.rules.common), context=context,
                max_connections=settings.max_connections, routes=ClusterRoutes(self, self.runner).routes(),
                warnings=self._warnings,
            )  # fmt: skip
            self.reloader.http = self.http
            self.http.bans.apply(http_ban_terms(self.settings))
            self.http.start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(f"http: cannot listen on {where}: {reason}") from None
        log.info("event=listening type=%s host=%s port=%d", "http" if context is None else "https", settings.host, self.http.port)


def serve_node(settings: Settings, reread: Callable[[], Settings], warnings: Sequence[str] = ()) -> int:
    """Run a node until SIGTERM; returns the exit status of the process. An error that prevents the start is one line on stderr."""
    try:
        configure_log(settings.log)
    except OSError as error:
        close()
        print(file_problem(error, settings.log), file=sys.stderr)
        return 2
    for text in warnings:
        log_warning(text)
    for text in config_check.warnings(settings):
        log.warning("event=configuration_warning reason=%s", text)
    set_umask(settings.data_mode)
    # aiokafka logs each attempt to connect; what matters of it is logged here.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    manager = ServiceManager(os.environ)
    setproctitle(f"mqttbroker: node {settings.cluster.node_name} {' '.join(sys.argv[1:])}")

    async def main() -> None:
        await ClusterNode(settings, reread, manager, PassedSockets(os.environ)).run()

    try:
        uvloop.run(main())
    except ConfigError as error:
        close()  # the error is the last line
        print(error, file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        close()
        print(f"mqttbroker: {error}", file=sys.stderr)
        return 1
    return 0
