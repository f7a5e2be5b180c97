"""MQTT.js (Node, npm) against the broker, over TCP and over WebSocket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client import Client, Connection, Program
from suite import Suite
from support.broker_process import BrokerProcess

COMMAND = ["node", str(Path(__file__).with_name("mqtt_js.js"))]
CONFIG = '[[listeners]]\n[[listeners]]\ntype = "ws"\nport = 0\n'


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config=CONFIG) as process:
        yield process


class TestMqttJs(Suite):
    USER = (("b", "1"), ("b", "2"), ("a", "Grüße"))  # MQTT.js keeps them by name

    def connect(self, connection: Connection) -> Client:
        return Program(connection, COMMAND, "mqtt")


class TestMqttJsOverWebSocket(TestMqttJs):
    def port(self, broker: BrokerProcess) -> int:
        return int(broker.wait_for_log(r"event=listening .*\btype=ws\b.*\bport=(\d+)")[1])

    def connect(self, connection: Connection) -> Client:
        return Program(connection, COMMAND, "ws")
