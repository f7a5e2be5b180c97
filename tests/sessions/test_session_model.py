"""A session against a model: under any sequence of events no acknowledged message is lost, and QoS 2 is exactly once.

A durable publisher and a durable subscriber, both conforming, use a broker whose commits, failed commits and crashes
are steps of the model. Its memory limits are so small that every queue is paged.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.core import Core, CoreClient

from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Subscription,
)
from mqttbroker.codec.properties import Properties
from sessions.write_set import WriteSet
from topic_matcher.filters import matches

TOPICS = ("a", "a/b", "c")
LIMITS = {"max_queue_memory_messages": 8, "max_transient_queue_bytes": 12}
FILTERS = ("a", "a/#", "#", "+/b", "c", "kept/+", "kept/1")
KEPT = {f"kept/{number}": number % 3 for number in range(12)}  # retained messages, and their QoS
KEPT_PAYLOAD = b"x" * 20_000  # so large that a replay takes several steps


def lasting_session(window: int = 65535) -> Properties:
    properties = Properties()
    properties.session_expiry_interval = 0xFFFFFFFF
    properties.receive_maximum = window
    return properties


class SessionModel(RuleBasedStateMachine):
    """The state of the two clients, and the packets they expect."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="mqttbroker-model-"))
        self.core = self.make_core()
        self.subscriptions: dict[str, int] = {}
        self.number = 0
        # The publisher: unacknowledged packets by packet id, and acknowledged messages.
        self.publisher: CoreClient | None = None
        self.sent: dict[int, tuple[Publish, bool]] = {}  # packet, whether PUBREC was received
        self.next_id = 1
        # By number: the granted QoS, None if no subscription matched, and the topic.
        self.granted: dict[int, int | None] = {}
        self.topics: dict[int, str] = {}
        self.accepted: set[int] = set()
        # The subscriber.
        self.subscriber: CoreClient | None = None
        self.window = 65535
        self.pending: list[Packet] = []  # acknowledgements not yet sent
        self.open: set[int] = set()  # packet ids in flight on this connection
        self.received_qos_2: dict[int, int] = {}  # QoS 2: packet id -> number, until PUBREL
        self.deliveries: list[tuple[int, int]] = []  # number, QoS
        self.subacks = 0
        self.owed: dict[str, set[str]] = {}  # by filter: topics of retained messages that have not come since its SUBSCRIBE

    def make_core(self) -> Core:
        return Core(self.directory, **LIMITS)

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            self.core.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    @initialize(version=st.sampled_from([4, 5]))
    def begin(self, version: int) -> None:
        self.version = version
        retainer = self.core.connect("retainer")
        retainer.send(*(Publish(topic, KEPT_PAYLOAD, qos, True, False, 1 + at) for at, (topic, qos) in enumerate(KEPT.items())))
        retainer.close()
        self.core.eager = False
        self.connect_publisher()
        self.connect_subscriber(65535)

    # --- the publisher --------------------------------------------------------------------------------------------

    def connect_publisher(self) -> None:
        client = self.core.client()
        client.send(Connect("pub", 5, False, properties=lasting_session()))
        self.core.settle()
        connack = client.expect(Connack)
        assert connack.session_present == bool(self.number) or not self.sent
        self.publisher = client
        for packet_id, (packet, received) in list(self.sent.items()):
            packet.dup = True
            if not received:
                self.expect_delivery(packet)
            client.send(Pubrel(packet_id) if received else packet)
        self.receive_as_publisher()

    def expect_delivery(self, packet: Publish) -> None:
        wanted = [qos for topic_filter, qos in self.subscriptions.items() if matches(topic_filter, packet.topic)]
        number = int(packet.payload)
        granted = min(packet.qos, max(wanted)) if wanted else None
        # The first copy of a repeated PUBLISH may have been handled, under the subscriptions of that time.
        if packet.dup and self.granted[number] != granted:
            granted = 0 if None not in (granted, self.granted[number]) else None
            self.accepted.discard(number)
        self.granted[number] = granted
        self.topics[number] = packet.topic

    @rule(topic=st.sampled_from(TOPICS), qos=st.integers(0, 2), amount=st.integers(1, 12))
    def publish(self, topic: str, qos: int, amount: int) -> None:
        if self.publisher is None:
            self.connect_publisher()
        assert self.publisher is not None
        packets: list[Packet] = []
        for _ in range(amount):
            packet = Publish(topic, b"%d" % self.number, qos, False, False, self.next_id if qos else 0)
            self.expect_delivery(packet)
            if qos:
                self.sent[self.next_id] = (packet, False)
                self.next_id += 1
            self.number += 1
            packets.append(packet)
        self.publisher.send(*packets)
        self.receive_as_publisher()

    def receive_as_publisher(self) -> None:
        client = self.publisher
        if client is None:
            return
        for packet in client.arrived():
            if isinstance(packet, Disconnect):
                assert packet.reason_code == 0x97 and client.closed
                continue
            if isinstance(packet, Pubcomp):
                del self.sent[packet.packet_id]
                continue
            message, received = self.sent[packet.packet_id]
            assert isinstance(packet, Puback if message.qos == 1 else Pubrec) and not received
            number = int(message.payload)
            if packet.reason_code >= 0x80:
                assert packet.reason_code == 0x97
                del self.sent[packet.packet_id]
                continue
            self.accepted.add(number)
            if message.qos == 1:
                del self.sent[packet.packet_id]
            else:
                self.sent[packet.packet_id] = (message, True)
                client.send(Pubrel(packet.packet_id))
        if client.closed:
            self.publisher = None

    @rule()
    def publisher_leaves(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    # --- the subscriber -------------------------------------------------------------------------------------------

    def connect_subscriber(self, window: int) -> None:
        first = not self.subscriptions and not self.number
        client = self.core.client(self.version)
        properties = lasting_session(window) if self.version == 5 else None
        client.send(Connect("sub", self.version, False, properties=properties))
        self.window = window if self.version == 5 else 65535
        self.pending = []
        self.open = set()
        self.core.settle()
        assert client.expect(Connack).session_present or first
        self.subscriber = client
        self.receive_as_subscriber()

    @rule(window=st.sampled_from([1, 2, 5]), amount=st.integers(0, 5))
    def reconnect(self, window: int, amount: int) -> None:
        """Reconnect, or take over the old connection in any state, just after some acknowledgements."""
        if self.pending:
            self.acknowledge(amount)
        self.receive_as_subscriber()
        self.connect_subscriber(window)

    @rule()
    def subscriber_leaves(self) -> None:
        if self.subscriber is not None:
            self.receive_as_subscriber()
            self.subscriber.close()
            self.subscriber = None
            self.pending = []

    @precondition(lambda self: self.subscriptions)
    @rule(topic=st.sampled_from(TOPICS), qos=st.integers(1, 2), window=st.sampled_from([1, 2, 5]))
    def backlog(self, topic: str, qos: int, window: int) -> None:
        """Queue several pages, then reconnect."""
        self.subscriber_leaves()
        self.publish(topic, qos, 20)
        self.core.settle()
        self.connect_subscriber(window)

    @precondition(lambda self: self.subscriber is not None)
    @rule(topic_filter=st.sampled_from(FILTERS), qos=st.integers(0, 2))
    def subscribe(self, topic_filter: str, qos: int) -> None:
        assert self.subscriber is not None
        self.receive_as_subscriber()
        self.owed[topic_filter] = {topic for topic in KEPT if matches(topic_filter, topic)}
        self.subacks = 0
        self.subscriber.send(Subscribe(9, [Subscription(topic_filter, qos)]))
        while not self.subacks:
            assert self.core.commit()
            self.receive_as_subscriber()
        self.subscriptions[topic_filter] = qos

    @precondition(lambda self: self.subscriber is not None and self.subscriptions)
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        assert self.subscriber is not None
        topic_filter = data.draw(st.sampled_from(sorted(self.subscriptions)))
        self.receive_as_subscriber()
        self.core.eager = True
        self.subscriber.unsubscribe(topic_filter)
        self.core.eager = False
        del self.subscriptions[topic_filter]
        del self.owed[topic_filter]

    @precondition(lambda self: self.pending)
    @rule(amount=st.integers(1, 10))
    def acknowledge(self, amount: int) -> None:
        assert self.subscriber is not None
        now, self.pending = self.pending[:amount], self.pending[amount:]
        for answer in now:
            if isinstance(answer, (Puback, Pubcomp)):
                self.open.discard(answer.packet_id)
        self.subscriber.send(*now)
        self.receive_as_subscriber()

    def receive_as_subscriber(self) -> None:
        client = self.subscriber
        if client is None:
            return
        for packet in client.arrived():
            if isinstance(packet, Pubrel):
                self.received_qos_2.pop(packet.packet_id, None)
                self.pending.append(Pubcomp(packet.packet_id))
                self.open.add(packet.packet_id)
                continue
            if isinstance(packet, Suback):
                self.subacks += 1
                continue
            assert isinstance(packet, Publish)
            if packet.qos:
                assert packet.packet_id not in self.open, "the packet id is in use"
                self.open.add(packet.packet_id)
                assert len(self.open) <= self.window
            if packet.retain:
                self.receive_retained(packet)
                continue
            number = int(packet.payload)
            assert packet.topic == self.topics[number]
            if packet.qos < 2:
                self.deliveries.append((number, packet.qos))
                if packet.qos:
                    self.pending.append(Puback(packet.packet_id))
                continue
            if packet.packet_id in self.received_qos_2:
                assert packet.dup and self.received_qos_2[packet.packet_id] == number
            else:
                self.received_qos_2[packet.packet_id] = number
                self.deliveries.append((number, 2))
            self.pending.append(Pubrec(packet.packet_id))

    def receive_retained(self, packet: Publish) -> None:
        assert packet.payload == KEPT_PAYLOAD and packet.qos <= KEPT[packet.topic]
        for topics in self.owed.values():
            topics.discard(packet.topic)
        if packet.qos:
            self.pending.append(Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id))

    # --- the store and the process --------------------------------------------------------------------------------

    @rule()
    def replay(self) -> None:
        self.core.broker.replays.step()

    @rule()
    def take(self) -> None:
        if self.core.taken is None:
            self.core.take()

    @rule()
    def commit(self) -> None:
        self.core.commit()

    @rule()
    def fail(self) -> None:
        self.core.fail()

    @rule(written=st.booleans())
    def kill(self, written: bool) -> None:
        """Crash, with the writer's batch on disk or not."""
        self.receive_as_subscriber()
        if self.core.taken is not None and written:
            # The commit succeeds, but the broker does not learn of it.
            self.core.store.submit(self.core.taken)
            self.core.answers.get(timeout=30)
        self.publisher = self.subscriber = None
        self.pending = []
        self.core.kill()

    @precondition(lambda self: self.subscriber is not None)
    @rule(qos=st.integers(0, 2), steps=st.integers(0, 2))
    def interrupt_replay(self, qos: int, steps: int) -> None:
        """Crash while retained messages are sent."""
        self.subscribe("kept/+", qos)
        for _ in range(steps):
            self.replay()
            self.receive_as_subscriber()
        self.kill(False)

    # --- invariants -----------------------------------------------------------------------------------------------

    @invariant()
    def receive_all(self) -> None:
        self.receive_as_publisher()
        self.receive_as_subscriber()

    @invariant()
    def order_is_preserved(self) -> None:
        """Per topic and QoS, by the first arrival of each message [MQTT-4.6.0-5]."""
        last: dict[tuple[str, int], int] = {}
        seen: set[tuple[int, int]] = set()
        for number, qos in self.deliveries:
            if (number, qos) not in seen:
                key = (self.topics[number], qos)
                assert last.get(key, -1) < number, self.deliveries
                last[key] = number
                seen.add((number, qos))

    @invariant()
    def qos_2_is_exactly_once(self) -> None:
        twice = [number for number, qos in self.deliveries if qos == 2]
        assert len(twice) == len(set(twice)), twice

    def finish(self) -> None:
        """Reconnect and acknowledge everything: no accepted message is missing, and the broker holds none."""
        if not hasattr(self, "version"):
            return
        for _ in range(3):
            if self.publisher is None:
                self.connect_publisher()
            if self.subscriber is None:
                self.connect_subscriber(65535)
            self.core.settle()
            self.receive_all()
        while self.pending or self.sent:
            if self.pending:
                self.acknowledge(1000)
            self.core.settle()
            self.receive_all()
        self.core.advance(1)
        self.core.settle()
        delivered = {number for number, _ in self.deliveries}
        owed = {number for number in self.accepted if self.granted[number]}
        assert owed <= delivered, f"missing: {sorted(owed - delivered)}"
        assert not any(self.owed.values()), f"retained messages are missing: {self.owed}"
        self.order_is_preserved()
        self.qos_2_is_exactly_once()
        for session in self.core.broker.registry.sessions.values():
            assert (session.deliveries.queued_messages, session.deliveries.queue.byte_count) == (0, 0), session.client_id
            assert not session.deliveries.window.in_flight and not session.deliveries.queue.entries and not session.received
            assert session.deliveries.queue.stored_seq == 0 and session.deliveries.queue.memory_bytes == 0
        assert self.core.broker.journal.size == 0


class GatedCore(Core):
    """A core that delivers messages after their commit, as one of a cluster does; it knows the numbers of those not committed."""

    def __init__(self, directory: Path) -> None:
        self.unwritten: set[int] = set()
        self.writing: set[int] = set()
        super().__init__(directory, **LIMITS)

    def assembled(self) -> None:
        self.broker.journal.gated_deliveries = True
        self.unwritten, self.writing = set(), set()

    def take(self) -> WriteSet | None:
        self.writing, self.unwritten = self.unwritten, set()
        return super().take()

    def commit(self) -> bool:
        if self.taken is None:
            self.take()
        self.writing = set()
        return super().commit()


class GatedSessionModel(SessionModel):
    """The same with deliveries that wait for commits."""

    core: GatedCore

    def make_core(self) -> Core:
        return GatedCore(self.directory)

    def expect_delivery(self, packet: Publish) -> None:
        super().expect_delivery(packet)
        if packet.qos and not packet.dup:
            self.core.unwritten.add(int(packet.payload))

    @invariant()
    def nothing_is_delivered_before_its_commit(self) -> None:
        sent_early = {number for number, qos in self.deliveries if qos} & (self.core.unwritten | self.core.writing)
        assert not sent_early, sent_early


TestSessionModel = SessionModel.TestCase
TestGatedSessionModel = GatedSessionModel.TestCase
TestSessionModel.settings = TestGatedSessionModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
