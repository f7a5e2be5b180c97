"""Backpressure: publishers are paused while the queue of a subscriber is above its high watermark.

A publisher waits for one queue at a time, and for at most `BackpressureMonitor.max_pause` seconds. A subscriber that
acknowledges nothing during a pause pauses no publisher again until its queue is short. There is no clock here: the
owner of the monitor calls `BackpressureMonitor.check`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class PausablePublisher:
    """A publisher whose socket is not read while `paused_by` is set."""

    def __init__(self) -> None:
        self.paused_by: Backpressure | None = None

    @abstractmethod
    def resume_reading(self) -> None:
        """Called when the pause is over."""


class BackpressureMonitor:
    """All subscribers that pause publishers, and the time limit of the pauses."""

    def __init__(self) -> None:
        self.max_pause = 0.1  # seconds
        self.active: dict[Backpressure, bool] = {}  # True if the last `check` has seen it
        self.paused = 0  # publishers paused now
        self.pauses = 0  # pauses since the start
        # Called when `active` gets its first entry; from then on the owner calls `check` twice per `max_pause` until
        # `active` is empty.
        self.wake: Any = None

    def check(self) -> None:
        """End the pauses that began before the last check."""
        for backpressure, seen in list(self.active.items()):
            if seen:
                backpressure.expire()
            else:
                self.active[backpressure] = True


class Backpressure:
    """The publishers paused by one subscriber."""

    def __init__(self, monitor: BackpressureMonitor) -> None:
        self.monitor = monitor
        self.publishers: dict[PausablePublisher, bool] = {}
        self.progressed = False  # the subscriber took a message since the first pause began
        self.suspended = False  # it did not: it pauses no publisher until its queue is short

    def pause(self, publisher: PausablePublisher) -> None:
        """Pause a publisher that is not paused. Its `resume_reading` is called unless `remove` comes first."""
        monitor = self.monitor
        if not self.publishers:
            self.progressed = False
            monitor.active[self] = False
            if len(monitor.active) == 1 and monitor.wake is not None:
                monitor.wake()
        self.publishers[publisher] = True
        publisher.paused_by = self
        monitor.paused += 1
        monitor.pauses += 1

    def remove(self, publisher: PausablePublisher) -> None:
        """The publisher's connection is closed."""
        publisher.paused_by = None
        del self.publishers[publisher]
        self.monitor.paused -= 1
        if not self.publishers:
            del self.monitor.active[self]

    def expire(self) -> None:
        """The pauses reached their time limit."""
        self.suspended = not self.progressed
        self.release()

    def release(self) -> None:
        """Resume all paused publishers."""
        publishers = self.publishers
        if publishers:
            self.publishers = {}
            self.monitor.paused -= len(publishers)
            del self.monitor.active[self]
            for publisher in publishers:
                publisher.paused_by = None
                publisher.resume_reading()
