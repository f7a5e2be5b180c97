"""Access rules: the same decisions as Mosquitto 2, on every path of a message."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core import AcceptAll, Core, CoreClient
from support.local_kafka import free_ports
from support.properties import session_expiry
from support.raw_client import RawClient
from support.tools import needs, program

from mqttbroker.auth.acl import Acl, AclError, covers, overlap, parse_acl
from mqttbroker.codec.packets import Puback, Publish, Pubrec, Will
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import NO_MATCHING_SUBSCRIBERS, NOT_AUTHORIZED, UNSPECIFIED_ERROR
from mqttbroker.core.access.policy import AnonymousPolicy, AuthenticationChain
from topic_matcher.filters import matches

RULES = """
# anonymous
topic read news/#
topic deny news/secret
topic write in

user alice
topic alice/#
topic read all/#
topic readwrite shared/+/x
topic write drop box
topic deny alice/private/#
topic $SYS/broker/uptime

user bob
topic read readwrite
topic deny
topic #

pattern readwrite clients/%c/#
pattern read users/%u/in
pattern write users/%u/out/+
pattern deny users/eve/#
pattern read %c/%u
pattern write plain/#
"""

# (client id, user, topic, may read, may publish)
DECISIONS: list[tuple[str, str | None, str, bool, bool]] = [
    ("c", None, "news/1", True, False),
    ("c", None, "news/secret", False, False),
    ("c", None, "news", True, False),
    ("c", None, "in", False, True),
    ("c", None, "alice/1", False, False),
    ("c", None, "clients/c/1", True, True),
    ("c", None, "clients/d/1", False, False),
    ("c", None, "users/c/in", False, False),
    ("c", None, "plain/1", False, True),
    ("c", "alice", "news/1", False, False),
    ("c", "alice", "alice", True, True),
    ("c", "alice", "alice/1/2", True, True),
    ("c", "alice", "alice/private", False, False),
    ("c", "alice", "alice/private/1", False, False),
    ("c", "alice", "all/1", True, False),
    ("c", "alice", "shared/1/x", True, True),
    ("c", "alice", "shared/1/2/x", False, False),
    ("c", "alice", "drop box", False, True),
    ("c", "alice", "$SYS/broker/uptime", True, True),
    ("c", "alice", "$SYS/broker/load", False, False),
    ("c", "alice", "users/alice/in", True, False),
    ("c", "alice", "users/alice/out/1", False, True),
    ("c", "alice", "users/alice/out", False, False),
    ("c", "alice", "users/bob/in", False, False),
    ("c", "alice", "c/alice", True, False),
    ("c", "bob", "deny", True, True),
    ("c", "bob", "readwrite", True, True),
    ("c", "bob", "any/thing", True, True),
    ("c", "bob", "$SYS/broker/load", False, False),
    ("c", "carol", "news/1", False, False),
    ("c", "carol", "plain/1", False, True),
    ("c", "eve", "users/eve/in", False, False),
    # Names with wildcards, several levels or a leading $
    ("#", None, "clients/x/1", False, False),
    ("+", None, "clients/x/1", False, False),
    ("#", None, "plain/1", False, False),
    ("#", None, "news/1", True, False),
    ("c", "+", "users/alice/in", False, False),
    ("a/b", None, "clients/a/b", False, False),
    ("a/b", None, "clients/a/b/1", False, False),
    ("c", "alice/in", "users/alice/in", False, False),
    ("c", "", "users//in", False, False),
    ("$SYS", "broker", "$SYS/broker", False, False),
]


@pytest.mark.parametrize("client_id, username, topic, reads, writes", DECISIONS)
def test_decisions(client_id: str, username: str | None, topic: str, reads: bool, writes: bool) -> None:
    acl = parse_acl(RULES, "acl")
    assert acl.may_read(client_id, username, topic) is reads
    assert acl.may_publish(client_id, username, topic) is writes


def test_without_rules_everything_is_denied() -> None:
    assert not parse_acl("", "acl").may_read("c", None, "a")
    assert not Acl().may_publish("c", "u", "a")


def test_the_order_of_rules_does_not_matter() -> None:
    for text in ("topic a/#\ntopic deny a/b", "topic deny a/b\ntopic a/#"):
        acl = parse_acl(text, "acl")
        assert acl.may_read("c", None, "a/c") and not acl.may_read("c", None, "a/b")


def test_the_rules_of_a_user_may_be_in_two_places() -> None:
    acl = parse_acl("user a\ntopic x\nuser b\ntopic y\nuser a\ntopic z", "acl")
    assert acl.may_read("c", "a", "x") and acl.may_read("c", "a", "z") and not acl.may_read("c", "a", "y")


@pytest.mark.parametrize(
    "line, reason",
    [
        ("topik a", "'topik'"),
        ("user", "without a name"),
        ("topic", "no topic filter"),
        ("pattern  ", "no topic filter"),
        ("topic rw a", "'rw'"),
        ("topic read a/#/b", "not a topic filter"),
        ("topic read $share/g/a", "not a topic filter"),
        ("pattern read x-%c/#", "whole level"),
        ("pattern a/%u%c", "whole level"),
    ],
)
def test_an_invalid_line_is_named(line: str, reason: str) -> None:
    with pytest.raises(AclError) as caught:
        parse_acl(f"# rules\r\nuser bob\r\n\r\n{line}\r\ntopic a", "rules.acl")
    assert str(caught.value).startswith("rules.acl:4: ") and reason in str(caught.value)


LEVEL = st.sampled_from(["a", "b", "", "$x"])
FILTER = st.builds(
    lambda levels, tail: "/".join(levels + tail) or "+",
    st.lists(st.one_of(LEVEL, st.just("+")), max_size=4),
    st.sampled_from([[], ["#"]]),
)


@given(FILTER, FILTER, st.lists(LEVEL, min_size=1, max_size=5).map("/".join).filter(bool))
def test_a_filter_that_covers_another_matches_all_its_topics(wide: str, narrow: str, topic: str) -> None:
    if covers(wide, narrow) and matches(narrow, topic):
        assert matches(wide, topic)


@pytest.mark.parametrize(
    "wide, narrow, expected",
    [
        ("a/#", "a", True),
        ("a/#", "a/b/+", True),
        ("a/#", "a/#", True),
        ("a/+", "a/#", False),
        ("a/+", "a/b", True),
        ("a/+", "a/+", True),
        ("a/b", "a/+", False),
        ("a", "a/b", False),
        ("a/b", "a", False),
        ("#", "$SYS/#", False),
        ("#", "a", True),
    ],
)
def test_covers(wide: str, narrow: str, expected: bool) -> None:
    assert covers(wide, narrow) is expected


@given(FILTER, FILTER, st.lists(LEVEL, min_size=1, max_size=5).map("/".join).filter(bool))
def test_filters_that_match_one_topic_overlap(one: str, other: str, topic: str) -> None:
    if matches(one, topic) and matches(other, topic):
        assert overlap(one, other)


@pytest.mark.parametrize("one, other, expected", [
    ("a/#", "a", True), ("a/+", "+/b", True), ("a/b", "a/c", False), ("a/b", "a/b/c", False), ("a/+", "a", False),
    ("#", "$SYS/a", False), ("+/#", "a/b/c", True), ("a/#", "b/#", False),
])  # fmt: skip
def test_overlap(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is expected


@pytest.mark.parametrize("topic_filter, expected", [
    ("all/#", True), ("all/+/x", True), ("alice/#", False), ("alice/public", True), ("alice/private/x", False),
    ("alice/+", False), ("drop box", False), ("shared/1/x", True), ("shared/#", False), ("#", False),
    ("users/alice/in", True), ("users/+/in", False), ("clients/c/1", True), ("clients/d/1", False),
])  # fmt: skip
def test_reading_a_whole_filter(topic_filter: str, expected: bool) -> None:
    assert parse_acl(RULES, "acl").may_read_all("c", "alice", topic_filter) is expected


TOPIC = st.lists(LEVEL, min_size=1, max_size=5).map("/".join).filter(bool)


@given(FILTER, TOPIC, st.sampled_from(["alice", "bob", "eve", None]))
def test_each_topic_of_a_filter_that_may_be_read_may_be_read(topic_filter: str, topic: str, username: str | None) -> None:
    acl = parse_acl(RULES.replace("alice/", "a/").replace("all/", "b/"), "acl")
    if matches(topic_filter, topic) and acl.may_read_all("c", username, topic_filter):
        assert acl.may_read("c", username, topic)


# --- in a broker --------------------------------------------------------------------------------------------------


class AclCore(Core):
    """A core with an ACL file that accepts every password."""

    def __init__(self, directory: Path, rules: str, **others: Any) -> None:
        (directory / "rules.acl").write_text(rules)
        super().__init__(directory, others={"acl_file": directory / "rules.acl", "allow_anonymous": True, **others})

    def _start(self) -> None:
        super()._start()
        self.policy = AuthenticationChain([AcceptAll()], AnonymousPolicy(True))

    def as_user(self, user: str | None, client_id: str, version: int = 5, **fields: Any) -> CoreClient:
        if user is not None:
            fields |= {"username": user, "password": b"x"}
        return self.connect(client_id, version, **fields)

    def rules(self, text: str) -> None:
        authorizer: Any = self.broker.rules.of(None)
        authorizer.replace(parse_acl(text, "rules"))
        self.broker.rules_changed()


BASIC = """
user alice
topic read a/#
topic deny a/secret
user bob
topic write a/#
topic read b
"""


@pytest.fixture
def core(tmp_path: Path) -> Iterator[AclCore]:
    with AclCore(tmp_path, BASIC) as core:
        yield core


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [4, 5])
def test_a_denied_publish_is_answered_with_its_reason(core: AclCore, version: int, qos: int) -> None:
    core.as_user("alice", "reader").subscribe("#")
    bob = core.as_user("bob", "writer", version)
    for _ in range(3):
        code = bob.publish("b", b"no", qos)
        assert code == (NOT_AUTHORIZED if qos and version == 5 else 0)
    assert core.control.status().drops["not_authorized"] == 3
    assert bob.publish("a/1", b"yes", qos) == 0
    assert [message.payload for message in core.clients[0].arrived()] == [b"yes"]


def test_denials_without_their_reason(tmp_path: Path) -> None:
    with AclCore(tmp_path, BASIC, reveal_denials=False) as core:
        alice = core.as_user("alice", "c")
        assert alice.subscribe("a/1", "a/secret").reason_codes == [2, UNSPECIFIED_ERROR]
        assert [alice.publish("a/1", b"", qos) for qos in (1, 2)] == [UNSPECIFIED_ERROR] * 2
        assert core.as_user("alice", "old", 4).subscribe("a/secret").reason_codes == [0x80]


def test_cached_decisions_belong_to_one_client(core: AclCore) -> None:
    bob, alice = core.as_user("bob", "writer"), core.as_user("alice", "other")
    for _ in range(2):
        assert bob.publish("a/1", b"", 1) == NO_MATCHING_SUBSCRIBERS
        assert alice.publish("a/1", b"", 1) == NOT_AUTHORIZED
    assert not core.as_user("bob", "new").connection.may_publish


def test_cached_decisions_are_bounded(core: AclCore) -> None:
    bob = core.as_user("bob", "writer")
    for number in range(2500):
        bob.send(Publish(f"a/{number}", b""))
        assert len(bob.connection.may_publish) <= 1000
    assert len(bob.connection.may_publish) > 0


def test_reading_is_decided_by_topic(core: AclCore) -> None:
    alice = core.as_user("alice", "reader")
    assert alice.subscribe("#", "b", "a/secret", "a/+").reason_codes == [2, 2, NOT_AUTHORIZED, 2]
    assert core.as_user("alice", "old", 4).subscribe("a/secret").reason_codes == [0x80]
    bob = core.as_user("bob", "writer")
    bob.subscribe("#")
    for topic in ("a/1", "a/secret"):
        for qos in (0, 1):
            bob.publish(topic, topic.encode(), qos)
    assert [message.topic for message in alice.arrived()] == ["a/1"] * 2
    assert bob.arrived() == []


def test_retained_messages_follow_the_rules(core: AclCore) -> None:
    bob = core.as_user("bob", "writer")
    for topic in ("a/1", "a/secret"):
        bob.publish(topic, b"kept", 1, True)
    alice = core.as_user("alice", "reader")
    alice.subscribe("a/#")
    assert [message.topic for message in alice.arrived()] == ["a/1"]


def test_shared_messages_go_to_members_that_may_read_them(core: AclCore) -> None:
    alice, bob, carol = (core.as_user(user, user) for user in ("alice", "bob", "carol"))
    for client in (alice, bob, carol):
        client.subscribe("$share/g/a/#")
    for number in range(6):
        bob.publish("a/1", b"%d" % number)
        bob.publish("a/secret", b"no")
    assert [message.payload for message in alice.arrived()] == [b"%d" % number for number in range(6)]
    assert bob.arrived() == carol.arrived() == []
    second = core.as_user("alice", "second")
    second.subscribe("$share/g/a/#")
    for _ in range(4):
        bob.publish("a/1", b"")
    assert len(alice.arrived()) == len(second.arrived()) == 2
    alice.unsubscribe("$share/g/a/#")
    bob.publish("a/1", b"")
    assert len(second.arrived()) == 1


def test_messages_of_a_leaving_member_go_to_one_that_may_read_them(core: AclCore) -> None:
    alice, bob, second = (core.as_user(user, name) for user, name in (("alice", "a1"), ("bob", "b"), ("alice", "a2")))
    for client in (alice, bob, second):
        client.subscribe("$share/g/a/#", options=1)
    bob.send(Publish("a/1", b"x", 1, False, False, 1))
    assert [message.payload for message in alice.arrived()] == [b"x"]
    alice.close()
    assert [message.payload for message in second.arrived()] == [b"x"]
    second.close()
    assert [type(packet) for packet in bob.arrived()] == [Puback]


@pytest.mark.parametrize("delay", [0, 5])
def test_wills_follow_the_rules(core: AclCore, delay: int) -> None:
    alice = core.as_user("alice", "reader")
    alice.subscribe("#")
    for user, topic in (("bob", "a/will"), ("alice", "a/no"), (None, "a/anonymous")):
        properties = Properties()
        properties.will_delay_interval = delay
        client = core.as_user(user, f"dies-{user}", will=Will(topic, b"", 1, False, properties), properties=session_expiry())
        client.close()
    core.advance(delay + 1)
    assert [message.topic for message in alice.arrived()] == ["a/will"]


def test_a_disconnected_session_keeps_its_user_through_a_restart(core: AclCore) -> None:
    alice = core.as_user("alice", "sleeper", properties=session_expiry())
    alice.subscribe("#")
    core.kill()
    assert core.broker.registry.sessions["sleeper"].username == "alice"
    bob = core.as_user("bob", "writer")
    bob.publish("a/1", b"", 1)
    bob.publish("a/secret", b"", 1)
    alice = core.as_user("alice", "sleeper", clean_start=False, properties=session_expiry())
    assert alice.connack.session_present
    assert [message.topic for message in alice.arrived()] == ["a/1"]


def test_an_anonymous_session_becomes_that_of_its_next_user(core: AclCore) -> None:
    nobody = core.as_user(None, "device", properties=session_expiry())
    nobody.subscribe("a/#")
    bob = core.as_user("bob", "writer")
    bob.publish("a/1", b"before", 1)
    alice = core.as_user("alice", "device", clean_start=False, properties=session_expiry())
    assert alice.connack.session_present
    bob.publish("a/1", b"after", 1)
    assert [message.payload for message in alice.arrived()] == [b"after"]


def test_new_rules_apply_at_once(core: AclCore) -> None:
    alice, bob = core.as_user("alice", "reader"), core.as_user("bob", "writer")
    alice.subscribe("#")
    assert bob.publish("a/1", b"1", 1) == 0 and bob.publish("c", b"", 1) == NOT_AUTHORIZED
    core.rules("user bob\ntopic write #\nuser alice\ntopic read c")
    assert bob.publish("a/1", b"2", 1) == NO_MATCHING_SUBSCRIBERS and bob.publish("c", b"3", 1) == 0
    core.rules("user alice\ntopic read c")
    assert bob.publish("c", b"4", 1) == NOT_AUTHORIZED
    assert [message.payload for message in alice.arrived()] == [b"1", b"3"]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("seen", [False, True])
def test_queued_messages_follow_the_rules_at_reconnect(core: AclCore, qos: int, seen: bool) -> None:
    """Whether or not a message was sent before; as Mosquitto does (db__check_acl_of_all_messages)."""
    sleeper = core.as_user("alice", "sleeper", properties=session_expiry())
    sleeper.subscribe("a/#", options=qos)
    if not seen:
        sleeper.close()
    bob = core.as_user("bob", "writer")
    for topic in ("a/1", "a/2", "a/1", "a/3"):
        bob.publish(topic, topic.encode(), qos)
    if seen:
        assert len(sleeper.arrived()) == 4
        sleeper.close()
    core.rules(BASIC.replace("topic read a/#", "topic read a/2\ntopic read a/3"))
    for _ in range(2):
        sleeper = core.as_user("alice", "sleeper", clean_start=False, properties=session_expiry())
        assert [message.payload for message in sleeper.arrived()] == [b"a/2", b"a/3"]
        sleeper.close()
        core.kill()
        core.rules(BASIC)
    session = core.broker.registry.get("sleeper")
    assert session is not None and session.deliveries.queued_messages == 2


def test_denied_messages_are_answered_in_order(core: AclCore) -> None:
    bob = core.as_user("bob", "writer")
    bob.send(
        Publish("a/1", b"", 1, False, False, 1),
        Publish("b", b"", 1, False, False, 2),
        Publish("b", b"", 2, False, False, 3),
    )
    answers = bob.arrived()
    assert [type(answer) for answer in answers] == [Puback, Puback, Pubrec]
    assert [answer.packet_id for answer in answers] == [1, 2, 3]
    assert [answer.reason_code for answer in answers] == [0x10, NOT_AUTHORIZED, NOT_AUTHORIZED]


def test_without_an_acl_file_no_decision_is_made(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        assert core.broker.router.rules is None
        assert not core.connect("c").connection.restricted


# --- compared with Mosquitto --------------------------------------------------------------------------------------


@contextmanager
def mosquitto(directory: Path) -> Iterator[int]:
    """The port of a Mosquitto with the same rules that does not check passwords."""
    (port,) = free_ports(1)
    (directory / "rules.acl").write_text(RULES)
    (directory / "rules.acl").chmod(0o644)
    config = directory / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nacl_file {directory}/rules.acl\nuser root\n")
    mosquitto = program("mosquitto")
    assert mosquitto is not None
    process = subprocess.Popen([mosquitto, "-c", str(config)], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None, process.communicate()[1]
        yield port
    finally:
        process.terminate()
        process.communicate()


@needs("mosquitto")
def test_mosquitto_decides_the_same(tmp_path: Path) -> None:
    acl = parse_acl(RULES, "acl")
    differs = []
    with mosquitto(tmp_path) as port, ExitStack() as stack:
        for client_id, username, topic, _, _ in DECISIONS:
            if "/" in client_id or "/" in (username or "") or username == "" or topic.startswith("$SYS"):
                continue  # in 2.0 a name may be several levels, and no client may publish to $SYS
            client = stack.enter_context(RawClient(port))
            credentials = {} if username is None else {"username": username}
            assert client.connect(client_id, **credentials).reason_code == 0
            code = client.publish(topic, b"", 1)
            assert code in (0, 0x10, NOT_AUTHORIZED)
            if acl.may_publish(client_id, username, topic) is not (code != NOT_AUTHORIZED):
                differs.append((client_id, username, topic))
            client.close()
    assert not differs
