"""The feed of a bus: reads the logs of other shards on the thread of the logs, and hands what is valid to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from mqttbroker.cluster.bus.bus import BusRecord, first_mark
from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.kafka.reader import RETRY_AFTER, LogReader
from mqttbroker.cluster.log.body import Section, published_of
from mqttbroker.cluster.log.records import CHANGES, ForeignRecord, decode_header
from mqttbroker.cluster.log.view import CAUSES, OUT_OF_SEQUENCE, VALID, LogView, ViewState
from mqttbroker.system.defects import report_defect
from sessions.rows import MarkRow
from sessions.write_set import TO_ALL, TO_MEMBER

log = logging.getLogger("mqttbroker.cluster")

STOP_CHECK: Final = 0.1  # seconds


class FeedBatches:
    """Makes `BusRecord` out of the records of one log, for the bus of shard ``shard``.

    Records of another log, and bodies that are none, raise `ValueError`, with one line that names the place.
    """

    def __init__(self, shard: int, mark: MarkRow, cluster: bytes) -> None:
        self.void = 0  # records that were read and not valid
        self._shard = shard
        self._log = mark.log
        self._view = LogView(mark.log, cluster)
        self._view.restore(ViewState(mark.offset, mark.epoch, mark.owner, mark.sequence, mark.released))
        self._passed = 0  # bytes of records behind the last one that was returned
        self._first_passed: MarkRow | None = None  # in front of the first of them

    def _mark(self) -> MarkRow:
        """Behind the last record; in front of a body whose last part was not read, for it is read again from the first one on."""
        end, epoch, owner, sequence, released = self._view.state
        return MarkRow(self._log, end, 0, epoch, owner, sequence, released)

    def read(self, offset: int, record: bytes) -> BusRecord | None:
        """The next record; None if the bus needs nothing of it."""
        if offset < self._view.end:
            return None
        before = self._mark()
        try:
            header = decode_header(record)
            verdict = self._view.read(offset, header)
            if verdict != VALID:
                self._count_void(offset, verdict)
            elif header.kind == CHANGES and (body := self._view.body(header, record)) is not None:
                published = published_of(body)
                sections = list(filter(self._concerns, published.sections))
                if sections or published.marks:
                    size = len(record) + self._passed
                    self._passed, self._first_passed = 0, None
                    return BusRecord(before, self._mark(), sections, published.marks, size)
        except ForeignRecord as error:
            # The core of that shard, and its standby, say so.
            self.void += 1
            log.debug("event=void_record shard=%d offset=%d cause=%s", self._log, offset, error)
            self._view.skip(offset)
        except ValueError as error:
            raise ValueError(f"shard {self._log}, offset {offset}: {error}") from None
        self._passed += len(record)
        if self._first_passed is None:
            self._first_passed = before
        return None

    def _concerns(self, section: Section) -> bool:
        return section.destination == TO_ALL or (section.destination == TO_MEMBER and section.partition == self._shard)

    def pass_on(self) -> BusRecord | None:
        """A record without messages for what was read since the last one; None if that is nothing."""
        if self._view.state.end != self._view.end:
            return None  # a body is not finished
        before, size = self._first_passed, self._passed
        self._first_passed, self._passed = None, 0
        return None if before is None else BusRecord(before, self._mark(), [], [], size)

    def _count_void(self, offset: int, verdict: int) -> None:
        self.void += 1
        say = log.error if verdict == OUT_OF_SEQUENCE else log.debug
        say("event=void_record shard=%d offset=%d cause=%s", self._log, offset, CAUSES[verdict])


class LogFeed:
    """Reads the logs of all of ``shards`` shards but ``shard``, from ``marks`` on.

    It is made, started and stopped on the event loop of ``kafka``; `taken`, `end` and `find_ends` are called on that of the broker.
    ``to_broker(function, *arguments)`` has the function called there. ``receive`` takes the records there, ``failed`` the reason why no
    more will come. A log of which more than ``max_bytes / shards`` are not `taken` is read on later.
    """

    def __init__(
        self,
        kafka: KafkaLog,
        shard: int,
        shards: int,
        cluster: bytes,
        marks: dict[int, MarkRow],
        max_bytes: int,
        to_broker: Callable[..., object],
        receive: Callable[[list[BusRecord]], object],
        failed: Callable[[str], object],
    ) -> None:
        self._kafka = kafka
        self._loop = asyncio.get_running_loop()
        self._to_broker = to_broker
        self._receive = receive
        self._failed = failed
        self._limit = max_bytes // shards
        self._batch: list[BusRecord] = []
        self._batches: dict[int, FeedBatches] = {}
        starts: dict[int, int] = {}
        for number in range(shards):
            if number != shard:
                mark = marks.get(number, first_mark(number))
                self._batches[number] = FeedBatches(shard, mark, cluster)
                starts[number] = mark.offset
        self._handed = dict.fromkeys(starts, 0)  # bytes; changed on this thread only
        self._released = dict.fromkeys(starts, 0)  # bytes; changed on the broker's thread only
        self._reader: LogReader = kafka.reader(starts, self._read)
        self._reader.on_pause = self._hand_over
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def void(self) -> int:
        """Records that were read and not valid."""
        return sum(each.void for each in self._batches.values())

    def start(self) -> None:
        if self._batches:
            self._reader.start()
            self._start_task(self._watch())

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader.stop()

    # -- called on the broker's thread ------------------------------------------------

    def taken(self, number: int, size: int) -> None:
        """So many bytes of this log need no memory any more."""
        self._released[number] += size

    def end(self, number: int) -> int:
        """The end of a log, as Kafka told it with the last records; 0 before there were any."""
        return self._reader.ends.get(number, 0)

    def find_ends(self, done: Callable[[dict[int, int]], object]) -> None:
        """Call ``done`` with the ends of all logs, at a time after this call, as soon as Kafka tells all of them."""
        self._loop.call_soon_threadsafe(self._start_find, done)

    # -- reading ----------------------------------------------------------------------

    def _read(self, number: int, offset: int, record: bytes) -> None:
        found = self._batches[number].read(offset, record)
        if found is not None:
            self._add(number, found)

    def _add(self, number: int, found: BusRecord) -> None:
        self._batch.append(found)
        self._handed[number] += found.size

    def _hand_over(self) -> None:
        for number, batches in self._batches.items():
            passed = batches.pass_on()
            if passed is not None:
                self._add(number, passed)
        if self._batch:
            batch, self._batch = self._batch, []
            self._call(self._receive, batch)
        self._reader.held = {number for number, handed in self._handed.items() if handed - self._released[number] > self._limit}

    def _call(self, function: Callable[..., object], argument: object) -> None:
        with suppress(RuntimeError):  # the broker's loop is closed
            self._to_broker(function, argument)

    async def _watch(self) -> None:
        while not self._reader.failure:
            await asyncio.sleep(STOP_CHECK)
        self._call(self._failed, self._reader.failure)

    # -- ends -------------------------------------------------------------------------

    def _start_find(self, done: Callable[[dict[int, int]], object]) -> None:
        self._start_task(self._find_ends(done))

    async def _find_ends(self, done: Callable[[dict[int, int]], object]) -> None:
        ends: dict[int, int] = {}
        while len(ends) < len(self._batches):
            ends.update(await self._kafka.ends([number for number in self._batches if number not in ends]))
            if len(ends) < len(self._batches):
                await asyncio.sleep(RETRY_AFTER)
        self._call(done, ends)

    def _start_task(self, work: object) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        report_defect(task, "log_feed", lambda reason: self._call(self._failed, reason))
