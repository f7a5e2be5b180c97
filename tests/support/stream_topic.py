"""The topic of a cluster's stream in Kafka, for tests of those that read it."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from aiokafka import AIOKafkaProducer

from bridge_spark.datasource import MqttDataSource, MqttStreamReader
from bridge_spark.log.kafka_record import stream_topic
from mqttbroker.cluster.streams.topics import record_of
from mqttbroker.config.settings import Stream
from sessions.message import Message
from support.kafka import KafkaCluster


class Topic:
    """The topic of the stream ``sensors`` with two partitions, filled by transactions as a core does."""

    def __init__(self, kafka: KafkaCluster, compact: bool = False) -> None:
        self.kafka = kafka
        self._stream = Stream(name="sensors", filters=("#",), partitions=2, compact=compact)
        self.cluster = f"t{uuid.uuid4().hex[:8]}"
        self._create()

    def _create(self) -> None:
        settings = {"retention.ms": "-1"}  # the records of tests are old
        asyncio.run(self.kafka.create_topic(self.name, 2, **settings))

    def create_again(self) -> None:
        """Delete the topic with its records, and create it."""
        asyncio.run(self.kafka.delete_topic(self.name))
        self._create()

    @property
    def name(self) -> str:
        return stream_topic(self.cluster, "sensors")

    def append(self, partition: int, messages: list[Message], commit: bool = True) -> None:
        asyncio.run(self._append(partition, messages, commit))

    async def _append(self, partition: int, messages: list[Message], commit: bool) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap, transactional_id=self.cluster)
        await producer.start()
        try:
            await producer.begin_transaction()
            for one in messages:
                record = record_of(self._stream, one)
                await producer.send_and_wait(self.name, record["value"], record["key"], partition, record["timestamp"], record["headers"])
            await (producer.commit_transaction() if commit else producer.abort_transaction())
        finally:
            await producer.stop()

    def options(self, **more: str) -> dict[str, str]:
        servers = ",".join(self.kafka.bootstrap)
        return {"kafka.bootstrap.servers": servers, "clusterId": self.cluster, "stream": "sensors", **more}

    def rows(self, **more: str) -> list[dict[str, Any]]:
        found = MqttDataSource(self.options(**more))
        reader = found.reader(found.schema())  # type: ignore[arg-type]
        return [row for partition in reader.partitions() for batch in reader.read(partition) for row in batch.to_pylist()]

    def stream_reader(self, **more: str) -> MqttStreamReader:
        found = MqttDataSource(self.options(**more))
        reader = found.streamReader(found.schema())  # type: ignore[arg-type]
        assert isinstance(reader, MqttStreamReader)
        return reader
