"""What the ingest job says to Prometheus.

The rule kept here: the numbers are those of the terminal's line, read when
somebody asks; counters begin at nought with each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge_spark.tables.ingest_progress import TableProgress

_COUNTERS = (
    ("rows", "Rows written to the table"),
    ("bad", "Messages written to the dead letters for what they are"),
    ("late", "Messages left out because they came after the watermark"),
    ("duplicates", "Messages left out as duplicates"),
    ("batches", "Batches done"),
)
_GAUGES = (
    ("lag", "lag_offsets", "Offsets between what is done and what the broker has"),
    ("lag_s", "lag_seconds", "Age of the newest message that is done, 0 when there is no lag"),
)


class IngestMetrics(Collector):
    """`mqtt_ingest_*` by table, served on an HTTP port until `close`.

    Raises `OSError` where the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        self._tables: Sequence[TableProgress] = ()
        registry = CollectorRegistry()
        registry.register(self)
        self._server: WSGIServer
        self._server, self._thread = start_http_server(port, host, registry)

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def watch(self, tables: Sequence[TableProgress]) -> None:
        """Serve the numbers of ``tables`` from now on."""
        self._tables = tables

    def collect(self) -> Iterable[Metric]:
        for attribute, text in _COUNTERS:
            counter = CounterMetricFamily(f"mqtt_ingest_{attribute}", text, labels=["table"])
            for table in self._tables:
                counter.add_metric([table.name], getattr(table, attribute))
            yield counter
        for attribute, name, text in _GAUGES:
            gauge = GaugeMetricFamily(f"mqtt_ingest_{name}", text, labels=["table"])
            for table in self._tables:
                value = getattr(table, attribute)
                if value is not None:
                    gauge.add_metric([table.name], value)
            yield gauge

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
