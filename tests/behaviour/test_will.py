"""Wills: when they are published, and when not (MQTT 5.0 sections 3.1.2.5 and 3.1.3.2)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.core import Core, CoreClient, wait_until
from support.properties import session_expiry
from support.raw_client import RawClient

from mqttbroker.codec.packets import Connack, Disconnect, Publish, Will
from mqttbroker.codec.properties import Properties


def will(qos: int = 1, delay: int = -1, retain: bool = False, topic: str = "will/1") -> Will:
    properties = Properties()
    properties.will_delay_interval = delay
    return Will(topic, b"gone", qos, retain, properties)


def watcher(core: Core) -> CoreClient:
    client = core.connect("watcher")
    client.subscribe("will/#", options=2 | 8)
    return client


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_will_is_published_after_a_lost_connection(connect: Callable[..., RawClient], version: int, qos: int) -> None:
    topic = f"will/{version}/{qos}"
    watching = connect("watching")
    watching.subscribe(topic)
    client = connect("mortal", version, will=Will(topic, b"gone", qos, True))
    client.close()
    message = watching.take()
    assert (message.topic, message.payload, message.qos, message.retain) == (topic, b"gone", qos, False)
    late = connect("late")
    late.subscribe(topic)
    assert late.take().retain


@pytest.mark.parametrize("version", [4, 5])
def test_no_will_after_disconnect(connect: Callable[..., RawClient], version: int) -> None:
    watching = connect("watching-n")
    watching.subscribe("no-will")
    client = connect("content", version, will=Will("no-will", b"gone"))
    client.disconnect()
    watching.expect_nothing()


@pytest.mark.parametrize("workers", [0, 1])
def test_no_will_after_disconnect_of_a_client_that_left_messages_unread(start_broker: Callable[..., BrokerProcess], workers: int) -> None:
    """Its kernel resets the connection, so the broker may fail to write before it has read DISCONNECT."""
    broker = start_broker(config={"workers": workers})
    done = threading.Event()

    def publish() -> None:
        with RawClient(broker.port, 4) as publisher:
            publisher.connect("publisher")
            while not done.wait(0.001):
                publisher.send(*[Publish("many", bytes(100), 0)] * 20)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        with RawClient(broker.port, 4) as watching:
            watching.connect("watching")
            watching.subscribe("will/#")
            for number in range(40):
                with RawClient(broker.port, 4) as client:
                    client.connect("hasty", will=Will(f"will/{number}", b"gone"))
                    client.subscribe("many", options=0)
                    wait_until(lambda: len(client.socket.recv(10_000, socket.MSG_PEEK)) == 10_000)
                    client.send(Disconnect())
            watching.expect_nothing()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("code", [0x04, 0x80, 0x98])
def test_disconnect_with_another_reason_code_publishes_the_will(connect: Callable[..., RawClient], code: int) -> None:
    watching = connect("watching-4")
    watching.subscribe(f"with/{code}")
    connect("will-4", will=Will(f"with/{code}", b"gone")).disconnect(code)
    assert watching.take().payload == b"gone"


def test_a_protocol_error_publishes_the_will(connect: Callable[..., RawClient]) -> None:
    watching = connect("watching-e")
    watching.subscribe("error-will")
    client = connect("erring", will=Will("error-will", b"gone"))
    client.send(b"\x00\x00")
    assert watching.take().payload == b"gone"


def test_a_will_is_published_with_its_properties(connect: Callable[..., RawClient]) -> None:
    properties = Properties()
    properties.payload_format_indicator = 1
    properties.message_expiry_interval = 60
    properties.content_type = "text/plain"
    properties.response_topic = "r"
    properties.correlation_data = b"c"
    properties.user_properties = [("b", "1"), ("a", "2"), ("b", "3")]
    five, four = connect("watching-5"), connect("watching-v4", 4)
    five.subscribe("will-properties")
    four.subscribe("will-properties")
    connect("rich", will=Will("will-properties", b"x", 1, False, properties)).close()
    properties.will_delay_interval = -1
    assert repr(five.take().properties) == repr(properties)
    assert four.take().payload == b"x"


def test_properties_of_a_will_keep_their_order(tmp_path: Path) -> None:
    properties = bytes.fromhex("26 0001 62 0000 18 00000005 08 0001 72 02 0000003c 01 01 26 0001 61 0000 09 0001 63")
    wanted = bytes.fromhex("26 0001 62 0000 08 0001 72 01 01 26 0001 61 0000 09 0001 63")
    body = b"\0\4MQTT\5\6\0\0\5\x11\0\0\0\x3c" + b"\0\1m" + bytes([len(properties)]) + properties + b"\0\1w\0\1x"
    with Core(tmp_path) as core:
        client = core.client()
        client.socket.sendall(b"\x10" + bytes([len(body)]) + body)
        assert client.expect(Connack).reason_code == 0
        core.settle()
        core.kill()
        session = core.broker.registry.get("m")
        assert session is not None and session.will is not None
        assert session.will.message.properties == wanted
        assert (session.will.delay, session.will.expiry) == (5, 60)


def test_a_will_that_fell_due_while_the_broker_was_down_is_published_before_clients_connect(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        with RawClient(broker.port) as client:
            client.connect("m", will=will(retain=True), properties=session_expiry(60))
            client.subscribe("anything", options=1)  # the SUBACK leaves after a commit, which includes the will
            broker.restart(kill=True)
        with RawClient(broker.port) as watching:
            watching.connect("watching")
            watching.subscribe("will/1", options=1)
            message = watching.take()
            assert (message.payload, message.retain) == (b"gone", True)


@pytest.mark.parametrize("clean_start, kept, expected", [(True, 0, 1), (True, 60, 1), (False, 60, 1), (False, 0, 1)])
def test_a_takeover_publishes_the_will(tmp_path: Path, clean_start: bool, kept: int, expected: int) -> None:
    with Core(tmp_path) as core:
        watching = watcher(core)
        core.connect("m", will=will(), properties=session_expiry(kept))
        core.connect("m", clean_start=clean_start)
        assert len(watching.ping()) == expected


@pytest.mark.parametrize("clean_start, expected", [(True, 1), (False, 0)])
def test_a_takeover_within_the_delay(tmp_path: Path, clean_start: bool, expected: int) -> None:
    """Clean start ends the session and publishes its will; resuming it cancels the will [MQTT-3.1.3-9]."""
    with Core(tmp_path) as core:
        watching = watcher(core)
        core.connect("m", will=will(delay=10), properties=session_expiry(60))
        core.connect("m", clean_start=clean_start, properties=session_expiry(60))
        assert len(watching.ping()) == expected
        core.advance(20)
        watching.expect_nothing()


@pytest.mark.parametrize("delay, kept, moment", [(10, 60, 10), (60, 10, 10), (10, 0, 0), (10, 0xFFFFFFFF, 10)])
def test_a_delayed_will_waits_for_the_delay_or_the_end_of_the_session(tmp_path: Path, delay: int, kept: int, moment: int) -> None:
    with Core(tmp_path) as core:
        watching = watcher(core)
        client = core.connect("m", will=will(delay=delay), properties=session_expiry(kept))
        client.close()
        if moment:
            core.advance(moment - 1)
            watching.expect_nothing()
            core.advance(1)
        assert watching.take().payload == b"gone"
        core.advance(1000)
        watching.expect_nothing()


def test_a_delayed_will_is_cancelled_by_a_reconnect(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        watching = watcher(core)
        core.connect("m", will=will(delay=10), properties=session_expiry(60)).close()
        core.advance(5)
        core.connect("m", clean_start=False, properties=session_expiry(60)).close()
        core.advance(100)
        watching.expect_nothing()


@pytest.mark.parametrize("connected", [True, False])
def test_a_will_survives_a_restart(tmp_path: Path, connected: bool) -> None:
    properties = Properties()
    properties.will_delay_interval = 10
    properties.message_expiry_interval = 60
    properties.user_properties = [("b", "1"), ("a", "2")]
    with Core(tmp_path) as core:
        client = core.connect("m", will=Will("will/1", b"gone", 2, True, properties), properties=session_expiry(60))
        if not connected:
            client.close()
            core.advance(4)
        core.settle()
        core.kill()
        watching = watcher(core)
        core.advance(9 if connected else 5)
        watching.expect_nothing()
        core.advance(1)
        message = watching.take()
        assert (message.payload, message.qos, message.retain) == (b"gone", 2, True)
        assert message.properties.user_properties == [("b", "1"), ("a", "2")]
        assert message.properties.message_expiry_interval == 60
        core.settle()
        core.kill()
        watching = watcher(core)
        watching.take()
        core.advance(30)
        watching.expect_nothing()


def test_a_will_for_an_offline_persistent_subscriber(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        core.connect("s", 4, clean_start=False).subscribe("will/#", options=1)
        core.clients[-1].close()
        core.connect("m", will=will()).close()
        core.settle()
        core.kill()
        client = core.connect("s", 4, clean_start=False)
        assert client.take().payload == b"gone"


def test_a_will_cannot_publish_to_sys(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        watching = core.connect("w")
        watching.subscribe("$SYS/#")
        core.connect("m", will=will(topic="$SYS/broker/version", retain=True)).close()
        watching.expect_nothing()
        assert len(core.broker.retained) == 0
        assert core.control.status().drops["not_authorized"] == 1


def test_a_stored_will_above_new_limits_is_dropped(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        core.connect("m", will=will(topic="will/a/b/c/d", delay=1), properties=session_expiry(60)).close()
        core.connect("n", will=will(delay=2), properties=session_expiry(60)).close()
    with Core(tmp_path, max_topic_levels=3) as core:
        watching = watcher(core)
        core.advance(2)
        assert watching.take().topic == "will/1"
        watching.expect_nothing()
