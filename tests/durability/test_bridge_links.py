"""Bridges whose link breaks: every QoS 2 message crosses it exactly once, in both directions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.bridges import bridge_config
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.cut_proxy import CutProxy
from support.mosquitto import NEEDS_MOSQUITTO, mosquitto
from support.raw_client import RawClient

Start = Callable[..., BrokerProcess]
TOPICS = [
    {"filter": "out/#", "direction": "out", "qos": 2, "remote_prefix": "from/"},
    {"filter": "in/#", "direction": "in", "qos": 2, "local_prefix": "got/"},
]
MESSAGES = 24  # each way, in a round


@contextmanager
def clients(here: int, there: int) -> Iterator[tuple[RawClient, RawClient]]:
    with RawClient(here, 5) as local, RawClient(there, 4) as remote:
        local.connect("local")
        remote.connect("remote")
        local.subscribe("got/#")
        remote.subscribe("from/#")
        yield local, remote


def collect(client: RawClient, count: int) -> list[bytes]:
    return [client.take(30.0).payload for _ in range(count)]


def cross(here: int, there: int, proxy: CutProxy, rounds: int, seed: int) -> None:
    """Publish on both sides while the link is cut at random numbers of bytes, and compare what arrives."""
    choice = random.Random(seed)
    with clients(here, there) as (local, remote), clients_of(here, there) as (local_publisher, remote_publisher):
        sent: list[bytes] = []
        for turn in range(rounds):
            proxy.cut_at = proxy.passed + choice.randrange(1, 3000)
            for number in range(MESSAGES):
                payload = b"%d-%d" % (turn, number) + b"." * choice.randrange(100)
                sent.append(payload)
                local_publisher.publish(f"out/{number % 3}", payload, 2)
                remote_publisher.publish(f"in/{number % 3}", payload, 2)
            wait_until(lambda: proxy.cut_at is None, 30.0)
        assert collect(remote, len(sent)) == sent
        assert collect(local, len(sent)) == sent
        remote.expect_nothing()
        local.expect_nothing()
        assert proxy.connections > rounds


@contextmanager
def clients_of(here: int, there: int) -> Iterator[tuple[RawClient, RawClient]]:
    with RawClient(here, 5) as local, RawClient(there, 4) as remote:
        local.connect("local-publisher")
        remote.connect("remote-publisher")
        yield local, remote


def linked(start_broker: Start, port: int, version: str, **options: Any) -> BrokerProcess:
    broker = start_broker(config=bridge_config(port, TOPICS, version=version, **options))
    broker.wait_for_log("event=bridge_connected")
    return broker


@NEEDS_MOSQUITTO
@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow("100 cuts of a link"))])
def test_each_message_crosses_a_link_that_is_cut_exactly_once(start_broker: Start, tmp_path: Path, version: str, rounds: int) -> None:
    settings = "max_inflight_messages 20\nmax_queued_messages 0"
    with mosquitto(tmp_path, settings) as there, CutProxy(there.port) as proxy:
        here = linked(start_broker, proxy.port, version)
        cross(here.port, there.port, proxy, rounds, rounds)


@pytest.mark.parametrize(("killed", "version"), [
    ("here", "5.0"),
    ("there", "3.1.1"),
    pytest.param("here", "3.1.1", marks=pytest.mark.slow("starts brokers")),
    pytest.param("there", "5.0", marks=pytest.mark.slow("starts brokers")),
])  # fmt: skip
def test_each_message_crosses_once_although_a_broker_is_killed(start_broker: Start, killed: str, version: str) -> None:
    there = start_broker()
    with CutProxy(there.port) as proxy:
        here = linked(start_broker, proxy.port, version)
        for broker, topic in ((here, "got/#"), (there, "from/#")):
            with RawClient(broker.port, 4) as client:
                client.connect("reader", clean_start=False)
                client.subscribe(topic)
        sent: list[bytes] = []
        choice = random.Random(7)
        for turn in range(2):
            with clients_of(here.port, there.port) as (local, remote):
                proxy.cut_at = proxy.passed + choice.randrange(100, 4000)
                for number in range(MESSAGES):
                    sent.append(b"%d-%d" % (turn, number))
                    local.publish("out/1", sent[-1], 2)
                    remote.publish("in/1", sent[-1], 2)
            if killed == "here":
                here.kill()
                here.start()
            else:
                there.kill()
                there.start()
        for broker in (there, here):
            with RawClient(broker.port, 4) as client:
                client.connect("reader", clean_start=False)
                assert collect(client, len(sent)) == sent
                client.expect_nothing()


def test_messages_wait_on_disk_while_the_link_is_down(start_broker: Start) -> None:
    there = start_broker()
    with CutProxy(there.port) as proxy:
        proxy.up = False
        here = start_broker(config=bridge_config(proxy.port, TOPICS))
        here.wait_for_log("event=bridge_disconnected")
        with RawClient(there.port, 4) as reader:
            reader.connect("reader")
            reader.subscribe("from/#")
            sent = [b"%d" % number for number in range(50)]
            with RawClient(here.port, 5) as publisher:
                publisher.connect("publisher")
                for number, payload in enumerate(sent):
                    publisher.publish("out/1", payload, 1 + number % 2)
            here.kill()
            here.start()
            proxy.up = True
            got = collect(reader, len(sent))
            # A message of QoS 1 may overtake one of QoS 2, which waits for its packet id to be stored.
            assert [got.index(each) for each in sent[::2]] == sorted(got.index(each) for each in sent[::2])
            assert [got.index(each) for each in sent[1::2]] == sorted(got.index(each) for each in sent[1::2])


def test_a_remote_that_does_not_read_holds_messages_back_on_disk(start_broker: Start) -> None:
    there = start_broker()
    with CutProxy(there.port) as proxy:
        here = linked(start_broker, proxy.port, "5.0")
        with RawClient(there.port, 4) as reader, RawClient(here.port, 5) as publisher:
            reader.connect("reader")
            reader.subscribe("from/#", options=1)
            publisher.connect("publisher")
            proxy.frozen = True
            payloads = [b"%d" % number + bytes(100_000) for number in range(60)]
            for payload in payloads:
                publisher.publish("out/1", payload, 1)
            wait_until(lambda: proxy.passed > 0)
            proxy.frozen = False
            assert collect(reader, len(payloads)) == payloads
