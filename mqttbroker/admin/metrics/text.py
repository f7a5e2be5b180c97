"""The text of ``/metrics``: the broker's counters and gauges, its streams, their consumers, and the process."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker import __version__, build_kind
from mqttbroker.admin.control.views import BrokerStatus, MemoryStatus, WorkerStatus
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.registry import FIGURES, Figure
from sessions.counters import Counter

_PROCESS = CollectorRegistry(auto_describe=False)
ProcessCollector(registry=_PROCESS)
PlatformCollector(registry=_PROCESS)
GCCollector(registry=_PROCESS)


def metrics_text(metrics: Metrics, status: BrokerStatus) -> bytes:
    """The text of ``/metrics``, in Prometheus' text format."""
    return generate_latest(_Scrape(metrics, status))


class _Scrape(Collector):
    """All metrics of one scrape, as `generate_latest` takes them."""

    def __init__(self, metrics: Metrics, status: BrokerStatus) -> None:
        self._metrics = metrics
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status, metrics = self._status, self._metrics
        yield from self._broker_metrics(status)
        yield from self._stream_metrics()
        if status.queues:
            yield from self._queue_metrics(status)
        yield GaugeMetricFamily(
            "mqttbroker_reload_problems",
            "Problems of the last reload; the settings and files in force before it stay.",
            value=metrics.reload_problems,
        )
        expiries = GaugeMetricFamily(
            "mqttbroker_crl_expiry_timestamp_seconds",
            "When the revocation lists of a listener expire, and it accepts no client certificate any more.",
            labels=["listener"],
        )
        for listener, expiry in metrics.crl_expiries.items():
            expiries.add_metric([listener], expiry)
        yield expiries
        certificates = GaugeMetricFamily(
            "mqttbroker_certificate_expiry_timestamp_seconds",
            "When the certificate of a listener, or of the HTTP server, expires.",
            labels=["listener"],
        )
        for listener, expiry in metrics.certificate_expiries.items():
            certificates.add_metric([listener], expiry)
        yield certificates
        clients = GaugeMetricFamily("mqttbroker_listener_clients", "Open connections of a listener that sent CONNECT.", labels=["listener"])
        for listener, number in metrics.listener_clients.items():
            clients.add_metric([listener], number)
        yield clients
        if metrics.alarms is not None:
            active = GaugeMetricFamily("mqttbroker_alarm", "1 for each alarm that is active.", labels=["alarm"])
            for alarm in metrics.alarms.active:
                active.add_metric([alarm.name], 1)
            yield active
            yield CounterMetricFamily("mqttbroker_alarms_raised", "Alarms raised.", value=metrics.alarms.raised)
        yield from self._jwks_metrics()
        yield from self._authenticator_metrics()
        workers = self._metrics.workers()
        if workers:
            yield from worker_families(workers)
        yield from self._bridge_metrics()
        yield CounterMetricFamily(
            "mqttbroker_log_lines_dropped",
            "Log lines dropped because stderr was not read.",
            value=metrics.log_lines_dropped,
        )
        yield _counter(
            "http_requests",
            "HTTP requests by the role of the sender and the status.",
            ("role", "status"),
            {(role, str(status_code)): count for (role, status_code), count in sorted(metrics.http_requests.items())},
        )
        yield from self._latency_metrics()
        yield from _PROCESS.collect()

    def _latency_metrics(self) -> Iterator[Metric]:
        for histogram in self._metrics.latency.histograms:
            buckets = [("+Inf" if math.isinf(bound) else str(bound), count) for bound, count in histogram.cumulative()]
            family = HistogramMetricFamily(f"mqttbroker_{histogram.name}_seconds", histogram.text)
            family.add_metric([], buckets, histogram.sum)
            yield family

    def _jwks_metrics(self) -> Iterator[Metric]:
        status = self._metrics.jwks
        if status is None:
            return
        yield _counter(
            "jwks_fetches",
            "Fetches of the key set for tokens, by outcome.",
            ("outcome",),
            {("succeeded",): status.successes, ("failed",): status.failures},
        )
        yield GaugeMetricFamily("mqttbroker_jwks_keys", "Keys for tokens in use.", value=status.keys)
        yield GaugeMetricFamily(
            "mqttbroker_jwks_fetched_timestamp_seconds",
            "When the key set for tokens was last fetched; 0 = never.",
            value=status.fetched_at,
        )

    def _bridge_metrics(self) -> Iterator[Metric]:
        found = self._metrics.bridges()
        if not found:
            return
        prefix, labels = "mqttbroker_bridge_", ["bridge"]
        up = GaugeMetricFamily(prefix + "up", "1 if a bridge is connected.", labels=labels)
        queued = GaugeMetricFamily(prefix + "queued_messages", "Messages that the remote has not acknowledged.", labels=labels)
        connects = CounterMetricFamily(prefix + "connects", "Links to remotes.", labels=labels)
        failures = CounterMetricFamily(prefix + "failures", "Attempts that failed and links that ended.", labels=labels)
        directed = [*labels, "direction"]
        messages = CounterMetricFamily(prefix + "messages", "Messages passed.", labels=directed)
        size = CounterMetricFamily(prefix + "payload_bytes", "Bytes of payloads passed.", labels=directed)
        dropped = CounterMetricFamily(prefix + "dropped", "Messages acknowledged and not passed, by cause.", labels=[*labels, "cause"])
        for one in found:
            key = [one.name]
            up.add_metric(key, one.state == "connected")
            queued.add_metric(key, one.queued_messages)
            connects.add_metric(key, one.connects)
            failures.add_metric(key, one.failures)
            messages.add_metric([*key, "out"], one.messages_out)
            messages.add_metric([*key, "in"], one.messages_in)
            size.add_metric([*key, "out"], one.bytes_out)
            size.add_metric([*key, "in"], one.bytes_in)
            for cause, count in one.dropped:
                dropped.add_metric([*key, cause], count)
        yield from (up, queued, connects, failures, messages, size, dropped)

    def _authenticator_metrics(self) -> Iterator[Metric]:
        found = self._metrics.authenticators()
        if not found:
            return
        prefix, labels = "mqttbroker_authenticator_", ["authenticator"]
        up = GaugeMetricFamily(prefix + "up", "1 if the process of an authenticator takes logins.", labels=labels)
        waiting = GaugeMetricFamily(prefix + "waiting", "Logins that wait for an authenticator.", labels=labels)
        progress = GaugeMetricFamily(prefix + "in_progress", "Logins that an authenticator decides now.", labels=labels)
        for each in found:
            up.add_metric([each.kind], each.up)
            waiting.add_metric([each.kind], each.waiting)
            progress.add_metric([each.kind], each.in_progress)
        yield from (up, waiting, progress)
        yield _counter("authenticator_failures", "Logins that an authenticator could not decide.", labels,
                       {(each.kind,): each.failures for each in found})  # fmt: skip
        yield _counter("authenticator_restarts", "Starts of an authenticator's process after another one ended.", labels,
                       {(each.kind,): each.restarts for each in found})  # fmt: skip

    def _broker_metrics(self, status: BrokerStatus) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "mqttbroker_build_info",
            "Version, kind of build, and durability setting.",
            labels=["version", "build", "durability"],
        )
        info.add_metric([__version__, build_kind(), status.durability], 1)
        yield info
        yield from self._figures(status)
        yield _counter(
            "logins",
            "Authentications, by authenticator and outcome.",
            ("authenticator", "outcome"),
            {(authenticator or "none", outcome): count for (authenticator, outcome), count in status.logins.items()},
        )
        yield _counter("connects_refused", "CONNECT packets refused, by listener and reason.", ("listener", "reason"),
                       status.connects_refused)  # fmt: skip
        yield _counter("denials", "Requests that the access rules refused, by action.", ("action",),
                       {(action,): count for action, count in status.denials.items()})  # fmt: skip
        for name, text, label, counts in (
            (
                "limits_reached",
                "Times that a limit refused, delayed or closed something, by the name of the setting.",
                "limit",
                status.limits_reached,
            ),
            ("bans_started", "Bans that began, by cause.", "cause", status.bans_started),
        ):
            yield _counter(name, text, (label,), {(key,): count for key, count in counts.items()})
        yield _counter(
            "messages_dropped", "Messages not delivered, by listener and cause.", ("listener", "cause"), status.drops_by_listener
        )
        yield from self._memory_metrics(status.memory)

    def _figures(self, status: BrokerStatus) -> Iterator[Metric]:
        found = [(figure, figure.value(status, self._metrics)) for figure in FIGURES if figure.metric]
        yield from counter_families((figure, value) for figure, value in found if figure.is_counter)
        for figure, value in found:
            if not figure.is_counter:
                yield GaugeMetricFamily(f"mqttbroker_{figure.metric}", figure.text, value=value)

    def _memory_metrics(self, memory: MemoryStatus) -> Iterator[Metric]:
        gauges = (
            ("max_bytes", "max_memory; 0 = unlimited.", memory.maximum),
            ("used_bytes", "Memory that counts towards max_memory: the larger of the next two.", memory.used),
            ("counted_bytes", "Memory of the process without clients, and of all parts, as counted.", memory.counted),
            ("resident_bytes", "Anonymous memory of the process, as the system sees it.", memory.resident),
            ("stage", "0 = normal, 1 = refuses connections, 2 = and new state, 3 = and queues no more in memory.", memory.stage),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"mqttbroker_memory_{name}", text, value=value)
        held = GaugeMetricFamily("mqttbroker_memory_part_bytes", "Memory of each part, as counted.", labels=["part"])
        limit = GaugeMetricFamily("mqttbroker_memory_part_limit_bytes", "Limits of these parts.", labels=["part"])
        for part in memory.parts:
            held.add_metric([part.name], part.held)
            if part.limit:
                limit.add_metric([part.name], part.limit)
        yield from (held, limit)
        yield _counter(
            "memory_refused",
            "Requests refused because of max_memory.",
            ("what",),
            {(what,): count for what, count in memory.refused.items()},
        )

    def _stream_metrics(self) -> Iterator[Metric]:
        if self._metrics.streams is None or not self._metrics.streams.streams():
            return
        labels = ["stream", "partition"]
        end = GaugeMetricFamily("mqttbroker_stream_high_watermark", "End offset that readers see.", labels=labels)
        start = GaugeMetricFamily("mqttbroker_stream_log_start_offset", "First offset that is kept.", labels=labels)
        size = GaugeMetricFamily("mqttbroker_stream_bytes", "Bytes on disk.", labels=labels)
        sealed = GaugeMetricFamily("mqttbroker_stream_sealed_segments", "Segments sealed as Parquet.", labels=labels)
        for name in self._metrics.streams.streams():
            try:
                manifest = self._metrics.streams.manifest(name)
            except KeyError:  # the stream was deleted meanwhile
                continue
            for partition in manifest["partitions"]:
                key = [name, str(partition["partition"])]
                end.add_metric(key, partition["high_watermark"])
                start.add_metric(key, partition["log_start_offset"])
                size.add_metric(key, sum(segment["bytes"] for segment in partition["segments"]))
                sealed.add_metric(key, sum(segment["sealed"] for segment in partition["segments"]))
        yield end
        yield start
        yield size
        yield sealed
        yield from self._archive_metrics(self._metrics.streams)
        totals = (
            ("sealing_saved_bytes", "Bytes on disk saved by sealing since the start.", self._metrics.streams.sealed_bytes_saved),
            ("sealing_failures", "Times that sealing a segment failed.", self._metrics.streams.sealing_failures),
            ("compacted_segments", "Segments written again by compaction since the start.", self._metrics.streams.compacted_segments),
            ("compaction_failures", "Times that compacting a partition failed.", self._metrics.streams.compaction_failures),
        )
        for name, text, value in totals:
            yield CounterMetricFamily(f"mqttbroker_stream_{name}", text, value=value)
        yield from self._consumer_metrics()

    def _archive_metrics(self, streams: StreamLogs) -> Iterator[Metric]:
        prefix, labels = "mqttbroker_stream_archive_", ["stream", "partition"]
        segments = GaugeMetricFamily(prefix + "segments", "Segments in the archive.", labels=labels)
        size = GaugeMetricFamily(prefix + "bytes", "Bytes in the archive.", labels=labels)
        end = GaugeMetricFamily(prefix + "end_offset", "End offset of the archive.", labels=labels)
        waiting = GaugeMetricFamily(prefix + "waiting_segments", "Closed segments that the archive does not have yet.", labels=labels)
        oldest = GaugeMetricFamily(
            prefix + "waiting_since_seconds",
            "Unix time of the oldest record of these; absent if there are none.",
            labels=labels,
        )
        for config in streams.archiving():
            for number in range(config.partitions):
                partition, key = streams.partition(config.name, number), [config.name, str(number)]
                archive, unarchived = partition.archive.current, partition.unarchived()
                segments.add_metric(key, archive.segments)
                size.add_metric(key, archive.size)
                end.add_metric(key, archive.end)
                waiting.add_metric(key, len(unarchived))
                if unarchived:
                    oldest.add_metric(key, unarchived[0].first_timestamp / 1e6)
        yield from (segments, size, end, waiting, oldest)
        if streams.archiving():
            yield CounterMetricFamily(prefix + "failures", "Times that an archive could not be written.", value=streams.archive_failures)

    def _queue_metrics(self, status: BrokerStatus) -> Iterator[Metric]:
        """Work queues; the age of the oldest message is as of the last measurement of the consumers."""
        prefix, labels = "mqttbroker_queue_", ["queue"]
        depth = GaugeMetricFamily(prefix + "depth", "Messages that are not acknowledged.", labels=labels)
        in_flight = GaugeMetricFamily(prefix + "in_flight", "Messages that consumers have.", labels=labels)
        consumers = GaugeMetricFamily(prefix + "consumers", "Clients that consume.", labels=labels)
        oldest = GaugeMetricFamily(prefix + "oldest_seconds", "Age of the oldest message that is not acknowledged.", labels=labels)
        again = CounterMetricFamily(prefix + "redeliveries", "Messages that were delivered again.", labels=labels)
        dead = CounterMetricFamily(prefix + "dead_letters", "Messages that were delivered too often.", labels=labels)
        for name, queue in status.queues.items():
            depth.add_metric([name], queue.depth)
            in_flight.add_metric([name], queue.in_flight)
            consumers.add_metric([name], queue.consumers)
            oldest.add_metric([name], self._metrics.oldest_in_queue(name, queue.stream))
            again.add_metric([name], queue.redeliveries)
            dead.add_metric([name], queue.dead_letters)
        yield from (depth, in_flight, consumers, oldest, again, dead)

    def _consumer_metrics(self) -> Iterator[Metric]:
        """Progress of consumers when it was last computed: a scrape reads no file."""
        prefix = "mqttbroker_stream_consumer_"
        labels = ["stream", "consumer", "partition"]
        offset = GaugeMetricFamily(prefix + "offset", "Next offset that a consumer will read.", labels=labels)
        lag = GaugeMetricFamily(prefix + "lag", "Offsets between a consumer and the high watermark.", labels=labels)
        seconds = GaugeMetricFamily(prefix + "lag_seconds", "Age of the oldest record that a consumer has not read.", labels=labels)
        lost = GaugeMetricFamily(prefix + "lost", "Offsets that retention removed before a consumer read them.", labels=labels)
        risk = GaugeMetricFamily(
            prefix + "at_risk",
            "1 if retention has removed records that a consumer has not read, or is about to.",
            labels=labels,
        )
        report = GaugeMetricFamily(prefix + "report_timestamp_seconds", "When a consumer last reported.", labels=labels[:2])
        for consumer in self._metrics.consumers.latest if self._metrics.consumers is not None else ():
            report.add_metric([consumer.stream, consumer.name], consumer.reported_at)
            for partition in consumer.partitions:
                key = [consumer.stream, consumer.name, str(partition.partition)]
                offset.add_metric(key, partition.offset)
                lag.add_metric(key, partition.lag)
                seconds.add_metric(key, partition.lag_seconds)
                lost.add_metric(key, partition.lost)
                risk.add_metric(key, partition.at_risk)
        yield from (offset, lag, seconds, lost, risk, report)


def _counter(name: str, text: str, labels: Sequence[str], counts: Mapping[tuple[str, ...], float]) -> CounterMetricFamily:
    """A counter with labels; ``counts`` has the value for each combination of them."""
    family = CounterMetricFamily(f"mqttbroker_{name}", text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def counter_families(found: Iterable[tuple[Figure | Counter, float]]) -> Iterator[Metric]:
    """Counters with their values; those of one metric are one family."""
    families: dict[str, CounterMetricFamily] = {}
    for counter, value in found:
        name, (label, of_label) = f"mqttbroker_{counter.metric}", counter.label
        family = families.get(name)
        if family is None:
            family = families[name] = CounterMetricFamily(name, counter.text, labels=[label] if label else [])
        family.add_metric([of_label] if label else [], value)
    yield from families.values()


def worker_families(workers: Sequence[WorkerStatus], left_out: Collection[str] = ()) -> Iterator[Metric]:
    """The figures of connection workers, without those of these names."""
    for made, name, text, value in _OF_WORKERS:
        if name not in left_out:
            family = made(f"mqttbroker_worker_{name}", text, labels=["worker"])
            for one in workers:
                family.add_metric([str(one.number)], value(one))
            yield family


_OF_WORKERS: tuple[tuple[Callable[..., GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[WorkerStatus], float]], ...] = (
    (GaugeMetricFamily, "up", "1 if a connection worker serves clients.", lambda one: one.up),
    (GaugeMetricFamily, "clients", "Open connections of a worker.", lambda one: one.clients),
    (GaugeMetricFamily, "resident_bytes", "Memory of the worker's process.", lambda one: one.resident_bytes),
    (GaugeMetricFamily, "link_bytes", "Bytes for a worker that it has not read.", lambda one: one.link_bytes),
    (CounterMetricFamily, "cpu_seconds", "CPU time of the worker's process.", lambda one: one.cpu_seconds),
    (CounterMetricFamily, "starts", "Starts of a worker's process.", lambda one: one.starts),
)
