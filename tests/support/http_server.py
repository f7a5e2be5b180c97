"""An HTTP server of streams, metrics and health, without a broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.access import AccessList
from mqttbroker.admin.consumer_lag import ConsumerLag
from mqttbroker.admin.http import HttpServer
from mqttbroker.admin.http_application import HttpApplication


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
        lambda gate, requests: HttpApplication(gate, requests, logs, metrics, readiness, consumers=consumers),
    )
