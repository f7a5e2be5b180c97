"""The server: settings become a running broker, and a signal ends it in order.

The rule kept here: whatever keeps the broker from starting is one line on
stderr and exit status 1; once it runs, SIGTERM and SIGINT end it with every
client told, everything gathered written, and exit status 0.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

import uvloop

from bridge_spark.log.sealing import Sealing
from bridge_spark.log.stream_log import StreamConfig, StreamLogError, StreamLogs
from mqttbroker import __version__, build_kind
from mqttbroker.admin.consumer_lag import ConsumerLag
from mqttbroker.admin.http import HttpServer
from mqttbroker.admin.metrics import Metrics
from mqttbroker.admin.repair import DATABASE, STREAMS, recover, set_aside
from mqttbroker.admin.sys_topics import SysTopics
from mqttbroker.allocator import keep_freed_memory
from mqttbroker.auth.security import Security
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED, UNSPECIFIED_ERROR
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Limits, Listener, Settings
from mqttbroker.core.broker import Broker
from mqttbroker.core.clients import restore_will
from mqttbroker.core.connection import Outbound
from mqttbroker.core.groups import HashTopic, LeastLoaded, RandomMember, RoundRobin, Strategy
from mqttbroker.core.policy import Redirect, Terms
from mqttbroker.core.router import Router, StreamRule
from mqttbroker.logs import configure, set_level
from mqttbroker.net.listener_policy import Doorkeeper, ListenerPolicy
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.tls import http_context
from mqttbroker.net.wire import FlushScheduler
from sessions.context import DROP_NEWEST, DROP_OLDEST, REFUSE, SessionContext, SessionLimits
from sessions.journal import Journal
from sessions.message import Message
from sessions.registry import Registry
from sessions.session import NEVER, Subscription
from sessions.store.disk import is_full
from sessions.store.schema import StoreError
from sessions.store.writer import Recovered, Store
from sessions.write_set import Page, WriteSet

log = logging.getLogger("mqttbroker")

TICK = 0.25  # seconds between looks at keep alives, wills and expiries
# Young objects are looked through 10,000 at a time and again at 60,000, each some milliseconds. A look through all
# takes as long as there are objects: it is due after GC_FULL looks at the young ones and made when nobody waits, or
# when ten times as much is due.
GC_FULL = 100
GC_THRESHOLDS = (10_000, 5, 10 * GC_FULL)
QUEUE_FULL = {"drop_newest": DROP_NEWEST, "drop_oldest": DROP_OLDEST, "refuse": REFUSE}
STRATEGIES: Dict[str, Callable[[], Strategy]] = {
    "round_robin": RoundRobin,
    "random": lambda: RandomMember(random.random),
    "hash_topic": HashTopic,
    "least_loaded": LeastLoaded,
}


class Server:
    """One broker with its store, streams, listeners and HTTP endpoint.

    ``reread`` gives the settings as they are now, for SIGHUP.  Raises ConfigError
    if a file that the settings name cannot be used.
    """

    def __init__(self, settings: Settings, reread: Callable[[], Settings]) -> None:
        self.settings = settings
        self.reread = reread
        self.security = Security(settings)
        self.streams: Optional[StreamLogs] = None
        self.sealing: Optional[Sealing] = None
        self.consumers: Optional[ConsumerLag] = None
        if settings.streams:
            configs = [
                StreamConfig(
                    stream.name,
                    stream.filters,
                    stream.partitions,
                    stream.key,
                    stream.retention_age,
                    stream.retention_bytes,
                    stream.segment_bytes,
                    stream.segment_age,
                    stream.seals,
                )
                for stream in settings.streams
            ]
            self.streams = StreamLogs(settings.data_dir / STREAMS, configs)
            self.sealing = Sealing(self.streams)
            self.consumers = ConsumerLag(self.streams, configs, settings.consumers)
        self.store = Store(settings.data_dir / DATABASE, settings.durability, self.streams)
        self.stopping = asyncio.Event()
        self.stored = asyncio.Event()
        self.listeners: List[OpenListener] = []
        self.http: Optional[HttpServer] = None
        self._reloading: Optional[asyncio.Task[None]] = None

    def load(self) -> None:
        """Read what the store holds and put the broker together."""
        recovered = recover(self.store, self.settings.data_dir, self.settings.on_corrupt_store)
        self.broker = build_broker(self.settings, recovered, self.security)
        restore(self.broker, recovered, time.time())
        aside = set_aside(self.settings.data_dir)
        for path in aside:
            log.warning("event=damaged_file_kept file=%s", path)
        self.metrics = Metrics(self.broker, self.streams, len(aside), self.consumers)

    async def run(self) -> None:
        """Serve until `stop`."""
        settings = self.settings
        loop = asyncio.get_running_loop()
        self.turn = FlushScheduler(
            self.broker, loop, self.store.submit, settings.durability != "interval"
        )
        self.loop = loop
        self.store.start(self._answered)
        if self.sealing is not None:
            self.sealing.start()
        self.security.start(loop, self.turn.tell_time)
        tasks: List[asyncio.Task[None]] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            if self.consumers is not None:
                self.consumers.start()
            self._open_http()
            tasks.append(asyncio.create_task(self._ticking()))
            if settings.sys_interval:
                tasks.append(asyncio.create_task(self._speaking()))
            if settings.durability == "interval":
                tasks.append(asyncio.create_task(self._writing()))
            self.turn.tick()  # wills and sessions that fell due while nobody was here come before any client
            for listener in settings.listeners:
                door = OpenListener(listener, self._entrance(listener), self.turn)
                await door.open()
                self.listeners.append(door)
            log.info("event=started version=%s build=%s", __version__, build_kind())
            await self.stopping.wait()
        finally:
            if self._reloading is not None:
                self._reloading.cancel()
            for door in self.listeners:
                door.close()
            self.security.stop()
            if self.sealing is not None:
                self.sealing.stop()
            for task in tasks:
                task.cancel()
            await self._drain()
            if self.http is not None:
                self.http.stop()
            if self.consumers is not None:
                self.consumers.stop()

    def _open_http(self) -> None:
        settings = self.settings.http
        if settings.port is None:
            return
        where = f"{settings.host}:{settings.port}"
        try:
            context = http_context(settings)
            self.http = HttpServer(
                settings.host,
                settings.port,
                self.streams,
                self.metrics.render,
                self.unready,
                token=settings.token,
                context=context,
                counters=self.metrics.http_stats,
                consumers=self.consumers,
            )
            self.http.start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(f"http: cannot listen on {where}: {reason}") from None
        kind = "http" if context is None else "https"
        log.info("event=listening type=%s host=%s port=%d", kind, settings.host, self.http.port)

    def _entrance(self, listener: Listener) -> ListenerPolicy:
        return ListenerPolicy(
            self.security.policy_of(listener),
            terms_of(self.settings, self.settings.limits_of(listener), self.security.rules_of(listener)),
            listener.max_connections,
            listener.use_identity_as_username,
        )

    async def _drain(self) -> None:
        """Tell the clients, write everything, close the store."""
        self.turn.tell_time()
        self.broker.clients.shut_down()
        self.turn.flush()
        while not self.broker.journal.idle or self.broker.journal.wanting:
            self.stored.clear()
            self.turn.write()
            await self.stored.wait()
            if self.broker.store_error:
                break
        await asyncio.get_running_loop().run_in_executor(None, self.store.stop)
        log.info("event=stopped")

    def _answered(
        self, write_set: WriteSet, pages: List[Page], error: Optional[Exception]
    ) -> None:
        """On the writer's thread."""
        self.loop.call_soon_threadsafe(self._done, pages, error)

    def _done(self, pages: List[Page], error: Optional[Exception]) -> None:
        was = self.broker.store_error
        reason = "" if error is None else str(error) or type(error).__name__
        self.turn.stored(pages, reason, is_full(error))
        if reason and not was:
            log.error("event=store_failed reason=%s", reason)
        elif was and not reason:
            log.info("event=store_recovered")
        self.stored.set()

    async def _ticking(self) -> None:
        heard = 0
        while True:
            await asyncio.sleep(TICK)
            try:
                self.turn.tick()
                heard = self._collect_if_idle(heard)
            except Exception:
                # A defect must not end keep alive, wills and expiry for everybody.
                log.exception("event=defect in=tick")

    def _collect_if_idle(self, heard: int) -> int:
        """Look for cycles among all objects if that is due and no byte came since ``heard`` had; all that came."""
        received: int = self.broker.outbound.counters.bytes_received
        if received == heard and gc.get_count()[2] >= GC_FULL:
            gc.collect()
        return received

    async def _speaking(self) -> None:
        topics = SysTopics(self.metrics, self.settings.sys_interval)
        while True:
            self.turn.tell_time()
            topics.publish()
            await asyncio.sleep(self.settings.sys_interval)

    async def _writing(self) -> None:
        while True:
            await asyncio.sleep(self.settings.durability_interval)
            self.turn.write()

    def _reload(self) -> None:
        """SIGHUP."""
        before = self._reloading

        async def reload() -> None:
            if before is not None:
                await before
            self._set_what_may_change()
            await self.security.reload(self.broker)
            for door in self.listeners:
                await door.reload()
            self._reload_http()

        self._reloading = asyncio.create_task(reload())

    def _reload_http(self) -> None:
        try:
            context = http_context(self.settings.http)
        except OSError as error:
            log.error("event=reload_failed listener=http reason=%s", error)
            return
        if context is not None and self.http is not None:
            self.http.renew(context)
            log.info("event=certificates_reloaded listener=http")

    def _set_what_may_change(self) -> None:
        try:
            settings = self.reread()
        except ConfigError as error:
            for problem in error.problems:
                log.error("event=reload_failed reason=%s", problem)
            return
        set_level(settings.log.level)
        self.broker.terms.redirect = redirect = redirect_of(settings)
        log.info("event=log_level to=%s", settings.log.level)
        if redirect is not None:
            log.info("event=redirecting server_reference=%s rate=%d", redirect.server_reference, redirect.rate)

    def unready(self) -> list[str]:
        """Why the broker should get no clients now; empty when it may."""
        reasons = []
        if self.broker.store_error:
            reasons.append(f"store: {self.broker.store_error}")
        elif self.store.damage:
            salvaging = self.settings.on_corrupt_store == "salvage"
            cure = "a restart repairs it" if salvaging else "stop the broker and run mqttbroker repair-store"
            reasons.append(f"store: {self.store.damage}; {cure}")
        if self.broker.overfull:
            reasons.append("store: too much waits for the disk")
        redirect = self.broker.terms.redirect
        if redirect is not None:
            reasons.append(f"redirect: clients go to {redirect.server_reference}")
        return reasons


def redirect_of(settings: Settings) -> Optional[Redirect]:
    """Where these settings send clients, None if they stay."""
    wanted = settings.redirect
    if wanted.server_reference is None:
        return None
    return Redirect(wanted.server_reference, wanted.permanent, wanted.rate)


def build_broker(
    settings: Settings, recovered: Recovered, security: Optional[Security] = None
) -> Broker:
    """The broker core for these settings; it reads the files they name unless it is given what they say."""
    if security is None:
        security = Security(settings)
    wanted = settings.limits
    limits = SessionLimits(
        wanted.max_inflight,
        wanted.max_queued_messages,
        wanted.max_queued_bytes,
        wanted.max_queue_memory_messages,
        wanted.max_transient_queue_bytes,
    )
    limits.max_inflight_unkept = wanted.max_inflight_unkept
    limits.queue_full = QUEUE_FULL[wanted.queue_full]
    limits.crowded_queue_messages = wanted.crowded_queue_messages
    limits.crowded_queue_bytes = wanted.crowded_queue_bytes
    limits.max_total_queued_messages = wanted.max_total_queued_messages
    limits.max_total_queued_bytes = wanted.max_total_queued_bytes
    limits.max_total_queue_memory_bytes = wanted.max_total_queue_memory_bytes
    journal = Journal(
        settings.durability == "commit", recovered.next_message_id, recovered.next_seq
    )
    context = SessionContext(journal, limits)
    context.clock.now = time.time_ns() // 1000
    context.backpressure_monitor.max_pause = wanted.crowded_queue_wait
    terms = terms_of(settings, wanted, None)
    terms.redirect = redirect_of(settings)
    most = max(settings.limits_of(listener).receive_maximum for listener in settings.listeners)
    streams = [
        StreamRule(stream.name, list(stream.filters), stream.partitions, stream.key)
        for stream in settings.streams
    ]
    return Broker(
        context,
        Registry(context, recovered.next_session_id),
        Router(
            wanted.route_cache_size,
            wanted.max_topic_levels,
            wanted.max_topic_length,
            streams,
            STRATEGIES[settings.shared_subscription_strategy](),
        ),
        Outbound(context.clock, context.counters, wanted.max_outbox_bytes, 2 * most),
        terms,
        Doorkeeper(security.policy),
        security.rules,
    )


def terms_of(settings: Settings, limits: Limits, rules: Optional[str]) -> Terms:
    """What clients are granted under these limits and the rules of that name."""
    terms = Terms()
    terms.rules = rules
    terms.receive_maximum = limits.receive_maximum
    terms.maximum_packet_size = limits.max_packet_size
    terms.topic_alias_maximum = limits.topic_alias_maximum
    terms.max_keep_alive = int(limits.max_keep_alive)
    if limits.max_session_expiry is not None:
        terms.max_session_expiry = min(NEVER, int(limits.max_session_expiry))
    terms.max_connections = limits.max_connections
    terms.max_connect_size = limits.max_connect_size
    terms.max_sessions = limits.max_sessions
    terms.max_retained_messages = limits.max_retained_messages
    terms.max_retained_bytes = limits.max_retained_bytes
    terms.connect_timeout = limits.connect_timeout
    terms.max_topic_length = limits.max_topic_length
    terms.max_topic_levels = limits.max_topic_levels
    terms.max_subscriptions_per_client = limits.max_subscriptions_per_client
    terms.max_pending_write_bytes = limits.max_pending_write_bytes
    terms.retain_available = limits.retain_available
    terms.denial = NOT_AUTHORIZED if settings.reveal_denials else UNSPECIFIED_ERROR
    terms.response_information = settings.response_information or ""
    terms.durability = settings.durability
    return terms


def restore(broker: Broker, recovered: Recovered, now: float) -> None:
    """Put back what the store held, and empty the lists that say it.

    A client connected at a crash counts as gone from ``now``.
    """
    registry = broker.registry
    for row in _consumed(recovered.sessions):
        (
            session_id,
            client_id,
            version,
            expiry,
            disconnected_at,
            will,
            will_due,
            username,
            rules,
        ) = _columns(row)
        session = registry.load(session_id, client_id)
        session.version = version
        session.username = username
        session.rules = rules
        session.expiry_interval = expiry
        session.disconnected_at = now if disconnected_at is None else disconnected_at
        session.received_on_disk = True
        if will is not None:
            restore_will(session, will)
            session.will_due = will_due or 0.0
        broker.clients.restore(session)
    for session_id, messages, size, last_seq in _consumed(recovered.queues):
        session = registry.by_id[session_id]
        session.count_in(messages, size, last_seq)
    for row in _consumed(recovered.subscriptions):
        session_id, topic_filter, _, options, identifier = _columns(row)
        broker.subscriptions.restore(
            Subscription(registry.by_id[session_id], topic_filter, options, identifier)
        )
    for row in _consumed(recovered.retained):
        topic, payload, qos, properties, publisher, timestamp, expires_at = _columns(row)
        broker.retained.load(
            Message(topic, payload, qos, True, properties, publisher, timestamp, expires_at)
        )


def _consumed(rows: List[Any]) -> Iterator[Any]:
    """The rows in their order, each let go of at once: what is built of them takes their memory."""
    rows.reverse()
    while rows:
        yield rows.pop()


def _columns(row: Any) -> Any:
    """A row of the store; `WriteSet` tells its columns."""
    return row


def serve(settings: Settings, reread: Callable[[], Settings]) -> int:
    """Run a broker until SIGTERM or SIGINT; the exit status of the process."""
    configure(settings.log.level, settings.log.format)
    keep_freed_memory()

    async def main() -> None:
        server = Server(settings, reread)
        # What is loaded stays: looking for cycles in it would take longer than loading it.
        gc.disable()
        server.load()
        gc.freeze()
        gc.enable()
        gc.set_threshold(*GC_THRESHOLDS)
        await server.run()

    try:
        uvloop.run(main())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, StoreError, StreamLogError, ValueError) as error:
        print(f"mqttbroker: {error}", file=sys.stderr)
        return 1
    return 0
