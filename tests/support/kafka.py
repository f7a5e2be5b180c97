"""Kafka for tests: `LocalKafka` whose topics can be made and looked at. Without Java or Maven a test is skipped, or fails in CI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from support.local_kafka import START_S, KafkaBroker, KafkaMissing, LocalKafka, Place, free_ports
from support.tools import lacking

__all__ = ["PROMPT_FAILOVER", "KafkaBroker", "KafkaCluster", "Place", "free_ports"]
PROMPT_FAILOVER = ("broker.session.timeout.ms=1000", "broker.heartbeat.interval.ms=250")  # as in docs/cluster.md


class KafkaCluster(LocalKafka):
    """`LocalKafka`, whose topics can be made and looked at."""

    def __init__(self, directory: Path, count: int = 3, places: Sequence[Place] = (), **options: Any) -> None:
        try:
            super().__init__(directory, count, places, **options)
        except KafkaMissing as missing:
            lacking(str(missing))

    def __enter__(self) -> KafkaCluster:
        super().__enter__()
        return self

    # -- topics -----------------------------------------------------------------

    async def create_topic(self, name: str, partitions: int = 1, **settings: str) -> None:
        """Create a topic on all brokers of which all but one must have each record, and wait for its leaders."""
        count = len(self.brokers)
        configs = {"min.insync.replicas": str(max(1, count - 1)), **settings}
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            answer = await admin.create_topics([NewTopic(name, partitions, count, topic_configs=configs)])
            failures = [one for one in answer.topic_errors if one[1]]
            assert not failures, failures
        finally:
            await admin.close()
        for partition in range(partitions):
            await self.leader(name, partition)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic, and wait until no broker knows it."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            await admin.delete_topics([name])
            until = time.monotonic() + START_S
            while name in await admin.list_topics():
                assert time.monotonic() < until
                await asyncio.sleep(0.05)
        finally:
            await admin.close()

    async def leader(self, topic: str, partition: int, other_than: int = 0) -> int:
        """The number of the broker that leads a partition, once it is another than ``other_than``."""
        return int((await self._state(topic, partition, lambda one: one["leader"] not in (-1, other_than)))["leader"])

    async def in_sync(self, topic: str, partition: int, count: int) -> None:
        """Wait until a partition has so many replicas that are in sync."""
        await self._state(topic, partition, lambda one: len(one["isr"]) == count and one["leader"] > 0)

    async def _state(self, topic: str, partition: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """A partition's metadata, once they are as wanted."""
        until = time.monotonic() + START_S
        while True:
            with suppress(Exception):
                admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap, request_timeout_ms=2000)
                await admin.start()
                try:
                    (found,) = await admin.describe_topics([topic])
                finally:
                    await admin.close()
                for one in found["partitions"]:
                    if one["partition"] == partition and wanted(one):
                        return dict(one)
            assert time.monotonic() < until, f"partition {partition} of {topic} is not as wanted"
            await asyncio.sleep(0.1)
