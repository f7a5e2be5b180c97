"""Checks of Kafka before a node serves: that it can be reached, and that the topics of logs and snapshots keep what is in them.

Each difference is one line that names topic, key and both values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError, KafkaError, TopicAlreadyExistsError, UnknownTopicOrPartitionError, for_code

from mqttbroker.cluster.kafka.brokers import why_unreachable
from mqttbroker.cluster.kafka.connection import record_cluster_id
from mqttbroker.cluster.nodes.membership import NOT_AVAILABLE, nodes_group
from mqttbroker.cluster.shard.snapshots import RECORD_BYTES, snapshot_index, snapshots_topic
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Cluster

GROUP_WAIT: Final = 20.0  # seconds until Kafka knows about a group: it makes the topic of all groups for the first one
TOPIC_WAIT: Final = 10.0  # seconds until a topic that was created is known to the Kafka brokers
WAIT_STEP: Final = 0.1
KAFKA_MESSAGE_BYTES: Final = 1_048_588  # `max.message.bytes` of Kafka's default
BATCH_OVERHEAD: Final = 1024  # bytes that Kafka counts beside those of a record, at most


class KafkaUnreachable(OSError):
    """Kafka does not answer, or not yet as it should; the text is one line."""


class WantedTopic(NamedTuple):
    """A topic as it must be. More ``replicas`` and a greater ``min.insync.replicas`` are no difference, nor are other settings."""

    name: str
    partitions: int
    replicas: int
    settings: dict[str, str]
    least_message_bytes: int  # that `max.message.bytes` must be


def wanted_topics(cluster: Cluster) -> list[WantedTopic]:
    """The topic of the logs, and those of the snapshots."""
    kept = {
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "min.insync.replicas": str(cluster.min_insync_replicas),
        "unclean.leader.election.enable": "false",
    }
    logs = {
        **kept,
        "cleanup.policy": "delete",
        "message.timestamp.type": "CreateTime",
        **({"flush.messages": "1"} if cluster.fsync else {}),
    }
    return [
        WantedTopic(cluster.log_topic, cluster.shards, cluster.replication, logs, cluster.max_record_bytes + BATCH_OVERHEAD),
        WantedTopic(
            snapshots_topic(cluster.id),
            cluster.shards,
            cluster.replication,
            {**kept, "cleanup.policy": "delete"},
            RECORD_BYTES + BATCH_OVERHEAD,
        ),
        WantedTopic(snapshot_index(cluster.id), 1, cluster.replication, {**kept, "cleanup.policy": "compact"}, 0),
    ]


def topic_differences(wanted: WantedTopic, partitions: int, replicas: list[int], settings: dict[str, str]) -> Iterator[str]:
    """How a topic differs from what is asked for: one line each. ``replicas`` are the numbers of each partition."""
    topic = wanted.name
    if partitions != wanted.partitions:
        yield f"topic {topic} has {partitions} partitions, cluster.shards is {wanted.partitions}: it cannot be changed"
    if replicas and min(replicas) < wanted.replicas:
        yield f"topic {topic} has {min(replicas)} replicas of a partition, cluster.replication is {wanted.replicas}"
    for key, value in wanted.settings.items():
        found = settings.get(key, "")
        if key == "min.insync.replicas" and found.isdecimal() and int(found) >= int(value):
            continue  # more is safer
        if found != value:
            yield f"topic {topic}: {key} is {found or 'not known'}, must be {value}"
    largest = settings.get("max.message.bytes", "")
    if largest.isdecimal() and int(largest) < wanted.least_message_bytes:
        yield f"topic {topic}: max.message.bytes is {largest}, must be at least {wanted.least_message_bytes}"


async def prepare_topics(connection: dict[str, Any], cluster: Cluster) -> bytes:
    """Create the topics that are missing, and check all; returns the id of the cluster that is in each record.

    Raises ConfigError with a line for each difference, `KafkaUnreachable` if it may be better later.
    """
    admin = AIOKafkaAdminClient(**connection, client_id="mqttbroker")
    servers = ", ".join(cluster.bootstrap_servers)
    differences: list[str] = []
    try:
        await admin.start()
        kafka_id = str((await admin.describe_cluster()).get("cluster_id") or "")
        for wanted in wanted_topics(cluster):
            if not await _partitions(admin, wanted.name):
                if not cluster.create_topics:
                    differences.append(f"topic {wanted.name} is missing, and cluster.create_topics is false")
                    continue
                await _create(admin, wanted)
            partitions = await _wait_for(admin, wanted.name)
            settings = await _settings(admin, wanted.name)
            differences += topic_differences(wanted, len(partitions), partitions, settings)
    except KafkaConnectionError as error:
        raise KafkaUnreachable(await _unreachable(connection, cluster, error)) from None
    except KafkaUnreachable as error:
        raise KafkaUnreachable(f"Kafka at {servers}: {error}") from None
    except (TimeoutError, KafkaError, OSError) as error:
        raise KafkaUnreachable(f"Kafka at {servers}: {error!r}") from None
    finally:
        with suppress(Exception):
            await admin.close()
    if differences:
        raise ConfigError(differences)
    return record_cluster_id(kafka_id, cluster)


async def _unreachable(connection: dict[str, Any], cluster: Cluster, error: KafkaConnectionError) -> str:
    """A line that says why Kafka cannot be reached; ``error`` is that of a client."""
    reason = await why_unreachable(connection) or str(error)
    return f"Kafka cannot be reached at {', '.join(cluster.bootstrap_servers)}: {reason}"


async def nodes_of(connection: dict[str, Any], cluster: Cluster) -> int:
    """The number of nodes of the cluster that run, as Kafka knows: one that was killed counts until its session timeout.

    Raises `KafkaUnreachable`.
    """
    admin = AIOKafkaAdminClient(**connection, client_id="mqttbroker")
    loop = asyncio.get_running_loop()
    until = loop.time() + GROUP_WAIT
    try:
        await admin.start()
        while True:
            try:
                return await _members(admin, nodes_group(cluster.id))
            except KafkaError as error:
                if error.errno not in NOT_AVAILABLE or loop.time() > until:
                    raise
            await asyncio.sleep(WAIT_STEP)
    except KafkaConnectionError as error:
        raise KafkaUnreachable(await _unreachable(connection, cluster, error)) from None
    except (TimeoutError, KafkaError, OSError) as error:
        raise KafkaUnreachable(f"Kafka at {', '.join(cluster.bootstrap_servers)}: {error!r}") from None
    finally:
        with suppress(Exception):
            await admin.close()


async def _members(admin: AIOKafkaAdminClient, group: str) -> int:
    """The number of members of a group, which need not exist."""
    found = 0
    for answer in await admin.describe_consumer_groups([group]):
        for code, *_, members in (one[:6] for one in answer.groups):
            if code:
                raise for_code(code)(group)
            found += len(members)
    return found


async def _partitions(admin: AIOKafkaAdminClient, topic: str) -> list[int]:
    """The number of replicas of each partition; empty if there is no such topic. One without a leader counts as missing."""
    for one in await admin.describe_topics([topic]):
        if one["topic"] == topic and one.get("error_code", 0) in (0, 5):
            return [len(partition["replicas"]) for partition in one["partitions"]]
    return []


async def _wait_for(admin: AIOKafkaAdminClient, topic: str) -> list[int]:
    until = asyncio.get_running_loop().time() + TOPIC_WAIT
    while not (found := await _partitions(admin, topic)):
        if asyncio.get_running_loop().time() >= until:
            raise KafkaUnreachable(f"topic {topic} was created, but Kafka does not know it yet")
        await asyncio.sleep(WAIT_STEP)
    return found


async def _create(admin: AIOKafkaAdminClient, wanted: WantedTopic) -> None:
    configs = {**wanted.settings, "max.message.bytes": str(max(KAFKA_MESSAGE_BYTES, wanted.least_message_bytes))}
    topic = NewTopic(wanted.name, wanted.partitions, wanted.replicas, topic_configs=configs)
    answer = await admin.create_topics([topic])
    for error in answer.topic_errors:
        name, code, reason = _error(error)
        if code == 38:  # INVALID_REPLICATION_FACTOR: more Kafka brokers may come
            raise KafkaUnreachable(f"topic {name} cannot be created with cluster.replication {wanted.replicas}: {reason}")
        if code not in (0, TopicAlreadyExistsError.errno):  # another node may create it at the same time
            raise ConfigError([f"topic {name} cannot be created: {reason}"])


def _error(error: tuple[Any, ...]) -> tuple[str, int, str]:
    name, code, *text = error
    return name, code, str(text[0]) if text and text[0] else for_code(code).__name__


async def _settings(admin: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    ((code, reason, _, _, entries),) = answer.resources
    if code == UnknownTopicOrPartitionError.errno:  # this Kafka broker has not heard of the topic yet
        raise KafkaUnreachable(f"topic {topic} was created, but not all Kafka brokers know it yet")
    if code:
        raise ConfigError([f"topic {topic}: its settings cannot be read: {reason or for_code(code).__name__}"])
    return {entry[0]: str(entry[1]) for entry in entries}
