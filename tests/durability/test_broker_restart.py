"""A broker that starts with many sessions restores all of them with their queues."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.paths import ROOT
from support.raw_client import RawClient

sys.path.insert(0, str(ROOT / "bench"))

import restart  # noqa: E402

SESSIONS, SUBSCRIPTIONS, MESSAGES = 300, 1500, 3000


def test_a_restart_keeps_every_session_with_subscriptions_and_queue(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    restart.fill(tmp_path, SESSIONS, SUBSCRIPTIONS, MESSAGES)
    broker = start_broker(data_dir=tmp_path)
    metrics = broker.get("/metrics").decode()
    assert f"mqttbroker_sessions {SESSIONS}.0" in metrics
    assert f"mqttbroker_subscriptions {SUBSCRIPTIONS}.0" in metrics
    with RawClient(broker.port, 5) as publisher:
        publisher.connect("publisher")
        for number in (0, 7, 99):
            with RawClient(broker.port, 4) as client:
                assert client.connect(restart.client_id(number), clean_start=False).session_present
                queued = [client.take() for _ in range(MESSAGES // SESSIONS)]
                assert {message.topic for message in queued} == {f"site/{number}/device/status"}
                for topic_filter in restart.FILTERS[:4]:
                    topic = topic_filter.format(number, number).replace("+", "x").replace("#", "x/y")
                    assert publisher.publish(topic, b"now", qos=1) == 0
                    assert client.take().topic == topic


def test_a_stopped_test_broker_keeps_its_ports(start_broker: Callable[..., BrokerProcess]) -> None:
    """So that a test can start it there again, even if other processes ask for a free port."""
    broker = start_broker()
    for kill in (True, False):
        if kill:
            broker.kill()
        else:
            broker.terminate()
        for port in (broker.port, broker.http_port):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((broker.host, port))
        broker.start()
        with RawClient(broker.port, 5) as client:
            client.connect("c")
        assert broker.get("/livez")


def test_a_returning_client_gets_its_queue_in_order(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    restart.fill(tmp_path, 1, 1, 2500)
    broker = start_broker(data_dir=tmp_path)
    with RawClient(broker.port, 4) as client:
        client.connect(restart.client_id(0), clean_start=False)
        ids = [client.take().packet_id for _ in range(2500)]
        assert ids == list(range(1, 2501))
        client.expect_nothing()
    with RawClient(broker.restart().port, 4) as client:
        assert client.connect(restart.client_id(0), clean_start=False).session_present
        client.expect_nothing()
