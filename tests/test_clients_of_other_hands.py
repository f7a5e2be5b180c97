"""Clients that others wrote, as devices use them: aiomqtt (5.0), paho-mqtt (3.1.1), Debian's mosquitto_pub and _sub."""

from __future__ import annotations

import asyncio
import queue
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiomqtt
import paho.mqtt.client as paho
import pytest
from broker_process import BrokerProcess
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

SECONDS = 10

# --- aiomqtt, MQTT 5.0 --------------------------------------------------------------------------------------------


def modern(broker: BrokerProcess, client_id: str, **options: Any) -> aiomqtt.Client:
    return aiomqtt.Client(broker.host, broker.port, identifier=client_id, protocol=aiomqtt.ProtocolVersion.V5, **options)


def kept() -> Properties:
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = 60
    return properties


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_aiomqtt_both_ways(broker: BrokerProcess, qos: int) -> None:
    topic = f"aiomqtt/{qos}"
    properties = Properties(PacketTypes.PUBLISH)
    properties.UserProperty = [("b", "1"), ("a", "2")]
    async with asyncio.timeout(SECONDS), modern(broker, "aio-s") as subscriber, modern(broker, "aio-p") as publisher:
        await subscriber.subscribe(f"{topic}/#", qos=qos)
        for n in range(20):
            await publisher.publish(f"{topic}/{n}", f"{n}", qos=qos, properties=properties)
        got = [await anext(subscriber.messages) for _ in range(20)]
        assert [(str(message.topic), message.payload, message.qos) for message in got] == [
            (f"{topic}/{n}", b"%d" % n, qos) for n in range(20)
        ]
        assert got[0].properties is not None and got[0].properties.UserProperty == [("b", "1"), ("a", "2")]


async def test_aiomqtt_retained_will_and_resume(broker: BrokerProcess) -> None:
    async with asyncio.timeout(SECONDS), modern(broker, "aio-watch") as watcher:
        await watcher.publish("aio/kept", b"x", qos=1, retain=True)
        await watcher.subscribe("aio/#", qos=2)
        message = await anext(watcher.messages)
        assert message.retain and message.payload == b"x"
        doomed = modern(broker, "aio-doomed", will=aiomqtt.Will("aio/will", b"gone", qos=1))
        await doomed.__aenter__()
        assert doomed._client.socket() is not None
        doomed._client.socket().shutdown(2)  # type: ignore[union-attr]
        assert (await anext(watcher.messages)).payload == b"gone"
        with suppress(aiomqtt.MqttError):
            await doomed.__aexit__(None, None, None)
        async with modern(broker, "aio-resume", clean_start=True, properties=kept()) as client:
            await client.subscribe("aio-later", qos=2)
        for qos in (1, 2):
            await watcher.publish("aio-later", f"{qos}", qos=qos)
        async with modern(broker, "aio-resume", clean_start=False, properties=kept()) as client:
            got = [await anext(client.messages) for _ in range(2)]
        assert [message.payload for message in got] == [b"1", b"2"]


# --- paho-mqtt, MQTT 3.1.1 ----------------------------------------------------------------------------------------


class Paho:
    """A paho client with its thread; ``messages`` are what it got."""

    def __init__(self, broker: BrokerProcess, client_id: str, clean: bool = True, will: str = "") -> None:
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id, clean_session=clean, protocol=paho.MQTTv311)
        if will:
            self.client.will_set(will, b"gone", 1)
        self.client.on_message = lambda _client, _data, message: self.messages.put(message)
        self.client.on_connect = lambda _c, _d, flags, reason, _p: self.events.put(("connect", (flags, reason)))
        self.client.on_subscribe = lambda _c, _d, _mid, reasons, _p: self.events.put(("subscribe", reasons))
        self.client.connect(broker.host, broker.port)
        self.client.loop_start()
        flags, reason = self.wait("connect")
        assert not reason.is_failure
        self.session_present = flags.session_present

    def wait(self, kind: str) -> Any:
        name, value = self.events.get(timeout=SECONDS)
        assert name == kind
        return value

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self.client.subscribe(topic_filter, qos)
        assert [reason.value for reason in self.wait("subscribe")] == [qos]

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        self.client.publish(topic, payload, qos, retain).wait_for_publish(SECONDS)

    def take(self) -> paho.MQTTMessage:
        return self.messages.get(timeout=SECONDS)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@contextmanager
def old(broker: BrokerProcess, client_id: str, **options: Any) -> Iterator[Paho]:
    client = Paho(broker, client_id, **options)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_paho_both_ways(broker: BrokerProcess, qos: int) -> None:
    with old(broker, "paho-s") as subscriber, old(broker, "paho-p") as publisher:
        subscriber.subscribe(f"paho/{qos}/+", qos)
        for n in range(20):
            publisher.publish(f"paho/{qos}/{n}", b"%d" % n, qos)
        got = [subscriber.take() for _ in range(20)]
        assert [(message.topic, message.payload, message.qos) for message in got] == [
            (f"paho/{qos}/{n}", b"%d" % n, qos) for n in range(20)
        ]


def test_paho_retained_will_and_resume(broker: BrokerProcess) -> None:
    with old(broker, "paho-watch") as watcher:
        watcher.publish("paho-x/kept", b"x", 2, retain=True)
        watcher.subscribe("paho-x/#", 2)
        message = watcher.take()
        assert message.retain and message.payload == b"x"
        doomed = Paho(broker, "paho-doomed", will="paho-x/will")
        doomed.client.loop_stop()
        socket = doomed.client.socket()
        assert socket is not None
        socket.close()
        assert watcher.take().payload == b"gone"
        with old(broker, "paho-resume", clean=False) as client:
            assert not client.session_present
            client.subscribe("paho-later", 2)
        for qos in (1, 2):
            watcher.publish("paho-later", b"%d" % qos, qos)
        with old(broker, "paho-resume", clean=False) as client:
            assert client.session_present
            assert [client.take().payload for _ in range(2)] == [b"1", b"2"]


# --- mosquitto's command line, both versions ----------------------------------------------------------------------

needs_mosquitto = pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="needs Debian's mosquitto-clients")


def mosquitto(program: str, broker: BrokerProcess, *arguments: str) -> list[str]:
    return [f"mosquitto_{program}", "-h", broker.host, "-p", str(broker.port), *arguments]


@contextmanager
def subscription(broker: BrokerProcess, topic_filter: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A mosquitto_sub that has its SUBACK."""
    command = mosquitto("sub", broker, "-d", "-W", str(SECONDS), "-t", topic_filter, "-F", "got:%q:%r:%t:%p", *arguments)
    with subprocess.Popen(["stdbuf", "-oL", *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Subscribed"):
                break
        try:
            yield process
        finally:
            process.kill()


def got(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    while len(lines) < count:
        line = process.stdout.readline()
        assert line, f"mosquitto_sub ended after {lines}"
        if line.startswith("got:"):
            lines.append(line.strip().removeprefix("got:"))
    return lines


@needs_mosquitto
@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_mosquitto_both_ways(broker: BrokerProcess, version: str, qos: int) -> None:
    topic = f"mosquitto/{version}/{qos}"
    with subscription(broker, topic, "-V", version, "-q", str(qos)) as process:
        for n in range(2):
            command = mosquitto("pub", broker, "-V", version, "-q", str(qos), "-t", topic, "-m", f"m{n}")
            subprocess.run(command, check=True, timeout=SECONDS)
        assert got(process, 2) == [f"{qos}:0:{topic}:m{n}" for n in range(2)]


@needs_mosquitto
@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
def test_mosquitto_retained_will_and_resume(broker: BrokerProcess, version: str) -> None:
    topic = f"mosquitto-x/{version}"

    def publish(*arguments: str) -> None:
        subprocess.run(mosquitto("pub", broker, "-V", version, *arguments), check=True, timeout=SECONDS)

    publish("-t", f"{topic}/kept", "-m", "x", "-q", "1", "-r")
    with subscription(broker, f"{topic}/#", "-V", version, "-q", "2") as process:
        assert got(process, 1) == [f"1:1:{topic}/kept:x"]
        will = ("--will-topic", f"{topic}/will", "--will-payload", "gone", "--will-qos", "1")
        with subscription(broker, "nothing", "-V", version, *will) as doomed:
            doomed.kill()
            assert got(process, 1) == [f"1:0:{topic}/will:gone"]
    session = ("-i", f"mosquitto-{version}", "-c", "-q", "2", "-V", version)
    if version == "mqttv5":
        session += ("-x", "60")
    with subscription(broker, f"{topic}/later", *session):
        pass
    for qos in ("1", "2"):
        publish("-t", f"{topic}/later", "-m", qos, "-q", qos)
    resumed = mosquitto("sub", broker, "-t", f"{topic}/later", "-C", "2", "-W", str(SECONDS), *session)
    received = subprocess.run(resumed, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    assert received.stdout.split() == ["1", "2"]
