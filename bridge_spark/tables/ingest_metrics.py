"""Prometheus metrics of the ingest job: the numbers of `TableProgress`, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge_spark.tables.ingest_progress import TableProgress

_COUNTERS = (
    ("rows", "Rows written to the table"),
    ("bad", "Messages written to the dead letters because they do not parse"),
    ("late", "Messages dropped because they came after the watermark"),
    ("duplicates", "Messages dropped as duplicates"),
    ("batches", "Batches completed"),
)
_GAUGES = (
    ("lag", "lag_offsets", "Offsets that the broker has and the table does not"),
    ("lag_s", "lag_seconds", "Age of the newest message in the table, 0 without lag"),
)


class IngestMetrics(Collector):
    """`mqtt_ingest_*` by table, served on an HTTP port until `close`.

    Raises `OSError` if the port is in use.
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

    def update(self, tables: Sequence[TableProgress]) -> None:
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
