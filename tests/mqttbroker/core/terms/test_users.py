"""Limits by user name: connections, connects per second and sessions, for both versions of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.core import Core, CoreClient, believe_user_names

from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import CONNECTION_RATE_EXCEEDED, QUOTA_EXCEEDED
from mqttbroker.config.settings import Limits, Settings
from mqttbroker.core.terms import users as users_module
from mqttbroker.server.assembly import apply_limits


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Core]:
    cores: list[Core] = []

    def start(**limits: Any) -> Core:
        core = Core(tmp_path, others={"allow_anonymous": True}, **limits)
        believe_user_names(core)
        cores.append(core)
        return core

    yield start  # type: ignore[misc]
    for core in cores:
        core.close()


def code(core: Core, client_id: str, user: str | None, version: int, **fields: Any) -> int:
    return connect(core, client_id, user, version, **fields).connack.reason_code


def connect(core: Core, client_id: str, user: str | None, version: int, **fields: Any) -> CoreClient:
    client = core.client(version)
    client.connack = client.connect(client_id, username=user, **persistent(version), **fields)
    return client


def persistent(version: int) -> dict[str, Any]:
    """The fields of a CONNECT whose session outlives the connection."""
    if version < 5:
        return {"clean_start": False}
    properties = Properties()
    properties.session_expiry_interval = 1000
    return {"clean_start": False, "properties": properties}


VERSIONS = pytest.mark.parametrize(("version", "refused"), [(5, QUOTA_EXCEEDED), (4, 3)])


@VERSIONS
def test_connections_of_one_user(start: Callable[..., Core], version: int, refused: int) -> None:
    core = start(max_connections_per_user=2)
    first = connect(core, "a", "alice", version)
    assert code(core, "b", "alice", version) == 0
    assert code(core, "c", "alice", version) == refused
    assert code(core, "d", "bob", version) == code(core, "e", None, version) == 0
    assert code(core, "a", "alice", version) == 0 and first.closed  # it replaces its older connection
    assert core.control.sessions.disconnect("b")
    assert code(core, "c", "alice", version) == 0
    assert core.control.status().limits_reached == {"max_connections_per_user": 1}
    for client in core.clients:
        client.close()
    assert not core.broker.users.users and not core.broker.users.idle


@pytest.mark.parametrize(("version", "refused"), [(5, CONNECTION_RATE_EXCEEDED), (4, 3)])
def test_connects_per_second_of_one_user(start: Callable[..., Core], version: int, refused: int) -> None:
    core = start(max_connect_rate_per_user=2)
    assert [code(core, f"c{number}", "alice", version) for number in range(21)] == [0] * 20 + [refused]
    assert code(core, "c", "bob", version) == code(core, "d", None, version) == 0
    core.advance(1.0)
    assert [code(core, "e", "alice", version) for _ in range(3)] == [0, 0, refused]


@VERSIONS
def test_sessions_of_one_user(start: Callable[..., Core], version: int, refused: int) -> None:
    core = start(max_sessions_per_user=2)
    assert code(core, "a", "alice", version) == code(core, "b", "alice", version) == 0
    for client in core.clients:
        client.disconnect()
        client.close()
    assert code(core, "c", "alice", version) == refused
    assert code(core, "a", "alice", version) == 0  # an existing session is resumed
    assert code(core, "d", None, version) == code(core, "e", "bob", version) == 0
    assert code(core, "d", "alice", version) == refused  # the session of an anonymous client would be another one
    list(core.control.sessions.delete("b"))
    assert code(core, "d", "alice", version) == 0 and code(core, "b", "alice", version) == refused
    core.settle()
    core.kill()
    believe_user_names(core)
    assert code(core, "b", "alice", version) == refused and code(core, "a", "alice", version) == 0


def test_a_clean_start_replaces_a_session_and_an_expired_one_does_not_count(start: Callable[..., Core]) -> None:
    core = start(max_sessions_per_user=1)
    assert code(core, "a", "alice", 5) == 0
    client = core.client()
    assert client.connect("a", username="alice", clean_start=True).reason_code == 0
    assert code(core, "b", "alice", 5) == QUOTA_EXCEEDED
    client.disconnect()
    assert code(core, "b", "alice", 5) == 0
    core.clients[-1].close()
    core.advance(1001.0)
    assert code(core, "c", "alice", 5) == 0 and core.broker.users.sessions == {"alice": 1}


def test_a_limit_that_is_set_later_counts_the_sessions_there_are(start: Callable[..., Core]) -> None:
    core = start()
    for number in range(3):
        assert code(core, f"c{number}", "alice", 5) == 0
    assert core.broker.users.sessions is None
    apply_limits(core.broker, Settings(limits=Limits(max_sessions_per_user=3)))
    assert code(core, "d", "alice", 5) == QUOTA_EXCEEDED and code(core, "c1", "alice", 5) == 0
    apply_limits(core.broker, Settings())
    assert code(core, "d", "alice", 5) == 0 and core.broker.users.sessions is None


def test_a_refused_client_changes_nothing(start: Callable[..., Core]) -> None:
    core = start(max_connections_per_user=1)
    first = connect(core, "a", "alice", 5)
    anonymous = connect(core, "x", None, 5)
    assert code(core, "x", "alice", 5) == QUOTA_EXCEEDED
    assert not first.closed and not anonymous.closed and core.broker.registry.sessions["x"].username is None


def test_users_that_sent_too_fast_are_remembered_and_bounded(start: Callable[..., Core], monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(max_publish_rate_per_user=1)
    users = core.broker.users
    for number in range(20):
        user = users.connected(f"u{number}", 0.0)
        assert user is not None
        user.received.count(5, 0, 0.0)
        users.disconnected(user, 0.0)
    assert len(users.idle) == 20
    again = users.connected("u7", 1.0)
    assert again is not None and again.received.wait(1.0) == pytest.approx(3.0)
    users.disconnected(again, 1.0)
    for number in range(20):
        user = users.connected(f"v{number}", 9.0)
        assert user is not None
        users.disconnected(user, 9.0)
    assert not users.idle and not users.users and users_module.MAX_IDLE == 65_536
