"""The services that store the stream of a run: a single broker, or a cluster of nodes with its Kafka brokers.

Both have their own data in a directory of the run, and an actor that kills them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from support.broker_process import BrokerProcess
from support.cluster_nodes import ClusterNodes
from support.kafka import KafkaCluster

from bridge_spark.log.kafka_record import stream_topic
from bridge_spark.log.segment_names import SEALED_SUFFIX
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.kafka_options import KafkaOptions
from bridge_spark.source.kafka_storage import KafkaStorage
from bridge_spark.source.storage import Manifest
from chaos_spark.actors import Actor, BrokerLives
from chaos_spark.cluster_lives import ClusterLives
from chaos_spark.driver import environment
from chaos_spark.verdict import Findings

STREAM = "chaos"
FILTERS = ["chaos/#"]
PARTITIONS = 3
SHARDS = 3  # of a cluster
KAFKA_RETRIES = 16  # of the run's own requests to Kafka; the waits between them are 90 s in all
KAFKA_TIMEOUT_S = 20.0  # of one request
COPY_SECONDS = 120.0  # for the nodes to copy what they have acknowledged to the stream's topic
READ_WAIT_MS = 500


class Service(Protocol):
    """A stored stream, the parts that store it, and the ``lives`` of these parts.

    ``away``: matches the last error of a driver if the service did not answer for too long.
    """

    lives: Actor
    away: re.Pattern[str]

    def start(self) -> None:
        """Start all parts; they are ready then."""

    def close(self) -> None:
        """End all parts; AssertionError if one had ended by itself or logged a traceback."""

    @property
    def ports(self) -> list[int]:
        """The ports for MQTT: a publisher may use any of them."""

    def source(self, random: Random) -> tuple[str, dict[str, str]]:
        """A way to read the stream: its name, and the settings of an ingest job's `[source]`."""

    def manifest(self) -> Manifest:
        """The state of the stream; callable from any thread."""

    def wait_for_copies(self, messages: int) -> None:
        """Wait until a reader of the stream can find so many messages, or for as long as that may take."""

    def places(self) -> Mapping[int, Collection[int]]:
        """The offsets of all messages that were ever in the stream, by partition."""

    def summary(self) -> str:
        """A line: the processes that were killed, and other events."""


class SingleBroker:
    """One broker, whose stream has these ``settings``."""

    away = re.compile("cannot be read after")

    def __init__(
        self, settings: Mapping[str, Any], source: str, program: tuple[str, ...], seed: str, life: float, kills: int,
        findings: Findings,
    ) -> None:  # fmt: skip
        self.broker = BrokerProcess(config={
            "streams": {STREAM: {"filters": FILTERS, "partitions": PARTITIONS, **settings}},
            "sys_interval": "0s",
        }, env=environment(), program=program)  # fmt: skip
        self.lives: Actor = BrokerLives(self.broker, seed, life, kills, findings)
        self._ways = ("path", "url") if source == "both" else (source,)
        self._storage = DirectoryStorage(str(self.broker.data_dir), STREAM)

    def start(self) -> None:
        self.broker.start()

    def close(self) -> None:
        self.broker.close()

    @property
    def ports(self) -> list[int]:
        return [self.broker.port]

    def source(self, random: Random) -> tuple[str, dict[str, str]]:
        way = random.choice(self._ways)
        return way, {way: str(self.broker.data_dir) if way == "path" else self.broker.url}

    def manifest(self) -> Manifest:
        return self._storage.manifest()

    def wait_for_copies(self, messages: int) -> None:
        """Nothing to do: acknowledged messages are in the stream."""

    def places(self) -> Mapping[int, Collection[int]]:
        return {number: range(state.high_watermark) for number, state in self.manifest().items()}

    def summary(self) -> str:
        counts = self.lives.counts
        sealed = sum(1 for _ in self.broker.data_dir.glob(f"streams/{STREAM}/*/*{SEALED_SUFFIX}"))
        return f"broker: {counts['kills']} kills, {counts['stillborn']} more while it started; {sealed} segments are sealed in the end"


class Cluster:
    """Three nodes and three Kafka brokers, with their files in ``directory``."""

    def __init__(self, directory: Path, seed: str, life: float, kills: int, findings: Findings) -> None:
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # it logs each attempt to reach a broker that is dead
        (directory / "kafka").mkdir()
        self._stack = ExitStack()
        self.kafka = KafkaCluster(directory / "kafka")
        self.nodes = ClusterNodes(
            self.kafka,
            3,
            SHARDS,
            {"streams": {STREAM: {"filters": FILTERS, "partitions": PARTITIONS}}, "sys_interval": "0s"},
        )
        servers = ",".join(self.kafka.bootstrap)
        self.away = re.compile(f"mqtt source: {re.escape(servers)}: |org[.]apache[.]kafka[.]common[.]errors[.]")
        self.topic = stream_topic(self.nodes.id, STREAM)
        self.lives: Actor = ClusterLives(self.nodes, {f"{self.nodes.id}.log": SHARDS, self.topic: PARTITIONS}, seed, life, kills, findings)
        self._source = {"bootstrap_servers": servers, "cluster_id": self.nodes.id}
        self._lock = threading.Lock()
        options = KafkaOptions(tuple(self.kafka.bootstrap), self.nodes.id)
        self._storage = KafkaStorage(options, STREAM, KAFKA_RETRIES, 0.1, KAFKA_TIMEOUT_S)
        self._places: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}

    def start(self) -> None:
        self._stack.enter_context(self.kafka)
        self._stack.enter_context(self.nodes)

    def close(self) -> None:
        self._storage.close()
        self._stack.__exit__(*sys.exc_info())  # an error, too, for which the nodes print their logs

    @property
    def ports(self) -> list[int]:
        return self.nodes.ports

    def source(self, random: Random) -> tuple[str, dict[str, str]]:
        return "Kafka", self._source

    def manifest(self) -> Manifest:
        with self._lock:
            return self._storage.manifest()

    def wait_for_copies(self, messages: int) -> None:
        deadline = time.monotonic() + COPY_SECONDS
        while sum(map(len, self.places().values())) < messages and time.monotonic() < deadline:
            time.sleep(0.2)

    def places(self) -> Mapping[int, Collection[int]]:
        """As a consumer of Kafka finds them, which reads committed transactions only; without the gaps at their ends."""
        asyncio.run(self._read())
        return self._places

    async def _read(self) -> None:
        """Read all partitions to their ends of now, from where the last call ended."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.kafka.bootstrap,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
        )
        await consumer.start()
        try:
            partitions = [TopicPartition(self.topic, number) for number in self._places]
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            for place in partitions:
                found = self._places[place.partition]
                consumer.seek(place, found[-1] + 1 if found else 0)
            while any([await consumer.position(place) < ends[place] for place in partitions]):
                for place, records in (await consumer.getmany(timeout_ms=READ_WAIT_MS)).items():
                    self._places[place.partition] += [record.offset for record in records]
        finally:
            await consumer.stop()

    def summary(self) -> str:
        return f"cluster: {self.lives}"
