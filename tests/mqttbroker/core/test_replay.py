"""Replays of retained messages: what they take of a turn of the loop, and whose turn it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.core import Core, CoreClient

from mqttbroker.codec.packets import Pingreq, Publish, Suback, Subscribe, Subscription
from mqttbroker.codec.properties import Properties
from mqttbroker.core.replay import BUSY_BUDGET, IDLE_AFTER, IDLE_BUDGET


class Turns:
    """A broker with retained messages, turned by hand; ``talker`` is a client that is heard."""

    def __init__(self, core: Core, topics: list[str], size: int = 1) -> None:
        self.talker = core.connect("talker")
        self.talker.send(*(Publish(topic, b"x" * size, 0, True) for topic in topics))
        core.eager = False
        self.replays = core.broker.replays
        self.counters = core.broker.outbound.counters

    def subscribe(self, client: CoreClient, topic_filter: str = "#") -> None:
        """Ask for what is retained; nothing of it is read yet."""
        client.send(Subscribe(1, [Subscription(topic_filter, 0)]))
        assert client.expect(Suback).reason_codes == [0]

    def step(self, heard: bool) -> int:
        """One turn, after a packet or in silence; how many messages were sent in it."""
        if heard:
            self.talker.send(Pingreq())
        before = self.counters.publish_sent
        more = self.replays.step()
        assert more == (self.counters.publish_sent > before)
        return self.counters.publish_sent - before


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, durability="off")


def test_all_replays_together_take_little_while_others_are_heard(core: Core) -> None:
    with core:
        turns = Turns(core, [f"t/{n}" for n in range(1000)])
        clients = [core.connect(str(n)) for n in range(10)]
        for client in clients:
            turns.subscribe(client)
        got = [len(client.arrived()) for client in clients]
        assert set(got) <= set(range(1, BUSY_BUDGET + 1))
        while min(got) < 1000:
            assert 0 < turns.step(heard=True) <= BUSY_BUDGET
            got = [before + len(client.arrived()) for before, client in zip(got, clients)]
            assert max(got) - min(got) <= 2 * BUSY_BUDGET, "somebody is passed over"
        assert got == [1000] * 10 and turns.step(heard=True) == 0


def test_a_replay_takes_more_when_nobody_was_heard_for_some_turns(core: Core) -> None:
    with core:
        turns = Turns(core, [f"t/{n}" for n in range(4 * IDLE_BUDGET + IDLE_AFTER * BUSY_BUDGET)])
        client = core.connect("c")
        turns.subscribe(client)
        assert turns.step(heard=True) <= BUSY_BUDGET
        assert max(turns.step(heard=False) for _ in range(IDLE_AFTER)) <= BUSY_BUDGET
        assert BUSY_BUDGET < turns.step(heard=False) <= IDLE_BUDGET
        assert turns.step(heard=True) <= BUSY_BUDGET
        assert turns.step(heard=False) <= BUSY_BUDGET


def test_a_turn_ends_with_the_bytes_that_it_may_cost(core: Core) -> None:
    with core:
        turns = Turns(core, [f"t/{n}" for n in range(100)], 10 * 1024)
        client = core.connect("c")
        turns.subscribe(client)
        got = sent = len(client.arrived())
        while got < 100:
            assert 0 < sent <= BUSY_BUDGET // 11 + 1
            sent = turns.step(heard=True)
            got += sent


def test_a_turn_ends_with_the_topics_that_it_came_by(core: Core) -> None:
    with core:
        turns = Turns(core, [*(f"a/{n}/b" for n in range(5000)), "a/last/rare"])
        clients = [core.connect("c"), core.connect("d")]
        for client in clients:
            turns.subscribe(client, "a/+/rare")
        steps = 0
        while turns.counters.publish_sent < 2:
            turns.talker.send(Pingreq())
            assert turns.replays.step(), "there is more to do"
            steps += 1
        assert [[packet.topic for packet in client.arrived()] for client in clients] == [["a/last/rare"]] * 2
        assert 2 * 5000 / BUSY_BUDGET - 5 < steps < 2 * 5000 / BUSY_BUDGET + 5


def test_who_does_not_read_takes_nothing_of_a_turn(core: Core) -> None:
    with core:
        turns = Turns(core, [f"t/{n}" for n in range(1000)])
        slow, other = core.connect("slow"), core.connect("other")
        turns.subscribe(slow)
        turns.subscribe(other)
        slow.arrived()
        slow.protocol.congest()
        got = len(other.arrived())
        while got < 1000:
            assert turns.step(heard=True)
            got += len(other.arrived())
        assert got == 1000 and slow.arrived() == [] and turns.step(heard=True) == 0


@pytest.mark.parametrize("qos", [0, 1])
def test_what_was_found_and_waits_is_looked_at_again(core: Core, qos: int) -> None:
    """A message that was replaced, cleared or that expired before its turn came is not sent."""
    with core:
        lasting = Properties()
        lasting.message_expiry_interval = 5
        turns = Turns(core, [f"t/{n:02}" for n in range(95)], 2 * 1024)
        turns.talker.send(*(Publish(f"t/{n}", b"old" * 1000, 0, True) for n in (95, 96)))
        turns.talker.send(Publish("t/97", b"short" * 500, 0, True, properties=lasting))
        client = core.connect("c")
        client.send(Subscribe(1, [Subscription("t/#", 0)]))
        first = [packet for packet in client.arrived() if isinstance(packet, Publish)]
        assert 0 < len(first) < 50
        turns.talker.publish("t/95", b"", qos, retain=True)
        turns.talker.publish("t/96", b"new", qos, retain=True)
        core.seconds += 10
        core.broker.outbound.clock.now = int(core.seconds * 1_000_000)
        while turns.replays.step():
            pass
        rest = [packet for packet in client.arrived() if isinstance(packet, Publish)]
        assert [(packet.payload, packet.retain) for packet in rest if packet.topic == "t/96"] == [(b"new", False)]
        assert [(packet.payload, packet.retain) for packet in rest if packet.topic == "t/95"] == [(b"", False)]
        topics = [packet.topic for packet in first + rest]
        assert sorted(topics) == [f"t/{n:02}" for n in range(97)]
