"""mosquitto_pub, mosquitto_sub and mosquitto_rr (C, Debian's mosquitto-clients) against the broker."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from dataclasses import replace
from typing import Any

import pytest
from client import SECONDS, Client, Connection, Message
from suite import Open, Suite
from support.broker_process import BrokerProcess
from support.tools import needs

VERSIONS = {4: "mqttv311", 5: "mqttv5"}


def command(program: str, connection: Connection, *arguments: str) -> list[str]:
    where = ["-h", connection.host, "-p", str(connection.port), "-V", VERSIONS[connection.version]]
    return [f"mosquitto_{program}", *where, *arguments]


def properties_of(message: Message) -> list[str]:
    """As arguments of mosquitto_pub and mosquitto_rr."""
    one = {
        "response-topic": message.response_topic,
        "correlation-data": message.correlation.decode(),
        "content-type": message.content_type,
        "message-expiry-interval": str(message.expiry or ""),
    }
    arguments = [part for name, value in one.items() if value for part in ("-D", "publish", name, value)]
    return arguments + [part for pair in message.user for part in ("-D", "publish", "user-property", *pair)]


def message_of(line: str) -> Message:
    """A line that mosquitto_sub printed for the format %j; user properties may repeat a name."""
    fields: dict[str, Any] = dict(json.loads(line, object_pairs_hook=list))
    properties: dict[str, Any] = dict(fields.get("properties", ()))
    identifier = properties.get("subscription-identifier")
    return Message(
        fields["topic"],
        (fields.get("payload") or "").encode(),
        fields["qos"],
        bool(fields["retain"]),
        tuple((name, value) for name, value in properties.get("user-properties", ())),
        properties.get("response-topic", ""),
        properties.get("correlation-data", "").encode(),
        properties.get("content-type", ""),
        properties.get("message-expiry-interval", 0),
        () if identifier is None else (identifier,),
    )


class Mosquitto(Client):
    """A mosquitto_sub from the first subscribe() or receive() on, and a mosquitto_pub for each message."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._granted: queue.Queue[str] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._filter = ""

    def subscribe(self, topic_filter: str, qos: int, identifier: int = 0) -> None:
        connection, will = self.connection, self.connection.will
        arguments = ["-d", "-F", "%j", "-i", connection.client_id, "-t", topic_filter, "-q", str(qos)]
        arguments += [] if connection.clean else ["-c"]
        arguments += ["-x", "60"] if connection.kept and connection.version == 5 else []
        arguments += ["-D", "subscribe", "subscription-identifier", str(identifier)] if identifier else []
        if will is not None:
            arguments += ["--will-topic", will.topic, "--will-payload", will.payload.decode()]
            arguments += ["--will-qos", str(will.qos), "-C", "1"]
        self._filter = topic_filter
        self._process = subprocess.Popen(["stdbuf", "-oL", *command("sub", connection, *arguments)], stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        assert self._granted.get(timeout=SECONDS) == str(qos)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.messages.put(message_of(line))
            elif line.startswith("Subscribed"):
                self._granted.put(line.rpartition(":")[2].strip())

    def publish(self, message: Message) -> None:
        arguments = ["-i", f"{self.connection.client_id}-pub", "-t", message.topic, "-q", str(message.qos)]
        arguments += ["-m", message.payload.decode()] if message.payload else ["-n"]
        arguments += ["-r"] if message.retain else []
        arguments += properties_of(message)
        subprocess.run(command("pub", self.connection, *arguments), check=True, timeout=SECONDS)

    def receive(self) -> Message:
        if self._process is None:
            self.subscribe(f"{self.connection.client_id}/nothing", 0)  # mosquitto_sub does not connect without a filter
        return super().receive()

    def drop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._end()

    def close(self) -> None:
        if self._process is None or self._process.stdout is None or self._process.stdout.closed:
            return
        if self.connection.will is None:
            self._process.terminate()
        else:
            # On SIGTERM mosquitto_sub sends reason code 0x04, which publishes the will; after the awaited message it
            # disconnects normally.
            self.publish(Message(self._filter, b"end"))
        self._end()

    def _end(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.wait(SECONDS)
        self._reader.join(SECONDS)
        self._process.stdout.close()


@needs("mosquitto-clients")
class TestMosquitto(Suite):
    def connect(self, connection: Connection) -> Client:
        return Mosquitto(connection)

    @pytest.mark.parametrize("qos", [0, 1, 2])
    def test_mosquitto_rr(self, broker: BrokerProcess, opened: Open, base: str, version: int, qos: int) -> None:
        responder = opened(f"{base}-r", version)
        responder.subscribe(f"{base}/questions", qos)
        answers = f"{base}/answers"
        correlation = b"q-1" if version == 5 else b""
        question = Message(f"{base}/questions", b"6 x 9", qos, correlation=correlation)
        arguments = ["-t", question.topic, "-m", "6 x 9", "-q", str(qos), "-e", answers, "-W", str(SECONDS)]
        asker = Connection(broker.host, broker.port, "", version)
        asking = command("rr", asker, *arguments, *properties_of(question))
        with subprocess.Popen(asking, stdout=subprocess.PIPE, text=True) as process:
            asked = responder.receive()
            assert replace(asked, response_topic="") == question
            assert asked.response_topic == (answers if version == 5 else "")
            responder.publish(Message(answers, b"42", qos, correlation=asked.correlation))
            assert process.communicate(timeout=SECONDS)[0] == "42\n"
