"""The topic of the logs, as it is made and as it is checked."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from unittest.mock import AsyncMock

import pytest
from support.kafka import KafkaCluster
from support.patience import PATIENCE

from mqttbroker.cluster.kafka.connection import connection, record_cluster_id
from mqttbroker.cluster.nodes import checks
from mqttbroker.cluster.nodes.checks import KafkaUnreachable, nodes_of, prepare_topics, topic_differences, wanted_topics
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Cluster

pytestmark = pytest.mark.one_build

CLUSTER = Cluster(engine="kafka", id="c", bootstrap_servers=("127.0.0.1:1",), shards=3)
LOGS, SNAPSHOTS, INDEX = wanted_topics(CLUSTER)


@pytest.mark.parametrize(
    "key, value, line",
    [
        ("cleanup.policy", "compact", "topic c.log: cleanup.policy is compact, must be delete"),
        ("retention.ms", "604800000", "topic c.log: retention.ms is 604800000, must be -1"),
        ("min.insync.replicas", "1", "topic c.log: min.insync.replicas is 1, must be 2"),
        ("unclean.leader.election.enable", "true", "topic c.log: unclean.leader.election.enable is true, must be false"),
        ("flush.messages", "9223372036854775807", "topic c.log: flush.messages is 9223372036854775807, must be 1"),
        ("max.message.bytes", "1000", "topic c.log: max.message.bytes is 1000, must be at least 922624"),
    ],
)
def test_each_difference_is_one_line(key: str, value: str, line: str) -> None:
    [found] = topic_differences(LOGS, 3, [3, 3, 3], {**LOGS.settings, key: value})
    assert found.startswith(line)


def test_more_safety_than_asked_for_is_no_difference() -> None:
    assert not list(topic_differences(LOGS, 3, [3, 3, 3], {**LOGS.settings, "min.insync.replicas": "3"}))


def test_partitions_and_replicas_are_compared() -> None:
    lines = list(topic_differences(LOGS, 4, [3, 2, 3, 3], LOGS.settings))
    assert [line.partition(",")[0] for line in lines] == [
        "topic c.log has 4 partitions", "topic c.log has 2 replicas of a partition"
    ]  # fmt: skip


def test_snapshots_are_kept_and_their_index_is_compacted() -> None:
    assert (SNAPSHOTS.name, SNAPSHOTS.partitions, SNAPSHOTS.settings["cleanup.policy"]) == ("c.snapshots", 3, "delete")
    assert (INDEX.name, INDEX.partitions, INDEX.settings["cleanup.policy"]) == ("c.snapshot-index", 1, "compact")


def test_the_id_in_records_is_of_the_cluster_and_of_kafka() -> None:
    other = dataclasses.replace(CLUSTER, id="d")
    assert len({record_cluster_id("K", CLUSTER), record_cluster_id("L", CLUSTER), record_cluster_id("K", other)}) == 3
    assert len(record_cluster_id("K", CLUSTER)) == 8


async def test_kafka_that_is_away_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    cluster = dataclasses.replace(CLUSTER, bootstrap_servers=(f"127.0.0.1:{port}", "no-such.invalid:9092"))
    for asking in (prepare_topics(connection(cluster), cluster), nodes_of(connection(cluster), cluster)):
        with pytest.raises(KafkaUnreachable) as caught:
            await asking
        text = str(caught.value)
        assert text.startswith(f"Kafka cannot be reached at 127.0.0.1:{port}, no-such.invalid:9092: no Kafka broker answers: ")
        assert f"127.0.0.1:{port}: ConnectionRefusedError" in text and "no-such.invalid:9092: gaierror" in text
        assert "\n" not in text


async def test_a_topic_that_cannot_be_created_yet_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = AsyncMock()
    admin.describe_cluster.return_value = {"cluster_id": "k"}
    admin.describe_topics.return_value = []
    admin.create_topics.return_value.topic_errors = [(LOGS.name, 38, "only 1 broker")]
    monkeypatch.setattr(checks, "AIOKafkaAdminClient", lambda **_: admin)
    with pytest.raises(KafkaUnreachable) as caught:
        await prepare_topics({}, CLUSTER)
    line = "topic c.log cannot be created with cluster.replication 3: only 1 broker"
    assert str(caught.value) == f"Kafka at 127.0.0.1:1: {line}"


async def prepared_in_the_end(cluster: Cluster) -> bytes:
    """`prepare_topics`, again and again while not all Kafka brokers know a new topic, as a node does it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await prepare_topics(connection(cluster), cluster)
            except KafkaUnreachable as error:
                assert "not all Kafka brokers know it yet" in str(error)


@pytest.mark.slow("needs Kafka")
async def test_a_topic_is_created_once_and_then_checked(kafka: KafkaCluster) -> None:
    cluster = dataclasses.replace(CLUSTER, id="checks", bootstrap_servers=tuple(kafka.bootstrap))
    made = await prepared_in_the_end(cluster)
    assert await prepare_topics(connection(cluster), cluster) == made
    with pytest.raises(ConfigError, match="topic checks.log has 3 partitions, cluster.shards is 5"):
        await prepare_topics(connection(cluster), dataclasses.replace(cluster, shards=5))
    missing = dataclasses.replace(cluster, id="missing", create_topics=False)
    with pytest.raises(ConfigError, match="topic missing.log is missing, and cluster.create_topics is false"):
        await prepare_topics(connection(missing), missing)
    await kafka.create_topic("compacted.log", 3, **{**LOGS.settings, "cleanup.policy": "compact"})
    compacted = dataclasses.replace(cluster, id="compacted")
    with pytest.raises(ConfigError, match="topic compacted.log: cleanup.policy is compact, must be delete"):
        await prepare_topics(connection(compacted), compacted)
