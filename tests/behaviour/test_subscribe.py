"""SUBSCRIBE, UNSUBSCRIBE and topic filters (MQTT 5.0 sections 3.8 to 3.11 and 4.7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.core import Core
from support.raw_client import RawClient

from mqttbroker.codec.packets import Disconnect, Publish, Suback, Subscribe, Subscription, Unsuback, Unsubscribe
from mqttbroker.codec.properties import Properties

NO_LOCAL = 4


def identified(number: int) -> Properties:
    properties = Properties()
    properties.subscription_identifiers = [number]
    return properties


def payloads(client: RawClient) -> list[bytes]:
    return [packet.payload for packet in client.ping() if isinstance(packet, Publish)]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    "topic_filter, hits, misses",
    [
        ("{}/+", ["{}/a", "{}/", "{}/$a"], ["{}", "{}/a/b", "x{}/a"]),
        ("{}/#", ["{}", "{}/a", "{}/a/b/c", "{}//"], ["x{}"]),
        ("{}/+/c", ["{}/b/c", "{}//c"], ["{}/c", "{}/b/c/d"]),
        ("+/{}", ["a/{}", "/{}"], ["{}", "$a/{}", "a/b/{}"]),
        ("#", ["{}/any"], ["$a/{}"]),
        ("$a/{}/#", ["$a/{}", "$a/{}/b"], ["a/{}"]),
    ],
)
def test_wildcards(connect: Callable[..., RawClient], version: int, topic_filter: str, hits: list[str], misses: list[str]) -> None:
    name = f"wild{version}"
    subscriber, publisher = connect("wild-s", version), connect("wild-p")
    subscriber.subscribe(topic_filter.format(name), options=0)
    for topic in misses + hits:
        assert publisher.publish(topic.format(name), topic.encode(), 1) in (0, 0x10)
    assert payloads(subscriber) == [topic.encode() for topic in hits]


@pytest.mark.parametrize("version", [4, 5])
def test_suback_has_one_code_per_filter_in_order(connect: Callable[..., RawClient], version: int) -> None:
    client = connect(f"codes-{version}", version)
    filters = [("a", 1), ("b/#", 0), ("c/" * 128 + "c", 0), ("$share/g/c", 2), ("a", 2)]
    client.send(Subscribe(77, [Subscription(name, qos) for name, qos in filters]))
    suback = client.expect(Suback)
    assert suback.packet_id == 77
    assert suback.reason_codes == [1, 0, 0x8F if version == 5 else 0x80, 2, 2]


@pytest.mark.parametrize("topic_filter", ["a/#/b", "a#", "+a", "a/b+", "##", "$share/g"])
@pytest.mark.parametrize("version", [4, 5])
def test_invalid_filters_close_the_connection(connect: Callable[..., RawClient], version: int, topic_filter: str) -> None:
    client = connect("bad-filter", version)
    client.send(Subscribe(1, [Subscription("good", 0), Subscription(topic_filter, 0)]))
    assert [answer.reason_code for answer in client.expect_closed()] == ([0x81] if version == 5 else [])


@pytest.mark.parametrize("version", [4, 5])
def test_unsubscribe(connect: Callable[..., RawClient], version: int) -> None:
    client = connect(f"un-{version}", version)
    client.subscribe("un/a", "un/b", options=1)
    client.send(Unsubscribe(9, ["un/a", "un/none"]))
    unsuback = client.expect(Unsuback)
    assert unsuback.packet_id == 9
    assert unsuback.reason_codes == ([0, 0x11] if version == 5 else [])
    client.publish("un/a", b"a", 1)
    client.publish("un/b", b"b", 1)
    assert payloads(client) == [b"b"]


def test_a_subscription_replaces_one_of_the_same_filter(connect: Callable[..., RawClient]) -> None:
    client = connect("replaced")
    client.subscribe("replaced", options=2, properties=identified(1))
    client.subscribe("replaced", options=0, properties=identified(2))
    client.publish("replaced", b"x", 2)
    message = client.take()
    assert (message.qos, message.properties.subscription_identifiers) == (0, [2])
    client.subscribe("replaced", options=1)
    client.publish("replaced", b"y", 2)
    message = client.take()
    assert (message.qos, message.properties.subscription_identifiers) == (1, [])
    client.expect_nothing()


@pytest.mark.parametrize("version", [4, 5])
def test_overlapping_subscriptions_deliver_one_copy(connect: Callable[..., RawClient], version: int) -> None:
    client = connect(f"overlap-{version}", version)
    topic = f"overlap/{version}/x"
    client.subscribe(topic, options=0, properties=identified(3))
    client.subscribe(f"overlap/{version}/+", options=2, properties=identified(300))
    client.subscribe(f"overlap/{version}/#", options=1)
    publisher = connect("overlap-p")
    for qos in (0, 1, 2):
        publisher.publish(topic, b"%d" % qos, qos)
        message = client.take()
        assert (message.payload, message.qos) == (b"%d" % qos, qos)
        assert sorted(message.properties.subscription_identifiers) == ([3, 300] if version == 5 else [])
    client.expect_nothing()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_no_local(connect: Callable[..., RawClient], qos: int) -> None:
    client, other = connect(f"local-{qos}"), connect(f"other-{qos}")
    topic = f"local/{qos}"
    client.subscribe(topic, options=2 | NO_LOCAL, properties=identified(5))
    client.publish(topic, b"mine", qos)
    other.publish(topic, b"theirs", qos)
    assert client.take().payload == b"theirs"
    client.subscribe("local/+", options=0, properties=identified(6))
    client.publish(topic, b"mine", qos)
    message = client.take()
    assert (message.payload, message.qos, message.properties.subscription_identifiers) == (b"mine", 0, [6])
    client.expect_nothing()


def test_no_local_on_a_shared_subscription_is_a_protocol_error(connect: Callable[..., RawClient]) -> None:
    client = connect("local-shared")
    client.send(Subscribe(1, [Subscription("$share/g/t", NO_LOCAL)]))
    (packet,) = client.expect_closed()
    assert isinstance(packet, Disconnect) and packet.reason_code == 0x82


def test_queued_messages_keep_subscription_identifiers_through_a_restart(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("s", 5, clean_start=False, properties=_kept())
        client.subscribe("t", options=1, properties=identified(7))
        client.subscribe("#", options=1 | 8, properties=identified(268_435_455))
        client.close()
        publisher = core.connect("p")
        publisher.publish("t", b"1", 1, retain=True)
        core.kill()
        core.connect("p").publish("t", b"2", 1)
        client = core.connect("s", 5, clean_start=False, properties=_kept())
        for payload, retain in ((b"1", True), (b"2", False)):
            message = client.take()
            assert (message.payload, message.retain) == (payload, retain)
            assert sorted(message.properties.subscription_identifiers) == [7, 268_435_455]


def _kept() -> Properties:
    properties = Properties()
    properties.session_expiry_interval = 60
    return properties


def test_subscriptions_end_with_their_connection(broker: BrokerProcess, connect: Callable[..., RawClient]) -> None:
    with RawClient(broker.port) as gone:
        gone.connect("gone")
        gone.subscribe("gone")
        gone.disconnect()
    assert connect("gone-p").publish("gone", b"", 1) == 0x10


def test_subscriptions_per_client_are_limited(tmp_path: Path) -> None:
    with Core(tmp_path, max_subscriptions_per_client=2) as core:
        client = core.connect("c")
        assert client.subscribe("a", "b", "c").reason_codes == [2, 2, 0x97]
        client.unsubscribe("a")
        assert client.subscribe("b", "c").reason_codes == [2, 2]


def test_subscribing_and_unsubscribing_between_messages(connect: Callable[..., RawClient]) -> None:
    """The route cache always follows the subscriptions."""
    one, two, publisher = connect("flow-1"), connect("flow-2"), connect("flow-p")
    topic = "flow/a/b"

    def received_by(payload: bytes) -> list[bool]:
        publisher.publish(topic, payload, 1)
        return [payload in payloads(one), payload in payloads(two)]

    assert received_by(b"1") == [False, False]
    one.subscribe("flow/+/b", options=0)
    assert received_by(b"2") == [True, False]
    two.subscribe("flow/#", options=0)
    assert received_by(b"3") == [True, True]
    one.unsubscribe("flow/+/b")
    assert received_by(b"4") == [False, True]
    one.subscribe(topic, options=0)
    two.disconnect()
    publisher.publish(topic, b"5", 1)
    assert payloads(one) == [b"5"]
    one.unsubscribe(topic)
    assert publisher.publish(topic, b"6", 1) == 0x10
