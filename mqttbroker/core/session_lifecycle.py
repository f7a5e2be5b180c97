"""Disconnected and ended sessions: publish their wills, save them, delete them."""

from __future__ import annotations

from typing import Dict, cast

from mqttbroker.core.pending_connect import PendingConnect
from mqttbroker.core.policy import Permissions
from mqttbroker.core.publisher import Publisher
from mqttbroker.core.router import Router
from mqttbroker.core.subscriptions import Subscriptions
from mqttbroker.core.users import Users
from mqttbroker.core.wills import Wills, encode_will
from sessions.context import Clock
from sessions.journal import Journal
from sessions.registry import Registry
from sessions.rows import SessionRow
from sessions.session import Session


class SessionLifecycle:
    """Detaches sessions from their connections, and ends them when they expire or are discarded."""

    def __init__(
        self,
        journal: Journal,
        registry: Registry,
        publisher: Publisher,
        subscriptions: Subscriptions,
        router: Router,
        clock: Clock,
        users: Users,
    ) -> None:
        self.journal = journal
        self.router = router
        self.registry = registry
        self.publisher = publisher
        self.subscriptions = subscriptions
        self.clock = clock
        self.users = users
        self.wills = Wills(registry, publisher, clock)
        self.expired = 0  # sessions that ended by their expiry interval

    @property
    def now(self) -> float:
        """Unix time in seconds."""
        return self.clock.now / 1_000_000

    def load(self, session: Session) -> None:
        """Schedule the will and the end of a session from the store, after its ``disconnected_at`` was set."""
        will = session.will
        if will is not None:
            if will.due == 0.0:
                will.due = session.disconnected_at + will.delay
            self.wills.schedule(session)
        self.registry.schedule_end(session)

    def disconnected(self, session: Session, with_will: bool) -> None:
        """The session has lost its connection; without ``with_will`` its will is deleted."""
        session.connection = None
        self.publisher.redistribute(session)
        session.detach(self.now)
        if not with_will:
            session.set_will(None)  # [MQTT-3.1.2-10]
        if session.expiry_interval == 0:
            self.end(session)
            return
        will = session.will
        if will is not None:
            if will.delay == 0:
                self.wills.publish(session)
            else:
                will.due = self.now + will.delay
                self.wills.schedule(session)
        self.registry.schedule_end(session)
        self.save(session, True)

    def end(self, session: Session) -> None:
        """Delete a session; a disconnected one's will is published [MQTT-3.1.2-8]."""
        if session.connection is None:
            self.wills.publish(session)
        for subscription in list(session.subscriptions.values()):
            self.subscriptions.remove(subscription)
        session.subscriptions.clear()
        self.users.session_removed(session.username)
        session.end()
        self.registry.remove(session)
        self.router.session_ended()
        if session.id != 0:
            self.journal.delete_session(session.id)

    def save(self, session: Session, disconnected: bool) -> None:
        """Write a persistent session's row."""
        if session.id != 0:
            due = session.will.due if disconnected and session.will is not None else None
            self.journal.save_session(
                SessionRow(
                    session.id,
                    session.client_id,
                    session.version,
                    session.expiry_interval,
                    session.disconnected_at if disconnected else None,
                    encode_will(session),
                    due,
                    session.username,
                    session.rules,
                    None if session.permissions is None else cast(Permissions, session.permissions).text,
                )
            )

    def tick(self, pending: Dict[str, PendingConnect]) -> None:
        """Publish due wills and end expired sessions, except those of ``pending`` clients."""
        now = self.now
        session = self.wills.next_due(now)
        while session is not None:
            if session.client_id not in pending:
                self.wills.publish(session)
                self.save(session, True)
            session = self.wills.next_due(now)
        for session in self.registry.expired(now):
            if session.client_id not in pending:
                self.expired += 1
                self.end(session)
