"""The tasks that a broker repeats at intervals, on the event loop's thread."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from contextlib import suppress

from mqttbroker.admin.control.control import Controls
from mqttbroker.admin.control.slices import MAX_VISITS
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.sys_topics import SysTopics
from mqttbroker.core.broker import Broker
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.listeners import OpenListener
from mqttbroker.server.reload import Reloader

log = logging.getLogger("mqttbroker")

TICK = 0.25  # seconds between checks of keep alives, wills and expiries
GC_FULL = 1000
"""Collections of the second generation after which a full one is due. It then waits until no client sends."""


class PeriodicTasks:
    """Each method runs until its task is cancelled."""

    def __init__(
        self,
        broker: Broker,
        scheduler: FlushScheduler,
        controls: Controls,
        metrics: Metrics,
        listeners: Sequence[OpenListener],
        reloader: Reloader,
    ) -> None:
        self._broker = broker
        self._scheduler = scheduler
        self._controls = controls
        self._metrics = metrics
        self._listeners = listeners
        self._reloader = reloader

    async def tick(self) -> None:
        """Check keep alives, wills and expiries."""
        received = 0
        while True:
            await asyncio.sleep(TICK)
            try:
                self._scheduler.tick()
                received = self._collect_if_idle(received)
            except Exception:
                # A defect must not end keep alive, wills and expiry for all clients.
                log.exception("event=defect in=tick")

    def _collect_if_idle(self, previous: int) -> int:
        """Run a full garbage collection if one is due and no byte was received since ``previous``; returns the count
        of bytes received."""
        received: int = self._broker.outbound.counters.bytes_received
        if received == previous and gc.get_count()[2] >= GC_FULL:
            gc.collect()
        return received

    async def publish_sys_topics(self) -> None:
        topics = SysTopics(self._controls.status, self._controls.messages, self._metrics, self._reloader.settings.sys_interval)
        while True:
            reloaded = self._reloader.reloaded
            interval = self._reloader.settings.sys_interval
            if interval:
                topics.interval = interval
                self._scheduler.update_clock()
                topics.publish()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval or None):
                    await reloaded.wait()

    async def refresh_revocations(self) -> None:
        """Read changed revocation lists."""
        while True:
            reloaded = self._reloader.reloaded
            crl = self._reloader.settings.crl
            with suppress(TimeoutError):
                async with asyncio.timeout(crl.refresh_interval or None):
                    await reloaded.wait()
                continue
            for listener in self._listeners:
                await listener.refresh_revocations(crl.expiry_warning)

    async def rank_sessions(self) -> None:
        """Keep rankings of very many sessions for the HTTP API."""
        rankings = self._controls.sessions.rankings
        while True:
            await asyncio.sleep(rankings.step() if len(self._broker.registry) > MAX_VISITS else TICK)

    async def write(self, interval: float) -> None:
        """Commit every ``interval`` seconds; for durability = "interval"."""
        while True:
            await asyncio.sleep(interval)
            self._scheduler.write()
