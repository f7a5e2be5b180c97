"""Reads logs, which are partitions of one Kafka topic, in the order of their offsets, and goes on with what is appended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, islice
from typing import Any, Final, NamedTuple

from aiokafka.errors import (
    KafkaError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
    UnsupportedCodecError,
    for_code,
)
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.memory_records import MemoryRecords

from mqttbroker.cluster.kafka.brokers import KafkaBrokers

log = logging.getLogger("mqttbroker.cluster")

RETRY_AFTER: Final = 0.1  # seconds, where nothing was sent yet
FETCH_WAIT: Final = 0.5  # seconds that a Kafka broker waits for the next record
HELD_WAIT: Final = 0.02  # the same while some logs are held, and between two looks at them
LOOK_INTERVAL: Final = 0.25  # seconds between two looks at who leads, while no Kafka broker answers
FETCH_MARGIN: Final = 2.0  # seconds that a Kafka broker's answer may take beyond that
LATE: Final = 0.5  # seconds beyond that after which it is looked whether the Kafka broker still leads
FETCHED_AT_ONCE: Final = 500  # records between two calls of `LogReader.on_pause`
FETCH_BYTES: Final = 16_777_216  # of an answer
LOG_BYTES: Final = 1_048_576  # of one log in an answer
READ_UNCOMMITTED: Final = 0

OnRecord = Callable[[int, int, bytes], None]

_numbers = count(1)


class _Fetch(NamedTuple):
    """A request to one Kafka broker: the offsets that it asks for, by shard."""

    offsets: dict[int, int]
    began: float
    wait: float
    task: asyncio.Task[Any]


class LogReader:
    """Reads the logs of some shards from the offsets ``starts`` on; ``on_record(shard, offset, record)``.

    What Kafka has between the records, or no library for, is handed on as an empty record. ``on_pause`` is called after each call of
    ``on_record`` that no other follows at once. It may change ``held``, the shards whose logs are not read on; it is called at least
    every `HELD_WAIT` while there are any.
    """

    def __init__(self, brokers: KafkaBrokers, topic: str, starts: dict[int, int], on_record: OnRecord) -> None:
        self.failure = ""  # why it reads no more
        self.held: set[int] = set()
        self.ends: dict[int, int] = {}  # of the logs, as Kafka told them with the records that were read last
        self.on_pause: Callable[[], object] | None = None
        self._brokers = brokers
        self._topic = topic
        self._starts = starts
        self._on_record = on_record
        self._positions = dict(starts)  # the next offset of each log
        self._fetched: dict[int, Iterator[tuple[int, bytes]]] = {}  # records that were not handed on
        self._fetches: dict[int, _Fetch] = {}  # under way, by the Kafka broker
        self._refresh_at = 0.0  # of the loop's clock: not before
        self._purpose = f"read-{next(_numbers)}"
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def skip_to(self, shard: int, offset: int) -> None:
        """Go on at an offset behind the next one of a log that is held: the records before it are known."""
        if offset > self._positions[shard]:
            self._positions[shard] = offset
            self._fetched.pop(shard, None)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        try:
            await self._read()
        except OffsetOutOfRangeError as error:
            self.failure = f"{self._topic}: records are missing: {error}"
            log.error("event=log_not_read reason=%s", self.failure)
        except (ValueError, KafkaError) as error:
            self.failure = f"{self._topic}: {error}"
            log.error("event=log_not_read reason=%s", self.failure)
        except Exception as error:
            self.failure = f"{self._topic}: {error!r}"
            log.exception("event=defect in=log_reader")

    async def _read(self) -> None:
        try:
            while True:
                self._start_fetches()
                handed_on = self._hand_on()
                if self.on_pause is not None:
                    self.on_pause()
                if handed_on:
                    await asyncio.sleep(0)
                else:
                    await self._wait()
                self._take_fetches()
        finally:
            for broker, fetch in self._fetches.items():
                fetch.task.cancel()
                self._brokers.give_up(broker, self._purpose)

    # -- fetching -----------------------------------------------------------------

    def _start_fetches(self) -> None:
        """Ask each Kafka broker that leads some of the logs, unless it is asked already or its last answer is not handed on."""
        wanted: dict[int, dict[int, int]] = {}
        busy = set()
        for shard, position in self._positions.items():
            leader = self._brokers.leader(shard)
            if leader is None:
                self._refresh()
            elif shard in self.held:
                continue
            elif shard in self._fetched:
                busy.add(leader)
            else:
                wanted.setdefault(leader, {})[shard] = position
        wait = HELD_WAIT if self.held else FETCH_WAIT
        loop = asyncio.get_running_loop()
        for leader, offsets in wanted.items():
            if leader not in busy and leader not in self._fetches:
                task = loop.create_task(self._fetch(leader, offsets, wait))
                self._fetches[leader] = _Fetch(offsets, loop.time(), wait, task)

    async def _fetch(self, leader: int, offsets: dict[int, int], wait: float) -> Any:
        """The answer; None if there is none."""
        places = [(shard, offset, LOG_BYTES) for shard, offset in offsets.items()]
        request = FetchRequest(int(wait * 1000), 1, FETCH_BYTES, READ_UNCOMMITTED, [(self._topic, places)])
        try:
            return await self._brokers.send(leader, self._purpose, request, wait + FETCH_MARGIN)
        except (KafkaError, OSError):
            await asyncio.sleep(RETRY_AFTER)
            return None

    async def _wait(self) -> None:
        """Return when a Kafka broker has answered, or there may be something else to do."""
        timeout = HELD_WAIT if self.held else LOOK_INTERVAL
        if self._fetches:
            tasks = [fetch.task for fetch in self._fetches.values()]
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(timeout)

    def _take_fetches(self) -> None:
        now = asyncio.get_running_loop().time()
        for broker, fetch in list(self._fetches.items()):
            if fetch.task.done():
                del self._fetches[broker]
                self._take(fetch)
            elif now > fetch.began + fetch.wait + LATE:
                if all(self._brokers.leader(shard) not in (broker, None) for shard in fetch.offsets):
                    del self._fetches[broker]
                    fetch.task.cancel()
                    self._brokers.give_up(broker, self._purpose)
                else:
                    self._refresh()

    def _take(self, fetch: _Fetch) -> None:
        answer = fetch.task.result()
        if answer is None:
            self._refresh()
            return
        for _, partitions in answer.topics:
            for shard, code, end, *_, data in partitions:
                offset = fetch.offsets.get(shard)
                if offset is None or offset != self._positions[shard] or shard in self._fetched:
                    continue  # another Kafka broker has answered meanwhile
                if code:
                    self._failed(shard, offset, code)
                    continue
                self.ends[shard] = end
                if data:
                    self._fetched[shard] = records_of(data, offset)

    def _failed(self, shard: int, offset: int, code: int) -> None:
        kind = for_code(code)
        if kind is OffsetOutOfRangeError:
            raise OffsetOutOfRangeError(f"partition {shard}, offset {offset}")
        if kind is TopicAuthorizationFailedError:
            raise ValueError(f"partition {shard}: {kind.__name__}")
        self._refresh()

    def _refresh(self) -> None:
        """Have it looked who leads the logs, not too often."""
        now = asyncio.get_running_loop().time()
        if now >= self._refresh_at:
            self._refresh_at = now + RETRY_AFTER
            self._brokers.refresh_soon()

    # -- handing on ---------------------------------------------------------------

    def _hand_on(self) -> bool:
        """Hand some records on; whether there were any."""
        found = False
        left = FETCHED_AT_ONCE
        for shard in [shard for shard in self._fetched if shard not in self.held]:
            for offset, record in islice(self._fetched[shard], left):
                self._positions[shard] = offset + 1
                self._on_record(shard, offset, record)
                left -= 1
                found = True
            if left == 0:
                # The other logs come first in the next round.
                self._fetched[shard] = self._fetched.pop(shard)
                break
            del self._fetched[shard]
            found = True  # the next part can be fetched
        return found


def records_of(data: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """The records of a fetched part of a log from the offset ``first`` on. Raises `ValueError` if it is damaged."""
    records = MemoryRecords(data)
    while records.has_next():
        batch = records.next_batch()
        if not batch.validate_crc():
            raise ValueError(f"a batch of records before offset {batch.next_offset} has a wrong checksum")
        if batch.next_offset <= first:
            continue
        last = batch.next_offset - 1
        if batch.is_control_batch:
            yield last, b""
            continue
        try:
            for record in batch:
                if record.offset >= first:
                    yield record.offset, record.value or b""
        except UnsupportedCodecError:
            yield last, b""
