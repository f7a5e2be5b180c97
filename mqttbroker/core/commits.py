"""The exchange with the store: write sets go out one at a time, and their commits or failures come back.

Batches with very many entries, and many pages, are handled in parts.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from mqttbroker.codec.reason_codes import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    QUOTA_EXCEEDED,
    UNSPECIFIED_ERROR,
)
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.delivery.turns import LongWork, Turns
from mqttbroker.core.sessions.clients import Clients
from mqttbroker.core.sessions.connect_handler import ConnectHandler
from sessions.journal import GONE, SETTLED_AT_ONCE, Journal
from sessions.registry import Registry
from sessions.session import Session
from sessions.write_set import EntryQuery, Page, WriteSet

log = logging.getLogger("mqttbroker.store")


PAGE_ROW_WORK: Final = 3  # of one entry of a page
SETTLED_PER_WORK: Final = 8  # entries of a committed batch


class Commits:
    """Hands write sets to the store, one at a time, and handles its answers."""

    def __init__(
        self,
        journal: Journal,
        registry: Registry,
        clients: Clients,
        connect_handler: ConnectHandler,
        outbound: Outbound,
        rules: Rules,
        turns: Turns,
    ) -> None:
        self.turns = turns
        self.journal = journal
        self.registry = registry
        self.clients = clients
        self.connect_handler = connect_handler
        self.outbound = outbound
        self.rules = rules
        self.error = ""  # of the last commit; empty if it succeeded
        self.paused: dict[Connection, bool] = {}  # connections to flush when `Outbound.backlogged` is false again
        self._answer = _Answer(self)

    def next_write_set(self) -> WriteSet | None:
        """The writes since the last call.

        None if there are none, if the store is still busy with the last ones, or if `Journal.closing`: then it is to be
        called again in the next iteration of the event loop.
        """
        journal = self.journal
        if journal.closing:
            return journal.continue_closing()
        if journal.writer_idle and journal.has_pending and not journal.held:
            journal.begin_closing()
            return journal.continue_closing()
        return None

    def answered(self, error: str, disk_full: bool = True) -> None:
        """The store has committed the write set, or failed with ``error``. The caller has set the broker's clock."""
        if error and not self.error:
            log.error("event=store_failed reason=%s", error)
        elif self.error and not error:
            log.info("event=store_recovered")
        self.error = error
        if error:
            self.outbound.store_failure = QUOTA_EXCEEDED if disk_full else UNSPECIFIED_ERROR
            self.journal.failed()
        else:
            self.journal.begin_settling()
        self._continue_answer()
        if not error:  # else the next tick tries again
            self.turns.wake()

    def undecided(self) -> None:
        """The store does not know for a long time whether the write set is stored: close the connections that wait for it.

        No answer would be true. The write set stays with the store, which answers it when it knows.
        """
        for connection in list(self.clients.connections):
            if connection.acks.length and not connection.closed:
                connection.disconnect(UNSPECIFIED_ERROR, "the store does not answer")
        self.connect_handler.refuse_all("the store does not answer")

    def read_done(self, queries: list[EntryQuery], pages: list[Page]) -> None:
        """The store has read the queries and pages of a write set that it had committed. The caller has set the broker's clock."""
        self._answer.queries.extend(queries)
        self._answer.pages.extend(pages)
        self._continue_answer()
        self.turns.wake()

    def _continue_answer(self) -> None:
        answer = self._answer
        answer.step(SETTLED_AT_ONCE // SETTLED_PER_WORK)
        if not answer.done:
            self.turns.add(answer)

    def load_page(self, page: Page) -> None:
        """Load a page that its session still waits for."""
        session = self.registry.by_id.get(page.session_id)
        if session is not None and session.deliveries.page_arrived():
            self._load_page(session, page)

    def resume_paused(self) -> None:
        """Read the clients again that had to wait for the store, if it has caught up."""
        if self.paused and not self.outbound.backlogged:
            paused = self.paused
            self.paused = {}
            for connection in paused:
                connection.request_flush()

    def _load_page(self, session: Session, page: Page) -> None:
        if page.error is not None:
            log.error("event=page_failed client=%s reason=%s", session.client_id, page.error)
            session.deliveries.page_failed()
            if not self.connect_handler.session_failed(session) and session.connection is not None:
                session.connection.disconnect(IMPLEMENTATION_SPECIFIC_ERROR, "the store failed")
            return
        session.load_page(page.rows, page.received)
        if self.rules.restrictive:
            self._drop_denied(session)
        if not self.connect_handler.session_loaded(session):
            session.deliveries.send_queued()

    def _drop_denied(self, session: Session) -> None:
        """Remove the messages that the client may no longer read from its queue."""
        deliveries = session.deliveries
        for entry in deliveries.queue.entries:
            if entry.disk != GONE and not self.rules.may_read(session, entry.message.topic):
                deliveries.withdraw(entry)
                deliveries.drops().not_authorized += 1


class _Answer(LongWork):
    """The work after a commit and after reads: settle the batch, then answer queries and load pages."""

    def __init__(self, commits: Commits) -> None:
        self.commits = commits
        self.queries: deque[EntryQuery] = deque()
        self.pages: deque[Page] = deque()

    @property
    def done(self) -> bool:
        return not self.queries and not self.pages and not self.commits.journal.settling

    def step(self, budget: int) -> int:
        commits = self.commits
        journal = commits.journal
        cost: int = 1
        if journal.settling:
            cost += journal.continue_settling(budget * SETTLED_PER_WORK) // SETTLED_PER_WORK
            if journal.settling:
                return cost
        commits.resume_paused()
        while self.queries and cost < budget:
            query = self.queries.popleft()
            query.answered()
            cost += 1 + len(query.rows)
        while self.pages and cost < budget:
            page = self.pages.popleft()
            commits.load_page(page)
            cost += 1 + PAGE_ROW_WORK * len(page.rows)
        return cost
