"""The wall clock is set by hours: keep alive does not notice, and nothing expires too early."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from disk.fixtures import directory, layer  # noqa: F401 - fixtures
from disk.layer import Layer
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Disconnect, Pingreq, Pingresp, Will
from mqttbroker.codec.properties import Properties

HOUR = 3600
CONFIG = {"streams": {"s": {"filters": ["kept/#"], "partitions": 1, "retention_age": "2h"}}, "sys_interval": "1s"}


@pytest.fixture
def broker(layer: Layer) -> Iterator[BrokerProcess]:  # noqa: F811 - the fixture
    with BrokerProcess(layer.root / "data", CONFIG, env=layer.env) as process:
        yield process


def open_session(broker: BrokerProcess, client_id: str, expiry: int, present: bool, **fields: object) -> RawClient:
    client = RawClient(broker.port)
    properties = Properties()
    properties.session_expiry_interval = expiry
    connack = client.connect(client_id, clean_start=False, properties=properties, **fields)
    assert (connack.reason_code, connack.session_present) == (0, present)
    return client


def publish(broker: BrokerProcess, topic: str, payload: bytes, expiry: int = -1) -> None:
    properties = Properties()
    properties.message_expiry_interval = expiry
    with RawClient(broker.port) as client:
        client.connect()
        assert client.publish(topic, payload, 1, properties=properties) in (0, 0x10)


def await_tick(broker: BrokerProcess) -> None:
    """Return after a tick of the broker: it has closed a client by its keep alive."""
    with RawClient(broker.port) as client:
        client.connect(keep_alive=1)
        (last,) = client.expect_closed()
        assert isinstance(last, Disconnect) and last.reason_code == 0x8D


@pytest.mark.parametrize("jump", [5 * HOUR, -5 * HOUR])
def test_keep_alive_ignores_wall_clock_changes(broker: BrokerProcess, layer: Layer, jump: int) -> None:  # noqa: F811
    with RawClient(broker.port) as lively, RawClient(broker.port) as watching:
        lively.connect("lively", keep_alive=60, will=Will("will/lively", b"gone"))
        watching.connect("watching", keep_alive=0)
        watching.subscribe("will/#", "$SYS/broker/uptime", options=0 | 1 << 5)
        layer.set_clock(jump)
        await_tick(broker)
        lively.send(Pingreq())
        lively.expect(Pingresp)
        uptime = watching.take()
        assert uptime.topic == "$SYS/broker/uptime" and 0 <= int(uptime.payload.split()[0]) < HOUR


def test_wall_clock_changes_never_expire_sessions_or_messages_early(broker: BrokerProcess, layer: Layer) -> None:  # noqa: F811
    for client_id, expiry in (("hour", HOUR), ("day", 24 * HOUR)):
        with open_session(broker, client_id, expiry, False) as client:
            client.subscribe("kept/#", options=1)
            client.disconnect()
    publish(broker, "kept/a", b"stays")
    publish(broker, "kept/a", b"has an hour", HOUR)
    layer.set_clock(-3 * HOUR)
    await_tick(broker)
    publish(broker, "kept/a", b"from the past", 6 * HOUR)
    with open_session(broker, "hour", HOUR, True) as client:
        received = [client.take() for _ in range(3)]
        assert [message.payload for message in received] == [b"stays", b"has an hour", b"from the past"]
        # The clock is before its publication, which counts as no time in the queue [MQTT-3.3.2-6].
        assert received[1].properties.message_expiry_interval == HOUR
        client.disconnect()
    layer.set_clock(2 * HOUR)
    await_tick(broker)
    open_session(broker, "hour", HOUR, False).close()
    with open_session(broker, "day", 24 * HOUR, True) as client:
        assert [client.take().payload for _ in range(2)] == [b"stays", b"from the past"]
        client.expect_nothing()


def test_wall_clock_changes_keep_the_order_and_retention_of_a_stream(broker: BrokerProcess, layer: Layer) -> None:  # noqa: F811
    for number, clock in enumerate((0, -5 * HOUR, 0, 30 * 60)):
        layer.set_clock(clock)
        publish(broker, "kept/a", b"%d" % number)
    broker.restart(kill=True)
    (partition,) = json.loads(broker.get("/streams/s"))["partitions"]
    # Retention follows the latest record of a segment.
    assert (partition["log_start_offset"], partition["high_watermark"]) == (0, 4)
    times = [partition["segments"][0][name] for name in ("first_timestamp_us", "last_timestamp_us")]
    assert times[0] < times[1]
    (found,) = json.loads(broker.get(f"/streams/s/offsets?timestamp={times[1]}"))["partitions"]
    assert found["offset"] == 3
