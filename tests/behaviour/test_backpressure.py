"""Backpressure by a real broker: who publishes to a client that cannot follow is slowed, and nobody else.

Rule: how long things take decides nothing. Where a publisher must wait, it would wait for longer than the test does;
where it must not, the test ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

CROWDED = 100
WINDOW = 10
PAYLOAD = bytes(1000)
FOR_EVER = "10s"  # twice as long as a client here waits for anything

Start = Callable[..., BrokerProcess]


def config(wait: str, **limits: Any) -> dict[str, Any]:
    return {"limits": {"queue_high_watermark_messages": CROWDED, "backpressure_wait": wait, **limits}}


def join(broker: BrokerProcess, name: str, topic: str = "", kept: bool = False, qos: int = 1) -> RawClient:
    """A client with a small window, subscribed to ``topic``."""
    client = RawClient(broker.port)
    properties = Properties()
    properties.receive_maximum = WINDOW
    properties.session_expiry_interval = 1000 if kept else 0
    assert client.connect(name, clean_start=not kept, properties=properties).reason_code == 0
    if topic:
        client.subscribe(topic, options=qos)
    return client


def messages(topic: str, count: int, qos: int = 1, version: int = 5) -> bytes:
    """So many messages, numbered, of a little more than a kilobyte."""
    packets = (Publish(topic, b"%d " % number + PAYLOAD, qos, False, False, number + 1) for number in range(count))
    return b"".join(packet.encode(version) for packet in packets)


@contextmanager
def flood(broker: BrokerProcess, topic: str, count: int, qos: int = 1) -> Iterator[RawClient]:
    """A publisher that writes as fast as TCP takes it."""
    with RawClient(broker.port, 4) as client:
        client.connect("flood")
        client.socket.settimeout(60)
        data = messages(topic, count, qos, 4)
        writer = threading.Thread(target=client.socket.sendall, args=(data,), daemon=True)
        writer.start()
        yield client
        writer.join()


def metrics(broker: BrokerProcess) -> dict[str, float]:
    return samples(broker.get("/metrics"))


def dropped(found: dict[str, float]) -> float:
    return sum(value for name, value in found.items() if name.startswith("mqttbroker_messages_dropped_total"))


@pytest.mark.parametrize("qos, kept", [(1, False), (1, True), (2, True)], ids=["transient", "kept", "kept, QoS 2"])
def test_a_fast_publisher_is_held_to_the_speed_of_its_subscriber(start_broker: Start, qos: int, kept: bool) -> None:
    """A queue ten times as long as it may be before publishers wait has room for all that is taken in meanwhile."""
    limits = {"max_queued_messages": 10 * CROWDED, "max_inflight": WINDOW}
    broker = start_broker(config=config(FOR_EVER, **limits))
    count = 40 * CROWDED if qos == 1 else 20 * CROWDED
    with join(broker, "s", "t", kept, qos) as subscriber, flood(broker, "t", count, qos):
        most = 0.0
        for number in range(count):
            assert subscriber.take().payload.startswith(b"%d " % number)
            if number % CROWDED == 0:
                found = metrics(broker)
                waiting = found["mqttbroker_queued_messages"] if kept else found["mqttbroker_queue_memory_bytes"] / 1000
                most = max(most, waiting)
        found = metrics(broker)
        assert dropped(found) == 0
        assert CROWDED < most < 5 * CROWDED
        assert found["mqttbroker_publisher_waits_total"] > 10


def test_nobody_waits_for_a_subscriber_that_stops_reading(start_broker: Start) -> None:
    broker = start_broker(config=config("50ms", max_queued_messages=5 * CROWDED))
    with join(broker, "s", "t"), flood(broker, "t", 10 * CROWDED) as publisher, join(broker, "p2") as other:
        for _ in range(10 * CROWDED):
            publisher.expect(Puback)
        for _ in range(CROWDED):
            assert other.publish("t", PAYLOAD, 1) == 0
        found = metrics(broker)
        assert found["mqttbroker_messages_dropped_total/queue_full"] == 6 * CROWDED == dropped(found)
        assert found["mqttbroker_publisher_waits_total"] == 1 and found["mqttbroker_publishers_waiting"] == 0


def test_two_that_publish_to_each_other_do_not_wait_for_each_other(start_broker: Start) -> None:
    broker = start_broker(config=config(FOR_EVER))
    count = 10 * CROWDED
    with join(broker, "a", "to/a") as one, join(broker, "b", "to/b") as two:
        writers = [
            threading.Thread(target=client.socket.sendall, args=(messages(topic, count),))
            for client, topic in ((one, "to/b"), (two, "to/a"))
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        for client in (one, two):
            for number in range(count):
                assert client.take().payload.startswith(b"%d " % number)
        assert dropped(metrics(broker)) == 0


def test_who_returns_to_a_long_queue_is_not_waited_for_until_it_has_caught_up(start_broker: Start) -> None:
    broker = start_broker(config=config(FOR_EVER))
    with join(broker, "p") as publisher:
        join(broker, "s", "t", True).close()
        wait_until(lambda: metrics(broker)["mqttbroker_clients_connected"] == 1)
        for _ in range(3 * CROWDED):
            publisher.publish("t", b"x", 1)
        with join(broker, "s", kept=True) as subscriber:
            for _ in range(2 * CROWDED):
                publisher.publish("t", b"x", 1)
            assert metrics(broker)["mqttbroker_publisher_waits_total"] == 0
            for _ in range(5 * CROWDED):
                subscriber.take()
            publisher.send(messages("t", 2 * CROWDED))
            wait_until(lambda: metrics(broker)["mqttbroker_publishers_waiting"] == 1)


@pytest.mark.parametrize("how", ["closes", "is taken over"])
def test_a_publisher_that_leaves_while_it_waits_is_forgotten(start_broker: Start, how: str) -> None:
    broker = start_broker(config=config(FOR_EVER))
    with join(broker, "s", "t") as subscriber, join(broker, "p") as publisher:
        publisher.send(messages("t", 2 * CROWDED))
        wait_until(lambda: metrics(broker)["mqttbroker_publishers_waiting"] == 1)
        if how == "closes":
            publisher.close()
            # Nothing is read from it, so that this may be seen only when the queue is short.
            for _ in range(CROWDED):
                subscriber.take()
        else:
            assert join(broker, "p").publish("elsewhere", b"x", 1) == 0x10
        wait_until(lambda: metrics(broker)["mqttbroker_publishers_waiting"] == 0, 4)


def test_clients_elsewhere_and_qos_0_go_on_while_a_publisher_waits(start_broker: Start) -> None:
    broker = start_broker(config=config(FOR_EVER))
    with join(broker, "s", "t"), join(broker, "p") as publisher:
        publisher.send(messages("t", 2 * CROWDED))
        wait_until(lambda: metrics(broker)["mqttbroker_publishers_waiting"] == 1)
        with join(broker, "s2", "u/#", qos=2) as listener, join(broker, "p2") as other:
            for qos in (0, 1, 2):
                for number in range(CROWDED):
                    assert other.publish("u/1", b"%d" % number, qos) == 0
                    assert listener.take().payload == b"%d" % number
                    other.publish("t", b"x", 0)
            other.ping()
        found = metrics(broker)
        assert (found["mqttbroker_publishers_waiting"], found["mqttbroker_publisher_waits_total"]) == (1, 1)


def test_off_is_off(start_broker: Start) -> None:
    broker = start_broker(config=config(FOR_EVER, queue_high_watermark_messages=0, max_queued_messages=5 * CROWDED))
    with join(broker, "s", "t"), flood(broker, "t", 10 * CROWDED) as publisher:
        for _ in range(10 * CROWDED):
            publisher.expect(Puback)
        found = metrics(broker)
        assert found["mqttbroker_messages_dropped_total/queue_full"] == 5 * CROWDED
        assert found["mqttbroker_publisher_waits_total"] == 0
