"""A node whose user in Kafka may do what docs/cluster.md says that it needs, and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.broker_process import BrokerProcess
from support.cluster_nodes import ClusterNodes
from support.core import wait_until
from support.paths import ROOT
from support.raw_client import RawClient
from support.secured_kafka import Rule, SecuredKafka

from bridge_spark.log.kafka_record import stream_topic
from mqttbroker.codec.packets import Publish

pytestmark = [pytest.mark.slow("a node on Kafka"), pytest.mark.one_build]

USER, STRANGER, PASSWORD = "nodes", "stranger", "password-of-the-nodes"
# Of a page's table: `Topic` | names that begin with `<id>.` | `Read`, `Write` |
ROW = re.compile(r"^\| `(Topic|Group|TransactionalId|Cluster)` \| (?:(names that begin with )?`<id>([^`]*)`|) ?\| (.*) \|", re.M)


def documented_rules(cluster: str) -> list[Rule]:
    """The rules of docs/cluster.md for a cluster with this id."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    rules = [
        Rule(resource, "kafka-cluster" if resource == "Cluster" else cluster + rest, not prefix, operation)
        for resource, prefix, rest, operations in ROW.findall(page)
        for operation in re.findall(r"`(\w+)`", operations)
    ]
    assert {rule.resource for rule in rules} >= {"Topic", "Group", "TransactionalId"}
    return rules


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("kafka"), {USER: PASSWORD, STRANGER: PASSWORD}, rules=True) as cluster:
        assert isinstance(cluster, SecuredKafka)
        yield cluster


def security(kafka: SecuredKafka, user: str) -> dict[str, str]:
    return {
        "security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": user, "sasl_password": PASSWORD,
        "cafile": str(kafka.cafile),
    }  # fmt: skip


def test_the_rules_of_the_page_are_enough(kafka: SecuredKafka) -> None:
    """For sessions, retained messages, streams and snapshots."""
    streams = {"readings": {"filters": ["sensors/#"]}, "last": {"filters": ["state/#"], "compact": True}}
    nodes = ClusterNodes(
        kafka,
        1,
        2,
        {"allow_anonymous": True, "streams": streams},
        replication=1,
        min_insync_replicas=1,
        snapshot_bytes="1MiB",
        **security(kafka, USER),
    )
    asyncio.run(kafka.allow(USER, documented_rules(nodes.id)))
    with nodes:
        (node,) = nodes.nodes
        with RawClient(node.port) as client:
            client.connect("one")
            client.subscribe("sensors/#", options=1)
            for number in range(300):
                client.publish("sensors/a", b"%d" % number + bytes(10_000), 1)
            client.publish("state/a", b"on", 1, retain=True)
            assert client.wait_for(Publish).topic == "sensors/a"
        wait_until(lambda: "event=snapshot_written" in node.log)
        topics = [stream_topic(nodes.id, name) for name in streams]
        wait_until(lambda: all(asyncio.run(kafka.end(topic)) > 0 for topic in topics))
        assert node.ready()


def test_a_user_without_rules_is_told_what_it_lacks(kafka: SecuredKafka) -> None:
    section = {
        "engine": "kafka", "bootstrap_servers": kafka.bootstrap, "node": "node-1", "shards": 1, "replication": 1,
        "min_insync_replicas": 1, **security(kafka, STRANGER),
    }  # fmt: skip
    with closing(BrokerProcess(config={"cluster": section})) as node:
        node.launch()
        wait_until(lambda: not node.running)
        assert node.terminate() == 2
        assert node.lines[-1] == "topic mqtt.log cannot be created: Authorization failed."
