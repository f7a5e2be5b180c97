"""The exchange with the store: write sets go out one at a time, and their commits or failures come back."""

from __future__ import annotations

import logging
from typing import Dict, List, Optional

from mqttbroker.codec.reason_codes import IMPLEMENTATION_SPECIFIC_ERROR, QUOTA_EXCEEDED, UNSPECIFIED_ERROR
from mqttbroker.core.clients import Clients
from mqttbroker.core.connect_handler import ConnectHandler
from mqttbroker.core.connection import Connection
from mqttbroker.core.outbox import Outbound
from mqttbroker.core.policy import Rules
from mqttbroker.core.terms import BrokerTerms
from sessions.journal import GONE, Journal
from sessions.registry import Registry
from sessions.session import Session
from sessions.write_set import Page, WriteSet

log = logging.getLogger("mqttbroker")


class Commits:
    """Hands write sets to the store, one at a time, and handles its answers."""

    def __init__(
        self,
        journal: Journal,
        registry: Registry,
        clients: Clients,
        connect_handler: ConnectHandler,
        outbound: Outbound,
        terms: BrokerTerms,
        rules: Rules,
    ) -> None:
        self.journal = journal
        self.registry = registry
        self.clients = clients
        self.connect_handler = connect_handler
        self.outbound = outbound
        self.terms = terms
        self.rules = rules
        self.error = ""  # of the last commit; empty if it succeeded
        self.paused: Dict[Connection, bool] = {}  # connections to flush when `backlogged` is false again

    @property
    def backlogged(self) -> bool:
        """Whether the journal exceeds its limit; until the store catches up, no client is read."""
        return self.journal.size > self.terms.max_pending_write_bytes

    def next_write_set(self) -> Optional[WriteSet]:
        """The writes since the last call; None if there are none, or if the store is still busy with the last ones."""
        if self.journal.writer_idle and self.journal.has_pending:
            return self.journal.close_batch()
        return None

    def answered(self, pages: List[Page], error: str, disk_full: bool = True) -> None:
        """The store has committed the write set, or failed with ``error``; it read ``pages`` in either case."""
        if error and not self.error:
            log.error("event=store_failed reason=%s", error)
        elif self.error and not error:
            log.info("event=store_recovered")
        self.error = error
        if error:
            self.outbound.store_failure = QUOTA_EXCEEDED if disk_full else UNSPECIFIED_ERROR
            self.journal.failed()
        else:
            self.journal.committed()
        for page in pages:
            session = self.registry.by_id.get(page.session_id)
            if session is not None and session.page_arrived():
                self._load_page(session, page)
        if self.paused and not self.backlogged:
            paused = self.paused
            self.paused = {}
            for connection in paused:
                connection.request_flush()

    def _load_page(self, session: Session, page: Page) -> None:
        if page.error is not None:
            log.error("event=page_failed client=%s reason=%s", session.client_id, page.error)
            session.page_failed()
            pending = self.clients.pending.get(session.client_id)
            if pending is not None:
                self.connect_handler.refuse(pending.connection, IMPLEMENTATION_SPECIFIC_ERROR, "the store failed")
            elif session.connection is not None:
                session.connection.disconnect(IMPLEMENTATION_SPECIFIC_ERROR, "the store failed")
            return
        session.load_page(page.rows, page.received)
        if self.rules.restrictive:
            self._drop_denied(session)
        if not self.connect_handler.session_loaded(session):
            session.send_queued()

    def _drop_denied(self, session: Session) -> None:
        """Remove the messages that the client may no longer read from its queue."""
        for entry in session.queue.entries:
            if entry.disk != GONE and not self.rules.may_read(session, entry.message.topic):
                session.withdraw(entry)
                self.outbound.counters.publish_dropped_denied += 1
