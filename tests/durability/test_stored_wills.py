"""The will of a client whose session ends with its connection is published however the broker ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish, Will
from mqttbroker.codec.properties import Properties

StartBroker = Callable[..., BrokerProcess]


def restart(broker: BrokerProcess, how: str) -> None:
    if how == "in place":
        broker.restart_in_place()
    else:
        broker.restart(kill=how == "killed")


def device(broker: BrokerProcess, version: int, name: str = "device") -> RawClient:
    """A client that says that it is online, and whose will says that it is not."""
    client = RawClient(broker.port, version)
    will = Will(f"state/{name}", b"offline", 1, True)
    assert client.connect(name, will=will).reason_code == 0
    assert client.publish(f"state/{name}", b"online", 1, retain=True) < 0x80
    return client


def watcher(broker: BrokerProcess, present: bool) -> RawClient:
    properties = Properties()
    properties.session_expiry_interval = 3600
    client = RawClient(broker.port)
    assert client.connect("watcher", clean_start=False, properties=properties).session_present == present
    return client


def states(client: RawClient, count: int) -> list[tuple[str, bytes, bool]]:
    """The next messages, and nothing more."""
    found = []
    for _ in range(count):
        message = client.expect(Publish)
        client.send(Puback(message.packet_id))
        found.append((message.topic, message.payload, message.retain))
    client.expect_nothing()
    return found


def commit(broker: BrokerProcess) -> None:
    """Return when everything that the broker has received is on disk."""
    with RawClient(broker.port) as client:
        client.connect("committer")
        assert client.publish("committed", b"x", 1, retain=True) < 0x80


@pytest.mark.parametrize("how", ["killed", "terminated", "in place"])
@pytest.mark.parametrize(("version", "workers"), [(4, 0), (5, 0), (5, 2)])
def test_a_will_is_published_once(start_broker: StartBroker, version: int, how: str, workers: int) -> None:
    broker = start_broker(arguments=["--workers", str(workers)])
    subscriber = watcher(broker, present=False)
    subscriber.subscribe("state/#", options=1)
    client = device(broker, version)
    assert states(subscriber, 1) == [("state/device", b"online", False)]
    commit(broker)
    subscriber.disconnect()
    restart(broker, how)
    client.close()
    subscriber = watcher(broker, present=True)
    assert states(subscriber, 1) == [("state/device", b"offline", False)]
    with RawClient(broker.port, version) as other:
        other.connect("other")
        other.subscribe("state/#", options=1)
        assert states(other, 1) == [("state/device", b"offline", True)]
    commit(broker)
    subscriber.disconnect()
    restart(broker, how)
    assert states(watcher(broker, present=True), 0) == []


def test_a_client_that_left_in_order_has_no_will_after_a_kill(start_broker: StartBroker) -> None:
    broker = start_broker()
    client = device(broker, 5)
    client.disconnect()
    commit(broker)
    broker.restart(kill=True)
    with RawClient(broker.port) as other:
        other.connect("other")
        other.subscribe("state/#", options=1)
        assert states(other, 1) == [("state/device", b"online", True)]


def test_a_client_that_returns_after_a_kill_is_online_again(start_broker: StartBroker) -> None:
    """Its old will goes before whatever it publishes now."""
    broker = start_broker()
    clients = [device(broker, 4, f"d{number}") for number in range(20)]
    broker.restart(kill=True)
    back = [device(broker, 4, f"d{number}") for number in range(20)]
    with RawClient(broker.port) as other:
        other.connect("other")
        other.subscribe("state/#", options=1)
        assert sorted(states(other, 20)) == sorted((f"state/d{number}", b"online", True) for number in range(20))
    for client in clients + back:
        client.close()
