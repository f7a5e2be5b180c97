"""Redirection to another server: new clients are refused, connected ones disconnected at a rate (section 4.11)."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess, to_toml
from support.core import Core
from support.raw_client import RawClient

from mqttbroker.codec.packets import Disconnect, Publish, Will
from mqttbroker.codec.properties import Properties
from mqttbroker.config.settings import Redirect as Predicate
from mqttbroker.core.terms.terms import Redirect

OTHER = "other.example:1883 [2001:db8::1]:8883"


def narrow(size: int) -> Properties:
    properties = Properties()
    properties.maximum_packet_size = size
    return properties


@pytest.mark.parametrize("permanent, code", [(False, 0x9C), (True, 0x9D)])
def test_connect_is_refused_with_the_server_reference(tmp_path: Path, permanent: bool, code: int) -> None:
    with Core(tmp_path, others={"redirect": Predicate(OTHER, permanent)}) as core:
        client = core.client()
        connack = client.connect("new", username="nobody", password=b"never looked at")
        assert (connack.reason_code, connack.properties.server_reference) == (code, OTHER)
        assert connack.properties.reason_string is None and client.closed
        old = core.client(4)
        assert old.connect("old").reason_code == 3 and old.closed
        small = core.client()
        connack = small.connect("small", properties=narrow(20))
        assert (connack.reason_code, connack.properties.server_reference) == (code, None)


def test_connected_clients_are_disconnected_with_the_server_reference(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        five = core.connect("five", will=Will("will", b"gone"))
        small = core.connect("small", properties=narrow(20))
        four = core.connect("four", 4)
        four.subscribe("will", options=0)
        core.advance(0)
        core.broker.terms.redirect = Redirect(OTHER, False, 2)
        core.advance(0.5)
        (farewell,) = five.arrived()
        assert isinstance(farewell, Disconnect) and five.closed and not small.closed
        assert (farewell.reason_code, farewell.properties.server_reference) == (0x9C, OTHER)
        assert farewell.properties.reason_string is None
        assert [message.payload for message in four.arrived()] == [b"gone"]
        core.advance(1)
        (farewell,) = small.arrived()
        assert (farewell.reason_code, farewell.properties.server_reference) == (0x9C, None) and small.closed
        assert four.arrived() == [] and four.closed


def test_clients_are_disconnected_at_the_configured_rate(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        clients = [core.connect(f"c{n}") for n in range(20)]
        core.advance(3600)
        core.broker.terms.redirect = Redirect(OTHER, False, 6)
        gone = []
        for _ in range(12):
            core.advance(0.25)
            gone.append(sum(client.closed for client in clients))
        assert gone == [1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18]
        core.advance(3600)
        core.broker.terms.redirect = None
        core.advance(3600)
        clients = [core.connect(f"again{n}") for n in range(20)]
        core.broker.terms.redirect = Redirect(OTHER, False, 6)
        core.advance(0.5)
        assert sum(client.closed for client in clients) == 3
        core.advance(3600)
        assert sum(client.closed for client in clients) == 9, "at most the number of one second, however late the tick"


def test_other_disconnects_have_no_server_reference(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        core.connect("c")
        core.broker.terms.redirect = Redirect(OTHER, False, 1)
        core.clients[0].send(b"\x10\x00")
        (farewell,) = core.clients[0].arrived()
        assert farewell.reason_code == 0x82 and farewell.properties.server_reference is None


def ready(broker: BrokerProcess) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{broker.http_port}/readyz", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def reload(broker: BrokerProcess, settings: dict[str, Any]) -> None:
    after = len(broker.lines)
    broker.config.write_text(to_toml(settings), encoding="utf-8")
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=reloaded", after=after)


def test_sighup_starts_and_ends_a_redirect(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    with RawClient(broker.port) as five, RawClient(broker.port, 4) as four:
        for client in (five, four):
            assert client.connect(f"{client.version}").reason_code == 0
        assert ready(broker)[0] == 200
        reload(broker, {"redirect": {"server_reference": OTHER}})
        broker.wait_for_log("event=redirecting")
        (farewell,) = five.expect_closed()
        assert (farewell.reason_code, farewell.properties.server_reference) == (0x9C, OTHER)
        assert four.expect_closed() == []
    status, why = ready(broker)
    assert status == 503 and OTHER in why
    with RawClient(broker.port) as client:
        assert client.connect("new").properties.server_reference == OTHER
    reload(broker, {})
    assert ready(broker)[0] == 200
    with RawClient(broker.port) as client:
        assert client.connect("new").reason_code == 0


def test_shutdown_during_a_redirect_sends_the_server_reference(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    with RawClient(broker.port) as one, RawClient(broker.port) as two:
        clients = (one, two)
        for client in clients:
            client.connect(f"stop-{client is one}")
            client.subscribe("t")
        one.publish("t", b"", 0)
        assert all(isinstance(client.take(), Publish) for client in clients)
        reload(broker, {"redirect": {"server_reference": OTHER, "permanent": True, "rate": 1}})
        broker.terminate()
        for client in clients:
            (farewell,) = client.expect_closed()
            assert (farewell.reason_code, farewell.properties.server_reference) == (0x9D, OTHER)
