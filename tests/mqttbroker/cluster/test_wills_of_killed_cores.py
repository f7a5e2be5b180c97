"""Wills in a cluster: those of a core that was killed are published by the process that takes its shard over, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from support.core import CoreClient
from support.shard_cores import ShardCores

from mqttbroker.codec.packets import Disconnect, Puback, Publish, Suback, Subscribe, Subscription, Will
from mqttbroker.codec.properties import Properties


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[ShardCores]:
    with ShardCores(tmp_path, 2) as cores:
        yield cores


@pytest.fixture
def subscriber(cores: ShardCores) -> CoreClient:
    """A client of the other core than `client_with_will`, which gets all wills."""
    client = cores[0].connect("subscriber")
    client.send(Subscribe(1, [Subscription("will/#", 1)]))
    client.expect(Suback)
    return client


def client_with_will(
    cores: ShardCores, client_id: str = "c", delay: int = 0, expiry: int = 0, clean_start: bool = True, levels: str = "will"
) -> CoreClient:
    properties, will = Properties(), Properties()
    properties.session_expiry_interval = expiry
    will.will_delay_interval = delay
    return cores[1].connect(
        client_id,
        clean_start=clean_start,
        properties=properties,
        will=Will(f"{levels}/{client_id}", b"gone", 1, properties=will),
    )


def wills(subscriber: CoreClient) -> Counter[str]:
    """How often each will has come since the last call."""
    found: Counter[str] = Counter()
    while packets := subscriber.arrived():
        for packet in packets:
            assert isinstance(packet, Publish)
            found[packet.topic] += 1
            subscriber.send(Puback(packet.packet_id))
    return found


def stored(cores: ShardCores) -> int:
    """Rows of sessions in the store of the clients' core."""
    cores[1].store.stop()
    cores[1]._start()
    return len(cores[1].broker.registry)


@pytest.mark.parametrize("expiry", [0, 100])
def test_the_will_of_a_killed_core_is_published_once(cores: ShardCores, subscriber: CoreClient, expiry: int) -> None:
    client_with_will(cores, expiry=expiry)
    cores.kill(1)
    cores.advance(1.0)
    assert wills(subscriber) == {"will/c": 1}
    cores.kill(1)
    cores.advance(1.0)
    assert not wills(subscriber)
    assert stored(cores) == (1 if expiry else 0)


def test_a_client_that_returns_at_once_does_not_prevent_it(cores: ShardCores, subscriber: CoreClient) -> None:
    client_with_will(cores)
    cores.kill(1)
    client_with_will(cores)
    cores.advance(1.0)
    assert wills(subscriber) == {"will/c": 1}


@pytest.mark.parametrize("reason_code, published", [(0x00, 0), (0x04, 1), (None, 1)])
@pytest.mark.parametrize("expiry", [0, 100])
def test_after_the_end_of_a_connection_no_other_process_publishes_the_will(
    cores: ShardCores, subscriber: CoreClient, reason_code: int | None, published: int, expiry: int
) -> None:
    client = client_with_will(cores, expiry=expiry)
    if reason_code is None:
        client.close()
    else:
        client.send(Disconnect(reason_code))
    assert wills(subscriber).total() == published
    cores.kill(1)
    cores.advance(1.0)
    assert not wills(subscriber)
    assert stored(cores) == (1 if expiry else 0)


def test_a_will_waits_for_its_delay_after_the_takeover(cores: ShardCores, subscriber: CoreClient) -> None:
    client_with_will(cores, "stays", 5, 100)
    client_with_will(cores, "returns", 5, 100)
    cores.kill(1)
    cores.advance(3.0)
    client_with_will(cores, "returns", 5, 100, clean_start=False)
    assert not wills(subscriber)
    cores.advance(3.0)
    assert wills(subscriber) == {"will/stays": 1}


def test_the_will_of_a_session_that_is_taken_over(cores: ShardCores, subscriber: CoreClient) -> None:
    client_with_will(cores)
    client_with_will(cores)
    assert wills(subscriber) == {"will/c": 1}, "the older session has ended"
    cores.kill(1)
    cores.advance(1.0)
    assert wills(subscriber) == {"will/c": 1}


def test_connack_waits_for_the_will(cores: ShardCores) -> None:
    core = cores[1]
    core.eager = False
    client = core.client()
    with pytest.raises(TimeoutError):
        client.connect("c", will=Will("will/c", b"gone", 1))
    core.eager = True
    cores.settle()
    assert len(client.arrived()) == 1


def test_a_clean_session_with_a_will_stores_nothing_else(cores: ShardCores) -> None:
    client = client_with_will(cores)
    client.send(Subscribe(1, [Subscription("t", 1)]))
    client.expect(Suback)
    client.send(Publish("t", b"x", 1, packet_id=1))
    assert {type(packet) for packet in client.arrived()} == {Publish, Puback}
    session = cores[1].broker.registry.get("c")
    assert session is not None and session.id == 0
    assert stored(cores) == 1
    assert not cores[1].broker.registry.by_id[1].subscriptions


def test_wills_that_wait_are_not_lost_with_their_core(cores: ShardCores, subscriber: CoreClient) -> None:
    """Of many wills that are due at once, some wait; their rows stay until they are published."""
    count = 60
    levels = "will/a/b/c/d/e/f/g/h"
    for number in range(count):
        client_with_will(cores, str(number), expiry=100 * (number % 2), levels=levels)
    core = cores[1]
    core.kill()
    core.eager = False
    busy = core.connect("many filters")
    filters = product(*(("+", level) for level in levels.split("/")[1:]))
    busy.send(Subscribe(1, [Subscription("/".join(("will", *each, "+")), 0) for each in filters]))
    core.advance(1.0)
    waiting = core.broker.messages.waiting
    assert waiting > 0, "all were published at once"
    core.commit()
    assert len(core.broker.lifecycle._unsaved) == waiting
    core.eager = True
    cores.kill(1)
    cores.advance(1.0)
    found = wills(subscriber)
    assert len(found) == count and set(found.values()) == {1}
    assert not core.broker.lifecycle._unsaved
    assert stored(cores) == count // 2


def test_no_will_is_published_before_the_other_cores_are_reached(cores: ShardCores, subscriber: CoreClient) -> None:
    client_with_will(cores, expiry=1)
    core = cores[1]
    core.kill()
    core.broker.lifecycle.paused = True
    cores.advance(5.0)
    assert not wills(subscriber)
    core.broker.lifecycle.paused = False
    cores.advance(1.0)
    assert wills(subscriber) == {"will/c": 1}


def test_a_will_reaches_a_session_whose_core_was_killed_before(cores: ShardCores) -> None:
    lasting = Properties()
    lasting.session_expiry_interval = 100
    watcher = cores[0].connect("watcher", properties=lasting)
    watcher.send(Subscribe(1, [Subscription("will/#", 1)]))
    watcher.expect(Suback)
    for turn in range(3):
        client_with_will(cores, f"c{turn}")
        cores.kill(turn % 2)
        cores.kill(1 - turn % 2)
        cores.advance(1.0)
        watcher = cores[0].connect("watcher", clean_start=False, properties=lasting)
        assert wills(watcher) == {f"will/c{turn}": 1}
