"""MQTT.js (Node, npm) against the broker, over TCP and over WebSocket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client import Client, Connection, Message, Program
from suite import Open, Suite
from support.broker_process import BrokerProcess

COMMAND = ["node", str(Path(__file__).with_name("mqtt_js.js"))]
BURST = 2000
CONFIG = '[[listeners]]\n[[listeners]]\ntype = "ws"\nport = 0\n'


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config=CONFIG) as process:
        yield process


class TestMqttJs(Suite):
    USER = (("b", "1"), ("b", "2"), ("a", "Grüße"))  # MQTT.js keeps them by name

    def connect(self, connection: Connection) -> Client:
        return Program(connection, COMMAND, "mqtt")

    @pytest.mark.parametrize("qos", [0, 1, 2])
    def test_a_burst(self, opened: Open, base: str, version: int, qos: int) -> None:
        """It sends everything at once, in version 5, too, where it ignores Receive Maximum."""
        client = opened(f"{base}-p", version)
        assert isinstance(client, Program)
        client.burst(base, BURST, qos, True)
        client.publish(Message(base, b"still there", 1, True))
        reader = opened(f"{base}-s", version)
        reader.subscribe(f"{base}/#", 1)
        topics = {reader.receive().topic for _ in range(BURST + 1)}
        assert topics == {base, *(f"{base}/{n}" for n in range(BURST))}


class TestMqttJsOverWebSocket(TestMqttJs):
    def port(self, broker: BrokerProcess) -> int:
        return int(broker.wait_for_log(r"event=listening .*\btype=ws\b.*\bport=(\d+)")[1])

    def connect(self, connection: Connection) -> Client:
        return Program(connection, COMMAND, "ws")
