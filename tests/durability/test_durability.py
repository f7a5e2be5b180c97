"""A broker process is stopped or killed and started again on its data directory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties

StartBroker = Callable[..., BrokerProcess]


def resume(broker: BrokerProcess, client_id: str, version: int = 5, present: bool = True) -> RawClient:
    """Connect with a session that never expires."""
    properties = Properties()
    if version == 5:
        properties.session_expiry_interval = 0xFFFFFFFF
    client = RawClient(broker.port, version)
    connack = client.connect(client_id, clean_start=False, properties=properties)
    assert (connack.reason_code, connack.session_present) == (0, present)
    return client


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "terminated"])
def test_a_restart_keeps_everything_acknowledged(start_broker: StartBroker, kill: bool) -> None:
    broker = start_broker()
    subscriber = resume(broker, "sub", 4, present=False)
    subscriber.subscribe("t/+", options=2)
    subscriber.close()
    publisher = resume(broker, "pub", 5, present=False)
    for n in range(1, 21):
        assert publisher.publish("t/1", b"%d" % n, 1 + n % 2) == 0
    assert publisher.publish("t/kept", b"retained", 1, retain=True) == 0
    # Incomplete exchanges: one message received but not released, others delivered but not completed.
    publisher.send(Publish("t/2", b"half", 2, False, False, 900))
    publisher.wait_for(Pubrec)
    subscriber = resume(broker, "sub", 4)
    # Sorted, as QoS 2 messages are sent after the commit of their packet id and QoS 1 messages before.
    messages = sorted((subscriber.expect(Publish) for _ in range(22)), key=lambda message: message.packet_id)
    assert [message.packet_id for message in messages] == list(range(1, 23))
    released = next(message.packet_id for message in messages if message.qos == 2)
    subscriber.send(Pubrec(released))
    assert subscriber.expect(Pubrel).packet_id == released
    acknowledged = next(message.packet_id for message in messages if message.qos == 1)
    subscriber.send(Puback(acknowledged))
    subscriber.expect_nothing()
    # The subscriber's PUBACK is committed with this message or before.
    assert publisher.publish("t/3", b"later", 1) == 0
    if not kill:
        publisher.close()
        subscriber.close()
    broker.restart(kill=kill)
    publisher = resume(broker, "pub", 5)
    publisher.send(Publish("t/2", b"half", 2, False, True, 900))
    assert publisher.expect(Pubrec).reason_code == 0
    publisher.send(Pubrel(900))
    assert publisher.expect(Pubcomp).reason_code == 0
    subscriber = resume(broker, "sub", 4)
    assert subscriber.expect(Pubrel).packet_id == released
    subscriber.send(Pubcomp(released))
    again = [subscriber.take() for _ in range(21)]
    assert [message.payload for message in again[:20]] == [
        message.payload for message in messages if message.packet_id not in (released, acknowledged)
    ]
    assert all(message.dup for message in again[:20])
    assert again[20].payload == b"later"
    subscriber.expect_nothing()
    with RawClient(broker.port) as client:
        client.connect("other")
        client.subscribe("t/kept")
        message = client.take()
        assert (message.payload, message.retain) == (b"retained", True)
    # The subscription is restored too.
    publisher.publish("t/4", b"new", 2)
    assert subscriber.take().payload == b"new"


def test_a_long_queue_is_delivered_completely_after_a_kill(start_broker: StartBroker) -> None:
    """A queue longer than memory may hold, with new messages, a kill and a takeover while it is delivered."""
    broker = start_broker(config={"limits": {"max_queue_memory_messages": 200, "max_inflight": 100}})
    subscriber = resume(broker, "sub", present=False)
    subscriber.subscribe("t", options=1)
    subscriber.close()
    publisher = RawClient(broker.port, 4)
    publisher.connect("pub")

    def publish(numbers: range) -> None:
        publisher.send(*(Publish("t", b"%d" % n, 1, False, False, n % 65535 + 1) for n in numbers))
        for _ in numbers:
            publisher.expect(Puback)

    publish(range(3500))
    broker.restart(kill=True)
    publisher = RawClient(broker.port, 4)
    publisher.connect("pub")
    subscriber = resume(broker, "sub")
    found: list[int] = []
    for n in range(4000):
        message = subscriber.take()
        if not found or int(message.payload) > found[-1]:
            found.append(int(message.payload))
        else:
            assert message.dup
        if len(found) == 1000:
            publish(range(3500, 3750))
        if len(found) == 1500 and n < 3999 and subscriber is not None:
            takeover = resume(broker, "sub")
            subscriber.close()
            subscriber = takeover
        if len(found) == 3700:
            publish(range(3750, 3800))
        if len(found) == 3800:
            break
    assert found == list(range(3800))
    subscriber.expect_nothing()


def test_repeated_kills_lose_no_acknowledged_message(start_broker: StartBroker) -> None:
    broker = start_broker()
    subscriber = resume(broker, "sub", present=False)
    subscriber.subscribe("t", options=2)
    subscriber.close()
    number, acknowledged = 0, []
    for _ in range(3):
        publisher = RawClient(broker.port, 4)
        publisher.connect("pub")
        publisher.send(*(Publish("t", b"%d" % (number + n), 1, False, False, n + 1) for n in range(2000)))
        for _ in range(300):
            acknowledged.append(number + publisher.expect(Puback).packet_id - 1)
        number += 2000
        broker.restart(kill=True)
    subscriber = resume(broker, "sub")
    found = {int(subscriber.take().payload) for _ in range(len(acknowledged))}
    while not set(acknowledged) <= found:
        found.add(int(subscriber.take().payload))


@pytest.mark.parametrize("durability", ["interval", "off"])
def test_other_durabilities_acknowledge_at_once_and_interval_keeps_everything_on_a_clean_stop(
    start_broker: StartBroker, durability: str
) -> None:
    broker = start_broker(config={"durability": durability, "durability_interval": "50ms"})
    subscriber = resume(broker, "sub", 4, present=False)
    subscriber.subscribe("t")
    subscriber.close()
    with RawClient(broker.port) as publisher:
        publisher.connect("pub")
        for n in range(10):
            assert publisher.publish("t", b"%d" % n, 1 + n % 2, retain=n == 9) == 0
    subscriber = resume(broker, "sub", 4)
    assert subscriber.take().payload == b"0"
    subscriber.close()
    assert broker.terminate() == 0
    broker.start()
    if durability == "off":
        resume(broker, "sub", 4, present=False)
        return
    subscriber = resume(broker, "sub", 4)
    assert [int(subscriber.take().payload) for _ in range(9)] == list(range(1, 10))
    subscriber.expect_nothing()


def test_clients_get_a_disconnect_when_the_broker_stops(start_broker: StartBroker) -> None:
    broker = start_broker()
    with RawClient(broker.port) as five, RawClient(broker.port, 4) as four:
        five.connect("five")
        four.connect("four")
        assert broker.terminate() == 0
        assert [packet.reason_code for packet in five.expect_closed()] == [0x8B]  # type: ignore[attr-defined]
        assert four.expect_closed() == []
