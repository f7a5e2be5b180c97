"""Shared subscriptions: one member each, in turn (MQTT 5.0 section 4.8.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from core import Core
from mqttbroker.packets import Puback, Publish
from mqttbroker.properties import Properties
from raw_client import RawClient


def window(size: int) -> Properties:
    properties = Properties()
    properties.receive_maximum = size
    return properties


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_members_take_turns(connect: Callable[..., RawClient], version: int, qos: int) -> None:
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


def test_each_group_gets_its_copy(connect: Callable[..., RawClient]) -> None:
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


def test_a_member_whose_window_is_full_is_passed_over(tmp_path: Path) -> None:
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


def test_members_that_are_away_keep_messages_only_when_nobody_is_there(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        core.connect("away", 4, clean_start=False).subscribe("$share/g/t", options=1)
        core.clients[-1].close()
        there = core.connect("there")
        there.subscribe("$share/g/t", options=1)
        publisher = core.connect("p")
        for n in range(4):
            publisher.publish("t", b"%d" % n, 1)
        assert len(there.arrived()) == 4
        there.disconnect()
        publisher.publish("t", b"alone", 1)
        core.kill()
        core.connect("p").publish("t", b"after", 1)
        back = core.connect("away", 4, clean_start=False)
        got = [packet.payload for packet in back.arrived() if isinstance(packet, Publish)]
        assert got == [b"alone", b"after"]
