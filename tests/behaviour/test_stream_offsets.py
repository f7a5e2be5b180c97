"""Persistent sessions read streams: each continues where it stopped, also after the broker was killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties

CONFIG = {"streams": {"log": {"filters": ["log/#", "other/#"], "partitions": 2, "seal": False}}}


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config=CONFIG) as started:
        yield started


def publish(broker: BrokerProcess, first: int, last: int, qos: int = 1, topic: str = "log/a") -> None:
    with RawClient(broker.port) as publisher:
        publisher.connect()
        for number in range(first, last + 1):
            assert publisher.publish(topic, b"%d" % number, qos) in (0, 16)


def connect(broker: BrokerProcess, window: int = 100) -> RawClient:
    client = RawClient(broker.port)
    properties = Properties()
    properties.session_expiry_interval = 3600
    properties.receive_maximum = window
    client.connect("reader", clean_start=False, properties=properties)
    return client


def earliest(start: str = "earliest") -> Properties:
    properties = Properties()
    properties.user_properties = [("stream-offset", start)]
    return properties


def numbers(messages: list[Publish]) -> list[int]:
    return [int(message.payload) for message in messages]


def acknowledge(client: RawClient, messages: list[Publish]) -> None:
    client.send(*(Puback(message.packet_id) for message in messages))
    client.ping()


@pytest.mark.parametrize("kill", [False, True])
def test_a_session_continues_where_it_stopped(broker: BrokerProcess, kill: bool) -> None:
    publish(broker, 1, 20)
    with connect(broker, 5) as client:
        assert client.subscribe("$stream/log", options=1, properties=earliest()).reason_codes == [1]
        found = [client.receive() for _ in range(5)]
        assert numbers(found) == [1, 2, 3, 4, 5]  # type: ignore[arg-type]
        client.send(Puback(found[0].packet_id), Puback(found[1].packet_id))  # type: ignore[attr-defined]
        more = [client.expect(Publish) for _ in range(2)]
        assert numbers(more) == [6, 7]
    publish(broker, 21, 25)  # with its last PUBACK, everything before it is committed
    if kill:
        broker.restart(kill=True)
    with connect(broker, 100) as client:
        again = [client.expect(Publish) for _ in range(23)]
        assert numbers(again) == list(range(3, 26))
        assert [message.dup for message in again] == [True] * 5 + [False] * 18
        assert [message.packet_id for message in again[:5]] == [3, 4, 5, 6, 7]
        acknowledge(client, again)
    with connect(broker) as client:
        assert client.subscribe("$stream/log", options=1, properties=earliest()).reason_codes == [1]
        publish(broker, 26, 26)
        assert numbers([client.expect(Publish)]) == [26]


def test_qos_2_is_exactly_once_over_a_kill(broker: BrokerProcess) -> None:
    publish(broker, 1, 30, 2)
    received: list[int] = []
    ids: set[int] = set()
    rounds = 0
    while len(received) < 30:
        with connect(broker, 4) as client:
            if rounds == 0:
                client.subscribe("$stream/log", options=2, properties=earliest())
            for _ in range(7):
                if len(received) == 30 and not ids:
                    break
                packet = client.receive()
                if isinstance(packet, Publish):
                    if packet.packet_id not in ids:
                        ids.add(packet.packet_id)
                        received.append(int(packet.payload))
                    client.send(Pubrec(packet.packet_id))
                elif isinstance(packet, Pubrel):
                    ids.discard(packet.packet_id)
                    client.send(Pubcomp(packet.packet_id))
            client.ping()
        rounds += 1
        if rounds % 2:
            broker.restart(kill=True)
    assert received == list(range(1, 31)) and rounds > 3


def test_a_filter_and_qos_0_move_the_place_too(broker: BrokerProcess) -> None:
    publish(broker, 1, 5)
    with connect(broker) as client:
        client.subscribe("$stream/log/log/#", options=0, properties=earliest())
        assert numbers([client.expect(Publish) for _ in range(5)]) == [1, 2, 3, 4, 5]
        publish(broker, 6, 9, topic="other/a")
    publish(broker, 10, 12)
    broker.restart(kill=True)
    with connect(broker) as client:
        rest = numbers([client.expect(Publish) for _ in range(3)])
        assert rest == [10, 11, 12]
        client.expect_nothing()


def test_another_start_seeks_and_unsubscribing_forgets_the_place(broker: BrokerProcess) -> None:
    publish(broker, 1, 3)
    with connect(broker) as client:
        for start, expected in (("earliest", [1, 2, 3]), ("latest", []), ("earliest", [1, 2, 3])):
            client.subscribe("$stream/log", options=1, properties=earliest(start))
            found = [client.expect(Publish) for _ in expected]
            assert numbers(found) == expected
            acknowledge(client, found)
        client.subscribe("$stream/log", options=1)
        client.expect_nothing()
        client.unsubscribe("$stream/log")
        client.subscribe("$stream/log", options=1)
        client.expect_nothing()
        publish(broker, 4, 4)
        assert numbers([client.expect(Publish)]) == [4]
