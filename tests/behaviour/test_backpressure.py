"""Backpressure of a broker process: only the publishers to a slow subscriber are slowed.

No assertion depends on timing: a publisher that has to wait would wait longer than the test does, and one that must not
wait lets the test end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import drops, samples
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

WATERMARK = 100
WINDOW = 10
PAYLOAD = bytes(1000)
LONG_WAIT = "10s"  # twice as long as a client of this module waits for a packet

Start = Callable[..., BrokerProcess]


def config(wait: str, **limits: Any) -> dict[str, Any]:
    return {"limits": {"queue_high_watermark_messages": WATERMARK, "backpressure_wait": wait, **limits}}


def join(broker: BrokerProcess, name: str, topic: str = "", persistent: bool = False, qos: int = 1) -> RawClient:
    """A client with a small window, subscribed to ``topic``."""
    client = RawClient(broker.port)
    properties = Properties()
    properties.receive_maximum = WINDOW
    properties.session_expiry_interval = 1000 if persistent else 0
    assert client.connect(name, clean_start=not persistent, properties=properties).reason_code == 0
    if topic:
        client.subscribe(topic, options=qos)
    return client


def messages(topic: str, count: int, qos: int = 1, version: int = 5) -> bytes:
    """Numbered messages of a little more than a kilobyte each, encoded."""
    packets = (Publish(topic, b"%d " % number + PAYLOAD, qos, False, False, number + 1) for number in range(count))
    return b"".join(packet.encode(version) for packet in packets)


@contextmanager
def flood(broker: BrokerProcess, topic: str, count: int, qos: int = 1) -> Iterator[RawClient]:
    """A publisher that writes as fast as TCP allows."""
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


@pytest.mark.parametrize("qos, persistent", [(1, False), (1, True), (2, True)], ids=["transient", "persistent", "persistent, QoS 2"])
def test_a_fast_publisher_is_slowed_to_the_speed_of_its_subscriber(start_broker: Start, qos: int, persistent: bool) -> None:
    """The queue limit is ten times the high watermark: enough for all messages that arrive before publishers wait."""
    limits = {"max_queued_messages": 10 * WATERMARK, "max_inflight": WINDOW}
    broker = start_broker(config=config(LONG_WAIT, **limits))
    count = 40 * WATERMARK if qos == 1 else 20 * WATERMARK
    with join(broker, "s", "t", persistent, qos) as subscriber, flood(broker, "t", count, qos):
        most = 0.0
        for number in range(count):
            assert subscriber.take().payload.startswith(b"%d " % number)
            if number % WATERMARK == 0:
                found = metrics(broker)
                waiting = found["mqttbroker_queued_messages"] if persistent else found["mqttbroker_queue_memory_bytes"] / 1000
                most = max(most, waiting)
        found = metrics(broker)
        assert drops(found) == 0
        assert WATERMARK < most < 5 * WATERMARK
        assert found["mqttbroker_publisher_waits_total"] > 10


def test_publishers_do_not_wait_for_a_subscriber_that_stops_reading(start_broker: Start) -> None:
    broker = start_broker(config=config("50ms", max_queued_messages=5 * WATERMARK))
    with join(broker, "s", "t"), flood(broker, "t", 10 * WATERMARK) as publisher, join(broker, "p2") as other:
        for _ in range(10 * WATERMARK):
            publisher.expect(Puback)
        for _ in range(WATERMARK):
            assert other.publish("t", PAYLOAD, 1) == 0
        found = metrics(broker)
        assert drops(found, "queue_full") == 6 * WATERMARK == drops(found)
        assert found["mqttbroker_publisher_waits_total"] == 1 and found["mqttbroker_publishers_waiting"] == 0


def test_two_clients_that_publish_to_each_other_do_not_deadlock(start_broker: Start) -> None:
    broker = start_broker(config=config(LONG_WAIT))
    count = 10 * WATERMARK
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
        assert drops(metrics(broker)) == 0


def test_publishers_do_not_wait_for_a_reconnected_subscriber_until_its_queue_is_empty(start_broker: Start) -> None:
    broker = start_broker(config=config(LONG_WAIT))
    with join(broker, "p") as publisher:
        join(broker, "s", "t", True).close()
        wait_until(lambda: metrics(broker)["mqttbroker_clients_connected"] == 1)
        for _ in range(3 * WATERMARK):
            publisher.publish("t", b"x", 1)
        with join(broker, "s", persistent=True) as subscriber:
            for _ in range(2 * WATERMARK):
                publisher.publish("t", b"x", 1)
            assert metrics(broker)["mqttbroker_publisher_waits_total"] == 0
            for _ in range(5 * WATERMARK):
                subscriber.take()
            publisher.send(messages("t", 2 * WATERMARK))
            wait_until(lambda: metrics(broker)["mqttbroker_publishers_waiting"] == 1)


@pytest.mark.parametrize("how", ["closes", "is taken over"])
def test_a_waiting_publisher_that_disconnects_is_no_longer_counted(start_broker: Start, how: str) -> None:
    broker = start_broker(config=config(LONG_WAIT))
    with join(broker, "s", "t") as subscriber, join(broker, "p") as publisher:
        publisher.send(messages("t", 2 * WATERMARK))
        wait_until(lambda: metrics(broker)["mqttbroker_publishers_waiting"] == 1)
        if how == "closes":
            publisher.close()
            # A waiting publisher is not read, so its end may go unnoticed until the queue is short.
            for _ in range(WATERMARK):
                subscriber.take()
        else:
            assert join(broker, "p").publish("elsewhere", b"x", 1) == 0x10
        wait_until(lambda: metrics(broker)["mqttbroker_publishers_waiting"] == 0, 4)


def test_other_topics_and_qos_0_continue_while_a_publisher_waits(start_broker: Start) -> None:
    broker = start_broker(config=config(LONG_WAIT))
    with join(broker, "s", "t"), join(broker, "p") as publisher:
        publisher.send(messages("t", 2 * WATERMARK))
        wait_until(lambda: metrics(broker)["mqttbroker_publishers_waiting"] == 1)
        with join(broker, "s2", "u/#", qos=2) as listener, join(broker, "p2") as other:
            for qos in (0, 1, 2):
                for number in range(WATERMARK):
                    assert other.publish("u/1", b"%d" % number, qos) == 0
                    assert listener.take().payload == b"%d" % number
                    other.publish("t", b"x", 0)
            other.ping()
        found = metrics(broker)
        assert (found["mqttbroker_publishers_waiting"], found["mqttbroker_publisher_waits_total"]) == (1, 1)


def test_backpressure_can_be_turned_off(start_broker: Start) -> None:
    broker = start_broker(config=config(LONG_WAIT, queue_high_watermark_messages=0, max_queued_messages=5 * WATERMARK))
    with join(broker, "s", "t"), flood(broker, "t", 10 * WATERMARK) as publisher:
        for _ in range(10 * WATERMARK):
            publisher.expect(Puback)
        found = metrics(broker)
        assert drops(found, "queue_full") == 5 * WATERMARK
        assert found["mqttbroker_publisher_waits_total"] == 0
