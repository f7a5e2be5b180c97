"""One shard's log on one node: reads it, and appends while the node owns the shard."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from enum import Enum
from typing import Final, Protocol

from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.log.records import (
    CHANGES,
    CONTINUED,
    MORE,
    TAKEOVER,
    BadRecord,
    ForeignRecord,
    Header,
    Takeover,
    decode_header,
    decode_takeover,
    encode_record,
    encode_takeover,
)
from mqttbroker.cluster.log.view import CAUSES, OUT_OF_SEQUENCE, VALID
from mqttbroker.cluster.shard.ownership import Do, Ownership, State
from mqttbroker.system.defects import report_defect

log = logging.getLogger("mqttbroker.cluster")

TICK: Final = 0.1  # seconds
PART_WAIT: Final = 0.01  # seconds
ENDS_INTERVAL: Final = 0.5  # seconds between two looks at the end of the log by an owner that appends nothing
MAX_RECORD_BYTES: Final = 921_600  # of a part of a body
READ_TIMEOUT: Final = 2.0  # seconds until the end of the log is asked for again


class Outcome(Enum):
    """The outcome of a commit."""

    COMMITTED = "committed"
    REFUSED = "refused"  # it is not in the log, and never valid there
    DROPPED = "dropped"  # the shard is another node's: nothing may be answered


class ShardEvents(Protocol):
    """The parts of a core that the log of its shard calls. All are called on the event loop of the log, and return at once."""

    def changed(self, offset: int, body: bytes) -> None:
        """The body of valid changes, in the order of the log, whoever wrote it; ``offset`` is that of its last record."""

    def load(self) -> None:
        """The node has taken the shard over: load it with everything `changed` brought, then call `ShardLog.loaded`."""

    def serve(self) -> None:
        """Serve the shard's clients, for the first time or again."""

    def pause(self) -> None:
        """Read from no client of the shard, until `serve` or `drop`."""

    def drop(self, reason: str) -> None:
        """Forget the shard's sessions, then call `ShardLog.dropped`."""


class ShardLog:
    """The log of the shard that ``ownership`` is about. All methods are for the event loop of ``kafka``.

    The owner of a `LogReader` hands it the records by `read`. A body of more than ``max_record_bytes`` is appended in parts.
    """

    def __init__(
        self,
        kafka: KafkaLog,
        ownership: Ownership,
        takeover: Takeover,
        events: ShardEvents,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self.ownership = ownership
        self.committed_at = 0.0  # when the last part was; of the loop's clock
        self.reason = ""  # why the last append was refused, or its outcome is not known
        self._max_record_bytes = max_record_bytes
        self.void = 0  # records that were read and not valid
        self.failure = ""  # why the log is not read, or not written, any more
        self._kafka = kafka
        self._takeover = encode_takeover(takeover)
        self._events = events
        self._shard = ownership.view.shard
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] | None = None
        self._refused = False  # the last append was refused, which is logged once
        self._target: tuple[int, float] | None = None  # the end to read to, and when it was asked for
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        self._start_task(self._tick())

    async def stop(self) -> None:
        """Stop at once: what is under way is as if the process had been killed."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._settle(Outcome.DROPPED)

    # -- for the node -----------------------------------------------------------

    def assign(self, own: bool, patience: float = 0.0) -> None:
        """`Ownership.assign`."""
        self.ownership.assign(own, self._loop.time(), patience)
        self._act()

    def loaded(self) -> None:
        self.ownership.loaded()
        self._act()

    def dropped(self) -> None:
        self.ownership.dropped()
        self._act()

    @property
    def holds(self) -> bool:
        """Whether the node has, or may have, the shard."""
        return self.ownership.state is not State.FOLLOWER

    @property
    def knows_all(self) -> bool:
        """Whether the node is the owner, and the offsets of its appends tell that there are no records of others."""
        return self.ownership.state is State.OWNER and self._target is None

    @property
    def may_commit(self) -> bool:
        return self.ownership.may_append and self._outcome is None

    async def commit(self, body: bytes) -> Outcome:
        """Append changes; returns when the outcome is certain. Only if `may_commit`."""
        size = self._max_record_bytes
        if len(body) <= size:
            return await self._commit_part(body, 0)
        epoch = self.ownership.view.epoch
        for start in range(0, len(body), size):
            while not self.may_commit:  # the outcome of the part before was found by reading
                if not self.holds or self._stopped:
                    return Outcome.DROPPED
                await asyncio.sleep(PART_WAIT)
            if self.ownership.view.epoch != epoch:
                return Outcome.REFUSED  # a takeover, even of itself, ends the body
            flags = (CONTINUED if start else 0) | (MORE if start + size < len(body) else 0)
            outcome = await self._commit_part(body[start : start + size], flags)
            if outcome is not Outcome.COMMITTED:
                return outcome
        return Outcome.COMMITTED

    async def _commit_part(self, part: bytes, flags: int) -> Outcome:
        outcome = self._outcome = self._loop.create_future()
        self._append(self.ownership.append(self._loop.time(), flags), part)
        self._act()
        return await asyncio.shield(outcome)

    # -- reading ------------------------------------------------------------------

    def read(self, offset: int, record: bytes) -> None:
        """The next record of the log; those that are known already are left out."""
        if self._stopped or self.failure or offset < self.ownership.view.end:
            return
        before = self.ownership.view.epoch
        try:
            header = decode_header(record)
            verdict = self.ownership.record(offset, header)
        except ForeignRecord as error:
            self._skip(offset, error)
            return
        except BadRecord as error:
            self.failure = f"{self._kafka.topic}, partition {self._shard}, offset {offset}: {error}"
            log.error("event=log_not_read reason=%s", self.failure)
            return
        if verdict == VALID:
            if header.kind == CHANGES:
                body = self.ownership.view.body(header, record)
                if body is not None:
                    self._events.changed(offset, body)
        else:
            self._count_void(offset, verdict)
        if self.ownership.view.epoch != before:
            self._note_takeover(offset, header, record)
        self._act()
        self._reached()

    def _note_takeover(self, offset: int, header: Header, record: bytes) -> None:
        node, address, version = "", "", ""
        with suppress(BadRecord):  # it is valid without the names, which nothing else needs
            takeover = decode_takeover(record)
            node, address, version = takeover.node, takeover.address, takeover.version
        log.info(
            "event=shard_taken_over shard=%d node=%s address=%s version=%s owner=%s epoch=%d",
            self._shard, node, address, version, header.owner.hex(), offset,
        )  # fmt: skip

    def _skip(self, offset: int, error: ForeignRecord) -> None:
        self.void += 1
        log.error(
            "event=void_record shard=%d topic=%s partition=%d offset=%d cause=%s",
            self._shard, self._kafka.topic, self._shard, offset, error,
        )  # fmt: skip
        self.ownership.view.skip(offset)
        self._act()
        self._reached()

    def _count_void(self, offset: int, verdict: int) -> None:
        self.void += 1
        say = log.error if verdict == OUT_OF_SEQUENCE else log.info
        say("event=void_record shard=%d offset=%d cause=%s", self._shard, offset, CAUSES[verdict])

    def _reached(self) -> None:
        """Report that the log is read to the end that was asked for, if it is."""
        target = self._target
        if target is not None and self.ownership.view.end >= target[0]:
            self._target = None
            self.ownership.read_to(*target)
            self._act()

    async def _read_to_end(self) -> None:
        sent = self._loop.time()
        ends = await self._kafka.ends([self._shard])
        if self._shard in ends:
            target = self._target = (ends[self._shard], sent)
            self._reached()
            while self._target is target and self._loop.time() < sent + READ_TIMEOUT:
                await asyncio.sleep(TICK)
            if self._target is not target:
                return
            self._target = None
        self.ownership.read_failed()
        self._act()

    # -- appending ----------------------------------------------------------------

    def _append(self, header: Header, body: bytes) -> None:
        self._start_task(self._append_and_report(header, body))

    async def _append_and_report(self, header: Header, body: bytes) -> None:
        record = encode_record(header, body)
        answer = await self._kafka.append(self._shard, record)
        ownership = self.ownership
        if answer.offset >= 0:
            self._refused = False
            self.reason = ""
            expected = answer.offset == ownership.view.end
            ownership.appended(answer.offset, header, self._loop.time())
            if expected and header.kind == CHANGES and ownership.view.end == answer.offset + 1:
                whole = ownership.view.with_part(header, body)
                if whole is not None:
                    self._events.changed(answer.offset, whole)
        elif answer.refused:
            self.reason = answer.reason
            if not self._refused:
                log.warning("event=append_refused shard=%d reason=%s", self._shard, answer.reason)
            self._refused = True
            ownership.append_refused(header, answer.reason)
        else:
            self.reason = answer.reason
            log.warning("event=append_unknown shard=%d reason=%s", self._shard, answer.reason)
            ownership.append_unknown(header)
        self._act()
        self._reached()

    # -- what the ownership asks for -------------------------------------------------

    def _act(self) -> None:
        for action in self.ownership.take_actions():
            if action.do is Do.APPEND:
                assert action.header is not None
                self._append(action.header, self._takeover if action.header.kind == TAKEOVER else b"")
            elif action.do is Do.READ_TO_END:
                self._target = None
                self._reading = self._start_task(self._read_to_end())
            elif action.do is Do.COMMITTED:
                self.committed_at = self._loop.time()
                self._settle(Outcome.COMMITTED)
            elif action.do is Do.REFUSED:
                self._settle(Outcome.REFUSED)
            elif action.do is Do.LOAD:
                self._events.load()
            elif action.do is Do.SERVE:
                self._events.serve()
            elif action.do is Do.PAUSE:
                self._events.pause()
            else:
                log.warning("event=shard_dropped shard=%d reason=%s", self._shard, action.reason)
                self._settle(Outcome.DROPPED)
                self._events.drop(action.reason)

    def _settle(self, outcome: Outcome) -> None:
        waiting, self._outcome = self._outcome, None
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)

    async def _tick(self) -> None:
        look_at = 0.0
        while True:
            await asyncio.sleep(TICK)
            now = self._loop.time()
            self.ownership.time(now)
            self._act()
            if self.ownership.state is State.OWNER and not self.ownership.has_pending and now >= look_at:
                look_at = now + ENDS_INTERVAL
                self._start_task(self._look_at_end())

    async def _look_at_end(self) -> None:
        sent = self._loop.time()
        ends = await self._kafka.ends([self._shard])
        if self._shard in ends:
            self.ownership.end_is(ends[self._shard], sent)
            self._act()

    def _start_task(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        report_defect(task, "shard_log", self._fail)
        return task

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
