"""One client's session: window, packet ids, order, paging, and failed commits."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.core import Core
from support.core_sessions import answers_to, away, drain, durable, numbers_of, publish

from mqttbroker.codec.packets import Connect, Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties

LIMITS = {"max_queue_memory_messages": 40}


# --- window and packet ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("persistent", [False, True], ids=["transient", "durable"])
def test_receive_maximum_limits_the_messages_in_flight(tmp_path: Path, qos: int, persistent: bool) -> None:
    with Core(tmp_path) as core:
        properties = Properties()
        properties.receive_maximum = 3
        properties.session_expiry_interval = 60 if persistent else 0
        client = core.connect("sub", properties=properties)
        client.subscribe("t/#", options=qos)
        publish(core, range(10), qos)
        first = client.arrived()
        assert numbers_of(first) == [0, 1, 2]
        assert [packet.packet_id for packet in first] == [1, 2, 3]
        if qos == 1:
            client.send(Puback(2))
        else:
            client.send(Pubrec(2))
            assert client.expect(Pubrel).packet_id == 2
            client.expect_nothing()
            client.send(Pubcomp(2))
        fourth = client.expect(Publish)
        assert (fourth.payload, fourth.packet_id, fourth.dup) == (b"3", 4, False)
        client.expect_nothing()


@pytest.mark.normative("3.1.1", "MQTT-2.3.1-4")
@pytest.mark.normative("5", "MQTT-2.2.1-4", "MQTT-4.3.2-1", "MQTT-4.3.3-1")
def test_packet_ids_wrap_around_the_ones_in_use(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("sub")
        client.subscribe("t/#", options=1)
        session = core.broker.registry.get("sub")
        assert session is not None
        publish(core, range(1))
        session.deliveries.window.last_packet_id = 65534
        publish(core, range(3))
        assert [packet.packet_id for packet in client.arrived()] == [1, 65535, 2, 3]


def test_the_broker_has_its_own_limit_of_messages_in_flight(tmp_path: Path) -> None:
    with Core(tmp_path, max_inflight=2, max_inflight_unpersisted=2) as core:
        client = core.connect("sub")
        client.subscribe("t/#", options=1)
        publish(core, range(5))
        assert numbers_of(client.arrived()) == [0, 1]
        client.send(Puback(1), Puback(2))
        assert numbers_of(client.arrived()) == [2, 3]


def test_unpersisted_messages_have_a_window_of_their_own(tmp_path: Path) -> None:
    with Core(tmp_path, max_inflight=1, max_inflight_unpersisted=3) as core:
        client = core.connect("sub")
        client.subscribe("t/#", options=1)
        publish(core, range(6))
        assert numbers_of(client.arrived()) == [0, 1, 2]
        client.send(Puback(1), Puback(2))
        client.expect_nothing()
        client.send(Puback(3))
        assert numbers_of(client.arrived()) == [3]
        client.send(Puback(4))
        assert numbers_of(client.arrived()) == [4]
        properties = Properties()
        properties.receive_maximum = 2
        narrow = core.connect("narrow", properties=properties)
        narrow.subscribe("t/#", options=1)
        publish(core, range(6, 9))
        assert numbers_of(narrow.arrived()) == [6, 7]


def test_acknowledgements_of_unused_packet_ids_change_nothing(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("sub")
        client.subscribe("t/#", options=2)
        publish(core, range(1), 1)
        publish(core, range(1, 2), 2)
        assert [(packet.qos, packet.packet_id) for packet in client.arrived()] == [(1, 1), (2, 2)]
        client.send(Puback(9), Pubcomp(9), Pubrec(9, 0x80))
        client.expect_nothing()
        client.send(Pubrec(9))
        assert client.expect(Pubrel).reason_code == 0x92
        client.send(Pubrec(2))
        assert client.expect(Pubrel).reason_code == 0
        client.send(Pubrec(2))
        assert client.expect(Pubrel).packet_id == 2
        client.send(Pubcomp(2), Puback(1))
        session = core.broker.registry.get("sub")
        assert session is not None and not session.deliveries.window.in_flight and session.deliveries.queued_messages == 0


def test_unpersisted_messages_may_be_acknowledged_in_any_order(tmp_path: Path) -> None:
    with Core(tmp_path, max_inflight=4, max_inflight_unpersisted=4) as core:
        client = core.connect("sub")
        client.subscribe("t/#", options=1)
        session = core.broker.registry.get("sub")
        assert session is not None
        for first, order in [(1, (3, 1, 1, 2, 4)), (5, (8, 7, 6, 5)), (9, (9, 11, 10, 12))]:
            publish(core, range(5))
            assert [packet.packet_id for packet in client.arrived()] == [first, first + 1, first + 2, first + 3]
            client.send(*map(Puback, order[:2]))
            publish(core, range(1))
            assert len(client.arrived()) == 2
            client.send(*map(Puback, order[2:]))
            client.send(*map(Puback, range(first + 4, first + 6)))
            assert session.deliveries.packet_ids_in_use == session.deliveries.queued_messages == 0
            session.deliveries.window.last_packet_id = first + 3


@pytest.mark.parametrize("reason_code", [0, 0x80])
def test_an_unpersisted_qos_2_message_is_delivered_once(tmp_path: Path, reason_code: int) -> None:
    with Core(tmp_path, max_inflight=2, max_inflight_unpersisted=2) as core:
        client = core.connect("sub")
        client.subscribe("t/#", options=2)
        publisher = core.connect("pub")
        packet = Publish("t", b"0", 2, packet_id=7)
        publisher.send(packet, Publish("t", b"0", 2, dup=True, packet_id=7))
        assert [type(answer) for answer in publisher.arrived()] == [Pubrec, Pubrec]
        publisher.send(Pubrel(7), Pubrel(7))
        assert [answer.reason_code for answer in publisher.arrived()] == [0, 0x92]
        publisher.send(packet, Publish("t", b"1", 2, packet_id=8))
        assert [(packet.packet_id, packet.qos) for packet in client.arrived()] == [(1, 2), (2, 2)]
        client.send(Pubrec(1, reason_code))
        if reason_code == 0:
            assert client.expect(Pubrel).packet_id == 1
            client.expect_nothing()
            client.send(Pubcomp(1))
        assert [packet.packet_id for packet in client.arrived()] == [3]
        client.send(Pubrec(2), Pubrec(3))
        client.send(Pubcomp(2), Pubcomp(3))
        session = core.broker.registry.get("sub")
        assert session is not None and session.deliveries.packet_ids_in_use == session.deliveries.queued_messages == 0


WRONG = [  # QoS, and acknowledgements of which the last is unexpected
    (1, [Pubrec(1)]),
    (1, [Pubcomp(1)]),
    (1, [Pubrec(1, 0x80)]),
    (2, [Puback(1)]),
    (2, [Pubcomp(1)]),
    (2, [Pubrec(1), Puback(1)]),
]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "version, qos, answers",
    [(version, *row) for version in (4, 5) for row in WRONG] + [(5, 2, [Pubrec(1), Pubrec(1, 0x80)])],
)
def test_an_unexpected_acknowledgement_ends_the_connection(
    tmp_path: Path, version: int, qos: int, answers: list[Packet], persistent: bool
) -> None:
    """Section 4.3. If it were ignored, the delivery would never end."""
    with Core(tmp_path) as core:
        if persistent and version == 5:
            client = durable(core, "sub")
        else:
            client = core.connect("sub", version, clean_start=not persistent)
        client.subscribe("t", options=qos)
        publish(core, range(1), qos, "t")
        assert client.expect(Publish).packet_id == 1
        for answer in answers:
            assert not client.closed
            client.send(answer)
        end = [packet for packet in client.arrived() if not isinstance(packet, Pubrel)]
        assert client.closed and [packet.reason_code for packet in end] == ([0x82] if version == 5 else [])
        assert core.connect("pub").publish("t", b"", 1) == (0 if persistent else 0x10)


def test_pubrec_with_an_error_ends_the_delivery(tmp_path: Path) -> None:
    properties = Properties()
    properties.receive_maximum = 1
    with Core(tmp_path) as core:
        client = core.connect("sub", properties=properties)
        client.subscribe("t/#", options=2)
        publish(core, range(2), 2)
        assert client.expect(Publish).payload == b"0"
        client.send(Pubrec(1, 0x87))
        following = client.expect(Publish)
        assert (following.payload, following.packet_id) == (b"1", 2)


# --- disconnecting and reconnecting -------------------------------------------------------------------------------


@pytest.mark.parametrize("kill", [False, True], ids=["same process", "after a kill"])
@pytest.mark.parametrize("qos", [1, 2])
def test_a_reconnecting_client_gets_messages_in_flight_first(tmp_path: Path, qos: int, kill: bool) -> None:
    with Core(tmp_path) as core:
        client = durable(core, "sub", window=4)
        client.subscribe("t/#", options=qos)
        publish(core, range(10), qos)
        assert [packet.packet_id for packet in client.arrived()] == [1, 2, 3, 4]
        client.send(Puback(2) if qos == 1 else Pubrec(2))
        client.arrived()
        client.close()
        if kill:
            core.kill()
        client = durable(core, "sub", window=6)
        assert client.connack.session_present
        packets = client.arrived()
        released = [packet for packet in packets if isinstance(packet, Pubrel)]
        messages = [packet for packet in packets if isinstance(packet, Publish)]
        assert [packet.packet_id for packet in released] == ([] if qos == 1 else [2])
        again = [1, 3, 4, 5] if qos == 1 else [1, 3, 4]
        assert [packet.packet_id for packet in messages][: len(again)] == again
        assert [packet.dup for packet in messages] == [packet.packet_id in again for packet in messages]
        assert numbers_of(messages) == sorted(numbers_of(messages))
        assert len(messages) + len(released) == 6


@pytest.mark.parametrize("qos", [1, 2])
def test_a_long_queue_drains_in_order_while_messages_arrive(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path, **LIMITS) as core:
        session = away(core)
        publish(core, range(3200), qos)
        assert session.deliveries.queued_messages == 3200
        core.kill()
        client = durable(core, "sub", window=50)
        found: list[int] = []
        fresh = 3200
        while len(found) < 3600:
            packets = client.arrived()
            assert packets, f"nothing after {len(found)}"
            found += numbers_of([packet for packet in packets if isinstance(packet, Publish)])
            client.send(*answers_to(packets))
            if fresh < 3600 and len(found) > 1500:
                publish(core, range(fresh, fresh + 40), qos)
                fresh += 40
        assert found == list(range(3600))
        drain(client)
        session = client.connection.session
        assert (
            session.deliveries.queued_messages == 0
            and session.deliveries.queue.byte_count == 0
            and session.deliveries.queue.stored_seq == 0
        )


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_a_takeover_during_paging_neither_loses_nor_duplicates(tmp_path: Path, commits: int) -> None:
    """The page requested for the first connection arrives while the second one waits for its own."""
    with Core(tmp_path, **LIMITS) as core:
        away(core)
        publish(core, range(2500))
        first = durable(core, "sub", window=30)
        core.eager = False
        taken: list[int] = []
        session = core.broker.registry.get("sub")
        assert session is not None
        while not session.deliveries.reading_page:
            packets = first.arrived()
            taken += numbers_of(packets)
            first.send(*(Puback(packet.packet_id) for packet in packets))
        assert taken == list(range(len(taken)))
        core.take()
        second = core.client()
        properties = Properties()
        properties.session_expiry_interval = 0xFFFFFFFF
        second.send(Connect("sub", 5, False, properties=properties))
        for _ in range(commits):
            core.commit()
        core.eager = True
        publish(core, range(2500, 2510))
        core.settle()
        packets = second.arrived()
        assert packets[0].session_present
        found = numbers_of(packets[1:])
        second.send(*(Puback(packet.packet_id) for packet in packets[1:]))
        found += drain(second)
        assert found == list(range(len(taken), 2510))


def test_a_queue_drains_with_the_smallest_memory_limits(tmp_path: Path) -> None:
    with Core(tmp_path, max_queue_memory_messages=1, max_inflight=1) as core:
        away(core, qos=1)
        publish(core, range(30))
        client = durable(core, "sub", window=1)
        publish(core, range(30, 40))
        assert drain(client) == list(range(40))


def test_pages_are_limited_by_size(tmp_path: Path) -> None:
    with Core(tmp_path, max_transient_queue_bytes=10_000, max_queue_memory_messages=1000) as core:
        away(core, qos=1)
        client = core.connect("pub")
        for n in range(20):
            assert client.publish("t/1", b"%04d" % n + b" " * 2000, 1) == 0
        back = durable(core, "sub", window=1)
        session = back.connection.session
        found = []
        while session.deliveries.queued_messages:
            assert session.deliveries.queue.memory_bytes <= 10_000
            found.append(int(back.take().payload))
        assert found == list(range(20))


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=5) as core:
        away(core, qos=1)
        publish(core, range(8))
        assert core.control.status().drops["queue_full"] == 3
        client = durable(core, "sub")
        assert drain(client) == [0, 1, 2, 3, 4]
        publish(core, range(8, 10))
        assert drain(client) == [8, 9]


def test_expired_messages_are_counted_and_not_sent(tmp_path: Path) -> None:
    properties = Properties()
    properties.message_expiry_interval = 10
    with Core(tmp_path) as core:
        away(core, qos=1)
        client = core.connect("pub")
        client.publish("t/1", b"1", 1, properties=properties)
        client.publish("t/1", b"2", 1)
        core.advance(10)
        message = durable(core, "sub").take()
        assert (message.payload, message.packet_id) == (b"2", 2)
        assert core.control.status().drops["expired"] == 1


def test_packet_ids_of_expired_messages_are_skipped(tmp_path: Path) -> None:
    properties = Properties()
    properties.message_expiry_interval = 10
    with Core(tmp_path) as core:
        subscriber = durable(core, "sub", window=1)
        subscriber.subscribe("t/#", options=1)
        client = core.connect("pub")
        for payload, expiring in ((b"1", None), (b"2", properties), (b"3", properties), (b"4", None)):
            client.publish("t/1", payload, 1, properties=expiring)
        core.advance(10)
        messages = [subscriber.take() for _ in range(2)]
        assert [(message.payload, message.packet_id) for message in messages] == [(b"1", 1), (b"4", 4)]


# --- failed commits -----------------------------------------------------------------------------------------------


def test_a_refused_message_that_was_already_sent_is_counted_once(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = durable(core, "sub")
        client.subscribe("t/#", options=1)
        publisher = core.connect("pub")
        core.eager = False
        publisher.send(Publish("t/1", b"0", 1, False, False, 1))
        assert client.expect(Publish).payload == b"0"
        core.take()
        core.fail()
        assert publisher.expect(Puback).reason_code == 0x97
        client.send(Puback(1))
        session = client.connection.session
        assert (session.deliveries.queued_messages, session.deliveries.queue.byte_count) == (0, 0)
        core.eager = True
        publish(core, range(1, 4))
        assert drain(client) == [1, 2, 3]
        assert (session.deliveries.queued_messages, session.deliveries.queue.byte_count) == (0, 0)


def test_a_refused_message_frees_its_place_in_the_window(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = durable(core, "sub", window=1)
        client.subscribe("t/#", options=2)
        publisher = core.connect("pub")
        core.eager = False
        publisher.send(Publish("t/1", b"0", 2, False, False, 1))
        core.take()
        publisher.send(Publish("t/1", b"1", 2, False, False, 2))
        core.fail()
        core.settle()
        assert [packet.reason_code for packet in publisher.arrived()] == [0x97, 0]
        assert client.expect(Publish).payload == b"1"


def test_a_refused_message_is_not_delivered_to_a_disconnected_client(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        session = away(core, qos=1)
        publisher = core.connect("pub")
        core.eager = False
        publisher.send(Publish("t/1", b"0", 1, False, False, 1))
        core.fail()
        assert publisher.expect(Puback).reason_code == 0x97
        assert (session.deliveries.queued_messages, session.deliveries.queue.byte_count) == (0, 0)
        core.eager = True
        publish(core, range(1, 3))
        assert drain(durable(core, "sub")) == [1, 2]


def test_an_acknowledgement_whose_commit_failed_is_written_later(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        away(core, qos=1)
        publish(core, range(3))
        client = durable(core, "sub")
        assert numbers_of(client.arrived()) == [0, 1, 2]
        core.eager = False
        client.send(Puback(1), Puback(2))
        core.fail()
        core.settle()
        core.kill()
        core.eager = True
        assert drain(durable(core, "sub")) == [2]


def test_a_pubrec_whose_commit_failed_is_written_later(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        away(core)
        publish(core, range(1), 2)
        client = durable(core, "sub")
        core.eager = False
        client.expect(Publish)
        client.send(Pubrec(1))
        core.fail()
        assert client.arrived() == []
        core.settle()
        assert client.expect(Pubrel).packet_id == 1
        core.kill()
        core.eager = True
        assert [type(packet) for packet in durable(core, "sub").arrived()] == [Pubrel]
