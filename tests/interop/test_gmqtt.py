"""gmqtt (Python, PyPI) against the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import gmqtt
import pytest
from client import Client, Connection, Loop, Message
from gmqtt.mqtt.constants import MQTTv50, MQTTv311
from gmqtt.storage import PersistentStorage
from suite import Suite


class Gmqtt(Client):
    """Runs on ``loop``; the storage reports when everything is acknowledged."""

    def __init__(self, connection: Connection, loop: Loop) -> None:
        super().__init__(connection)
        self._loop = loop
        self._open = False
        self._loop.run(self._connect())

    async def _connect(self) -> None:
        connection = self.connection
        will = connection.will
        self._granted: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        self._storage = PersistentStorage()
        self._client = gmqtt.Client(
            connection.client_id,
            clean_session=connection.clean,
            will_message=None if will is None else gmqtt.Message(will.topic, will.payload, will.qos),
            persistent_storage=self._storage,
            **({"session_expiry_interval": 60} if connection.kept and connection.version == 5 else {}),
        )
        self._client.stop_reconnect()
        self._client.on_connect = self._on_connect
        self._client.on_message = self._on_message
        self._client.on_subscribe = lambda _client, _mid, granted, _properties: self._granted.put_nowait(granted)
        version = MQTTv50 if connection.version == 5 else MQTTv311
        await self._client.connect(connection.host, connection.port, version=version)
        self._open = True

    def _on_connect(self, _client: gmqtt.Client, flags: int, reason: int, _properties: dict[str, Any]) -> None:
        assert reason == 0
        self.session_present = bool(flags & 1)

    def _on_message(self, _client: gmqtt.Client, topic: str, payload: bytes, qos: int, properties: dict[str, Any]) -> int:
        def one(name: str, empty: Any) -> Any:
            return properties.get(name, [empty])[0]

        message = Message(
            topic,
            payload,
            qos,
            bool(properties["retain"]),
            tuple(properties.get("user_property", ())),
            one("response_topic", ""),
            one("correlation_data", b""),
            one("content_type", ""),
            one("message_expiry_interval", 0),
            tuple(properties.get("subscription_identifier", ())),
        )
        self.messages.put(message)
        return 0

    def subscribe(self, topic_filter: str, qos: int, identifier: int = 0) -> None:
        async def work() -> tuple[int, ...]:
            options = {"subscription_identifier": identifier} if identifier else {}
            self._client.subscribe(topic_filter, qos, **options)
            return await self._granted.get()

        assert self._loop.run(work()) == (qos,)

    def publish(self, message: Message) -> None:
        async def work() -> None:
            options = {
                "user_property": list(message.user),
                "response_topic": message.response_topic,
                "correlation_data": message.correlation,
                "content_type": message.content_type,
                "message_expiry_interval": message.expiry,
            }
            there = {name: value for name, value in options.items() if value}
            self._client.publish(message.topic, message.payload, message.qos, message.retain, **there)
            await self._storage.wait_empty()

        self._loop.run(work())

    def drop(self) -> None:
        self._open = False
        self._loop.loop.call_soon_threadsafe(self._client._connection._transport.abort)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.run(self._client.disconnect())


class TestGmqtt(Suite):
    @pytest.fixture(autouse=True)
    def loop(self) -> Iterator[None]:
        self.thread = Loop()
        yield
        self.thread.close()

    def connect(self, connection: Connection) -> Client:
        return Gmqtt(connection, self.thread)
