"""``$SYS`` topics: the broker's status as retained messages, under Mosquitto's names, units and formats.

A value is published when it has changed, as Mosquitto does. These messages are not stored, and wildcards at the first
level do not match them [MQTT-4.7.2-1].
"""

from __future__ import annotations

import math

from mqttbroker import __version__
from mqttbroker.admin.control.messages import MessageControl
from mqttbroker.admin.control.status import StatusReport
from mqttbroker.admin.control.views import BrokerStatus
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.registry import FIGURES

_MINUTES = (1, 5, 15)


class _Load:
    """The rate of a counter per minute: moving averages over 1, 5 and 15 minutes, computed as Mosquitto does."""

    def __init__(self) -> None:
        self.last = 0
        self.rates = [0.0, 0.0, 0.0]

    def update(self, count: int, seconds: float) -> None:
        per_minute = (count - self.last) * 60.0 / seconds
        self.last = count
        for index, minutes in enumerate(_MINUTES):
            decay = math.exp(-seconds / (60.0 * minutes))
            self.rates[index] = per_minute + decay * (self.rates[index] - per_minute)


class SysTopics:
    """Publishes ``$SYS/broker/…``; call `publish` every ``interval`` seconds on the event loop's thread."""

    def __init__(self, status: StatusReport, messages: MessageControl, metrics: Metrics, interval: float) -> None:
        self.status = status
        self.messages = messages
        self.metrics = metrics
        self.interval = interval
        self._published: dict[str, str] = {}
        self._loads: dict[str, _Load] = {}
        self._heap_maximum = 0

    def publish(self) -> None:
        """Publish the values that have changed, unless the last ones are not published yet."""
        if self.messages.publishing:
            return
        values = self.values(self.status())
        for topic, value in values.items():
            if self._published.get(topic) != value:
                self._published[topic] = value
                self.messages.publish_own(topic, value.encode("utf-8"))
        gone = [topic for topic in self._published if topic not in values]  # of a stream that was deleted
        for topic in gone:
            del self._published[topic]
            self.messages.publish_own(topic, b"")

    def _streams(self) -> dict[str, object]:
        """For each stream: its consumers, those at risk, and the largest lag."""
        metrics = self.metrics
        values: dict[str, object] = {}
        if metrics.streams is None or metrics.consumers is None:
            return values
        latest = metrics.consumers.latest
        for name in metrics.streams.streams():
            found = [consumer for consumer in latest if consumer.stream == name]
            values[f"streams/{name}/consumers/count"] = len(found)
            values[f"streams/{name}/consumers/at_risk"] = sum(consumer.at_risk for consumer in found)
            values[f"streams/{name}/consumers/lag"] = max((consumer.lag for consumer in found), default=0)
        return values

    def _queues(self, status: BrokerStatus) -> dict[str, object]:
        """For each work queue: what `QueueStatus` has, and the age of its oldest message in seconds."""
        values: dict[str, object] = {}
        for name, queue in status.queues.items():
            if "/" in name:  # a filter may have wildcards
                continue
            prefix = f"queues/{name}"
            values[f"{prefix}/depth"] = queue.depth
            values[f"{prefix}/in_flight"] = queue.in_flight
            values[f"{prefix}/consumers"] = queue.consumers
            values[f"{prefix}/oldest_seconds"] = int(self.metrics.oldest_in_queue(name, queue.stream))
            values[f"{prefix}/redeliveries"] = queue.redeliveries
            values[f"{prefix}/dead_letters"] = queue.dead_letters
        return values

    def _workers(self) -> dict[str, object]:
        """For each connection worker: what `WorkerStatus` has."""
        values: dict[str, object] = {}
        for worker in self.metrics.workers():
            prefix = f"workers/{worker.number}"
            values[f"{prefix}/up"] = int(worker.up)
            values[f"{prefix}/clients"] = worker.clients
            values[f"{prefix}/cpu_seconds"] = f"{worker.cpu_seconds:.2f}"
            values[f"{prefix}/resident_bytes"] = worker.resident_bytes
            values[f"{prefix}/link_bytes"] = worker.link_bytes
            values[f"{prefix}/starts"] = worker.starts
        return values

    def values(self, status: BrokerStatus) -> dict[str, str]:
        """All topics with their values."""
        metrics = self.metrics
        self._heap_maximum = max(self._heap_maximum, status.memory.used)
        values: dict[str, object] = {
            "version": f"mqttbroker version {__version__}",
            "uptime": f"{int(metrics.uptime)} seconds",
            "store/durability": status.durability,
            "store/log/apply_seconds": f"{metrics.store_progress().apply_seconds:.3f}",
            "heap/maximum": self._heap_maximum,
            "memory/stage": status.memory.stage_name,
        }
        has_streams = metrics.streams is not None and bool(metrics.streams.streams())
        for figure in FIGURES:
            for topic in figure.topics:
                if has_streams or not topic.startswith("streams/"):
                    values[topic] = figure.value(status, metrics)
        if self.metrics.streams is not None and self.metrics.streams.streams():
            values["streams/sealed/segments"] = self.metrics.streams.sealed_segments
            values["streams/sealed/bytes_saved"] = self.metrics.streams.sealed_bytes_saved
            values["streams/sealed/failures"] = self.metrics.streams.sealing_failures
            if self.metrics.streams.archiving():
                archive = self.metrics.streams.archive_totals()
                values["streams/archive/segments"] = archive.segments
                values["streams/archive/bytes"] = archive.size
                values["streams/archive/waiting"] = archive.waiting
                values["streams/archive/failures"] = self.metrics.streams.archive_failures
        for cause, count in status.drops.items():
            values[f"publish/messages/dropped/{cause}"] = count
        for each in self.metrics.authenticators():
            prefix = f"authenticators/{each.kind}"
            values[f"{prefix}/up"] = int(each.up)
            values[f"{prefix}/waiting"] = each.waiting
            values[f"{prefix}/in_progress"] = each.in_progress
            values[f"{prefix}/failures"] = each.failures
            values[f"{prefix}/restarts"] = each.restarts
        values.update(self._streams())
        values.update(self._queues(status))
        values.update(self._workers())
        values.update(self.metrics.cluster_topics())
        for figure in FIGURES:
            if not figure.load:
                continue
            name, count = figure.load, int(figure.value(status, metrics))
            load = self._loads.setdefault(name, _Load())
            load.update(count, self.interval)
            for minutes, rate in zip(_MINUTES, load.rates):
                values[f"load/{name}/{minutes}min"] = f"{rate:.2f}"
        return {f"$SYS/broker/{topic}": str(value) for topic, value in values.items()}
