"""Expiry: stored messages of disconnected clients are deleted when their Message Expiry Interval has passed.

The store is searched by queries of at most `QUERY_ENTRIES` entries. Entries of connected clients are left to their
sessions, which skip expired ones when they send.
"""

from __future__ import annotations

from typing import Final

from sessions.context import SessionContext
from sessions.registry import Registry
from sessions.session import Session
from sessions.write_set import EntryQuery

QUERY_ENTRIES: Final = 1000
RETRY_AFTER: Final = 60_000_000  # µs until entries left to connected clients are searched again


class Expiry(EntryQuery):
    """The search for expired entries; at most one query is pending."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(QUERY_ENTRIES, 0, 0, 0)
        self.registry = registry
        self.context: SessionContext = registry.context
        self.context.next_expiry = 1  # unknown yet: search at the first tick
        self._queried_at = 0
        self._searching = False

    def tick(self) -> None:
        """Begin a search if an entry may have expired."""
        now = self.context.clock.now
        if self._searching or not 0 < self.context.next_expiry <= now:
            return
        self._searching = True
        self.context.next_expiry = 0
        self.until = now
        self.after = (0, 0, 0)
        self._query()

    def _query(self) -> None:
        self._queried_at = self.context.clock.now
        self.context.journal.query_entries(self)

    def answered(self) -> None:
        rows = self.rows
        left: list[Session] = []
        for row in rows:
            session = self.registry.by_id.get(row.session_id)
            if session is None:
                continue
            deliveries = session.deliveries
            if (
                session.connection is not None
                or deliveries.reading_page
                or deliveries.queue.oldest is not None
                or session.disconnected_at * 1_000_000 >= self._queried_at
            ):
                # The session itself changes its queue, so the row may be outdated.
                self._search_at(self.until + RETRY_AFTER)
                left.append(session)
                continue
            self.context.counters.away.expired += 1
            deliveries.window.skip_packet_id()
            deliveries.queue.drop_stored(row)
        for session in left:
            # No query of the session is pending: drop its cached rows, so that the next search covers it.
            queue = session.deliveries.queue
            if queue.oldest is not None and not queue.oldest.pending:
                queue.oldest = None
        if len(rows) == self.limit:
            last = rows[len(rows) - 1]
            self.after = (last.expires_at, last.session_id, last.seq)
            self._query()
            return
        self._searching = False
        if self.next_expiry != 0:
            self._search_at(self.next_expiry)

    def _search_at(self, time: int) -> None:
        """Search at ``time`` (µs since the Unix epoch) at the latest."""
        context = self.context
        if not 0 < context.next_expiry < time:
            context.next_expiry = time
