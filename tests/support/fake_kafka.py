"""Kafka brokers in memory, behind the connections of `mqttbroker.cluster.kafka.brokers`; they answer as Kafka does.

A broker that is ``isolated`` answers nothing, and its connections stay open: its packets are dropped.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.memory_records import MemoryRecords

from mqttbroker.cluster.kafka import brokers as kafka_brokers
from mqttbroker.cluster.kafka.log import EARLIEST, encode_batch

TOPIC = "fake"
STEP_S = 0.005
NOT_LEADER = 6
OUT_OF_RANGE = 1
VERSIONS = {ProduceRequest.API_KEY: (3, 3), FetchRequest.API_KEY: (4, 4), OffsetRequest.API_KEY: (1, 1), MetadataRequest.API_KEY: (5, 5)}


class FakeKafka:
    """``count`` brokers with the numbers 1 and up; each partition is led by ``leaders``. Records are replicated at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 3, partitions: int = 1) -> None:
        self.numbers = range(1, count + 1)
        self.leaders = {partition: partition % count + 1 for partition in range(partitions)}
        self.logs: list[list[bytes]] = [[] for _ in range(partitions)]  # batches of one record
        self.starts = [0] * partitions
        self.isolated: set[int] = set()
        self.refused: set[int] = set()  # nothing listens
        self.fenced: set[int] = set()  # the controller has left them
        self.behind: dict[int, dict[int, int]] = {}  # the leaders that a broker believes in
        self.hears = True  # False: appends are stored, and not answered
        self.opened: list[int] = []
        monkeypatch.setattr(kafka_brokers, "create_conn", self.connect)

    @property
    def connection(self) -> dict[str, Any]:
        return {"bootstrap_servers": [f"fake:{number}" for number in self.numbers]}

    async def connect(self, host: str, port: int, **_: Any) -> FakeConnection:
        if port in self.refused:
            raise KafkaConnectionError(f"{host}:{port}: refused")
        while port in self.isolated:
            await asyncio.sleep(STEP_S)
        self.opened.append(port)
        return FakeConnection(self, port)

    def batch(self, partition: int, record: bytes) -> None:
        """Another producer's batch."""
        self.logs[partition].append(record)

    def fetched(self, partition: int, offset: int, size: int) -> bytes:
        found = bytearray()
        for at, record in enumerate(self.logs[partition][offset:], offset):
            encoded = bytearray(encode_batch(record))
            encoded[:8] = at.to_bytes(8, "big")  # the first offset, which the checksum leaves out
            found += encoded
            if len(found) > size:
                break
        return bytes(found)


class FakeConnection:
    """What `aiokafka.conn.create_conn` returns. It handles one request after the other."""

    def __init__(self, kafka: FakeKafka, number: int) -> None:
        self._kafka = kafka
        self._number = number
        self._open = True
        self._waiting: list[asyncio.Future[Any]] = []
        self._lock = asyncio.Lock()

    def connected(self) -> bool:
        return self._open

    def close(self, reason: Any = None) -> asyncio.Future[None] | None:
        self._open = False
        for future in self._waiting:
            if not future.done():
                future.set_exception(KafkaConnectionError("closed"))
        return None

    async def send(self, request: Any) -> Any:
        if not self._open:
            raise KafkaConnectionError("closed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        handling = asyncio.create_task(self._handle(request.prepare(VERSIONS), future))
        try:
            return await future
        finally:
            self._waiting.remove(future)
            if self._number not in self._kafka.isolated:
                handling.cancel()

    async def _handle(self, request: Any, future: asyncio.Future[Any]) -> None:
        async with self._lock:
            while self._number in self._kafka.isolated:
                await asyncio.sleep(STEP_S)
            kind = {0: self._produce, 1: self._fetch, 2: self._offsets, 3: self._metadata}[request.API_KEY]
            answer = await kind(request)
            while self._number in self._kafka.isolated:
                await asyncio.sleep(STEP_S)
            if answer is not None and not future.done():
                future.set_result(answer)

    def _leads(self, partition: int) -> bool:
        return self._kafka.leaders[partition] == self._number

    async def _produce(self, request: Any) -> Any:
        found = []
        kafka = self._kafka
        for partition, data in request.topics[0][1]:
            if not self._leads(partition):
                found.append((partition, NOT_LEADER, -1))
                continue
            batch = MemoryRecords(data).next_batch()
            assert batch is not None
            kafka.logs[partition] += [record.value or b"" for record in batch]
            found.append((partition, 0, len(kafka.logs[partition]) - 1))
        return SimpleNamespace(topics=[(TOPIC, found)]) if kafka.hears else None

    async def _fetch(self, request: Any) -> Any:
        loop = asyncio.get_running_loop()
        until = loop.time() + request.max_wait_time / 1000
        kafka = self._kafka
        while True:
            found = []
            for partition, offset, size in request.topics[0][1]:
                log = kafka.logs[partition]
                if not self._leads(partition):
                    found.append((partition, NOT_LEADER, -1, -1, [], b""))
                elif not kafka.starts[partition] <= offset <= len(log):
                    found.append((partition, OUT_OF_RANGE, -1, -1, [], b""))
                else:
                    found.append((partition, 0, len(log), len(log), [], kafka.fetched(partition, offset, size)))
            if loop.time() >= until or any(one[1] or one[-1] for one in found):
                return SimpleNamespace(topics=[(TOPIC, found)])
            await asyncio.sleep(STEP_S)

    async def _offsets(self, request: Any) -> Any:
        kafka = self._kafka
        found = []
        for partition, which in request.topics[0][1]:
            offset = kafka.starts[partition] if which == EARLIEST else len(kafka.logs[partition])
            found.append((partition, 0 if self._leads(partition) else NOT_LEADER, -1, offset))
        return SimpleNamespace(topics=[(TOPIC, found)])

    async def _metadata(self, request: Any) -> Any:
        kafka = self._kafka
        leaders = kafka.behind.get(self._number, kafka.leaders)
        brokers = [(number, "fake", number, None) for number in kafka.numbers if number not in kafka.fenced]
        if request.topics != [TOPIC]:
            return SimpleNamespace(brokers=brokers, topics=[(3, request.topics[0], False, [])])
        partitions = [(0, partition, leader, [], [], []) for partition, leader in leaders.items()]
        return SimpleNamespace(brokers=brokers, topics=[(0, TOPIC, False, partitions)])
