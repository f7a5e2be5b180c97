"""Backpressure: which publishers are paused, for how long, and the clean-up; on wires, with a manual clock."""

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

from mqttbroker.admin.metrics.figures import Metrics
from mqttbroker.admin.metrics.sys_topics import SysTopics
from mqttbroker.admin.metrics.text import metrics_text
from mqttbroker.auth.security import Security
from mqttbroker.codec.packets import Connect, Disconnect, Puback, Publish, Subscribe, Subscription, decode
from mqttbroker.codec.properties import Properties
from mqttbroker.core.packets.protocol import Protocol
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.wire import READ_SLICE, Endpoint, Wire
from sessions.counters import Counters
from sessions.session import Session

WINDOW = 2
WATERMARK = 10
MAX_PAUSE = 1.0
LIMITS: dict[str, Any] = {"queue_high_watermark_messages": WATERMARK, "backpressure_wait": MAX_PAUSE}


class Clock(Loop):
    """A loop whose time passes only in `wait`."""

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
        """Let time pass and run the timers that are due."""
        end = self.now + seconds
        while due := sorted((timer for timer in self.later if timer[0] <= end), key=lambda timer: timer[0]):
            self.later.remove(due[0])
            self.now = due[0][0]
            due[0][1]()
            self.turns()
        self.now = end


class Plant:
    """A broker and clients with wires, on one manual loop."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.loop = Clock()
        self.scheduler = FlushScheduler(core.broker, self.loop, lambda _: None, True)
        self.scheduler.flush()
        self.monitor = core.broker.context.backpressure_monitor

    def join(self, name: str, topic: str = "", window: int = WINDOW) -> Wire:
        """Connect a client; it subscribes to ``topic``, if given, at QoS 1."""

        def defect(_: object) -> None:
            raise

        security = Security(self.core.settings)
        policy = ListenerPolicy(security.policy, self.core.terms, None, self.core.broker.outbound.counters)
        sockets = OpenSockets(1000, 1000, Counters())
        wire = Wire(Endpoint(self.scheduler, policy, sockets, lambda: name, defect))
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
        """Send messages in one read. All have one packet id, as each is acknowledged before the next is handled."""
        wire.data_received(Publish(topic, bytes(size), qos, False, False, 1 if qos else 0).encode(5) * count)
        self.loop.turns()

    def take(self, wire: Wire, most: int = 1 << 30) -> int:
        """Acknowledge at most ``most`` of the messages that the client was sent; returns how many."""
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


def paused_publisher(plant: Plant) -> tuple[Wire, Wire]:
    """A subscriber of ``t`` whose queue is above the high watermark, and the publisher it pauses."""
    subscriber, publisher = plant.join("s", "t"), plant.join("p")
    plant.publish(publisher, "t", WINDOW + WATERMARK)
    assert publisher.transport.reading, "at the high watermark, not above it"
    plant.publish(publisher, "t")
    assert not publisher.transport.reading and plant.monitor.paused == 1
    return subscriber, publisher


# --- duration of a pause ------------------------------------------------------------------------------------------


def test_a_pause_ends_when_the_queue_is_down_to_half_the_high_watermark(plant: Plant) -> None:
    subscriber, publisher = paused_publisher(plant)
    assert plant.take(subscriber, WATERMARK // 2) == WATERMARK // 2
    assert not publisher.transport.reading
    plant.take(subscriber, 1)
    assert publisher.transport.reading
    assert (plant.monitor.paused, plant.monitor.pauses, plant.monitor.active) == (0, 1, {})
    assert plant.session(subscriber).deliveries.backpressure is None


def test_a_paused_publisher_is_read_one_slice_at_a_time(plant: Plant) -> None:
    subscriber, publisher = plant.join("s", "t"), plant.join("p")
    counters = plant.core.broker.outbound.counters
    packet = len(Publish("t", bytes(100), 1, False, False, 1).encode(5))
    plant.publish(publisher, "t", 10 * READ_SLICE // packet, size=100)
    for slices in range(1, 6):
        assert counters.publish_received == slices * -(-READ_SLICE // packet)
        assert plant.monitor.paused == 1 and not publisher.transport.reading
        plant.take(subscriber, 1)
        plant.loop.wait(MAX_PAUSE)
    plant.loop.wait(MAX_PAUSE)
    assert counters.publish_received == 10 * READ_SLICE // packet, "nothing was acknowledged: no more pauses"


def test_a_subscriber_that_acknowledges_pauses_publishers_again(plant: Plant) -> None:
    subscriber, publisher = paused_publisher(plant)
    for pauses in range(1, 5):
        assert plant.monitor.pauses == pauses and not publisher.transport.reading
        plant.take(subscriber, 1)
        plant.loop.wait(MAX_PAUSE)
        assert publisher.transport.reading, "a pause ends at the time limit"
        plant.publish(publisher, "t")
    assert not plant.session(subscriber).deliveries.backpressure.suspended  # type: ignore[union-attr]


def test_a_subscriber_that_acknowledges_nothing_pauses_no_publisher_until_its_queue_is_short(plant: Plant) -> None:
    subscriber, publisher = paused_publisher(plant)
    plant.loop.wait(MAX_PAUSE)
    assert publisher.transport.reading
    plant.publish(publisher, "t", 3 * WATERMARK)
    assert publisher.transport.reading and plant.monitor.pauses == 1
    waiting = 4 * WATERMARK + 1
    while waiting > WATERMARK // 2:
        waiting -= plant.take(subscriber, 1)
        if waiting > WATERMARK // 2:
            plant.publish(publisher, "elsewhere")
            assert plant.session(subscriber).deliveries.backpressure is not None
    plant.publish(publisher, "t", 2 * WATERMARK)
    assert plant.monitor.pauses == 2 and not publisher.transport.reading


def test_a_later_pause_ends_with_the_first(plant: Plant) -> None:
    _, publisher = paused_publisher(plant)
    second = plant.join("p2")
    plant.publish(second, "t")
    assert plant.monitor.paused == 2
    plant.loop.wait(MAX_PAUSE)
    assert plant.monitor.paused == 0 and publisher.transport.reading and second.transport.reading
    assert plant.loop.later == [], "no timer runs while no publisher is paused"


def test_bytes_count_towards_the_high_watermark(tmp_path: Path) -> None:
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


# --- no pause -----------------------------------------------------------------------------------------------------


def test_a_high_watermark_of_0_disables_backpressure(tmp_path: Path) -> None:
    with Core(tmp_path, durability="off", queue_high_watermark_messages=0, queue_high_watermark_bytes=1024) as core:
        plant = Plant(core)
        subscriber, publisher = plant.join("s", "t"), plant.join("p")
        plant.publish(publisher, "t", 5000)
        assert publisher.transport.reading and plant.monitor.pauses == 0
        assert plant.session(subscriber).deliveries.queued_messages == 5000


def test_other_queues_and_qos_0_are_not_paused(plant: Plant) -> None:
    paused_publisher(plant)
    listener, other = plant.join("s2", "u", 1000), plant.join("p2")
    plant.publish(other, "u", 3)
    plant.publish(other, "t", 50, qos=0)
    assert other.transport.reading and plant.take(listener) == 3
    assert plant.monitor.pauses == 1


def test_a_publisher_with_messages_to_acknowledge_is_not_paused(plant: Plant) -> None:
    one, two = plant.join("a", "to/a"), plant.join("b", "to/b")
    plant.publish(one, "to/b", 2 * WATERMARK)
    assert not one.transport.reading
    plant.publish(two, "to/a")
    assert one.transport.reading, "it has a message to acknowledge"
    plant.publish(two, "to/a", 2 * WATERMARK)
    assert two.transport.reading and plant.monitor.pauses == 1
    assert plant.take(one) == 2 * WATERMARK + 1 and not one.transport.reading
    assert plant.take(two) == 2 * WATERMARK and one.transport.reading


def test_a_client_that_publishes_to_itself_is_not_paused(plant: Plant) -> None:
    wire = plant.join("a", "t")
    wire.connection.ready, wire.connection.outbox.writing_paused = False, True  # the socket is blocked
    plant.publish(wire, "t", 3 * WATERMARK)
    session = plant.session(wire)
    assert session.deliveries.above_high_watermark and session.deliveries.packet_ids_in_use == 0 and wire.transport.reading


def test_only_the_member_that_gets_the_message_pauses_the_publisher(plant: Plant) -> None:
    slow, quick = plant.join("m1", "$share/g/t", 1), plant.join("m2", "$share/g/t", 1000)
    publisher = plant.join("p")
    slow.data_received(Subscribe(2, [Subscription("own", 1)]).encode(5))
    plant.publish(publisher, "own", 2 * WATERMARK)
    plant.loop.wait(MAX_PAUSE)
    session = plant.session(slow)
    assert session.deliveries.above_high_watermark
    session.deliveries.backpressure = None  # as if the queue had just reached its high watermark
    plant.publish(publisher, "t", 5)
    assert publisher.transport.reading and plant.take(quick) == 5
    plant.close(quick)
    plant.publish(publisher, "t")
    assert not publisher.transport.reading


def disconnected_subscriber(core: Core, name: str, qos: int = 1) -> None:
    client = durable(core, name)
    client.subscribe("t", options=qos)
    client.disconnect()


def paused(client: CoreClient) -> bool:
    return client.connection.paused_by is not None


@pytest.mark.parametrize("qos", [1, 2])
def test_messages_queued_while_disconnected_pause_no_publisher(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path, max_queue_memory_messages=20, **LIMITS) as core:
        disconnected_subscriber(core, "s", qos)
        publisher = core.connect("p")
        for _ in range(50):
            publisher.publish("t", b"x", qos)
        assert not paused(publisher)
        subscriber = durable(core, "s", WINDOW)
        for _ in range(20):
            publisher.publish("t", b"x", qos)
            assert not paused(publisher)
        left = 70
        session = subscriber.connection.session
        assert session is not None
        while session.deliveries.backpressure is not None:
            assert subscriber.take()
            left -= 1
            if left > WATERMARK:
                publisher.publish("t", b"x", qos)
                left += 1
                subscriber.take()
                left -= 1
                assert not paused(publisher)
        assert left <= WATERMARK // 2 + WINDOW + 1
        for _ in range(WATERMARK):
            publisher.publish("t", b"x", qos)
        assert paused(publisher)


def test_a_queue_is_short_only_when_all_of_it_is_in_memory(tmp_path: Path) -> None:
    limits = {**LIMITS, "queue_high_watermark_messages": 1000, "queue_high_watermark_bytes": 20_000}
    with Core(tmp_path, max_queue_memory_messages=4, max_transient_queue_bytes=10_000, **limits) as core:
        disconnected_subscriber(core, "s")
        publisher = core.connect("p")
        for _ in range(30):
            publisher.publish("t", bytes(1000), 1)
        subscriber = durable(core, "s", WINDOW)
        session = subscriber.connection.session
        assert session is not None and session.deliveries.backpressure is not None
        for taken in range(1, 29):
            subscriber.take()
            short = session.deliveries.queue.byte_count <= 10_000 or session.deliveries.queue.stored_seq == 0
            assert (session.deliveries.backpressure is None) == short, taken
        assert session.deliveries.backpressure is None


# --- clean-up -----------------------------------------------------------------------------------------------------


def protocols() -> int:
    return sum(isinstance(found, Protocol) for found in gc.get_objects())


@pytest.mark.parametrize("how", ["lost", "polite", "taken over"])
def test_a_paused_publisher_that_disconnects_is_forgotten(plant: Plant, how: str) -> None:
    subscriber, publisher = paused_publisher(plant)
    gc.collect()
    gc.disable()
    try:
        left = protocols()
        if how == "polite":
            # It is handled after the pause.
            publisher.data_received(Disconnect(0).encode(5))
            plant.close(publisher)
        elif how == "lost":
            plant.close(publisher)
        else:
            plant.join("p")
            assert plant.monitor.paused == 0
            plant.close(publisher)
        backpressure = plant.session(subscriber).deliveries.backpressure
        assert backpressure is not None and backpressure.publishers == {} and publisher.connection.paused_by is None
        assert (plant.monitor.paused, plant.monitor.active) == (0, {})
        del publisher
        assert protocols() == left - (how != "taken over"), "no cycle keeps the protocol alive"
    finally:
        gc.enable()
    plant.loop.wait(10 * MAX_PAUSE)
    assert plant.loop.later == []


@pytest.mark.parametrize("how", ["lost", "taken over"])
def test_a_subscriber_that_disconnects_resumes_its_publishers(plant: Plant, how: str) -> None:
    subscriber, publisher = paused_publisher(plant)
    if how == "lost":
        plant.close(subscriber)
    else:
        plant.join("s")
    assert publisher.transport.reading and plant.monitor.active == {} and plant.monitor.paused == 0
    plant.publish(publisher, "t", 3 * WATERMARK)
    assert publisher.transport.reading


def test_keep_alive_does_not_expire_during_a_pause(tmp_path: Path) -> None:
    with Core(tmp_path, durability="off", **LIMITS) as core:
        properties = Properties()
        properties.receive_maximum = WINDOW
        core.connect("s", properties=properties).subscribe("t", options=1)
        publisher = core.connect("p", keep_alive=1)
        for _ in range(WINDOW + WATERMARK + 1):
            publisher.publish("t", b"x", 1)
        assert publisher.connection.blocked
        core.advance(10)
        assert not publisher.closed
        core.broker.context.backpressure_monitor.check()
        core.broker.context.backpressure_monitor.check()
        assert not publisher.connection.blocked
        core.advance(10)
        assert publisher.closed


def test_pauses_are_counted(plant: Plant) -> None:
    paused_publisher(plant)
    control, metrics = plant.core.control, Metrics(None)
    found = samples(metrics_text(metrics, control.status()))
    assert (found["mqttbroker_publishers_waiting"], found["mqttbroker_publisher_waits_total"]) == (1, 1)
    values = SysTopics(control.status, control.messages, metrics, 10).values(control.status())
    assert values["$SYS/broker/publishers/waiting"] == values["$SYS/broker/publishers/waits"] == "1"
    plant.loop.wait(MAX_PAUSE)
    found = samples(metrics_text(metrics, control.status()))
    assert (found["mqttbroker_publishers_waiting"], found["mqttbroker_publisher_waits_total"]) == (0, 1)


# --- random event sequences ---------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
EVENTS = [f"{event} {name}" for name in NAMES for event in ("publish", "take", "go", "come", "slow")]
MORE_EVENTS = ["check", "check", "go p", "go p", "come p", "come p", *["publish p", "publish q"] * 4]


def check_state(core: Core) -> None:
    """Paused publishers and their subscribers are connected, and the counts are right."""
    monitor = core.broker.context.backpressure_monitor
    sessions = core.broker.registry.sessions.values()
    active = [session.deliveries.backpressure for session in sessions if session.deliveries.backpressure is not None]
    assert set(monitor.active) == {backpressure for backpressure in active if backpressure.publishers}
    paused = [publisher for backpressure in active for publisher in backpressure.publishers]
    assert len(paused) == monitor.paused
    connections = list(core.broker.clients.connections)
    assert set(paused) == {connection for connection in connections if connection.paused_by is not None}
    assert all(one.paused_by is not None and one in one.paused_by.publishers for one in paused)
    for session in sessions:
        assert session.connection is not None or session.deliveries.backpressure is None


@settings(max_examples=25)
@given(steps=st.lists(st.sampled_from([*EVENTS, *MORE_EVENTS]), min_size=20, max_size=100))
def test_random_events_leave_no_publisher_paused(tmp_path_factory: pytest.TempPathFactory, steps: list[str]) -> None:
    limits = {"queue_high_watermark_messages": 3, "queue_high_watermark_bytes": 2048, "max_queued_messages": 20}
    with Core(tmp_path_factory.mktemp("backpressure"), max_queue_memory_messages=4, **limits) as core:
        clients: dict[str, CoreClient] = {}

        def come(name: str, window: int) -> None:
            # The session of "c" ends with its connection.
            clients[name] = core.connect(name, 4) if name == "c" else durable(core, name, window)
            if name in NAMES:
                clients[name].subscribe("t/" + name, options=1)

        for name in (*NAMES, "p", "q"):
            come(name, 2)
        for step in steps:
            event, _, name = step.partition(" ")
            if event == "check":
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
            check_state(core)
        for name, client in clients.items():
            if client.closed:
                come(name, 1)
            drain(clients[name])
        check_state(core)
        assert not any(connection.blocked for connection in core.broker.clients.connections)
        monitor = core.broker.context.backpressure_monitor
        assert monitor.active == {} and monitor.paused == 0
