"""Clients that send much and leave at once: all of it is handled before they are gone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.core import Core
from support.leaving_client import KINDS, all_listeners, open_client, wait_until_sent
from support.manual_loop import Loop, Transport
from support.metric_samples import samples
from support.stream_client import WebSocketStream
from websockets.frames import CloseCode, Opcode

from mqttbroker.auth.security import Security
from mqttbroker.codec.packets import Connect, Disconnect, Publish, Subscribe, Subscription, Will
from mqttbroker.codec.properties import Properties
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.left_client import LEFT_BYTES, LeftClient, read_rest
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.wire import READ_SLICE, Endpoint, Wire
from sessions.counters import Counters

MESSAGES = 3000
MESSAGE = Publish("left", bytes(250), 0, False, False, 0).encode(5)
LEAVE = Disconnect().encode(5)


@pytest.fixture(scope="module", params=["0", "1"], ids=["no worker", "a worker"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    files = CertificateFiles(tmp_path_factory.mktemp("tls"))
    with BrokerProcess(config={"listeners": all_listeners(files)}, arguments=["--workers", request.param]) as process:
        process.wait_for_log("event=started")
        yield process


@pytest.mark.parametrize("frame_bytes", [len(MESSAGE), 50 * len(MESSAGE)])
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_burst_counts_although_the_client_closes_at_once(broker: BrokerProcess, kind: str, frame_bytes: int) -> None:
    name = f"{kind}-{frame_bytes}"
    before = samples(broker.get("/metrics"))["mqttbroker_publish_received_total"]
    client = open_client(broker, kind)
    assert client.connect(name, will=Will("wills", b"", 0, False)).reason_code == 0
    burst = MESSAGE * MESSAGES + LEAVE
    sent = [burst[start : start + frame_bytes] for start in range(0, len(burst), frame_bytes)]
    if isinstance(client.socket, WebSocketStream):
        for payload in sent:
            client.socket.sendall(payload)
        client.socket.send_frame(Opcode.CLOSE, int(CloseCode.NORMAL_CLOSURE).to_bytes(2, "big"))
    else:
        client.socket.sendall(burst)
    client.close()
    broker.wait_for_log(f"event=disconnected client={name} .*reason=DISCONNECT")
    assert samples(broker.get("/metrics"))["mqttbroker_publish_received_total"] - before == MESSAGES


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_megabyte_counts_although_its_client_left_messages_unread(broker: BrokerProcess, kind: str, qos: int) -> None:
    name = f"megabyte-{kind}-{qos}"
    before = samples(broker.get("/metrics"))["mqttbroker_publish_received_total"]
    client = open_client(broker, kind)
    assert client.connect(name, will=Will("wills", b"", 0, False)).reason_code == 0
    client.subscribe(name, options=0)
    client.send(Publish(name, b"unread", 0, False, False, 0))
    message = Publish("left", bytes(330), qos, False, False, 1 if qos else 0).encode(5)
    for _ in range(MESSAGES // 50):
        client.send(message * 50)
    client.send(Disconnect())
    wait_until_sent(client)
    client.close()  # the kernel resets the connection
    broker.wait_for_log(f"event=disconnected client={name} .*reason=DISCONNECT")
    assert samples(broker.get("/metrics"))["mqttbroker_publish_received_total"] - before == MESSAGES + 1


def test_the_rest_that_is_read_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "much"
    file.write_bytes(bytes(2 * LEFT_BYTES))
    with file.open("rb") as opened:
        assert len(read_rest(opened.fileno(), LEFT_BYTES)) == LEFT_BYTES


# --- wires ----------------------------------------------------------------------------------------------------------


class Plant:
    """Wires on a loop that is driven by hand."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.loop = Loop()
        self.scheduler = FlushScheduler(core.broker, self.loop, lambda _: None, True)
        self.scheduler.flush()
        self.sockets = OpenSockets(10, 10, Counters())
        self.counters = core.broker.outbound.counters

    def join(self, name: str, topic: str = "") -> Wire:
        def defect(_: object) -> None:
            raise AssertionError("a defect")

        security = Security(self.core.settings)
        policy = ListenerPolicy(security.policy, self.core.terms, None, self.counters)
        wire = Wire(Endpoint(self.scheduler, policy, self.sockets, lambda: name, defect))
        wire.connection_made(Transport())
        properties = Properties()
        properties.receive_maximum = 2  # more messages at QoS 1 are queued
        will = Will(f"wills/{name}", b"gone", 0, False)
        wire.data_received(Connect(name, 5, properties=properties, will=will).encode(5))
        if topic:
            wire.data_received(Subscribe(1, [Subscription(topic, 1)]).encode(5))
        self.loop.run()
        return wire

    def send_much(self, wire: Wire, last: bytes = b"") -> int:
        """Send more than is handled at once; returns the number of messages."""
        count = 4 * READ_SLICE // len(MESSAGE)
        self.loop.look = 1.0  # each look at the clock uses up the time of the read
        wire.data_received(MESSAGE * count + last)
        assert not wire.transport.reading and self.counters.publish_received < count
        return count


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    limits: dict[str, Any] = {"queue_high_watermark_messages": 10, "backpressure_wait": 60.0}
    with Core(tmp_path, durability="off", **limits) as core:
        yield Plant(core)


Leave = Callable[[Wire], None]
LEAVES: dict[str, Leave] = {
    "the socket is closed": lambda wire: wire.connection_lost(None),
    "the socket is reset": lambda wire: wire.connection_lost(ConnectionResetError("reset")),
    "the WebSocket is closed": lambda wire: wire.lost("WebSocket closed: 1000"),
    "one after the other": lambda wire: (wire.lost("WebSocket closed: 1000"), wire.connection_lost(None))[1],
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("last", [LEAVE, b""], ids=["DISCONNECT", "nothing"])
def test_what_was_received_is_handled_in_turns_and_then_the_client_is_gone(plant: Plant, leave: Leave, last: bytes) -> None:
    watcher, wire = plant.join("watcher", "wills/#"), plant.join("p")
    count = plant.send_much(wire, last)
    leave(wire)
    assert plant.counters.publish_received < count, "other clients have their turns"
    plant.loop.run()
    assert plant.counters.publish_received == count
    assert (b"gone" in watcher.transport.written) == (last == b"")
    if wire.transport is not None:  # its socket is open
        assert wire.closing
        wire.connection_lost(None)
    assert wire.transport is None and wire.connection.wire is None
    assert wire.connection not in plant.core.broker.clients.connections


def test_its_place_among_the_open_sockets_is_free_when_all_is_handled(plant: Plant) -> None:
    wire = plant.join("p")
    plant.send_much(wire)
    wire.connection_lost(None)
    assert plant.sockets.count == 1 and isinstance(wire.transport, LeftClient)
    plant.loop.run()
    assert plant.sockets.count == 0


def test_another_connection_of_the_client_ends_it_at_once(plant: Plant) -> None:
    wire = plant.join("p")
    count = plant.send_much(wire)
    wire.connection_lost(None)
    plant.join("p")
    assert wire.transport is None and plant.counters.publish_received < count


def test_what_a_waiting_publisher_has_sent_is_dropped(plant: Plant) -> None:
    plant.join("s", "slow")
    wire = plant.join("p")
    wire.data_received(Publish("slow", b"", 1, False, False, 1).encode(5) * 300)
    plant.loop.run()
    assert wire.connection.paused_by is not None
    handled = plant.counters.publish_received
    wire.data_received(MESSAGE * 100)
    wire.connection_lost(None)
    assert wire.transport is None and plant.counters.publish_received == handled


def test_a_publisher_that_left_is_dropped_when_it_would_have_to_wait(plant: Plant) -> None:
    plant.join("s", "slow")
    wire = plant.join("p")
    count = plant.send_much(wire, Publish("slow", b"", 1, False, False, 1).encode(5) * 300)
    wire.connection_lost(None)
    plant.loop.run()
    assert wire.transport is None and plant.counters.publish_received < count + 300


def test_nothing_refers_to_it_afterwards(plant: Plant) -> None:
    wire = plant.join("p")
    plant.send_much(wire)
    wire.connection_lost(None)
    plant.loop.run()
    del wire
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, LeftClient)]
