"""The throttle: who publishes to a client that cannot follow, and waits for its queue to become shorter.

The rule kept here: a publisher waits for one queue at a time, and never for
longer than ``max_pause``; a client that takes nothing meanwhile is waited for
no more.  There is no clock here: whoever owns one calls `BackpressureMonitor.look`.
"""

from __future__ import annotations

from typing import Any, Dict, Optional


class PausablePublisher:
    """A client that publishes, and may have to wait before more is read from it."""

    def __init__(self) -> None:
        self.paused_by: Optional[Backpressure] = None

    def go_on(self) -> None:
        """It need not wait any more."""


class BackpressureMonitor:
    """All throttles that hold somebody."""

    def __init__(self) -> None:
        self.max_pause = 0.1  # seconds
        self.active: Dict[Backpressure, bool] = {}  # true for those that were at the last look
        self.waiting = 0  # publishers held now
        self.waits = 0  # times that one was
        # Called when the first throttle holds somebody; the owner then looks twice per patience until none does.
        self.wake: Any = None

    def look(self) -> None:
        """Let those go on that have waited since before the last look."""
        for backpressure, seen in list(self.active.items()):
            if seen:
                backpressure.lose_patience()
            else:
                self.active[backpressure] = True


class Backpressure:
    """The publishers that wait for one client's queue."""

    def __init__(self, backpressure_monitor: BackpressureMonitor) -> None:
        self.backpressure_monitor = backpressure_monitor
        self.feeders: Dict[PausablePublisher, bool] = {}
        self.moving = False  # the client took something since the first of them waits
        self.given_up = False  # it did not: nobody waits for it until its queue is short

    def hold(self, feeder: PausablePublisher) -> None:
        """Have a publisher wait that does not yet; its `PausablePublisher.go_on` follows unless it leaves."""
        backpressure_monitor = self.backpressure_monitor
        if not self.feeders:
            self.moving = False
            backpressure_monitor.active[self] = False
            if len(backpressure_monitor.active) == 1 and backpressure_monitor.wake is not None:
                backpressure_monitor.wake()
        self.feeders[feeder] = True
        feeder.paused_by = self
        backpressure_monitor.waiting += 1
        backpressure_monitor.waits += 1

    def forget(self, feeder: PausablePublisher) -> None:
        """One of them has left."""
        feeder.paused_by = None
        del self.feeders[feeder]
        self.backpressure_monitor.waiting -= 1
        if not self.feeders:
            del self.backpressure_monitor.active[self]

    def lose_patience(self) -> None:
        self.given_up = not self.moving
        self.release()

    def release(self) -> None:
        """Let all of them go on."""
        feeders = self.feeders
        if feeders:
            self.feeders = {}
            self.backpressure_monitor.waiting -= len(feeders)
            del self.backpressure_monitor.active[self]
            for feeder in feeders:
                feeder.paused_by = None
                feeder.go_on()
