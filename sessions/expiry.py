"""Expiry: messages that wait on disk for clients who are away, and whose time is over.

The rule kept here: they leave the disk and the counts without their client
coming back for them, a bounded piece at a time.  Those of a client who is there
are left to its session, which passes over them when their turn comes.
"""

from __future__ import annotations

from typing import Final, List

from sessions.context import SessionContext
from sessions.registry import Registry
from sessions.session import Session
from sessions.write_set import EntryQuery

PIECE: Final = 1000  # entries of one commit
# When to look again for what was left to sessions that were there, in microseconds.
LOOK_AGAIN: Final = 60_000_000


class Expiry(EntryQuery):
    """The search for entries that have expired; one is under way at most."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(PIECE, 0, 0, 0)
        self.registry = registry
        self.context: SessionContext = registry.context
        self.context.next_expiry = 1  # nobody knows yet what is on disk
        self._asked_at = 0
        self._busy = False

    def tick(self) -> None:
        """Begin a search if something may have expired."""
        now = self.context.clock.now
        if self._busy or not 0 < self.context.next_expiry <= now:
            return
        self._busy = True
        self.context.next_expiry = 0
        self.until = now
        self.after = (0, 0, 0)
        self._ask()

    def _ask(self) -> None:
        self._asked_at = self.context.clock.now
        self.context.journal.query_entries(self)

    def answered(self) -> None:
        rows = self.rows
        left: List[Session] = []
        for _, session_id, seq, message_id, shared, size in rows:
            session = self.registry.by_id.get(session_id)
            if session is None:
                continue
            if (
                session.connection is not None
                or session.paging
                or session.oldest is not None
                or session.disconnected_at * 1_000_000 >= self._asked_at
            ):
                # What the store said may be over: the session changes its queue itself.
                self._look_at(self.until + LOOK_AGAIN)
                left.append(session)
                continue
            self.context.counters.expired += 1
            session.pass_over_packet_id()
            session.drop_stored(seq, message_id, shared != 0, size)
        for session in left:
            # The next look finds its client back, or no list of its own any more.
            if session.oldest is not None and not session.oldest.asked:
                session.oldest = None
        if len(rows) == self.limit:
            last = rows[len(rows) - 1]
            self.after = (last[0], last[1], last[2])
            self._ask()
            return
        self._busy = False
        if self.next_expiry != 0:
            self._look_at(self.next_expiry)

    def _look_at(self, time: int) -> None:
        context = self.context
        if not 0 < context.next_expiry < time:
            context.next_expiry = time
