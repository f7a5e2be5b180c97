"""HTTP as the settings want it: a server that is opened, reloaded and closed, or none without a port."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqttbroker.admin.http.access import access_list, streams_open
from mqttbroker.admin.http.admission import RequestAdmission
from mqttbroker.admin.http.server import HttpServer
from mqttbroker.auth.security import http_ban_terms
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Settings
from mqttbroker.core.access.policy import Authorizer
from mqttbroker.net.tls import FileProblem, ListenerContext, http_context

if TYPE_CHECKING:
    from mqttbroker.admin.http.application import HttpApplication

log = logging.getLogger("mqttbroker")


class HttpService:
    """The HTTP server of a broker or a node. ``rules`` are those of ``acl_file``, ``application`` makes the answers.

    With ``any_port`` another port is taken if the one of the settings is in use. ``streams``: it serves streams. ``requests`` counts
    requests by role and status.
    """

    def __init__(
        self,
        settings: Settings,
        rules: Authorizer,
        application: Callable[[RequestAdmission, Counter[tuple[str, int]]], HttpApplication],
        any_port: bool = False,
        streams: bool = False,
    ) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self._settings = settings
        self._rules = rules
        self._application = application
        self._any_port = any_port
        self._streams = streams
        self._server: HttpServer | None = None

    @property
    def port(self) -> int | None:
        """The port that is bound; None before `open`, and without a port in the settings."""
        return None if self._server is None else self._server.port

    @property
    def context(self) -> ListenerContext | None:
        """The TLS context; None without TLS."""
        return None if self._server is None else self._server.admission.context

    def open(self) -> None:
        """Serve, if the settings have a port. Raises ConfigError for a file that cannot be used, OSError for an address."""
        http = self._settings.http
        if http.port is None:
            return
        try:
            context = http_context(http)
            server = HttpServer(
                http.host, http.port, access_list(self._settings, self._rules), self._application, context, self.requests
            )  # fmt: skip
            server.bans.apply(http_ban_terms(self._settings))
            self._start(server)
        except FileProblem as error:
            raise ConfigError([f"http: {error}"]) from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(f"http: cannot listen on {http.host}:{http.port}: {reason}") from None
        self._server = server
        if self._streams:
            self._warn()
        log.info("event=listening type=%s host=%s port=%d", "http" if context is None else "https", http.host, server.port)

    def _start(self, server: HttpServer) -> None:
        try:
            server.start()
        except OSError as error:
            if not self._any_port or server.port == 0 or error.errno != errno.EADDRINUSE:
                raise
            log.warning("event=http_port_in_use port=%d", server.port)
            server.port = 0
            server.start()

    def _warn(self) -> None:
        settings = self._settings
        if settings.streams and not settings.http.has_access and not streams_open(settings):
            reason = "MQTT clients need a user or rules, so streams are not served over HTTP without a token"
            log.warning("event=streams_need_token reason=%s", reason)

    def stop(self) -> None:
        """Close every connection; without effect unless open."""
        if self._server is not None:
            self._server.stop()

    # -- reloads ----------------------------------------------------------------------

    def apply(self, settings: Settings, before: Settings) -> None:
        """Put access and bans of other settings in force."""
        if self._server is not None:
            self._server.admission.access = access_list(settings, self._rules)
            self._server.bans.apply(http_ban_terms(settings))

    async def reload(self, settings: Settings) -> list[str]:
        """Read the certificates again; returns the problem with them."""
        try:
            context = http_context(settings.http)
        except OSError as error:
            log.error("event=reload_failed listener=http reason=%s", error)
            return [f"http: {error}"]
        if context is not None and self._server is not None:
            self._server.renew(context)
            log.info("event=certificates_reloaded listener=http")
        return []
