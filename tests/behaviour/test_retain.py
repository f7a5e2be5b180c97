"""Retained messages over TCP and through restarts (MQTT 5.0 section 3.3.1.3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.core import Core
from support.properties import message_expiry
from support.raw_client import RawClient

from mqttbroker.codec.packets import (
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
)
from mqttbroker.codec.properties import Properties
from mqttbroker.core.sessions.subscriptions import FREE_REPLAYS

RETAIN_AS_PUBLISHED = 8


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("granted", [0, 1, 2])
def test_a_new_subscription_gets_retained_messages(connect: Callable[..., RawClient], version: int, qos: int, granted: int) -> None:
    name = f"retained/{version}/{qos}/{granted}"
    publisher = connect("retain-p", version)
    publisher.publish(f"{name}/a", b"old", qos, retain=True)
    publisher.publish(f"{name}/a", b"new", qos, retain=True)
    publisher.publish(f"{name}/b", b"gone", qos, retain=True)
    publisher.publish(f"{name}/b", b"", qos, retain=True)
    publisher.publish(f"{name}/c", b"live", qos)
    subscriber = connect("retain-s", version)
    subscriber.send(Subscribe(1, [Subscription(f"{name}/+", granted)]))
    subscriber.expect(Suback)
    message = subscriber.take()
    assert (message.topic, message.payload, message.retain, message.qos) == (
        f"{name}/a",
        b"new",
        True,
        min(qos, granted),
    )
    subscriber.expect_nothing()


def test_retain_of_a_live_message_needs_retain_as_published(connect: Callable[..., RawClient]) -> None:
    plain, marked, old = connect("rap-0"), connect("rap-1"), connect("rap-4", 4)
    plain.subscribe("rap")
    old.subscribe("rap")
    marked.subscribe("rap", options=2 | RETAIN_AS_PUBLISHED)
    publisher = connect("rap-p")
    for qos in (0, 1, 2):
        publisher.publish("rap", b"%d" % qos, qos, retain=True)
        assert [client.take().retain for client in (plain, old, marked)] == [False, False, True]
        publisher.publish("rap", b"%d" % qos, qos)
        assert [client.take().retain for client in (plain, old, marked)] == [False, False, False]
    publisher.publish("rap", b"", 1, retain=True)
    assert marked.take().retain and not plain.take().payload


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("first", [0, RETAIN_AS_PUBLISHED])
def test_overlapping_filters_send_one_copy_with_retain_as_published_if_one_asks_for_it(
    connect: Callable[..., RawClient], first: int, qos: int
) -> None:
    """docs/client-settings.md says so; the standard leaves it open."""
    publisher, reader = connect("publisher"), connect("reader")
    reader.subscribe(f"overlap/{first}/{qos}/+", options=2 | first)
    reader.subscribe(f"overlap/{first}/{qos}/#", options=1 | (RETAIN_AS_PUBLISHED - first))
    publisher.publish(f"overlap/{first}/{qos}/t", b"kept", qos, True)
    publisher.publish(f"overlap/{first}/{qos}/t", b"live", qos)
    copies = [reader.take() for _ in range(2)]
    assert [(copy.payload, copy.retain, copy.qos) for copy in copies] == [(b"kept", True, qos), (b"live", False, qos)]
    assert reader.ping() == []


@pytest.mark.parametrize("handling, first, again", [(0, True, True), (1, True, False), (2, False, False)])
def test_retain_handling(connect: Callable[..., RawClient], handling: int, first: bool, again: bool) -> None:
    topic = f"handling/{handling}"
    client = connect(f"handling-{handling}")
    client.publish(topic, b"x", 1, retain=True)
    for wanted in (first, again):
        client.subscribe(topic, options=1 | handling << 4)
        assert [packet.payload for packet in client.ping() if isinstance(packet, Publish)] == [b"x"] * wanted
    client.unsubscribe(topic)
    client.subscribe(topic, options=1 | handling << 4)
    assert len(client.ping()) == first


@pytest.mark.parametrize("version", [4, 5])
def test_a_repeated_filter_in_one_subscribe_replaces_the_earlier(connect: Callable[..., RawClient], version: int) -> None:
    """As if each filter had a packet of its own [MQTT-3.8.4-5]."""
    topic = f"again/{version}"
    client = connect(f"again-{version}", version)
    client.publish(topic, b"x", 2, retain=True)
    client.send(Subscribe(7, [Subscription(topic, 2), Subscription("again/none", 1), Subscription(topic, 0), Subscription(topic, 1)]))
    assert client.expect(Suback).reason_codes == [2, 1, 0, 1]
    assert [client.take().qos for _ in range(3)] == [2, 0, 1]
    client.publish(topic, b"y", 2)
    assert [(packet.payload, packet.qos) for packet in client.ping() if isinstance(packet, Publish)] == [(b"y", 1)]


def test_a_repeated_filter_follows_its_retain_handling(connect: Callable[..., RawClient]) -> None:
    client = connect("again-options")
    client.publish("again-options", b"x", 1, retain=True)
    handlings = [0x10, 0x20, 0x11, 0x01]
    client.send(Subscribe(7, [Subscription("again-options", options) for options in handlings]))
    assert client.expect(Suback).reason_codes == [0, 0, 1, 1]
    assert [packet.qos for packet in client.ping() if isinstance(packet, Publish)] == [0, 1]


def test_repeated_filters_are_limited(tmp_path: Path) -> None:
    with Core(tmp_path, max_subscriptions_per_client=3) as core:
        client = core.connect("c")
        client.publish("t", b"x", 1, retain=True)
        waiting = FREE_REPLAYS + 2
        client.send(Subscribe(7, [Subscription("t", 0)] * (waiting + 2)))
        assert client.expect(Suback).reason_codes == [0] * waiting + [0x97] * 2
        assert [packet.payload for packet in client.arrived()] == [b"x"] * waiting
        assert client.subscribe("t").reason_codes == [2]


def test_a_replay_ends_at_unsubscribe_and_a_new_subscription_starts_another(tmp_path: Path) -> None:
    with Core(tmp_path, max_outbox_bytes=1024) as core:
        publisher = core.connect("p")
        for n in range(40):
            publisher.publish(f"t/{n}", b"x" * 100, 1, retain=True)
        client = core.connect("c")
        core.eager = False
        client.send(Subscribe(1, [Subscription("t/#", 0)]), Unsubscribe(2, ["t/#"]), Subscribe(3, [Subscription("t/1", 0)]))
        assert 0 < len([packet for packet in client.arrived() if isinstance(packet, Publish)]) < 40
        client.connection.resume_sending()
        core.settle()
        assert [packet.topic for packet in client.arrived()] == ["t/1"]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("identifier", [0, 300])
def test_a_retained_message_at_qos_0_equals_the_codecs_encoding(tmp_path: Path, version: int, identifier: int) -> None:
    properties = [Properties(), Properties(), Properties()]
    properties[1].content_type, properties[1].user_properties = "text/plain", [("a", "1"), ("a", "")]
    properties[2].message_expiry_interval = 60
    sent = [
        Publish(f"tö/{'é' * size}/{number}", b"x" * size, 0, True, properties=given)
        for size in (1, 30, 59, 60, 61, 62, 127, 16_384)
        for number, given in enumerate(properties)
    ]
    with Core(tmp_path) as core:
        core.connect("p").send(*sent)
        wanted = Properties()
        if identifier and version == 5:
            for one in (wanted, *properties):
                one.subscription_identifiers = [identifier]
        client = core.connect("c", version)
        client.send(Subscribe(1, [Subscription("#", 0)], wanted))
        client.expect(Suback)
        found = [packet.encode(version) for packet in client.arrived()]
        assert sorted(found) == sorted(packet.encode(version) for packet in sent)
        assert core.broker.outbound.counters.publish_packet_bytes_sent == sum(map(len, found))
        assert core.broker.outbound.counters.publish_bytes_sent == sum(len(packet.payload) for packet in sent)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_above_the_clients_maximum_uses_no_receive_maximum(tmp_path: Path, version: int, qos: int) -> None:
    with Core(tmp_path) as core:
        publisher = core.connect("p")
        for n, size in enumerate((10, 70, 90, 110, 130)):
            publisher.publish(f"t/{n}", b"x" * size, qos, retain=True)
        properties = Properties()
        properties.maximum_packet_size = 100
        properties.receive_maximum = 3
        client = core.connect("c", version, properties=properties if version == 5 else Properties())
        client.subscribe("t/#")
        arrived = [packet for packet in client.arrived() if isinstance(packet, Publish)]
        assert [len(packet.payload) for packet in arrived] == ([10, 70, 90] if version == 5 else [10, 70, 90, 110, 130])
        session = core.broker.registry.get("c")
        for packet in arrived:
            client.send(Puback(packet.packet_id) if qos == 1 else Pubrec(packet.packet_id))
            if qos == 2:
                assert client.expect(Pubrel).packet_id == packet.packet_id
                client.send(Pubcomp(packet.packet_id))
        assert session.deliveries.queued_messages == session.deliveries.packet_ids_in_use == 0
        publisher.publish("t/live", b"last", qos)
        assert [packet.payload for packet in client.arrived()] == [b"last"]


@pytest.mark.parametrize(
    "limits", [{"max_inflight": 100, "max_queued_messages": 500}, {"max_inflight": 20, "max_inflight_unpersisted": 300}, {}]
)
@pytest.mark.parametrize("qos", [1, 2])
def test_a_replay_continues_as_its_client_acknowledges(tmp_path: Path, qos: int, limits: dict[str, int]) -> None:
    with Core(tmp_path, **limits) as core:
        publisher = core.connect("p")
        for n in range(1500):
            publisher.publish(f"t/{n}", b"%d" % n, qos, retain=True)
        client = core.connect("c", 4)
        client.subscribe("t/#", "live")
        found: list[bytes] = []
        for turn in range(200):
            packets = [packet for packet in client.arrived() if isinstance(packet, Publish)]
            assert packets, f"no message after {len(found)}"
            found += [packet.payload for packet in packets]
            if turn == 0:
                publisher.publish("live", b"live", qos)
            for packet in packets:
                client.send(Puback(packet.packet_id) if qos == 1 else Pubrec(packet.packet_id))
            if qos == 2:
                for _ in packets:
                    client.send(Pubcomp(client.wait_for(Pubrel).packet_id))
            if len(found) == 1501:
                break
        assert sorted(found) == sorted([*(b"%d" % n for n in range(1500)), b"live"])
        assert core.broker.registry.get("c").deliveries.queued_messages == 0


def test_a_shared_subscription_gets_no_retained_messages(connect: Callable[..., RawClient]) -> None:
    client = connect("retain-shared")
    client.publish("shared-retained", b"x", 1, retain=True)
    client.subscribe("$share/g/shared-retained")
    client.expect_nothing()


def test_retained_messages_come_after_suback_and_with_the_identifier(connect: Callable[..., RawClient]) -> None:
    properties = Properties()
    properties.subscription_identifiers = [9]
    properties.user_properties = [("b", "1"), ("a", "2")]
    client = connect("after")
    stored = Properties()
    stored.user_properties = [("b", "1"), ("a", "2"), ("b", "0")]
    client.publish("after/1", b"x", 0, retain=True, properties=stored)
    client.send(Subscribe(1, [Subscription("after/#", 0)], properties), Unsubscribe(2, ["after/#"]))
    assert client.expect(Suback).packet_id == 1
    message = client.expect(Publish)
    assert message.properties.subscription_identifiers == [9]
    assert message.properties.user_properties == stored.user_properties
    client.expect(Unsuback)


@pytest.mark.parametrize("kill", [False, True])
def test_retained_messages_expire(tmp_path: Path, kill: bool) -> None:
    with Core(tmp_path) as core:
        publisher = core.connect("p")
        publisher.publish("e/1", b"1", 1, retain=True, properties=message_expiry(10))
        publisher.publish("e/2", b"2", 1, retain=True, properties=message_expiry(100))
        if kill:
            core.kill()
        core.advance(9)
        client = core.connect("c")
        client.subscribe("e/#")
        assert sorted(packet.properties.message_expiry_interval for packet in client.ping()) == [1, 91]
        core.advance(1)
        client.subscribe("e/#")
        assert [packet.topic for packet in client.ping()] == ["e/2"]
        assert len(core.broker.retained) == 1
        core.settle()
        core.kill()
        assert len(core.broker.retained) == 1


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_retained_messages_survive_a_restart(tmp_path: Path, qos: int) -> None:
    properties = Properties()
    properties.content_type = "text/plain"
    properties.user_properties = [("b", "1"), ("a", "2")]
    with Core(tmp_path) as core:
        publisher = core.connect("p")
        publisher.publish("keep/1", b"old", qos, retain=True)
        publisher.publish("keep/1", b"kept \x00\xff", qos, retain=True, properties=properties)
        publisher.publish("keep/2", b"cleared", qos, retain=True)
        publisher.publish("keep/2", b"", qos, retain=True)
        core.settle()
        core.kill()
        client = core.connect("c")
        client.subscribe("keep/#")
        message = client.take()
        assert (message.topic, message.payload, message.qos, message.retain) == ("keep/1", b"kept \x00\xff", qos, True)
        assert repr(message.properties) == repr(properties)
        client.expect_nothing()
        stored = core.broker.retained.get("keep/1")
        assert stored is not None and core.broker.retained.size == stored.size


@pytest.mark.parametrize("cleared_before", [False, True])
def test_a_message_that_cleared_nothing_is_not_handled_again_after_a_kill(tmp_path: Path, cleared_before: bool) -> None:
    """Its publisher sends it again, and the next one of the topic; the broker has that one already."""
    with Core(tmp_path) as core:
        stays = Properties()
        stays.session_expiry_interval = 1000
        publisher = core.connect("p", properties=stays)
        if cleared_before:
            publisher.publish("t", b"old", 1, True)
            publisher.publish("t", b"", 1, True)
        packets = [Publish("t", payload, 2, True, False, number) for number, payload in ((1, b""), (2, b"new"))]
        publisher.send(*packets)
        core.kill()
        publisher = core.connect("p", clean_start=False, properties=stays)
        assert publisher.connack.session_present
        for packet in packets:
            packet.dup = True
        publisher.send(*packets)
        assert [publisher.expect(Pubrec).packet_id for _ in packets] == [1, 2]
        reader = core.connect("r")
        reader.subscribe("t")
        assert reader.take().payload == b"new"


def test_a_retained_message_is_acknowledged_after_its_commit(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        publisher, other = core.connect("p"), core.connect("o")
        core.eager = False
        publisher.send(Publish("r", b"x", 1, True, False, 1))
        assert publisher.arrived() == []
        core.commit()
        publisher.expect(Puback)
        publisher.send(Publish("r", b"", 1, True, False, 2))
        core.take()
        other.send(Publish("r", b"", 1, True, False, 1))
        assert publisher.arrived() == [] and other.arrived() == []
        core.commit()
        publisher.expect(Puback)
        core.settle()
        other.expect(Puback)
        other.send(Publish("r", b"", 1, True, False, 2))
        other.expect(Puback)


def test_retained_messages_of_a_failed_commit_are_in_the_next(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        publisher = core.connect("p")
        core.eager = False
        publisher.send(Publish("r/1", b"x", 1, True, False, 1))
        core.take()
        publisher.send(Publish("r/2", b"y", 0, True))
        core.fail()
        assert publisher.expect(Puback).reason_code == 0x97
        core.settle()
        core.kill()
        core.eager = True
        client = core.connect("c")
        client.subscribe("r/#")
        assert sorted(packet.topic for packet in client.ping()) == ["r/1", "r/2"]
