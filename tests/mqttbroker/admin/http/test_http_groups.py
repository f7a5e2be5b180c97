"""mqttbroker.admin.http.groups: groups beside other consumers, their lag, reset and deletion, over HTTP and commands."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest
from support.broker_process import BrokerProcess
from support.command_line import run
from support.core import wait_until
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

TOKEN = "a-token-of-thirty-two-characters"
CONFIG = {
    "streams": {"log": {"filters": ["log/#"], "partitions": 1, "seal": False}},
    "consumers": {"interval": "100ms"},
    "sys_interval": "100ms",
    "http": {"token": TOKEN},
}
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config=CONFIG) as started:
        with RawClient(started.port) as publisher:
            publisher.connect()
            for number in range(10):
                publisher.publish("log/a", b"%d" % number, 1)
        yield started


def join(broker: BrokerProcess, client_id: str = "member") -> RawClient:
    client = RawClient(broker.port)
    client.connect(client_id)
    start = Properties()
    start.user_properties = [("stream-offset", "earliest")]
    client.subscribe("$share/g/$stream/log", options=1, properties=start)
    return client


def receive(client: RawClient, count: int, acknowledged: int) -> list[int]:
    found = [client.expect(Publish) for _ in range(count)]
    client.send(*(Puback(message.packet_id) for message in found[:acknowledged]))
    client.ping()
    return [int(message.payload) for message in found]


def call(broker: BrokerProcess, method: str, path: str, body: Any | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{broker.url}{path}", data, HEADERS, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except HTTPError as error:
        return error.code, json.loads(error.read())


def test_lag_of_a_group_stands_with_that_of_other_consumers(broker: BrokerProcess) -> None:
    member = join(broker)
    receive(member, 10, 4)
    status, answer = call(broker, "GET", "/streams/log/consumers")
    assert status == 200
    (group,) = answer["consumers"]
    assert (group["consumer"], group["lag"], group["at_risk"]) == ("$share/g", 6, False)
    assert group["partitions"][0]["offset"] == 4 and group["lag_seconds"] > 0
    status, answer = call(broker, "GET", "/api/v1/streams/log/groups")
    assert status == 200 and answer["items"] == [{
        "group": "g", "filter": "", "offsets": [{"partition": 0, "offset": 4}], "in_flight": 6, "redelivered": 0,
        "refused": 0, "members": [{"client_id": "member", "partitions": [0]}],
    }]  # fmt: skip
    wait_until(
        lambda: b'mqttbroker_stream_consumer_lag{consumer="$share/g",partition="0",stream="log"} 6.0' in broker.get("/metrics", HEADERS)
    )
    shown = run("consumers", "--url", broker.url, "--token", TOKEN, cwd=broker.directory)
    assert shown.returncode == 0 and "$share/g" in shown.stdout


def test_records_for_mqtt_clients_are_counted(broker: BrokerProcess) -> None:
    member = join(broker)
    receive(member, 10, 4)
    member.disconnect()
    with RawClient(broker.port) as reader, RawClient(broker.port) as watch:
        reader.connect()
        start = Properties()
        start.user_properties = [("stream-offset", "offset:8")]
        reader.subscribe("$stream/log", options=0, properties=start)
        assert [reader.take().payload for _ in range(2)] == [b"8", b"9"]
        found = samples(broker.get("/metrics", HEADERS))
        expected = {"sent": 12, "returned": 6, "missed": 0}
        assert {name: found[f"mqttbroker_stream_records_{name}_total"] for name in expected} == expected
        watch.connect()
        watch.subscribe("$SYS/broker/streams/records/+", options=0)
        values: dict[str, int] = {}
        while values != expected:
            message = watch.take()
            values[message.topic.rpartition("/")[2]] = int(message.payload)


@pytest.mark.parametrize(("to", "expected"), [("earliest", 0), ("offset:7", 7), ("latest", 10), ("1h", 0)])
def test_a_reset_moves_a_group(broker: BrokerProcess, to: str, expected: int) -> None:
    member = join(broker)
    receive(member, 10, 5)
    status, answer = call(broker, "POST", "/api/v1/streams/log/groups/g/reset", {"to": to})
    assert (status, answer) == (200, {"offsets": [{"partition": 0, "offset": expected}]})
    assert receive(member, 10 - expected, 10) == list(range(expected, 10))
    member.expect_nothing()
    # What was in flight before the reset is acknowledged in vain.
    assert call(broker, "GET", "/streams/log/consumers")[1]["consumers"][0]["lag"] == 0
    broker.restart(kill=True)
    with join(broker) as member:
        member.expect_nothing()


def test_a_group_is_reset_and_forgotten_by_command(broker: BrokerProcess) -> None:
    with join(broker) as member:
        receive(member, 10, 10)
    assert (
        run(
            "consumers", "log", "--reset", "g", "--to", "offset:0=8", "--url", broker.url, "--token", TOKEN, cwd=broker.directory
        ).returncode
        == 0
    )
    with join(broker) as member:
        assert receive(member, 2, 2) == [8, 9]
    wrong = run("consumers", "log", "--reset", "g", "--to", "yesterday", "--url", broker.url, "--token", TOKEN, cwd=broker.directory)
    assert wrong.returncode != 0 and "yesterday is not earliest" in wrong.stderr
    assert run("consumers", "log", "--forget", "$share/g", "--url", broker.url, "--token", TOKEN, cwd=broker.directory).returncode == 0
    assert call(broker, "GET", "/api/v1/streams/log/groups") == (200, {"items": []})
    missing = run("consumers", "log", "--reset", "g", "--to", "latest", "--url", broker.url, "--token", TOKEN, cwd=broker.directory)
    assert missing.returncode != 0 and "has no group" in missing.stderr
    with join(broker) as member:  # a new group of this name begins again
        assert len(receive(member, 10, 0)) == 10
