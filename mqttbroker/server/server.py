"""The server: a broker with its store, streams, listeners and HTTP endpoint, from start to stop.

SIGTERM and SIGINT disconnect every client, write everything that is pending and end the process with status 0. SIGUSR2
does the same, and starts the broker again in this process with the same listening sockets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import random
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import uvloop
from setproctitle import setproctitle

from bridge_spark.log.archive.archiver import Archiver
from bridge_spark.log.sealed.sealer import Sealer
from bridge_spark.log.stream_log import StreamLogError
from mqttbroker import __version__, build_kind
from mqttbroker.admin.data.version import with_programs
from mqttbroker.auth.security import Security
from mqttbroker.bridges.bridges import Bridges
from mqttbroker.bridges.context import DIRECTORY as BRIDGE_DIRECTORY
from mqttbroker.bridges.context import BridgeContext
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Listener, Log, Settings, Stream
from mqttbroker.core.access.policy import AnonymousPolicy, AuthenticationChain
from mqttbroker.logs.levels import LogLevels
from mqttbroker.logs.output import close
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.listeners import OpenListener, defect, new_client_id
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.passed_sockets import OWN, ListeningSocket, PassedSockets
from mqttbroker.net.shared_admission import broker_admission
from mqttbroker.net.tls import FileProblem
from mqttbroker.net.wire import Endpoint
from mqttbroker.net.worker_pool import WorkerPool
from mqttbroker.server import startup
from mqttbroker.server.administration import Administration
from mqttbroker.server.assembly import bridge_terms, listener_policy
from mqttbroker.server.loaded_broker import LoadedBroker
from mqttbroker.server.parts import BrokerParts
from mqttbroker.server.periodic_tasks import GC_FULL, PeriodicTasks
from mqttbroker.server.reload import Reloader
from mqttbroker.server.reloaded_parts import (
    ReloadedAdmission,
    ReloadedBridges,
    ReloadedEvents,
    ReloadedLimits,
    ReloadedListeners,
    ReloadedLog,
    ReloadedRedirect,
    ReloadedSecurity,
    ReloadedStreams,
)
from mqttbroker.server.restart import RestartRequest, restart
from mqttbroker.server.single_parts import SingleParts
from mqttbroker.server.workers import Workers
from mqttbroker.system.allocator import keep_freed_memory
from mqttbroker.system.defects import keep_running
from mqttbroker.system.file_limit import client_sockets
from mqttbroker.system.memory_limit import MemoryWatch, ProcessMemory
from mqttbroker.system.service_manager import ServiceManager
from sessions.store.interface import StoreError

log = logging.getLogger("mqttbroker")

# The loop waits for a collection, up to 1 ms for one of the first generation and 4 ms for one of the second. A full one
# takes time in proportion to all objects, so it is run while no client sends (`PeriodicTasks.tick`), or when it is ten
# times overdue.
GC_THRESHOLDS = (2_000, 2, 10 * GC_FULL)


class Server:
    """One broker with its store, streams, listeners and HTTP endpoint; to be made in the event loop.

    It reads the store, which repairs itself first if the settings say so. ``reread`` loads the settings again, for SIGHUP; those of the
    configuration file are ``file_settings``. ``manager`` is told the state, and keeps the sockets of ``passed`` that are in use. ``opened`` is
    called when clients may connect. Raises ConfigError if a file that the settings name cannot be used, and StoreError.
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
        self._loop = loop = asyncio.get_running_loop()
        self.settings = settings = parts.settings
        self.stopping = asyncio.Event()
        self.failure = ""  # why the broker stops by itself
        self.restart = RestartRequest(reread, self.stopping)
        self.released: list[ListeningSocket] = []  # for the broker that follows
        self.listeners: list[OpenListener] = []  # those that are open
        self._tasks: list[asyncio.Task[None]] = []
        self._parts = parts
        self._manager = manager
        self._passed = passed
        self._opened = opened
        self.process_memory = ProcessMemory()
        self.security = Security(settings)
        self.reloader = Reloader(reread, file_settings, self.security, manager)
        self.sealer = Sealer(parts.stream_logs)
        self.archiver = Archiver(parts.stream_logs)
        self.workers = Workers()
        log_levels = LogLevels(loop, settings.log.level, dict(settings.log.levels))
        self.loaded = loaded = LoadedBroker(parts, self.security, self.process_memory, loop)
        self.scheduler = loaded.scheduler
        self.broker = broker = loaded.broker
        self.admin = admin = Administration(
            loop,
            loaded,
            parts,
            self.security,
            self.archiver,
            self.reloader,
            log_levels,
            self.listeners,
            self.workers,
            lambda: self.bridges.statuses(),
            self._streams_changed,
        )
        loaded.restore()
        self.memory_watch = MemoryWatch(
            broker.memory,
            self.process_memory,
            loaded.base + admin.history.max_bytes,
            self.workers.memory,
            lambda: loaded.store.progress().unapplied_bytes,
        )
        counters = broker.outbound.counters
        self.sockets = OpenSockets(client_sockets(settings), settings.limits.max_half_open, counters)
        self._shared = broker_admission(self.scheduler, self.sockets)
        self._policies = [listener_policy(settings, one, self.security, counters) for one in settings.listeners]
        self.bridges = Bridges(self._bridge_context())
        self.reloader.register(
            ReloadedEvents(admin.client_events),
            ReloadedLog(log_levels),
            ReloadedLimits(broker),
            ReloadedAdmission(self._shared),
            ReloadedStreams(admin.stream_control),
            ReloadedBridges(self.bridges),
            self.workers,
            ReloadedSecurity(self.security, broker),
            ReloadedListeners(self.listeners, self.security),
            admin.http,
            ReloadedRedirect(broker.terms),
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or SIGUSR2: then `released` are the listening sockets, still open."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            await self.stopping.wait()
        if self.failure:
            raise OSError(self.failure)

    async def _start(self, stack: AsyncExitStack) -> None:
        """Start all parts, clients last. The stack stops them in the opposite order of its calls; `stop` of some, which are called here
        before they are started, has no effect then."""
        loop, loaded, admin, parts = self._loop, self.loaded, self.admin, self._parts
        stack.callback(admin.consumers.stop)
        stack.callback(admin.http.stop)
        stack.callback(admin.runner.close)  # the HTTP server's thread must not wait for this one, which joins it
        stack.push_async_callback(self.workers.stop)
        stack.push_async_callback(parts.stop)
        loaded.stream_reads.start()
        self.broker.work_queues.open_all()
        loaded.store_runner.start(self.scheduler, loaded.stream_reads)
        stack.push_async_callback(loaded.store_runner.drain, self.scheduler)
        stack.callback(loaded.stream_reads.stop)
        stack.callback(self._cancel_tasks)
        self.sealer.start()
        self.archiver.start()
        stack.callback(self.archiver.stop)
        stack.callback(self.sealer.stop)
        self.security.start(loop, self.scheduler.update_clock)
        stack.callback(self.security.stop)
        stack.push_async_callback(self.bridges.stop)
        stack.callback(parts.stop_accepting)
        stack.callback(self.workers.stop_listening)
        stack.callback(self._close_listeners)
        self.memory_watch.start(loop)
        stack.callback(self.memory_watch.stop)
        stack.callback(self.reloader.stop)
        stack.callback(self._tell_end)
        self._handle_signals()
        admin.client_events.enable(self.settings.sys_client_events)
        admin.consumers.start()
        admin.http.open()
        self._tasks += self._periodic_tasks()
        await parts.start(self.broker, self.scheduler)
        self.scheduler.tick()  # wills and sessions that expired while the broker was down go before any client
        await self._open_listeners()
        self._settle_sockets()
        self.bridges.start(self.settings.bridges)
        await parts.accept(self.listeners, self.scheduler)
        if self.settings.worker_count:
            await self._start_workers(self.settings.worker_count)
        if not self.stopping.is_set():
            log.info("event=started version=%s build=%s", __version__, build_kind())
            self._manager.ready()
            if self._opened is not None:
                self._opened()

    def _handle_signals(self) -> None:
        """In a cluster the node has them."""
        if self._parts.clustered:
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stopping.set)
        self._loop.add_signal_handler(signal.SIGHUP, self.reloader.start)
        self._loop.add_signal_handler(signal.SIGUSR2, self.restart.request)

    def _tell_end(self) -> None:
        if self.restart.granted:
            self._manager.reloading()
        else:
            self._manager.stopping()

    def _close_listeners(self) -> None:
        for open_listener in self.listeners:
            if self.restart.granted:
                self.released += open_listener.release()
            open_listener.close()

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _fail(self, reason: str) -> None:
        """Stop, with an error."""
        self.failure = reason
        self.stopping.set()

    def _streams_changed(self, streams: list[Stream]) -> None:
        """Keep open files for the partitions, and have them sealed."""
        self.sealer.start()
        self.sockets.maximum = client_sockets(dataclasses.replace(self.reloader.settings, streams=tuple(streams)))

    # --- listeners, bridges, workers ------------------------------------------

    async def _open_listeners(self) -> None:
        for index, (listener, policy) in enumerate(zip(self.settings.listeners, self._policies)):
            try:
                await self._open_listener(listener, policy)
            except FileProblem as error:
                raise ConfigError([f"listeners.{index}: {error}"]) from None

    async def _open_listener(self, listener: Listener, policy: ListenerPolicy) -> None:
        open_listener = OpenListener(listener, policy, self._shared, self.settings.worker_count > 0)
        await self._parts.open(open_listener)
        await open_listener.refresh_revocations(self.settings.crl.expiry_warning)
        self.listeners.append(open_listener)

    def _settle_sockets(self) -> None:
        """Close the passed sockets that no listener has taken, and have the service manager keep those in use."""
        for address in self._passed.close():
            log.info("event=passed_socket_closed address=%s", address)
        if self._manager.keeps_sockets:
            bound = [one.sock.fileno() for listener in self.listeners for one in listener.sockets_bound]
            self._manager.store(OWN, bound)
            for listener in self.listeners:
                listener.keep_file()

    def _bridge_context(self) -> BridgeContext:
        broker = self.broker
        policy = ListenerPolicy(AuthenticationChain([], AnonymousPolicy(True)), bridge_terms(self.settings), None, broker.outbound.counters)
        return BridgeContext(
            broker,
            Endpoint(self.scheduler, policy, self.sockets, new_client_id, defect),
            self.settings.data_dir / BRIDGE_DIRECTORY,
            random.random,
            lambda: secrets.token_hex(4),
            lambda topic, payload: self.admin.controls.messages.publish_own(topic, payload),
            lambda: self.reloader.settings.limits.max_packet_size,
        )

    async def _start_workers(self, count: int) -> None:
        def log_settings() -> Log:
            in_force = self.reloader.settings.log
            return dataclasses.replace(self.settings.log, level=in_force.level, levels=in_force.levels)

        def timeout() -> float:
            return self.reloader.settings.worker_timeout

        pool = WorkerPool(count, self.listeners, self.scheduler, log_settings, timeout, self._fail)
        for listener in self.listeners:
            listener.on_reloaded = pool.reload
        await self.workers.start(pool, self.stopping)

    # --- tasks ----------------------------------------------------------------

    def _periodic_tasks(self) -> list[asyncio.Task[None]]:
        admin, settings = self.admin, self.settings
        tasks = PeriodicTasks(self.broker, self.scheduler, admin.controls, admin.metrics, self.listeners, self.reloader)
        conditions = admin.conditions()
        running: dict[str, Callable[[], Awaitable[None]]] = {
            "tick": tasks.tick,
            "keep_alive": self._manager.keep_alive,
            "sys_topics": tasks.publish_sys_topics,
            "revocations": tasks.refresh_revocations,
            "latency": lambda: self.loaded.latency.sample(self.scheduler, self.broker.outbound),
            "alarms": lambda: conditions.watch(admin.alarms),
            "rank_sessions": tasks.rank_sessions,
        }
        if admin.history.capacity:
            running["history"] = lambda: admin.sampler.watch(settings.http.history_interval)
        if settings.durability == "interval":
            running["write"] = lambda: tasks.write(settings.durability_interval)
        return [asyncio.create_task(keep_running(part, run)) for part, run in running.items()]


@contextmanager
def loading() -> Iterator[None]:
    """No collection while the store loads, and none of the loaded objects later: it would only cost time."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
    gc.set_threshold(*GC_THRESHOLDS)


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
        with loading():
            server = Server(SingleParts(settings, passed), settings, reread, manager, passed)
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
