"""Brokers that connect as bridges, which Mosquitto marks in the protocol level's highest bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.mosquitto import NEEDS_MOSQUITTO, mosquitto
from support.raw_client import RawClient

from mqttbroker.codec.packets import Connect, Will

STATE = "$SYS/broker/connection/here.there/state"


@pytest.fixture
def broker(start_broker: Callable[..., BrokerProcess]) -> BrokerProcess:
    """A broker without retained messages of other tests."""
    return start_broker()


def connect_bridge(client: RawClient, client_id: str, clean: bool = True) -> None:
    packet = Connect(client_id, client.version, clean, will=Will(STATE, b"0", 1, True))
    packet.bridge = True
    client.send(packet)
    assert client.receive().reason_code == 0


@pytest.mark.parametrize("version", [3, 4])
def test_a_bridge_does_not_get_its_own_messages_and_gets_others_as_published(broker: BrokerProcess, version: int) -> None:
    with RawClient(broker.port, version) as bridge, RawClient(broker.port, 4) as other:
        connect_bridge(bridge, "bridge")
        other.connect("other")
        assert bridge.subscribe("b/#", options=1).reason_codes == [1]
        bridge.publish("b/own", b"1", 1)
        other.publish("b/other", b"2", 1, retain=True)
        other.publish("b/other", b"3", 1)
        got = [bridge.take(), bridge.take()]
        assert [(one.topic, one.payload, one.retain) for one in got] == [
            ("b/other", b"2", True),
            ("b/other", b"3", False),
        ]
        bridge.expect_nothing()


def test_a_bridge_of_version_5_asks_for_what_it_wants(broker: BrokerProcess) -> None:
    with RawClient(broker.port, 5) as bridge:
        connect_bridge(bridge, "bridge")
        bridge.subscribe("b/#", options=1)
        bridge.publish("b/own", b"1", 1)
        assert bridge.take().payload == b"1"


def test_a_bridge_shares_a_subscription(broker: BrokerProcess) -> None:
    """No Local is not allowed there."""
    with RawClient(broker.port, 4) as bridge:
        connect_bridge(bridge, "bridge")
        assert bridge.subscribe("$share/g/b/#", options=1).reason_codes == [1]
        bridge.publish("b/own", b"1", 1)
        assert bridge.take().payload == b"1"


def test_the_subscriptions_of_a_bridge_outlive_a_restart(broker: BrokerProcess) -> None:
    with RawClient(broker.port, 4) as bridge:
        connect_bridge(bridge, "bridge", clean=False)
        bridge.subscribe("b/#", options=1)
        bridge.disconnect()
    broker.kill()
    broker.start()
    with RawClient(broker.port, 4) as bridge, RawClient(broker.port, 4) as other:
        connect_bridge(bridge, "bridge", clean=False)
        other.connect("other")
        bridge.publish("b/own", b"1", 1)
        other.publish("b/other", b"2", 1, retain=True)
        got = bridge.take()
        assert (got.payload, got.retain) == (b"2", True)


def test_the_state_of_a_bridge_may_be_published_below_sys(broker: BrokerProcess) -> None:
    with RawClient(broker.port, 4) as bridge, RawClient(broker.port, 5) as watcher:
        connect_bridge(bridge, "bridge")
        bridge.publish(STATE, b"1", 1, retain=True)
        watcher.connect("watcher")
        watcher.subscribe("$SYS/broker/connection/#", options=1)
        assert watcher.take().payload == b"1"
        bridge.close()
        assert watcher.take().payload == b"0"
        for topic in ("$SYS/broker/connection/state", "$SYS/broker/connection/a/b/state", "$SYS/broker/connection/a/x"):
            assert watcher.publish(topic, b"x", 1) == 0x87


@NEEDS_MOSQUITTO
@pytest.mark.parametrize("version", ["mqttv31", "mqttv311", "mqttv50"])
def test_a_mosquitto_bridges_both_ways_in_its_default_configuration(broker: BrokerProcess, tmp_path: Path, version: str) -> None:
    settings = (
        f"connection there\naddress 127.0.0.1:{broker.port}\ntopic # both 2\nremote_clientid there\n"
        f"bridge_protocol_version {version}\nrestart_timeout 1\n"
    )
    with mosquitto(tmp_path, settings) as peer, RawClient(broker.port) as ours, RawClient(peer.port) as theirs:
        ours.connect("ours")
        theirs.connect("theirs")
        ours.subscribe("$SYS/broker/connection/#", options=1)
        while ours.take(30).payload != b"1":  # it publishes "0" first
            pass
        ours.subscribe("#")
        theirs.subscribe("#")
        wait_until(lambda: '"#"' in broker.get("/api/v1/clients/there/subscriptions").decode())
        for number in range(20):
            ours.publish(f"from/ours/{number}", b"o", number % 3, retain=number == 3)
            theirs.publish(f"from/theirs/{number}", b"t", number % 3, retain=number == 3)
        wanted = {f"from/{who}/{number}" for who in ("ours", "theirs") for number in range(20)}
        for client in (ours, theirs):
            got: Counter[str] = Counter()
            while got.keys() != wanted:
                got[client.take().topic] += 1
            # A message that is retained while a new subscription gets retained messages may come live and as retained.
            assert all(count == 1 or topic.endswith("/3") for topic, count in got.items()), got
