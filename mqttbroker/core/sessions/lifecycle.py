"""Disconnected and ended sessions: publish their wills, save them, delete them.

Of many wills and ends that are due, and of many subscriptions of an ended session, a part is handled at a time.
"""

from __future__ import annotations

from typing import Final, cast

from mqttbroker.core.access.policy import Permissions
from mqttbroker.core.delivery.broker_messages import BrokerMessages
from mqttbroker.core.delivery.publisher import Publisher
from mqttbroker.core.delivery.turns import PART_WORK, LongWork, Turns
from mqttbroker.core.delivery.wills import Wills, encode_will
from mqttbroker.core.routing.router import Router
from mqttbroker.core.sessions.pending_connect import PendingConnect
from mqttbroker.core.sessions.subscriptions import Subscriptions
from mqttbroker.core.terms.users import Users
from sessions.context import Clock
from sessions.journal import Journal
from sessions.registry import Registry
from sessions.row_kinds import SESSIONS
from sessions.rows import SessionRow
from sessions.session import Session, Subscription

DUE_WORK: Final = 15  # of one will or end that is due
REMOVED_AT_ONCE: Final = 200  # subscriptions of a session that ends; more are removed in parts
MAX_WAITING_REMOVALS: Final = 500_000  # subscriptions of ended sessions; beyond it they are removed at once
MAX_WAITING_MESSAGES: Final = 100  # of `BrokerMessages`; beyond it, no will that is due is added


class SessionLifecycle:
    """Detaches sessions from their connections, and ends them when they expire or are discarded.

    While ``paused``, until a message reaches all others of a cluster, no will is published, and no session ends, by time.
    """

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
        paused: bool,
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
        self.paused = paused
        # By client id: sessions whose row is changed when their will, which waits, was published. So it is in one commit
        # with the message.
        self._unsaved: dict[str, _Unsaved] = {}
        messages.on_will_published = self._will_published

    def resume(self) -> None:
        """Be ``paused`` no more."""
        self.paused = False

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
        will = session.will
        if will is not None and not with_will:
            if will.row_id:
                self.journal.remove(SESSIONS, will.row_id)
            session.set_will(None)  # [MQTT-3.1.2-10]
            will = None
        if session.expiry_interval == 0:
            self.end(session)
            return
        saved: bool = True
        if will is not None:
            if will.delay == 0:
                saved = self.wills.publish(session)
            else:
                will.due = self.now + will.delay
                self.wills.schedule(session)
        self.registry.schedule_end(session)
        self.save_published(session, saved)

    def end(self, session: Session) -> None:
        """Delete a session; a disconnected one's will is published [MQTT-3.1.2-8]."""
        row_id: int = session.id
        if session.will is not None and row_id == 0:
            row_id = session.will.row_id
        unsaved = self._unsaved.get(session.client_id)
        published: bool = unsaved is None or unsaved.session is not session
        if session.connection is None and not self.wills.publish(session):
            published = False
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
        if row_id != 0:
            self._forget_unsaved(session.client_id, row_id)
            if published:
                self.journal.remove(SESSIONS, row_id)
            else:
                self._unsaved[session.client_id] = _Unsaved(session, row_id)

    def save(self, session: Session, disconnected: bool) -> None:
        """Write the row of a persistent session, or of the will of another one."""
        will = session.will
        row_id: int = session.id
        if row_id == 0:
            if will is None:
                return
            if will.row_id == 0:
                will.row_id = self.registry.new_id()
            row_id = will.row_id
        self._forget_unsaved(session.client_id, row_id)
        row = SessionRow(
            row_id,
            session.client_id,
            session.version,
            session.expiry_interval,
            session.disconnected_at if disconnected else None,
            encode_will(session),
            will.due if disconnected and will is not None else None,
            session.username,
            session.rules,
            None if session.permissions is None else cast(Permissions, session.permissions).text,
        )
        if session.id == 0:
            self.journal.save_later(SESSIONS, row)
        else:
            self.journal.save(SESSIONS, row)

    def save_published(self, session: Session, published: bool) -> None:
        """Write the row of a disconnected session, now or when its will is published."""
        if published:
            self.save(session, True)
        elif session.id != 0:
            self._forget_unsaved(session.client_id, session.id)
            self._unsaved[session.client_id] = _Unsaved(session, 0)

    def _will_published(self, session: Session) -> None:
        """A will that waited was published."""
        unsaved = self._unsaved.get(session.client_id)
        if unsaved is None or unsaved.session is not session:
            return
        del self._unsaved[session.client_id]
        if unsaved.row_id:
            self.journal.remove(SESSIONS, unsaved.row_id)
        else:
            self.save(session, True)

    def _forget_unsaved(self, client_id: str, row_id: int) -> None:
        """The client's row is written now; one of an older session must not be beside it."""
        unsaved = self._unsaved.pop(client_id, None)
        if unsaved is not None and unsaved.row_id != 0 and unsaved.row_id != row_id:
            self.journal.remove(SESSIONS, unsaved.row_id)

    def tick(self, pending: dict[str, PendingConnect]) -> None:
        """Publish due wills and end expired sessions, in parts if there are many; not those of ``pending`` clients."""
        if self.paused:
            return
        due = self.due
        due.pending = pending
        due.done_until_tick = False
        due.step(PART_WORK)
        if not due.done:
            self.turns.add(due)


class _Unsaved:
    """A row that is deleted, or written again if ``row_id`` is 0, when the will of its session was published."""

    def __init__(self, session: Session, row_id: int) -> None:
        self.session = session
        self.row_id = row_id


class _Due(LongWork):
    """Wills that are due and sessions that have expired."""

    def __init__(self, lifecycle: SessionLifecycle) -> None:
        self.lifecycle = lifecycle
        self.pending: dict[str, PendingConnect] = {}
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
                lifecycle.save_published(session, lifecycle.wills.publish(session))
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

    def __init__(self, lifecycle: SessionLifecycle, subscriptions: list[Subscription]) -> None:
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
