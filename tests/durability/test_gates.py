"""QoS 1 and 2 exchanges with a broker that is killed between two steps and started again.

The store of `held_broker` stops before it writes, before SQLite's COMMIT, or after it and before it reports. A step
that must wait for this commit has not been taken by then. After the kill both sides continue: no acknowledged message
is lost, and none arrives twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.log_reader import LogReader
from support.broker_process import BrokerProcess
from support.held_broker import CONTENTS, PATH, POINTS
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import NO_MATCHING_SUBSCRIBERS

VERSIONS = pytest.mark.parametrize("version", [4, 5], ids=["v3.1.1", "v5"])
BEFORE_AND_AFTER = pytest.mark.parametrize("point", ["before", "after"])


class HeldBroker(BrokerProcess):
    """A broker whose store can be stopped at a commit."""

    def __init__(self, directory: Path) -> None:
        self.hold_file = directory / "hold"
        super().__init__(
            config={"streams": {"kept": {"filters": ["stream/#"]}}},
            env={"HOLD_FILE": str(self.hold_file)},
            program=[PATH],
        )

    def hold(self, point: str, contents: str) -> None:
        """Stop at the next commit with these contents."""
        assert point in POINTS and contents in CONTENTS
        self.lines_before = len(self.lines)
        self.hold_file.write_text(f"{point} {contents}", encoding="utf-8")

    def await_held(self) -> None:
        self.wait_for_log("event=held", after=self.lines_before)

    def kill_held(self) -> None:
        """Kill the broker once its store has stopped, and start it again."""
        self.await_held()
        self.kill()
        self.hold_file.unlink()
        self.start()

    def resume(self, client_id: str, version: int, present: bool = True) -> RawClient:
        """Connect with a session that never expires."""
        properties = Properties()
        if version == 5:
            properties.session_expiry_interval = 0xFFFFFFFF
        client = RawClient(self.port, version)
        connack = client.connect(client_id, clean_start=False, properties=properties)
        assert (connack.reason_code, connack.session_present) == (0, present)
        return client


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldBroker]:
    with HeldBroker(tmp_path_factory.mktemp("held")) as process:
        assert isinstance(process, HeldBroker)
        yield process


class Pair:
    """A publisher and a subscriber with persistent sessions, and their topic, all named after the test."""

    def __init__(self, broker: HeldBroker, request: pytest.FixtureRequest, version: int) -> None:
        self.broker = broker
        self.version = version
        self.name = request.node.name
        self.topic = f"stream/{self.name}"
        self.publisher = self.resume("publisher", False)
        self.subscriber = self.resume("subscriber", False)
        self.subscriber.subscribe(self.topic)

    def resume(self, role: str, present: bool = True) -> RawClient:
        return self.broker.resume(f"{self.name} {role}", self.version, present)

    def send(self, payload: bytes = b"once", dup: bool = False, packet_id: int = 7) -> None:
        self.publisher.send(Publish(self.topic, payload, 2, False, dup, packet_id))

    def release(self, packet_id: int = 7) -> None:
        self.publisher.send(Pubrel(packet_id))
        assert self.publisher.expect(Pubcomp).packet_id == packet_id

    def finish(self, dup: bool) -> None:
        """Publish the message, from PUBLISH to PUBCOMP."""
        self.send(dup=dup)
        assert self.publisher.expect(Pubrec).reason_code == 0
        self.release()

    def deliver(self) -> Publish:
        """Publish the message completely; returns the PUBLISH that the subscriber gets."""
        self.finish(False)
        return self.subscriber.expect(Publish)

    def expect_once(self, *payloads: bytes) -> None:
        """The subscriber gets exactly these messages, and so does the stream."""
        assert [self.subscriber.take().payload for _ in payloads] == list(payloads)
        self.expect_no_more(*payloads)

    def expect_no_more(self, *payloads: bytes) -> None:
        """The subscriber gets nothing more, and the stream has exactly these messages."""
        self.subscriber.expect_nothing()
        assert self.in_stream() == list(payloads)

    def in_stream(self) -> list[bytes]:
        """The messages of the topic that a reader of the stream's files sees."""
        stored = LogReader(self.broker.data_dir, "kept").records()
        return [record.payload for record in stored if record.topic == self.topic]


@pytest.fixture
def pair(broker: HeldBroker, request: pytest.FixtureRequest, version: int) -> Pair:
    return Pair(broker, request, version)


# --- publisher to broker ------------------------------------------------------------------------------------------


@VERSIONS
@pytest.mark.parametrize("point", POINTS)
def test_between_publish_and_pubrec(broker: HeldBroker, pair: Pair, point: str) -> None:
    pair.subscriber.disconnect()
    broker.hold(point, "packet id of the publisher")
    pair.send()
    broker.await_held()
    pair.publisher.expect_nothing()
    assert pair.in_stream() == ([b"once"] if point == "after" else [])
    broker.kill_held()
    pair.publisher = pair.resume("publisher")
    pair.finish(dup=True)
    pair.subscriber = pair.resume("subscriber")
    pair.expect_once(b"once")


@VERSIONS
@pytest.mark.parametrize("pubrec", ["received", "lost"])
def test_between_pubrec_and_pubrel(broker: HeldBroker, pair: Pair, pubrec: str) -> None:
    pair.subscriber.disconnect()
    pair.send()
    pair.publisher.expect(Pubrec)
    broker.restart(kill=True)
    pair.publisher = pair.resume("publisher")
    if pubrec == "received":
        pair.release()
    else:
        pair.finish(dup=True)
    pair.subscriber = pair.resume("subscriber")
    pair.expect_once(b"once")


@VERSIONS
@BEFORE_AND_AFTER
def test_between_pubrel_and_pubcomp(broker: HeldBroker, pair: Pair, point: str) -> None:
    pair.subscriber.disconnect()
    pair.send()
    pair.publisher.expect(Pubrec)
    broker.hold(point, "release")
    pair.publisher.send(Pubrel(7))
    broker.await_held()
    pair.publisher.expect_nothing()
    broker.kill_held()
    pair.publisher = pair.resume("publisher")
    pair.release()
    pair.send(b"another")
    pair.publisher.expect(Pubrec)
    pair.release()
    pair.subscriber = pair.resume("subscriber")
    pair.expect_once(b"once", b"another")


@VERSIONS
def test_the_packet_id_is_free_after_pubcomp(broker: HeldBroker, pair: Pair) -> None:
    pair.subscriber.disconnect()
    pair.finish(dup=False)
    broker.restart(kill=True)
    pair.publisher = pair.resume("publisher")
    pair.send(b"another", dup=True)  # as from a client whose first attempt was lost
    pair.publisher.expect(Pubrec)
    pair.release()
    pair.subscriber = pair.resume("subscriber")
    pair.expect_once(b"once", b"another")


# --- broker to subscriber -----------------------------------------------------------------------------------------


@VERSIONS
@BEFORE_AND_AFTER
def test_a_packet_id_is_stored_before_publish(broker: HeldBroker, pair: Pair, point: str) -> None:
    broker.hold(point, "packet id of the delivery")
    pair.send()
    broker.await_held()
    pair.subscriber.expect_nothing()
    pair.publisher.expect_nothing()
    broker.kill_held()
    pair.publisher = pair.resume("publisher")
    pair.finish(dup=True)
    pair.subscriber = pair.resume("subscriber")
    message = pair.subscriber.take()
    assert (message.payload, message.dup) == (b"once", point == "after")
    pair.expect_no_more(b"once")


@VERSIONS
@BEFORE_AND_AFTER
def test_a_packet_id_is_stored_before_publish_from_the_queue(broker: HeldBroker, pair: Pair, point: str) -> None:
    pair.subscriber.disconnect()
    pair.finish(dup=False)
    broker.hold(point, "packet id of the delivery")
    pair.subscriber = pair.resume("subscriber")
    broker.await_held()
    pair.subscriber.expect_nothing()
    broker.kill_held()
    pair.subscriber = pair.resume("subscriber")
    message = pair.subscriber.take()
    assert (message.payload, message.dup) == (b"once", point == "after")
    pair.expect_no_more(b"once")


@VERSIONS
def test_between_publish_and_pubrec_of_the_subscriber(broker: HeldBroker, pair: Pair) -> None:
    sent = pair.deliver()
    broker.restart(kill=True)
    pair.subscriber = pair.resume("subscriber")
    again = pair.subscriber.take()
    assert (again.packet_id, again.payload, again.dup) == (sent.packet_id, sent.payload, True)
    pair.expect_no_more(b"once")


@VERSIONS
@BEFORE_AND_AFTER
def test_between_pubrec_of_the_subscriber_and_pubrel(broker: HeldBroker, pair: Pair, point: str) -> None:
    sent = pair.deliver()
    broker.hold(point, "PUBREC")
    pair.subscriber.send(Pubrec(sent.packet_id))
    broker.await_held()
    pair.subscriber.expect_nothing()
    broker.kill_held()
    pair.subscriber = pair.resume("subscriber")
    if point == "before":
        again = pair.subscriber.expect(Publish)
        assert (again.packet_id, again.payload, again.dup) == (sent.packet_id, sent.payload, True)
        pair.subscriber.send(Pubrec(sent.packet_id))
    assert pair.subscriber.expect(Pubrel).packet_id == sent.packet_id
    pair.subscriber.send(Pubcomp(sent.packet_id))
    pair.expect_no_more(b"once")


@VERSIONS
def test_between_pubrel_and_pubcomp_of_the_subscriber(broker: HeldBroker, pair: Pair) -> None:
    sent = pair.deliver()
    pair.subscriber.send(Pubrec(sent.packet_id))
    pair.subscriber.expect(Pubrel)
    broker.restart(kill=True)
    pair.subscriber = pair.resume("subscriber")
    assert pair.subscriber.expect(Pubrel).packet_id == sent.packet_id
    pair.subscriber.send(Pubcomp(sent.packet_id))
    pair.expect_no_more(b"once")


@VERSIONS
@BEFORE_AND_AFTER
def test_between_pubcomp_of_the_subscriber_and_its_commit(broker: HeldBroker, pair: Pair, point: str) -> None:
    sent = pair.deliver()
    pair.subscriber.send(Pubrec(sent.packet_id))
    pair.subscriber.expect(Pubrel)
    broker.hold(point, "end of the delivery")
    pair.subscriber.send(Pubcomp(sent.packet_id))
    broker.kill_held()
    pair.subscriber = pair.resume("subscriber")
    if point == "before":
        assert pair.subscriber.expect(Pubrel).packet_id == sent.packet_id
        pair.subscriber.send(Pubcomp(sent.packet_id))
    pair.expect_no_more(b"once")
    pair.publisher = pair.resume("publisher")
    pair.send(b"another")
    pair.publisher.expect(Pubrec)
    message = pair.subscriber.take()
    assert (message.payload, message.dup) == (b"another", False)


# --- each place that stores a message -----------------------------------------------------------------------------


class StoredOnce:
    """A message that only one place stores, and a publisher whose acknowledgement waits for that."""

    def __init__(self, broker: HeldBroker, kind: str, qos: int, version: int) -> None:
        self.broker = broker
        self.kind = kind
        self.version = version
        self.name = f"{kind} QoS {qos} {version}"
        self.topic = f"stream/{self.name}" if kind == "stream" else f"t/{self.name}"
        self.message = Publish(self.topic, b"kept", qos, kind == "retained", False, 9)
        if kind in ("queue", "shared"):
            subscriber = broker.resume(f"{self.name} subscriber", version, False)
            subscriber.subscribe(f"$share/group/{self.topic}" if kind == "shared" else self.topic)
            subscriber.disconnect()
        self.publisher = broker.resume(f"{self.name} publisher", version, False)
        self.publisher.subscribe("its SUBACK shows that the session is on disk")

    def send_again(self) -> None:
        self.publisher = self.broker.resume(f"{self.name} publisher", self.version)
        self.message.dup = True
        self.publisher.send(self.message)
        no_subscribers = self.version == 5 and self.kind == "retained"
        answer = self.publisher.expect(Puback if self.message.qos == 1 else Pubrec)
        assert answer.reason_code == (NO_MATCHING_SUBSCRIBERS if no_subscribers else 0)

    def expect_kept(self) -> None:
        if self.kind == "stream":
            stored = LogReader(self.broker.data_dir, "kept").records()
            assert [record.payload for record in stored if record.topic == self.topic] == [b"kept"]
            return
        client = self.broker.resume(f"{self.name} subscriber", self.version, self.kind != "retained")
        if self.kind == "retained":
            client.subscribe(self.topic)
        assert client.take().payload == b"kept"
        client.expect_nothing()


@VERSIONS
def test_no_acknowledgement_before_the_message_is_stored(broker: HeldBroker, version: int) -> None:
    kinds = ("queue", "shared", "stream", "retained")
    cases = [StoredOnce(broker, kind, qos, version) for kind in kinds for qos in (1, 2)]
    broker.hold("before", "message")
    for case in cases:
        case.publisher.send(case.message)
    broker.await_held()
    for case in cases:
        case.publisher.expect_nothing()
    broker.kill_held()
    for case in cases:
        case.send_again()
    broker.restart(kill=True)
    for case in cases:
        case.expect_kept()
