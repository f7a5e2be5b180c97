"""Histograms of latencies: commits, acknowledgements, deliveries, the event loop, and garbage collections.

Every commit and collection is measured; of the others ten a second are, so that no message costs more.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

from mqttbroker.core.client.outbox import Outbound
from mqttbroker.net.flush import FlushScheduler

INTERVAL: Final = 0.1  # seconds between two samples
BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """Counts of measurements in seconds by `BUCKETS`, and their sum. One thread observes, any may read.

    The metric is ``mqttbroker_<name>_seconds``; ``text`` explains it.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.sum = 0.0
        self._counts = [0] * (len(BUCKETS) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bucket's upper bound, the last one infinite, and how many measurements were not above it."""
        return list(zip((*BUCKETS, math.inf), accumulate(self._counts)))


class Latency:
    """The latencies of one broker, in seconds."""

    def __init__(self) -> None:
        self.commit = Histogram("commit", "Time of a commit in the store and the stream log.")
        self.acknowledgement = Histogram(
            "acknowledgement", "Time from a packet to its acknowledgement, of those that wait for a commit; sampled."
        )
        self.delivery = Histogram("delivery", "Time from the receipt of packets until all that they cause is written to clients; sampled.")
        self.loop_lag = Histogram("event_loop_lag", "Delay of a timer of the event loop; sampled.")
        self.collection = Histogram("gc_pause", "Time of a garbage collection.")
        self.histograms = (self.commit, self.acknowledgement, self.delivery, self.loop_lag, self.collection)
        self._commit_began = 0.0
        self._collection_began = 0.0

    def commit_began(self) -> None:
        """The store was handed a write set; it has one at a time."""
        self._commit_began = time.perf_counter()

    def commit_ended(self) -> None:
        """It is committed, or failed; may be called on another thread."""
        self.commit.observe(time.perf_counter() - self._commit_began)

    def collected(self, phase: str, information: Mapping[str, int]) -> None:
        """For `gc.callbacks`."""
        now = time.perf_counter()
        if phase == "start":
            self._collection_began = now
        else:
            self.collection.observe(now - self._collection_began)

    async def sample(self, scheduler: FlushScheduler, outbound: Outbound) -> None:
        """Take samples on the event loop until the task is cancelled."""
        scheduler.on_sample = self.delivery.observe
        outbound.on_ack_sample = self.acknowledgement.observe
        gc.callbacks.append(self.collected)
        loop = asyncio.get_running_loop()
        try:
            while True:
                due = loop.time() + INTERVAL
                await asyncio.sleep(INTERVAL)
                self.loop_lag.observe(max(0.0, loop.time() - due))
                scheduler.sample_wanted = outbound.ack_sample_wanted = True
        finally:
            gc.callbacks.remove(self.collected)
