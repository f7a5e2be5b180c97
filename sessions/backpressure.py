"""The throttle: who publishes to a client that cannot follow, and waits for its queue to become shorter.

The rule kept here: a publisher waits for one queue at a time, and never for
longer than ``patience``; a client that takes nothing meanwhile is waited for
no more.  There is no clock here: whoever owns one calls `Throttles.look`.
"""

from __future__ import annotations

from typing import Any, Dict, Optional


class Feeder:
    """A client that publishes, and may have to wait before more is read from it."""

    def __init__(self) -> None:
        self.held_by: Optional[Throttle] = None

    def go_on(self) -> None:
        """It need not wait any more."""


class Throttles:
    """All throttles that hold somebody."""

    def __init__(self) -> None:
        self.patience = 0.1  # seconds
        self.active: Dict[Throttle, bool] = {}  # true for those that were at the last look
        self.waiting = 0  # publishers held now
        self.waits = 0  # times that one was
        # Called when the first throttle holds somebody; the owner then looks twice per patience until none does.
        self.wake: Any = None

    def look(self) -> None:
        """Let those go on that have waited since before the last look."""
        for throttle, seen in list(self.active.items()):
            if seen:
                throttle.lose_patience()
            else:
                self.active[throttle] = True


class Throttle:
    """The publishers that wait for one client's queue."""

    def __init__(self, throttles: Throttles) -> None:
        self.throttles = throttles
        self.feeders: Dict[Feeder, bool] = {}
        self.moving = False  # the client took something since the first of them waits
        self.given_up = False  # it did not: nobody waits for it until its queue is short

    def hold(self, feeder: Feeder) -> None:
        """Have a publisher wait that does not yet; its `Feeder.go_on` follows unless it leaves."""
        throttles = self.throttles
        if not self.feeders:
            self.moving = False
            throttles.active[self] = False
            if len(throttles.active) == 1 and throttles.wake is not None:
                throttles.wake()
        self.feeders[feeder] = True
        feeder.held_by = self
        throttles.waiting += 1
        throttles.waits += 1

    def forget(self, feeder: Feeder) -> None:
        """One of them has left."""
        feeder.held_by = None
        del self.feeders[feeder]
        self.throttles.waiting -= 1
        if not self.feeders:
            del self.throttles.active[self]

    def lose_patience(self) -> None:
        self.given_up = not self.moving
        self.release()

    def release(self) -> None:
        """Let all of them go on."""
        feeders = self.feeders
        if feeders:
            self.feeders = {}
            self.throttles.waiting -= len(feeders)
            del self.throttles.active[self]
            for feeder in feeders:
                feeder.held_by = None
                feeder.go_on()
