"""The shelf: what all sessions of one broker share.

The rule kept here: limits, time and counts come from outside and are the same
for every session; a session that drops something counts it here, by cause.
"""

from __future__ import annotations

from sessions.journal import Journal


class Limits:
    """What one session may hold; counts of entries, sizes in bytes."""

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


class Clock:
    """The time as the caller last told it: ``now`` in µs since the Unix epoch."""

    def __init__(self) -> None:
        self.now = 0


class Tally:
    """What sessions drop, by cause."""

    def __init__(self) -> None:
        self.queue_full = 0
        self.expired = 0
        self.store_failed = 0


class Shelf:
    """What every session of one broker shares."""

    def __init__(self, journal: Journal, limits: Limits) -> None:
        self.journal = journal
        self.limits = limits
        self.clock = Clock()
        self.tally = Tally()
