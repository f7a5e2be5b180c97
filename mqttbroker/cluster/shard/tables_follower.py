"""The tables of a shard follow its log: what is read is applied on a thread of their own, which alone uses the database."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from mqttbroker.cluster.log.view import ViewState
from mqttbroker.cluster.shard.tables import ShardTables
from mqttbroker.system.defects import report_defect
from sessions.rows import MarkRow
from sessions.store.failure_log import FailureLog
from sessions.store.interface import CorruptStore, ReadDone, Recovered, StoreError, StreamChange
from sessions.write_set import Page, WriteSet

log = logging.getLogger("mqttbroker.cluster")

APPLY_RETRY: Final = 0.25  # seconds after a transaction failed
RECORD_OVERHEAD: Final = 200  # bytes of memory of a record that waits for the tables, beside its body
GIVE_UP_AFTER: Final = 10.0  # seconds in which the tables could not be written, and too much waits for them


class TablesFollower:
    """The follower of one shard. All methods are for the event loop of the log, but for those that say otherwise.

    ``failed`` is called there with the reason why the tables cannot be used any more. A database that is found damaged is put aside at
    the next `open`. More than ``max_unapplied`` bytes that the database does not have are too much.
    """

    def __init__(self, tables: ShardTables, max_unapplied: int, failed: Callable[[str], object]) -> None:
        self.tables = tables
        self.problem = ""  # why the tables cannot be written at the moment
        self.damage = ""  # a record that is none, or that could not be added
        self.marks: dict[int, MarkRow] = {}  # when it is loaded: how far the logs of other shards are read, by log
        self.log_bytes = 0  # read and written since the start
        self.ended = False  # nothing waits for room any more
        self._max_unapplied = max_unapplied
        self._failed = failed
        self._executor = ThreadPoolExecutor(1, "tables")  # all calls of the tables
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = FailureLog()
        self._read: deque[tuple[ViewState, bytes]] = deque()  # what the tables are to get; b"" = no changes
        self._unapplied = 0  # bytes that were read and that the tables do not have

    # -- start and end ------------------------------------------------------------

    async def open(self, shard: int, prepare: Callable[[], Awaitable[None]]) -> ViewState:
        """Open the database behind ``prepare``; one that is damaged is put aside, for the log and its snapshots have everything.

        Returns the state of the log's view from which the log is to be read. Raises `StoreError`.
        """
        self._loop = asyncio.get_running_loop()
        try:
            return await self._open(prepare)
        except CorruptStore as error:
            log.error("event=store_damaged shard=%d reason=%s", shard, error)
            try:
                self.tables.put_aside()
            except OSError as failure:
                raise StoreError(f"{failure.filename}: {failure.strerror}") from None
            return await self._open(prepare)

    async def _open(self, prepare: Callable[[], Awaitable[None]]) -> ViewState:
        await prepare()
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.tables.open)

    def close(self) -> None:
        """Close the database, behind everything that its thread was given. On any thread."""
        self._executor.shutdown()
        self.tables.close()

    def _call(self, what: Callable[[], object]) -> None:
        """Have the loop call something. On the thread of the tables."""
        assert self._loop is not None, "it was not opened"
        with suppress(RuntimeError):  # its thread has ended
            self._loop.call_soon_threadsafe(what)

    def _submit(self, work: Callable[..., object], *arguments: Any) -> Future[Any]:
        """Have the tables' thread do something that nobody awaits."""
        done: Future[Any] = self._executor.submit(work, *arguments)
        report_defect(done, "tables", lambda reason: self._call(lambda: self._failed(reason)))
        return done

    # -- what was read --------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of memory of what the database does not have. On any thread."""
        return self._unapplied + self.tables.size

    @property
    def records(self) -> int:
        """Records that the thread of the tables was not given yet. On any thread."""
        return len(self._read)

    @property
    def is_full(self) -> bool:
        return self.size > self._max_unapplied

    def add(self, state: ViewState, body: bytes) -> None:
        """The body of valid changes was read, and ``state`` is that of the log's view behind it; b"" = no changes."""
        self._read.append((state, body))
        if body:
            self._unapplied += len(body) + RECORD_OVERHEAD
            self.log_bytes += len(body) + RECORD_OVERHEAD

    def _hand_over(self) -> None:
        """Have the tables' thread take what was read."""
        read, self._read = self._read, deque()
        if read:
            size = sum(len(body) + RECORD_OVERHEAD for _, body in read if body)
            self._submit(self._add, read).add_done_callback(lambda _: self._call(lambda: self._added(size)))

    def _added(self, size: int) -> None:
        self._unapplied -= size  # `ShardTables.size` has it now

    def _add(self, read: deque[tuple[ViewState, bytes]]) -> None:
        if self.damage:
            return  # the tables must not have what follows a record that they lack
        try:
            for state, body in read:
                if body:
                    self.tables.changed(state, body)
                else:
                    self.tables.passed(state)
        except Exception as error:
            self.damage = self._reason(error)
            self._call(lambda: self._failed(self.damage))

    # -- applying -------------------------------------------------------------------

    async def run(self, interval: float) -> None:
        """Apply what was read every ``interval`` seconds."""
        while True:
            await asyncio.sleep(interval)
            await self.apply()

    async def apply(self) -> None:
        """Have the tables apply what was read. After an error, the changes that are left wait for the next call, which
        follows after a pause."""
        self._hand_over()
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._apply)
        except (OSError, sqlite3.Error) as error:
            if not self.problem and not self.ended:
                log.warning("event=store_trouble what=%s reason=%s", "the tables cannot be written", error)
            self.problem = f"the tables cannot be written: {error}"
            await asyncio.sleep(APPLY_RETRY)
        else:
            if self.problem:
                log.info("event=store_trouble_over")
            self.problem = ""

    def _apply(self) -> None:
        try:
            self.tables.apply()
        except Exception as error:
            self._note(error)
            raise
        try:
            self.tables.tidy()
        except (OSError, sqlite3.Error) as error:
            self._note(error)
            self._failures.report("tidying failed", error)
        else:
            self._failures.clear()

    async def room(self) -> None:
        """Return when the tables are not too far behind, or it has ended. If they cannot be written, another node may be able to."""
        loop = asyncio.get_running_loop()
        until = loop.time() + GIVE_UP_AFTER
        while self.is_full and not self.ended:
            await self.apply()
            if not self.problem:
                until = loop.time() + GIVE_UP_AFTER
            elif loop.time() > until:
                self._failed(self.problem)

    # -- reading the tables -----------------------------------------------------------

    def load(self, loaded: Callable[[Recovered], object]) -> None:
        """Read all rows that a broker holds in memory, with everything that was added; ``loaded`` is called on the loop."""
        self._hand_over()
        self._submit(self._load, loaded)

    def _load(self, loaded: Callable[[Recovered], object]) -> None:
        try:
            recovered = self.tables.recover()
            self.marks = self.tables.marks
        except Exception as error:
            reason = self._reason(error)
            self.tables.note_damage(error)
            self._call(lambda: self._failed(reason))
        else:
            self._call(lambda: loaded(recovered))

    def read_rows(self, write_set: WriteSet, read_done: ReadDone) -> None:
        """Answer the pages and queries of a write set behind everything that was added; ``read_done`` is called on another thread."""
        self._hand_over()
        self._submit(self._read_rows, write_set, read_done)

    def _read_rows(self, write_set: WriteSet, read_done: ReadDone) -> None:
        failure: Exception | None = None
        try:
            self.tables.apply()
        except Exception as error:
            failure = error
            self._note(error)
        tables = self.tables.tables
        pages: list[Page] = [tables.read_page(one) if failure is None else Page(one.session_id, [], [], failure) for one in write_set.pages]
        for page in pages:
            if page.error is not None and failure is None:
                self._note(page.error)
        for query in write_set.queries:
            if failure is None:
                tables.run_query(query)
        try:
            read_done(write_set, pages)
        except Exception:
            log.exception("event=defect in=store_report")

    def change_streams(self, change: StreamChange) -> None:
        """There are no streams here: they are topics of Kafka. On any thread."""
        self._submit(change, {})

    # -- damage -----------------------------------------------------------------------

    def note_error(self, error: Exception) -> None:
        """Another reader of the database met an error: fail if it means that the database is damaged. On any thread."""
        self._submit(self._note, error)

    def _note(self, error: Exception) -> None:
        """Fail if an error means that the tables are damaged: they are made again at the next start."""
        if self.tables.note_damage(error):
            reason = f"the tables are damaged, and made again at the next start: {self._reason(error)}"
            self._call(lambda: self._failed(reason))

    def _reason(self, error: Exception) -> str:
        """Why the tables cannot be used, in one line."""
        if isinstance(error, StoreError):
            return str(error)
        if not isinstance(error, (OSError, sqlite3.Error)):
            log.error("event=defect in=tables", exc_info=error)
        return f"{self.tables.database.path}: {error}"
