"""A session belongs to its user: nobody else takes it, closes its connection or ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.core import AcceptAll, Core, CoreClient

from mqttbroker.codec.packets import Connect, Disconnect
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import CLIENT_IDENTIFIER_NOT_VALID, SESSION_TAKEN_OVER
from mqttbroker.core.access.policy import AnonymousPolicy, AuthenticationChain

RULES = "topic readwrite #\nuser alice\ntopic #\ntopic deny secret/#\nuser bob\ntopic #\n"


class UserCore(Core):
    """A core with users and anonymous clients, with access rules or without."""

    def _start(self) -> None:
        super()._start()
        self.policy = AuthenticationChain([AcceptAll()], AnonymousPolicy(True))

    def open(self, user: str | None, client_id: str, version: int = 5, clean_start: bool = False) -> CoreClient:
        """A client whose session never expires; its CONNACK may be a refusal."""
        client = self.client(version)
        fields: dict[str, Any] = {} if user is None else {"username": user, "password": b"x"}
        if version == 5:
            properties = fields["properties"] = Properties()
            properties.session_expiry_interval = 0xFFFFFFFF
        client.connack = client.connect(client_id, clean_start=clean_start, **fields)
        return client


@pytest.fixture(params=["rules", "no rules"])
def core(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[UserCore]:
    others: dict[str, Any] = {"allow_anonymous": True}
    if request.param == "rules":
        (tmp_path / "rules.acl").write_text(RULES)
        others["acl_file"] = tmp_path / "rules.acl"
    with UserCore(tmp_path, others=others) as core:
        yield core


@pytest.mark.normative("5", "MQTT-3.1.3-8")
@pytest.mark.parametrize("clean_start", [False, True])
@pytest.mark.parametrize("thief", ["bob", None])
@pytest.mark.parametrize("version, code", [(5, CLIENT_IDENTIFIER_NOT_VALID), (4, 2)])
def test_another_user_is_refused(core: UserCore, version: int, code: int, thief: str | None, clean_start: bool) -> None:
    alice = core.open("alice", "device")
    alice.subscribe("a/#")
    publisher = core.open("bob", "publisher")
    refused = core.open(thief, "device", version, clean_start)
    assert refused.connack.reason_code == code and refused.closed
    assert not alice.closed and publisher.publish("a/1", b"online", 1) == 0
    assert [message.payload for message in alice.arrived()] == [b"online"]
    alice.close()
    assert publisher.publish("a/1", b"offline", 1) == 0
    for _ in range(2):
        refused = core.open(thief, "device", version, clean_start)
        assert refused.connack.reason_code == code and refused.closed
        core.kill()
    alice = core.open("alice", "device")
    assert alice.connack.session_present
    assert [message.payload for message in alice.arrived()][-1] == b"offline"


def test_the_reason_is_told(core: UserCore) -> None:
    core.open("alice", "device")
    refused = core.open("bob", "device")
    assert refused.connack.properties.reason_string == "the session belongs to another user"


def test_the_owner_takes_over_its_own_session(core: UserCore) -> None:
    first = core.open("alice", "device")
    second = core.open("alice", "device")
    assert second.connack.reason_code == 0 and second.connack.session_present
    assert [packet.reason_code for packet in first.arrived() if isinstance(packet, Disconnect)] == [SESSION_TAKEN_OVER]


def test_a_session_that_waits_for_the_store_has_its_owner(core: UserCore) -> None:
    core.open("alice", "device").close()
    core.eager = False
    waiting = core.client()
    waiting.send(Connect("device", 5, True, 60, username="alice", password=b"x"))
    assert not waiting.arrived()
    refused = core.open("bob", "device", clean_start=True)
    assert refused.connack.reason_code == CLIENT_IDENTIFIER_NOT_VALID
    core.settle()
    core.eager = True
    assert waiting.arrived()[0].reason_code == 0


def test_an_expired_session_has_no_owner(core: UserCore) -> None:
    properties = Properties()
    properties.session_expiry_interval = 10
    core.connect("device", username="alice", password=b"x", properties=properties).close()
    core.advance(9)
    assert core.open("bob", "device").connack.reason_code == CLIENT_IDENTIFIER_NOT_VALID
    core.seconds += 2  # no tick has ended the session yet
    core.broker.outbound.clock.now = int(core.seconds * 1_000_000)
    bob = core.open("bob", "device")
    assert bob.connack.reason_code == 0 and not bob.connack.session_present


def test_a_session_that_ends_with_its_connection_leaves_the_client_id_free(core: UserCore) -> None:
    core.connect("device", username="alice", password=b"x").close()
    assert core.open("bob", "device").connack.reason_code == 0


def test_an_anonymous_session_becomes_that_of_its_first_user(core: UserCore) -> None:
    nobody = core.open(None, "device")
    nobody.subscribe("#")
    nobody.close()
    publisher = core.open("bob", "publisher")
    for topic in ("secret/1", "a/1"):
        publisher.publish(topic, topic.encode(), 1)
    alice = core.open("alice", "device")
    assert alice.connack.session_present
    restricted = core.broker.rules.restrictive
    assert [message.payload for message in alice.arrived()] == ([b"a/1"] if restricted else [b"secret/1", b"a/1"])
    for other in ("bob", None):
        assert core.open(other, "device").connack.reason_code == CLIENT_IDENTIFIER_NOT_VALID


def test_an_anonymous_client_takes_over_an_anonymous_session(core: UserCore) -> None:
    core.open(None, "device")
    assert core.open(None, "device").connack.session_present


# --- client ids bound to users ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, user, client_id, allowed",
    [
        (None, None, "any", True),
        ("%u", "alice", "alice", True),
        ("%u", "alice", "alice2", False),
        ("%u", "alice", "bob", False),
        ("%u", None, "alice", False),
        ("%u-*", "alice", "alice-1", True),
        ("%u-*", "alice", "alice-", True),
        ("%u-*", "alice", "alice", False),
        ("%u-*", "alice", "bob-1", False),
        ("%u", "ali*", "alice", False),
        ("%u", "ali*", "ali*", True),
        ("plant-*", None, "plant-1", True),
        ("plant-*", None, "house-1", False),
    ],
)
@pytest.mark.parametrize("version, code", [(5, CLIENT_IDENTIFIER_NOT_VALID), (4, 2)])
def test_client_ids_bound_to_users(
    core: UserCore, pattern: str | None, user: str | None, client_id: str, allowed: bool, version: int, code: int
) -> None:
    core.terms.client_id_pattern = pattern
    assert core.open(user, client_id, version).connack.reason_code == (0 if allowed else code)


@pytest.mark.parametrize("pattern, assigned", [("%u", "alice"), ("%u-*", "alice-auto-1"), ("plant", "plant")])
def test_a_client_without_an_id_is_assigned_one_that_fits(core: UserCore, pattern: str, assigned: str) -> None:
    core.terms.client_id_pattern = pattern
    alice = core.open("alice", "")
    assert alice.connack.properties.assigned_client_identifier == assigned
    assert core.broker.registry.sessions[assigned].username == "alice"


def test_an_assigned_client_id_is_not_too_long(core: UserCore) -> None:
    core.terms.client_id_pattern = "%u-*"
    assert core.open("a" * 65_535, "").connack.reason_code == CLIENT_IDENTIFIER_NOT_VALID
