"""Listeners with users, rules and limits of their own, and sessions that come back through another one."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient
from support.stream_client import StreamClient, unix_socket

from mqttbroker.codec.packets import Connect, Disconnect, Publish, Will
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    BAD_USER_NAME_OR_PASSWORD,
    NOT_AUTHORIZED,
    RECEIVE_MAXIMUM_EXCEEDED,
    TOPIC_ALIAS_INVALID,
)

KEPT = 1000  # seconds a session is kept


def user(name: str, password: str) -> str:
    """A line of a password file."""
    salt = b"saltsaltsalt"
    key = hashlib.sha512(password.encode() + salt).digest()
    return f"{name}:$6${base64.b64encode(salt).decode()}${base64.b64encode(key).decode()}\n"


class House:
    """A broker with a TCP listener under what holds for all, and Unix sockets ``inside`` and ``outside`` with files of
    their own: ``public/#`` may be read everywhere, the rest by those who are inside."""

    def __init__(self, directory: Path, **outside: Any) -> None:
        self.directory = directory
        for place, secret in (("all", "a"), ("inside", "i"), ("outside", "o")):
            self.users(place, user("alice", secret))
        self.rules("all", "user alice\ntopic read public/#\n")
        self.rules("inside", "user alice\ntopic #\n")
        self.rules("outside", "user alice\ntopic read public/#\ntopic write public/#\n")
        self.listeners: list[dict[str, Any]] = [
            {"host": "127.0.0.1"},
            {"type": "unix", **self.files("inside")},
            {"type": "unix", **self.files("outside"), **outside},
        ]
        names = self.files("all")
        self.config = {"password_file": names["password_file"], "acl_file": names["acl_file"], "allow_anonymous": False}
        self.process = BrokerProcess(config={**self.config, "listeners": self.listeners})
        self.clients: list[RawClient] = []

    def files(self, place: str) -> dict[str, str]:
        return {
            "path": str(self.directory / f"{place}.sock"),
            "password_file": str(self.directory / f"{place}.users"),
            "acl_file": str(self.directory / f"{place}.rules"),
        }

    def users(self, place: str, text: str) -> None:
        (self.directory / f"{place}.users").write_text(text)

    def rules(self, place: str, text: str) -> None:
        (self.directory / f"{place}.rules").write_text(text)

    def open(self, place: str, version: int = 5) -> RawClient:
        self.process.wait_for_log("event=started")
        if place == "all":
            client = RawClient(self.process.port, version)
        else:
            client = StreamClient(unix_socket(self.directory / f"{place}.sock"), version)
        self.clients.append(client)
        return client

    def enter(self, place: str, client_id: str, **fields: Any) -> RawClient:
        """As alice, with the password of that listener."""
        client = self.open(place)
        assert client.connect(client_id, username="alice", password=place[:1].encode(), **fields).reason_code == 0
        return client

    def resume(self, place: str, client_id: str) -> RawClient:
        """The same, for a session that is kept."""
        return self.enter(place, client_id, clean_start=False, properties=expiry())

    def forget(self, client_id: str) -> None:
        """End a session that was kept."""
        self.enter("inside", client_id).disconnect()

    def reload(self) -> None:
        after = len(self.process.lines)
        os.kill(self.process.pid, signal.SIGHUP)
        self.process.wait_for_log("event=(acl_reloaded|reload_failed) .*outside.rules", after=after)


def expiry() -> Properties:
    properties = Properties()
    properties.session_expiry_interval = KEPT
    return properties


def payloads(client: RawClient) -> list[bytes]:
    """What has come, acknowledged."""
    taken = []
    for packet in client.ping():
        assert isinstance(packet, Publish), packet
        client.inbox.append(packet)
        taken.append(client.take().payload)
    return taken


def denied(house: House) -> float:
    """Messages so far that somebody was not allowed to send or to have."""
    text = house.process.get("/metrics").decode()
    return float(text.partition('messages_dropped_total{cause="not_authorized"} ')[2].split()[0])


def taken(client: RawClient, count: int) -> list[bytes]:
    """The next messages, which at QoS 2 come when they are on disk."""
    return [client.take().payload for _ in range(count)]


@pytest.fixture(scope="module")
def shared_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    with house.process:
        yield house


@pytest.fixture
def house(shared_house: House) -> Iterator[House]:
    """For tests that leave nothing behind but connections."""
    yield shared_house
    for client in shared_house.clients:
        client.close()
    shared_house.clients.clear()


@pytest.fixture
def own_house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    with house.process:
        yield house


# --- users --------------------------------------------------------------------------------------------------------


def test_each_listener_has_its_own_users(house: House) -> None:
    for place in ("all", "inside", "outside"):
        for password in ("a", "i", "o"):
            with house.open(place) as client:
                code = client.connect("c", username="alice", password=password.encode()).reason_code
                assert code == (0 if password == place[:1] else BAD_USER_NAME_OR_PASSWORD)


def test_a_listener_without_a_file_asks_nobody(tmp_path: Path) -> None:
    house = House(tmp_path, password_file="", acl_file="", allow_anonymous=True)
    with house.process, house.open("outside") as client, house.open("all") as refused:
        assert client.connect("c", username="eve", password=b"x").reason_code == 0
        assert client.publish("anything", b"", 1) == 0x10
        assert refused.connect("d").reason_code == NOT_AUTHORIZED


def test_sighup_sends_away_whom_the_file_let_in(own_house: House) -> None:
    inside, outside, everywhere = (own_house.enter(place, place) for place in ("inside", "outside", "all"))
    own_house.users("outside", user("alice", "new"))
    own_house.reload()
    assert outside.expect(Disconnect).reason_code == NOT_AUTHORIZED
    assert inside.ping() == everywhere.ping() == []
    with own_house.open("outside") as client:
        assert client.connect("c", username="alice", password=b"new").reason_code == 0


# --- rules --------------------------------------------------------------------------------------------------------


def test_each_listener_has_its_own_rules(house: House) -> None:
    inside, outside, everywhere = (house.enter(place, place) for place in ("inside", "outside", "all"))
    for client in (inside, outside, everywhere):
        client.subscribe("#", options=0)
    for topic in ("secret/1", "public/1", "secret/1", "public/1"):
        assert inside.publish(topic, topic.encode(), 1) == 0
    assert outside.publish("secret/1", b"no", 1) == NOT_AUTHORIZED
    assert outside.publish("public/1", b"yes", 1) == 0
    assert everywhere.publish("public/1", b"no", 1) == NOT_AUTHORIZED
    assert payloads(inside) == [b"secret/1", b"public/1", b"secret/1", b"public/1", b"yes"]
    assert payloads(outside) == payloads(everywhere) == [b"public/1", b"public/1", b"yes"]


def test_members_of_one_group_have_the_rights_of_their_listeners(house: House) -> None:
    inside, outside = (house.enter(place, place) for place in ("inside", "outside"))
    for client in (inside, outside):
        client.subscribe("$share/g/#", options=0)
    for _ in range(4):
        inside.publish("secret/1", b"s", 1)
    assert payloads(inside) == [b"s"] * 4 and payloads(outside) == []


def test_retained_messages_are_judged_by_listener(own_house: House) -> None:
    with own_house.enter("inside", "writer") as writer:
        for topic in ("secret/1", "public/1"):
            writer.publish(topic, topic.encode(), 1, retain=True)
    for place, expected in (("inside", {b"secret/1", b"public/1"}), ("outside", {b"public/1"})):
        with own_house.enter(place, place) as client:
            client.subscribe("+/1")
            assert set(payloads(client)) == expected


def test_sighup_changes_the_rules_of_one_listener(own_house: House) -> None:
    inside, outside = (own_house.enter(place, place) for place in ("inside", "outside"))
    outside.subscribe("#", options=0)
    inside.publish("secret/1", b"1", 1)
    assert outside.publish("public/1", b"", 1) == 0
    own_house.rules("outside", "user alice\ntopic read secret/#\n")
    own_house.reload()
    inside.publish("secret/1", b"2", 1)
    assert outside.publish("public/1", b"3", 1) == NOT_AUTHORIZED
    assert payloads(outside) == [b"", b"2"]
    own_house.rules("outside", "user alice\ntopic rw a\n")
    own_house.reload()
    own_house.process.wait_for_log(r"event=reload_failed reason=.listeners\.2\.acl_file: .*outside\.rules:2: access must be")
    inside.publish("secret/1", b"4", 1)
    assert payloads(outside) == [b"4"]


# --- sessions that move -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_a_session_has_the_rights_of_the_listener_it_comes_back_by(house: House, qos: int) -> None:
    before = denied(house)
    writer = house.enter("inside", "writer")
    with house.resume("inside", "mover") as mover:
        mover.subscribe("#", "$share/g/#", options=qos)
        writer.publish("secret/1", b"s0", 1)
        assert taken(mover, 2) == [b"s0", b"s0"]
        mover.disconnect(properties=expiry())
    for payload in (b"s1", b"p1", b"s2"):
        writer.publish("public/1" if payload[:1] == b"p" else "secret/1", payload, qos)
    with house.resume("outside", "mover") as mover:
        assert taken(mover, 2) == [b"p1", b"p1"]
        writer.publish("secret/1", b"s3", qos)
        writer.publish("public/1", b"p2", qos)
        assert taken(mover, 2) == [b"p2", b"p2"]
        assert mover.publish("secret/1", b"no", 1) == NOT_AUTHORIZED
    with house.resume("inside", "mover") as mover:
        writer.publish("secret/1", b"s4", qos)
        assert taken(mover, 2) == [b"s4", b"s4"]
    assert denied(house) - before == 5
    house.forget("mover")


def test_a_takeover_brings_the_rights_of_the_new_listener(house: House) -> None:
    writer, old = house.enter("inside", "writer"), house.resume("inside", "mover")
    old.subscribe("#", options=1)
    writer.publish("secret/1", b"s1", 1)
    assert payloads(old) == [b"s1"]
    new = house.resume("outside", "mover")
    writer.publish("secret/1", b"s2", 1)
    writer.publish("public/1", b"p1", 1)
    assert payloads(new) == [b"p1"]
    house.forget("mover")


def test_a_session_that_is_away_stays_under_its_rules_through_a_restart(own_house: House) -> None:
    for place in ("inside", "outside", "all"):
        with own_house.resume(place, f"away-{place}") as away:
            away.subscribe("#", options=1)
    writer = own_house.enter("inside", "writer")
    writer.publish("secret/1", b"s1", 1)
    after = len(own_house.process.lines)
    own_house.process.restart(kill=True)
    own_house.process.wait_for_log("event=started", after=after)
    writer = own_house.enter("inside", "writer")
    writer.publish("secret/1", b"s2", 1)
    writer.publish("public/1", b"p1", 1)
    for place, expected in (("inside", [b"s1", b"s2", b"p1"]), ("outside", [b"p1"]), ("all", [b"p1"])):
        with own_house.resume(place, f"away-{place}") as back:
            assert payloads(back) == expected


def test_a_session_of_a_listener_that_is_gone_gets_nothing_until_it_is_back(own_house: House) -> None:
    with own_house.resume("outside", "away") as away:
        away.subscribe("#", options=1)
    own_house.process.terminate()
    more = BrokerProcess(own_house.process.data_dir, {**own_house.config, "listeners": own_house.listeners[:2]})
    own_house.process.close = lambda: None  # type: ignore[method-assign]
    own_house.process, before = more, own_house.process
    try:
        with more:
            writer = own_house.enter("inside", "writer")
            writer.publish("public/1", b"p1", 1)
            with own_house.resume("all", "away") as back:
                writer.publish("public/1", b"p2", 1)
                assert payloads(back) == [b"p2"]
    finally:
        type(before).close(before)


def test_a_will_is_judged_where_its_client_came_in(house: House) -> None:
    reader = house.enter("inside", "reader")
    reader.subscribe("#", options=0)
    for place, topic in (("outside", "secret/1"), ("outside", "public/1"), ("inside", "secret/1")):
        house.enter(place, f"doomed-{place}", will=Will(topic, f"{place} {topic}".encode())).close()
        house.process.wait_for_log(f"event=disconnected client=doomed-{place}")
    assert reader.take().payload == b"outside public/1"
    assert reader.take().payload == b"inside secret/1"


# --- check-config -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "content", "reason"),
    [
        ("password_file", "alice:$7$x\n", "users:1: unknown kind of hash"),
        ("password_file", None, "users: cannot be read: No such file or directory"),
        ("acl_file", "user\n", "users:1: user without a name"),
        ("acl_file", None, "users: cannot be read: No such file or directory"),
    ],
)
def test_check_config_names_file_key_and_reason(tmp_path: Path, key: str, content: Optional[str], reason: str) -> None:
    if content is not None:
        (tmp_path / "users").write_text(content)
    text = f'[[listeners]]\n[[listeners]]\nport = 1884\n{key} = "{tmp_path}/users"\n'
    (tmp_path / "broker.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mqttbroker", "check-config", "broker.toml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"broker.toml: listeners.1.{key}: {tmp_path}/{reason}") and done.stderr.count("\n") == 1


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Everything that a listener may limit, on a Unix socket."""
    path = tmp_path_factory.mktemp("limited") / "mqtt.sock"
    own = {"receive_maximum": 3, "topic_alias_maximum": 2, "max_keep_alive": "20s", "connect_timeout": "300ms"}
    listeners = [{"host": "127.0.0.1"}, {"type": "unix", "path": str(path), **own}]
    with BrokerProcess(config={"listeners": listeners}) as process:
        process.wait_for_log("event=started")
        yield process


def limited_client(process: BrokerProcess, version: int = 5) -> RawClient:
    path = process.wait_for_log(r"event=listening type=unix path=(\S+)")[1]
    return StreamClient(unix_socket(Path(path)), version)


def test_limits_of_a_listener_are_told_to_its_clients_alone(limited: BrokerProcess) -> None:
    with limited_client(limited) as own, RawClient(limited.port) as other:
        granted = own.connect("own", keep_alive=60).properties
        assert (granted.receive_maximum, granted.topic_alias_maximum, granted.server_keep_alive) == (3, 2, 20)
        granted = other.connect("other", keep_alive=60).properties
        assert (granted.receive_maximum, granted.topic_alias_maximum, granted.server_keep_alive) == (1000, 10, -1)


def test_limits_of_a_listener_hold_for_its_clients_alone(limited: BrokerProcess) -> None:
    messages = [Publish("limit", b"", 2, packet_id=number) for number in range(1, 5)]
    alias = Properties()
    alias.topic_alias = 3
    aliased = [Publish("limit", b"", properties=alias)]
    for packets, reason_code in ((messages, RECEIVE_MAXIMUM_EXCEEDED), (aliased, TOPIC_ALIAS_INVALID)):
        with limited_client(limited) as own, RawClient(limited.port) as other:
            for client in (own, other):
                client.connect()
                client.send(*packets)
            assert own.wait_for(Disconnect).reason_code == reason_code
            other.ping()


def test_a_listener_has_its_own_patience(limited: BrokerProcess) -> None:
    with limited_client(limited) as own, RawClient(limited.port) as other:
        own.expect_closed()
        other.send(Connect("patient", 5))
        other.ping()
