"""Creates and checks the Kafka topics of streams: a topic for each stream, and the one with the positions of the derivers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from bridge_spark.log.kafka_record import stream_topic
from mqttbroker.cluster.kafka.log import LogFailure
from mqttbroker.cluster.streams.topics import most_record_bytes, positions_topic
from mqttbroker.config.settings import Stream

FOREVER: Final = "-1"
LEAST_SEGMENT_BYTES: Final = 1024 * 1024  # Kafka's least
MOST_SEGMENT_BYTES: Final = 2**31 - 1
TOPIC_WAIT: Final = 10.0  # seconds until a topic that was created is known to the brokers
WAIT_STEP: Final = 0.1


def topic_settings(stream: Stream, max_message_bytes: int) -> dict[str, str]:
    """The settings of a stream's topic that follow from those of the stream; ``retention_bytes`` are of all partitions together."""
    settings = {
        "retention.ms": FOREVER if stream.retention_age is None else str(int(stream.retention_age * 1000)),
        "retention.bytes": FOREVER if stream.retention_bytes is None else str(max(1, stream.retention_bytes // stream.partitions)),
        "segment.bytes": str(min(max(stream.segment_bytes, LEAST_SEGMENT_BYTES), MOST_SEGMENT_BYTES)),
        "segment.ms": str(int(stream.segment_age * 1000)),
        "max.message.bytes": str(most_record_bytes(max_message_bytes)),
        "message.timestamp.type": "CreateTime",
        "cleanup.policy": "delete",
    }
    if stream.compact:
        limited = stream.retention_age is not None or stream.retention_bytes is not None
        settings["cleanup.policy"] = "compact,delete" if limited else "compact"
        settings["delete.retention.ms"] = str(int(stream.compact_tombstones * 1000))
        settings["min.cleanable.dirty.ratio"] = str(stream.compact_dirty_percent / 100)
    return settings


async def prepare_stream_topics(
    connection: dict[str, Any],
    cluster: str,
    shards: int,
    streams: Sequence[Stream],
    max_message_bytes: int,
    replication: int,
    min_insync_replicas: int,
    create: bool,
    instead: Mapping[str, str] = {},
) -> None:
    """Create the topics that are missing, and give the others the settings of their streams. Raises `LogFailure`, one line.

    Nothing is done without streams. Kafka's settings that this does not name stay as they are. ``instead`` are settings that the
    topics of streams get instead of those that follow from the streams.
    """
    if not streams:
        return
    kept = {"min.insync.replicas": str(min_insync_replicas), "unclean.leader.election.enable": "false"}
    wanted = {
        stream_topic(cluster, stream.name): (stream.partitions, {**topic_settings(stream, max_message_bytes), **instead})
        for stream in streams
    }
    wanted[positions_topic(cluster)] = (shards, {"cleanup.policy": "compact"})
    admin = AIOKafkaAdminClient(**connection, client_id="mqttbroker")
    try:
        await admin.start()
        missing = {name for name, partitions in (await _partitions(admin, list(wanted))).items() if partitions == 0}
        if missing and not create:
            raise LogFailure(f"topics are missing, and create_topics is false: {', '.join(sorted(missing))}")
        await _create(
            admin, [NewTopic(name, wanted[name][0], replication, topic_configs={**wanted[name][1], **kept}) for name in sorted(missing)]
        )
        found = await _partitions(admin, list(wanted), until_known=True)
        for name, (partitions, settings) in wanted.items():
            if found[name] != partitions:
                raise LogFailure(f"topic {name} has {found[name]} partitions, not {partitions}: the number of a stream never changes")
            if name not in missing:
                await _alter(admin, name, settings)
    except (TimeoutError, KafkaError, OSError) as error:
        raise LogFailure(f"topics of streams: {error!r}") from None
    finally:
        await admin.close()


async def _partitions(admin: AIOKafkaAdminClient, names: list[str], until_known: bool = False) -> dict[str, int]:
    """The number of partitions of each topic; 0 for one that does not exist. With ``until_known`` all exist, so this waits for them."""
    until = asyncio.get_running_loop().time() + TOPIC_WAIT
    while True:
        found = {one["topic"]: len(one["partitions"]) for one in await admin.describe_topics(names)}
        counts = {name: found.get(name, 0) for name in names}
        if not until_known or all(counts.values()) or asyncio.get_running_loop().time() >= until:
            return counts
        await asyncio.sleep(WAIT_STEP)


async def _create(admin: AIOKafkaAdminClient, topics: list[NewTopic]) -> None:
    if not topics:
        return
    answer = await admin.create_topics(topics)
    for name, code, *reason in answer.topic_errors:
        if code not in (0, TopicAlreadyExistsError.errno):  # another node creates them at the same time
            text = reason[0] if reason and reason[0] else for_code(code).__name__
            raise LogFailure(f"topic {name} cannot be created: {text}")


async def _alter(admin: AIOKafkaAdminClient, name: str, settings: dict[str, str]) -> None:
    """Set what differs, and keep what else was set for this topic: Kafka's request replaces all."""
    (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    ((code, reason, _, _, entries),) = answer.resources
    if code:
        raise LogFailure(f"topic {name}: its settings cannot be read: {reason or for_code(code).__name__}")
    current = {entry[0]: entry[1] for entry in entries}
    if all(_same(current.get(key), value) for key, value in settings.items()):
        return
    of_topic = {entry[0]: entry[1] for entry in entries if entry[3] == DYNAMIC_TOPIC_CONFIG}
    (changed,) = await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, {**of_topic, **settings})])
    for code, reason, *_ in changed.resources:
        if code:
            raise LogFailure(f"topic {name}: its settings cannot be changed: {reason or for_code(code).__name__}")


DYNAMIC_TOPIC_CONFIG: Final = 1  # the source of a setting that was given to the topic


def _same(current: Any, wanted: str) -> bool:
    return current == wanted or sorted(str(current).split(",")) == sorted(wanted.split(","))
