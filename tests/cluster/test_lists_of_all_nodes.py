"""An operator finds, disconnects and bans the clients of all nodes at each node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlencode

import pytest
from support.cluster_nodes import ClusterNodes
from support.core import wait_until
from support.kafka import KafkaCluster
from support.raw_client import RawClient

from mqttbroker.core.sessions.own_shard import shard_of

TOKEN = "a-token-of-tests-0123456789"
SHARDS = 3
NAMES = sorted(f"device/{number}" for number in range(30))

pytestmark = [pytest.mark.slow("three nodes on Kafka"), pytest.mark.one_build]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterNodes]:
    config = {"http": {"token": TOKEN}, "allow_anonymous": True}
    with KafkaCluster(tmp_path_factory.mktemp("kafka"), 1) as kafka:
        with ClusterNodes(kafka, 3, SHARDS, config, replication=1, min_insync_replicas=1, session_timeout="20s") as cluster:
            yield cluster


@pytest.fixture
def devices(nodes: ClusterNodes) -> Iterator[dict[str, RawClient]]:
    with ExitStack() as stack:
        found = {}
        for number, name in enumerate(NAMES):
            client = found[name] = stack.enter_context(RawClient(nodes.ports[number % 3]))
            assert client.connect(name).reason_code == 0
            client.subscribe("plant/#")
        yield found


def request(nodes: ClusterNodes, node: int, method: str, path: str, body: dict[str, Any] | None = None, **query: Any) -> Any:
    url = f"{nodes.nodes[node].url}/api/v1{path}" + (f"?{urlencode(query)}" if query else "")
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Authorization": f"Bearer {TOKEN}"}, method=method)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def listed(nodes: ClusterNodes, node: int, path: str, **query: Any) -> list[str]:
    """The client ids of all pages of a list."""
    found: list[str] = []
    while True:
        page = request(nodes, node, "GET", path, **query)
        assert page["unanswered"] == []
        found += [item["client_id"] for item in page["items"]]
        if page["next_cursor"] is None:
            return found
        query["cursor"] = page["next_cursor"]


def test_each_node_lists_the_clients_and_subscriptions_of_all(nodes: ClusterNodes, devices: dict[str, RawClient]) -> None:
    for node in range(3):
        assert listed(nodes, node, "/clients", prefix="device/", limit=7) == NAMES
        assert listed(nodes, node, "/clients", prefix="device/", limit=1000, order="desc") == NAMES[::-1]
        assert sorted(listed(nodes, node, "/subscriptions", filter="plant/#", limit=7)) == NAMES
        assert sorted(listed(nodes, node, "/receivers", topic="plant/1")) == NAMES
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "mqttbroker", "clients", "--json", "--url", nodes.nodes[1].url, "--token", TOKEN],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert [client["client_id"] for client in json.loads(shown.stdout)] == NAMES, shown.stderr


def test_a_client_is_disconnected_at_any_node(nodes: ClusterNodes, devices: dict[str, RawClient]) -> None:
    for node, name in enumerate(NAMES[:3]):
        assert request(nodes, node, "GET", f"/clients/{name.replace('/', '%2F')}")["connected"]
        request(nodes, node, "POST", f"/clients/{name.replace('/', '%2F')}/disconnect")
        (disconnect,) = devices[name].expect_closed()
        assert disconnect.reason_code == 0x98  # type: ignore[attr-defined]
    wait_until(lambda: listed(nodes, 0, "/clients", prefix="device/") == NAMES[3:])


def test_a_ban_is_in_force_at_all_nodes_until_it_is_lifted(nodes: ClusterNodes, devices: dict[str, RawClient]) -> None:
    name = NAMES[5]
    assert request(nodes, 0, "POST", "/bans", {"client_id": name})["disconnected"] == 1
    devices[name].expect_closed()
    for node in range(3):
        assert listed(nodes, node, "/bans") == [name]
        with RawClient(nodes.ports[node]) as again:
            assert again.connect(name).reason_code == 0x8A
    request(nodes, 2, "DELETE", "/bans", client_id=name)
    assert listed(nodes, 1, "/bans") == []
    with RawClient(nodes.ports[0]) as again:
        assert again.connect(name).reason_code == 0


def test_a_ban_follows_a_shard_to_its_next_owner(nodes: ClusterNodes) -> None:
    request(nodes, 0, "POST", "/bans", {"username": "eve", "seconds": 3600})
    shard, owner = next((one["shard"], one["owner"]) for one in request(nodes, 0, "GET", "/cluster")["shards"])
    request(nodes, 0, "POST", "/cluster/move", {"shard": shard, "node": "node-1" if owner != "node-1" else "node-2"})
    wait_until(lambda: request(nodes, 0, "GET", "/cluster")["shards"][shard]["owner"] != owner)
    nodes.wait_until_ready()
    wait_until(lambda: [ban["username"] for ban in request(nodes, 2, "GET", f"/cluster/shards/{shard}/bans")["items"]] == ["eve"])
    request(nodes, 1, "DELETE", "/bans", username="eve")


def test_each_node_has_the_api_of_each_core(nodes: ClusterNodes, devices: dict[str, RawClient]) -> None:
    for shard in range(SHARDS):
        own = [name for name in NAMES if shard_of(name, SHARDS) == shard]
        for node in range(3):
            page = request(nodes, node, "GET", f"/cluster/shards/{shard}/clients", prefix="device/")
            assert [item["client_id"] for item in page["items"]] == own
    with pytest.raises(urllib.error.HTTPError, match="404"):
        request(nodes, 0, "GET", f"/cluster/shards/{SHARDS}/clients")


def test_cores_of_a_node_that_does_not_answer_are_named(nodes: ClusterNodes, devices: dict[str, RawClient]) -> None:
    stopped = nodes.nodes[2]
    owned = [one["shard"] for one in request(nodes, 0, "GET", "/cluster")["shards"] if one["owner"] == "node-3"]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        page = request(nodes, 0, "GET", "/clients", prefix="device/")
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert page["unanswered"] == [{"shard": shard, "node": "node-3", "reason": "no answer within 5 s"} for shard in owned]
    assert [item["client_id"] for item in page["items"]] == [name for name in NAMES if shard_of(name, SHARDS) not in owned]
    wait_until(lambda: listed(nodes, 0, "/clients", prefix="device/") == NAMES)
