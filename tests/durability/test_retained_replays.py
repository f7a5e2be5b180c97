"""Retained messages for a subscription of a persistent session arrive though the broker restarts while they are sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties

StartBroker = Callable[..., BrokerProcess]

MESSAGES = 1000
BEFORE = 20  # messages that arrive before the restart
LARGE = 12_000  # bytes; so many of them do not fit into the buffers of sockets


def restart(broker: BrokerProcess, how: str) -> None:
    if how == "in place":
        broker.restart_in_place()
    else:
        broker.restart(kill=how == "killed")


def retain(broker: BrokerProcess, qos: int) -> set[str]:
    """Retain messages; returns their topics."""
    topics = {number: f"t/{number}" for number in range(1, MESSAGES + 1)}
    with RawClient(broker.port, 4) as publisher:
        publisher.connect("publisher")
        payload = b"x" if qos else b"x" * LARGE
        publisher.send(*(Publish(topic, payload, qos, True, False, number) for number, topic in topics.items()))
        if qos == 1:
            assert {publisher.expect(Puback).packet_id for _ in topics} == set(topics)
        if qos == 2:
            for _ in topics:
                publisher.send(Pubrel(publisher.expect(Pubrec).packet_id))
            assert {publisher.expect(Pubcomp).packet_id for _ in topics} == set(topics)
        publisher.ping()
    return set(topics.values())


def resume(broker: BrokerProcess, version: int, present: bool) -> RawClient:
    properties = Properties()
    if version == 5:
        properties.session_expiry_interval = 3600
    client = RawClient(broker.port, version)
    assert client.connect("subscriber", clean_start=False, properties=properties).session_present == present
    return client


def collect(client: RawClient, topics: set[str], count: int) -> None:
    """Receive and acknowledge messages until there are ``count`` topics and no packet identifier is in use."""
    in_use: set[int] = set()
    while len(topics) < count or in_use:
        packet = client.receive()
        if isinstance(packet, Pubrel):
            client.send(Pubcomp(packet.packet_id))
            in_use.discard(packet.packet_id)
            continue
        assert isinstance(packet, Publish) and packet.retain
        topics.add(packet.topic)
        if packet.qos == 1:
            client.send(Puback(packet.packet_id))
        elif packet.qos == 2:
            in_use.add(packet.packet_id)
            client.send(Pubrec(packet.packet_id))


@pytest.mark.parametrize(
    ("how", "connected"),
    [("killed", True), ("killed", False), ("terminated", True), ("terminated", False), ("in place", True)],
)
@pytest.mark.parametrize(("version", "qos"), [(4, 1), (5, 1), (4, 2), (5, 2), (4, 0), (5, 0)])
def test_a_restart_does_not_end_a_replay(start_broker: StartBroker, version: int, qos: int, how: str, connected: bool) -> None:
    broker = start_broker(config={"limits": {"max_inflight": 20, "max_outbox_bytes": "12KiB"}})
    topics = retain(broker, qos)
    client = resume(broker, version, present=False)
    assert client.subscribe("t/#", options=qos).reason_codes == [qos]
    arrived = {client.take().topic for _ in range(BEFORE)}
    if not connected:
        client.close()
    restart(broker, how)
    client.close()
    client = resume(broker, version, present=True)
    collect(client, arrived, MESSAGES)
    assert arrived == topics
    # The replay has ended: another restart does not repeat it.
    with RawClient(broker.port) as other:
        other.connect("other")
        assert client.ping() == [] and other.publish("committed", b"x", 1, retain=True) < 0x80
    restart(broker, how)
    client.close()
    resume(broker, version, present=True).expect_nothing()
