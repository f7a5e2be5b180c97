"""Disconnected and ended sessions: publish their wills, save them, delete them.

Of many wills and ends that are due, and of many subscriptions of an ended session, a part is handled at a time.
"""

from __future__ import annotations

from typing import Dict, Final, List, cast

from mqttbroker.core.broker_messages import BrokerMessages
from mqttbroker.core.pending_connect import PendingConnect
from mqttbroker.core.policy import Permissions
from mqttbroker.core.publisher import Publisher
from mqttbroker.core.router import Router
from mqttbroker.core.subscriptions import Subscriptions
from mqttbroker.core.turns import PART_WORK, LongWork, Turns
from mqttbroker.core.users import Users
from mqttbroker.core.wills import Wills, encode_will
from sessions.context import Clock
from sessions.journal import Journal
from sessions.registry import Registry
from sessions.rows import SessionRow
from sessions.session import Session, Subscription

DUE_WORK: Final = 15  # of one will or end that is due
REMOVED_AT_ONCE: Final = 200  # subscriptions of a session that ends; more are removed in parts
MAX_WAITING_REMOVALS: Final = 500_000  # subscriptions of ended sessions; beyond it they are removed at once
MAX_WAITING_MESSAGES: Final = 100  # of `BrokerMessages`; beyond it, no will that is due is added


class SessionLifecycle:
    """Detaches sessions from their connections, and ends them when they expire or are discarded."""

    def __init__(
        self,
        journal: Journal,
        registry: Registry,
        publisher: Publisher,
        subscriptions: Subscriptions,
        router: Router,
        messages: BrokerMessages,
        turns: Turns,
        clock: Clock,
        users: Users,
    ) -> None:
        self.messages = messages
        self.turns = turns
        self.waiting_removals = 0  # subscriptions of ended sessions that the router still has
        self.due = _Due(self)
        self.journal = journal
        self.router = router
        self.registry = registry
        self.publisher = publisher
        self.subscriptions = subscriptions
        self.clock = clock
        self.users = users
        self.wills = Wills(registry, messages, clock)
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
        self.subscriptions.streams.disconnected(session)
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
        removed = list(session.subscriptions.values())
        session.subscriptions.clear()
        self.users.session_removed(session.username)
        session.end()
        self.registry.remove(session)
        if len(removed) <= REMOVED_AT_ONCE or self.waiting_removals + len(removed) > MAX_WAITING_REMOVALS:
            for subscription in removed:
                self.subscriptions.remove(subscription)
            self.router.session_ended()
        else:
            self.waiting_removals += len(removed)
            self.turns.add(_Removal(self, removed))
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
        """Publish due wills and end expired sessions, in parts if there are many; not those of ``pending`` clients."""
        due = self.due
        due.pending = pending
        due.done_until_tick = False
        due.step(PART_WORK)
        if not due.done:
            self.turns.add(due)


class _Due(LongWork):
    """Wills that are due and sessions that have expired."""

    def __init__(self, lifecycle: SessionLifecycle) -> None:
        self.lifecycle = lifecycle
        self.pending: Dict[str, PendingConnect] = {}
        self.done_until_tick = True

    @property
    def done(self) -> bool:
        return self.done_until_tick

    def step(self, budget: int) -> int:
        lifecycle = self.lifecycle
        now = lifecycle.now
        cost: int = 0
        while cost < budget:
            if lifecycle.messages.waiting > MAX_WAITING_MESSAGES:
                return cost
            session = lifecycle.wills.next_due(now)
            if session is None:
                break
            cost += DUE_WORK
            if session.client_id not in self.pending:
                lifecycle.wills.publish(session)
                lifecycle.save(session, True)
        while cost < budget:
            session = lifecycle.registry.next_expired(now)
            if session is None:
                self.done_until_tick = True
                break
            cost += DUE_WORK
            if session.client_id not in self.pending:
                lifecycle.expired += 1
                lifecycle.end(session)
        return cost


class _Removal(LongWork):
    """The subscriptions of an ended session, to be removed from the router."""

    def __init__(self, lifecycle: SessionLifecycle, subscriptions: List[Subscription]) -> None:
        self.lifecycle = lifecycle
        self.subscriptions = subscriptions

    @property
    def done(self) -> bool:
        return not self.subscriptions

    def step(self, budget: int) -> int:
        lifecycle = self.lifecycle
        subscriptions = self.subscriptions
        count: int = min(len(subscriptions), budget)
        lifecycle.waiting_removals -= count
        for _ in range(count):
            lifecycle.subscriptions.remove(subscriptions.pop())
        if not subscriptions:
            lifecycle.router.session_ended()
        return 1 + count
