"""paho-mqtt (Python, PyPI) against the broker."""

from __future__ import annotations

import queue
import socket
from typing import Any

import paho.mqtt.client as paho
from client import SECONDS, Client, Connection, Message
from paho.mqtt.enums import CallbackAPIVersion
from paho_properties import connect_properties, message_of, publish_properties, subscribe_properties
from suite import Suite


class Paho(Client):
    """Uses the library's network thread."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._answers: queue.Queue[Any] = queue.Queue()
        modern = connection.version == 5
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            connection.client_id,
            clean_session=None if modern else connection.clean,
            protocol=paho.MQTTv5 if modern else paho.MQTTv311,
            reconnect_on_failure=False,
        )
        if connection.will is not None:
            self._client.will_set(connection.will.topic, connection.will.payload, connection.will.qos)
        self._client.on_message = lambda _c, _d, m: self.messages.put(message_of(m.topic, bytes(m.payload), m.qos, m.retain, m.properties))
        self._client.on_connect = lambda _c, _d, flags, reason, _p: self._answers.put((flags, reason))
        self._client.on_subscribe = lambda _c, _d, _mid, reasons, _p: self._answers.put(reasons)
        how: dict[str, Any] = {"clean_start": connection.clean, "properties": connect_properties(connection.kept)}
        self._client.connect(connection.host, connection.port, **(how if modern else {}))
        self._client.loop_start()
        flags, reason = self._answers.get(timeout=SECONDS)
        assert not reason.is_failure
        self.session_present = flags.session_present

    def subscribe(self, topic_filter: str, qos: int, identifier: int = 0) -> None:
        self._client.subscribe(topic_filter, qos, properties=subscribe_properties(identifier))
        assert [reason.value for reason in self._answers.get(timeout=SECONDS)] == [qos]

    def publish(self, message: Message) -> None:
        properties = publish_properties(message) if self.connection.version == 5 else None
        info = self._client.publish(message.topic, message.payload, message.qos, message.retain, properties)
        info.wait_for_publish(SECONDS)
        assert info.is_published()

    def drop(self) -> None:
        raw = self._client.socket()
        assert raw is not None
        raw.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class TestPahoPython(Suite):
    def connect(self, connection: Connection) -> Client:
        return Paho(connection)
