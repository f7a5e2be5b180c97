"""Numbered messages to durable sessions of a `Core`."""

from __future__ import annotations

from mqttbroker.codec.packets import Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties
from sessions.session import Session
from support.core import Core, CoreClient


def durable(core: Core, client_id: str, window: int = 65535, clean_start: bool = False) -> CoreClient:
    """Connect a client whose session never expires."""
    properties = Properties()
    properties.session_expiry_interval = 0xFFFFFFFF
    properties.receive_maximum = window
    return core.connect(client_id, clean_start=clean_start, properties=properties)


def away(core: Core, qos: int = 2, topic_filter: str = "t/#") -> Session:
    """The session of client ``sub``, which has subscribed and disconnected."""
    client = durable(core, "sub")
    client.subscribe(topic_filter, options=qos)
    client.disconnect()
    session = core.broker.registry.get("sub")
    assert session is not None
    return session


def publish(core: Core, numbers: range, qos: int = 1, topic: str = "t/1") -> None:
    """Publish messages whose payloads are ``numbers``; each is acknowledged."""
    client = core.connect("pub")
    for start in range(numbers.start, numbers.stop, 500):
        part = range(start, min(start + 500, numbers.stop))
        ids = list(range(1, len(part) + 1))
        client.send(*(Publish(topic, b"%d" % n, qos, False, False, n - start + 1) for n in part))
        answers = [client.expect(Puback if qos == 1 else Pubrec) for _ in part]
        assert [answer.packet_id for answer in answers] == ids
        assert {answer.reason_code for answer in answers} == {0}
        if qos == 2:
            client.send(*map(Pubrel, ids))
            assert [client.expect(Pubcomp).packet_id for _ in part] == ids
    client.disconnect()


def numbers_of(packets: list[Publish]) -> list[int]:
    return [int(packet.payload) for packet in packets]


def answers_to(packets: list[Packet]) -> list[Packet]:
    """A client's answers to PUBLISH and PUBREL packets."""
    answers: list[Packet] = []
    for packet in packets:
        if isinstance(packet, Publish) and packet.qos:
            answers.append(Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id))
        elif isinstance(packet, Pubrel):
            answers.append(Pubcomp(packet.packet_id))
    return answers


def drain(client: CoreClient) -> list[int]:
    """Receive and acknowledge until nothing more arrives; the numbers in order of arrival."""
    found: list[int] = []
    while True:
        packets = client.arrived()
        if not packets:
            return found
        found += numbers_of([packet for packet in packets if isinstance(packet, Publish)])
        client.send(*answers_to(packets))
