"""All bridges of a broker: start, stop, and the changes of a reload."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mqttbroker.bridges.context import BridgeContext, BridgeStatus
from mqttbroker.config import settings as config
from mqttbroker.core.sessions.connect_handler import OF_BRIDGES

if TYPE_CHECKING:
    from mqttbroker.bridges.bridge import Bridge

log = logging.getLogger("mqttbroker.bridges")


class Bridges:
    """The bridges of the settings, by name. To be used on the event loop's thread."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._bridges: dict[str, Bridge] = {}
        self._changing = asyncio.Lock()
        self.started = False

    def start(self, settings: Sequence[config.Bridge]) -> None:
        """Start the bridges, and end the sessions of those that are no longer configured."""
        if settings:
            self._context.directory.mkdir(mode=0o700, exist_ok=True)
        names = {bridge.name for bridge in settings}
        registry = self._context.broker.registry
        for client_id in list(registry.sessions):
            if client_id.startswith(OF_BRIDGES):
                name = client_id.removeprefix(OF_BRIDGES)
                if name not in names:
                    self._end_session(name)
                    (self._context.directory / f"{name}.json").unlink(missing_ok=True)
        for bridge in settings:
            self._start(bridge)
        self.started = True

    def _start(self, settings: config.Bridge) -> None:
        self._add(settings).start()

    def _add(self, settings: config.Bridge) -> Bridge:
        from mqttbroker.bridges.bridge import Bridge  # most brokers have none: 20 modules

        bridge = self._bridges[settings.name] = Bridge(settings, self._context)
        return bridge

    async def apply(self, settings: Sequence[config.Bridge]) -> None:
        """Use other settings: bridges that are the same stay connected."""
        async with self._changing:
            if settings:
                self._context.directory.mkdir(mode=0o700, exist_ok=True)
            wanted = {bridge.name: bridge for bridge in settings}
            for name, bridge in list(self._bridges.items()):
                if name not in wanted:
                    await bridge.stop(forget=True)
                    del self._bridges[name]
                    self._end_session(name)
                elif bridge.settings != wanted[name]:
                    await bridge.stop()
                    log.info("event=bridge_changed bridge=%s", name)
                    changed = self._add(wanted[name])
                    changed.counts = bridge.counts
                    changed.start()
            for name, added in wanted.items():
                if name not in self._bridges:
                    log.info("event=bridge_added bridge=%s", name)
                    self._start(added)

    def _end_session(self, name: str) -> None:
        session = self._context.broker.registry.get(OF_BRIDGES + name)
        queued = 0
        if session is not None:
            queued = session.deliveries.queued_messages
            self._context.broker.lifecycle.end(session)
        log.warning("event=bridge_removed bridge=%s queued_messages=%d", name, queued)

    async def stop(self) -> None:
        """Disconnect all; their sessions stay."""
        async with self._changing:
            await asyncio.gather(*(bridge.stop() for bridge in self._bridges.values()))

    def statuses(self) -> list[BridgeStatus]:
        """In the order of the settings."""
        return [bridge.status() for bridge in self._bridges.values()]
