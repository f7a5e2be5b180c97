"""The text of `/metrics`: the metrics of the broker's core, and those of its other parts, asked for at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.status import StatusReport
from mqttbroker.admin.control.views import JwksStatus
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.auth.security import Security
from mqttbroker.logs.output import dropped_lines
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.tls import ListenerContext
from mqttbroker.server.reload import Reloader


class MetricsPage:
    """Used on the HTTP server's thread. ``http`` returns the TLS context of the HTTP server."""

    def __init__(
        self,
        metrics: Metrics,
        status: StatusReport,
        runner: ControlRunner,
        security: Security,
        listeners: Sequence[OpenListener],
        http: Callable[[], ListenerContext | None],
        reloader: Reloader,
    ) -> None:
        self._metrics = metrics
        self._status = status
        self._runner = runner
        self._security = security
        self._listeners = listeners
        self._http = http
        self._reloader = reloader

    async def render(self) -> bytes:
        status = await asyncio.wrap_future(self._runner.call(self._status))
        metrics, listeners = self._metrics, list(self._listeners)
        metrics.log_lines_dropped = dropped_lines()
        metrics.reload_problems = len(self._reloader.problems)
        jwks = None if self._security.jwt is None else self._security.jwt.jwks
        if jwks is not None:
            metrics.jwks = JwksStatus(jwks.successes, jwks.failures, jwks.key_count, jwks.fetched_at)
        contexts = {one.listener.address: one.context for one in listeners}
        contexts["http"] = self._http()
        metrics.certificate_expiries = {
            name: context.certificate_expires.timestamp()
            for name, context in contexts.items()
            if context is not None and context.certificate_expires is not None
        }
        metrics.listener_clients = {one.listener.address: one.listener_policy.clients for one in listeners}
        metrics.crl_expiries = {
            one.listener.address: one.revocations.expires.timestamp()
            for one in listeners
            if one.revocations is not None and one.revocations.expires is not None
        }
        from mqttbroker.admin.metrics.text import metrics_text  # loads Prometheus' client, which the broker needs for nothing else

        return metrics_text(metrics, status)
