"""Permissions in EMQX's formats: decisions, placeholders, mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mqttbroker.auth.permissions import MAX_PERMISSIONS, MAX_SHARED, PermissionsError, PermissionsReader
from mqttbroker.core.access.policy import ALLOWED, DENIED, UNDECIDED


def allow(action: str, *topics: str) -> dict[str, Any]:
    return {"permission": "allow", "action": action, "topics": list(topics)}


def deny(action: str, topic: str) -> dict[str, Any]:
    return {"permission": "deny", "action": action, "topic": topic}


LISTS = {"pub": ["devices/%c/up"], "sub": ["devices/%c/down", "news/#"], "all": ["chat/+"]}
ORDERED = [
    deny("all", "a/secret"),
    allow("publish", "a/#"),
    allow("subscribe", "a/+", "users/${username}/#"),
    deny("subscribe", "eq b/#"),
    allow("subscribe", "b/#", "eq c/#"),
]
CASES = [
    (LISTS, "publish", "devices/c1/up", ALLOWED),
    (LISTS, "publish", "devices/c2/up", DENIED),
    (LISTS, "publish", "devices/c1/down", DENIED),
    (LISTS, "publish", "chat/1", ALLOWED),
    (LISTS, "read", "devices/c1/down", ALLOWED),
    (LISTS, "read", "devices/c1/up", DENIED),
    (LISTS, "read", "news", ALLOWED),
    (LISTS, "read", "chat/1", ALLOWED),
    (LISTS, "subscribe", "devices/c1/down", ALLOWED),
    (LISTS, "subscribe", "devices/+/down", DENIED),
    (LISTS, "subscribe", "news/+/x", ALLOWED),
    (LISTS, "subscribe", "chat/+", ALLOWED),
    (LISTS, "subscribe", "chat/#", DENIED),
    (LISTS, "subscribe", "#", DENIED),
    (ORDERED, "publish", "a/secret", DENIED),
    (ORDERED, "publish", "a/1", ALLOWED),
    (ORDERED, "publish", "x", UNDECIDED),
    (ORDERED, "read", "a/secret", DENIED),
    (ORDERED, "read", "a/1", ALLOWED),
    (ORDERED, "read", "a/1/2", UNDECIDED),
    (ORDERED, "read", "users/u1/x", ALLOWED),
    (ORDERED, "read", "users/u2/x", UNDECIDED),
    (ORDERED, "subscribe", "a/+", ALLOWED),
    (ORDERED, "subscribe", "a/secret", DENIED),
    (ORDERED, "subscribe", "a/#", UNDECIDED),
    (ORDERED, "subscribe", "b/#", DENIED),
    (ORDERED, "subscribe", "b/1", ALLOWED),
    (ORDERED, "read", "b/1", ALLOWED),
    (ORDERED, "subscribe", "c/#", ALLOWED),
    (ORDERED, "subscribe", "c/1", UNDECIDED),
    (ORDERED, "read", "c/1", ALLOWED),
    ({}, "publish", "x", DENIED),
    ([], "publish", "x", UNDECIDED),
    ({"pub": "one"}, "publish", "one", ALLOWED),
    ([{"permission": "allow", "action": "pub", "topic": "t", "qos": [0, 1, 2]}], "publish", "t", ALLOWED),
    ([allow("publish", "$SYS/x")], "publish", "$SYS/x", ALLOWED),
    ([allow("subscribe", "#")], "read", "$SYS/x", UNDECIDED),
    ([allow("publish", "eq t")], "publish", "t", ALLOWED),
]


def decide(claim: object, question: str, topic: str, client_id: str = "c1", username: str | None = "u1") -> int:
    permissions = PermissionsReader().of_claim(claim)
    answer: int = getattr(permissions, f"may_{question}")(client_id, username, topic)
    return answer


@pytest.mark.parametrize(("claim", "question", "topic", "expected"), CASES)
def test_decisions(claim: object, question: str, topic: str, expected: int) -> None:
    assert decide(claim, question, topic) == expected


@pytest.mark.parametrize(
    ("topic_filter", "client_id", "username", "topic", "expected"),
    [
        ("d/%c/x", "a/b", "u", "d/a/b/x", DENIED),
        ("d/%c/x", "+", "u", "d/1/x", DENIED),
        ("d/%c/x", "#", "u", "d/1/x", DENIED),
        ("d/%c", "#", "u", "d/1", DENIED),
        ("d/%u", "c", None, "d/", DENIED),
        ("d/%u", "c", "", "d/", DENIED),
        ("%c/x", "$SYS", "u", "$SYS/x", DENIED),
        ("d/dev-${clientid}/x", "7", "u", "d/dev-7/x", ALLOWED),
        ("%u/%c", "%u", "%c", "%c/%u", ALLOWED),
        ("%u/%c", "%u", "%c", "%c/%c", DENIED),
    ],
)
def test_a_name_never_widens_a_permission(topic_filter: str, client_id: str, username: str | None, topic: str, expected: int) -> None:
    assert decide({"pub": [topic_filter]}, "publish", topic, client_id, username) == expected


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        ("all", "must be a list of permissions, or an object with pub, sub and all"),
        (None, "must be a list"),
        ({"publish": []}, "unknown list 'publish'"),
        ({"pub": 5}, "topics must be a list"),
        ({"pub": [5]}, "a topic must be a string"),
        ({"pub": ["a/#/b"]}, "not a topic filter: 'a/#/b'"),
        ({"sub": ["$share/g/a"]}, "not a topic filter"),
        ({"sub": ["a/${peerhost}"]}, "unknown placeholder"),
        ([5], "a permission must be an object"),
        ([{"action": "all", "topic": "a"}], 'permission must be "allow" or "deny"'),
        ([{"permission": "allow", "action": "read", "topic": "a"}], "action must be"),
        ([{"permission": "allow", "action": ["all"], "topic": "a"}], "action must be"),
        ([{"permission": "allow", "action": "all"}], "no topic"),
        ([{"permission": "allow", "action": "all", "topic": "a", "qos": [1]}], "for some QoS"),
        ([{"permission": "allow", "action": "all", "topic": "a", "qos": [0, "1", None]}], "for some QoS"),
        ([{"permission": "allow", "action": "all", "topic": "a", "retain": False}], "by the retain flag"),
        ([{"permission": "allow", "action": "all", "topic": "a", "ipaddr": "10.0.0.1"}], "'ipaddr' is not supported"),
        ({"pub": ["t"] * (MAX_PERMISSIONS + 1)}, "more than 256 topics"),
        ({"pub": ["t" * 65000, "u" * 65000]}, "more than 65536 bytes"),
    ],
)
def test_mistakes(claim: object, reason: str) -> None:
    with pytest.raises(PermissionsError, match=reason):
        PermissionsReader().of_claim(claim)


def test_a_nested_claim_is_a_mistake() -> None:
    with pytest.raises(PermissionsError, match="not JSON"):
        PermissionsReader().of_text("[" * 60_000)


def test_equal_permissions_are_shared_and_survive_as_text() -> None:
    reader = PermissionsReader()
    first = reader.of_claim(LISTS)
    assert reader.of_claim(json.loads(json.dumps(LISTS))) is first
    assert PermissionsReader().of_text(first.text).text == first.text
    for number in range(MAX_SHARED):
        reader.of_claim({"pub": [f"t/{number}"]})
    assert reader.of_claim(LISTS) is not first
