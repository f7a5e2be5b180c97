"""The parts of a broker or a node that a reload changes, as a `Reloader` calls them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mqttbroker.admin.control.stream_changes import StreamRefused
from mqttbroker.admin.events.client_events import ClientEvents
from mqttbroker.auth.security import Security
from mqttbroker.bridges.bridges import Bridges
from mqttbroker.config.settings import Settings
from mqttbroker.core.broker import Broker
from mqttbroker.core.terms.terms import BrokerTerms
from mqttbroker.logs.levels import LogLevels
from mqttbroker.logs.output import reopen
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.shared_admission import SharedAdmission
from mqttbroker.server.assembly import apply_limits, apply_terms, apply_to_listener
from mqttbroker.server.reload import Reloadable
from mqttbroker.server.stream_control import StreamControl
from mqttbroker.system.file_limit import client_sockets

log = logging.getLogger("mqttbroker")


class ReloadedEvents(Reloadable):
    """Whether there are client events."""

    def __init__(self, events: ClientEvents) -> None:
        self._events = events

    def apply(self, settings: Settings, before: Settings) -> None:
        self._events.enable(settings.sys_client_events)


class ReloadedLog(Reloadable):
    """The levels of the log, and its files, which may have been moved away."""

    def __init__(self, levels: LogLevels) -> None:
        self._levels = levels

    def apply(self, settings: Settings, before: Settings) -> None:
        self._levels.apply(settings.log.level, dict(settings.log.levels))
        log.info("event=log_level to=%s", settings.log.level)

    async def reload(self, settings: Settings) -> list[str]:
        problems = reopen(settings.log)
        for problem in problems:
            log.error("event=reload_failed reason=%s", problem)
        return problems


class ReloadedLimits(Reloadable):
    """The limits and options of the core."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def apply(self, settings: Settings, before: Settings) -> None:
        apply_limits(self._broker, settings)


class ReloadedAdmission(Reloadable):
    """The terms of all listeners, and the number of sockets."""

    def __init__(self, shared: SharedAdmission) -> None:
        self._terms = shared.terms
        self._sockets = shared.sockets

    def apply(self, settings: Settings, before: Settings) -> None:
        apply_terms(self._terms, settings)
        limits = settings.limits
        self._sockets.max_evictable = limits.max_half_open
        if limits.max_connections + limits.max_half_open != before.limits.max_connections + before.limits.max_half_open:
            self._sockets.maximum = client_sockets(settings)


class ReloadedStreams(Reloadable):
    """The settings of streams."""

    def __init__(self, control: StreamControl) -> None:
        self._control = control

    async def reload(self, settings: Settings) -> list[str]:
        try:
            await self._control.apply_file({stream.name: stream for stream in settings.streams})
        except StreamRefused as error:
            log.error("event=reload_failed reason=%s", error)
            return [str(error)]
        return []


class ReloadedBridges(Reloadable):
    """The bridges, once they are started."""

    def __init__(self, bridges: Bridges) -> None:
        self._bridges = bridges

    async def reload(self, settings: Settings) -> list[str]:
        if self._bridges.started:
            await self._bridges.apply(settings.bridges)
        return []


class ReloadedSecurity(Reloadable):
    """Authenticators, bans, and the files of passwords and rules; ``broker`` has the clients, if there are any."""

    def __init__(self, security: Security, broker: Broker | None) -> None:
        self._security = security
        self._broker = broker

    def apply(self, settings: Settings, before: Settings) -> None:
        self._security.apply(settings)

    async def reload(self, settings: Settings) -> list[str]:
        return await self._security.reload(self._broker)


class ReloadedListeners(Reloadable):
    """The options and certificates of the listeners that are open."""

    def __init__(self, listeners: Sequence[OpenListener], security: Security) -> None:
        self._listeners = listeners
        self._security = security

    def apply(self, settings: Settings, before: Settings) -> None:
        for open_listener, listener in zip(self._listeners, settings.listeners):
            apply_to_listener(open_listener.listener_policy, settings, listener, self._security)
            open_listener.listener = listener
            open_listener.terms_changed()

    async def reload(self, settings: Settings) -> list[str]:
        problems: list[str] = []
        for listener in self._listeners:
            problems += await listener.reload()
        return problems


class ReloadedRedirect(Reloadable):
    """The log's line about a redirect in force."""

    def __init__(self, terms: BrokerTerms) -> None:
        self._terms = terms

    def apply(self, settings: Settings, before: Settings) -> None:
        redirect = self._terms.redirect
        if redirect is not None:
            log.info("event=redirecting server_reference=%s rate=%d", redirect.server_reference, redirect.rate)
