"""The keep alive of a connection to a remote broker."""

from __future__ import annotations


class KeepAlive:
    """Tells when PINGREQ is due. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self.interval = 0.0  # 0.0 = none
        self._last_sent = 0.0
        self._last_received = 0.0
        self._waiting = False  # for an answer to PINGREQ

    def start(self, now: float) -> None:
        self._last_sent = self._last_received = now

    def sent(self, now: float) -> None:
        self._last_sent = now

    def received(self, now: float) -> None:
        self._last_received = now
        self._waiting = False

    def stopped(self, seconds: float) -> None:
        """The process did not run for so long: what was received meanwhile may not be read yet."""
        self._last_received += seconds

    def is_lost(self, now: float) -> bool:
        """Whether PINGREQ has had no answer for too long."""
        return self._waiting and now - self._last_received > self.interval * 1.5

    def ping_is_due(self, now: float) -> bool:
        """Whether PINGREQ must be sent now; if so, it counts as sent."""
        if self.interval <= 0.0:
            return False
        silent = now - self._last_received >= self.interval and not self._waiting
        due = silent or now - self._last_sent >= self.interval * 0.75
        self._waiting = self._waiting or due
        return due
