"""The logs of a cluster in memory, in the place of `KafkaLog`, with stores on them; no Kafka broker runs.

A `MemoryTopic` is used by the stores of many nodes, each with a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mqttbroker.cluster.kafka.brokers import KafkaBrokers
from mqttbroker.cluster.kafka.log import Appended, KafkaLog, LogFailure
from mqttbroker.cluster.kafka.reader import LogReader, OnRecord
from mqttbroker.cluster.log.records import Takeover
from mqttbroker.cluster.shard.store import KafkaStore, ShardOnNode, Sizes, Timing

CLUSTER = b"testtest"
TOPIC = "memory"
LOOK_S = 0.005  # between two looks at the log
TIMING = Timing(append_timeout=0.5, lease=0.2, patience=0.2, apply_interval=0.01)


class MemoryTopic:
    """The records of each shard's log. While it is ``away``, no Kafka broker can be reached."""

    def __init__(self, shards: int = 1) -> None:
        self.records: list[list[bytes]] = [[] for _ in range(shards)]
        self.away = False
        self.read = 0  # records that stores have read
        self.lock = threading.Lock()

    def append(self, shard: int, record: bytes) -> int:
        with self.lock:
            self.records[shard].append(record)
            return len(self.records[shard]) - 1


class MemoryLog(KafkaLog):
    def __init__(self, memory: MemoryTopic, append_timeout: float) -> None:
        super().__init__({}, TOPIC, append_timeout)
        self._memory = memory

    async def start(self) -> int:
        if self._memory.away:
            raise LogFailure(f"{TOPIC}: away")
        return len(self._memory.records)

    async def append(self, shard: int, record: bytes) -> Appended:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._append_timeout
        while self._memory.away:
            await asyncio.sleep(LOOK_S)
            if loop.time() > until:
                return Appended(-1, "the log has no leader that can be reached", True)
        return Appended(self._memory.append(shard, record))

    async def ends(self, shards: Sequence[int]) -> dict[int, int]:
        return {} if self._memory.away else {shard: len(self._memory.records[shard]) for shard in shards}

    async def starts(self, shards: Sequence[int]) -> dict[int, int]:
        return {} if self._memory.away else dict.fromkeys(shards, 0)

    def reader(self, starts: dict[int, int], on_record: OnRecord) -> LogReader:
        reader = MemoryReader(self._memory, starts, on_record)
        self._readers.append(reader)
        return reader


class MemoryReader(LogReader):
    def __init__(self, memory: MemoryTopic, starts: dict[int, int], on_record: OnRecord) -> None:
        super().__init__(KafkaBrokers({}, TOPIC), TOPIC, starts, on_record)
        self._memory = memory

    async def _read(self) -> None:
        positions = self._positions
        while True:
            for shard, position in list(positions.items()):
                if shard in self.held or self._memory.away or position >= len(self._memory.records[shard]):
                    continue
                self.ends[shard] = len(self._memory.records[shard])
                self._memory.read += 1
                positions[shard] += 1
                self._on_record(shard, position, self._memory.records[shard][position])
            if self.on_pause is not None:
                self.on_pause()
            if all(position >= len(self._memory.records[shard]) for shard, position in positions.items()) or self.held:
                await asyncio.sleep(LOOK_S)
            else:
                await asyncio.sleep(0)


def memory_store(
    memory: MemoryTopic,
    directory: Path,
    node: str,
    on_lost: Callable[[str], object],
    timing: Timing = TIMING,
    sizes: Sizes = Sizes(),
) -> KafkaStore:
    """The store of shard 0 on the node ``node``."""
    place = ShardOnNode(TOPIC, 0, CLUSTER, node.encode().ljust(8, b"-")[-8:], Takeover(node, "", ""))
    return KafkaStore(MemoryLog(memory, timing.append_timeout), place, directory, on_lost, timing, sizes)
