"""The shelf: what all sessions of one broker share.

The rule kept here: limits, time and counts come from outside and are the same
for every session; a session that drops something counts it here, by cause.
"""

from __future__ import annotations

from typing import Final

from sessions.backpressure import BackpressureMonitor
from sessions.journal import Journal

# What a session does with a message that finds its queue full.
DROP_NEWEST: Final = 0  # not take it
DROP_OLDEST: Final = 1  # let go of what waits longest
REFUSE: Final = 2  # have the publisher keep it; where there is none, not take it

_UNLIMITED: Final = 1 << 60


class SessionLimits:
    """What one session may hold, and all together; counts of entries, sizes in bytes.

    The totals count what durable sessions have on disk, a message once for each of
    them, and what waits in memory for any session.
    """

    def __init__(
        self,
        max_inflight: int,
        max_queued_messages: int,
        max_queued_bytes: int,
        max_queue_memory_messages: int,
        max_transient_queue_bytes: int,
    ) -> None:
        self.max_inflight = max_inflight
        self.max_queued_messages = max_queued_messages
        self.max_queued_bytes = max_queued_bytes
        self.max_queue_memory_messages = max_queue_memory_messages
        self.max_transient_queue_bytes = max_transient_queue_bytes
        self.max_inflight_unkept = max_inflight  # of what a session sends and does not keep
        self.queue_full = DROP_NEWEST
        self.max_total_queued_messages = _UNLIMITED
        self.max_total_queued_bytes = _UNLIMITED
        self.max_total_queue_memory_bytes = _UNLIMITED
        # What waits for a connected client before its publishers do; 0 messages = whatever it is.
        self.crowded_queue_messages = 0
        self.crowded_queue_bytes = _UNLIMITED


class Clock:
    """The time as the caller last told it: ``now`` in µs since the Unix epoch."""

    def __init__(self) -> None:
        self.now = 0


class SessionContext:
    """What every session of one broker shares."""

    def __init__(self, journal: Journal, limits: SessionLimits) -> None:
        self.journal = journal
        self.limits = limits
        self.clock = Clock()
        self.counters = journal.counters
        self.backpressure_monitor = BackpressureMonitor()
        # The totals that `SessionLimits` bounds.
        self.queued_messages = 0
        self.queued_bytes = 0
        self.memory_bytes = 0
        self.next_expiry = 0  # when a stored entry may expire next, µs since the Unix epoch; 0 = never

    def full(self, messages: int, size: int) -> bool:
        """Whether so many more entries, of so many bytes together, would pass a total on disk."""
        limits = self.limits
        return (
            self.queued_messages + messages > limits.max_total_queued_messages
            or self.queued_bytes + size > limits.max_total_queued_bytes
        )
