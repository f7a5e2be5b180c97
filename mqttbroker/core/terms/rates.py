"""Rates: of connects, and of messages and bytes of single clients and of clients that share a limit.

Times are monotonic, in seconds; a limit of 0 is none.
"""

from __future__ import annotations

from typing import Any, Final

MAX_KEYS: Final = 65_536  # with remembered connects; the one that connected longest ago is forgotten first
CONNECT_BURST: Final = 10.0  # seconds of connects at the permitted rate that may come at once
BURST: Final = 1.0  # seconds of messages or bytes at the permitted rate that may pass at once


class ConnectRates:
    """The connects by key, such as an address. At most `MAX_KEYS` are remembered."""

    def __init__(self) -> None:
        self.due: dict[str, float] = {}  # when the bucket of connects is full again; the last one to connect is last

    def connect(self, key: str, rate: int, now: float) -> bool:
        """Count a connect; false if there were more than ``rate`` per second."""
        due = self.due
        # Each call forgets up to two keys whose buckets are full, so the table shrinks while others connect.
        self._forget(now)
        self._forget(now)
        at: float = max(due.pop(key, now), now)
        admitted = at + 1.0 / rate - now <= CONNECT_BURST
        due[key] = at + 1.0 / rate if admitted else at
        if len(due) > MAX_KEYS:
            del due[next(iter(due))]
        return admitted

    def _forget(self, now: float) -> None:
        for key in self.due:
            if self.due[key] <= now:
                del self.due[key]
            return


class Rate:
    """The messages and bytes per second of all that count in it.

    ``message_limit`` and ``byte_limit`` are the names of the limits.
    """

    def __init__(self, message_limit: str, byte_limit: str) -> None:
        self.message_limit = message_limit
        self.byte_limit = byte_limit
        self._message_time = 0.0
        self._byte_time = 0.0
        self._messages_due = 0.0
        self._bytes_due = 0.0

    def limit(self, messages: int, size: int) -> None:
        """Set the limits: messages and bytes per second."""
        self._message_time = 1.0 / messages if messages else 0.0
        self._byte_time = 1.0 / size if size else 0.0
        if not messages:
            self._messages_due = 0.0
        if not size:
            self._bytes_due = 0.0

    @property
    def limited(self) -> bool:
        return self._message_time > 0.0 or self._byte_time > 0.0

    def count(self, messages: int, size: int, now: float) -> None:
        if messages and self._message_time > 0.0:
            self._messages_due = max(self._messages_due, now) + self._message_time * messages
        if self._byte_time > 0.0:
            self._bytes_due = max(self._bytes_due, now) + self._byte_time * size

    def wait(self, now: float) -> float:
        """Seconds until more may pass; at most 0 if it may pass now."""
        return max(self._messages_due, self._bytes_due) - BURST - now

    @property
    def reached(self) -> str:
        """The name of the limit that causes the wait."""
        return self.message_limit if self._messages_due > self._bytes_due else self.byte_limit


class Throttle:
    """The rates that apply to one client in one direction."""

    def __init__(self) -> None:
        self.rates: list[Rate] = []
        self.timer: Any = None  # of the client's wire, while the client waits

    def count(self, messages: int, size: int, now: float) -> float:
        """Count messages and bytes; returns `wait`."""
        for rate in self.rates:
            rate.count(messages, size, now)
        return self.wait(now)

    def wait(self, now: float) -> float:
        """Seconds until all rates permit more; at most 0 if they do now."""
        longest = -1.0
        for rate in self.rates:
            seconds = rate.wait(now)
            if seconds > longest:
                longest = seconds
        return longest

    def reached(self, now: float) -> str:
        """The name of the limit that causes the longest wait."""
        longest = self.rates[0]
        for rate in self.rates:
            if rate.wait(now) > longest.wait(now):
                longest = rate
        return longest.reached
