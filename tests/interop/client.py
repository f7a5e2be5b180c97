"""The interface that each third-party client implements, so that one suite can drive them all.

An adapter reports only what its library reported. Every wait ends after SECONDS.
"""

from __future__ import annotations

import asyncio
import queue
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

SECONDS = 30
T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """A PUBLISH that a client sends or received; the fields after ``retain`` are properties, empty if absent."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    user: tuple[tuple[str, str], ...] = ()
    response_topic: str = ""
    correlation: bytes = b""
    content_type: str = ""
    expiry: int = 0
    identifiers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Connection:
    """How to connect. ``version`` is 4 (3.1.1) or 5; ``kept`` asks for a session expiry of a minute or longer."""

    host: str
    port: int
    client_id: str
    version: int
    clean: bool = True
    kept: bool = False
    will: Message | None = None


class Client(ABC):
    """One connection by one library. Constructing connects and waits for CONNACK."""

    session_present: bool | None = None
    """From CONNACK; None if the library does not report it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.messages: queue.Queue[Message] = queue.Queue()

    @abstractmethod
    def subscribe(self, topic_filter: str, qos: int, identifier: int = 0) -> None:
        """Returns after a SUBACK that grants ``qos``."""

    @abstractmethod
    def publish(self, message: Message) -> None:
        """Returns after the last acknowledgement that ``message.qos`` asks for."""

    @abstractmethod
    def drop(self) -> None:
        """End the connection without DISCONNECT."""

    @abstractmethod
    def close(self) -> None:
        """DISCONNECT; nothing if it is closed or dropped."""

    def receive(self) -> Message:
        """The next received message; queue.Empty if none arrives in time."""
        return self.messages.get(timeout=SECONDS)


class Loop:
    """A thread with an event loop, for asyncio libraries; the constructor starts it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; TimeoutError after SECONDS."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, SECONDS), self.loop).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()


class Program(Client):
    """A client in another language: commands on its standard input, events on its standard output.

    A line is a word and ``name=value`` fields with tabs between; ``user`` fields (``user=name=value``) repeat.
    Commands are connect, subscribe, publish, burst (MQTT.js only) and disconnect; their answers connected, subscribed,
    published, published and disconnected. A ``message`` event reports a received message; an ``error`` event replaces an answer.
    """

    def __init__(self, connection: Connection, command: Sequence[str], scheme: str = "tcp") -> None:
        super().__init__(connection)
        self._answers: queue.Queue[tuple[str, dict[str, str]]] = queue.Queue()
        self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        will = connection.will
        fields: dict[str, Any] = {
            "url": f"{scheme}://{connection.host}:{connection.port}",
            "id": connection.client_id,
            "version": connection.version,
            "clean": int(connection.clean),
            "expiry": 60 if connection.kept else 0,
        }
        if will is not None:
            fields |= {"will": will.topic, "payload": will.payload.decode(), "qos": will.qos}
        try:
            present = self._ask("connect", "connected", **fields).get("session")
            self.session_present = None if present is None else present == "1"
        except BaseException:
            self.drop()
            raise

    def subscribe(self, topic_filter: str, qos: int, identifier: int = 0) -> None:
        answer = self._ask("subscribe", "subscribed", filter=topic_filter, qos=qos, identifier=identifier or "")
        assert answer["code"] == str(qos)

    def publish(self, message: Message) -> None:
        fields: dict[str, Any] = {
            "topic": message.topic,
            "payload": message.payload.decode(),
            "qos": message.qos,
            "retain": int(message.retain),
            "response": message.response_topic,
            "correlation": message.correlation.decode(),
            "type": message.content_type,
            "expiry": message.expiry or "",
        }
        self._ask("publish", "published", message.user, **fields)

    def burst(self, topic: str, count: int, qos: int, retain: bool) -> None:
        """Publish to topic/0, topic/1 … without a wait between; returns after the last acknowledgement."""
        self._ask("burst", "published", topic=topic, count=count, qos=qos, retain=int(retain), payload="x" * 40)

    def drop(self) -> None:
        self._process.kill()
        self._end()

    def close(self) -> None:
        if self._process.poll() is None:
            self._ask("disconnect", "disconnected")
            self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(SECONDS)
        self._reader.join(SECONDS)
        self._process.stdout.close()

    def _ask(self, command: str, answer: str, user: Sequence[tuple[str, str]] = (), **fields: Any) -> dict[str, str]:
        assert self._process.stdin is not None
        parts = [command, *(f"{name}={value}" for name, value in fields.items() if value != "")]
        parts += [f"user={name}={value}" for name, value in user]
        self._process.stdin.write("\t".join(parts) + "\n")
        self._process.stdin.flush()
        word, result = self._answers.get(timeout=SECONDS)
        assert word == answer, f"{command}: {word} {result}"
        return result

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, *parts = line.rstrip("\n").split("\t")
            pairs = [(name, value) for name, _, value in (part.partition("=") for part in parts)]
            if word == "message":
                self.messages.put(message_of(pairs))
            else:
                self._answers.put((word, dict(pairs)))
        self._answers.put(("ended", {}))


def message_of(pairs: Sequence[tuple[str, str]]) -> Message:
    """The fields of a ``message`` line."""
    fields = dict(pairs)
    users = (value.partition("=") for name, value in pairs if name == "user")
    return Message(
        fields["topic"],
        fields["payload"].encode(),
        int(fields["qos"]),
        fields["retain"] == "1",
        tuple((name, value) for name, _, value in users),
        fields.get("response", ""),
        fields.get("correlation", "").encode(),
        fields.get("type", ""),
        int(fields.get("expiry", 0)),
        tuple(int(value) for name, value in pairs if name == "identifier"),
    )


@contextmanager
def closing(client: Client) -> Iterator[Client]:
    try:
        yield client
    finally:
        client.close()
