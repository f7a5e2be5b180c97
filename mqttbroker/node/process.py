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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import uvloop
from setproctitle import setproctitle

from mqttbroker import __version__, build_kind
from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.data.files import restrict
from mqttbroker.admin.http.admission import RequestAdmission
from mqttbroker.admin.http.application import HttpApplication
from mqttbroker.admin.http.service import HttpService
from mqttbroker.auth.security import Security
from mqttbroker.cluster.kafka.connection import connection
from mqttbroker.cluster.kafka.log import LogFailure
from mqttbroker.cluster.nodes.checks import KafkaUnreachable, prepare_topics
from mqttbroker.cluster.nodes.core_control import CoreSetup
from mqttbroker.cluster.streams.topic_setup import prepare_stream_topics
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Listener, Log, Settings
from mqttbroker.logs.levels import LogLevels
from mqttbroker.net import worker_setup
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.passed_sockets import PassedSockets
from mqttbroker.net.tls import FileProblem
from mqttbroker.net.worker_pool import WorkerPool
from mqttbroker.net.worker_setup import FrontSetup, listener_name
from mqttbroker.node.core_http import CoreAway, CoreHttp
from mqttbroker.node.http import ClusterMetrics, ClusterRoutes
from mqttbroker.node.lists import ClusterLists, copy_bans
from mqttbroker.node.shards import NodeShards
from mqttbroker.server import startup
from mqttbroker.server.assembly import listener_policy, node_admission
from mqttbroker.server.reload import Reloader
from mqttbroker.server.reloaded_parts import ReloadedAdmission, ReloadedListeners, ReloadedLog, ReloadedRedirect, ReloadedSecurity
from mqttbroker.server.workers import Workers
from mqttbroker.system.defects import keep_running, report_defect
from mqttbroker.system.service_manager import ServiceManager

log = logging.getLogger("mqttbroker.cluster")

KAFKA_RETRY = 1.0  # seconds between attempts to reach Kafka at the start
KAFKA_LOGGED = 10.0  # seconds after which the same reason is logged again
CLIENT_PATIENCE = 2.0  # seconds that a client waits for the core of its shard, beside the session timeout


class ClusterNode:
    """One node, to be made in the event loop. ``reread`` loads the settings again. Raises ConfigError if a file that the settings name cannot be
    used."""

    def __init__(self, settings: Settings, reread: Callable[[], Settings], manager: ServiceManager, passed: PassedSockets) -> None:
        self.settings = settings
        self.cluster = settings.cluster
        self.name = settings.cluster.node_name
        self.reread = reread
        self.manager = manager
        self.passed = passed
        self.security = Security(settings)
        self.connection = connection(settings.cluster)
        self.stopping = asyncio.Event()
        self.failure = ""
        self.record_cluster = b""
        self.listeners: list[OpenListener] = []
        self.workers = Workers()
        self._copies: set[asyncio.Task[None]] = set()  # of bans
        self._core_settings = settings  # those that cores are started with
        self.shards = NodeShards(
            settings.cluster, self._core_setup, lambda: self.reloader.settings.worker_timeout, self._directed, self._served, self.fail
        )
        self._loop = loop = asyncio.get_running_loop()
        self.admission = node_admission(settings, loop)
        self.reloader = Reloader(reread, settings, self.security, manager)
        self.runner = ControlRunner(loop, self.admission.flush.update_clock, self.reloader.reload)
        self.core_http = CoreHttp(self.shards, self.runner, lambda: self.reloader.settings)
        self.http = HttpService(settings, self.security.rules.common, self._application)
        self.pool = WorkerPool(
            self._worker_count,
            self.listeners,
            self.admission.flush,
            self._log_settings,
            lambda: self.reloader.settings.worker_timeout,
            self.fail,
            self._front,
        )
        self.reloader.register(
            ReloadedLog(LogLevels(loop, settings.log.level, dict(settings.log.levels))),
            ReloadedAdmission(self.admission),
            self.workers,
            ReloadedSecurity(self.security, None),
            ReloadedListeners(self.listeners, self.security),
            self.http,
            ReloadedRedirect(self.admission.terms),
        )

    # -- start and stop ------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        restrict(self.settings.data_dir, self.settings.data_mode)
        self._handle_signals()
        tasks: list[asyncio.Task[None]] = []
        try:
            self._open_http()
            for index, listener in enumerate(self.settings.listeners):
                try:
                    await self._open_listener(listener)
                except FileProblem as error:
                    raise ConfigError([f"listeners.{index}: {error}"]) from None
            for address in self.passed.close():
                log.info("event=passed_socket_closed address=%s", address)
            tasks += self._periodic_tasks()
            await self._start_workers()  # as long as there is no Kafka they refuse clients
            if await self._until_stopping(self._prepare_kafka()):
                return
            await self.pool.reload()  # the id of the cluster, which links need, is known now
            tasks.append(asyncio.create_task(self.shards.be_member(self.connection)))
            tasks.append(asyncio.create_task(keep_running("tell_manager", self._tell_manager)))
            log.info("event=started version=%s build=%s node=%s", __version__, build_kind(), self.name)
            await self.stopping.wait()
            self.shards.stopping = True
            self.manager.stopping()
            if not self.failure:
                await self.shards.drain_to_end()
        finally:
            await self._close(tasks)
        if self.failure:
            raise OSError(self.failure)

    def _periodic_tasks(self) -> list[asyncio.Task[None]]:
        running = {"keep_alive": self.manager.keep_alive, "pass_reloads": self._pass_reloads, "revocations": self._refresh_revocations}
        return [asyncio.create_task(keep_running(part, run)) for part, run in running.items()]

    def _handle_signals(self) -> None:
        loop = self._loop
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
                self.shards.kafka_problem = ""
                return
            except (KafkaUnreachable, LogFailure) as error:
                self.shards.kafka_problem = str(error)
                now = asyncio.get_running_loop().time()
                if self.shards.kafka_problem != logged or now - logged_at > KAFKA_LOGGED:
                    log.error("event=kafka_not_ready reason=%s", error)
                    logged, logged_at = self.shards.kafka_problem, now
            await asyncio.sleep(KAFKA_RETRY)

    async def _prepare_streams(self) -> None:
        cluster = self.cluster
        await prepare_stream_topics(
            self.connection, cluster.id, cluster.shards, self._core_settings.streams, self._core_settings.longest_packet,
            cluster.replication, cluster.min_insync_replicas, cluster.create_topics,
        )  # fmt: skip

    def fail(self, reason: str) -> None:
        """Stop, with an error."""
        self.failure = self.failure or reason
        self.stopping.set()

    async def _tell_manager(self) -> None:
        """Tell the service manager when clients are served the first time."""
        while self.shards.unready():
            await asyncio.sleep(0.1)
        self.manager.ready()

    async def _close(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self.reloader.stop()
        for listener in self.listeners:
            listener.close()
        self.workers.stop_listening()
        await self.shards.stop()
        tasks = [*tasks, *self._copies]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.shards.leave()
        await self.workers.stop()
        self.runner.close()
        self.http.stop()

    def _directed(self, owners: dict[int, LinkAddress]) -> None:
        self.pool.direct(worker_setup.Directory(self.cluster.shards, owners))

    def _served(self, shard: int) -> None:
        """A core here has taken its shard over."""
        if self.http.port is not None:
            task = asyncio.create_task(self._copy_bans(self.core_http, shard))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)
            report_defect(task, "copy_bans")

    async def _copy_bans(self, cores: CoreHttp, shard: int) -> None:
        try:
            copied = await copy_bans(cores, shard)
        except CoreAway as away:
            log.warning("event=bans_not_copied shard=%d reason=%s", shard, away)
        else:
            if copied:
                log.info("event=bans_copied shard=%d bans=%d", shard, copied)

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
        return CoreSetup(self._core_settings, self.record_cluster, self.name, cluster.address, self.digest(), self.shards.link_key).encode()

    async def _pass_reloads(self) -> None:
        """Have the cores reload whenever this process has reloaded."""
        while True:
            await self.reloader.reloaded.wait()
            try:
                self._core_settings = self.reread()
            except ConfigError:
                continue  # the reloader has said so
            self.shards.reload()
            if not self.shards.kafka_problem:
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
        policy = listener_policy(self.settings, listener, self.security, self.admission.counters)
        open_listener = OpenListener(listener, policy, self.admission, True)
        await open_listener.open(self.passed)
        await open_listener.refresh_revocations(self.settings.crl.expiry_warning)
        self.listeners.append(open_listener)

    async def _start_workers(self) -> None:
        for listener in self.listeners:
            listener.on_reloaded = self.pool.reload
        await self.workers.start(self.pool, self.stopping)

    @property
    def _worker_count(self) -> int:
        return max(1, self.settings.worker_count)

    def _log_settings(self) -> Log:
        in_force = self.reloader.settings.log
        return replace(self.settings.log, level=in_force.level, levels=in_force.levels)

    def _front(self) -> FrontSetup:
        """The setup of a worker that sends clients to the cores."""
        cluster, settings, workers = self.cluster, self.reloader.settings, self._worker_count
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

    def _warnings(self) -> list[str]:
        """Problems that keep no client away; called on the HTTP server's thread."""
        return [f"reload: {problem}" for problem in self.reloader.problems] + self.shards.warnings()

    def _application(self, admission: RequestAdmission, requests: Counter[tuple[str, int]]) -> HttpApplication:
        """What answers HTTP requests; called on the HTTP server's thread when its first client comes."""

        async def readiness() -> list[str]:
            return await asyncio.wrap_future(self.runner.call(self.shards.unready))

        cores = self.core_http
        metrics = ClusterMetrics(self.shards, cores, self.workers, self.admission.counters, self.runner)
        lists = ClusterLists(cores, admission.bans)
        routes = [*ClusterRoutes(self.shards, self.runner).routes(), *lists.routes(), *cores.routes()]
        return HttpApplication(
            admission, requests, None, metrics.render, readiness,
            max_connections=self.settings.http.max_connections, routes=routes, warnings=self._warnings,
        )  # fmt: skip

    def _open_http(self) -> None:
        self.http.open()
        if self.http.port is not None:
            settings = self.settings.http
            scheme = "http" if self.http.context is None else "https"
            host = settings.host if settings.host not in ("", "0.0.0.0", "::") else self.cluster.address
            self.shards.http_url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.http.port}"


def serve_node(settings: Settings, reread: Callable[[], Settings], warnings: Sequence[str] = ()) -> int:
    """Run a node until SIGTERM; returns the exit status of the process. An error that prevents the start is one line on stderr."""
    if not startup.begin(settings, warnings):
        return 2
    # aiokafka logs each attempt to connect; what matters of it is logged here.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    manager = ServiceManager(os.environ)
    setproctitle(f"mqttbroker: node {settings.cluster.node_name} {' '.join(sys.argv[1:])}")

    async def main() -> None:
        await ClusterNode(settings, reread, manager, PassedSockets(os.environ)).run()

    try:
        uvloop.run(main())
    except (ConfigError, OSError, ValueError) as error:
        return startup.failed(error, settings)
    return 0
