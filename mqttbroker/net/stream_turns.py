"""The turns of the consumers of streams: a bounded time in each event-loop iteration, behind what other clients get."""

from __future__ import annotations

import time
from typing import Final

from mypy_extensions import i64

from mqttbroker.core.streams.consumer import StreamConsumers
from sessions.counters import Counters

STREAM_TIME: Final = 0.00005  # seconds per event-loop iteration for the consumers of streams
IDLE_STREAM_TIME: Final = 0.00025  # the same while no client publishes
IDLE_AFTER: Final = 64  # iterations without a PUBLISH from any client
STREAM_PART: Final = 32  # records, or KiB, between two readings of the clock


class StreamTurns:
    """Has the consumers of streams send, for a longer time while no client publishes."""

    def __init__(self, consumers: StreamConsumers, counters: Counters) -> None:
        self._consumers = consumers
        self._counters = counters
        self._published: i64 = 0  # messages received before the last turn
        self._idle: i64 = 0  # turns since a message was received

    def step(self) -> bool:
        """Have a consumer send for a while: the next flush writes it. Whether there is more to send."""
        consumers = self._consumers
        published: i64 = self._counters.publish_received
        self._idle = self._idle + 1 if published == self._published else 0
        self._published = published
        until = time.monotonic() + (IDLE_STREAM_TIME if self._idle > IDLE_AFTER else STREAM_TIME)
        while consumers.step(STREAM_PART):
            if time.monotonic() >= until:
                consumers.end_turn()
                break
        return consumers.active
