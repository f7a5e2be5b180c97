"""Hands batches to the threads of the store, and their answers to the event loop."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from mqttbroker.admin.metrics.latency import Latency
from mqttbroker.core.delivery.turns import TURN_WORK
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.server.stream_reads import StreamReads
from sessions.store.disk import is_full
from sessions.store.interface import Store
from sessions.write_set import EntryQuery, Page, WriteSet

log = logging.getLogger("mqttbroker")


class StoreRunner:
    """The store of a broker from `start` to `drain`; ``latency`` measures its commits."""

    def __init__(self, store: Store, latency: Latency, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._latency = latency
        self._loop = loop
        self._stored = asyncio.Event()  # the last batch is answered

    def start(self, scheduler: FlushScheduler, stream_reads: StreamReads) -> None:
        """Start the threads of the store, and give its answers to the commits of the scheduler's broker, and to ``stream_reads``."""
        self._store.start(partial(self._answered, scheduler, stream_reads), partial(self._read_done, scheduler))

    def submit(self, write_set: WriteSet) -> None:
        """Have a batch committed."""
        self._latency.commit_began()
        self._store.submit(write_set)

    def _answered(self, scheduler: FlushScheduler, stream_reads: StreamReads, write_set: WriteSet, error: Exception | None) -> None:
        """Called on the thread that commits."""
        self._latency.commit_ended()
        reason = "" if error is None else str(error) or type(error).__name__
        disk_full = error is not None and is_full(error)
        self._loop.call_soon_threadsafe(self._settle, scheduler, reason, disk_full)
        if write_set.stream_messages and error is None:
            self._loop.call_soon_threadsafe(stream_reads.committed, list(write_set.stream_messages))

    def _settle(self, scheduler: FlushScheduler, reason: str, disk_full: bool) -> None:
        scheduler.update_clock()
        scheduler.broker.commits.answered(reason, disk_full)
        self._stored.set()

    def _read_done(self, scheduler: FlushScheduler, write_set: WriteSet, pages: list[Page]) -> None:
        """Called on the thread of the tables."""
        self._loop.call_soon_threadsafe(self._load, scheduler, write_set.queries, pages)

    @staticmethod
    def _load(scheduler: FlushScheduler, queries: list[EntryQuery], pages: list[Page]) -> None:
        scheduler.update_clock()
        scheduler.broker.commits.read_done(queries, pages)

    async def drain(self, scheduler: FlushScheduler) -> None:
        """Disconnect the clients, write everything that is pending, close the store."""
        broker = scheduler.broker
        journal = broker.journal
        scheduler.update_clock()
        shut_down = broker.clients.shut_down()
        while not shut_down.done or scheduler.flushing:
            scheduler.update_clock()
            shut_down.step(TURN_WORK)
            await asyncio.sleep(0)  # others than clients use the loop, too
        scheduler.flush_all()
        stored = self._stored
        journal.write_rest()
        while not journal.writer_idle or journal.has_pending:
            while broker.turns.step():
                pass
            stored.clear()
            scheduler.write()
            while journal.closing:
                scheduler.write()
            if journal.settling:
                continue
            await stored.wait()
            if broker.commits.error:
                break
        await self._loop.run_in_executor(None, self._store.stop)
        log.info("event=stopped")
