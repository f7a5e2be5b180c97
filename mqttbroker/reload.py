"""Reloads settings, password and ACL files, and certificates on SIGHUP.

An invalid file changes nothing and is logged.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Callable, List, Optional

from mqttbroker.admin.http import HttpServer
from mqttbroker.assembly import redirect_of
from mqttbroker.auth.security import Security
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Http, Settings
from mqttbroker.core.broker import Broker
from mqttbroker.logs import set_level
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.tls import http_context

log = logging.getLogger("mqttbroker")


class Reloader:
    """Applies the settings that may change while the broker runs: ``log.level``, ``[redirect]``, and all named files.

    ``reread`` loads the settings again and raises ConfigError.  ``http_settings`` are those of the start; ``http`` is
    set once the HTTP server is open.
    """

    def __init__(
        self,
        reread: Callable[[], Settings],
        broker: Broker,
        security: Security,
        listeners: List[OpenListener],
        http_settings: Http,
    ) -> None:
        self.http: Optional[HttpServer] = None
        self._reread = reread
        self._broker = broker
        self._security = security
        self._listeners = listeners
        self._http_settings = http_settings
        self._task: Optional[asyncio.Task[None]] = None

    def start(self) -> None:
        """Reload as a task; for a signal handler."""
        self.reload()

    def reload(self) -> asyncio.Task[None]:
        """Reload as a task, after one that is still running; returns that task."""
        self._task = asyncio.create_task(self._reload(self._task))
        return self._task

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _reload(self, previous: Optional[asyncio.Task[None]]) -> None:
        if previous is not None:
            await previous
        self._apply_settings()
        await self._security.reload(self._broker)
        for listener in self._listeners:
            await listener.reload()
        self._renew_http_certificates()

    def _apply_settings(self) -> None:
        try:
            settings = self._reread()
        except ConfigError as error:
            for problem in error.problems:
                log.error("event=reload_failed reason=%s", problem)
            return
        set_level(settings.log.level)
        self._broker.terms.redirect = redirect = redirect_of(settings.redirect)
        log.info("event=log_level to=%s", settings.log.level)
        if redirect is not None:
            log.info("event=redirecting server_reference=%s rate=%d", redirect.server_reference, redirect.rate)

    def _renew_http_certificates(self) -> None:
        try:
            context = http_context(self._http_settings)
        except OSError as error:
            log.error("event=reload_failed listener=http reason=%s", error)
            return
        if context is not None and self.http is not None:
            self.http.renew(context)
            log.info("event=certificates_reloaded listener=http")
