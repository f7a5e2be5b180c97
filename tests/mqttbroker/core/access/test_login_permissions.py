"""Permissions that a login brings: publishing, reading, queues while the client is away, restarts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chains import ChainCore, Scripted, accepting
from support.core import CoreClient

from mqttbroker.auth.permissions import PermissionsReader
from mqttbroker.codec.packets import Will
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import NOT_AUTHORIZED

NEWS = {"sub": ["news/#"], "pub": ["up/%c"]}


class PermissionsCore(ChainCore):
    """A core in which a user has the permissions that `permit` gave it, and the user "root" may do everything."""

    def _start(self) -> None:
        super()._start()
        # As with an authenticator in the settings that may bring permissions.
        self.broker.rules.restrictive = True
        self.broker.router.rules = self.broker.rules
        self.chain(Scripted("tokens", self._answer))
        self.claims = getattr(self, "claims", {"root": None})

    def _answer(self, request: Any) -> None:
        claim = self.claims[request.username]
        accepting(permissions=None if claim is None else PermissionsReader().of_claim(claim))(request)

    def log_in(self, user: str, claim: object = None, version: int = 5, **fields: Any) -> CoreClient:
        """A client with a lasting session."""
        self.claims[user] = claim
        if version == 5:
            fields["properties"] = Properties()
            fields["properties"].session_expiry_interval = 3600
        client = self.open(version, client_id=f"c-{user}", clean_start=False, username=user, password=b"x", **fields)
        assert client.connack.reason_code == 0
        return client


@pytest.fixture
def core(tmp_path: Path) -> Iterator[PermissionsCore]:
    with PermissionsCore(tmp_path) as core:
        yield core


@pytest.mark.parametrize("version", [4, 5])
def test_publish_and_subscribe(core: PermissionsCore, version: int) -> None:
    root, pump = core.log_in("root"), core.log_in("pump", NEWS, version)
    root.subscribe("#")
    assert pump.subscribe("news/#").reason_codes == [2]
    refused = NOT_AUTHORIZED if version == 5 else 0x80
    assert pump.subscribe("#").reason_codes == pump.subscribe("up/c-pump").reason_codes == [refused]
    assert pump.subscribe("$share/g/#").reason_codes == [refused]
    for topic, allowed in (("up/c-pump", True), ("up/c-other", False), ("news/1", False)):
        code = pump.publish(topic, b"x", 1)
        assert code == (0 if allowed or version == 4 else NOT_AUTHORIZED)
        assert [packet.topic for packet in root.arrived()] == ([topic] if allowed else [])
    root.publish("news/1", b"", 1)
    assert pump.take().topic == "news/1"


def test_topics_of_a_wide_subscription_are_checked_one_by_one(core: PermissionsCore) -> None:
    claim = [
        {"permission": "deny", "action": "subscribe", "topic": "a/secret"},
        {"permission": "allow", "action": "subscribe", "topic": "a/#"},
    ]
    root, pump = core.log_in("root"), core.log_in("pump", claim)
    root.publish("a/secret", b"retained", 1, True)
    assert pump.subscribe("a/#").reason_codes == [2]
    for topic in ("a/secret", "a/1"):
        root.publish(topic, b"", 1)
    assert [packet.topic for packet in pump.arrived()] == ["a/1"]


def test_the_rules_of_the_listener_decide_what_the_permissions_do_not(tmp_path: Path) -> None:
    (tmp_path / "rules.acl").write_text("pattern readwrite own/%c\npattern readwrite taboo\n")
    claim = [
        {"permission": "allow", "action": "publish", "topic": "more"},
        {"permission": "deny", "action": "publish", "topic": "taboo"},
    ]
    with PermissionsCore(tmp_path, others={"acl_file": tmp_path / "rules.acl"}) as core:
        pump = core.log_in("pump", claim)
        topics = ("own/c-pump", "more", "taboo", "x")
        assert [pump.publish(topic, b"", 1) in (0, 0x10) for topic in topics] == [True, True, False, False]
    (tmp_path / "without").mkdir()
    with PermissionsCore(tmp_path / "without") as core:
        pump = core.log_in("pump", claim)
        assert pump.publish("x", b"", 1) == NOT_AUTHORIZED


def test_a_will_is_checked(core: PermissionsCore) -> None:
    root = core.log_in("root")
    root.subscribe("#")
    for topic, expected in (("up/c-pump", ["up/c-pump"]), ("news/1", [])):
        core.log_in("pump", NEWS, will=Will(topic, b"gone", 1)).close()
        assert [packet.topic for packet in root.arrived()] == expected


@pytest.mark.parametrize("restart", [False, True])
def test_a_session_keeps_its_permissions_while_the_client_is_away(core: PermissionsCore, restart: bool) -> None:
    claim = [
        {"permission": "deny", "action": "subscribe", "topic": "a/secret"},
        {"permission": "allow", "action": "subscribe", "topic": "a/#"},
    ]
    pump = core.log_in("pump", claim)
    pump.subscribe("a/#")
    pump.close()
    if restart:
        core.kill()
    root = core.log_in("root")
    root.publish("a/secret", b"", 1)
    root.publish("a/1", b"", 1)
    assert core.broker.registry.sessions["c-pump"].deliveries.queue.message_count == 1
    pump = core.log_in("pump", claim)
    assert [packet.topic for packet in pump.arrived()] == ["a/1"]


def test_the_next_login_decides_about_queued_messages(core: PermissionsCore) -> None:
    pump = core.log_in("pump", {"sub": ["a/#"]})
    pump.subscribe("a/#")
    pump.close()
    root = core.log_in("root")
    for topic in ("a/1", "a/2"):
        root.publish(topic, b"", 1)
    pump = core.log_in("pump", {"sub": ["a/2", "a/3"]})
    assert [packet.topic for packet in pump.arrived()] == ["a/2"]
    for topic in ("a/1", "a/3"):
        root.publish(topic, b"", 1)
    assert [packet.topic for packet in pump.arrived()] == ["a/3"]
    core.log_in("pump", None)  # the older connection is replaced, and nothing is restricted any more
    root.publish("a/1", b"", 1)
    assert core.broker.registry.sessions["c-pump"].permissions is None


def test_the_memory_of_permissions_is_counted(core: PermissionsCore) -> None:
    context = core.broker.context
    plain = core.log_in("pump")
    before = context.session_bytes
    plain.close()
    long = {"sub": [f"topic/{number:04}" for number in range(100)]}
    core.log_in("pump", long).close()
    assert context.session_bytes - before > 100 * len("topic/0000")
    core.kill()
    assert core.broker.context.session_bytes - before > 100 * len("topic/0000")
    core.log_in("pump").close()
    assert core.broker.context.session_bytes == before
    core.advance(3601)
    assert core.broker.context.session_bytes == 0


def test_unreadable_permissions_in_the_store_deny_everything(core: PermissionsCore) -> None:
    pump = core.log_in("pump", {"sub": ["a/#"]})
    pump.subscribe("a/#")
    pump.close()
    core.store.stop()
    with sqlite3.connect(core.directory / "core.db") as database:
        database.execute("UPDATE sessions SET permissions = 'torn'")
    database.close()
    core._start()
    core.log_in("root").publish("a/1", b"", 1)
    assert core.broker.registry.sessions["c-pump"].deliveries.queue.message_count == 0


def test_a_broker_without_such_logins_still_applies_stored_permissions(tmp_path: Path) -> None:
    with PermissionsCore(tmp_path) as core:
        pump = core.log_in("pump", {"sub": ["a/#"]})
        pump.subscribe("a/#")
        pump.close()
    with ChainCore(tmp_path) as plain:
        assert plain.broker.rules.restrictive and plain.broker.router.rules is plain.broker.rules
        session = plain.broker.registry.sessions["c-pump"]
        assert plain.broker.rules.may_read(session, "a/1") and not plain.broker.rules.may_read(session, "b")
