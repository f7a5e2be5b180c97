"""Metrics: what the broker counts, for Prometheus and for ``$SYS``.

The rule kept here: the hot path counts in plain integers and knows no metrics
library; this module reads them when somebody asks, and every drop has a cause.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Optional

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker import __version__, build_kind
from mqttbroker.admin.consumer_lag import ConsumerLag
from mqttbroker.core.broker import Broker
from sessions.counters import Counters


class Metrics:
    """Numbers of one broker.  Safe to read from any thread.

    ``set_aside`` counts the damaged files that lay in the data directory at start.
    """

    def __init__(
        self,
        broker: Broker,
        streams: Optional[StreamLogs],
        set_aside: int = 0,
        consumers: Optional[ConsumerLag] = None,
    ) -> None:
        self.broker = broker
        self.set_aside = set_aside
        self.http_stats = Counters()
        self.streams = streams
        self.consumers = consumers
        self._started = time.monotonic()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    @property
    def uptime(self) -> float:
        """Seconds since the start, whatever happened to the wall clock."""
        return time.monotonic() - self._started

    def render(self) -> bytes:
        """The text of ``/metrics``."""
        return generate_latest(self.registry)

    def drops(self) -> dict[str, int]:
        """Messages that were not delivered, by cause."""
        counters = self.broker.context.counters
        return {
            "queue_full": counters.queue_full,
            "queue_full_oldest": counters.queue_full_oldest,
            "total_full": counters.total_full,
            "memory_full": counters.memory_full,
            "refused": counters.publish_refused,
            "slow_subscriber": counters.publish_dropped_slow,
            "too_large": counters.publish_dropped_too_large,
            "not_authorized": counters.publish_dropped_denied,
            "retained_full": counters.publish_dropped_retained,
            "expired": counters.expired,
            "store_failed": counters.store_failed + counters.lost_records,
        }

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client."""
        broker = self.broker
        counters = broker.outbound.counters
        backpressure_monitor = broker.context.backpressure_monitor
        info = GaugeMetricFamily(
            "mqttbroker_build_info",
            "Version, kind of build, and when acknowledgements leave.",
            labels=["version", "build", "durability"],
        )
        info.add_metric([__version__, build_kind(), broker.terms.durability], 1)
        yield info
        totals = (
            ("bytes_received", "Bytes received from clients.", counters.bytes_received),
            ("bytes_sent", "Bytes sent to clients.", counters.bytes_sent),
            ("packets_received", "Control packets received.", counters.messages_received),
            ("packets_sent", "Control packets sent.", counters.messages_sent),
            ("publish_received", "PUBLISH packets received.", counters.publish_received),
            ("publish_sent", "PUBLISH packets sent.", counters.publish_sent),
            ("connections", "Network connections accepted.", counters.connections),
            ("protocol_errors", "Connections ended for breaking the protocol.", counters.protocol_errors),
            ("store_failures", "Commits that failed.", counters.commit_failures),
            ("publisher_waits", "Times that a publisher had to wait for a crowded queue.", backpressure_monitor.pauses),
        )
        for name, text, value in totals:
            yield CounterMetricFamily(f"mqttbroker_{name}", text, value=value)
        failed = CounterMetricFamily(
            "mqttbroker_handshakes_failed", "Connections that never came to MQTT or HTTP.", labels=["layer"]
        )
        failed.add_metric(["tls"], counters.tls_failures)
        failed.add_metric(["websocket"], counters.websocket_failures)
        failed.add_metric(["https"], self.http_stats.tls_failures)
        yield failed
        dropped = CounterMetricFamily(
            "mqttbroker_messages_dropped", "Messages not delivered, by cause.", labels=["cause"]
        )
        for cause, count in self.drops().items():
            dropped.add_metric([cause], count)
        yield dropped
        gauges = (
            ("clients_connected", "Clients connected now.", broker.clients.connected),
            ("publishers_waiting", "Publishers that wait for a crowded queue now.", backpressure_monitor.paused),
            ("sessions", "Sessions, connected or not.", len(broker.registry)),
            ("subscriptions", "Subscriptions.", broker.router.subscriptions),
            ("retained_messages", "Retained messages.", len(broker.retained)),
            ("retained_bytes", "Payload bytes of retained messages.", broker.retained.size),
            ("route_cache_entries", "Topics in the route cache.", len(broker.router.cache)),
            ("queued_messages", "Messages that persistent sessions have on disk.", broker.context.queued_messages),
            ("queued_bytes", "Bytes of messages that persistent sessions have on disk.", broker.context.queued_bytes),
            ("queue_memory_bytes", "Bytes of messages that wait in memory.", broker.context.memory_bytes),
            ("store_pending_bytes", "Bytes waiting for the disk.", broker.journal.size),
            ("store_set_aside_files", "Damaged files kept, as of the start.", self.set_aside),
            ("uptime_seconds", "Seconds since the start.", self.uptime),
        )
        for name, text, number in gauges:
            yield GaugeMetricFamily(f"mqttbroker_{name}", text, value=number)
        yield from self._stream_metrics()

    def _stream_metrics(self) -> Iterator[Metric]:
        if self.streams is None:
            return
        labels = ["stream", "partition"]
        end = GaugeMetricFamily(
            "mqttbroker_stream_high_watermark", "End offset that readers see.", labels=labels
        )
        start = GaugeMetricFamily(
            "mqttbroker_stream_log_start_offset", "First offset still kept.", labels=labels
        )
        size = GaugeMetricFamily("mqttbroker_stream_bytes", "Bytes on disk.", labels=labels)
        sealed = GaugeMetricFamily("mqttbroker_stream_sealed_segments", "Segments kept as Parquet.", labels=labels)
        for name in self.streams.streams():
            for partition in self.streams.manifest(name)["partitions"]:
                key = [name, str(partition["partition"])]
                end.add_metric(key, partition["high_watermark"])
                start.add_metric(key, partition["log_start_offset"])
                size.add_metric(key, sum(segment["bytes"] for segment in partition["segments"]))
                sealed.add_metric(key, sum(segment["sealed"] for segment in partition["segments"]))
        yield end
        yield start
        yield size
        yield sealed
        totals = (
            ("sealing_saved_bytes", "Bytes on disk saved by sealing since the start.", self.streams.sealed_bytes_saved),
            ("sealing_failures", "Times that a segment was not sealed.", self.streams.sealing_failures),
        )
        for name, text, value in totals:
            yield CounterMetricFamily(f"mqttbroker_stream_{name}", text, value=value)
        yield from self._consumer_metrics()

    def _consumer_metrics(self) -> Iterator[Metric]:
        """As of the last look: a scrape reads no file."""
        prefix = "mqttbroker_stream_consumer_"
        labels = ["stream", "consumer", "partition"]
        offset = GaugeMetricFamily(prefix + "offset", "Next offset that a consumer will read.", labels=labels)
        lag = GaugeMetricFamily(prefix + "lag", "Offsets between a consumer and the end.", labels=labels)
        seconds = GaugeMetricFamily(
            prefix + "lag_seconds", "Age of the oldest record that a consumer has not read.", labels=labels
        )
        lost = GaugeMetricFamily(
            prefix + "lost", "Offsets that retention removed before a consumer read them.", labels=labels
        )
        risk = GaugeMetricFamily(
            prefix + "at_risk", "1 if retention soon takes what a consumer has not read, or has.", labels=labels
        )
        report = GaugeMetricFamily(
            prefix + "report_timestamp_seconds", "When a consumer last reported.", labels=labels[:2]
        )
        for consumer in self.consumers.latest if self.consumers is not None else ():
            report.add_metric([consumer.stream, consumer.name], consumer.reported_at)
            for place in consumer.places:
                key = [consumer.stream, consumer.name, str(place.partition)]
                offset.add_metric(key, place.offset)
                lag.add_metric(key, place.lag)
                seconds.add_metric(key, place.lag_seconds)
                lost.add_metric(key, place.lost)
                risk.add_metric(key, place.at_risk)
        yield from (offset, lag, seconds, lost, risk, report)
