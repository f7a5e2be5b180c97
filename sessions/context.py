"""State that all sessions of one broker share: journal, limits, clock, counters and the totals of their queues."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sessions.backpressure import BackpressureMonitor
from sessions.delivery import ENTRY_BYTES
from sessions.journal import Journal
from sessions.window import InFlightTotal

# Policies for a message to a full queue.
DROP_NEWEST: Final = 0  # it is dropped
DROP_OLDEST: Final = 1  # the oldest messages of the queue are dropped
REFUSE: Final = 2  # its PUBLISH is refused; dropped if no client sent it

_UNLIMITED: Final = 1 << 60

# Memory in bytes, as measured with the compiled build; texts and payloads come on top.
SESSION_BYTES: Final = 820  # a session without its texts
RECEIVED_ID_BYTES: Final = 80  # a QoS 2 packet id of a client


class SessionLimits:
    """Limits of one session and of all sessions together; counts are messages, sizes are bytes.

    The totals on disk count a message once per persistent session. The total in memory counts every session.
    """

    def __init__(self) -> None:
        self.max_inflight = 65535
        self.max_inflight_unpersisted = 65535
        self.max_queued_messages = _UNLIMITED
        self.max_queued_bytes = _UNLIMITED
        self.max_queue_memory_messages = _UNLIMITED
        self.max_transient_queue_bytes = _UNLIMITED
        self.queue_full = DROP_NEWEST
        self.max_total_queued_messages = _UNLIMITED
        self.max_total_queued_bytes = _UNLIMITED
        self.max_total_queue_memory_bytes = _UNLIMITED
        self.max_total_in_flight_bytes = _UNLIMITED
        self.max_total_session_bytes = _UNLIMITED
        # The high watermark of a connected client's queue; 0 messages = no backpressure.
        self.queue_high_watermark_messages = 0
        self.queue_high_watermark_bytes = _UNLIMITED


class Clock:
    """The current time as set by the owner: ``now`` in µs since the Unix epoch, ``monotonic`` in seconds.

    ``stopped`` is how many of these seconds the process did not run: nothing was read in them.
    """

    def __init__(self) -> None:
        self.now = 0
        self.monotonic = 0.0
        self.stopped = 0.0


class SessionContext:
    """State that all sessions of one broker share."""

    def __init__(self, journal: Journal, limits: SessionLimits) -> None:
        self.journal = journal
        self.limits = limits
        self.clock = Clock()
        self.counters = journal.counters
        self.backpressure_monitor = BackpressureMonitor()
        # The totals limited by `SessionLimits`.
        self.queued_messages = 0
        self.queued_bytes = 0
        self.memory_bytes = 0
        self.memory_entries = 0  # queued messages in memory
        self.in_flight = InFlightTotal()
        self.in_flight.maximum = limits.max_total_in_flight_bytes
        self.will_bytes = 0
        self.session_bytes = 0  # sessions with their texts
        self.received_ids: i64 = 0  # QoS 2 packet ids of all clients
        self.subscription_bytes = 0  # an upper estimate of the memory of all subscriptions
        self.next_expiry = 0  # earliest expiry of a stored entry, µs since the Unix epoch; 0 = none

    def full(self, messages: int, size: int) -> bool:
        """Whether this many more entries, of this many bytes together, would exceed a total on disk."""
        limits = self.limits
        return (
            self.queued_messages + messages > limits.max_total_queued_messages or self.queued_bytes + size > limits.max_total_queued_bytes
        )

    @property
    def queue_memory(self) -> int:
        """Bytes of the queued messages in memory."""
        return self.memory_bytes + self.memory_entries * ENTRY_BYTES

    def memory_full(self, size: int) -> bool:
        """Whether one more queued message of ``size`` bytes would exceed the total in memory."""
        return self.queue_memory + ENTRY_BYTES + size > self.limits.max_total_queue_memory_bytes

    @property
    def session_memory(self) -> int:
        """Bytes of all sessions and of the QoS 2 packet ids of their clients."""
        received: i64 = self.received_ids * RECEIVED_ID_BYTES
        return self.session_bytes + received

    @property
    def sessions_full(self) -> bool:
        """Whether sessions and packet ids take all the memory that they may."""
        return self.session_memory >= self.limits.max_total_session_bytes
