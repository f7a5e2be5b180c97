"""The holding: what one session has queued, and what it lets go of when that is too much.

The rule kept here: what a session has queued is counted, its own and on the
shelf, from the moment it is taken until it is done with, and every message
that finds no room is counted by its cause.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Final, Optional

from sessions.context import DROP_OLDEST, SessionContext
from sessions.delivery import ClientConnection, Delivery, Owner
from sessions.journal import GONE, MEMORY
from sessions.write_set import EntryQuery

OLDEST_ENTRIES: Final = 1000  # entries looked up at a time to make room

# The queue of a session that has nothing in memory; one of its own takes six hundred bytes.
_NOTHING: Final[Deque[Delivery]] = deque(maxlen=0)


class MessageQueue(Owner):
    """The queue of one session, in memory and on disk."""

    def __init__(self, context: SessionContext, session_id: int) -> None:
        self.context = context
        self.id = session_id
        self.connection: Optional[ClientConnection] = None
        self.queue: Deque[Delivery] = _NOTHING
        self.memory_bytes = 0  # sizes of the messages in `queue`
        self.queued_messages = 0  # entries not done with, wherever they are
        self.queued_bytes = 0
        self.stored_seq = 0  # the newest entry that is only on disk; 0 if none
        self.loaded_seq = 0  # the newest entry that is or was in memory
        self.paging = False
        # What may go first from the disk of a full queue while the client is away.
        self.oldest: Optional[OldestEntries] = None

    def refill(self) -> None:
        """The queue in memory became shorter."""

    def takes(self, size: int, open_now: bool) -> bool:
        """Whether a message finds room as things are."""
        context = self.context
        if self.full(size):
            return False
        if open_now:
            return True
        if self.id != 0:
            return not context.full(1, size)
        return context.memory_bytes + size <= context.limits.max_total_queue_memory_bytes

    def has_room(self, size: int, open_now: bool) -> bool:
        """Whether a message can be taken, or can after others have gone; counts it if not."""
        context = self.context
        if self.takes(size, open_now):
            return True
        counters = self.context.counters
        if self.full(size):
            if not self._make_room(size):
                counters.queue_full += 1
                return False
            if self.id == 0 or not self.context.full(1, size):
                return True
        if self.id != 0:
            counters.total_full += 1
        else:
            counters.memory_full += 1
        return False

    def _make_room(self, size: int) -> bool:
        """Let go of what waits longest, if that is the policy; false if it makes no room."""
        limits = self.context.limits
        most = limits.max_transient_queue_bytes if self.id == 0 else limits.max_queued_bytes
        if limits.queue_full != DROP_OLDEST or size > most:
            return False
        if self.id != 0 and self.connection is None:
            return self._make_room_on_disk(size)
        while self.queue and self.queue[0].packet_id == 0 and self.full(size):
            entry = self.dequeue()
            if entry.disk != GONE:
                self.context.counters.queue_full_oldest += 1
                self.finish(entry)
        self.refill()
        return not self.full(size)

    def _make_room_on_disk(self, size: int) -> bool:
        if self.paging:
            return False  # the client is back, and the page may have them
        oldest = self.oldest
        if oldest is None:
            oldest = OldestEntries(self)
            self.oldest = oldest
        oldest.drop(1, size)
        # While it is asked for more the queue is longer than it may be, by a batch at most.
        return not self.full(size) or oldest.asked

    def drop_stored(self, seq: int, message_id: int, shared: bool, size: int) -> None:
        """Let go of an entry that is only on disk."""
        self.context.journal.remove_stored_entry(self.id, seq, message_id, shared)
        self.count_out(size)
        if self.queued_messages == 0:
            self.stored_seq = 0

    def full(self, size: int) -> bool:
        """Whether a message of `size` bytes would pass a limit of this queue."""
        limits = self.context.limits
        if self.id == 0:
            return (
                self.queued_messages >= limits.max_queued_messages
                or self.memory_bytes + size > limits.max_transient_queue_bytes
            )
        return self.beyond(1, size)

    def beyond(self, messages: int, size: int) -> bool:
        """Whether so many more entries, of so many bytes together, pass a limit of this durable session."""
        limits = self.context.limits
        return (
            self.queued_messages + messages > limits.max_queued_messages
            or self.queued_bytes + size > limits.max_queued_bytes
        )

    def enqueue(self, entry: Delivery) -> None:
        self.memory_bytes += entry.message.size
        self.context.memory_bytes += entry.message.size
        if self.queue is _NOTHING:
            self.queue = deque()
        self.queue.append(entry)

    def dequeue(self) -> Delivery:
        entry = self.queue.popleft()
        self.memory_bytes -= entry.message.size
        self.context.memory_bytes -= entry.message.size
        return entry

    def finish(self, entry: Delivery) -> None:
        if entry.disk == GONE:
            return  # refused by the store after it was sent
        self.count_out(entry.message.size)
        if entry.disk != MEMORY:
            self.context.journal.remove_entry(entry)
        else:
            entry.disk = GONE

    def count_out(self, size: int) -> None:
        """An entry is done with."""
        self.queued_messages -= 1
        self.queued_bytes -= size
        if self.id != 0:
            self.context.queued_messages -= 1
            self.context.queued_bytes -= size

    def count_in(self, messages: int, size: int, last_seq: int) -> None:
        """The store has so many entries of this session."""
        self.queued_messages = messages
        self.queued_bytes = size
        self.stored_seq = last_seq
        self.context.queued_messages += messages
        self.context.queued_bytes += size

    def end(self) -> None:
        """The session is over, and what the store has of it counts no more."""
        if self.id != 0:
            self.context.queued_messages -= self.queued_messages
            self.context.queued_bytes -= self.queued_bytes
            self.queued_messages = 0
            self.queued_bytes = 0

    def forget_queue(self) -> None:
        """What was in memory is on disk, or is no longer wanted."""
        self.queue = _NOTHING
        self.context.memory_bytes -= self.memory_bytes
        self.memory_bytes = 0


class OldestEntries(EntryQuery):
    """The entries that go first from the full queue of a session whose client is away."""

    def __init__(self, session: MessageQueue) -> None:
        super().__init__(OLDEST_ENTRIES, session.id, 0, 0)
        self.session = session
        self.asked = False
        self.exhausted = False  # what is left was sent before
        self._next = 0  # the first row that is left

    def drop(self, messages: int, size: int) -> None:
        """Drop until so many messages and bytes find room; ask for more if none are left."""
        if self.asked or self.exhausted:
            return  # while it is asked for, `rows` is the writer's
        session = self.session
        while self._next < len(self.rows) and session.beyond(messages, size):
            _, _, seq, message_id, shared, bytes_freed = self.rows[self._next]
            self._next += 1
            self.after_seq = seq
            session.context.counters.queue_full_oldest += 1
            session.drop_stored(seq, message_id, shared != 0, bytes_freed)
        if session.beyond(messages, size):
            self.asked = True
            session.context.journal.query_entries(self)

    def answered(self) -> None:
        self._next = 0
        self.asked = False
        self.exhausted = not self.rows
        if self.session.oldest is self:
            self.drop(0, 0)
