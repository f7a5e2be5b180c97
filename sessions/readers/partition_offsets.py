"""The offsets of one reader in one partition: which messages were handed over, and which of them are acknowledged.

A row has them in the store. Offsets are reserved there before they are handed over, so that after a crash every
message that may have been delivered before is known, and marked.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from heapq import heapify, heappop, heappush
from typing import Final

from mypy_extensions import mypyc_attr

from sessions.rows import OffsetsRow

RESERVED: Final = 1024  # offsets that one row reserves beyond `position`
_RUN: Final = struct.Struct("<QQQ")


@mypyc_attr(allow_interpreted_subclasses=True)
class OffsetsUser:
    """The owner of a partition's offsets, which learns of commits."""

    @abstractmethod
    def reserved(self, offsets: PartitionOffsets) -> None:
        """`PartitionOffsets.next_wanted` may be handed over, after the user had to wait for it."""

    @abstractmethod
    def refused(self, offsets: PartitionOffsets) -> None:
        """The commit failed that had messages in a session's queue: they are to be handed over again."""


class PartitionOffsets:
    """How far a reader is in one partition.

    Offsets from ``position`` on were never handed over, except that those before ``uncertain_end`` may have been before
    a crash. ``pending`` has the offsets that were handed over and are not acknowledged, ascending, each with the number
    of times that it was handed over. ``handed_over_limit`` is the end of the offsets that are reserved on disk: none
    from there on may be handed over.
    """

    def __init__(self, reader_id: int, partition: int, position: int) -> None:
        self.reader_id = reader_id
        self.partition = partition
        self.position = position
        self.uncertain_end = position
        self.pending: dict[int, int] = {}
        self.handed_over_limit = position
        self.changed = False  # the batch that gathers will have the row
        self.user: OffsetsUser | None = None
        self.waiting = False  # `OffsetsUser.reserved` is to be called
        self._queued: list[int] = []  # put into the queue of a session by the batch that gathers
        self._written: list[int] = []  # likewise, by the batch with the writer
        self._returned: list[int] = []  # a heap: those of `pending` that are to be handed over again

    @property
    def committed(self) -> int:
        """The lowest offset that is not acknowledged."""
        for offset in self.pending:
            return offset
        return self.position

    @property
    def in_flight(self) -> int:
        """The number of messages that a member has and has not acknowledged."""
        return len(self.pending) - len(self._returned)

    @property
    def returned(self) -> int:
        """The number of messages that wait to be handed over again."""
        return len(self._returned)

    @property
    def next_wanted(self) -> int:
        """The offset to hand over next: the lowest that was returned, or `position`."""
        return self._returned[0] if self._returned else self.position

    @property
    def needs_reservation(self) -> bool:
        """Whether the row is to be stored soon, lest the reader has to wait for a commit."""
        return self.position + RESERVED // 2 > self.handed_over_limit

    def may_hand_over(self, offset: int) -> bool:
        """Whether this offset, which is `next_wanted` or behind it, is reserved."""
        return offset < self.handed_over_limit

    def deliveries(self, offset: int) -> int:
        """How often a message was handed over, as far as is known."""
        return self.pending.get(offset, 1 if self.position <= offset < self.uncertain_end else 0)

    def certain_deliveries(self, offset: int) -> int:
        """How often a message was handed over at least: `deliveries` without what may have been before a crash."""
        return self.pending.get(offset, 0)

    def hand_over(self, offset: int) -> int:
        """A message is sent to a client; returns how often it may have been handed over before.

        The offset is `next_wanted`; those before it that are not wanted were left out.
        """
        if self._returned and offset == self._returned[0]:
            heappop(self._returned)
            before = self.pending[offset]
        else:
            before = self.deliveries(offset)
            self.position = offset + 1
        self.pending[offset] = before + 1
        return before

    def leave_out(self, end: int) -> None:
        """No offset from `next_wanted` up to ``end`` is to be handed over: the log lacks it, or the filter its topic."""
        returned = self._returned
        while returned and returned[0] < end:
            offset = heappop(returned)
            del self.pending[offset]
        if not returned and self.position < end:
            self.position = end

    def put_into_queue(self, offset: int) -> None:
        """The message of `next_wanted` is in the queue of a session, which is stored with the row: it is done with."""
        self.hand_over(offset)
        del self.pending[offset]
        self._queued.append(offset)

    def acknowledge(self, offset: int) -> None:
        """A message in flight was processed."""
        del self.pending[offset]

    def give_back(self, offset: int) -> None:
        """A message in flight will not be acknowledged: it is to be handed over again."""
        heappush(self._returned, offset)

    def give_back_all(self) -> None:
        """No member will acknowledge any pending message."""
        self._returned = list(self.pending)
        heapify(self._returned)

    def reset(self, position: int) -> None:
        """Forget everything, and continue at an offset: what is handed over again counts as new."""
        self.position = position
        self.uncertain_end = position
        self.handed_over_limit = position
        self.pending = {}
        self._returned = []
        self._queued = []
        self._written = []
        self.waiting = False

    # -- the row ------------------------------------------------------------

    def row(self) -> OffsetsRow:
        """The row to store now; `stored` takes it when it is on disk, `not_stored` if it never will be."""
        self._written, self._queued = self._queued, []
        reserved = max(self.position + RESERVED, self.uncertain_end)
        return OffsetsRow(self.reader_id, self.partition, self.position, reserved, self._runs())

    def stored(self, row: OffsetsRow) -> None:
        """A row is on disk. One of before a `reset` reserves nothing."""
        if row.position <= self.position:
            self.handed_over_limit = max(self.handed_over_limit, row.reserved)
        self._written = []
        user = self.user
        if self.waiting and user is not None and self.may_hand_over(self.next_wanted):
            self.waiting = False
            user.reserved(self)

    def not_stored(self) -> None:
        """The commit of the last `row` failed, and with it the queues of sessions."""
        lost = self._written
        self._written = []
        if lost:
            for offset in lost:
                self.pending[offset] = 1
                heappush(self._returned, offset)
            self.pending = dict(sorted(self.pending.items()))
            if self.user is not None:
                self.user.refused(self)

    def _runs(self) -> bytes:
        """`pending` as runs of consecutive offsets with the same number of deliveries: first, length, deliveries."""
        parts: list[bytes] = []
        first: int = -1
        length: int = 0
        times: int = 0
        for offset, deliveries in self.pending.items():
            if offset == first + length and deliveries == times:
                length += 1
                continue
            if length:
                parts.append(_RUN.pack(first, length, times))
            first, length, times = offset, 1, deliveries
        if length:
            parts.append(_RUN.pack(first, length, times))
        return b"".join(parts)


def offsets_from_row(row: OffsetsRow) -> PartitionOffsets:
    """The offsets as of a row: all that is pending is to be handed over again.

    Raises `ValueError` if the row is not one that `PartitionOffsets.row` made.
    """
    offsets = PartitionOffsets(row.reader_id, row.partition, row.position)
    if len(row.pending) % _RUN.size:
        raise ValueError(f"{len(row.pending)} bytes of pending offsets")
    end: int = 0
    for first, length, times in _RUN.iter_unpack(row.pending):
        if first < end or first + length > row.position or times < 1:
            raise ValueError(f"pending offsets {first} to {first + length} out of order")
        end = first + length
        for offset in range(first, end):
            offsets.pending[offset] = times
    offsets.uncertain_end = max(row.reserved, row.position)
    offsets.handed_over_limit = offsets.uncertain_end
    offsets.give_back_all()
    return offsets
