"""Nodes of a cluster: who owns its shards when nodes die, drain and come, and what operators are told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster_nodes import ClusterNodes, wait_until_ready
from support.kafka import KafkaCluster

TOKEN = "a-token-of-tests-0123456789"
READY = 60.0

pytestmark = [pytest.mark.slow("three nodes on Kafka"), pytest.mark.one_build]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("kafka"), 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(kafka: KafkaCluster) -> Iterator[ClusterNodes]:
    with ClusterNodes(kafka, config={"http": {"token": TOKEN}}, replication=1, min_insync_replicas=1) as nodes:
        yield nodes


def owners(cluster: ClusterNodes, node: int = 0) -> list[str]:
    found = json.loads(cluster.nodes[node].get("/api/v1/cluster", {"Authorization": f"Bearer {TOKEN}"}))
    return [shard["owner"] for shard in found["shards"]]


def command(cluster: ClusterNodes, node: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "mqttbroker", *words, "--url", cluster.nodes[node].url, "--token", TOKEN],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_an_operator_moves_a_shard_and_drains_a_node(cluster: ClusterNodes) -> None:
    before = owners(cluster)
    assert sorted(before) == ["node-1", "node-2", "node-3"]
    shard = before.index("node-1")
    moved = command(cluster, 1, "cluster", "move", str(shard), "node-2")
    assert moved.returncode == 0, moved.stderr
    drained = command(cluster, 0, "cluster", "drain")
    assert drained.returncode == 0, drained.stderr
    assert "node-1" not in owners(cluster, 2)
    assert owners(cluster, 2)[shard] == "node-2"
    assert command(cluster, 0, "cluster", "drain", "--undo").returncode == 0
    wait_until_ready(cluster.nodes, READY)
    status = json.loads(command(cluster, 0, "cluster", "--json").stdout)
    assert [node["node"] for node in status["nodes"]] == ["node-1", "node-2", "node-3"]


def test_wrong_calls_are_one_line(cluster: ClusterNodes) -> None:
    for words, line in (
        (("cluster", "move", "7", "node-1"), "shard: must be 0–2, got 7"),
        (("cluster", "move", "0", "node-9"), "there is no node node-9, there are node-1, node-2, node-3"),
        (("retained", "list"), "not available at a node of a cluster"),
    ):
        done = command(cluster, 0, *words)
        assert done.returncode == 1
        assert line in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_second_node_of_a_name_does_not_serve(cluster: ClusterNodes, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mqttbroker", "serve", "--config", str(cluster.nodes[0].config), "--port", "0",
         "--http-port", "0", "--data-dir", str(tmp_path / "data")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "another node of the name node-1 is in the cluster, at 127.0.0.1:" in done.stderr.splitlines()[-1]


def test_shards_of_a_killed_node_are_served_by_others_and_the_metrics_have_them(cluster: ClusterNodes) -> None:
    cluster.nodes[2].kill()
    while "node-3" in owners(cluster):
        pass
    wait_until_ready(cluster.nodes[:2], READY)
    assert set(owners(cluster)) == {"node-1", "node-2"}
    metrics = "".join(node.get("/metrics", {"Authorization": f"Bearer {TOKEN}"}).decode() for node in cluster.nodes[:2])
    for shard in range(3):
        assert f'mqttbroker_core_up{{shard="{shard}"}} 1' in metrics
    cluster.nodes[2].start()
    cluster.wait_until_ready()
