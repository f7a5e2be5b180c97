"""``$SYS`` over MQTT: Mosquitto's names, units and formats."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.core import Core
from support.mosquitto import NEEDS_MOSQUITTO, mosquitto
from support.raw_client import RawClient

from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.sys_topics import SysTopics
from mqttbroker.codec.packets import Publish
from mqttbroker.codec.properties import Properties

NUMBERS = (
    ["clients/" + name for name in "total connected disconnected active inactive maximum expired".split()]
    + ["messages/" + name for name in "received sent stored".split()]
    + ["bytes/received", "bytes/sent", "subscriptions/count", "retained messages/count", "shared_subscriptions/count"]
    + ["publish/messages/" + name for name in "received sent dropped".split()]
    + ["publish/bytes/received", "publish/bytes/sent", "store/messages/count", "store/messages/bytes"]
)


def read(client: RawClient) -> dict[str, bytes]:
    client.subscribe("$SYS/#", options=0)
    found = {}
    for packet in client.ping():
        assert isinstance(packet, Publish) and packet.qos == 0
        found[packet.topic.removeprefix("$SYS/broker/")] = packet.payload
    client.unsubscribe("$SYS/#")
    return found


def test_topics_have_mosquittos_names_and_formats(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(config={"sys_interval": "100ms"})
    with RawClient(broker.port) as client:
        client.connect("watch")
        deadline = time.monotonic() + 30
        while (values := read(client)).get("clients/connected") != b"1":
            assert time.monotonic() < deadline, values
        assert re.fullmatch(rb"mqttbroker version \S+", values["version"])
        assert re.fullmatch(rb"\d+ seconds", values["uptime"])
        for name in NUMBERS:
            assert values[name].isdigit(), name
        for load in ("messages/received", "messages/sent", "bytes/received", "publish/sent", "connections"):
            for minutes in (1, 5, 15):
                assert re.fullmatch(rb"\d+\.\d\d", values[f"load/{load}/{minutes}min"])
        client.subscribe("#", options=0)
        client.publish("mine", b"x")
        assert [packet.topic for packet in client.ping() if isinstance(packet, Publish)] == ["mine"]
        client.subscribe("$SYS/broker/uptime", options=0 | 2 << 4)
        message = client.take()
        assert message.topic == "$SYS/broker/uptime" and not message.retain


def next_values(port: int) -> dict[str, bytes]:
    """All topics, as published after this call."""
    with RawClient(port) as client:
        client.connect("watch")
        client.subscribe("$SYS/broker/uptime", options=0)
        while client.wait_for(Publish).retain:
            pass
        return read(client)


def use(port: int) -> None:
    """One client that is connected, one that is away with a queued message, and messages of each QoS."""
    topic = "t" * 5000
    kept = Properties()
    kept.session_expiry_interval = 600
    with RawClient(port) as away:
        away.connect("away", properties=kept)
        away.subscribe("queued")
    with RawClient(port) as subscriber, RawClient(port, 4) as publisher:
        subscriber.connect("subscriber")
        subscriber.subscribe(topic, "other/#")
        publisher.connect("publisher")
        for qos in (0, 1, 2):
            publisher.publish(topic, b"x" * 10_000, qos)
        publisher.publish("queued", b"y" * 1000, 1)
        publisher.publish("retained", b"z" * 3000, 1, retain=True)
        assert [len(subscriber.wait_for(Publish).payload) for _ in range(3)] == [10_000] * 3


@NEEDS_MOSQUITTO
def test_all_topics_of_mosquitto_are_there_and_count_the_same(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    broker = start_broker(config={"sys_interval": "1s"})
    found = []
    with mosquitto(tmp_path, "sys_interval 1") as other:
        for port in (other.port, broker.port):
            before = next_values(port)
            use(port)
            found.append((before, next_values(port)))
    (before, after), (our_before, ours) = found
    assert after.keys() - ours.keys() == set()
    for name in (
        "clients/total",
        "clients/connected",
        "clients/disconnected",
        "subscriptions/count",
        "retained messages/count",
        "publish/messages/dropped",
        "publish/bytes/received",
        "store/messages/count",
        "messages/stored",
    ):
        assert int(ours[name]) - int(our_before[name]) == int(after[name]) - int(before[name]), name
    # Mosquitto 2.0 leaves out PUBLISH packets with QoS 2 or RETAIN.
    assert int(ours["publish/messages/received"]) == 5 == int(after["publish/messages/received"]) + 2
    # The values of $SYS themselves, which are not the same, count too; headers and topics would be 15,000 bytes more.
    for name, tolerance in (("publish/bytes/sent", 4000), ("store/messages/bytes", 200)):
        difference = int(ours[name]) - int(our_before[name]) - int(after[name]) + int(before[name])
        assert abs(difference) < tolerance, (name, difference)
    for name in ("load/sockets", "load/connections", "load/publish/dropped"):
        for minutes in (1, 5, 15):
            assert re.fullmatch(rb"\d+\.\d\d", ours[f"{name}/{minutes}min"])
    assert float(ours["load/sockets/1min"]) > 0 and float(ours["load/connections/1min"]) > 0


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path)


def test_values_are_the_counters(core: Core) -> None:
    with core:
        topics = SysTopics(core.control.status, core.control.messages, Metrics(None), 10)
        kept = Properties()
        kept.session_expiry_interval = 10
        core.connect("gone", properties=kept).close()
        subscriber, publisher = core.connect("s"), core.connect("p", 4)
        subscriber.subscribe("t", "u", "$share/g/t")
        for qos in (0, 1, 2):
            publisher.publish("t", b"12345", qos)
        publisher.publish("kept", b"123", 0, retain=True)
        subscriber.arrived()
        core.advance(11)
        values = topics.values(core.control.status())
        for name, value in {
            "clients/total": 2,
            "clients/connected": 2,
            "clients/maximum": 2,
            "clients/expired": 1,
            "clients/disconnected": 0,
            "subscriptions/count": 3,
            "shared_subscriptions/count": 1,
            "retained messages/count": 1,
            "publish/messages/received": 4,
            "publish/messages/sent": 6,
            "publish/messages/dropped": 0,
            "publish/bytes/received": 3 * 5 + 3,
            "publish/bytes/sent": 6 * 5,
        }.items():
            assert values[f"$SYS/broker/{name}"] == str(value), name
        counters = core.broker.outbound.counters
        assert values["$SYS/broker/bytes/sent"] == str(counters.bytes_sent)
        assert counters.messages_received == 3 + 1 + 5 and counters.messages_sent == 3 + 1 + 6 + 3


def test_values_are_retained_published_when_they_change_and_not_stored(core: Core) -> None:
    with core:
        topics = SysTopics(core.control.status, core.control.messages, Metrics(None), 10)
        topics.publish()
        client = core.connect("c")
        client.subscribe("$SYS/broker/version", "$SYS/broker/clients/connected", options=0)
        assert [(packet.payload, packet.retain) for packet in client.arrived()][1:] == [(b"0", True)]
        topics.publish()
        assert [(packet.payload, packet.retain) for packet in client.arrived()] == [(b"1", False)]
        topics.publish()
        assert client.arrived() == []
        core.settle()
        core.kill()
        assert len(core.broker.retained) == 0
