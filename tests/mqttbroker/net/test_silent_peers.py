"""Clients that vanish, and clients that do not read: the others are not affected."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import drops, samples
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.codec.packets import Publish, Will
from mqttbroker.codec.properties import Properties

StartBroker = Callable[..., BrokerProcess]
BLOCK = bytes(65_536)
CONFIG = {"limits": {"max_outbox_bytes": "256KiB"}}


def sample(broker: BrokerProcess, name: str) -> float:
    lines = broker.get("/metrics").decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name)))


def open_sockets(broker: BrokerProcess) -> int:
    count = 0
    for path in Path(f"/proc/{broker.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(path).startswith("socket:")
    return count


def stalled_client(broker: BrokerProcess, version: int) -> RawClient:
    """A client that does not read, with a small receive buffer."""
    client = RawClient(broker.port, version)
    client.socket.close()
    client.socket = socket.socket()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.socket.settimeout(PATIENCE)
    client.socket.connect((broker.host, broker.port))
    return client


@pytest.mark.parametrize("version", [4, 5])
def test_a_client_that_vanishes_without_closing_its_connection(start_broker: StartBroker, version: int) -> None:
    """Its socket sends no FIN: keep alive closes the connection, the will is published, the session stays."""
    broker = start_broker(config=CONFIG)
    watching, publisher = RawClient(broker.port), RawClient(broker.port)
    watching.connect("watching")
    watching.subscribe("will/#")
    publisher.connect("publisher")
    before = open_sockets(broker)
    gone = stalled_client(broker, version)
    properties = Properties()
    if version == 5:
        properties.session_expiry_interval = 3600
    gone.connect("gone", clean_start=False, properties=properties, keep_alive=3, will=Will("will/gone", b"gone", 1))
    gone.subscribe("blocks", options=1)
    blocks = [b"%d " % number + BLOCK for number in range(40)]
    for block in blocks:
        assert publisher.publish("blocks", block, 1) == 0
    message = watching.take()
    assert (message.topic, message.payload) == ("will/gone", b"gone")
    broker.wait_for_log("event=disconnected client=gone .*keep alive timeout")
    wait_until(lambda: open_sockets(broker) == before)
    assert sample(broker, "mqttbroker_clients_connected") == 2
    with RawClient(broker.port, version) as back:
        connack = back.connect("gone", clean_start=False, properties=properties)
        assert connack.session_present
        assert [back.take().payload for _ in blocks] == blocks
    gone.close()


def test_a_stalled_subscriber_does_not_slow_others(start_broker: StartBroker) -> None:
    broker = start_broker(config=CONFIG)
    slow, fast, publisher = stalled_client(broker, 5), RawClient(broker.port), RawClient(broker.port)
    for client_id, client in (("slow", slow), ("fast", fast), ("publisher", publisher)):
        client.connect(client_id)
    for client in (slow, fast):
        client.subscribe("blocks", options=0)
    for number in range(200):
        publisher.send(Publish("blocks", b"%d " % number + BLOCK))
        assert fast.take().payload.startswith(b"%d " % number)
    dropped = drops(samples(broker.get("/metrics")), "slow_subscriber")
    received = [int(packet.payload.split()[0]) for packet in slow.ping() if isinstance(packet, Publish)]
    assert received == sorted(received) and len(received) + dropped == 200
    assert dropped > 100


def test_a_log_that_is_not_read_slows_no_client(start_broker: StartBroker) -> None:
    broker = start_broker(config={"log": {"level": "debug"}})
    with broker.log_unread(), RawClient(broker.port) as client:
        client.connect("loud")
        for number in range(50):  # some hundred KB of log, more than a pipe holds
            for _ in range(50):
                client.publish("a" * 100, b"", qos=0)
            client.ping()
    broker.wait_for_log("event=disconnected client=loud")
    assert broker.terminate() == 0
