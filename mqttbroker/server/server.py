"""The server: a broker with its store, streams, listeners and HTTP endpoint, from start to stop.

SIGTERM and SIGINT disconnect every client, write everything that is pending and end the process with status 0. SIGUSR2
does the same, and starts the broker again in this process with the same listening sockets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import logging
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import uvloop
from setproctitle import setproctitle

from bridge_spark.log.archive.archiver import Archiver
from bridge_spark.log.sealed.sealer import Sealer
from bridge_spark.log.stream_log import StreamLogError, StreamLogs
from mqttbroker import __version__, build_kind
from mqttbroker.admin.control.control import BrokerControl
from mqttbroker.admin.control.groups import GroupControl, GroupsReport
from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.views import AuthenticatorStatus
from mqttbroker.admin.data.files import restrict
from mqttbroker.admin.data.repair import SalvageReport
from mqttbroker.admin.data.version import with_programs
from mqttbroker.admin.events.alarms import Alarms
from mqttbroker.admin.events.client_events import ClientEvents
from mqttbroker.admin.http.access import access_list, streams_open
from mqttbroker.admin.http.gate import Gate
from mqttbroker.admin.http.server import HttpServer
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.history import History, Sampler
from mqttbroker.auth.security import Security, http_ban_terms
from mqttbroker.bridges.bridge import BridgeContext, BridgeStatus
from mqttbroker.bridges.bridges import Bridges
from mqttbroker.bridges.local_client import RULES as BRIDGE_RULES
from mqttbroker.bridges.state_file import DIRECTORY as BRIDGE_DIRECTORY
from mqttbroker.config.in_force import settings_in_force
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Listener, Log, Settings, Stream
from mqttbroker.core.access.policy import AllowAll, AnonymousPolicy, AuthenticationChain
from mqttbroker.core.broker import Broker
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.logs.levels import LogLevels
from mqttbroker.logs.output import close
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.listeners import OpenListener, defect, new_client_id
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.passed_sockets import OWN, ListeningSocket, PassedSockets
from mqttbroker.net.tls import FileProblem, ListenerContext, http_context
from mqttbroker.net.trace import Tracer
from mqttbroker.net.wire import Endpoint
from mqttbroker.net.worker_pool import WorkerPool
from mqttbroker.server import startup
from mqttbroker.server.assembly import bridge_terms, build_broker, listener_policy, restore
from mqttbroker.server.conditions import Conditions
from mqttbroker.server.health import Health
from mqttbroker.server.metrics_page import MetricsPage
from mqttbroker.server.own_parts import OwnParts
from mqttbroker.server.periodic_tasks import GC_FULL, PeriodicTasks
from mqttbroker.server.reload import Reloader
from mqttbroker.server.restart import RestartRequest, restart
from mqttbroker.server.store_runner import StoreRunner
from mqttbroker.server.stream_control import StreamControl
from mqttbroker.server.stream_reads import StreamReads
from mqttbroker.server.workers import Workers
from mqttbroker.system.allocator import keep_freed_memory
from mqttbroker.system.defects import keep_running
from mqttbroker.system.file_limit import client_sockets
from mqttbroker.system.memory_limit import MemoryWatch, ProcessMemory, part_limits
from mqttbroker.system.service_manager import ServiceManager
from sessions.store.interface import Recovered, Store, StoreError

if TYPE_CHECKING:
    from mqttbroker.admin.http.api import Operations
    from mqttbroker.admin.http.application import HttpApplication

log = logging.getLogger("mqttbroker")
audit = logging.getLogger("mqttbroker.audit")

# The loop waits for a collection, up to 1 ms for one of the first generation and 4 ms for one of the second. A full one
# takes time in proportion to all objects, so it is run while no client sends (`PeriodicTasks.tick`), or when it is ten
# times overdue.
GC_THRESHOLDS = (2_000, 2, 10 * GC_FULL)


class BrokerParts(Protocol):
    """The parts that depend on where the broker stores its rows: `OwnParts` of a single broker, `ShardCore` of a shard."""

    @property
    def clustered(self) -> bool:
        """Whether the broker is one of several: its node has the signals and the sockets, and Kafka the streams."""

    @property
    def settings(self) -> Settings:
        """The settings in force, with the streams that were created at run time."""

    @property
    def definitions(self) -> Mapping[str, Mapping[str, Any]]:
        """The definitions of the streams that were created at run time."""

    @property
    def stream_logs(self) -> StreamLogs:
        """The streams on this disk."""

    @property
    def store(self) -> Store: ...

    @property
    def cluster(self) -> ClusterPort | None:
        """The port of the core to the other shards."""

    @property
    def repaired(self) -> str:
        """What `recover` had to repair, one line; "" = nothing."""

    def recover(self) -> Recovered:
        """Open the store. Raises StoreError."""

    def built(self, broker: Broker, scheduler: FlushScheduler) -> None:
        """The broker is built, and its rows are not restored yet."""

    async def start(self, broker: Broker, scheduler: FlushScheduler) -> None:
        """Start what needs the event loop. Returns when clients may connect."""

    async def open(self, listener: OpenListener) -> None:
        """Open a listener. Raises OSError."""

    async def accept(self, listeners: Sequence[OpenListener], scheduler: FlushScheduler) -> None:
        """Accept clients of these listeners from now on. Raises OSError."""

    def stop_accepting(self) -> None:
        """Accept no more clients."""

    async def stop(self) -> None:
        """Stop what `start` has started; the clients are disconnected, and everything is written."""

    def unready(self) -> list[str]:
        """The reasons why clients should not connect now."""

    def sys_topics(self) -> dict[str, object]:
        """Values of topics below ``$SYS/broker/``."""


class Server:
    """One broker with its store, streams, listeners and HTTP endpoint.

    ``reread`` loads the settings again, for SIGHUP; those of the configuration file are ``file_settings``. ``manager`` is told the state,
    and keeps the sockets of ``passed`` that are in use. ``opened`` is called when clients may connect. Raises ConfigError if a file that the
    settings name cannot be used.
    """

    def __init__(
        self,
        parts: BrokerParts,
        file_settings: Settings,
        reread: Callable[[], Settings],
        manager: ServiceManager,
        passed: PassedSockets,
        opened: Callable[[], None] | None = None,
    ) -> None:
        self.parts = parts
        self._opened = opened
        self.file_settings = file_settings
        self.settings = settings = parts.settings
        self.manager = manager
        self.passed = passed
        self.reread = reread
        self.security = Security(settings)
        self.streams = parts.stream_logs
        self.sealer = Sealer(self.streams)
        self.archiver = Archiver(self.streams)
        self.consumers = ConsumerLag(self.streams, settings.consumers)
        self.store = parts.store
        self.process_memory = ProcessMemory()
        self.stopping = asyncio.Event()
        self.listeners: list[OpenListener] = []
        self.http: HttpServer | None = None
        self.workers = Workers()
        self.bridges: Bridges | None = None
        self.failure = ""  # why the broker stops by itself
        self.restart = RestartRequest(reread, self.stopping)
        self.released: list[ListeningSocket] = []  # for the broker that follows

    def load(self) -> None:
        """Read the store and build the broker, in the event loop; the store repairs itself first if the settings say so."""
        restrict(self.settings.data_dir, self.settings.data_mode)
        base = self.process_memory.resident()
        recovered = self.parts.recover()
        self.broker = build_broker(self.settings, recovered, self.security, self.parts.cluster)
        self.salvage = SalvageReport(self.settings.data_dir, self.parts.repaired)
        for path in self.salvage.files:
            log.warning("event=damaged_file_kept file=%s", path)
        self.metrics = Metrics(self.streams, self.salvage, self.consumers, self._authenticators, self.workers.statuses, self._bridges)
        self.metrics.store_progress = self.store.progress
        self.metrics.cluster_topics = self.parts.sys_topics
        loop = asyncio.get_running_loop()
        self.store_runner = StoreRunner(self.store, self.metrics.latency, loop)
        self.scheduler = FlushScheduler(self.broker, loop, self.store_runner.submit, self.settings.durability != "interval")
        self.parts.built(self.broker, self.scheduler)
        restore(self.broker, recovered, time.time())
        log.info(
            "event=memory_limit max_memory=%s all_parts=%d before_clients=%d",
            self.broker.terms.max_memory or "unlimited",
            sum(part_limits(self.settings).values()),
            base,
        )
        self.history = History(0 if self.settings.http.port is None else self.settings.http.history_samples)
        self.memory_watch = MemoryWatch(
            self.broker.memory,
            self.process_memory,
            base + self.history.max_bytes,
            self.workers.memory,
            self._unapplied_memory,
        )
        self.sockets = OpenSockets(client_sockets(self.settings), self.settings.limits.max_half_open, self.broker.outbound.counters)
        self.security.rules.by_name[BRIDGE_RULES] = AllowAll()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or SIGUSR2: then `released` are the listening sockets, still open."""
        self._start_parts(asyncio.get_running_loop())
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._open(tasks)
            await self.stopping.wait()
        finally:
            await self._close(tasks)
        if self.failure:
            raise OSError(self.failure)

    def _start_parts(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the threads, and make the parts that need the event loop."""
        self.stream_reads = StreamReads(loop, self.streams, self.broker.chunk_reads, self.scheduler.update_clock)
        self.stream_reads.start()
        self.broker.work_queues.open_all()
        self.store_runner.start(self.broker.commits, self.scheduler, self.stream_reads)
        self.sealer.start()
        self.archiver.start()
        self.security.start(loop, self.scheduler.update_clock)
        self.memory_watch.start(loop)
        self.reloader = reloader = Reloader(
            self.reread,
            self.file_settings,
            self.broker,
            self.security,
            self.sockets,
            self.listeners,
            self.manager,
            LogLevels(loop, self.settings.log.level, dict(self.settings.log.levels)),
        )
        if not self.parts.clustered:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stopping.set)
            loop.add_signal_handler(signal.SIGHUP, reloader.start)
            loop.add_signal_handler(signal.SIGUSR2, self.restart.request)
        self.control = BrokerControl(self.broker, loop.time)
        self.sampler = Sampler(self.history, self.control, self.metrics)
        self.stream_control = reloader.stream_control = StreamControl(
            self.broker,
            self.store,
            self.streams,
            self.settings,
            self.parts.definitions,
            lambda: self.reloader.settings.max_created_streams,
            self.scheduler.schedule,
            self._streams_changed,
            not self.parts.clustered,
        )
        self.alarms = self.metrics.alarms = Alarms(self.control.publish_own)
        reloader.client_events = ClientEvents(
            self.broker.clients,
            lambda topic, payload: self.control.publish_own(topic, payload, retain=False),
            lambda: self.control.waiting,
            time.time,
        )
        reloader.client_events.enable(self.settings.sys_client_events)
        self.control_runner = ControlRunner(loop, self.scheduler.update_clock, reloader.reload)

    async def _open(self, tasks: list[asyncio.Task[None]]) -> None:
        """Serve HTTP, start the periodic ``tasks``, then let clients connect."""
        self.group_control = GroupControl(self.broker)
        self.consumers.groups = GroupsReport(self.control_runner, self.group_control)
        self.consumers.start()
        self._open_http()
        self.reloader.http = self.http
        tasks += self._periodic_tasks()
        await self.parts.start(self.broker, self.scheduler)
        self.scheduler.tick()  # wills and sessions that expired while the broker was down go before any client
        for index, listener in enumerate(self.settings.listeners):
            try:
                await self._open_listener(listener)
            except FileProblem as error:
                raise ConfigError([f"listeners.{index}: {error}"]) from None
        self._settle_sockets()
        self.bridges = self.reloader.bridges = self._make_bridges()
        self.bridges.start(self.settings.bridges)
        await self.parts.accept(self.listeners, self.scheduler)
        if self.settings.worker_count:
            await self._start_workers(self.settings.worker_count)
        if not self.stopping.is_set():
            log.info("event=started version=%s build=%s", __version__, build_kind())
            self.manager.ready()
            if self._opened is not None:
                self._opened()

    async def _close(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Let no client connect, disconnect them, write everything, and stop the threads."""
        if self.restart.granted:
            self.manager.reloading()
        else:
            self.manager.stopping()
        self.reloader.stop()
        self.memory_watch.stop()
        for open_listener in self.listeners:
            if self.restart.granted:
                self.released += open_listener.release()
            open_listener.close()
        self.workers.stop_listening()
        self.parts.stop_accepting()
        if self.bridges is not None:
            await self.bridges.stop()
        self.security.stop()
        self.sealer.stop()
        self.archiver.stop()
        for task in tasks:
            task.cancel()
        self.stream_reads.stop()
        await self.store_runner.drain(self.broker)
        await self.parts.stop()
        await self.workers.stop()
        self.control_runner.close()  # the HTTP server's thread must not wait for this one, which joins it
        if self.http is not None:
            self.http.stop()
        self.consumers.stop()

    def _bridges(self) -> Sequence[BridgeStatus]:
        return [] if self.bridges is None else self.bridges.statuses()

    def _streams_changed(self, streams: list[Stream]) -> None:
        """Keep open files for the partitions, and have them sealed."""
        self.sealer.start()
        self.sockets.maximum = client_sockets(dataclasses.replace(self.reloader.settings, streams=tuple(streams)))

    def _unapplied_memory(self) -> int:
        return self.store.progress().unapplied_bytes

    def _http_context(self) -> ListenerContext | None:
        return None if self.http is None else self.http.gate.context

    def _authenticators(self) -> list[AuthenticatorStatus]:
        return [
            AuthenticatorStatus(kind, one.up, one.waiting, one.in_progress, one.failures, one.restarts)
            for kind, one in self.security.external.items()
        ]

    def _warn_of_http(self) -> None:
        settings = self.settings
        if settings.streams and not settings.http.has_access and not streams_open(settings):
            reason = "MQTT clients need a user or rules, so streams are not served over HTTP without a token"
            log.warning("event=streams_need_token reason=%s", reason)

    # --- listeners ------------------------------------------------------------

    def _open_http(self) -> None:
        settings = self.settings.http
        if settings.port is None:
            return
        where = f"{settings.host}:{settings.port}"
        try:
            context = http_context(settings)
            access = access_list(self.settings, self.security.rules.common)
            self.http = HttpServer(settings.host, settings.port, access, self._http_application, context)
            self.metrics.http_requests = self.http.requests
            self.http.bans.apply(http_ban_terms(self.settings))
            self._start_http(self.http)
        except FileProblem as error:
            raise ConfigError([f"http: {error}"]) from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(f"http: cannot listen on {where}: {reason}") from None
        self._warn_of_http()
        kind = "http" if context is None else "https"
        log.info("event=listening type=%s host=%s port=%d", kind, settings.host, self.http.port)

    def _http_application(self, gate: Gate, requests: Counter[tuple[str, int]]) -> HttpApplication:
        """What answers HTTP requests; called on the HTTP server's thread when its first client comes."""
        from mqttbroker.admin.http.accounts import AccountRoutes
        from mqttbroker.admin.http.alarms import AlarmRoutes
        from mqttbroker.admin.http.api import Api
        from mqttbroker.admin.http.application import HttpApplication
        from mqttbroker.admin.http.bridges import BridgeRoutes
        from mqttbroker.admin.http.dashboard import dashboard_routes
        from mqttbroker.admin.http.groups import GroupRoutes
        from mqttbroker.admin.http.history import HistoryRoutes
        from mqttbroker.admin.http.stream_admin import StreamAdminRoutes
        from mqttbroker.admin.http.streams import StreamAccess
        from mqttbroker.admin.http.trace import TraceRoutes

        settings, runner = self.settings.http, self.control_runner
        access = StreamAccess(self.streams)
        api = Api(self._operations(), self.streams, self.consumers, access, gate.bans)
        streams = StreamAdminRoutes(self.streams, self.stream_control, access, runner)
        groups = GroupRoutes(self.streams, self.group_control, access, runner)
        alarms = AlarmRoutes(self.alarms, runner)
        bridges = BridgeRoutes(self._bridges, runner)
        traces = TraceRoutes(Tracer(self.broker, self.scheduler), runner)
        history = HistoryRoutes(self.sampler, runner, settings.history_interval, settings.history_length)
        accounts = AccountRoutes(self.security, self.broker, runner)
        health = Health(
            self.broker,
            self.store,
            self.security,
            self.archiver,
            self.listeners,
            self.reloader,
            self.settings.on_corrupt_store == "salvage",
            self.salvage,
            self.parts.unready,
        )
        metrics_page = MetricsPage(self.metrics, self.control, runner, self.security, self.listeners, self._http_context, self.reloader)

        async def readiness() -> list[str]:
            return await asyncio.wrap_future(runner.call(health.unready))

        return HttpApplication(
            gate,
            requests,
            self.streams,
            metrics_page.render,
            readiness,
            counters=self.metrics.http_counters,
            consumers=self.consumers,
            max_connections=settings.max_connections,
            routes=[
                *api.routes(),
                *streams.routes(),
                *groups.routes(),
                *accounts.routes(),
                *alarms.routes(),
                *traces.routes(),
                *history.routes(),
                *bridges.routes(),
                *(dashboard_routes() if settings.dashboard else ()),
            ],
            warnings=health.warnings,
        )

    def _start_http(self, http: HttpServer) -> None:
        """Bind the port; a core whose port is in use takes any free one, because its shard must be served. Raises OSError."""
        try:
            http.start()
        except OSError as error:
            if not self.parts.clustered or http.port == 0 or error.errno != errno.EADDRINUSE:
                raise
            log.warning("event=http_port_in_use port=%d", http.port)
            http.port = 0
            http.start()

    def _operations(self) -> Operations:
        """The operations of the HTTP API."""
        from mqttbroker.admin.data.backup import back_up
        from mqttbroker.admin.http.api import Operations

        backup_dir = self.settings.http.backup_dir

        async def reload() -> dict[str, list[str]]:
            await asyncio.wrap_future(self.control_runner.reload())
            return self.reloader.last._asdict()

        return Operations(
            self.control,
            self.control_runner,
            lambda: [listener.describe() for listener in self.listeners],
            lambda: settings_in_force(self.reloader.settings),
            self.reloader.log_levels,
            reload,
            None if backup_dir is None or self.parts.clustered else lambda name: back_up(self.settings.data_dir, backup_dir / name),
            lambda: self.salvage.reason,
        )

    async def _open_listener(self, listener: Listener) -> None:
        policy = listener_policy(self.settings, listener, self.security, self.broker.outbound.counters)
        workers = self.settings.worker_count > 0
        open_listener = OpenListener(listener, policy, self.scheduler, self.sockets, workers)
        await self.parts.open(open_listener)
        await open_listener.refresh_revocations(self.settings.crl.expiry_warning)
        self.listeners.append(open_listener)

    def _make_bridges(self) -> Bridges:
        broker = self.broker
        policy = ListenerPolicy(AuthenticationChain([], AnonymousPolicy(True)), bridge_terms(self.settings), None, broker.outbound.counters)
        return Bridges(
            BridgeContext(
                broker,
                Endpoint(self.scheduler, policy, self.sockets, new_client_id, defect),
                self.settings.data_dir / BRIDGE_DIRECTORY,
                random.random,
                lambda: secrets.token_hex(4),
                lambda topic, payload: self.control.publish_own(topic, payload),
                lambda: self.reloader.settings.limits.max_packet_size,
            )
        )

    def _settle_sockets(self) -> None:
        """Close the passed sockets that no listener has taken, and have the service manager keep those in use."""
        for address in self.passed.close():
            log.info("event=passed_socket_closed address=%s", address)
        if self.manager.keeps_sockets:
            bound = [one.sock.fileno() for listener in self.listeners for one in listener.sockets_bound]
            self.manager.store(OWN, bound)
            for listener in self.listeners:
                listener.keep_file()

    async def _start_workers(self, count: int) -> None:
        def log_settings() -> Log:
            return replace(self.settings.log, level=self.reloader.settings.log.level, levels=self.reloader.settings.log.levels)

        def timeout() -> float:
            return self.reloader.settings.worker_timeout

        pool = WorkerPool(count, self.listeners, self.scheduler, log_settings, timeout, self._fail)
        self.reloader.workers = pool
        for listener in self.listeners:
            listener.on_reloaded = pool.reload
        await self.workers.start(pool, self.stopping)

    def _fail(self, reason: str) -> None:
        """Stop, with an error."""
        self.failure = reason
        self.stopping.set()

    # --- tasks ----------------------------------------------------------------

    def _periodic_tasks(self) -> list[asyncio.Task[None]]:
        tasks = PeriodicTasks(self.broker, self.scheduler, self.control, self.metrics, self.listeners, self.reloader)
        settings = self.settings
        conditions = self._conditions()
        running: dict[str, Callable[[], Awaitable[None]]] = {
            "tick": tasks.tick,
            "keep_alive": self.manager.keep_alive,
            "sys_topics": tasks.publish_sys_topics,
            "revocations": tasks.refresh_revocations,
            "latency": lambda: self.metrics.latency.sample(self.scheduler, self.broker.outbound),
            "alarms": lambda: conditions.watch(self.alarms),
            "rank_sessions": tasks.rank_sessions,
        }
        if self.history.capacity:
            running["history"] = lambda: self.sampler.watch(settings.http.history_interval)
        if settings.durability == "interval":
            running["write"] = lambda: tasks.write(settings.durability_interval)
        return [asyncio.create_task(keep_running(part, run)) for part, run in running.items()]

    def _conditions(self) -> Conditions:
        return Conditions(
            self.broker,
            lambda: self.reloader.settings,
            self.listeners,
            self._http_context,
            self.consumers,
            self._authenticators,
            self.workers.statuses,
            lambda: self.store.damage,
            self.salvage,
            lambda: self.reloader.problems,
            self.archiver.problems,
            self._bridges,
        )


def serve(settings: Settings, reread: Callable[[], Settings], warnings: Sequence[str] = ()) -> int:
    """Run a broker until SIGTERM or SIGINT, or start it again at SIGUSR2; returns the exit status of the process.

    ``warnings`` are those of loading the settings. An error that prevents the start is one line on stderr.
    """
    if not startup.begin(settings, warnings):
        return 2
    keep_freed_memory()
    manager = ServiceManager(os.environ)
    if settings.worker_count:
        setproctitle(f"mqttbroker: core {' '.join(sys.argv[1:])}")

    async def main() -> Server:
        passed = PassedSockets(os.environ)
        if passed:
            log.info("event=sockets_passed count=%d", len(passed))
        server = Server(OwnParts(settings, passed), settings, reread, manager, passed)
        # No collection while the store loads, and none of the loaded objects later: it would only cost time.
        gc.disable()
        server.load()
        gc.freeze()
        gc.enable()
        gc.set_threshold(*GC_THRESHOLDS)
        await server.run()
        return server

    try:
        server = uvloop.run(main())
        if server.restart.granted:
            log.info("event=restarting")
            close()
            restart(server.released, manager)
    except (StoreError, StreamLogError) as error:
        return startup.failed(StoreError(with_programs(error, settings.data_dir)), settings)
    except (ConfigError, OSError, ValueError) as error:
        return startup.failed(error, settings)
    return 0
