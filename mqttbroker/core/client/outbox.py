"""The outbox: the bytes queued for one client, and their number.

There is no socket here. `FlushScheduler` drains the outbox and writes the bytes; asyncio's ``pause_writing`` and
``resume_writing`` arrive as `pause` and `resume`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import i64

from mqttbroker.codec.reason_codes import QUOTA_EXCEEDED
from mqttbroker.core.access.denials import Denials
from mqttbroker.core.client.incomplete_packets import IncompletePackets
from mqttbroker.core.terms.rates import Throttle
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.context import SessionContext
from sessions.journal import Journal

if TYPE_CHECKING:
    from mqttbroker.core.client.connection import Connection

PART_BYTES: Final = 40  # memory of a packet in an outbox beside its bytes
LARGE_PART: Final = 65_536  # bytes; parts of this size are written as they are, shorter ones are joined first


class Outbound:
    """State that all connections of one broker share: the clock, the counters, the terms, and the connections to flush.

    ``max_backlog`` is the high-water mark of each outbox in bytes, ``max_blocked`` that of the outboxes of all clients
    whose socket is blocked, ``max_incomplete`` the limit of `IncompletePackets`. ``max_acks`` is the number of
    acknowledgements that a connection may have waiting before no more is read from it.
    """

    def __init__(
        self,
        context: SessionContext,
        terms: BrokerTerms,
        max_backlog: int,
        max_blocked: int,
        max_incomplete: int,
        max_acks: int,
    ) -> None:
        self.clock = context.clock
        self.counters = context.counters
        self.terms = terms
        self._journal: Journal = context.journal
        self.max_backlog: i64 = max_backlog
        self.max_blocked: i64 = max_blocked
        self.max_acks: i64 = max_acks
        self.blocked_bytes: i64 = 0  # in outboxes and socket buffers of all clients whose socket is blocked
        self.linked_bytes: i64 = 0  # written to connection workers, which have not sent them
        self.incomplete = IncompletePackets(max_incomplete)
        self.shedding = False  # memory is nearly used up: `max_blocked` is 0
        self.secure_connections: i64 = 0  # open connections with TLS
        self.websocket_connections: i64 = 0
        self.connect_bytes: i64 = 0  # CONNECT packets that wait for an answer
        self.alias_bytes: i64 = 0  # topics of topic aliases, of all clients and in both directions
        self.decision_bytes: i64 = 0  # memory of the decisions in `Connection.may_publish` of all connections
        self.denials = Denials(context.clock)
        self.flush_queue: list[Connection] = []
        self.on_flush_needed: Any = None  # called when the first connection enters an empty `flush_queue`
        # One acknowledgement that waits for a commit is timed when `ack_sample_wanted`.
        self.ack_sample_wanted = False
        self.on_ack_sample: Any = None  # called with the seconds that it took
        self.sampled_ack: Any = None
        self.ack_sampled_from = 0.0  # monotonic time
        self.store_failure = QUOTA_EXCEEDED  # reason code of the last failed commit

    @property
    def backlogged(self) -> bool:
        """Whether the journal exceeds its limit; until the store catches up, no client is read."""
        return self._journal.size > self.terms.max_pending_write_bytes


class Outbox:
    """Packets in parts, in the order in which they leave.

    ``backlog`` counts the bytes of PUBLISH packets since the last complete drain. While ``carried_over`` it counts
    the other packets, too, so that it is the number of unsent bytes. `Outbound.max_backlog` is its high-water mark.
    """

    def __init__(self, outbound: Outbound) -> None:
        self.outbound = outbound
        self.parts: list[bytes] = []
        self.backlog: i64 = 0
        self.control_bytes: i64 = 0  # bytes of packets other than PUBLISH, queued while `carried_over`
        self.largest_overflow: i64 = 0  # bytes of the largest PUBLISH that exceeded the high-water mark
        self.first_part_sent: i64 = 0  # bytes of the first part that have left
        self.bytes_sent: i64 = 0
        self.publish_sent: i64 = 0  # PUBLISH packets, with those that still wait here
        # Flags stand side by side, so that a compiled object has no gaps.
        self.writing_paused = False  # the socket's buffer is full
        self.restricted = False  # `writing_paused`, or there is a `throttle` or a limit of its own
        self.carried_over = False  # not everything that was queued before the last flush has left
        self.has_large_part = False
        self.throttle: Throttle | None = None  # the rates at which the client may be sent PUBLISH packets
        self.blocked_bytes: i64 = 0  # part of `Outbound.blocked_bytes`
        self._limit: i64 = 0  # bytes; see `limit_to`

    def limit_to(self, size: i64) -> None:
        """Let `is_blocked` permit a PUBLISH if no more than ``size`` bytes then wait here, or it is the only one, and none while the
        socket's buffer is full. The sockets' buffers and outboxes of others do not count."""
        self._limit = size
        self.restricted = True

    def pause(self, buffered: int = 0) -> None:
        """The socket's buffer is full; it holds ``buffered`` bytes that the system has not taken."""
        if not self.writing_paused:
            self.writing_paused = True
            self.restricted = True
            self._count_blocked(self.backlog + buffered)
        self.carried_over = True

    def resume(self) -> None:
        """The socket's buffer has room again."""
        self.writing_paused = False
        self.restricted = self.throttle is not None or self._limit > 0
        self._count_blocked(-self.blocked_bytes)

    def _count_blocked(self, size: i64) -> None:
        self.blocked_bytes += size
        self.outbound.blocked_bytes += size

    def count_control(self, size: i64) -> None:
        """Count a packet other than PUBLISH, which the caller adds to `parts`."""
        if self.carried_over:
            self.control_bytes += size
            self.backlog += size
            if self.writing_paused:
                self._count_blocked(size + PART_BYTES)

    def count_publish(self, size: i64) -> bool:
        """Count a PUBLISH, which the caller adds to `parts`; true if the session is to queue the next ones: the
        backlog, or that of all clients whose socket is blocked, is above the high-water mark, or the client is sent
        more than its rate."""
        backlog: i64 = self.backlog + size
        self.backlog = backlog
        self.publish_sent += 1
        if size >= LARGE_PART:
            self.has_large_part = True
        if self.restricted and self._is_full_with(size):
            return True
        if backlog <= self.outbound.max_backlog:
            return False
        if size > self.largest_overflow:
            self.largest_overflow = size
        return True

    def _is_full_with(self, size: i64) -> bool:
        """Count a PUBLISH to a client that does not read or has a rate; true if it is to get no more now."""
        full = False
        if self.writing_paused:
            self._count_blocked(size + PART_BYTES)
            full = self.outbound.blocked_bytes > self.outbound.max_blocked
        if self.throttle is not None and self.throttle.count(1, size, self.outbound.clock.monotonic) > 0.0:
            full = True
        return full

    def is_blocked(self, size: i64) -> bool:
        """Whether the client does not read, and a PUBLISH of ``size`` bytes exceeds what may wait for it."""
        if self._limit > 0:
            return self.writing_paused or (self.backlog > 0 and self.backlog + size > self._limit)
        outbound = self.outbound
        return self.writing_paused and (self.backlog + size > outbound.max_backlog or outbound.blocked_bytes + size > outbound.max_blocked)

    def exceeds_rate(self) -> bool:
        """Whether the client is sent as much as its rates permit."""
        return self.throttle is not None and self.throttle.wait(self.outbound.clock.monotonic) > 0.0

    @property
    def excess(self) -> i64:
        """Bytes to drain now: those beyond `Outbound.max_backlog` and the largest PUBLISH that exceeded it."""
        return self.backlog - self.outbound.max_backlog - self.largest_overflow

    def drain(self) -> bytes:
        """Remove and return all bytes."""
        parts = self.parts
        if self.first_part_sent:
            parts[0] = parts[0][self.first_part_sent :]
        data: bytes = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self.outbound.counters.bytes_sent += len(data)
        self.bytes_sent += len(data)
        self._reset()
        return data

    def drain_parts(self, limit: i64) -> list[Any]:
        """Remove and return about ``limit`` bytes, or all. Large parts are not copied, shorter ones are joined."""
        parts = self.parts
        drained: list[Any] = []
        short: list[bytes] = []
        room: i64 = limit
        count: i64 = 0
        while room > 0 and count < len(parts):
            part = parts[count]
            unsent: i64 = len(part) - self.first_part_sent
            if len(part) < LARGE_PART:
                short.append(part)
            else:
                if short:
                    drained.append(b"".join(short))
                    short.clear()
                if unsent > room:
                    drained.append(memoryview(part)[self.first_part_sent : self.first_part_sent + room])
                    self.first_part_sent += room
                    room = 0
                    break
                drained.append(memoryview(part)[self.first_part_sent :] if self.first_part_sent else part)
                self.first_part_sent = 0
            room -= unsent
            count += 1
        if short:
            drained.append(b"".join(short))
        del parts[:count]
        size: i64 = limit - room
        self.outbound.counters.bytes_sent += size
        self.bytes_sent += size
        if parts:
            self.backlog = max(0, self.backlog - size)
            self.carried_over = True
        else:
            self._reset()
        return drained

    def clear(self) -> None:
        """Discard everything: the socket is closed."""
        self.parts.clear()
        self._reset()
        self._count_blocked(-self.blocked_bytes)

    def _reset(self) -> None:
        self.first_part_sent = 0
        self.backlog = 0
        self.control_bytes = 0
        self.largest_overflow = 0
        self.carried_over = False
        self.has_large_part = False
