"""Resuming a session over TCP (MQTT 5.0 sections 3.1.2.4, 4.1 and 4.4)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.raw_client import RawClient

from mqttbroker.codec.packets import Disconnect, Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties

Connecting = Callable[..., RawClient]


def fields(version: int) -> dict[str, object]:
    """The CONNECT fields of a persistent session."""
    properties = Properties()
    if version == 5:
        properties.session_expiry_interval = 60
    return {"version": version, "clean_start": False, "properties": properties}


@pytest.mark.parametrize("first, second", [(4, 4), (5, 5), (4, 5), (5, 4), (3, 5)])
def test_messages_are_queued_for_an_offline_client(connect: Connecting, first: int, second: int) -> None:
    name = f"away-{first}-{second}"
    subscriber = connect(name, **fields(first))
    subscriber.subscribe(f"{name}/#")
    subscriber.disconnect()
    publisher = connect("away-p")
    for qos in (1, 0, 2, 1):
        publisher.publish(f"{name}/{qos}", b"", qos)
    subscriber = connect(name, **fields(second))
    got = [subscriber.take() for _ in range(3)]
    assert [message.topic for message in got if message.qos == 1] == [f"{name}/1"] * 2
    assert [message.topic for message in got if message.qos == 2] == [f"{name}/2"]
    assert sorted(message.packet_id for message in got) == [1, 2, 3] and not any(message.dup for message in got)
    subscriber.expect_nothing()


@pytest.mark.parametrize("version", [4, 5])
def test_in_flight_messages_are_sent_again_with_their_packet_ids(connect: Connecting, version: int) -> None:
    name = f"again-{version}"
    subscriber = connect(name, **fields(version))
    subscriber.subscribe(name)
    publisher = connect("again-p")
    for n in range(4):
        publisher.publish(name, b"%d" % n, 1 + n // 2)
    got = {packet.payload: packet for packet in subscriber.ping() if isinstance(packet, Publish)}
    subscriber.send(Puback(got[b"0"].packet_id), Pubrec(got[b"2"].packet_id))
    assert subscriber.expect(Pubrel).packet_id == got[b"2"].packet_id
    subscriber.close()
    subscriber = connect(name, **fields(version))
    assert subscriber.expect(Pubrel).packet_id == got[b"2"].packet_id
    for payload in (b"1", b"3"):
        message = subscriber.take()
        assert (message.payload, message.packet_id, message.dup) == (payload, got[payload].packet_id, True)
    publisher.publish(name, b"4", 1)
    message = subscriber.take()
    assert (message.payload, message.packet_id, message.dup) == (b"4", 5, False)
    subscriber.send(Pubcomp(got[b"2"].packet_id))
    subscriber.expect_nothing()


@pytest.mark.parametrize("version", [4, 5])
def test_qos_2_packet_ids_of_a_publisher_survive_a_reconnect(connect: Connecting, version: int) -> None:
    name = f"remembered-{version}"
    listener = connect("remembering", **fields(5))
    listener.subscribe(name)
    publisher = connect(name, **fields(version))
    publisher.send(Publish(name, b"x", 2, False, False, 9))
    publisher.expect(Pubrec)
    publisher.close()
    publisher = connect(name, **fields(version))
    publisher.send(Publish(name, b"x", 2, False, True, 9))
    publisher.expect(Pubrec)
    publisher.send(Pubrel(9))
    assert publisher.expect(Pubcomp).reason_code == 0
    assert listener.take().payload == b"x"
    listener.expect_nothing()


@pytest.mark.parametrize("version", [4, 5])
def test_clean_start_discards_the_session(connect: Connecting, version: int) -> None:
    name = f"clean-{version}"
    subscriber = connect(name, **fields(version))
    subscriber.subscribe(name)
    subscriber.send(Publish("x", b"", 2, False, False, 5))
    subscriber.expect(Pubrec)
    subscriber.close()
    publisher = connect("clean-p")
    publisher.publish(name, b"", 1)
    subscriber = connect(name, version)
    subscriber.expect_nothing()
    assert publisher.publish(name, b"", 1) == 0x10
    subscriber.send(Pubrel(5))
    assert subscriber.expect(Pubcomp).reason_code == (0x92 if version == 5 else 0)


def test_a_takeover_continues_the_session(connect: Connecting) -> None:
    first = connect("taking", **fields(5))
    first.subscribe("taking", options=1)
    publisher = connect("taking-p")
    for n in range(5):
        publisher.publish("taking", b"%d" % n, 1)
    for n in range(2):
        assert first.take().payload == b"%d" % n
    first.ping()  # its acknowledgements have arrived
    second = connect("taking", **fields(5))
    assert [packet.reason_code for packet in first.expect_closed() if isinstance(packet, Disconnect)] == [0x8E]
    assert [second.take().payload for _ in range(3)] == [b"2", b"3", b"4"]
    second.expect_nothing()


def test_a_smaller_receive_maximum_after_a_reconnect(connect: Connecting) -> None:
    subscriber = connect("smaller", **fields(5))
    subscriber.subscribe("smaller", options=1)
    publisher = connect("smaller-p")
    for n in range(6):
        publisher.publish("smaller", b"%d" % n, 1)
    assert len(subscriber.ping()) == 6
    subscriber.close()
    narrow = fields(5)
    narrow["properties"].receive_maximum = 2  # type: ignore[attr-defined]
    subscriber = connect("smaller", **narrow)
    for expected in ([b"0", b"1"], [b"2", b"3"], [b"4", b"5"]):
        got = [packet for packet in subscriber.ping() if isinstance(packet, Publish)]
        assert [packet.payload for packet in got] == expected and all(packet.dup for packet in got)
        subscriber.send(*(Puback(packet.packet_id) for packet in got))
    subscriber.expect_nothing()
