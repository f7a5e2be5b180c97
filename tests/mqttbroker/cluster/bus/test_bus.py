"""The bus of one core: what it stores with which marks, for what it waits, and what stops it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.core import CoreClient
from support.properties import session_expiry
from support.shard_core import CLUSTER, Logs, ShardCore

from mqttbroker.cluster.bus.bus import BusRecord
from mqttbroker.cluster.log.body import encode_body, published_of
from mqttbroker.cluster.log.records import CHANGES, HEADER_BYTES, TAKEOVER, Header, encode_record
from mqttbroker.codec.packets import Connack, Connect, Puback, Publish, Suback, Subscribe, Subscription
from mqttbroker.core.routing.route import LARGE_ROUTE
from sessions.message import Message
from sessions.row_kinds import SUBSCRIPTIONS
from sessions.rows import SubscriptionRow
from sessions.session import Subscription as SessionSubscription
from sessions.write_set import TO_ALL, BusMessages, WriteSet


@pytest.fixture
def core(tmp_path: Path) -> Iterator[ShardCore]:
    """The core of shard 0 of two, which has caught up."""
    core = ShardCore(tmp_path, Logs(2), 0)
    core.logs.records[1].append(encode_record(Header(TAKEOVER, 1, CLUSTER, b"other---", -1, 0), b""))
    core.read_all()
    assert core.caught_up
    yield core
    core.close()


def publish(core: ShardCore, *messages: Message) -> None:
    """Append a record to the log of the other shard."""
    write_set = WriteSet()
    write_set.bus = BusMessages()
    write_set.bus.to_all = list(messages)
    records = core.logs.records[1]
    records.append(encode_record(Header(CHANGES, 1, CLUSTER, b"other---", 0, len(records)), encode_body(write_set)))


def message(topic: str, payload: bytes = b"x", qos: int = 1, retain: bool = False) -> Message:
    return Message(topic, payload, qos, retain, b"", "publisher", 1, 0)


def connect(core: ShardCore, client_id: str, persistent: bool, *filters: str, qos: int = 1) -> CoreClient:
    client = core.client()
    client.send(Connect(client_id, 5, not persistent, properties=session_expiry() if persistent else None))
    core.settle()
    assert client.expect(Connack).reason_code == 0
    if filters:
        client.send(Subscribe(1, [Subscription(each, qos) for each in filters]))
        core.read_all()
        client.wait_for(Suback)
    return client


def records(core: ShardCore) -> int:
    return len(core.logs.records[0])


def test_a_message_for_nobody_or_for_transient_sessions_needs_no_record(core: ShardCore) -> None:
    client = connect(core, "transient", False, "a/#")
    before = records(core)
    publish(core, message("a/1"), message("b/1"))
    core.read_all()
    assert client.take().topic == "a/1"
    assert records(core) == before and core.bus.routed == 1 and core.bus.passed == 1


def test_entries_and_their_mark_are_in_one_record(core: ShardCore) -> None:
    connect(core, "kept", True, "a/#")
    publish(core, message("b/1"), message("a/1"))
    core.read_all()
    body = core.logs.records[0][-1][HEADER_BYTES:]
    assert [(mark.log, mark.offset, mark.routed) for mark in published_of(body).marks] == [(1, 2, 0)]
    assert core.tables.marks[1].offset == 2


def test_a_mark_is_stored_now_and_then_though_nothing_else_is(core: ShardCore) -> None:
    before = records(core)
    for _ in range(5):
        publish(core, message("b/1", bytes(1 << 20)))
        core.read_all()
    assert records(core) == before + 1 and core.tables.marks[1].offset == 5
    core.bus.feed([BusRecord(mark, mark._replace(offset=6), [], [], 5 << 20) for mark in core.bus.marks])
    core.settle()
    assert records(core) == before + 2 and core.tables.marks[1].offset == 6


def test_a_connected_client_gets_a_message_of_another_log_at_once(core: ShardCore) -> None:
    client = connect(core, "kept", True, "a/#")
    before = records(core)
    publish(core, message("a/1"))
    core.read(1)
    core.broker.turns.step()
    packet = client.take()
    assert packet.topic == "a/1" and records(core) == before
    client.send(Puback(packet.packet_id))
    core.read_all()
    assert core.broker.journal.size == 0


def test_a_connected_client_gets_a_message_of_this_core_after_its_commit(core: ShardCore) -> None:
    """An owner that was stopped may not know yet that the next one has taken earlier messages of the publisher."""
    client = connect(core, "kept", True, "a/#")
    transient = connect(core, "transient", False, "a/#")
    publisher = connect(core, "publisher", False)
    for packet_id in (1, 2):
        publisher.send(Publish("a/1", b"%d" % packet_id, 1, packet_id=packet_id))
    assert core.take() is not None
    publisher.send(Publish("a/1", b"3", 1, packet_id=3))
    client.expect_nothing()
    assert [packet.payload for packet in transient.arrived()] == [b"1", b"2", b"3"]
    core.commit()
    assert [packet.payload for packet in client.arrived()] == [b"1", b"2"]
    core.settle()
    assert [packet.payload for packet in client.arrived()] == [b"3"]
    assert [packet.packet_id for packet in publisher.arrived()] == [1, 2, 3]


def test_a_message_that_waited_for_the_window_is_sent_at_once_after_its_commit(core: ShardCore) -> None:
    client = core.client()
    properties = session_expiry()
    properties.receive_maximum = 1
    client.send(Connect("kept", 5, False, properties=properties))
    core.settle()
    client.send(Subscribe(1, [Subscription("a/#", 1)]))
    core.read_all()
    client.expect(Connack)
    client.expect(Suback)
    publisher = connect(core, "publisher", False)
    publisher.send(*(Publish("a/1", b"%d" % number, 1, packet_id=number) for number in range(1, 4)))
    core.settle()
    for number in range(1, 4):
        packet = client.expect(Publish)
        assert packet.payload == b"%d" % number and not packet.dup
        client.send(Puback(packet.packet_id))
    core.settle()
    assert core.broker.journal.size == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_message_to_very_many_sessions_is_stored_once_whenever_the_core_dies(core: ShardCore, steps: int) -> None:
    broker = core.broker
    for number in range(LARGE_ROUTE + 5):
        session = broker.registry.create(f"s{number}", True)
        session.expiry_interval = 0xFFFFFFFF
        session.disconnected_at = core.seconds
        broker.lifecycle.save(session, True)
        subscription = SessionSubscription(session, "t/#", 1, 0)
        broker.subscriptions.load(subscription)
        broker.journal.save(SUBSCRIPTIONS, SubscriptionRow(session.id, "t/#", 1, 1, 0))
    core.settle()
    publish(core, message("t/1"), message("t/2"))
    core.read(1)
    for _ in range(steps):
        broker.turns.step()
        core.commit()
    core.kill()
    core.read_all()
    counts = {session.deliveries.queue.message_count for session in core.broker.registry.by_id.values()}
    assert counts == {2} and len(core.broker.registry.by_id) == LARGE_ROUTE + 5


def test_routing_waits_while_the_store_is_behind(core: ShardCore) -> None:
    connect(core, "kept", True, "a/#")
    core.settle()
    core.broker.terms.max_pending_write_bytes = 3000
    for _ in range(20):
        publish(core, message("a/1", bytes(1000)))
    core.read(1)
    core.work()
    assert 0 < core.bus.routed < 20 and not core.bus.done
    core.settle()
    assert core.bus.routed == 20 and core.bus.done


def test_a_retained_message_of_a_topic_of_this_shard_is_kept_with_its_mark(core: ShardCore) -> None:
    topics = [f"r/{number}" for number in range(8)]
    publish(core, *(message(topic, qos=number % 3, retain=True) for number, topic in enumerate(topics)))
    core.read_all()
    own = [topic for topic in topics if core.shards.of_text(topic) == 0]
    assert 0 < len(own) < 8
    assert [topic for topic in topics if core.broker.retained.get(topic) is not None] == own
    before = records(core)
    publish(core, message(own[0], b"", 0, True), message(own[0], b"", 0, True))
    core.read_all()
    assert core.broker.retained.get(own[0]) is None and core.tables.marks[1].offset == 3
    publish(core, message(own[0], b"", 0, True))  # there is nothing to delete, but the publisher waits for the mark
    core.read_all()
    assert core.tables.marks[1].offset == 4 and records(core) == before + 2


def test_a_message_at_qos_0_is_not_delivered_from_the_log(core: ShardCore) -> None:
    client = connect(core, "transient", False, "#")
    publish(core, message("a/1", qos=0, retain=True))
    core.read_all()
    client.expect_nothing()


def test_a_subscribe_waits_for_what_is_older_and_gets_what_is_newer(core: ShardCore) -> None:
    client = connect(core, "kept", True)
    publish(core, message("a/old"))
    client.send(Subscribe(1, [Subscription("a/#", 1)]))
    core.settle()
    core.answer_ends()  # the old message is before the end, the new one behind it
    publish(core, message("a/new"))
    core.settle()
    assert not client.arrived()
    core.read(1)
    core.settle()
    assert [one.topic for one in client.arrived() if isinstance(one, Publish)] == ["a/new"]


def test_a_subscribe_of_a_client_that_left_lets_others_pass(core: ShardCore) -> None:
    first, second = connect(core, "first", False), connect(core, "second", False)
    for client in (first, second):
        client.send(Subscribe(1, [Subscription("a/#", 1)]))
    first.close()
    core.read_all()
    core.read_all()
    assert second.expect(Suback).reason_codes == [1]


def test_a_message_that_cannot_be_decoded_stops_the_bus_with_a_reason(core: ShardCore) -> None:
    connect(core, "kept", True, "a/#")

    class Section:
        destination, topics, retained = TO_ALL, [b"a/1"], []

        def message(self, index: int) -> Message:
            raise ValueError("not a message: broken")

    mark = core.bus.marks[0]
    core.bus.feed([BusRecord(mark, mark._replace(offset=mark.offset + 1), [Section()], [], 10)])
    core.work()
    assert core.receiver.failures == ["a message of another shard cannot be routed: not a message: broken"]
    assert core.bus.marks == [mark] and core.bus.done
