"""The nodes and Kafka brokers of a cluster, killed one after another in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from random import Random

from support.cluster_nodes import ClusterNodes

from chaos_spark.actors import Actor
from chaos_spark.driver import END_SECONDS, family, still_there
from chaos_spark.verdict import PROCESSES, Findings

NODE, KAFKA, BOTH = "nodes", "Kafka brokers", "of both at once"
AWAY_SECONDS = 4.0  # that a killed part stays away, at most
RECOVERY_SECONDS = 120.0  # in which the cluster has to be ready again after a kill


class Kinds:
    """The victim of the next kill: of two kills one is of a node and one of a Kafka broker; after four comes one of both at once."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._next: list[str] = []

    def next(self) -> str:
        if not self._next:
            pairs = [self._random.sample((NODE, KAFKA), 2) for _ in range(2)]
            self._next = [BOTH, *pairs[0], *pairs[1]]
        return self._next.pop()


class ClusterLives(Actor):
    """Kills nodes and Kafka brokers, each ``kills`` times at least; the next kill waits until the cluster is whole again.

    ``topics``: those whose replicas are to be in sync then, with their numbers of partitions.
    """

    def __init__(self, cluster: ClusterNodes, topics: Mapping[str, int], seed: str, mean: float, kills: int, findings: Findings) -> None:
        super().__init__("cluster", seed, mean, 2 * kills, findings)
        self.cluster = cluster
        self.topics = topics
        self.longest = 0.0  # seconds from a restart until the nodes were ready
        self.left: dict[int, str] = {}  # all processes of nodes that were killed
        self._kinds = Kinds(self.random)

    def kill(self) -> None:
        kind = self._kinds.next()
        node = self.random.choice(self.cluster.nodes)
        kafka = self.random.choice(self.cluster.kafka.brokers)
        away = self.random.choice((0.0, self.random.uniform(0.0, AWAY_SECONDS)))
        self.findings.checked[PROCESSES] += 1
        if kind in (KAFKA, BOTH):
            kafka.kill()
        if kind in (NODE, BOTH):
            self.left.update(family(node.pid))
            node.kill()
        time.sleep(away)
        if kind in (KAFKA, BOTH):
            kafka.start()
            kafka.wait_until_listening()
        if kind in (NODE, BOTH):
            node.start()
        self.longest = max(self.longest, self.cluster.wait_until_ready(RECOVERY_SECONDS))
        asyncio.run(self._wait_until_in_sync())
        self.counts[kind] += 1

    async def _wait_until_in_sync(self) -> None:
        for topic, partitions in self.topics.items():
            for partition in range(partitions):
                await self.cluster.kafka.in_sync(topic, partition, len(self.cluster.kafka.brokers))

    def finish(self) -> None:
        if left := still_there(self.left, END_SECONDS):
            self.findings.fault(PROCESSES, f"{len(left)} processes of nodes that were killed still run")

    def __str__(self) -> str:
        kinds = ", ".join(f"{self.counts[kind]} {kind}" for kind in (NODE, KAFKA, BOTH))
        return f"{self.counts['kills']} kills ({kinds}); ready again after {self.longest:.1f} s at most"
