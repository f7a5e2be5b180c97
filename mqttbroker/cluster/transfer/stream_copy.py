"""Copies the records of a stream's partition into an empty partition of a topic, each to the offset that it had.

Kafka gives offsets one after the other. So an offset without a record gets something that no reader sees: before the first record, a
record that is deleted; behind it, a record of a transaction that is aborted, or the end of a transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from sessions.message import Message

MOST_VOID: Final = 10_000_000  # offsets of one transaction, so that it ends in time

Row = tuple[int, Message]


class CopyFailure(Exception):
    """The partition cannot be copied; the text is one line without the partition's name."""


class UnfitRecord(Exception):
    """Kafka cannot have a record: ``index`` is its place among those that were given, ``reason`` a part of a line."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


class TargetPartition(ABC):
    """A partition of a topic to which nobody else writes. The methods that return an offset return that of the first record.

    All raise `CopyFailure`, those with messages `UnfitRecord`, too.
    """

    @abstractmethod
    async def append(self, messages: Sequence[Message]) -> int:
        """Append records."""

    @abstractmethod
    async def append_and_end(self, message: Message) -> int:
        """Append a record in a transaction of its own; the end of the transaction takes the next offset."""

    @abstractmethod
    async def append_void(self, count: int) -> int:
        """Append records that no reader gets, in a transaction that stays open."""

    @abstractmethod
    async def end_void(self) -> None:
        """Abort the transaction; its end takes the next offset."""

    @abstractmethod
    async def begin_at(self, offset: int) -> None:
        """Have the partition, which has nothing yet, begin at an offset."""


class PartitionCopy:
    """Copies to ``target``: `add` for all records in the order of their offsets, then `finish`. ``start`` is where the partition begins.

    `add` keeps the last record until more is known: a gap of one offset behind it is filled with the end of its transaction.
    """

    def __init__(self, target: TargetPartition, start: int) -> None:
        self.end = 0  # of the records in the target
        self.records = 0
        self._target = target
        self._start = start
        self._held: Row | None = None

    async def add(self, rows: list[Row]) -> None:
        """Raises `CopyFailure`, which names the offset of an unfit record."""
        if not rows:
            return
        if self._held is None:
            # One offset before the first record cannot be filled: there is no record before it to end a transaction with.
            first = rows[0][0]
            await self._begin(first if first == self._start + 1 else self._start)
        else:
            rows = [self._held, *rows]
        self._held = rows[-1]
        await self._copy(rows[:-1], rows[-1][0])

    async def finish(self, end: int) -> None:
        """Let the partition end at ``end``. Raises like `add`."""
        if self._held is None:
            await self._begin(end)
            return
        held, self._held = self._held, None
        await self._copy([held], end)

    async def _begin(self, offset: int) -> None:
        if offset:
            await self._target.begin_at(offset)
        self.end = offset

    async def _copy(self, rows: list[Row], until: int) -> None:
        """Copy these records, and fill the gaps between them and behind them up to ``until``."""
        runs: list[tuple[list[Message], int]] = []  # records one after the other, and the size of the gap behind them
        run: list[Message] = []
        reached = self.end
        for offset, message in rows:
            if offset != reached:
                if offset < reached:
                    raise CopyFailure(f"offset {offset} comes behind offset {reached - 1}")
                runs.append((run, offset - reached))
                run = []
            run.append(message)
            reached = offset + 1
        runs.append((run, until - reached))
        gaps = [number for number, (_, gap) in enumerate(runs) if gap]
        last = gaps[-1] if gaps else -1
        for number, (messages, gap) in enumerate(runs):
            if gap == 1 and len(gaps) == 1:  # no transaction is open whose end could fill it
                await self._append(messages[:-1])
                await self._append_and_end(messages[-1])
            else:
                await self._append(messages)
                if gap:
                    await self._void(gap, number == last)

    async def _append(self, messages: list[Message]) -> None:
        if not messages:
            return
        try:
            self._check(await self._target.append(messages))
        except UnfitRecord as error:
            raise CopyFailure(f"offset {self.end + error.index}: {error.reason}") from None
        except CopyFailure as error:
            raise CopyFailure(f"offsets {self.end} to {self.end + len(messages) - 1}: {error}") from None
        self.end += len(messages)
        self.records += len(messages)

    async def _append_and_end(self, message: Message) -> None:
        try:
            self._check(await self._target.append_and_end(message))
        except UnfitRecord as error:
            raise CopyFailure(f"offset {self.end}: {error.reason}") from None
        self.end += 2
        self.records += 1

    async def _void(self, count: int, ends: bool) -> None:
        """Fill so many offsets; if it ``ends``, no transaction is open afterwards."""
        while count > MOST_VOID + 1:
            await self._void(MOST_VOID, True)
            count -= MOST_VOID
        records = count - 1 if ends else count
        if records:
            self._check(await self._target.append_void(records))
        if ends:
            await self._target.end_void()
        self.end += count

    def _check(self, offset: int) -> None:
        if offset != self.end:
            raise CopyFailure(f"a record got offset {offset}, not {self.end}: another program writes to the topic")
