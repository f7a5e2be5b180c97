"""Appends the write sets of a shard's broker to its log, one after the other, each until its outcome is certain."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.shard.log import Outcome, ShardLog
from mqttbroker.cluster.shard.tables_follower import TablesFollower
from sessions.store.interface import Done, ReadDone, StoreError
from sessions.write_set import WriteSet

log = logging.getLogger("mqttbroker.cluster")

APPEND_RETRY: Final = 0.25  # seconds after an append was refused
LOOK_INTERVAL: Final = 0.02  # seconds between two looks whether the outcome of the last append was found
TOO_LARGE: Final = "MESSAGE_TOO_LARGE"


class Committer:
    """The committer of one shard. All methods are for the event loop of the log, but `submit` and `undecided`.

    It waits while ``follower`` has too much to apply. A write set that Kafka refuses is appended again until it is stored, except for one
    that never can be. An append may take ``append_timeout`` seconds; ``max_record`` are the bytes of a record's body.
    """

    def __init__(self, follower: TablesFollower, append_timeout: float, max_record: int) -> None:
        self.done: Done | None = None  # both are called on the thread of the log, or that of the tables
        self.read_done: ReadDone | None = None
        self.end = 0  # offset behind the last committed record, as of the last answer
        self.serving = False
        self._follower = follower
        self._append_timeout = append_timeout
        self._max_record = max_record
        self._submitted: deque[WriteSet] = deque()
        self._since = 0.0  # the write set in front waits; of the loop's clock; 0 = there is none
        self._paused_since = 0.0  # of the loop's clock; 0 = the shard may be served, as far as the log is concerned
        self._lost = False
        self._wake = asyncio.Event()

    def submit(self, write_set: WriteSet) -> None:
        """Take a write set; `wake` follows, on the loop. On any thread."""
        self._submitted.append(write_set)

    def wake(self) -> None:
        self._wake.set()

    @property
    def idle(self) -> bool:
        return not self._submitted

    def undecided(self, now: float, committed_at: float) -> bool:
        """Whether nothing could be committed for longer than an append may take, or a commit waits for so long. On any thread.

        A part of the last one was committed at ``committed_at``.
        """
        latest = now - self._append_timeout
        return 0.0 < self._paused_since < latest or (self._since > 0.0 and max(self._since, committed_at) < latest)

    # -- whether it may ---------------------------------------------------------------

    def serve(self) -> None:
        """Commit from now on."""
        self.serving = True
        self._paused_since = 0.0
        self._wake.set()

    def pause(self) -> None:
        """It is not known whether the shard is owned."""
        self.serving = False
        self._paused_since = asyncio.get_running_loop().time()

    def leave(self) -> None:
        """The shard is owned no more."""
        self.serving = False
        self._paused_since = 0.0
        self._wake.set()

    def lose(self) -> None:
        """Answer nothing more."""
        self._lost = True
        self.leave()

    # -- committing -------------------------------------------------------------------

    async def run(self, shard: ShardLog) -> None:
        """Commit until the shard is lost."""
        while True:
            while not self._submitted or (not self._lost and not (self.serving and shard.may_commit)):
                if self._submitted:
                    self._wait_from_now()
                self._wake.clear()
                await self._wake.wait()
            self._wait_from_now()
            if self._lost:
                return
            await self._follower.room()
            if self._lost:
                return
            write_set = self._submitted[0]
            outcome = Outcome.COMMITTED
            reason = ""
            if write_set.has_changes():
                outcome, reason = await self._commit(shard, encode_body(write_set))
            if outcome is Outcome.DROPPED:
                return
            self._since = 0.0
            self.end = shard.ownership.view.end
            self._submitted.popleft()
            self._answer(write_set, reason)

    def _wait_from_now(self) -> None:
        if self._since == 0.0:
            self._since = asyncio.get_running_loop().time()

    async def _commit(self, shard: ShardLog, body: bytes) -> tuple[Outcome, str]:
        """Append a body until it is stored; refused for good is only one that can never be."""
        while True:
            while not shard.may_commit:
                if self._lost or not shard.holds:
                    return Outcome.DROPPED, ""
                await asyncio.sleep(LOOK_INTERVAL)
            outcome = await shard.commit(body)
            if outcome is not Outcome.REFUSED:
                return outcome, ""
            if shard.reason == TOO_LARGE:
                return outcome, f"the log in Kafka refuses a record of {min(len(body), self._max_record)} bytes: {TOO_LARGE}"
            await asyncio.sleep(APPEND_RETRY)

    def _answer(self, write_set: WriteSet, reason: str) -> None:
        assert self.done is not None and self.read_done is not None
        try:
            self.done(write_set, StoreError(reason) if reason else None)
        except Exception:
            log.exception("event=defect in=store_report")
        if not reason and (write_set.pages or write_set.queries):
            self._follower.read_rows(write_set, self.read_done)
