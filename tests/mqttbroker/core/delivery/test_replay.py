"""Replays: how much they send in one event-loop iteration, in which order, and from which source."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.core import Core, CoreClient

from mqttbroker.codec.packets import (
    Pingreq,
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
from mqttbroker.core.delivery.replay import BUSY_BUDGET, IDLE_AFTER, IDLE_BUDGET, Replay, ReplaySource, ReplaySources
from sessions.message import Message
from sessions.session import AWAITS_RETAINED
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
        assert [packet.payload for packet in client.arrived() if isinstance(packet, Publish)] == [b"%d" % n for n in range(10)]


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


# --- persistent sessions ------------------------------------------------------------------------------------------

KEPT = [f"k/{number:02}" for number in range(40)]


class LastingClient:
    """A client with a persistent session, which has one message in flight, at a broker that retains `KEPT`."""

    def __init__(self, core: Core, version: int) -> None:
        self.core = core
        self.version = version
        core.connect("publisher").send(*(Publish(topic, b"x", 2, True, False, 1 + at) for at, topic in enumerate(KEPT)))
        self.connect()

    def connect(self) -> None:
        properties = Properties()
        if self.version == 5:
            properties.session_expiry_interval = 3600
        self.client = self.core.connect("c", self.version, clean_start=False, properties=properties)

    def subscribe(self, topic_filter: str, qos: int = 1, retain_handling: int = 0) -> None:
        self.client.send(Subscribe(9, [Subscription(topic_filter, qos | retain_handling << 4)]))
        self.client.expect(Suback)

    def take(self, most: int = 1000) -> set[str]:
        """The topics of the messages that come, which are acknowledged in at most so many steps."""
        topics: set[str] = set()
        for _ in range(most):
            packets = self.client.arrived()
            if not packets:
                break
            for packet in packets:
                if isinstance(packet, Pubrel):
                    self.client.send(Pubcomp(packet.packet_id))
                    continue
                assert isinstance(packet, Publish) and packet.retain
                topics.add(packet.topic)
                if packet.qos:
                    self.client.send(Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id))
        return topics

    def restart(self) -> dict[str, bool]:
        """Connect after a kill; returns the filters of the stored subscriptions, and whether they await retained messages."""
        self.core.kill()
        with closing(sqlite3.connect(self.core.directory / "core.db")) as database:
            rows = database.execute("SELECT topic_filter, options FROM subscriptions").fetchall()
        self.connect()
        return {topic_filter: options & AWAITS_RETAINED != 0 for topic_filter, options in rows}


@pytest.fixture(params=[4, 5])
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LastingClient]:
    with Core(tmp_path, max_inflight=1, max_queued_messages=5) as core:
        yield LastingClient(core, request.param)


@pytest.mark.parametrize("qos", [1, 2])
def test_a_replay_of_a_persistent_session_continues_after_a_kill(lasting: LastingClient, qos: int) -> None:
    lasting.subscribe("k/#", qos)
    before = lasting.take(10)
    assert before
    assert lasting.restart() == {"k/#": True}
    assert before | lasting.take() == set(KEPT)
    lasting.core.advance(1)
    assert lasting.restart() == {"k/#": False}
    assert lasting.take() == set()


def test_a_replay_that_has_ended_is_not_repeated(lasting: LastingClient) -> None:
    lasting.subscribe("k/#", 0)
    assert lasting.take() == set(KEPT)
    assert not lasting.core.broker.journal.has_pending, "it waits for another commit"
    lasting.core.advance(1)
    assert lasting.restart() == {"k/#": False}
    assert lasting.take() == set()


def test_a_subscription_without_retained_messages_is_stored_once(lasting: LastingClient) -> None:
    lasting.core.eager = False
    lasting.client.send(Subscribe(9, [Subscription("other/#", 1)]))
    assert lasting.core.commit() and lasting.client.expect(Suback)
    lasting.core.broker.replays.step()
    assert not lasting.core.broker.journal.has_pending


def test_a_subscribe_that_is_not_committed_has_no_replay(lasting: LastingClient) -> None:
    lasting.core.eager = False
    lasting.client.send(Subscribe(9, [Subscription("k/#", 1)]))
    lasting.core.eager = True
    assert lasting.restart() == {}
    assert lasting.take() == set()


def test_a_replay_ends_with_its_subscription(lasting: LastingClient) -> None:
    lasting.subscribe("k/#")
    lasting.take(1)
    lasting.client.send(Unsubscribe(10, ["k/#"]))
    lasting.client.wait_for(Unsuback)
    lasting.take()
    assert lasting.restart() == {}
    lasting.take()
    assert lasting.core.broker.registry.sessions["c"].deliveries.queued_messages == 0


@pytest.mark.parametrize("retain_handling", [0, 2])
def test_a_subscription_that_is_replaced_keeps_its_replay(lasting: LastingClient, retain_handling: int) -> None:
    lasting.subscribe("k/#")
    before = lasting.take(3)
    options = 1 | (retain_handling << 4 if lasting.version == 5 else 0)
    lasting.client.send(Subscribe(10, [Subscription("k/#", options)]))
    lasting.client.wait_for(Suback)
    before |= lasting.take(1)
    assert lasting.restart() == {"k/#": True}
    assert before | lasting.take() == set(KEPT)
    lasting.core.advance(1)
    assert lasting.restart() == {"k/#": False}


def test_a_failed_commit_loses_no_message_of_a_replay(lasting: LastingClient) -> None:
    core = lasting.core
    lasting.subscribe("k/#", 2)
    core.eager = False
    found: set[str] = set()
    for _ in range(200):
        found |= lasting.take(2)
        core.broker.replays.step()
        core.fail()
        core.commit()
    core.eager = True
    core.settle()
    assert found | lasting.take() == set(KEPT)
