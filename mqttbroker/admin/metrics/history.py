"""The recent past of the broker, for charts: samples of its counters and gauges in memory, which end with the process."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mqttbroker.admin.control.status import StatusReport
from mqttbroker.admin.control.views import BrokerStatus
from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.latency import Histogram

log = logging.getLogger("mqttbroker")

STREAM = "stream/"  # begins the names of the series of streams
MAX_STREAMS = 100  # streams with series of their own: the first ones, by name
_SERIES = 40  # more than the series that are not of streams
_ABSENT = math.nan
_LATENCY = 0.99  # the quantile


class History:
    """A ring of the last ``capacity`` samples: 8 bytes for each value of each series.

    To be used on the event loop's thread.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._added = 0
        self._times = array("d", [_ABSENT]) * capacity
        self._series: dict[str, array[float]] = {}
        self._last: dict[str, int] = {}  # the number of the last sample of each series

    @property
    def max_bytes(self) -> int:
        """The most memory that it takes."""
        return (1 + _SERIES + 2 * MAX_STREAMS) * 8 * self.capacity

    def add(self, now: float, values: Mapping[str, float]) -> None:
        """Add a sample in the place of the oldest one; ``now`` is Unix time in seconds.

        A series begins with its first value, and is gone when the ring has none of it.
        """
        place = self._added % self.capacity
        self._times[place] = round(now, 3)  # as in JSON, so that `since` excludes it
        for name, series in self._series.items():
            series[place] = values.get(name, _ABSENT)
        for name, value in values.items():
            if name not in self._series:
                self._series[name] = array("d", [_ABSENT]) * self.capacity
                self._series[name][place] = value
            self._last[name] = self._added
        self._added += 1
        for name in [name for name, last in self._last.items() if last + self.capacity < self._added]:
            del self._series[name], self._last[name]

    def since(self, after: float) -> Samples:
        """The samples that are later than ``after``."""
        kept = min(self._added, self.capacity)
        count = 0
        while count < kept and self._times[(self._added - 1 - count) % self.capacity] > after:
            count += 1
        return Samples(self._newest(self._times, count), {
            name: self._newest(series, count) for name, series in self._series.items()
        })  # fmt: skip

    def _newest(self, ring: array[float], count: int) -> array[float]:
        if not count:
            return array("d")
        end = (self._added - 1) % self.capacity + 1
        return ring[end - count : end] if count <= end else ring[end - count :] + ring[:end]


class Samples(NamedTuple):
    """Copies of samples, the oldest first: their times, and the values of each series; NaN = a sample has none."""

    times: array[float]
    series: Mapping[str, array[float]]

    def to_json(self) -> dict[str, Any]:
        """The same as lists, with None for NaN; not for the event loop, since it visits each value."""
        series = {name: [_json(value) for value in values] for name, values in self.series.items()}
        return {"times": self.times.tolist(), "series": series}


def _json(value: float) -> float | None:
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else value


class Sampler:
    """Adds samples of one broker to ``history``. To be used on the event loop's thread."""

    def __init__(self, history: History, status: StatusReport, metrics: Metrics) -> None:
        self.history = history
        self._status = status
        self._metrics = metrics
        latency = metrics.latency
        self._quantiles = {
            "commit": _Quantile(latency.commit),
            "acknowledgement": _Quantile(latency.acknowledgement),
            "delivery": _Quantile(latency.delivery),
            "event_loop_lag": _Quantile(latency.loop_lag),
        }

    async def watch(self, interval: float) -> None:
        """Add a sample every ``interval`` seconds until the task is cancelled."""
        while True:
            try:
                self.sample()
            except Exception:
                log.exception("event=defect in=history")  # and go on
            await asyncio.sleep(interval)

    def sample(self) -> None:
        """Add a sample."""
        self.history.add(time.time(), {**self.present(), **dict(self._latencies())})

    def present(self) -> dict[str, float]:
        """The values of now, without latencies, which are measured from one sample to the next."""
        return {**status_values(self._status()), **dict(self._streams())}

    def _latencies(self) -> Iterator[tuple[str, float]]:
        for name, quantile in self._quantiles.items():
            value = quantile.next()
            if value is not None:
                yield f"latency/{name}", value

    def _streams(self) -> Iterator[tuple[str, float]]:
        streams, consumers = self._metrics.streams, self._metrics.consumers
        if streams is None:
            return
        for name in streams.streams()[:MAX_STREAMS]:
            try:
                yield f"{STREAM}{name}/records", streams.stored(name)
            except KeyError:  # it was deleted meanwhile
                continue
            lags = [each.lag for each in (() if consumers is None else consumers.latest) if each.stream == name]
            if lags:
                yield f"{STREAM}{name}/lag", max(lags)


def status_values(status: BrokerStatus) -> dict[str, float]:
    """The counters and gauges of a status that have a series."""
    totals, drops = status.totals, status.drops
    return {
        "publish_received": totals["publish_received"],
        "publish_sent": totals["publish_sent"],
        "bytes_received": totals["bytes_received"],
        "bytes_sent": totals["bytes_sent"],
        "connections": totals["connections"],
        "refused": totals["connections_refused"] + status.logins_failed + status.logins_banned,
        "clients": status.clients_connected,
        "sessions": status.sessions,
        "queued_messages": status.queued_messages,
        "store_pending_bytes": status.store_pending_bytes,
        "memory_resident": status.memory.resident,
        "memory_counted": status.memory.counted,
        **{f"drops/{cause}": count for cause, count in drops.items()},
    }


class _Quantile:
    """The quantile of what a histogram has counted from one call to the next, as far as its buckets tell."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._before: Sequence[float] = ()

    def next(self) -> float | None:
        """The upper bound of the quantile's bucket, or the largest one that is finite; None without a measurement."""
        buckets = self._histogram.cumulative()
        counts = [count for _, count in buckets]
        before, self._before = self._before or [0.0] * len(counts), counts
        increases = [count - earlier for count, earlier in zip(counts, before)]
        if not increases or increases[-1] <= 0:
            return None
        found = next(bound for (bound, _), count in zip(buckets, increases) if count >= _LATENCY * increases[-1])
        return buckets[-2][0] if math.isinf(found) else found
