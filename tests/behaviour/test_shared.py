"""Shared subscriptions: each message goes to one member (MQTT 5.0 section 4.8.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.core import Core
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

every_strategy = pytest.mark.parametrize("strategy", ["round_robin", "random", "hash_topic", "least_loaded"])


def core_with(directory: Path, strategy: str) -> Core:
    return Core(directory, others={"shared_subscription_strategy": strategy})


def window(size: int) -> Properties:
    properties = Properties()
    properties.receive_maximum = size
    return properties


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_are_distributed_round_robin(connect: Callable[..., RawClient], version: int, qos: int) -> None:
    topic = f"turns/{version}/{qos}"
    members = [connect(f"member-{n}", version) for n in range(3)]
    outsider = connect("outsider")
    outsider.subscribe(topic)
    for member in members:
        member.subscribe(f"$share/g/{topic}")
    publisher = connect("turns-p")
    for n in range(9):
        publisher.publish(topic, b"%d" % n, qos)
    shares = [[int(member.take().payload) for _ in range(3)] for member in members]
    assert sorted(shares) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [int(outsider.take().payload) for _ in range(9)] == list(range(9))
    for member in members:
        member.expect_nothing()


def test_each_group_gets_a_copy(connect: Callable[..., RawClient]) -> None:
    one, two = connect("group-1"), connect("group-2")
    one.subscribe("$share/a/groups", "$share/b/groups", "groups", options=1)
    two.subscribe("$share/b/groups", options=1)
    publisher = connect("groups-p")
    for _ in range(2):
        publisher.publish("groups", b"", 1)
    assert len(one.ping()) == 5 and len(two.ping()) == 1


def test_leaving_a_group(connect: Callable[..., RawClient]) -> None:
    one, two, publisher = connect("leave-1"), connect("leave-2"), connect("leave-p")
    for member in (one, two):
        member.subscribe("$share/g/leave", options=1)
    one.unsubscribe("$share/g/leave")
    for _ in range(2):
        publisher.publish("leave", b"", 1)
    assert len(two.ping()) == 2
    two.disconnect()
    assert publisher.publish("leave", b"", 1) == 0x10
    one.expect_nothing()


def test_a_member_with_a_full_window_is_skipped(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        small, large = core.connect("small", properties=window(1)), core.connect("large")
        for member in (small, large):
            member.subscribe("$share/g/t", options=1)
        publisher = core.connect("p")
        for n in range(6):
            publisher.publish("t", b"%d" % n, 1)
        first = small.arrived()
        assert len(first) == 1 and len(large.arrived()) == 5
        small.send(Puback(first[0].packet_id))
        publisher.publish("t", b"", 1)
        publisher.publish("t", b"", 1)
        assert len(small.arrived()) == 1


@every_strategy
@pytest.mark.parametrize("qos", [1, 2])
def test_a_full_window_gets_nothing_while_another_is_open(tmp_path: Path, strategy: str, qos: int) -> None:
    sizes = {"one": 1, "two": 2, "five": 5}
    with core_with(tmp_path, strategy) as core:
        members = {name: core.connect(name, properties=window(size)) for name, size in sizes.items()}
        for member in members.values():
            member.subscribe("$share/g/t/#", options=2)
        publisher = core.connect("p")
        for n in range(8):
            publisher.publish(f"t/{n}", b"%d" % n, qos)
        got = {name: member.arrived() for name, member in members.items()}
        assert {name: len(packets) for name, packets in got.items()} == sizes
        assert sorted(int(packet.payload) for packets in got.values() for packet in packets) == list(range(8))


def test_hash_topic_sends_one_topic_to_one_member(tmp_path: Path) -> None:
    with core_with(tmp_path, "hash_topic") as core:
        members = [core.connect(f"m{n}") for n in range(4)]
        for member in members:
            member.subscribe("$share/g/#", options=1)
        publisher = core.connect("p")
        for n in range(60):
            publisher.publish(f"sensor/{n % 20}", b"", n % 2)
        heard = [{packet.topic for packet in member.arrived()} for member in members]
        assert all(heard) and sum(map(len, heard)) == len(set().union(*heard)) == 20


def test_least_loaded_prefers_the_member_with_the_fewest_messages(tmp_path: Path) -> None:
    with core_with(tmp_path, "least_loaded") as core:
        slow, quick = core.connect("slow"), core.connect("quick")
        slow.subscribe("$share/g/t", "own", options=1)
        quick.subscribe("$share/g/t", options=1)
        publisher = core.connect("p")
        for _ in range(5):
            publisher.publish("own", b"", 1)
        for _ in range(4):
            publisher.publish("t", b"", 1)
        assert (len(slow.arrived()), len(quick.arrived())) == (5, 4)


@every_strategy
def test_offline_members_get_messages_only_if_no_member_is_connected(tmp_path: Path, strategy: str) -> None:
    with core_with(tmp_path, strategy) as core:
        core.connect("away", 4, clean_start=False).subscribe("$share/g/t", options=1)
        core.clients[-1].close()
        there = core.connect("there")
        there.subscribe("$share/g/t", options=1)
        publisher = core.connect("p")
        for n in range(4):
            publisher.publish("t", b"%d" % n, 1)
        got = there.arrived()
        assert len(got) == 4
        there.send(*[Puback(packet.packet_id) for packet in got])
        there.disconnect()
        publisher.publish("t", b"alone", 1)
        core.kill()
        core.connect("p").publish("t", b"after", 1)
        back = core.connect("away", 4, clean_start=False)
        got = [packet.payload for packet in back.arrived() if isinstance(packet, Publish)]
        assert got == [b"alone", b"after"]


@every_strategy
@pytest.mark.parametrize("expiry", [0, 3600])
def test_unacknowledged_messages_of_a_leaving_member_go_to_another(tmp_path: Path, expiry: int, strategy: str) -> None:
    with core_with(tmp_path, strategy) as core:
        properties = window(2)
        properties.session_expiry_interval = expiry
        first = core.connect("first", properties=properties)
        first.subscribe("$share/g/t", options=1)
        publisher = core.connect("p")
        for n in range(4):
            publisher.publish("t", b"%d" % n, 1)
        sent = first.arrived()
        assert [packet.payload for packet in sent] == [b"0", b"1"]
        first.send(Puback(sent[0].packet_id))
        assert [packet.payload for packet in first.arrived()] == [b"2"]
        persistent = Properties()
        persistent.session_expiry_interval = 3600
        second = core.connect("second", properties=persistent)
        second.subscribe("$share/g/t", options=1)
        first.close()
        got = second.arrived()
        assert [(packet.payload, packet.dup) for packet in got] == [(b"1", False), (b"2", False), (b"3", False)]
        core.kill()
        again = core.connect("second", clean_start=False, properties=persistent)
        assert [(packet.payload, packet.dup) for packet in again.arrived()] == [
            (b"1", True),
            (b"2", True),
            (b"3", True),
        ]
        if expiry:
            back = core.connect("first", clean_start=False, properties=properties)
            assert back.connack.session_present and back.arrived() == []


def test_redistributed_messages_keep_properties_and_expiry(tmp_path: Path) -> None:
    properties = Properties()
    properties.message_expiry_interval = 100
    properties.user_properties = [("unit", "bar")]
    with Core(tmp_path) as core:
        first = core.connect("first")
        first.subscribe("$share/g/t", options=1)
        core.connect("p").send(Publish("t", b"1", 1, packet_id=9, properties=properties))
        assert first.expect(Publish).properties.message_expiry_interval == 100
        second = core.connect("second")
        second.subscribe("$share/g/t", options=1)
        core.advance(30)
        first.close()
        again = second.expect(Publish)
        assert (again.topic, again.payload, again.qos) == ("t", b"1", 1)
        assert again.properties.message_expiry_interval == 70
        assert again.properties.user_properties == [("unit", "bar")]


def test_messages_that_no_other_member_has_room_for_stay(tmp_path: Path) -> None:
    persistent = Properties()
    persistent.session_expiry_interval = 3600
    with Core(tmp_path, max_queued_messages=2) as core:
        members = {name: core.connect(name, properties=persistent) for name in ("first", "second")}
        for member in members.values():
            member.subscribe("$share/g/t", options=1)
        publisher = core.connect("p")
        for n in range(4):
            publisher.publish("t", b"%d" % n, 1)
        got = members["second"].arrived()
        members["first"].close()
        core.kill()
        got += core.connect("first", clean_start=False, properties=persistent).arrived()
        assert sorted(packet.payload for packet in got) == [b"0", b"1", b"2", b"3"]


def test_a_sent_qos_2_message_stays_with_its_member(tmp_path: Path) -> None:
    """[MQTT-4.8.2-4] [MQTT-4.8.2-5]"""
    with Core(tmp_path) as core:
        first, second = core.connect("first"), core.connect("second")
        for member in (first, second):
            member.subscribe("$share/g/t", options=2)
        core.connect("p").publish("t", b"once", 2)
        assert [packet.payload for packet in first.arrived()] == [b"once"]
        first.close()
        assert second.arrived() == []
