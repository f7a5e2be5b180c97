"""The administration of one broker: status and figures, alarms, client events, streams at run time, and HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bridge_spark.log.archive.archiver import Archiver
from mqttbroker.admin.control.control import controls_of
from mqttbroker.admin.control.groups import GroupControl, GroupsReport
from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.views import AuthenticatorStatus
from mqttbroker.admin.events.alarms import Alarms
from mqttbroker.admin.events.client_events import ClientEvents
from mqttbroker.admin.http.admission import RequestAdmission
from mqttbroker.admin.http.service import HttpService
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.history import History, Sampler
from mqttbroker.auth.security import Security
from mqttbroker.bridges.context import BridgeStatus
from mqttbroker.config.in_force import settings_in_force
from mqttbroker.config.settings import Stream
from mqttbroker.logs.levels import LogLevels
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.trace import Tracer
from mqttbroker.server.conditions import Conditions
from mqttbroker.server.health import Health
from mqttbroker.server.loaded_broker import LoadedBroker
from mqttbroker.server.metrics_page import MetricsPage
from mqttbroker.server.parts import BrokerParts
from mqttbroker.server.reload import Reloader
from mqttbroker.server.stream_control import StreamControl
from mqttbroker.server.workers import Workers

if TYPE_CHECKING:
    from mqttbroker.admin.http.api import Operations
    from mqttbroker.admin.http.application import HttpApplication


class Administration:
    """The administration of ``loaded``. ``bridges`` returns the state of its bridges; ``streams_changed`` is called with the streams in force
    when one was created, altered or deleted."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        loaded: LoadedBroker,
        parts: BrokerParts,
        security: Security,
        archiver: Archiver,
        reloader: Reloader,
        log_levels: LogLevels,
        listeners: Sequence[OpenListener],
        workers: Workers,
        bridges: Callable[[], Sequence[BridgeStatus]],
        streams_changed: Callable[[list[Stream]], None],
    ) -> None:
        broker, settings, streams = loaded.broker, parts.settings, loaded.streams
        self.settings = settings
        self.controls = controls_of(broker, loop.time)
        self.runner = ControlRunner(loop, loaded.scheduler.update_clock, reloader.reload)
        self.alarms = Alarms(self.controls.messages.publish_own)
        self.groups = GroupControl(broker)
        self.consumers = ConsumerLag(streams, settings.consumers, groups=GroupsReport(self.runner, self.groups))
        self.http = HttpService(settings, security.rules.common, self._http_application, any_port=parts.clustered, streams=True)
        self.metrics = Metrics(
            streams,
            loaded.salvage,
            self.consumers,
            self._authenticators,
            workers.statuses,
            bridges,
            loaded.store.progress,
            parts.sys_topics,
            self.http.requests,
            self.alarms,
            loaded.latency,
        )
        self.history = History(0 if settings.http.port is None else settings.http.history_samples)
        self.sampler = Sampler(self.history, self.controls.status, self.metrics)
        self.stream_control = StreamControl(
            broker,
            loaded.store,
            streams,
            settings,
            parts.definitions,
            lambda: reloader.settings.max_created_streams,
            loaded.scheduler.schedule,
            streams_changed,
            not parts.clustered,
        )
        self.client_events = ClientEvents(
            broker.clients,
            lambda topic, payload: self.controls.messages.publish_own(topic, payload, retain=False),
            lambda: self.controls.messages.waiting,
            time.time,
        )
        self._loaded = loaded
        self._parts = parts
        self._security = security
        self._archiver = archiver
        self._reloader = reloader
        self._log_levels = log_levels
        self._listeners = listeners
        self._workers = workers
        self._bridges = bridges

    def conditions(self) -> Conditions:
        """The conditions that raise alarms."""
        loaded, reloader = self._loaded, self._reloader
        return Conditions(
            loaded.broker,
            lambda: reloader.settings,
            self._listeners,
            lambda: self.http.context,
            self.consumers,
            self._authenticators,
            self._workers.statuses,
            lambda: loaded.store.damage,
            loaded.salvage,
            lambda: reloader.problems,
            self._archiver.problems,
            self._bridges,
        )

    def _authenticators(self) -> list[AuthenticatorStatus]:
        return [
            AuthenticatorStatus(kind, one.up, one.waiting, one.in_progress, one.failures, one.restarts)
            for kind, one in self._security.external.items()
        ]

    def _http_application(self, gate: RequestAdmission, requests: Counter[tuple[str, int]]) -> HttpApplication:
        """The application that answers HTTP requests; called on the HTTP server's thread when its first client comes."""
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

        settings, runner, loaded = self.settings.http, self.runner, self._loaded
        broker, streams = loaded.broker, loaded.streams
        access = StreamAccess(streams)
        routes = [
            *Api(self._operations(), streams, self.consumers, access, gate.bans).routes(),
            *StreamAdminRoutes(streams, self.stream_control, access, runner).routes(),
            *GroupRoutes(streams, self.groups, access, runner).routes(),
            *AccountRoutes(self._security, broker, runner).routes(),
            *AlarmRoutes(self.alarms, runner).routes(),
            *TraceRoutes(Tracer(broker, loaded.scheduler), runner).routes(),
            *HistoryRoutes(self.sampler, runner, settings.history_interval, settings.history_length).routes(),
            *BridgeRoutes(self._bridges, runner).routes(),
            *(dashboard_routes() if settings.dashboard else ()),
        ]
        health = Health(
            broker,
            loaded.store,
            self._security,
            self._archiver,
            self._listeners,
            self._reloader,
            self.settings.on_corrupt_store == "salvage",
            loaded.salvage,
            self._parts.unready,
        )
        page = MetricsPage(
            self.metrics, self.controls.status, runner, self._security, self._listeners, lambda: self.http.context, self._reloader
        )

        async def readiness() -> list[str]:
            return await asyncio.wrap_future(runner.call(health.unready))

        return HttpApplication(
            gate,
            requests,
            streams,
            page.render,
            readiness,
            counters=self.metrics.http_counters,
            consumers=self.consumers,
            max_connections=settings.max_connections,
            routes=routes,
            warnings=health.warnings,
        )

    def _operations(self) -> Operations:
        """The operations of the HTTP API."""
        from mqttbroker.admin.data.backup import back_up
        from mqttbroker.admin.http.api import Operations

        settings, reloader = self.settings, self._reloader
        backup_dir = settings.http.backup_dir

        async def reload() -> dict[str, list[str]]:
            await asyncio.wrap_future(self.runner.reload())
            return reloader.last._asdict()

        return Operations(
            self.controls,
            self.runner,
            lambda: [listener.describe() for listener in self._listeners],
            lambda: settings_in_force(reloader.settings),
            self._log_levels,
            reload,
            None if backup_dir is None or self._parts.clustered else lambda name: back_up(settings.data_dir, backup_dir / name),
            lambda: self._loaded.salvage.reason,
        )
