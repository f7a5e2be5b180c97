"""aiomqtt (Python, PyPI) against the broker."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiomqtt
import pytest
from client import Client, Connection, Loop, Message
from paho_properties import connect_properties, message_of, publish_properties, subscribe_properties
from suite import Suite


class Aiomqtt(Client):
    """A task on ``loop`` reads its messages."""

    def __init__(self, connection: Connection, loop: Loop) -> None:
        super().__init__(connection)
        self._loop = loop
        self._open = False
        self._loop.run(self._connect())
        self._reading = self._loop.start(self._read())

    async def _connect(self) -> None:
        connection = self.connection
        modern = connection.version == 5
        how: dict[str, Any] = {"clean_session": connection.clean}
        if modern:
            how = {"clean_start": connection.clean, "properties": connect_properties(connection.kept)}
        if connection.will is not None:
            how["will"] = aiomqtt.Will(connection.will.topic, connection.will.payload, connection.will.qos)
        self._client = aiomqtt.Client(
            connection.host,
            connection.port,
            identifier=connection.client_id,
            protocol=aiomqtt.ProtocolVersion.V5 if modern else aiomqtt.ProtocolVersion.V311,
            **how,
        )
        await self._client.__aenter__()
        self._open = True

    async def _read(self) -> None:
        with suppress(aiomqtt.MqttError):
            async for m in self._client.messages:
                assert isinstance(m.payload, bytes)
                self.messages.put(message_of(str(m.topic), m.payload, m.qos, m.retain, m.properties))

    def subscribe(self, topic_filter: str, qos: int, identifier: int = 0) -> None:
        granted = self._loop.run(self._client.subscribe(topic_filter, qos, properties=subscribe_properties(identifier)))
        assert [getattr(code, "value", code) for code in granted] == [qos]

    def publish(self, message: Message) -> None:
        properties = publish_properties(message) if self.connection.version == 5 else None
        work = self._client.publish(message.topic, message.payload, message.qos, message.retain, properties)
        self._loop.run(work)

    def drop(self) -> None:
        raw = self._client._client.socket()
        assert raw is not None
        raw.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._open:
            self._open = False
            with suppress(aiomqtt.MqttError):
                self._loop.run(self._client.__aexit__(None, None, None))
            self._reading.result()


class TestAiomqtt(Suite):
    @pytest.fixture(autouse=True)
    def loop(self) -> Iterator[None]:
        self.thread = Loop()
        yield
        self.thread.close()

    def connect(self, connection: Connection) -> Client:
        return Aiomqtt(connection, self.thread)
