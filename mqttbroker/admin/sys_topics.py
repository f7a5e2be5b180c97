"""``$SYS``: what the broker says of itself, under Mosquitto's names, units and formats.

The rule kept here: values are retained, are published anew only when they
changed (as Mosquitto does), and never reach the store or a ``#`` subscription
[MQTT-4.7.2-1].
"""

from __future__ import annotations

import math

from mqttbroker import __version__
from mqttbroker.admin.metrics import Metrics

_MINUTES = (1, 5, 15)


class _Load:
    """Counts per minute, averaged over 1, 5 and 15 minutes as Mosquitto does it."""

    def __init__(self) -> None:
        self.last = 0
        self.rates = [0.0, 0.0, 0.0]

    def update(self, count: int, seconds: float) -> None:
        per_minute = (count - self.last) * 60.0 / seconds
        self.last = count
        for index, minutes in enumerate(_MINUTES):
            keep = math.exp(-seconds / (60.0 * minutes))
            self.rates[index] = per_minute + keep * (self.rates[index] - per_minute)


class SysTopics:
    """Publishes ``$SYS/broker/…``; call `publish` every ``interval`` seconds."""

    def __init__(self, metrics: Metrics, interval: float) -> None:
        self.metrics = metrics
        self.interval = interval
        self._published: dict[str, str] = {}
        self._loads: dict[str, _Load] = {}

    def publish(self) -> None:
        """Publish what changed."""
        for topic, value in self.values().items():
            if self._published.get(topic) != value:
                self._published[topic] = value
                self.metrics.broker.publisher.publish_own(topic, value.encode("utf-8"), True)

    def _streams(self) -> dict[str, object]:
        """Of each stream how many consumers it has, how many are at risk, and the largest lag."""
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

    def values(self) -> dict[str, str]:
        """All topics with their values."""
        broker = self.metrics.broker
        counters = broker.outbound.counters
        clients = broker.clients
        total = len(broker.registry)
        values: dict[str, object] = {
            "version": f"mqttbroker version {__version__}",
            "uptime": f"{int(self.metrics.uptime)} seconds",
            "clients/total": total,
            "clients/connected": clients.connected,
            "clients/active": clients.connected,
            "clients/disconnected": total - clients.connected,
            "clients/inactive": total - clients.connected,
            "clients/maximum": clients.connected_maximum,
            "clients/expired": broker.lifecycle.expired,
            "messages/received": counters.messages_received,
            "messages/sent": counters.messages_sent,
            "messages/stored": len(broker.retained),
            "store/durability": broker.terms.durability,
            "store/set_aside": self.metrics.set_aside,
            "store/messages/count": len(broker.retained),
            "store/messages/bytes": broker.retained.size,
            "queued/messages/count": broker.context.queued_messages,
            "queued/messages/bytes": broker.context.queued_bytes,
            "publishers/waiting": broker.context.backpressure_monitor.paused,
            "publishers/waits": broker.context.backpressure_monitor.pauses,
            "bytes/received": counters.bytes_received,
            "bytes/sent": counters.bytes_sent,
            "publish/messages/received": counters.publish_received,
            "publish/messages/sent": counters.publish_sent,
            "publish/messages/dropped": sum(self.metrics.drops().values()),
            "publish/bytes/received": counters.publish_bytes_received,
            "publish/bytes/sent": counters.publish_bytes_sent,
            "subscriptions/count": broker.router.subscriptions,
            "shared_subscriptions/count": len(broker.router.groups),
            "retained messages/count": len(broker.retained),
        }
        if self.metrics.streams is not None:
            values["streams/sealed/segments"] = self.metrics.streams.sealed_segments
            values["streams/sealed/bytes_saved"] = self.metrics.streams.sealed_bytes_saved
            values["streams/sealed/failures"] = self.metrics.streams.sealing_failures
        for cause, count in self.metrics.drops().items():
            values[f"publish/messages/dropped/{cause}"] = count
        values.update(self._streams())
        loads = {
            "messages/received": counters.messages_received,
            "messages/sent": counters.messages_sent,
            "bytes/received": counters.bytes_received,
            "bytes/sent": counters.bytes_sent,
            "publish/received": counters.publish_received,
            "publish/sent": counters.publish_sent,
            "connections": counters.connections,
        }
        for name, count in loads.items():
            load = self._loads.setdefault(name, _Load())
            load.update(count, self.interval)
            for minutes, rate in zip(_MINUTES, load.rates):
                values[f"load/{name}/{minutes}min"] = f"{rate:.2f}"
        return {f"$SYS/broker/{topic}": str(value) for topic, value in values.items()}
