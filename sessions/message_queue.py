"""The message queue of one session: the entries in memory, the part that is only on disk, their counts and limits."""

from __future__ import annotations

from collections import deque
from typing import Final

from mypy_extensions import i64, mypyc_attr

from sessions.context import DROP_OLDEST, SessionContext
from sessions.counters import Drops
from sessions.delivery import Delivery
from sessions.journal import GONE, MEMORY
from sessions.rows import StoredEntry
from sessions.write_set import EntryQuery

OLDEST_ENTRIES: Final = 1000  # stored entries queried at a time to make room

_NO_ENTRIES: Final[deque[Delivery]] = deque(maxlen=0)  # always empty, and shared: a deque takes 600 bytes


@mypyc_attr(acyclic=True)
class MessageQueue:
    """Entries of a session in the order in which they were published.

    ``entries`` are those in memory. Of a persistent session (``session_id`` is not 0) the entries with a seq above
    ``loaded_seq`` and up to ``stored_seq`` are only on disk. The counts include messages in flight.
    """

    def __init__(self, context: SessionContext, session_id: int) -> None:
        self.context = context
        self.session_id = session_id
        self.entries: deque[Delivery] = _NO_ENTRIES
        self.memory_bytes = 0  # sizes of the messages in `entries`
        self.message_count: i64 = 0  # queued and in flight
        self.byte_count = 0
        self.loaded_seq = 0  # newest entry that is or was in memory
        self.stored_seq = 0  # newest entry that is only on disk; 0 if there is none
        self.oldest: OldestEntries | None = None  # while the oldest stored entries are dropped

    # -- entries in memory ----------------------------------------------------

    def append(self, entry: Delivery) -> None:
        size: int = entry.message.size
        self.memory_bytes += size
        self.context.memory_bytes += size
        self.context.memory_entries += 1
        if self.entries is _NO_ENTRIES:
            self.entries = deque()
        self.entries.append(entry)

    def pop(self) -> Delivery:
        """Remove and return the oldest entry in memory; it is counted until `finish`."""
        entry = self.entries.popleft()
        size: int = entry.message.size
        self.memory_bytes -= size
        self.context.memory_bytes -= size
        self.context.memory_entries -= 1
        return entry

    def clear_memory(self) -> None:
        """Drop the entries in memory without finishing them."""
        self.context.memory_entries -= len(self.entries)
        self.entries = _NO_ENTRIES
        self.context.memory_bytes -= self.memory_bytes
        self.memory_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of queued messages; includes those in flight if some entries are only on disk."""
        return self.memory_bytes if self.stored_seq == 0 else self.byte_count

    # -- counts ---------------------------------------------------------------

    def finish(self, entry: Delivery) -> None:
        """An entry was acknowledged, dropped or expired: delete it."""
        if entry.disk == GONE:
            return  # refused by the store after it was sent
        self.count_out(entry.message.size)
        if entry.disk != MEMORY:
            self.context.journal.remove_entry(entry)
        else:
            entry.disk = GONE

    def drop_stored(self, entry: StoredEntry) -> None:
        """Delete an entry that is only on disk."""
        self.context.journal.remove_stored_entry(self.session_id, entry.seq, entry.message_id, entry.shared != 0)
        self.count_out(entry.size)
        if self.message_count == 0:
            self.stored_seq = 0

    def count_in(self, size: int) -> None:
        """Count a new entry."""
        self.message_count += 1
        self.byte_count += size
        if self.session_id != 0:
            self.context.queued_messages += 1
            self.context.queued_bytes += size

    def count_out(self, size: int) -> None:
        self.message_count -= 1
        self.byte_count -= size
        if self.session_id != 0:
            self.context.queued_messages -= 1
            self.context.queued_bytes -= size

    def count_stored(self, messages: int, size: int, last_seq: int) -> None:
        """Count the entries that the store has at start-up."""
        self.message_count = messages
        self.byte_count = size
        self.stored_seq = last_seq
        self.context.queued_messages += messages
        self.context.queued_bytes += size

    def end(self) -> None:
        """The session has ended: take its entries off the totals."""
        self.oldest = None
        self.clear_memory()
        if self.session_id != 0:
            self.context.queued_messages -= self.message_count
            self.context.queued_bytes -= self.byte_count
            self.message_count = 0
            self.byte_count = 0

    # -- limits ---------------------------------------------------------------

    def has_room(self, size: int, open_now: bool) -> bool:
        """Whether a message of ``size`` bytes fits without dropping others; ``open_now`` if it would be sent at once."""
        context = self.context
        if self.full(size):
            return False
        if open_now:
            return True
        if self.session_id != 0:
            return not context.full(1, size)
        return not context.memory_full(size)

    def full(self, size: int) -> bool:
        """Whether a message of ``size`` bytes would exceed a limit of this queue."""
        limits = self.context.limits
        if self.session_id == 0:
            return self.message_count >= limits.max_queued_messages or self.memory_bytes + size > limits.max_transient_queue_bytes
        return self.exceeds(1, size)

    def exceeds(self, messages: int, size: int) -> bool:
        """Whether this many more stored entries, of this many bytes together, would exceed a limit of this queue."""
        limits = self.context.limits
        return self.message_count + messages > limits.max_queued_messages or self.byte_count + size > limits.max_queued_bytes

    # -- dropping the oldest --------------------------------------------------

    def may_drop_oldest(self, size: int) -> bool:
        """Whether the policy is to drop the oldest, and an empty queue would have room for the message."""
        limits = self.context.limits
        most: int = limits.max_transient_queue_bytes if self.session_id == 0 else limits.max_queued_bytes
        return limits.queue_full == DROP_OLDEST and size <= most

    def drop_oldest(self, size: int, drops: Drops) -> bool:
        """Drop entries in memory that were never sent until there is room, counted in ``drops``; False if there is none."""
        while self.entries and self.entries[0].packet_id == 0 and self.full(size):
            entry = self.pop()
            if entry.disk != GONE:
                drops.queue_full_oldest += 1
                self.finish(entry)
        return not self.full(size)

    def drop_oldest_stored(self, size: int) -> bool:
        """Drop entries on disk until there is room, or begin to; False if there is none.

        Until the store has answered the query, the queue may exceed its limit by the entries of a batch.
        """
        oldest = self.oldest
        if oldest is None:
            oldest = OldestEntries(self)
            self.oldest = oldest
        oldest.drop(1, size)
        return not self.full(size) or oldest.pending


class OldestEntries(EntryQuery):
    """The oldest stored entries of a full queue whose client is disconnected."""

    def __init__(self, queue: MessageQueue) -> None:
        super().__init__(OLDEST_ENTRIES, queue.session_id, 0, 0)
        self.queue = queue
        self.pending = False  # the query is with the journal or the writer, which owns `rows` meanwhile
        self.exhausted = False  # all entries left were sent before
        self._next = 0  # index of the first row not yet dropped

    def drop(self, messages: int, size: int) -> None:
        """Drop entries until this many messages and bytes fit; query the store for more if the rows do not suffice."""
        if self.pending or self.exhausted:
            return
        queue = self.queue
        while self._next < len(self.rows) and queue.exceeds(messages, size):
            entry = self.rows[self._next]
            self._next += 1
            self.after_seq = entry.seq
            queue.context.counters.away.queue_full_oldest += 1
            queue.drop_stored(entry)
        if queue.exceeds(messages, size):
            self.pending = True
            queue.context.journal.query_entries(self)

    def answered(self) -> None:
        self._next = 0
        self.pending = False
        self.exhausted = not self.rows
        if self.queue.oldest is self:
            self.drop(0, 0)
