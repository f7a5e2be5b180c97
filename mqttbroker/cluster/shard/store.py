"""The store of a shard: the commit log in Kafka, and the shard's rows in SQLite behind it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from mqttbroker.cluster.kafka.log import KafkaLog, LogFailure
from mqttbroker.cluster.kafka.reader import LogReader
from mqttbroker.cluster.log.records import NO_EPOCH, Takeover
from mqttbroker.cluster.log.view import LogView, ViewState
from mqttbroker.cluster.shard.committer import Committer
from mqttbroker.cluster.shard.log import MAX_RECORD_BYTES, ShardLog
from mqttbroker.cluster.shard.ownership import Ownership, State
from mqttbroker.cluster.shard.tables import ShardTables
from mqttbroker.cluster.shard.tables_follower import TablesFollower
from sessions.rows import MarkRow
from sessions.store.interface import Done, Progress, ReadDone, Recovered, StoreError, StreamChange
from sessions.write_set import WriteSet

log = logging.getLogger("mqttbroker.cluster")

ASSIGN_INTERVAL: Final = 0.2  # seconds
END_INTERVAL: Final = 1.0  # seconds between two looks at the end of the log by a standby
CONNECT_RETRY: Final = 1.0  # seconds until Kafka is tried again at the start


class ShardOnNode(NamedTuple):
    """A shard of a cluster, and the node that is to own it: ``node`` is new for each start."""

    topic: str
    shard: int
    cluster: bytes
    node: bytes
    takeover: Takeover


class Timing(NamedTuple):
    """Seconds: of an append, of an owner's lease, until a living owner is deposed, and between two transactions of the tables."""

    append_timeout: float = 5.0
    lease: float = 0.75
    patience: float = 1.5
    apply_interval: float = 1.0


class Sizes(NamedTuple):
    """Bytes: of a record's body, and of changes that the tables do not have, beyond which commits wait."""

    max_record: int = MAX_RECORD_BYTES
    max_unapplied: int = 268_435_456


class ShardStatus(NamedTuple):
    """How far a store has come: the records before ``end`` were read, ``lag`` follow; ``problem`` is why it commits nothing now."""

    state: State
    end: int
    lag: int
    epoch: int
    epoch_changes: int
    problem: str
    open: bool = True  # the log is being read


class KafkaStore:
    """A `sessions.store.interface.Store` on the shard ``where``, whose log is in ``kafka``; its database is in ``directory``.

    From `follow` on it applies the log, from `own` on it takes the shard over, and then it is loaded: `loaded`. A write set that
    Kafka refuses is appended again until it is stored, except for one that never can be. ``on_lost`` is called, on another thread,
    when another node has taken the shard over, or the log or the tables fail: nothing more is answered then.

    ``prepare(log_start)`` is awaited before the database is opened, on the loop of the log; ``log_start`` is the first offset that the log has.
    It raises `StoreError`.
    """

    def __init__(
        self,
        kafka: KafkaLog,
        where: ShardOnNode,
        directory: Path,
        on_lost: Callable[[str], None],
        timing: Timing = Timing(),
        sizes: Sizes = Sizes(),
        prepare: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.loaded: Future[Recovered] = Future()
        self.first_state = ViewState(0, NO_EPOCH, b"", 0, False)  # as the tables were opened
        self._kafka = kafka
        self._where = where
        self._timing = timing
        self._sizes = sizes
        self._prepare = prepare
        self._on_lost = on_lost
        tables = ShardTables(directory, where.shard, where.cluster)
        self._follower = TablesFollower(tables, sizes.max_unapplied, self._fail)
        self._committer = Committer(self._follower, timing.append_timeout, sizes.max_record)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = threading.Event()  # `_loop` is there
        self._stop = asyncio.Event()
        self._own = False
        self._patience = timing.patience
        self._patient = False  # waits for Kafka
        self._lost = ""
        self._connecting = ""  # why there is no connection to Kafka yet
        self._shard: ShardLog | None = None
        self._connected = False
        self._log_end = 0  # as Kafka told a standby last
        self._parts: set[asyncio.Task[None]] = set()

    # -- before it is a store -----------------------------------------------------

    def follow(self, patient: bool = True) -> None:
        """Start to apply the log to the tables; ``patient``: as soon as Kafka can be reached."""
        if self._thread is None:
            self._patient = patient
            self._thread = threading.Thread(target=self._run_thread, name="log", daemon=True)
            self._thread.start()
            self._running.wait()

    def own(self, patience: float) -> None:
        """Take the shard over; a living owner has so many seconds to release it."""
        self._patience = patience
        self._own = True

    def status(self) -> ShardStatus:
        """On any thread."""
        shard = self._shard
        if shard is None:
            return ShardStatus(State.FOLLOWER, 0, 0, NO_EPOCH, 0, self._lost or self._connecting, False)
        ownership = shard.ownership
        view = ownership.view
        lag = max(0, self._log_end - view.end)
        return ShardStatus(ownership.state, view.end, lag, view.epoch, ownership.epoch_changes, self.problem(shard))

    def problem(self, shard: ShardLog) -> str:
        """Why nothing is committed now; "" if there is no reason."""
        if self._lost:
            return self._lost
        if self.undecided():
            return self._follower.problem or f"the log in Kafka does not answer: {shard.reason or 'its end is not known'}"
        return self._follower.problem

    def undecided(self) -> bool:
        """`Committer.undecided`."""
        loop, shard = self._loop, self._shard
        return loop is not None and shard is not None and self._committer.undecided(loop.time(), shard.committed_at)

    @property
    def damage(self) -> str:
        return self._follower.damage

    @property
    def marks(self) -> dict[int, MarkRow]:
        """When it is loaded: how far the logs of other shards are read, by log."""
        return self._follower.marks

    @property
    def own_end(self) -> int:
        """The offset behind the last committed record, as of the last answer."""
        return self._committer.end

    @property
    def log_bytes(self) -> int:
        """Bytes that were read and written since the start."""
        return self._follower.log_bytes

    def note_error(self, error: Exception) -> None:
        """`TablesFollower.note_error`."""
        self._follower.note_error(error)

    def run_on_log(self, start: Callable[[KafkaLog], Awaitable[None]]) -> None:
        """Run a part that uses the logs on their thread; its task is cancelled when the store stops."""
        assert self._connected, "it is not loaded"
        self._call(lambda: self._start_part(start))

    def _start_part(self, start: Callable[[KafkaLog], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._run_part(start))
        self._parts.add(task)
        task.add_done_callback(self._parts.discard)

    async def _run_part(self, start: Callable[[KafkaLog], Awaitable[None]]) -> None:
        try:
            await start(self._kafka)
        except Exception:
            log.exception("event=defect in=part_of_store")
            self._fail("a part of the core has failed")

    # -- Store ------------------------------------------------------------------

    def recover(self) -> Recovered:
        """Take the shard over if nobody has asked for that, and return its rows. Raises `StoreError`."""
        self._own = True
        self.follow(patient=False)
        try:
            return self.loaded.result()
        except BaseException:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._follower.tables.close(unchanged=True)
            raise

    def start(self, done: Done, read_done: ReadDone) -> None:
        self._committer.done, self._committer.read_done = done, read_done
        self._call(self._start_serving)

    def submit(self, write_set: WriteSet) -> None:
        self._committer.submit(write_set)
        self._call(self._committer.wake)

    def change_streams(self, change: StreamChange) -> None:
        self._follower.change_streams(change)

    def progress(self) -> Progress:
        return Progress(0, self._follower.records, self._follower.size, 0.0)

    def stop(self) -> None:
        """Commit everything submitted, release the shard, apply everything, and close."""
        if self._thread is not None:
            self._call(self._stop.set)
            self._thread.join()
            self._thread = None
        self._follower.close()

    def _call(self, what: Callable[[], object]) -> None:
        assert self._loop is not None, "recover comes first"
        with suppress(RuntimeError):  # its thread has ended
            self._loop.call_soon_threadsafe(what)

    # -- the thread of the log ------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            uvloop.run(self._run())
        except Exception as error:
            log.exception("event=defect in=log_thread")
            self._fail(f"a defect of the store: {error!r}")
        finally:
            self._running.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running.set()
        where, timing, kafka = self._where, self._timing, self._kafka
        try:
            await self._connect(kafka)
            if self._stop.is_set():
                return
            view = LogView(where.shard, where.cluster)
            view.restore(await self._open_tables(kafka))
        except Exception as error:
            if not isinstance(error, StoreError):
                log.exception("event=defect in=start_of_store")
            await kafka.stop()
            self._fail(str(error))
            return
        self._connected = True
        ownership = Ownership(view, where.node, timing.lease)
        shard = self._shard = ShardLog(kafka, ownership, where.takeover, self, self._sizes.max_record)
        shard.start()
        reader = kafka.reader({where.shard: view.end}, lambda _, offset, record: shard.read(offset, record))
        reader.on_pause = lambda: self._pause_reader(reader, shard)
        reader.start()
        work = {asyncio.create_task(one) for one in (
            self._assign(shard), self._committer.run(shard), self._follower.run(timing.apply_interval), self._look(kafka),
        )}  # fmt: skip
        stopping: asyncio.Task[Any] = asyncio.create_task(self._stop.wait())
        while not stopping.done():
            done, _ = await asyncio.wait((stopping, *work), timeout=ASSIGN_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            for task in work & done:
                work.discard(task)
                defect = task.exception()
                if defect is not None:
                    log.error("event=defect in=store", exc_info=defect)
                    self._fail(f"a defect of the store: {defect!r}")
            failure = reader.failure or shard.failure
            if failure:
                self._fail(failure)
        await self._drain(shard)
        for task in (stopping, *work, *self._parts):
            task.cancel()
        await asyncio.gather(stopping, *work, *self._parts, return_exceptions=True)
        await shard.stop()
        await kafka.stop()
        await self._follower.apply()

    async def _connect(self, kafka: KafkaLog) -> None:
        """Connect to Kafka."""
        while not self._stop.is_set():
            try:
                shards = await kafka.start()
            except LogFailure as error:
                if not self._patient:
                    raise StoreError(str(error)) from None
                if self._connecting != str(error):
                    self._connecting = str(error)
                    log.warning("event=kafka_not_reached shard=%d reason=%s", self._where.shard, error)
                await asyncio.sleep(CONNECT_RETRY)
                continue
            self._connecting = ""
            if self._where.shard >= shards:
                raise StoreError(f"{self._where.topic}: has {shards} partitions, none for shard {self._where.shard}")
            return

    async def _open_tables(self, kafka: KafkaLog) -> ViewState:
        """Open the database behind `prepare`."""
        shard = self._where.shard
        starts: dict[int, int] = {}
        while self._prepare is not None and shard not in starts:
            starts = await kafka.starts([shard])
            if self._stop.is_set():
                raise StoreError("the store was stopped before it was open")
            if shard not in starts:
                await asyncio.sleep(CONNECT_RETRY)

        async def prepare() -> None:
            if self._prepare is not None:
                await self._prepare(starts[shard])

        self.first_state = await self._follower.open(shard, prepare)
        return self.first_state

    async def _assign(self, shard: ShardLog) -> None:
        while True:
            if not self._lost:
                shard.assign(self._own, self._patience)
            await asyncio.sleep(ASSIGN_INTERVAL)

    async def _look(self, kafka: KafkaLog) -> None:
        """Look at the end of the log as long as it is another's."""
        while True:
            if self._shard is not None and not self._shard.holds:
                ends = await kafka.ends([self._where.shard])
                self._log_end = ends.get(self._where.shard, self._log_end)
            await asyncio.sleep(END_INTERVAL)

    async def _drain(self, shard: ShardLog) -> None:
        """Return when everything submitted is committed, and the shard released, or lost."""
        committer = self._committer
        while not self._lost and not (committer.idle and shard.may_commit) and committer.serving:
            await asyncio.sleep(0.01)
        self._own = False
        shard.assign(False)
        while shard.holds and not self._lost:
            await asyncio.sleep(0.01)

    def _start_serving(self) -> None:
        assert self._shard is not None
        self._shard.loaded()

    def _fail(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = reason
        self._follower.ended = True
        self._committer.lose()
        if self.loaded.done():
            self._on_lost(reason)
        else:
            self._stop.set()
            self.loaded.set_exception(StoreError(reason))

    def _pause_reader(self, reader: LogReader, shard: ShardLog) -> None:
        """Do not read the log while the tables are too far behind, nor as an owner that knows what is in it: each fetch is work for Kafka."""
        number = self._where.shard
        if shard.knows_all:
            reader.held.add(number)
            reader.skip_to(number, shard.ownership.view.end)
        elif self._follower.is_full:
            reader.held.add(number)
        else:
            reader.held.discard(number)

    # -- ShardEvents ------------------------------------------------------------

    def changed(self, offset: int, body: bytes) -> None:
        assert self._shard is not None
        self._follower.add(self._shard.ownership.view.state, body)

    def load(self) -> None:
        assert self._shard is not None
        state = self._shard.ownership.view.state
        self._committer.end = state.end
        self._follower.add(state, b"")
        self._follower.load(self._set_loaded)

    def _set_loaded(self, recovered: Recovered) -> None:
        if not self._lost:
            self.loaded.set_result(recovered)

    def serve(self) -> None:
        self._committer.serve()

    def pause(self) -> None:
        self._committer.pause()

    def drop(self, reason: str) -> None:
        assert self._shard is not None
        self._committer.leave()
        if self._own:
            self._fail(reason)
        self._shard.dropped()
