"""What `/metrics` and `$SYS` show beside the broker's status: the figures of its streams, consumers and other parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.admin.control.views import AuthenticatorStatus, JwksStatus, WorkerStatus
from mqttbroker.admin.data.repair import SalvageReport
from mqttbroker.admin.events.alarms import Alarms
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.admin.metrics.latency import Latency
from sessions.counters import Counters
from sessions.store.interface import Progress

if TYPE_CHECKING:
    from mqttbroker.bridges.context import BridgeStatus


class Metrics:
    """Figures of one broker's parts; safe to use from any thread.

    ``salvage`` has the damaged files in the data directory. ``authenticators``
    returns the state of those in other processes, ``workers`` that of the connection workers, ``bridges`` that of the bridges.
    ``http_counters`` are those of the HTTP server, ``http_requests`` its requests by role and status. ``store_progress`` returns how far the
    store is, ``cluster_topics`` the values of ``$SYS`` that only a cluster has.
    """

    def __init__(
        self,
        streams: StreamLogs | None,
        salvage: SalvageReport | None = None,
        consumers: ConsumerLag | None = None,
        authenticators: Callable[[], Sequence[AuthenticatorStatus]] = tuple,
        workers: Callable[[], Sequence[WorkerStatus]] = tuple,
        bridges: Callable[[], Sequence[BridgeStatus]] = tuple,
        store_progress: Callable[[], Progress] = Progress,
        cluster_topics: Callable[[], dict[str, object]] = dict,
        http_requests: Mapping[tuple[str, int], int] = MappingProxyType({}),
        alarms: Alarms | None = None,
        latency: Latency | None = None,
    ) -> None:
        self.bridges = bridges
        self.authenticators = authenticators
        self.workers = workers
        self._salvage = salvage
        self.store_progress = store_progress
        self.cluster_topics = cluster_topics
        self.http_counters = Counters()
        self.streams = streams
        self.consumers = consumers
        self.reload_problems = 0
        self.jwks: JwksStatus | None = None
        self.log_lines_dropped = 0
        self.crl_expiries: dict[str, float] = {}  # Unix seconds, by listener
        self.certificate_expiries: dict[str, float] = {}  # likewise; "http" is that of the HTTP server
        self.listener_clients: dict[str, int] = {}  # open connections that sent CONNECT, by listener
        self.alarms = alarms
        self.latency = Latency() if latency is None else latency
        self.http_requests = http_requests
        self._started = time.monotonic()

    @property
    def set_aside(self) -> int:
        """Damaged files that are set aside in the data directory."""
        return 0 if self._salvage is None else len(self._salvage.files)

    @property
    def uptime(self) -> float:
        """Seconds since the start, on the monotonic clock."""
        return time.monotonic() - self._started

    def oldest_in_queue(self, name: str, stream: str) -> float:
        """The age in seconds of the oldest message of a queue, when it was last measured; 0 if there is none."""
        for consumer in self.consumers.latest if self.consumers is not None else ():
            if consumer.name == f"$queue/{name}" and consumer.stream == stream:
                return consumer.lag_seconds
        return 0.0
