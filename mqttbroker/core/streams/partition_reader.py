"""Reads one partition of a stream for one consumer, row by row, chunk by chunk.

Offsets come in order and once each. At the end of the partition the reader waits for the next commit, and then asks for
what follows: so there is no difference between the past and live messages.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

import google_crc32c
from mypy_extensions import i64

from mqttbroker.core.streams.chunk import Chunk, ChunkRows, DamagedChunk
from mqttbroker.core.streams.chunk_reads import (
    EXPIRED,
    FAILED,
    MOVED,
    NOTHING,
    READ,
    UNAVAILABLE,
    ChunkReads,
    ChunkUser,
    ReadRequest,
)
from sessions.readers.partition_offsets import PartitionOffsets

_checksum: Final[Any] = google_crc32c.value


class ReaderOwner:
    """The owner of a `PartitionReader`."""

    @abstractmethod
    def has_rows(self, reader: PartitionReader) -> None:
        """The reader has rows, or can ask for some; `step` is to be called."""

    @abstractmethod
    def resume(self, reader: PartitionReader) -> None:
        """A row that had to wait for a commit may be sent."""

    @abstractmethod
    def expired(self, reader: PartitionReader, offset: int) -> None:
        """The offset that was to be read next is not in the log any more: the reader continues at another."""

    @abstractmethod
    def damaged(self, reader: PartitionReader, offset: int, end: int, reason: str) -> None:
        """The records from ``offset`` up to ``end``, 0 if that is not known, cannot be read. The reader has stopped;
        `skip_damage` continues behind them."""

    @abstractmethod
    def failed(self, reader: PartitionReader, reason: str) -> None:
        """The reader has stopped: the records cannot be read now, or it cannot tell where to continue. `seek` tries
        again."""


class PartitionReader(ChunkUser):
    """The place of a consumer in one partition. ``next_offset`` is the first offset that was not taken.

    `peek` returns the rows at the next row to take; `take` goes on to the one behind it.
    """

    def __init__(self, reads: ChunkReads, owner: ReaderOwner, stream: str, partition: int) -> None:
        super().__init__()
        self.reads = reads
        self.owner = owner
        self.stream = stream
        self.partition = partition
        self.offsets: PartitionOffsets | None = None  # if they are stored
        self.next_offset: i64 = -1  # -1: not known yet
        self.asked = False  # a request is under way
        self.following = False  # it waits at the end of the partition
        self.stopped = False  # behind the last row that can be read there is damage
        self._seeks = 0  # a request from before the last `seek` has no effect
        self._asked_at = 0  # `_seeks` when the request was made
        self._asked_for: ReadRequest | None = None  # the request that is under way
        self._time = -1  # to be asked for after the answer to a request that has no effect
        self._rows: ChunkRows | None = None
        self._at_row = False  # `_rows` is at a row that is not taken
        self._segment: i64 = -1
        self._position: i64 = -1
        self._damage_end = 0

    # -- where ----------------------------------------------------------------

    def seek(self, offset: int) -> None:
        """Continue at an offset, which need not be in the log."""
        self._drop_chunk()
        self._leave_end()
        self.next_offset = offset
        self._segment = self._position = -1
        self.stopped = False
        self._seeks += 1
        self._time = -1

    def seek_time(self, time: int) -> None:
        """Continue at the first record that was received at a time, in µs since the epoch, or later."""
        self.seek(-1)
        if self.asked:
            self._time = time
        else:
            self._ask_time(time)

    def _ask_time(self, time: int) -> None:
        request = ReadRequest(self.stream, self.partition, 0, -1, -1, 0, False)
        request.time = time
        self._request(request)

    def skip_damage(self) -> None:
        """Continue behind the damage."""
        self.stopped = False
        if self._damage_end > self.next_offset:
            self.seek(self._damage_end)
        else:
            self.seek(self.next_offset)
            self._ask(True)

    def close(self) -> None:
        """Read no more."""
        if not self.closed:
            self._drop_chunk()
            self.closed = True
            self.reads.forget(self, self.stream, self.partition)
            if self._asked_for is not None:
                self.reads.withdraw(self._asked_for)
                self._asked_for = None

    # -- rows -----------------------------------------------------------------

    @property
    def has_chunk(self) -> bool:
        return self._rows is not None

    def peek(self) -> ChunkRows | None:
        """The rows, at the next one to take; None if none is in memory."""
        rows = self._rows
        if rows is None or self._at_row:
            return rows
        try:
            if rows.next():
                self._at_row = True
                self.next_offset = rows.offset
                return rows
        except DamagedChunk as damage:
            self._damage(damage.offset, damage.end, f"{rows.chunk.source}: {damage.reason}")
            return None
        self._finish_chunk(rows)
        return None

    def take(self) -> None:
        """The row of `peek` is done with."""
        self._at_row = False
        self.next_offset += 1

    def ask(self) -> bool:
        """Ask for a chunk if there is something to read; false if the reader waits for something else."""
        if self._rows is not None or self.asked or self.stopped or self.next_offset < 0:
            return False
        if not self.following:
            bounds = self.reads.bounds(self.stream, self.partition)
            if self.next_offset >= bounds[1]:
                self.following = True
                self.reads.wait_at_end(self, self.stream, self.partition)
        if self.following:
            return False
        self._ask(False)
        return True

    def _ask(self, skipping: bool) -> None:
        size = self.reads.terms.stream_chunk_bytes
        offset: int = self.next_offset
        self._request(ReadRequest(self.stream, self.partition, offset, self._segment, self._position, size, skipping))

    def _request(self, request: ReadRequest) -> None:
        self.asked = True
        self._asked_at = self._seeks
        self._asked_for = self.reads.request(self, request)

    def answered(self, request: ReadRequest) -> None:
        self.asked = False
        self._asked_for = None
        chunk = request.chunk
        if self._asked_at != self._seeks:
            if chunk is not None:
                self.reads.release(chunk)
            if self._time >= 0:
                self._ask_time(self._time)
                self._time = -1
            else:
                self.owner.has_rows(self)
            return
        if request.outcome == READ and chunk is not None:
            self._rows = ChunkRows(chunk, self.next_offset, _checksum)
            self._at_row = False
            self.owner.has_rows(self)
        elif request.outcome == MOVED or request.outcome == EXPIRED:
            before: int = self.next_offset
            self.next_offset = request.found
            self._segment = self._position = -1
            if request.outcome == EXPIRED:
                self.owner.expired(self, before)
            self.owner.has_rows(self)
        elif request.outcome == NOTHING:
            self._segment = self._position = -1
            self.owner.has_rows(self)
        elif request.outcome == UNAVAILABLE or request.skipping or request.time >= 0:
            self.stopped = True
            self.owner.failed(self, request.reason)
        elif request.outcome == FAILED:
            self._damage(self.next_offset, request.found, request.reason)

    def _damage(self, offset: int, end: int, reason: str) -> None:
        self._drop_chunk()
        self.stopped = True
        self.next_offset = max(self.next_offset, offset)
        self._damage_end = end
        self.owner.damaged(self, self.next_offset, end, reason)

    def _finish_chunk(self, rows: ChunkRows) -> None:
        """Continue behind the last whole batch of the chunk."""
        chunk: Chunk = rows.chunk
        if rows.torn and not chunk.made:
            self._damage(self.next_offset, 0, f"{chunk.source}: the batch at byte {chunk.position} is incomplete")
            return
        self.next_offset = max(self.next_offset, rows.next_offset)
        self._segment = chunk.segment
        self._position = chunk.position if chunk.made else chunk.position + rows.next_position
        self._drop_chunk()

    def _drop_chunk(self) -> None:
        rows = self._rows
        if rows is not None:
            self._rows = None
            self._at_row = False
            self.reads.set_idle(self, False)
            self.reads.release(rows.chunk)

    def set_idle(self, idle: bool) -> None:
        """Say whether the consumer cannot take rows for now."""
        if self._rows is not None:
            self.reads.set_idle(self, idle)

    def give_up_chunk(self) -> bool:
        rows = self._rows
        if rows is None:
            return False
        # The batch of the next row is looked up again.
        self._segment = self._position = -1
        self._drop_chunk()
        return True

    def _leave_end(self) -> None:
        if self.following:
            self.following = False
            self.reads.forget(self, self.stream, self.partition)

    def advanced(self) -> None:
        self.following = False
        self.owner.has_rows(self)
