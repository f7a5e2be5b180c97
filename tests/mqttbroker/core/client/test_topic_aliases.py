"""Topic aliases in both directions: they change nothing but the size of packets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.core import Core, CoreClient

from mqttbroker.codec.packets import Disconnect, Puback, Publish, Pubrel, Suback, Subscribe, Subscription
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.client.topic_aliases import MAX_ALIASED_PROPERTIES, TopicAliases, publish_with_topic_name


def test_topic_aliases_of_a_publisher(tmp_path: Path) -> None:
    def alias(number: int) -> Properties:
        properties = Properties()
        properties.topic_alias = number
        return properties

    with Core(tmp_path) as core:
        listener = core.connect("l")
        listener.subscribe("#", options=0)
        client = core.connect("p")
        assert client.connack.properties.topic_alias_maximum == 10
        client.send(
            Publish("a", b"1", properties=alias(1)),
            Publish("", b"2", properties=alias(1)),
            Publish("b", b"3", properties=alias(10)),
            Publish("b", b"4", properties=alias(1)),
            Publish("", b"5", properties=alias(1)),
            Publish("", b"6", 1, False, False, 1, alias(10)),
        )
        got = listener.arrived()
        assert [(packet.topic, packet.payload) for packet in got] == [
            ("a", b"1"), ("a", b"2"), ("b", b"3"), ("b", b"4"), ("b", b"5"), ("b", b"6")
        ]  # fmt: skip
        assert all(packet.properties.topic_alias == -1 for packet in got)
        other = core.connect("p2")
        other.send(Publish("", b"", properties=alias(1)))
        assert other.expect(Disconnect).reason_code == 0x82
        client.send(Publish("c", b"", properties=alias(11)))
        client.wait_for(Disconnect)


def test_each_subscriber_is_assigned_its_own_aliases(tmp_path: Path) -> None:
    properties = Properties()
    properties.topic_alias_maximum = 2
    with Core(tmp_path) as core:
        subscribers = [core.connect(name, properties=properties) for name in ("s1", "s2")]
        publisher = core.connect("p")
        for subscriber in subscribers:
            subscriber.subscribe("#", options=0)
            for topic in ("a", "b", "c", "a"):
                publisher.publish(topic, b"x")
        first, second = ([(got.topic, got.properties.topic_alias) for got in subscriber.arrived()] for subscriber in subscribers)
        assert first == [("a", 1), ("b", 2), ("c", -1), ("", 1), ("", 1), ("", 2), ("c", -1), ("", 1)]
        assert second == [("a", 1), ("b", 2), ("c", -1), ("", 1)]


SECTIONS: dict[str, dict[str, Any]] = {
    "alias alone": {},
    "text": {"content_type": "text/plain", "user_properties": [("a", "1"), ("a", "")], "payload_format_indicator": 1},
    "expiry": {"message_expiry_interval": 60, "response_topic": "r"},
    "124 bytes": {"content_type": "x" * 121},
    "125 bytes": {"content_type": "x" * 122},
    "128 bytes": {"content_type": "x" * 125},
}


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 1, 100, 130, 70_000])
@pytest.mark.parametrize("section", SECTIONS)
def test_aliases_change_nothing_else_of_a_message(tmp_path: Path, section: str, size: int, qos: int) -> None:
    """Subscribers of both versions, with and without aliases; publishers with and without aliases."""

    def told(alias: int) -> Properties:
        properties = Properties()
        for name, value in SECTIONS[section].items():
            setattr(properties, name, value)
        properties.topic_alias = alias
        return properties

    one = Properties()
    one.topic_alias_maximum = 1
    payload = b"x" * size
    with Core(tmp_path) as core:
        plain, old = core.connect("plain"), core.connect("old", 4)
        aliased = core.connect("aliased", properties=one)
        subscribers = [plain, old, aliased]
        for subscriber in subscribers:
            subscriber.subscribe("#", options=qos)
        publisher, older = core.connect("p"), core.connect("q", 4)
        topics = []
        for number, (topic, alias) in enumerate([("a/é", 1), ("", 1), ("b", 2), ("", 2), ("", 1), ("a/é", -1), ("b", -1)], 1):
            publisher.send(Publish(topic, payload, qos, packet_id=number if qos else 0, properties=told(alias)))
            topics.append(topic or {1: "a/é", 2: "b"}[alias])
            if qos == 2:
                publisher.send(Pubrel(number))
        older.send(Publish("b", payload, qos, packet_id=9 if qos else 0))
        for subscriber in subscribers:
            *found, last = (packet for packet in subscriber.arrived() if isinstance(packet, Publish))
            assert (last.topic, last.payload, last.properties.content_type) == ("b", payload, None)
            assert [(packet.payload, packet.qos, packet.retain, packet.dup) for packet in found] == [(payload, qos, False, False)] * 7
            if subscriber is aliased:
                assert [packet.topic for packet in found] == ["a/é", "", "b", "b", "", "", "b"]
                assert [packet.properties.topic_alias for packet in found] == [1, 1, -1, -1, 1, 1, -1]
            else:
                assert [packet.topic for packet in found] == topics
            for packet in found:
                if subscriber is not old:
                    wanted = told(packet.properties.topic_alias)
                    assert repr(packet.properties) == repr(wanted)
        received = core.broker.outbound.counters
        assert received.publish_received == 8 and received.publish_sent == 24


def test_a_packet_that_an_alias_makes_too_large_is_sent_by_topic_name(tmp_path: Path) -> None:
    properties = Properties()
    properties.topic_alias_maximum, properties.maximum_packet_size = 1, 40
    with Core(tmp_path) as core:
        subscriber, publisher = core.connect("s", properties=properties), core.connect("p")
        subscriber.subscribe("t", options=2)
        properties.topic_alias_maximum = -1
        plain = core.connect("plain", properties=properties)
        plain.subscribe("t", options=2)
        for qos in (0, 1, 2):
            for size in range(28, 40):
                publisher.publish("t", b"x" * size, qos)
            found = [packet for packet in subscriber.arrived() if isinstance(packet, Publish)]
            most = 34 if qos == 0 else 32
            assert [len(packet.payload) for packet in found] == list(range(28, most + 1))
            assert [packet.properties.topic_alias for packet in found[-3:]] == [1, -1, -1]
            others = [packet for packet in plain.arrived() if isinstance(packet, Publish)]
            assert [packet.payload for packet in others] == [packet.payload for packet in found]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("alias", [1, -1])
def test_a_long_packet_may_have_an_alias(tmp_path: Path, alias: int, qos: int) -> None:
    """A packet that is received and sent in pieces."""
    limit, told = Properties(), Properties()
    limit.topic_alias_maximum = 1
    told.topic_alias, told.payload_format_indicator = alias, 1
    payload = bytes(range(32, 127)) * 4000
    with Core(tmp_path) as core:
        publisher, plain, aliased = core.connect("p"), core.connect("a"), core.connect("b", properties=limit)
        for subscriber in (plain, aliased):
            subscriber.subscribe("#", options=qos)
        for number, topic in enumerate(("long", "long" if alias < 0 else ""), 1):
            packet = Publish(topic, payload, qos, packet_id=number if qos else 0, properties=told).encode(5)
            for at in range(0, len(packet), 100_000):
                publisher.socket.sendall(packet[at : at + 100_000])
        for subscriber, names in ((plain, ["long", "long"]), (aliased, ["long", ""])):
            found = [packet for packet in subscriber.arrived() if isinstance(packet, Publish)]
            assert [packet.topic for packet in found] == names and all(packet.payload == payload for packet in found)
            assert all(packet.properties.payload_format_indicator == 1 for packet in found)
        assert core.broker.outbound.counters.publish_bytes_received == 2 * len(payload)
        publisher.socket.sendall(Publish("long", payload + b"\xff", qos, packet_id=3 if qos else 0, properties=told).encode(5))
        assert publisher.wait_for(Disconnect).reason_code == 0x99


def congested(core: Core) -> CoreClient:
    """A subscriber that accepts aliases and whose socket is full."""
    properties = Properties()
    properties.topic_alias_maximum = 5
    subscriber = core.connect("s", properties=properties)
    subscriber.subscribe("#", options=1)
    subscriber.arrived()
    subscriber.connection.outbox.pause()
    return subscriber


@pytest.mark.parametrize("qos", [0, 1])
def test_an_alias_is_assigned_only_by_a_packet_that_is_not_dropped(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path, max_outbox_bytes=1024) as core:
        publisher, subscriber = core.connect("p"), congested(core)
        publisher.publish("first", b"x" * 1000, qos)
        for topic in ("dropped", "dropped", "first"):
            publisher.publish(topic, b"x" * 1000, 0)
        assert core.control.status().drops["slow_subscriber"] == 3
        subscriber.connection.outbox.resume()
        assert [(packet.topic, packet.properties.topic_alias) for packet in subscriber.arrived()] == [("first", 1)]
        publisher.publish("dropped", b"", 0)
        publisher.publish("first", b"", 0)
        assert [(packet.topic, packet.properties.topic_alias) for packet in subscriber.arrived()] == [
            ("dropped", 2),
            ("", 1),
        ]


def test_qos_1_with_an_alias_is_not_dropped(tmp_path: Path) -> None:
    with Core(tmp_path, max_outbox_bytes=1024) as core:
        publisher, subscriber = core.connect("p"), congested(core)
        sent = [b"%d" % number * 500 for number in range(5)]
        for payload in sent:
            publisher.publish("t", payload, 1)
        subscriber.connection.outbox.resume()
        found = []
        while len(found) < 5:
            subscriber.connection.resume_sending()
            packets = [packet for packet in subscriber.arrived() if isinstance(packet, Publish)]
            assert packets, "the rest was not sent"
            subscriber.send(*(Puback(packet.packet_id) for packet in packets))
            found += [packet.payload for packet in packets]
        assert found == sent and core.control.status().drops["slow_subscriber"] == 0


@pytest.mark.parametrize("granted", [0, 1, 2])
def test_aliases_change_neither_qos_nor_subscription_identifiers(tmp_path: Path, granted: int) -> None:
    limit, identified = Properties(), Properties()
    limit.topic_alias_maximum = 2
    identified.subscription_identifiers = [7]
    with Core(tmp_path) as core:
        publisher = core.connect("p")
        clients = [core.connect(name, properties=limit) for name in ("plain", "identified")]
        for client, properties in zip(clients, (Properties(), identified)):
            client.send(Subscribe(1, [Subscription("t", granted)], properties))
            client.expect(Suback)
        for qos in (2, 1, 0):
            publisher.publish("t", b"x", qos)
        for client, identifiers in zip(clients, ([], [7])):
            found = [packet for packet in client.arrived() if isinstance(packet, Publish)]
            assert sorted(packet.qos for packet in found) == sorted(min(qos, granted) for qos in (0, 1, 2))
            assert [packet.properties.subscription_identifiers for packet in found] == [identifiers] * 3


@pytest.mark.parametrize("expiry", [0, 5])
def test_message_expiry_is_kept_when_an_alias_is_replaced(tmp_path: Path, expiry: int) -> None:
    told = Properties()
    told.topic_alias, told.message_expiry_interval = 1, expiry
    with Core(tmp_path) as core:
        publisher, subscriber = core.connect("p"), core.connect("s")
        subscriber.subscribe("t")
        publisher.send(Publish("t", b"x", properties=told), Publish("", b"y", properties=told))
        assert [packet.properties.message_expiry_interval for packet in subscriber.arrived()] == [expiry, expiry]


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("size", [127 - 4, 16_383 - 4])
def test_a_packet_that_an_alias_makes_one_byte_too_large_is_sent_by_topic_name(tmp_path: Path, size: int, qos: int) -> None:
    """With the alias its Remaining Length takes one byte more."""
    with Core(tmp_path) as core:
        packet = Publish("t", b"x" * (size - 2 * qos), qos, packet_id=qos)
        properties = Properties()
        properties.topic_alias_maximum, properties.maximum_packet_size = 2, len(packet.encode(5)) + 3
        publisher, subscriber = core.connect("p"), core.connect("s", properties=properties)
        subscriber.subscribe("t")
        publisher.send(packet)
        (found,) = (packet for packet in subscriber.arrived() if isinstance(packet, Publish))
        assert (found.topic, found.payload, found.properties.topic_alias) == ("t", packet.payload, -1)
        publisher.publish("t", b"")
        (found,) = subscriber.arrived()
        assert (found.topic, found.properties.topic_alias) == ("t", 1), "an alias was assigned that the client does not know"


def test_aliases_are_assigned_up_to_the_maximum() -> None:
    aliases = TopicAliases(2)
    assert [aliases.find(b"a"), aliases.find(b"b"), aliases.find(b"a")] == [-1, -1, -1]
    aliases.assign(b"b")
    assert [aliases.find(b"a"), aliases.find(b"b")] == [-2, 1]
    aliases.assign(b"a")
    assert [aliases.find(b"a"), aliases.find(b"b"), aliases.find(b"c")] == [2, 1, 0]


def test_a_topic_name_that_makes_the_packet_too_large_is_refused() -> None:
    beyond = 268_435_455 - 2 - 1 - 1
    assert publish_with_topic_name(0x30, b"t", b"", b"\0", b"", beyond)[:5] == b"\x30\xff\xff\xff\x7f"
    with pytest.raises(MQTTError) as refused:
        publish_with_topic_name(0x30, b"t", b"", b"\0", b"", beyond + 1)
    assert refused.value.reason_code == 0x95
    assert MAX_ALIASED_PROPERTIES + 3 <= 128
