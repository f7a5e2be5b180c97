"""Listeners with their own users, rules and limits, and sessions that are resumed through another listener."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.metric_samples import drops, samples
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


class BrokerWithListeners:
    """A broker with a TCP listener under the common rules, and Unix sockets ``inside`` and ``outside`` with files of
    their own: ``public/#`` may be read through each, all topics through ``inside``."""

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
        """A client connected as alice, with the password of the listener."""
        client = self.open(place)
        assert client.connect(client_id, username="alice", password=place[:1].encode(), **fields).reason_code == 0
        return client

    def resume(self, place: str, client_id: str) -> RawClient:
        """The same with a persistent session."""
        return self.enter(place, client_id, clean_start=False, properties=expiry())

    def forget(self, client_id: str) -> None:
        """Delete a persistent session."""
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
    """The payloads received so far, acknowledged."""
    taken = []
    for packet in client.ping():
        assert isinstance(packet, Publish), packet
        client.inbox.append(packet)
        taken.append(client.take().payload)
    return taken


def denied(listeners: BrokerWithListeners) -> float:
    """Messages so far that rules denied to a publisher or a subscriber."""
    return drops(samples(listeners.process.get("/metrics")), "not_authorized")


def denied_at(listeners: BrokerWithListeners, place: str) -> float:
    """Denied messages to or from clients of one listener."""
    listener = f"{listeners.directory / place}.sock"
    return samples(listeners.process.get("/metrics"))[f"mqttbroker_messages_dropped_total/not_authorized/{listener}"]


def taken(client: RawClient, count: int) -> list[bytes]:
    """The payloads of the next messages; at QoS 2 they are sent once they are on disk."""
    return [client.take().payload for _ in range(count)]


@pytest.fixture(scope="module")
def shared_listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerWithListeners]:
    listeners = BrokerWithListeners(tmp_path_factory.mktemp("listeners"))
    with listeners.process:
        yield listeners


@pytest.fixture
def listeners(shared_listeners: BrokerWithListeners) -> Iterator[BrokerWithListeners]:
    """A shared one, for tests that leave only connections behind."""
    yield shared_listeners
    for client in shared_listeners.clients:
        client.close()
    shared_listeners.clients.clear()


@pytest.fixture
def own_listeners(tmp_path: Path) -> Iterator[BrokerWithListeners]:
    listeners = BrokerWithListeners(tmp_path)
    with listeners.process:
        yield listeners


# --- users --------------------------------------------------------------------------------------------------------


def test_each_listener_has_its_own_users(listeners: BrokerWithListeners) -> None:
    for place in ("all", "inside", "outside"):
        for password in ("a", "i", "o"):
            with listeners.open(place) as client:
                code = client.connect("c", username="alice", password=password.encode()).reason_code
                assert code == (0 if password == place[:1] else BAD_USER_NAME_OR_PASSWORD)


def test_a_listener_without_a_password_file_accepts_anonymous_clients(tmp_path: Path) -> None:
    listeners = BrokerWithListeners(tmp_path, password_file="", acl_file="", allow_anonymous=True)
    with listeners.process, listeners.open("outside") as client, listeners.open("all") as refused:
        assert client.connect("c", username="eve", password=b"x").reason_code == 0
        assert client.publish("anything", b"", 1) == 0x10
        assert refused.connect("d").reason_code == NOT_AUTHORIZED


def test_sighup_disconnects_clients_of_the_changed_file_only(own_listeners: BrokerWithListeners) -> None:
    inside, outside, everywhere = (own_listeners.enter(place, place) for place in ("inside", "outside", "all"))
    own_listeners.users("outside", user("alice", "new"))
    own_listeners.reload()
    assert outside.expect(Disconnect).reason_code == NOT_AUTHORIZED
    assert inside.ping() == everywhere.ping() == []
    with own_listeners.open("outside") as client:
        assert client.connect("c", username="alice", password=b"new").reason_code == 0


# --- rules --------------------------------------------------------------------------------------------------------


def test_each_listener_has_its_own_rules(listeners: BrokerWithListeners) -> None:
    inside, outside, everywhere = (listeners.enter(place, place) for place in ("inside", "outside", "all"))
    for client in (inside, outside, everywhere):
        client.subscribe("#", options=0)
    for topic in ("secret/1", "public/1", "secret/1", "public/1"):
        assert inside.publish(topic, topic.encode(), 1) == 0
    assert outside.publish("secret/1", b"no", 1) == NOT_AUTHORIZED
    assert outside.publish("public/1", b"yes", 1) == 0
    assert everywhere.publish("public/1", b"no", 1) == NOT_AUTHORIZED
    assert payloads(inside) == [b"secret/1", b"public/1", b"secret/1", b"public/1", b"yes"]
    assert payloads(outside) == payloads(everywhere) == [b"public/1", b"public/1", b"yes"]


def test_members_of_a_shared_subscription_have_the_rights_of_their_listeners(listeners: BrokerWithListeners) -> None:
    inside, outside = (listeners.enter(place, place) for place in ("inside", "outside"))
    for client in (inside, outside):
        client.subscribe("$share/g/#", options=0)
    for _ in range(4):
        inside.publish("secret/1", b"s", 1)
    assert payloads(inside) == [b"s"] * 4 and payloads(outside) == []


def test_retained_messages_follow_the_rules_of_the_listener(own_listeners: BrokerWithListeners) -> None:
    with own_listeners.enter("inside", "writer") as writer:
        for topic in ("secret/1", "public/1"):
            writer.publish(topic, topic.encode(), 1, retain=True)
    for place, expected in (("inside", {b"secret/1", b"public/1"}), ("outside", {b"public/1"})):
        with own_listeners.enter(place, place) as client:
            client.subscribe("+/1")
            assert set(payloads(client)) == expected


def test_sighup_changes_the_rules_of_one_listener(own_listeners: BrokerWithListeners) -> None:
    inside, outside = (own_listeners.enter(place, place) for place in ("inside", "outside"))
    outside.subscribe("#", options=0)
    inside.publish("secret/1", b"1", 1)
    assert outside.publish("public/1", b"", 1) == 0
    own_listeners.rules("outside", "user alice\ntopic read secret/#\n")
    own_listeners.reload()
    inside.publish("secret/1", b"2", 1)
    assert outside.publish("public/1", b"3", 1) == NOT_AUTHORIZED
    assert payloads(outside) == [b"", b"2"]
    own_listeners.rules("outside", "user alice\ntopic rw a\n")
    own_listeners.reload()
    own_listeners.process.wait_for_log(r"event=reload_failed reason=.listeners\.2\.acl_file: .*outside\.rules:2: access must be")
    inside.publish("secret/1", b"4", 1)
    assert payloads(outside) == [b"4"]


# --- sessions resumed through another listener --------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_a_resumed_session_has_the_rights_of_its_new_listener(listeners: BrokerWithListeners, qos: int) -> None:
    before = denied(listeners)
    writer = listeners.enter("inside", "writer")
    with listeners.resume("inside", "mover") as mover:
        mover.subscribe("#", "$share/g/#", options=qos)
        writer.publish("secret/1", b"s0", 1)
        assert taken(mover, 2) == [b"s0", b"s0"]
        mover.disconnect(properties=expiry())
    for payload in (b"s1", b"p1", b"s2"):
        writer.publish("public/1" if payload[:1] == b"p" else "secret/1", payload, qos)
    with listeners.resume("outside", "mover") as mover:
        assert taken(mover, 2) == [b"p1", b"p1"]
        writer.publish("secret/1", b"s3", qos)
        writer.publish("public/1", b"p2", qos)
        assert taken(mover, 2) == [b"p2", b"p2"]
        assert mover.publish("secret/1", b"no", 1) == NOT_AUTHORIZED
    with listeners.resume("inside", "mover") as mover:
        writer.publish("secret/1", b"s4", qos)
        assert taken(mover, 2) == [b"s4", b"s4"]
    assert denied(listeners) - before == 5
    listeners.forget("mover")


def test_a_taken_over_session_has_the_rights_of_its_new_listener(listeners: BrokerWithListeners) -> None:
    writer, old = listeners.enter("inside", "writer"), listeners.resume("inside", "mover")
    old.subscribe("#", options=1)
    writer.publish("secret/1", b"s1", 1)
    assert payloads(old) == [b"s1"]
    new = listeners.resume("outside", "mover")
    writer.publish("secret/1", b"s2", 1)
    writer.publish("public/1", b"p1", 1)
    assert payloads(new) == [b"p1"]
    listeners.forget("mover")


def test_a_disconnected_session_keeps_its_rules_through_a_restart(own_listeners: BrokerWithListeners) -> None:
    for place in ("inside", "outside", "all"):
        with own_listeners.resume(place, f"away-{place}") as away:
            away.subscribe("#", options=1)
    writer = own_listeners.enter("inside", "writer")
    writer.publish("secret/1", b"s1", 1)
    after = len(own_listeners.process.lines)
    own_listeners.process.restart(kill=True)
    own_listeners.process.wait_for_log("event=started", after=after)
    writer = own_listeners.enter("inside", "writer")
    writer.publish("secret/1", b"s2", 1)
    writer.publish("public/1", b"p1", 1)
    for place, expected in (("inside", [b"s1", b"s2", b"p1"]), ("outside", [b"p1"]), ("all", [b"p1"])):
        with own_listeners.resume(place, f"away-{place}") as back:
            assert payloads(back) == expected


def test_a_session_of_a_removed_listener_gets_nothing_until_its_client_connects(
    own_listeners: BrokerWithListeners,
) -> None:
    with own_listeners.resume("outside", "away") as away:
        away.subscribe("#", options=1)
    own_listeners.process.terminate()
    more = BrokerProcess(own_listeners.process.data_dir, {**own_listeners.config, "listeners": own_listeners.listeners[:2]})
    own_listeners.process.close = lambda: None  # type: ignore[method-assign]
    own_listeners.process, before = more, own_listeners.process
    try:
        with more:
            writer = own_listeners.enter("inside", "writer")
            writer.publish("public/1", b"p1", 1)
            with own_listeners.resume("all", "away") as back:
                writer.publish("public/1", b"p2", 1)
                assert payloads(back) == [b"p2"]
    finally:
        type(before).close(before)


def test_a_will_follows_the_rules_of_its_clients_listener(listeners: BrokerWithListeners) -> None:
    reader = listeners.enter("inside", "reader")
    reader.subscribe("#", options=0)
    for place, topic in (("outside", "secret/1"), ("outside", "public/1"), ("inside", "secret/1")):
        listeners.enter(place, f"doomed-{place}", will=Will(topic, f"{place} {topic}".encode())).close()
        listeners.process.wait_for_log(f"event=disconnected client=doomed-{place}")
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
def test_check_config_names_file_key_and_reason(tmp_path: Path, key: str, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "users").write_text(content)
    text = f'[[listeners]]\n[[listeners]]\nport = 1884\n{key} = "{tmp_path}/users"\n'
    (tmp_path / "broker.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mqttbroker", "check-config", "broker.toml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"broker.toml:4: listeners.1.{key}: {tmp_path}/{reason}")
    assert done.stderr.count("\n") == 1


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A Unix socket with all limits that a listener may have."""
    path = tmp_path_factory.mktemp("limited") / "mqtt.sock"
    own = {"receive_maximum": 3, "topic_alias_maximum": 2, "max_keep_alive": "20s"}
    listeners = [{"host": "127.0.0.1"}, {"type": "unix", "path": str(path), **own}]
    with BrokerProcess(config={"listeners": listeners}) as process:
        process.wait_for_log("event=started")
        yield process


def limited_client(process: BrokerProcess, version: int = 5) -> RawClient:
    path = process.wait_for_log(r"event=listening type=unix path=(\S+)")[1]
    return StreamClient(unix_socket(Path(path)), version)


def test_limits_of_a_listener_are_sent_to_its_clients_only(limited: BrokerProcess) -> None:
    with limited_client(limited) as own, RawClient(limited.port) as other:
        granted = own.connect("own", keep_alive=60).properties
        assert (granted.receive_maximum, granted.topic_alias_maximum, granted.server_keep_alive) == (3, 2, 20)
        granted = other.connect("other", keep_alive=60).properties
        assert (granted.receive_maximum, granted.topic_alias_maximum, granted.server_keep_alive) == (-1, 10, -1)


def test_limits_of_a_listener_apply_to_its_clients_only(limited: BrokerProcess) -> None:
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


def test_a_listener_has_its_own_connect_timeout(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    impatient = {"type": "unix", "path": str(tmp_path / "mqtt.sock"), "connect_timeout": "300ms"}
    broker = start_broker(config={"listeners": [{"host": "127.0.0.1", "connect_timeout": "1h"}, impatient]})
    with RawClient(broker.port) as other, limited_client(broker) as own:
        own.expect_closed()
        other.send(Connect("patient", 5))
        other.ping()
