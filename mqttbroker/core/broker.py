"""The broker, put together: one object that turns packets, commits and time into effects.

The rule kept here: nothing in it knows a socket, a clock, a thread or a source
of randomness.  Packets come through `Protocol`, time through `Clock` and
`tick`, the store's answers through `stored`; what is to be written is asked for
by `take_writes`, what is to be sent lies in the connections' outboxes.
"""

from __future__ import annotations

import logging
from typing import Dict, Final, List, Optional

from mqttbroker.codec.reason_codes import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    QUOTA_EXCEEDED,
    UNSPECIFIED_ERROR,
)
from mqttbroker.core.clients import Clients
from mqttbroker.core.connect_handler import ConnectHandler
from mqttbroker.core.connection import Connection, Outbound
from mqttbroker.core.policy import Policy, Rules, Terms
from mqttbroker.core.publisher import Publisher
from mqttbroker.core.replay import Replays
from mqttbroker.core.router import Router
from mqttbroker.core.subscriptions import Subscriptions
from sessions.context import REFUSE, SessionContext
from sessions.expiry import Expiry
from sessions.journal import GONE, Journal
from sessions.registry import Registry
from sessions.retained import Retained
from sessions.session import Session
from sessions.write_set import Page, WriteSet

log = logging.getLogger("mqttbroker")

SWEEP_TOPICS: Final = 4000  # retained topics visited in one tick


class Broker:
    """The state of one broker and what happens to it."""

    def __init__(
        self,
        context: SessionContext,
        registry: Registry,
        router: Router,
        outbound: Outbound,
        terms: Terms,
        policy: Policy,
        rules: Rules,
    ) -> None:
        journal = context.journal
        self.context = context
        self.journal: Journal = journal
        self.registry = registry
        self.router = router
        self.outbound = outbound
        self.terms = terms
        self.policy = policy
        self.rules = rules
        if rules.restrictive:
            router.rules = rules
        self.retained = Retained(journal)
        self.publisher = Publisher(context, router, self.retained, outbound, rules)
        replays = Replays(self.retained, rules, outbound.counters)
        self.subscriptions = Subscriptions(journal, router, replays, terms, rules)
        self.clients = Clients(journal, registry, self.publisher, self.subscriptions, outbound, terms)
        self.connect_handler = ConnectHandler(journal, registry, self.clients, terms, policy, rules)
        self.expiry = Expiry(registry)
        # Whether a publisher keeps what does not fit into a queue.
        self.refusing: bool = context.limits.queue_full == REFUSE
        self.store_error = ""
        self.blocked: Dict[Connection, bool] = {}

    @property
    def overfull(self) -> bool:
        """Whether publishers must wait until the store has caught up."""
        return self.journal.size > self.terms.max_pending_write_bytes

    def retained_full(self, topic: str, size: int) -> bool:
        """Whether a retained payload of `size` bytes would pass a limit."""
        retained = self.retained
        return (
            retained.size + size > self.terms.max_retained_bytes
            or len(retained) >= self.terms.max_retained_messages
        ) and retained.get(topic) is None

    def rules_changed(self) -> None:
        """Some rules answer differently: nothing that they said before counts."""
        self.router.invalidate_all()
        for connection in self.clients.connections:
            connection.may_publish.clear()

    def tick(self, monotonic: float) -> None:
        """Do what time asks for; `Clients.tick` tells how often and on which clock."""
        self.clients.tick(monotonic)
        self.expiry.tick()
        self.retained.sweep(SWEEP_TOPICS, self.context.clock.now)

    def take_writes(self) -> Optional[WriteSet]:
        """What the store is to write now; None if nothing, or if it still has the last."""
        if self.journal.writer_idle and self.journal.has_pending:
            return self.journal.close_batch()
        return None

    def stored(self, pages: List[Page], error: str, full: bool = True) -> None:
        """The store is done with the write set it had; ``error`` is empty if it was committed.

        ``full`` tells that it failed for want of room.
        """
        self.store_error = error
        if error:
            self.outbound.refusal = QUOTA_EXCEEDED if full else UNSPECIFIED_ERROR
            self.journal.failed()
        else:
            self.journal.committed()
        for page in pages:
            session = self.registry.by_id.get(page.session_id)
            if session is not None and session.page_came():
                self._paged(session, page)
        if self.blocked and not self.overfull:
            blocked = self.blocked
            self.blocked = {}
            for connection in blocked:
                connection.touch()

    def _withdraw_denied(self, session: Session) -> None:
        """Take from a queue what its client may not read any more."""
        for entry in session.queue:
            if entry.disk != GONE and not self.rules.may_read(session, entry.message.topic):
                session.withdraw(entry)
                self.outbound.counters.publish_dropped_denied += 1

    def _paged(self, session: Session, page: Page) -> None:
        if page.error is not None:
            log.error("event=page_failed client=%s reason=%s", session.client_id, page.error)
            session.paging = False
            connection = self.clients.waiting.get(session.client_id)
            if connection is not None:
                self.connect_handler.refuse(
                    connection, IMPLEMENTATION_SPECIFIC_ERROR, "the store failed"
                )
            elif session.connection is not None:
                session.connection.disconnect(IMPLEMENTATION_SPECIFIC_ERROR, "the store failed")
            return
        session.restore(page.rows, page.received)
        if self.rules.restrictive:
            self._withdraw_denied(session)
        if not self.connect_handler.resumed(session):
            session.send_queued()
