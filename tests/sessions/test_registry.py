"""Sessions by client id, and their expiry."""

from __future__ import annotations

import pytest

from sessions.context import SessionContext, SessionLimits
from sessions.journal import Journal
from sessions.registry import Registry
from sessions.session import NEVER, Session


@pytest.fixture
def registry() -> Registry:
    return Registry(SessionContext(Journal(True), SessionLimits()), next_session_id=5)


def disconnected(registry: Registry, client_id: str, since: float, expiry: int) -> Session:
    session = registry.create(client_id, True)
    session.expiry_interval = expiry
    session.disconnected_at = since
    registry.schedule_end(session)
    return session


def test_one_client_id_one_session(registry: Registry) -> None:
    first = registry.create("c", True)
    transient = registry.create("d", False)
    second = registry.create("c", True)
    assert (first.id, transient.id, second.id) == (5, 0, 6)
    assert registry.get("c") is second and registry.get("none") is None and len(registry) == 2
    registry.remove(first)
    assert registry.get("c") is second and list(registry.by_id) == [6]
    registry.remove(second)
    registry.remove(transient)
    assert len(registry) == 0 and not registry.by_id


def test_sessions_end_after_their_expiry_interval(registry: Registry) -> None:
    late, early = disconnected(registry, "late", 100.0, 20), disconnected(registry, "early", 105.0, 10)
    disconnected(registry, "never", 0.0, NEVER)
    assert registry.next_expired(114.9) is None
    assert registry.next_expired(115.0) is early
    assert registry.next_expired(200.0) is late
    assert registry.next_expired(300.0) is None


def test_reconnecting_restarts_the_expiry_interval(registry: Registry) -> None:
    session = disconnected(registry, "c", 100.0, 10)
    session.disconnected_at = 108.0
    registry.schedule_end(session)
    assert registry.next_expired(111.0) is None
    assert registry.next_expired(118.0) is session


def test_a_removed_session_does_not_expire(registry: Registry) -> None:
    registry.remove(disconnected(registry, "c", 100.0, 10))
    fresh = disconnected(registry, "c", 105.0, 10)
    assert registry.next_expired(111.0) is None
    assert registry.next_expired(115.0) is fresh
