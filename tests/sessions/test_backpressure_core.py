"""The throttle: who waits for a crowded queue, until when, and what is left of it; with wires and a clock by hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core import Core, CoreClient
from support.core_sessions import drain, durable
from support.manual_loop import Loop, Timer, Transport
from support.metric_samples import samples

from mqttbroker.admin.metrics import Metrics
from mqttbroker.admin.sys_topics import SysTopics
from mqttbroker.auth.security import Security
from mqttbroker.codec.packets import Connect, Disconnect, Puback, Publish, Subscribe, Subscription, decode
from mqttbroker.codec.properties import Properties
from mqttbroker.core.protocol import Protocol
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.wire import READ_SLICE, FlushScheduler, Wire
from sessions.session import Session

WINDOW = 2
CROWDED = 10
PATIENCE = 1.0
LIMITS: dict[str, Any] = {"queue_high_watermark_messages": CROWDED, "backpressure_wait": PATIENCE}


class Clock(Loop):
    """A loop whose timers are due when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.later: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, call: Any) -> Timer:
        self.later.append((self.now + seconds, call))
        return Timer()

    def turns(self) -> None:
        while self.soon:
            self.turn()

    def wait(self, seconds: float) -> None:
        """Let time pass, and everything happen that is due by then."""
        end = self.now + seconds
        while due := sorted((timer for timer in self.later if timer[0] <= end), key=lambda timer: timer[0]):
            self.later.remove(due[0])
            self.now = due[0][0]
            due[0][1]()
            self.turns()
        self.now = end


class Plant:
    """A broker whose clients have wires."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.loop = Clock()
        self.scheduler = FlushScheduler(core.broker, self.loop, lambda _: None, True)
        self.scheduler.flush()
        self.backpressure_monitor = core.broker.context.backpressure_monitor

    def join(self, name: str, topic: str = "", window: int = WINDOW) -> Wire:
        """A client that subscribes to ``topic`` at QoS 1, if there is one."""

        def defect(_: object) -> None:
            raise

        security = Security(self.core.settings)
        wire = Wire(self.scheduler, ListenerPolicy(security.policy, self.core.terms, None, False), lambda: name, defect)
        wire.connection_made(Transport())
        properties = Properties()
        properties.receive_maximum = window
        wire.data_received(Connect(name, 5, properties=properties).encode(5))
        if topic:
            wire.data_received(Subscribe(1, [Subscription(topic, 1)]).encode(5))
        self.loop.turns()
        wire.transport.written = b""
        return wire

    def session(self, wire: Wire) -> Session:
        session = wire.connection.session
        assert session is not None
        return session

    def publish(self, wire: Wire, topic: str, count: int = 1, qos: int = 1, size: int = 1) -> None:
        """Messages that come in one read, a packet id for all: each is acknowledged before the next is looked at."""
        wire.data_received(Publish(topic, bytes(size), qos, False, False, 1 if qos else 0).encode(5) * count)
        self.loop.turns()

    def take(self, wire: Wire, most: int = 1 << 30) -> int:
        """The client acknowledges what it was sent, so many messages at most; how many it was."""
        count = 0
        while True:
            written, wire.transport.written = wire.transport.written, b""
            position, answers = 0, b""
            while position < len(written) and count < most:
                packet, position = decode(written, 5, position)
                if isinstance(packet, Publish) and packet.qos:
                    answers += Puback(packet.packet_id).encode(5)
                    count += 1
            wire.transport.written = written[position:]
            if not answers:
                return count
            wire.data_received(answers)
            self.loop.turns()

    def close(self, wire: Wire) -> None:
        wire.connection_lost(None)
        self.loop.turns()


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    with Core(tmp_path, durability="off", **LIMITS) as core:
        yield Plant(core)


def crowd(plant: Plant) -> tuple[Wire, Wire]:
    """A subscriber of ``t`` whose queue is crowded, and the publisher that waits for it."""
    subscriber, publisher = plant.join("s", "t"), plant.join("p")
    plant.publish(publisher, "t", WINDOW + CROWDED)
    assert publisher.transport.reading, "as long as a queue may be is not crowded"
    plant.publish(publisher, "t")
    assert not publisher.transport.reading and plant.backpressure_monitor.paused == 1
    return subscriber, publisher


# --- how long they wait -------------------------------------------------------------------------------------------


def test_a_publisher_waits_until_the_queue_is_half_as_long(plant: Plant) -> None:
    subscriber, publisher = crowd(plant)
    assert plant.take(subscriber, CROWDED // 2) == CROWDED // 2
    assert not publisher.transport.reading
    plant.take(subscriber, 1)
    assert publisher.transport.reading
    assert (plant.backpressure_monitor.paused, plant.backpressure_monitor.pauses, plant.backpressure_monitor.active) == (0, 1, {})
    assert plant.session(subscriber).backpressure is None


def test_what_one_slice_holds_is_taken_in_and_no_more(plant: Plant) -> None:
    subscriber, publisher = plant.join("s", "t"), plant.join("p")
    counters = plant.core.broker.outbound.counters
    packet = len(Publish("t", bytes(100), 1, False, False, 1).encode(5))
    plant.publish(publisher, "t", 10 * READ_SLICE // packet, size=100)
    for slices in range(1, 6):
        assert counters.publish_received == slices * -(-READ_SLICE // packet)
        assert plant.backpressure_monitor.paused == 1 and not publisher.transport.reading
        plant.take(subscriber, 1)
        plant.loop.wait(PATIENCE)
    plant.loop.wait(PATIENCE)
    assert counters.publish_received == 10 * READ_SLICE // packet, "nothing was taken, and all of the rest comes"


def test_who_goes_on_acknowledging_is_waited_for_again_and_again(plant: Plant) -> None:
    subscriber, publisher = crowd(plant)
    for waits in range(1, 5):
        assert plant.backpressure_monitor.pauses == waits and not publisher.transport.reading
        plant.take(subscriber, 1)
        plant.loop.wait(PATIENCE)
        assert publisher.transport.reading, "it waits no longer than this"
        plant.publish(publisher, "t")
    assert not plant.session(subscriber).backpressure.suspended  # type: ignore[union-attr]


def test_nobody_waits_for_who_takes_nothing_until_it_has_caught_up(plant: Plant) -> None:
    subscriber, publisher = crowd(plant)
    plant.loop.wait(PATIENCE)
    assert publisher.transport.reading
    plant.publish(publisher, "t", 3 * CROWDED)
    assert publisher.transport.reading and plant.backpressure_monitor.pauses == 1
    waiting = 4 * CROWDED + 1
    while waiting > CROWDED // 2:
        waiting -= plant.take(subscriber, 1)
        if waiting > CROWDED // 2:
            plant.publish(publisher, "elsewhere")
            assert plant.session(subscriber).backpressure is not None
    plant.publish(publisher, "t", 2 * CROWDED)
    assert plant.backpressure_monitor.pauses == 2 and not publisher.transport.reading


def test_who_comes_late_to_a_throttle_waits_no_longer_than_the_first(plant: Plant) -> None:
    _, publisher = crowd(plant)
    second = plant.join("p2")
    plant.publish(second, "t")
    assert plant.backpressure_monitor.paused == 2
    plant.loop.wait(PATIENCE)
    assert plant.backpressure_monitor.paused == 0 and publisher.transport.reading and second.transport.reading
    assert plant.loop.later == [], "no timer runs when nobody waits"


def test_bytes_make_a_queue_crowded_too(tmp_path: Path) -> None:
    with Core(tmp_path, durability="off", **{**LIMITS, "queue_high_watermark_bytes": 10_000}) as core:
        plant = Plant(core)
        subscriber, publisher = plant.join("s", "t"), plant.join("p")
        plant.publish(publisher, "t", WINDOW + 3, size=3000)
        assert publisher.transport.reading
        plant.publish(publisher, "t", size=3000)
        assert not publisher.transport.reading
        plant.take(subscriber, 2)
        assert not publisher.transport.reading
        plant.take(subscriber, 1)
        assert publisher.transport.reading


# --- for whom nobody waits ----------------------------------------------------------------------------------------


def test_off_is_off(tmp_path: Path) -> None:
    with Core(tmp_path, durability="off", queue_high_watermark_messages=0, queue_high_watermark_bytes=1024) as core:
        plant = Plant(core)
        subscriber, publisher = plant.join("s", "t"), plant.join("p")
        plant.publish(publisher, "t", 5000)
        assert publisher.transport.reading and plant.backpressure_monitor.pauses == 0
        assert plant.session(subscriber).queued_messages == 5000


def test_others_and_what_is_not_queued_go_on(plant: Plant) -> None:
    crowd(plant)
    listener, other = plant.join("s2", "u", 1000), plant.join("p2")
    plant.publish(other, "u", 3)
    plant.publish(other, "t", 50, qos=0)
    assert other.transport.reading and plant.take(listener) == 3
    assert plant.backpressure_monitor.pauses == 1


def test_who_has_messages_to_acknowledge_is_read_all_the_same(plant: Plant) -> None:
    one, two = plant.join("a", "to/a"), plant.join("b", "to/b")
    plant.publish(one, "to/b", 2 * CROWDED)
    assert not one.transport.reading
    plant.publish(two, "to/a")
    assert one.transport.reading, "it has a message to acknowledge now"
    plant.publish(two, "to/a", 2 * CROWDED)
    assert two.transport.reading and plant.backpressure_monitor.pauses == 1
    assert plant.take(one) == 2 * CROWDED + 1 and not one.transport.reading
    assert plant.take(two) == 2 * CROWDED and one.transport.reading


def test_who_publishes_to_itself_does_not_wait_for_itself(plant: Plant) -> None:
    wire = plant.join("a", "t")
    wire.connection.ready, wire.connection.outbox.writing_paused = False, True  # what it was sent before has not left
    plant.publish(wire, "t", 3 * CROWDED)
    session = plant.session(wire)
    assert session.above_high_watermark and session.packet_ids_in_use == 0 and wire.transport.reading


def test_only_the_member_that_gets_the_message_counts(plant: Plant) -> None:
    slow, quick = plant.join("m1", "$share/g/t", 1), plant.join("m2", "$share/g/t", 1000)
    publisher = plant.join("p")
    slow.data_received(Subscribe(2, [Subscription("own", 1)]).encode(5))
    plant.publish(publisher, "own", 2 * CROWDED)
    plant.loop.wait(PATIENCE)
    session = plant.session(slow)
    assert session.above_high_watermark
    session.backpressure = None  # as if it had only now become so
    plant.publish(publisher, "t", 5)
    assert publisher.transport.reading and plant.take(quick) == 5
    plant.close(quick)
    plant.publish(publisher, "t")
    assert not publisher.transport.reading


def leave(core: Core, name: str, qos: int = 1) -> None:
    client = durable(core, name)
    client.subscribe("t", options=qos)
    client.disconnect()


def held(client: CoreClient) -> bool:
    return client.connection.paused_by is not None


@pytest.mark.parametrize("qos", [1, 2])
def test_who_is_away_slows_nobody_and_neither_does_who_comes_back_to_much(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path, max_queue_memory_messages=20, **LIMITS) as core:
        leave(core, "s", qos)
        publisher = core.connect("p")
        for _ in range(50):
            publisher.publish("t", b"x", qos)
        assert not held(publisher)
        subscriber = durable(core, "s", WINDOW)
        for _ in range(20):
            publisher.publish("t", b"x", qos)
            assert not held(publisher)
        left = 70
        session = subscriber.connection.session
        assert session is not None
        while session.backpressure is not None:
            assert subscriber.take()
            left -= 1
            if left > CROWDED:
                publisher.publish("t", b"x", qos)
                left += 1
                subscriber.take()
                left -= 1
                assert not held(publisher)
        assert left <= CROWDED // 2 + WINDOW + 1
        for _ in range(CROWDED):
            publisher.publish("t", b"x", qos)
        assert held(publisher)


def test_the_end_of_a_queue_on_disk_is_caught_up_with_only_when_it_is_in_memory(tmp_path: Path) -> None:
    limits = {**LIMITS, "queue_high_watermark_messages": 1000, "queue_high_watermark_bytes": 20_000}
    with Core(tmp_path, max_queue_memory_messages=4, max_transient_queue_bytes=10_000, **limits) as core:
        leave(core, "s")
        publisher = core.connect("p")
        for _ in range(30):
            publisher.publish("t", bytes(1000), 1)
        subscriber = durable(core, "s", WINDOW)
        session = subscriber.connection.session
        assert session is not None and session.backpressure is not None
        for taken in range(1, 29):
            subscriber.take()
            assert (session.backpressure is None) == (session.queue.byte_count <= 10_000 or session.queue.stored_seq == 0), taken
        assert session.backpressure is None


# --- what is left -------------------------------------------------------------------------------------------------


def protocols() -> int:
    return sum(isinstance(found, Protocol) for found in gc.get_objects())


@pytest.mark.parametrize("how", ["lost", "polite", "taken over"])
def test_a_publisher_that_leaves_while_it_waits_leaves_nothing(plant: Plant, how: str) -> None:
    subscriber, publisher = crowd(plant)
    gc.collect()
    gc.disable()
    try:
        left = protocols()
        if how == "polite":
            # Its DISCONNECT is read when its turn has come.
            publisher.data_received(Disconnect(0).encode(5))
            plant.close(publisher)
        elif how == "lost":
            plant.close(publisher)
        else:
            plant.join("p")
            assert plant.backpressure_monitor.paused == 0
            plant.close(publisher)
        backpressure = plant.session(subscriber).backpressure
        assert backpressure is not None and backpressure.publishers == {} and publisher.connection.paused_by is None
        assert (plant.backpressure_monitor.paused, plant.backpressure_monitor.active) == (0, {})
        del publisher
        assert protocols() == left - (how != "taken over"), "only a collection of cycles would find it"
    finally:
        gc.enable()
    plant.loop.wait(10 * PATIENCE)
    assert plant.loop.later == []


@pytest.mark.parametrize("how", ["lost", "taken over"])
def test_a_subscriber_that_leaves_lets_its_publishers_go(plant: Plant, how: str) -> None:
    subscriber, publisher = crowd(plant)
    if how == "lost":
        plant.close(subscriber)
    else:
        plant.join("s")
    assert publisher.transport.reading and plant.backpressure_monitor.active == {} and plant.backpressure_monitor.paused == 0
    plant.publish(publisher, "t", 3 * CROWDED)
    assert publisher.transport.reading


def test_the_keep_alive_of_who_waits_does_not_run_out(tmp_path: Path) -> None:
    with Core(tmp_path, durability="off", **LIMITS) as core:
        properties = Properties()
        properties.receive_maximum = WINDOW
        core.connect("s", properties=properties).subscribe("t", options=1)
        publisher = core.connect("p", keep_alive=1)
        for _ in range(WINDOW + CROWDED + 1):
            publisher.publish("t", b"x", 1)
        assert publisher.connection.blocked
        core.advance(10)
        assert not publisher.closed
        core.broker.context.backpressure_monitor.check()
        core.broker.context.backpressure_monitor.check()
        assert not publisher.connection.blocked
        core.advance(10)
        assert publisher.closed


def test_waits_are_counted(plant: Plant) -> None:
    crowd(plant)
    control, metrics = plant.core.control, Metrics(None)
    found = samples(metrics.render(control.status()))
    assert (found["mqttbroker_publishers_waiting"], found["mqttbroker_publisher_waits_total"]) == (1, 1)
    values = SysTopics(control, metrics, 10).values(control.status())
    assert values["$SYS/broker/publishers/waiting"] == values["$SYS/broker/publishers/waits"] == "1"
    plant.loop.wait(PATIENCE)
    found = samples(metrics.render(control.status()))
    assert (found["mqttbroker_publishers_waiting"], found["mqttbroker_publisher_waits_total"]) == (0, 1)


# --- whatever happens ---------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
EVENTS = [f"{event} {name}" for name in NAMES for event in ("publish", "take", "go", "come", "slow")]
MORE = ["look", "look", "go p", "go p", "come p", "come p", *["publish p", "publish q"] * 4]


def agree(core: Core) -> None:
    """Who waits is connected, and waits for one that is connected too; the counts say the same."""
    backpressure_monitor = core.broker.context.backpressure_monitor
    holding = [session.backpressure for session in core.broker.registry.sessions.values() if session.backpressure is not None]
    assert set(backpressure_monitor.active) == {backpressure for backpressure in holding if backpressure.publishers}
    waiting = [feeder for backpressure in holding for feeder in backpressure.publishers]
    assert len(waiting) == backpressure_monitor.paused
    connections = list(core.broker.clients.connections)
    assert set(waiting) == {connection for connection in connections if connection.paused_by is not None}
    assert all(feeder.paused_by is not None and feeder in feeder.paused_by.publishers for feeder in waiting)
    for session in core.broker.registry.sessions.values():
        assert session.connection is not None or session.backpressure is None


@settings(max_examples=25)
@given(steps=st.lists(st.sampled_from([*EVENTS, *MORE]), min_size=20, max_size=100))
def test_nothing_is_left_whatever_happens(tmp_path_factory: pytest.TempPathFactory, steps: list[str]) -> None:
    limits = {"queue_high_watermark_messages": 3, "queue_high_watermark_bytes": 2048, "max_queued_messages": 20}
    with Core(tmp_path_factory.mktemp("throttle"), max_queue_memory_messages=4, **limits) as core:
        clients: dict[str, CoreClient] = {}

        def come(name: str, window: int) -> None:
            # One of them has a session that ends with its connection.
            clients[name] = core.connect(name, 4) if name == "c" else durable(core, name, window)
            if name in NAMES:
                clients[name].subscribe("t/" + name, options=1)

        for name in (*NAMES, "p", "q"):
            come(name, 2)
        for step in steps:
            event, _, name = step.partition(" ")
            if event == "look":
                core.broker.context.backpressure_monitor.check()
            elif event == "come":
                come(name, 65535)
            elif event == "slow":
                come(name, 1)
            elif clients[name].closed:
                pass
            elif event == "publish":
                packets = [Publish(f"t/{to}", b"%0100d" % 1, 1, False, False, 1) for to in NAMES if to != name]
                clients[name].send(*packets * 3)
            elif event == "go":
                clients[name].close()
            else:
                found = [packet for packet in clients[name].arrived() if isinstance(packet, Publish)]
                clients[name].send(*(Puback(packet.packet_id) for packet in found))
            agree(core)
        for name, client in clients.items():
            if client.closed:
                come(name, 1)
            drain(clients[name])
        agree(core)
        assert not any(connection.blocked for connection in core.broker.clients.connections)
        assert core.broker.context.backpressure_monitor.active == {} and core.broker.context.backpressure_monitor.paused == 0
