"""The store of a shard: the commit log in Kafka, and the shard's rows in SQLite behind it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Awaitable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Final, List, NamedTuple, Optional

import uvloop

from mqttbroker.cluster.body import encode_body
from mqttbroker.cluster.kafka_log import KafkaLog, LogFailure
from mqttbroker.cluster.log_view import LogView, ViewState
from mqttbroker.cluster.ownership import Ownership, State
from mqttbroker.cluster.records import NO_EPOCH, Takeover
from mqttbroker.cluster.shard_log import MAX_RECORD_BYTES, Outcome, ShardLog
from mqttbroker.cluster.shard_tables import ShardTables
from sessions.rows import MarkRow
from sessions.store.failure_log import FailureLog
from sessions.store.interface import CorruptStore, Done, Progress, ReadDone, Recovered, StoreError, StreamChange
from sessions.write_set import Page, WriteSet

log = logging.getLogger("mqttbroker.cluster")

ASSIGN_INTERVAL: Final = 0.2  # seconds
END_INTERVAL: Final = 1.0  # seconds between two looks at the end of the log by a standby
APPLY_RETRY: Final = 0.25  # seconds after a transaction failed
APPEND_RETRY: Final = 0.25  # seconds after an append was refused
CONNECT_RETRY: Final = 1.0  # seconds until Kafka is tried again at the start
RECORD_OVERHEAD: Final = 200  # bytes of memory of a record that waits for the tables, beside its body
ROOM_WAIT: Final = 0.02  # seconds
GIVE_UP_AFTER: Final = 10.0  # seconds in which the tables could not be written, and too much waits for them
TOO_LARGE: Final = "MESSAGE_TOO_LARGE"


class ShardPlace(NamedTuple):
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
    """A `sessions.store.interface.Store` on the shard ``place``, whose log is in ``kafka``; its database is in ``directory``.

    From `follow` on it applies the log, from `own` on it takes the shard over, and then it is loaded: `loaded`. A write set that
    Kafka refuses is appended again until it is stored, except for one that never can be. ``on_lost`` is called, on another thread,
    when another node has taken the shard over, or the log or the tables fail: nothing more is answered then.

    ``prepare(log_start)`` is awaited before the database is opened, on the loop of the log; ``log_start`` is the first offset that the log has.
    It raises `StoreError`.
    """

    def __init__(
        self,
        kafka: KafkaLog,
        place: ShardPlace,
        directory: Path,
        on_lost: Callable[[str], None],
        timing: Timing = Timing(),
        sizes: Sizes = Sizes(),
        prepare: Optional[Callable[[int], Awaitable[None]]] = None,
    ) -> None:
        self.damage = ""
        self.loaded: Future[Recovered] = Future()
        self.own_end = 0  # offset behind the last committed record, as of the last answer
        self.log_bytes = 0  # read and written since the start
        self.first_state = ViewState(0, NO_EPOCH, b"", 0, False)  # as the tables were opened
        self._kafka = kafka
        self._place = place
        self._timing = timing
        self._sizes = sizes
        self._prepare = prepare
        self._on_lost = on_lost
        self._directory = directory
        self._tables = ShardTables(directory, place.shard, place.cluster)
        self.marks: Dict[int, MarkRow] = {}  # when it is loaded: how far the logs of other shards are read, by log
        self._executor = ThreadPoolExecutor(1, "tables")  # all calls of the tables
        self._thread: Optional[threading.Thread] = None
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._running = threading.Event()  # `_loop` is there
        self._stop = asyncio.Event()
        self._own = False
        self._patience = timing.patience
        self._patient = False  # waits for Kafka
        self._lost = ""
        self._connecting = ""  # why there is no connection to Kafka yet
        self._done: Optional[Done] = None
        self._read_done: Optional[ReadDone] = None
        self._submitted: Deque[WriteSet] = deque()
        self._committing_since = 0.0  # of the loop's clock; 0 = nothing is to be committed
        self._paused_since = 0.0  # of the loop's clock; 0 = the shard may be served, as far as the log is concerned
        self._wake = asyncio.Event()  # for the thread's loop
        self._serving = False
        self._shard: Optional[ShardLog] = None
        self._connected = False
        self._log_end = 0  # as Kafka told a standby last
        self._read: Deque[tuple[ViewState, bytes]] = deque()  # what the tables are to get; b"" = no changes
        self._unapplied = 0  # bytes that were read and that the tables do not have
        self._apply_problem = ""
        self._failures = FailureLog()
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

    def disown(self) -> None:
        """Do not take the shard over. To be called as long as it is not loaded."""
        self._own = False

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
            return self._apply_problem or f"the log in Kafka does not answer: {shard.reason or 'its end is not known'}"
        return self._apply_problem

    def undecided(self) -> bool:
        """Whether nothing could be committed for longer than an append may take, or a commit waits for so long. On any thread."""
        loop, shard = self._loop, self._shard
        if loop is None or shard is None:
            return False
        latest = loop.time() - self._timing.append_timeout
        committing = self._committing_since
        return 0.0 < self._paused_since < latest or (committing > 0.0 and max(committing, shard.committed_at) < latest)

    def note_error(self, error: Exception) -> None:
        """Another reader of the database met an error: end if it means that the database is damaged."""
        self._executor.submit(self._note, error)

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
            self._tables.close(unchanged=True)
            raise

    def start(self, done: Done, read_done: ReadDone) -> None:
        self._done, self._read_done = done, read_done
        self._call(self._start_serving)

    def submit(self, write_set: WriteSet) -> None:
        self._submitted.append(write_set)
        self._call(self._wake.set)

    def change_streams(self, change: StreamChange) -> None:
        """There are no streams here: they are topics of Kafka."""
        self._executor.submit(change, {})

    def progress(self) -> Progress:
        return Progress(0, len(self._read), self._unapplied + self._tables.size, 0.0)

    def stop(self) -> None:
        """Commit everything submitted, release the shard, apply everything, and close."""
        if self._thread is not None:
            self._call(self._stop.set)
            self._thread.join()
            self._thread = None
        self._executor.shutdown()
        self._tables.close()

    def _call(self, what: Callable[[], object]) -> None:
        assert self._loop is not None, "recover comes first"
        with suppress(RuntimeError):  # its thread has ended
            self._loop.call_soon_threadsafe(what)

    # -- the thread of the log ------------------------------------------------------

    def _run_thread(self) -> None:
        uvloop.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running.set()
        place, timing, kafka = self._place, self._timing, self._kafka
        try:
            await self._connect(kafka)
            if self._stop.is_set():
                return
            view = LogView(place.shard, place.cluster)
            view.restore(await self._open_tables(kafka))
        except Exception as error:
            if not isinstance(error, StoreError):
                log.exception("event=defect in=start_of_store")
            await kafka.stop()
            self._fail(str(error))
            return
        self._connected = True
        ownership = Ownership(view, place.node, timing.lease)
        shard = self._shard = ShardLog(kafka, ownership, place.takeover, self, self._sizes.max_record)
        shard.start()
        reader = kafka.reader({place.shard: view.end}, lambda _, offset, record: shard.read(offset, record))
        reader.on_pause = lambda: self._pause_reader(reader.held)
        reader.start()
        work = {asyncio.create_task(one) for one in (self._assign(shard), self._commit(shard), self._follow(), self._look(kafka))}
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
        await self._apply()

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
                    log.warning("event=kafka_not_reached shard=%d reason=%s", self._place.shard, error)
                await asyncio.sleep(CONNECT_RETRY)
                continue
            self._connecting = ""
            if self._place.shard >= shards:
                raise StoreError(f"{self._place.topic}: has {shards} partitions, none for shard {self._place.shard}")
            return

    async def _open_tables(self, kafka: KafkaLog) -> ViewState:
        """Open the database; one that is damaged is put aside, for the log and its snapshots have everything."""
        shard = self._place.shard
        starts: Dict[int, int] = {}
        while self._prepare is not None and shard not in starts:
            starts = await kafka.starts([shard])
        try:
            state = await self._open_prepared(starts.get(shard, 0))
        except CorruptStore as error:
            log.error("event=store_damaged shard=%d reason=%s", shard, error)
            try:
                self._tables.put_aside()
            except OSError as failure:
                raise StoreError(f"{failure.filename}: {failure.strerror}") from None
            state = await self._open_prepared(starts.get(shard, 0))
        self.first_state = state
        return state

    async def _open_prepared(self, log_start: int) -> ViewState:
        if self._prepare is not None:
            await self._prepare(log_start)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._tables.open)

    async def _assign(self, shard: ShardLog) -> None:
        while True:
            if not self._lost:
                shard.assign(self._own, self._patience)
            await asyncio.sleep(ASSIGN_INTERVAL)

    async def _look(self, kafka: KafkaLog) -> None:
        """Look at the end of the log as long as it is another's."""
        while True:
            if self._shard is not None and not self._shard.holds:
                ends = await kafka.ends([self._place.shard])
                self._log_end = ends.get(self._place.shard, self._log_end)
            await asyncio.sleep(END_INTERVAL)

    async def _drain(self, shard: ShardLog) -> None:
        """Return when everything submitted is committed, and the shard released, or lost."""
        while not self._lost and (self._submitted or not shard.may_commit) and self._serving:
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
        if self.loaded.done():
            self._on_lost(reason)
        else:
            self._stop.set()
            self.loaded.set_exception(StoreError(reason))

    async def _commit(self, shard: ShardLog) -> None:
        while True:
            while not self._submitted or (not self._lost and not (self._serving and shard.may_commit)):
                if self._submitted and self._committing_since == 0.0:
                    self._committing_since = asyncio.get_running_loop().time()
                self._wake.clear()
                await self._wake.wait()
            if self._committing_since == 0.0:
                self._committing_since = asyncio.get_running_loop().time()
            if self._lost:
                return
            await self._room()
            if self._lost:
                return
            write_set = self._submitted[0]
            outcome = Outcome.COMMITTED
            reason = ""
            if write_set.has_changes():
                outcome, reason = await self._commit_one(shard, encode_body(write_set))
            if outcome is Outcome.DROPPED:
                return
            self._committing_since = 0.0
            self.own_end = shard.ownership.view.end
            self._submitted.popleft()
            self._answer(write_set, reason)

    async def _commit_one(self, shard: ShardLog, body: bytes) -> tuple[Outcome, str]:
        """Append a body until it is stored; refused for good is only one that can never be."""
        while True:
            while not shard.may_commit:
                if self._lost or not shard.holds:
                    return Outcome.DROPPED, ""
                await asyncio.sleep(ROOM_WAIT)
            outcome = await shard.commit(body)
            if outcome is not Outcome.REFUSED:
                return outcome, ""
            if shard.reason == TOO_LARGE:
                return outcome, f"the log in Kafka refuses a record of {min(len(body), self._sizes.max_record)} bytes: {TOO_LARGE}"
            await asyncio.sleep(APPEND_RETRY)

    async def _room(self) -> None:
        """Return when the tables are not too far behind. If they cannot be written, another node may be able to."""
        loop = asyncio.get_running_loop()
        until = loop.time() + GIVE_UP_AFTER
        while self._unapplied + self._tables.size > self._sizes.max_unapplied and not self._lost:
            await self._apply()
            if not self._apply_problem:
                until = loop.time() + GIVE_UP_AFTER
            elif loop.time() > until:
                self._fail(self._apply_problem)

    def _pause_reader(self, held: set[int]) -> None:
        """Do not read the log on while the tables are too far behind."""
        if self._unapplied + self._tables.size > self._sizes.max_unapplied:
            held.add(self._place.shard)
        else:
            held.discard(self._place.shard)

    def _answer(self, write_set: WriteSet, reason: str) -> None:
        assert self._done is not None
        try:
            self._done(write_set, StoreError(reason) if reason else None)
        except Exception:
            log.exception("event=defect in=store_report")
        if not reason and (write_set.pages or write_set.queries):
            self._hand_over()
            self._executor.submit(self._read_rows, write_set)

    # -- ShardEvents ------------------------------------------------------------

    def changed(self, offset: int, body: bytes) -> None:
        assert self._shard is not None
        self._read.append((self._shard.ownership.view.state, body))
        self._unapplied += len(body) + RECORD_OVERHEAD
        self.log_bytes += len(body) + RECORD_OVERHEAD

    def load(self) -> None:
        assert self._shard is not None
        state = self._shard.ownership.view.state
        self.own_end = state.end
        self._read.append((state, b""))
        self._hand_over()
        self._executor.submit(self._load)

    def serve(self) -> None:
        self._serving = True
        self._paused_since = 0.0
        self._wake.set()

    def pause(self) -> None:
        self._serving = False
        self._paused_since = asyncio.get_running_loop().time()

    def drop(self, reason: str) -> None:
        assert self._shard is not None
        self._serving = False
        self._paused_since = 0.0
        if self._own:
            self._fail(reason)
        self._wake.set()
        self._shard.dropped()

    # -- the thread of the tables -----------------------------------------------------

    def _hand_over(self) -> None:
        """Have the tables' thread take what was read."""
        read, self._read = self._read, deque()
        if read:
            size = sum(len(body) + RECORD_OVERHEAD for _, body in read if body)
            self._executor.submit(self._add, read).add_done_callback(lambda _: self._call(lambda: self._added(size)))

    def _added(self, size: int) -> None:
        self._unapplied -= size  # `ShardTables.size` has it now

    def _add(self, read: Deque[tuple[ViewState, bytes]]) -> None:
        try:
            for state, body in read:
                if body:
                    self._tables.changed(state, body)
                else:
                    self._tables.passed(state)
        except StoreError as error:
            self.damage = str(error)
            self._call(lambda: self._fail(self.damage))

    def _load(self) -> None:
        try:
            recovered = self._tables.recover()
            self.marks = self._tables.marks
        except Exception as error:
            reason = self._reason(error)
            self._tables.note_damage(error)
            self._call(lambda: self._fail(reason))
        else:
            self._call(lambda: self._set_loaded(recovered))

    def _reason(self, error: Exception) -> str:
        """Why the tables cannot be used, in one line."""
        if isinstance(error, StoreError):
            return str(error)
        if not isinstance(error, (OSError, sqlite3.Error)):
            log.error("event=defect in=tables", exc_info=error)
        return f"{self._tables.database.path}: {error}"

    def _set_loaded(self, recovered: Recovered) -> None:
        if not self._lost:
            self.loaded.set_result(recovered)

    def _read_rows(self, write_set: WriteSet) -> None:
        assert self._read_done is not None
        failure: Optional[Exception] = None
        try:
            self._tables.apply()
        except Exception as error:
            failure = error
            self._note(error)
        tables = self._tables.tables
        pages: List[Page] = [
            tables.read_page(one) if failure is None else Page(one.session_id, [], [], failure) for one in write_set.pages
        ]
        for page in pages:
            if page.error is not None and failure is None:
                self._note(page.error)
        for query in write_set.queries:
            if failure is None:
                tables.run_query(query)
        try:
            self._read_done(write_set, pages)
        except Exception:
            log.exception("event=defect in=store_report")

    def _note(self, error: Exception) -> None:
        """End if an error means that the tables are damaged: they are made again at the next start."""
        if self._tables.note_damage(error):
            reason = f"the tables are damaged, and made again at the next start: {self._reason(error)}"
            self._call(lambda: self._fail(reason))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._timing.apply_interval)
            await self._apply()

    async def _apply(self) -> None:
        """Have the tables apply what was read. After an error, the changes that are left wait for the next call, which follows after a pause."""
        self._hand_over()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self._apply_and_tidy)
        except (OSError, sqlite3.Error) as error:
            if not self._apply_problem and not self._lost:
                log.warning("event=store_trouble what=%s reason=%s", "the tables cannot be written", error)
            self._apply_problem = f"the tables cannot be written: {error}"
            await asyncio.sleep(APPLY_RETRY)
        else:
            if self._apply_problem:
                log.info("event=store_trouble_over")
            self._apply_problem = ""

    def _apply_and_tidy(self) -> None:
        try:
            self._tables.apply()
        except Exception as error:
            self._note(error)
            raise
        try:
            self._tables.tidy()
        except (OSError, sqlite3.Error) as error:
            self._note(error)
            self._failures.report("tidying failed", error)
        else:
            self._failures.clear()
