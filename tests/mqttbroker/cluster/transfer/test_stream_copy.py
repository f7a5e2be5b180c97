"""Each record of a partition gets the offset that it had; the topic is in memory, and gives offsets as Kafka does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mqttbroker.cluster.transfer import stream_copy
from mqttbroker.cluster.transfer.stream_copy import CopyFailure, PartitionCopy, Row, TargetPartition, UnfitRecord
from sessions.message import Message

pytestmark = pytest.mark.one_build

VOID = None  # at an offset of which no reader gets a record


def message(number: int) -> Message:
    return Message("lab/a", b"%d" % number, 1, False, b"", "sensor", number, 0)


class MemoryPartition(TargetPartition):
    """A partition of a topic: payloads, or `VOID` at offsets of which no reader gets a record."""

    def __init__(self) -> None:
        self.start = 0
        self.offsets: list[bytes | None] = []
        self.open = False  # a transaction
        self.transactions = 0

    @property
    def records(self) -> dict[int, bytes]:
        assert not self.open
        return {offset: payload for offset, payload in enumerate(self.offsets) if offset >= self.start and payload is not VOID}

    def _add(self, values: Sequence[bytes | None]) -> int:
        self.offsets += values
        return len(self.offsets) - len(values)

    async def append(self, messages: Sequence[Message]) -> int:
        for index, one in enumerate(messages):
            if one.payload == b"unfit":
                raise UnfitRecord(index, "is too long")
        return self._add([one.payload for one in messages])

    async def append_and_end(self, message: Message) -> int:
        assert not self.open
        self.transactions += 1
        return self._add([message.payload, VOID])

    async def append_void(self, count: int) -> int:
        assert count > 0
        self.transactions += not self.open
        self.open = True
        return self._add([VOID] * count)

    async def end_void(self) -> None:
        assert self.open, "a transaction without a record has no end in Kafka"
        self.open = False
        self._add([VOID])

    async def begin_at(self, offset: int) -> None:
        assert offset > 0 and not self.offsets
        self.offsets = [VOID] * offset
        self.start = offset


async def copied(start: int, end: int, batches: list[list[int]]) -> tuple[MemoryPartition, PartitionCopy]:
    target = MemoryPartition()
    copy = PartitionCopy(target, start)
    for offsets in batches:
        await copy.add([(offset, message(offset)) for offset in offsets])
    await copy.finish(end)
    assert target.records == {offset: b"%d" % offset for offsets in batches for offset in offsets}
    assert len(target.offsets) == copy.end == end
    assert copy.records == sum(map(len, batches))
    return target, copy


@pytest.mark.parametrize(
    ("start", "end", "batches", "transactions", "found_start"),
    [
        (0, 0, [], 0, 0),
        (0, 6, [[0, 1, 2], [3, 4, 5]], 0, 0),
        (7, 9, [[7, 8]], 0, 7),
        (7, 7, [], 0, 7),  # retention has removed all records
        (2, 9, [], 0, 9),  # damage has taken all records
        (0, 5, [[0, 1], [3, 4]], 1, 0),  # between two batches
        (0, 5, [[0, 1, 2, 3]], 1, 0),  # the end
        (0, 5, [[0, 1, 2]], 1, 0),
        (0, 3, [[1, 2]], 0, 1),  # one offset before the first record
        (4, 10, [[7, 8, 9]], 1, 4),
        (0, 12, [[0, 2, 4], [5, 9, 11]], 2, 0),
    ],
)
async def test_records_keep_their_offsets(start: int, end: int, batches: list[list[int]], transactions: int, found_start: int) -> None:
    target, _ = await copied(start, end, batches)
    assert (target.transactions, target.start) == (transactions, found_start)


@pytest.mark.parametrize("seed", range(20))
async def test_any_gaps_are_filled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(stream_copy, "MOST_VOID", chance.choice([2, 3, 10_000_000]))
    start, end = chance.randrange(5), chance.randrange(5, 120)
    share = chance.choice([0.1, 0.5, 0.9])
    kept = [offset for offset in range(start, end) if chance.random() < share]
    batches = []
    while kept:
        size = chance.randrange(1, 12)
        batches.append(kept[:size])
        kept = kept[size:]
    await copied(start, end, batches)


async def test_a_dense_part_needs_one_transaction_for_all_its_gaps() -> None:
    target, _ = await copied(0, 2001, [list(range(0, 2001, 2))])
    assert target.transactions == 1


async def test_a_failure_names_the_offset() -> None:
    rows: list[Row] = [(offset, message(offset)) for offset in range(10, 20)]
    rows[4][1].payload = b"unfit"
    copy = PartitionCopy(MemoryPartition(), 10)
    with pytest.raises(CopyFailure, match="^offset 14: is too long$"):
        await copy.add(rows)
    copy = PartitionCopy(MemoryPartition(), 0)
    with pytest.raises(CopyFailure, match="offset 3 comes behind offset 4"):
        await copy.add([(4, message(4)), (3, message(3)), (9, message(9))])
    target = MemoryPartition()
    copy = PartitionCopy(target, 0)
    await copy.add([(0, message(0)), (1, message(1))])
    target.offsets.append(b"of another program")
    with pytest.raises(CopyFailure, match="offsets 1 to 1: a record got offset 2, not 1: another program writes to the topic"):
        await copy.finish(2)
