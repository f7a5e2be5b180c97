"""An HTTP server of streams, metrics and health, without a broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.http.access import AccessList
from mqttbroker.admin.http.application import HttpApplication
from mqttbroker.admin.http.server import HttpServer
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag


def http_server(
    logs: StreamLogs | None,
    metrics: Callable[[], Awaitable[bytes]],
    readiness: Callable[[], Awaitable[list[str]]],
    access: AccessList,
    port: int = 0,
    consumers: ConsumerLag | None = None,
) -> HttpServer:
    """A server on loopback, not started."""
    return HttpServer(
        "127.0.0.1",
        port,
        access,
        lambda admission, requests: HttpApplication(admission, requests, logs, metrics, readiness, consumers=consumers),
    )
