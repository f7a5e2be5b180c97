"""The conditions that `mqttbroker.admin.events.alarms` raises an alarm for, found once a second on the event loop's thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from mqttbroker.admin.control.views import AuthenticatorStatus, WorkerStatus
from mqttbroker.admin.data.repair import SalvageReport
from mqttbroker.admin.events.alarms import Alarms
from mqttbroker.admin.events.client_events import topic_level
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.bridges.context import BridgeStatus
from mqttbroker.config.settings import Settings
from mqttbroker.core.broker import Broker
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.tls import ListenerContext

INTERVAL = 1.0  # seconds between two checks
DISK_INTERVAL = 10  # checks of the other conditions for each check of the file system, which runs on a thread


class Conditions:
    """Finds the conditions of one broker, each a name and its reason.

    The arguments that are called return the present state: ``settings`` those in force, ``http`` the TLS context of the
    HTTP server, ``damage`` the reason why the store is damaged or "", ``problems`` those of the last reload, and
    ``archive_problems`` those of archives.
    """

    def __init__(
        self,
        broker: Broker,
        settings: Callable[[], Settings],
        listeners: Sequence[OpenListener],
        http: Callable[[], ListenerContext | None],
        consumers: ConsumerLag | None,
        authenticators: Callable[[], Sequence[AuthenticatorStatus]],
        workers: Callable[[], Sequence[WorkerStatus]],
        damage: Callable[[], str],
        salvage: SalvageReport,
        problems: Callable[[], Sequence[str]],
        archive_problems: Callable[[], Sequence[str]],
        bridges: Callable[[], Sequence[BridgeStatus]] = tuple,
    ) -> None:
        self._bridges = bridges
        self._broker = broker
        self._settings = settings
        self._listeners = listeners
        self._http = http
        self._consumers = consumers
        self._authenticators = authenticators
        self._workers = workers
        self._damage = damage
        self._salvage = salvage
        self._problems = problems
        self._archive_problems = archive_problems
        self.disk_free: int | None = None  # bytes for the broker in the data directory's file system; None = unknown

    async def watch(self, alarms: Alarms) -> None:
        """Keep the alarms up to date until the task is cancelled."""
        while True:
            await asyncio.to_thread(self.read_disk)
            for _ in range(DISK_INTERVAL):
                now = datetime.now(UTC)
                alarms.update(dict(self.found(now)), now.timestamp())
                await asyncio.sleep(INTERVAL)

    def read_disk(self) -> None:
        """Set ``disk_free``, and look which damaged files are there; this may take long."""
        self._salvage.look()
        try:
            found = os.statvfs(self._settings().data_dir)
        except OSError:
            self.disk_free = None
            return
        self.disk_free = found.f_bavail * found.f_frsize

    def found(self, now: datetime) -> Iterator[tuple[str, str]]:
        """The conditions at this time; each name is that of a topic below that of alarms."""
        broker, settings = self._broker, self._settings()
        if reason := broker.memory.reason():
            yield "memory", reason.removeprefix("memory: ")
        if broker.commits.error:
            yield "store", broker.commits.error
        if damage := self._damage():
            yield "store_damage", damage
        if reason := self._salvage.reason:
            yield "store_salvaged", reason
        wanted = settings.alarms.disk_free
        if self.disk_free is not None and self.disk_free < wanted:
            yield "disk", f"{self.disk_free} bytes are free in the file system of data_dir, less than {wanted}"
        yield from self._certificates(settings.alarms.certificate_expiry, now)
        if problems := self._problems():
            yield "reload", problems[0]
        if problems := self._archive_problems():
            yield "archive", problems[0]
        for consumer in () if self._consumers is None else self._consumers.latest:
            if consumer.at_risk:
                name = f"consumer/{topic_level(consumer.stream)}/{topic_level(consumer.name)}"
                yield name, f"retention removes records before they are read, {consumer.lag} behind"
        for authenticator in self._authenticators():
            if not authenticator.up:
                yield f"authenticator/{authenticator.kind}", "its process takes no logins"
        for worker in self._workers():
            if not worker.up and worker.starts > 1:  # before, the broker is starting
                yield f"worker/{worker.number}", "the connection worker serves no clients"
        longest = settings.alarms.bridge_down
        for bridge in self._bridges():
            if longest and bridge.down_since and now.timestamp() - bridge.down_since >= longest:
                yield f"bridge/{topic_level(bridge.name)}", bridge.reason or "not connected"
            elif bridge.refused_filters:
                reason = f"the remote refuses a subscription to {bridge.refused_filters[0]}"
                yield f"bridge/{topic_level(bridge.name)}", reason

    def _certificates(self, margin: float, now: datetime) -> Iterator[tuple[str, str]]:
        contexts = [(topic_level(one.listener.address), one.context) for one in self._listeners]
        for name, context in [*contexts, ("http", self._http())]:
            if context is None:
                continue
            expires = context.certificate_expires
            if expires is not None and expires - timedelta(seconds=margin) <= now:
                verb = "expired" if expires <= now else "expires"
                yield f"certificate/{name}", f"the certificate {verb} at {expires:%Y-%m-%dT%H:%M:%SZ}"
            invalid = None if context.revocations is None else context.revocations.problem(now)
            if invalid is not None:
                yield f"revocation_list/{name}", invalid
