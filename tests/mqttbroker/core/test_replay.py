"""Replays: how much they send in one event-loop iteration, in which order, and from which source."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.core import Core, CoreClient

from mqttbroker.codec.packets import Pingreq, Publish, Suback, Subscribe, Subscription
from mqttbroker.codec.properties import Properties
from mqttbroker.core.replay import BUSY_BUDGET, IDLE_AFTER, IDLE_BUDGET, Replay, ReplaySource, ReplaySources
from sessions.message import Message
from sessions.session import Subscription as SessionSubscription


class Iterations:
    """A broker with retained messages whose event-loop iterations are run by hand; ``talker`` sends packets."""

    def __init__(self, core: Core, topics: list[str], size: int = 1) -> None:
        self.talker = core.connect("talker")
        self.talker.send(*(Publish(topic, b"x" * size, 0, True) for topic in topics))
        core.eager = False
        self.replays = core.broker.replays
        self.counters = core.broker.outbound.counters

    def subscribe(self, client: CoreClient, topic_filter: str = "#") -> None:
        """Subscribe, and read no retained message yet."""
        client.send(Subscribe(1, [Subscription(topic_filter, 0)]))
        assert client.expect(Suback).reason_codes == [0]

    def step(self, busy: bool) -> int:
        """One iteration, after a packet if ``busy``; returns the number of messages sent in it."""
        if busy:
            self.talker.send(Pingreq())
        before = self.counters.publish_sent
        more = self.replays.step()
        assert more == (self.counters.publish_sent > before)
        return self.counters.publish_sent - before


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, durability="off")


def test_all_replays_together_send_little_while_others_are_active(core: Core) -> None:
    with core:
        iterations = Iterations(core, [f"t/{n}" for n in range(1000)])
        clients = [core.connect(str(n)) for n in range(10)]
        for client in clients:
            iterations.subscribe(client)
        got = [len(client.arrived()) for client in clients]
        assert set(got) <= set(range(1, BUSY_BUDGET + 1))
        while min(got) < 1000:
            assert 0 < iterations.step(busy=True) <= BUSY_BUDGET
            got = [before + len(client.arrived()) for before, client in zip(got, clients)]
            assert max(got) - min(got) <= 2 * BUSY_BUDGET, "a client was skipped"
        assert got == [1000] * 10 and iterations.step(busy=True) == 0


def test_a_replay_sends_more_after_some_idle_iterations(core: Core) -> None:
    with core:
        iterations = Iterations(core, [f"t/{n}" for n in range(4 * IDLE_BUDGET + IDLE_AFTER * BUSY_BUDGET)])
        client = core.connect("c")
        iterations.subscribe(client)
        assert iterations.step(busy=True) <= BUSY_BUDGET
        assert max(iterations.step(busy=False) for _ in range(IDLE_AFTER)) <= BUSY_BUDGET
        assert BUSY_BUDGET < iterations.step(busy=False) <= IDLE_BUDGET
        assert iterations.step(busy=True) <= BUSY_BUDGET
        assert iterations.step(busy=False) <= BUSY_BUDGET


def test_the_budget_counts_bytes(core: Core) -> None:
    with core:
        iterations = Iterations(core, [f"t/{n}" for n in range(100)], 10 * 1024)
        client = core.connect("c")
        iterations.subscribe(client)
        got = sent = len(client.arrived())
        while got < 100:
            assert 0 < sent <= BUSY_BUDGET // 11 + 1
            sent = iterations.step(busy=True)
            got += sent


def test_the_budget_counts_visited_topics(core: Core) -> None:
    with core:
        iterations = Iterations(core, [*(f"a/{n}/b" for n in range(5000)), "a/last/rare"])
        clients = [core.connect("c"), core.connect("d")]
        for client in clients:
            iterations.subscribe(client, "a/+/rare")
        steps = 0
        while iterations.counters.publish_sent < 2:
            iterations.talker.send(Pingreq())
            assert iterations.replays.step(), "there is more to send"
            steps += 1
        assert [[packet.topic for packet in client.arrived()] for client in clients] == [["a/last/rare"]] * 2
        assert 2 * 5000 / BUSY_BUDGET - 5 < steps < 2 * 5000 / BUSY_BUDGET + 5


def test_a_stalled_client_uses_no_budget(core: Core) -> None:
    with core:
        iterations = Iterations(core, [f"t/{n}" for n in range(1000)])
        slow, other = core.connect("slow"), core.connect("other")
        iterations.subscribe(slow)
        iterations.subscribe(other)
        slow.arrived()
        slow.connection.outbox.pause()
        got = len(other.arrived())
        while got < 1000:
            assert iterations.step(busy=True)
            got += len(other.arrived())
        assert got == 1000 and slow.arrived() == [] and iterations.step(busy=True) == 0


@pytest.mark.parametrize("qos", [0, 1])
def test_unsent_messages_are_checked_again(core: Core, qos: int) -> None:
    """A message that was read and then replaced, cleared or expired is not sent."""
    with core:
        lasting = Properties()
        lasting.message_expiry_interval = 5
        iterations = Iterations(core, [f"t/{n:02}" for n in range(95)], 2 * 1024)
        iterations.talker.send(*(Publish(f"t/{n}", b"old" * 1000, 0, True) for n in (95, 96)))
        iterations.talker.send(Publish("t/97", b"short" * 500, 0, True, properties=lasting))
        client = core.connect("c")
        client.send(Subscribe(1, [Subscription("t/#", 0)]))
        first = [packet for packet in client.arrived() if isinstance(packet, Publish)]
        assert 0 < len(first) < 50
        iterations.talker.publish("t/95", b"", qos, retain=True)
        iterations.talker.publish("t/96", b"new", qos, retain=True)
        core.seconds += 10
        core.broker.outbound.clock.now = int(core.seconds * 1_000_000)
        while iterations.replays.step():
            pass
        rest = [packet for packet in client.arrived() if isinstance(packet, Publish)]
        assert [(packet.payload, packet.retain) for packet in rest if packet.topic == "t/96"] == [(b"new", False)]
        assert [(packet.payload, packet.retain) for packet in rest if packet.topic == "t/95"] == [(b"", False)]
        topics = [packet.topic for packet in first + rest]
        assert sorted(topics) == [f"t/{n:02}" for n in range(97)]


class NumberSource(ReplaySource):
    """Ten numbered messages; only even ones are still current when asked for."""

    def __init__(self, topic_filter: str) -> None:
        super().__init__()
        self.topic_filter = topic_filter
        self.next = 0

    @property
    def done(self) -> bool:
        return self.next == 10

    def read(self, budget: int, now: int) -> list[Message]:
        start, self.next = self.next, min(10, self.next + 4)
        self.visited = self.next - start
        return [Message(self.topic_filter, b"%d" % n, 0, True, b"", "", now, 0) for n in range(start, self.next)]

    def is_current(self, message: Message, now: int) -> bool:
        return int(message.payload) % 2 == 0


class NumberSources(ReplaySources):
    def open(self, topic_filter: str) -> ReplaySource:
        return NumberSource(topic_filter)


def test_a_replay_reads_any_source(core: Core) -> None:
    with core:
        replays = core.broker.replays
        replays.sources = NumberSources()
        client = core.connect("c")
        client.send(Subscribe(1, [Subscription("numbers", 0)]))
        while replays.step():
            pass
        assert [packet.payload for packet in client.arrived() if isinstance(packet, Publish)] == [
            b"%d" % n for n in range(10)
        ]


def test_a_replay_checks_messages_of_an_earlier_read(core: Core) -> None:
    with core:
        session = core.connect("c").connection.session
        assert session is not None and session.connection is not None
        session.subscriptions["numbers"] = subscription = SessionSubscription(session, "numbers", 0, 0)
        session.add_pending_retained([subscription])
        replay = Replay(NumberSources(), core.broker.rules, session.connection, session)
        for _ in range(10):
            replay.step(1)
        assert replay.done
        sent = [packet.payload for packet in core.clients[-1].arrived() if isinstance(packet, Publish)]
        assert sent == [b"%d" % n for n in (0, 2, 4, 6, 8)]


def test_replaced_messages_are_not_kept_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    with Core(tmp_path, durability="off", max_outbox_bytes=10_000) as core:
        iterations = Iterations(core, [f"t/{number}" for number in range(50)], 1000)
        client = core.connect("slow")
        iterations.subscribe(client)
        replay = core.broker.replays._active[client.connection]
        waiting = sorted(message.topic for message in replay._unsent)
        assert len(waiting) > 20 and not client.connection.ready
        iterations.talker.send(*(Publish(topic, b"new", 0, True) for topic in waiting[:10]))
        core.broker.replays.sweep(1000)
        assert sorted(message.topic for message in replay._unsent) == waiting[10:]
