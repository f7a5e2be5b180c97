"""Groups ($share/<group>/$stream/<name>): partitions, order by key, redelivery, and offsets that survive the broker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Pubcomp, Publish, Pubrec, Pubrel, Suback
from mqttbroker.codec.properties import Properties

CONFIG = {"streams": {"log": {"filters": ["log/#"], "partitions": 4, "seal": False}}}
GROUP = "$share/g/$stream/log"
TOPICS = [f"log/{letter}" for letter in "abcdefghijklmnop"]


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config=CONFIG) as started:
        yield started


def publish(broker: BrokerProcess, first: int, last: int, topics: list[str], qos: int = 1) -> None:
    with RawClient(broker.port) as publisher:
        publisher.connect()
        for number in range(first, last + 1):
            for topic in topics:
                publisher.publish(topic, b"%d" % number, qos)


def join(
    broker: BrokerProcess, name: str = "", topic_filter: str = GROUP, qos: int = 1, window: int = 65535, persistent: bool = False
) -> RawClient:
    client = RawClient(broker.port)
    properties = Properties()
    properties.receive_maximum = window
    if persistent:
        properties.session_expiry_interval = 3600
    client.connect(name, clean_start=not persistent, properties=properties)
    start = Properties()
    start.user_properties = [("stream-offset", "earliest")]
    assert client.subscribe(topic_filter, options=qos, properties=start).reason_codes[0] < 0x80
    return client


def place(message: Publish) -> tuple[int, int]:
    found = dict(message.properties.user_properties)
    return int(found["partition"]), int(found["offset"])


def redelivered(message: Publish) -> bool:
    return ("redelivered", "1") in message.properties.user_properties


def receive(client: RawClient, count: int) -> list[Publish]:
    return [client.expect(Publish) for _ in range(count)]


def acknowledge(client: RawClient, messages: list[Publish]) -> None:
    client.send(*(Puback(message.packet_id) for message in messages))


def received(client: RawClient) -> list[Publish]:
    """The messages that the broker has sent before it answers, acknowledged."""
    found = [packet for packet in client.ping() if isinstance(packet, Publish)]
    acknowledge(client, found)
    return found


def partition_topics(broker: BrokerProcess) -> dict[int, str]:
    """A topic of each partition."""
    found: dict[int, str] = {}
    with RawClient(broker.port) as client:
        client.connect()
        client.subscribe("$stream/log", options=0)
        with RawClient(broker.port) as publisher:
            publisher.connect()
            for topic in TOPICS:
                publisher.publish(topic, b"0", 1)
        for _ in TOPICS:
            message = client.expect(Publish)
            found.setdefault(place(message)[0], message.topic)
    assert len(found) == 4
    return found


def test_members_divide_the_partitions_and_each_topic_stays_in_order(broker: BrokerProcess) -> None:
    members = [join(broker) for _ in range(3)]
    publish(broker, 1, 20, TOPICS)
    owner: dict[int, int] = {}
    by_topic: dict[str, list[int]] = defaultdict(list)
    count = 0
    while count < 20 * len(TOPICS):
        for number, member in enumerate(members):
            for message in received(member):
                count += 1
                assert owner.setdefault(place(message)[0], number) == number and not redelivered(message)
                by_topic[message.topic].append(int(message.payload))
    assert set(by_topic) == set(TOPICS) and all(found == list(range(1, 21)) for found in by_topic.values())
    assert sorted(owner.values()).count(max(owner.values())) <= 2 and len(set(owner.values())) == 3
    for member in members:
        member.close()


def test_what_a_leaver_did_not_acknowledge_goes_to_others_first_and_marked(broker: BrokerProcess) -> None:
    publish(broker, 1, 10, ["log/a"])
    leaver = join(broker, window=4)
    first = receive(leaver, 4)
    leaver.send(Puback(first[1].packet_id))
    assert [int(message.payload) for message in [*first, leaver.expect(Publish)]] == [1, 2, 3, 4, 5]
    other = join(broker)
    leaver.close()
    found = receive(other, 9)
    assert [int(message.payload) for message in found] == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert [redelivered(message) for message in found] == [True] * 4 + [False] * 5
    assert not any(message.dup for message in found)
    acknowledge(other, found)
    other.expect_nothing()
    other.close()


@pytest.mark.parametrize("version", [4, 5])
def test_unsubscribing_leaves_the_group(broker: BrokerProcess, version: int) -> None:
    publish(broker, 1, 3, ["log/a"])
    leaver = join(broker)
    receive(leaver, 3)
    other = RawClient(broker.port, version)
    other.connect()
    other.subscribe(GROUP, options=1)
    leaver.unsubscribe(GROUP)
    assert [int(message.payload) for message in receive(other, 3)] == [1, 2, 3]
    leaver.expect_nothing()


def test_a_partition_moves_when_its_messages_are_acknowledged(broker: BrokerProcess) -> None:
    topics = partition_topics(broker)
    first = join(broker, topic_filter="$share/moving/$stream/log")
    acknowledge(first, receive(first, len(TOPICS)))
    publish(broker, 1, 1, list(topics.values()))
    held = receive(first, 4)
    second = join(broker, topic_filter="$share/moving/$stream/log")
    publish(broker, 2, 2, list(topics.values()))
    stayed = receive(first, 2)
    assert {int(message.payload) for message in stayed} == {2}
    second.expect_nothing()
    kept = {message.topic for message in stayed}
    moving = [message for message in held if message.topic not in kept]
    assert len(moving) == 2
    first.send(Puback(moving[0].packet_id))
    message = second.expect(Publish)
    assert (message.topic, message.payload) == (moving[0].topic, b"2") and not redelivered(message)
    second.expect_nothing()
    acknowledge(first, moving[1:])
    assert second.expect(Publish).topic == moving[1].topic
    first.expect_nothing()


def test_a_killed_broker_knows_what_was_acknowledged(broker: BrokerProcess) -> None:
    publish(broker, 1, 10, ["log/a"])
    member = join(broker, window=6)
    first = receive(member, 6)
    for index in (0, 1, 4):
        member.send(Puback(first[index].packet_id))
    assert [int(message.payload) for message in receive(member, 3)] == [7, 8, 9]
    with RawClient(broker.port) as later:  # everything before it is committed
        later.connect()
        later.publish("log/a", b"11", 1)
    broker.restart(kill=True)
    member = join(broker)
    found = receive(member, 8)
    assert [int(message.payload) for message in found] == [3, 4, 6, 7, 8, 9, 10, 11]
    assert all(redelivered(message) for message in found[:6])
    acknowledge(member, found)
    member.expect_nothing()
    with RawClient(broker.port) as later:  # everything before it is committed
        later.connect()
        later.publish("stored", b"x", 1, retain=True)
    broker.restart(kill=True)
    member = join(broker)
    member.expect_nothing()


def test_offsets_stay_when_all_members_have_left(broker: BrokerProcess) -> None:
    publish(broker, 1, 5, ["log/a"])
    member = join(broker)
    acknowledge(member, receive(member, 5))
    member.expect_nothing()
    member.disconnect()
    publish(broker, 6, 7, ["log/a"])
    member = join(broker)
    found = receive(member, 2)
    assert [int(message.payload) for message in found] == [6, 7] and not any(map(redelivered, found))
    other = join(broker, topic_filter="$share/h/$stream/log")
    assert len(receive(other, 7)) == 7


@pytest.mark.parametrize("version", [4, 5])
def test_another_filter_than_the_first_is_refused(broker: BrokerProcess, version: int) -> None:
    member = join(broker, topic_filter="$share/g/$stream/log/log/a/#")
    with RawClient(broker.port, version) as other:
        other.connect()
        suback: Suback = other.subscribe("$share/g/$stream/log/log/b", options=1)
        assert suback.reason_codes == ([0x8F] if version == 5 else [0x80])
        if version == 5:
            assert suback.properties.reason_string == "group g of stream log reads log/a/#, not log/b"
    broker.wait_for_log(r"event=stream_refused .*group g of stream log reads log/a/#")
    publish(broker, 1, 2, ["log/b", "log/a/x"])
    assert [message.topic for message in receive(member, 2)] == ["log/a/x"] * 2


def test_qos_2_is_granted_to_persistent_sessions(broker: BrokerProcess) -> None:
    publish(broker, 1, 3, ["log/a"], 2)
    with RawClient(broker.port) as transient:
        transient.connect()
        assert transient.subscribe(GROUP, options=2).reason_codes == [1]
    member = join(broker, "m", "$share/two/$stream/log", 2, persistent=True)
    found = receive(member, 3)
    assert [message.qos for message in found] == [2, 2, 2]
    member.send(Pubrec(found[0].packet_id))
    assert member.expect(Pubrel).packet_id == found[0].packet_id
    with join(broker, "other", "$share/two/$stream/log", 2, persistent=True) as other:
        broker.restart(kill=True)
        member = join(broker, "m", "$share/two/$stream/log", 2, persistent=True)
        packets = [member.receive() for _ in range(3)]
        assert {type(packet) for packet in packets} == {Pubrel, Publish}
        for packet in packets:
            member.send(Pubcomp(packet.packet_id) if isinstance(packet, Pubrel) else Pubrec(packet.packet_id))  # type: ignore[attr-defined]
        assert [member.expect(Pubrel).packet_id for _ in range(2)] == [message.packet_id for message in found[1:]]
        other.close()


def test_a_negative_acknowledgement_is_counted_and_ends_the_delivery(broker: BrokerProcess) -> None:
    publish(broker, 1, 2, ["log/a"])
    member = join(broker)
    for message in receive(member, 2):
        member.send(Puback(message.packet_id, 0x80))
    member.expect_nothing()
    member.close()
    with join(broker) as other:
        other.expect_nothing()


def test_a_member_that_resumes_its_session_joins_again(broker: BrokerProcess) -> None:
    member = join(broker, "m", persistent=True)
    publish(broker, 1, 2, ["log/a"])
    receive(member, 2)
    member.close()
    publish(broker, 3, 3, ["log/a"])
    member = RawClient(broker.port)
    properties = Properties()
    properties.session_expiry_interval = 3600
    assert member.connect("m", clean_start=False, properties=properties).session_present
    found = receive(member, 3)
    assert [int(message.payload) for message in found] == [1, 2, 3]
    assert [redelivered(message) for message in found] == [True, True, False]


def test_qos_0_members_are_sent_each_message_once(broker: BrokerProcess) -> None:
    publish(broker, 1, 3, ["log/a"])
    with join(broker, qos=0) as member:
        assert {message.qos for message in receive(member, 3)} == {0}
        member.expect_nothing()
    publish(broker, 4, 4, ["log/a"])
    with join(broker, qos=0) as member:
        assert [message.payload for message in receive(member, 1)] == [b"4"]
