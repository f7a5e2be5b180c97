"""Client events below ``$SYS/broker/clients/``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess, to_toml
from support.core import Core
from support.raw_client import RawClient

from mqttbroker.admin.events.client_events import MAX_ID_BYTES, ClientEvents, topic_level
from mqttbroker.codec.packets import Publish


def reload(broker: BrokerProcess, **keys: Any) -> None:
    broker.config.write_text(to_toml({"sys_interval": "0s", **keys}))
    after = len(broker.lines)
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=reloaded", after=after)


def next_event(client: RawClient) -> tuple[str, Any]:
    packet = client.wait_for(Publish)
    assert not packet.retain
    return packet.topic.removeprefix("$SYS/broker/clients/"), json.loads(packet.payload)


def test_clients_that_come_and_go_are_told_while_the_switch_is_on(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(config={"sys_interval": "0s"})
    with RawClient(broker.port) as watch:
        watch.connect("watch")
        watch.subscribe("$SYS/broker/clients/+/+", options=0)
        with RawClient(broker.port) as client:
            client.connect("silent")
        reload(broker, sys_client_events=True)
        with RawClient(broker.port, 4) as client:
            client.connect("plant/7", keep_alive=30)
            name, event = next_event(watch)
            assert name == "plant%2F7/connected"
            address, port = client.socket.getsockname()
        assert event["address"] == f"{address}:{port}" and event["ts"] >= event["connected_at"] > 1_700_000_000_000
        wanted = {
            "clientid": "plant/7", "username": None, "ipaddress": "127.0.0.1", "proto_name": "MQTT", "proto_ver": 4,
            "keepalive": 30, "clean_start": True, "expiry_interval": 0, "connack": 0,
        }  # fmt: skip
        assert {key: event[key] for key in wanted} == wanted
        name, event = next_event(watch)
        assert name == "plant%2F7/disconnected" and event["clientid"] == "plant/7"
        assert event["reason"] == "closed by the client" and event["disconnected_at"] > 0
        reload(broker, sys_client_events=False)
        with RawClient(broker.port) as client:
            client.connect("silent")
        watch.expect_nothing()


@pytest.mark.parametrize("client_id, level", [("a", "a"), ("a/b+c#d%e", "a%2Fb%2Bc%23d%25e"), ("é", "é")])
def test_a_client_id_is_one_topic_level(client_id: str, level: str) -> None:
    assert topic_level(client_id) == level


def test_events_of_long_ids_and_of_too_many_that_wait_are_dropped_and_counted(tmp_path: Path) -> None:
    waiting = 0
    told: list[str] = []
    with Core(tmp_path) as core:
        events = ClientEvents(core.broker.clients, lambda topic, payload: told.append(topic), lambda: waiting, lambda: core.seconds)
        events.enable(True)
        core.connect("x" * (MAX_ID_BYTES + 1)).close()
        assert told == [] and events.dropped == 2
        waiting = 1000
        client = core.connect("a")
        waiting = 999
        client.close()
        assert told == ["$SYS/broker/clients/a/disconnected"] and events.dropped == 3
