"""sessions.readers.partition_offsets: a partition's offsets against a model with returns, commits and crashes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sessions.readers.partition_offsets import RESERVED, PartitionOffsets, offsets_from_row
from sessions.rows import OffsetsRow


class OffsetsModel(RuleBasedStateMachine):
    """A member that acknowledges and returns messages, a store that commits late, and a broker that crashes."""

    @initialize(start=st.integers(0, 3))
    def begin(self, start: int) -> None:
        self.offsets = PartitionOffsets(1, 0, start)
        self.start = start
        self.left_out: set[int] = set()
        self.handed_over: dict[int, int] = {}  # offset to number of deliveries, over all crashes
        self.in_flight: set[int] = set()
        self.acknowledged: set[int] = set()
        self.rows: list[tuple[OffsetsRow, set[int]]] = []  # not committed, each with what is acknowledged in it
        self.disk = self.offsets.row()
        self.durable: set[int] = set()
        self.offsets.stored(self.disk)

    @rule(count=st.integers(1, 5))
    def hand_over(self, count: int) -> None:
        for _ in range(count):
            offset = self.offsets.next_wanted
            if not self.offsets.may_hand_over(offset):
                return
            assert offset not in self.in_flight and offset not in self.acknowledged
            assert all(before in self.acknowledged | self.left_out | self.in_flight for before in range(self.start, offset))
            known = self.offsets.hand_over(offset)
            before = self.handed_over.get(offset, 0)
            if before:
                assert known > 0  # it is marked
            self.handed_over[offset] = before + 1
            self.in_flight.add(offset)

    @rule(count=st.integers(1, 3))
    def leave_out(self, count: int) -> None:
        if self.offsets.returned == 0:
            first = self.offsets.position
            self.offsets.leave_out(first + count)
            self.left_out.update(range(first, first + count))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.offsets.acknowledge(offset)
        self.in_flight.remove(offset)
        self.acknowledged.add(offset)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.offsets.give_back(offset)
        self.in_flight.remove(offset)

    @rule()
    def give_back_all(self) -> None:
        self.offsets.give_back_all()
        self.in_flight.clear()

    @rule()
    def close_batch(self) -> None:
        self.rows.append((self.offsets.row(), set(self.acknowledged)))

    @precondition(lambda self: self.rows)
    @rule()
    def commit(self) -> None:
        self.disk, self.durable = self.rows.pop(0)
        self.offsets.stored(self.disk)

    @precondition(lambda self: self.rows)
    @rule()
    def fail_commit(self) -> None:
        self.rows.pop(0)

    @rule()
    def crash(self) -> None:
        self.offsets = offsets_from_row(self.disk)
        self.rows.clear()
        self.in_flight.clear()
        self.acknowledged = set(self.durable)
        self.left_out = {offset for offset in self.left_out if offset < self.disk.position}

    @invariant()
    def committed_is_the_lowest_offset_not_acknowledged(self) -> None:
        if not hasattr(self, "offsets"):
            return
        done = self.acknowledged | self.left_out
        lowest = self.start
        while lowest in done:
            lowest += 1
        assert self.offsets.committed == lowest
        assert self.offsets.in_flight == len(self.in_flight)
        assert list(self.offsets.pending) == sorted(self.offsets.pending)


OffsetsModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOffsetsModel = OffsetsModel.TestCase


@given(st.dictionaries(st.integers(0, 60), st.integers(1, 3)))
def test_a_row_has_all_pending_offsets_and_their_deliveries(pending: dict[int, int]) -> None:
    offsets = PartitionOffsets(7, 2, 61)
    offsets.pending = dict(sorted(pending.items()))
    row = offsets.row()
    restored = offsets_from_row(row)
    assert restored.pending == offsets.pending
    assert restored.returned == len(pending) and restored.in_flight == 0
    assert (row.reader_id, row.partition, row.position, row.reserved) == (7, 2, 61, 61 + RESERVED)
    assert restored.row() == row


def test_messages_in_order_are_one_run() -> None:
    offsets = PartitionOffsets(1, 0, 0)
    offsets.stored(offsets.row())
    for offset in range(RESERVED):
        offsets.hand_over(offset)
    assert len(offsets.row().pending) == 24


@pytest.mark.parametrize("pending", [b"x", bytes(24), b"\x09" + bytes(7) + b"\x02" + bytes(7) + b"\x01" + bytes(7)])
def test_a_row_that_is_damaged_is_refused(pending: bytes) -> None:
    with pytest.raises(ValueError):
        offsets_from_row(OffsetsRow(1, 0, 10, 10, pending))


def test_lost_messages_are_no_longer_wanted() -> None:
    offsets = PartitionOffsets(1, 0, 0)
    offsets.stored(offsets.row())
    for offset in range(10):
        offsets.hand_over(offset)
    offsets.give_back_all()
    offsets.leave_out(8)
    assert (offsets.next_wanted, offsets.committed, offsets.returned) == (8, 8, 2)
    offsets.leave_out(20)
    assert (offsets.next_wanted, offsets.committed, offsets.returned) == (20, 20, 0)


def test_after_a_reset_nothing_may_be_handed_over_before_a_commit() -> None:
    offsets = PartitionOffsets(1, 0, 100)
    late = offsets.row()
    offsets.reset(5)
    offsets.stored(late)
    assert not offsets.may_hand_over(5)
    offsets.stored(offsets.row())
    assert offsets.may_hand_over(5) and not offsets.may_hand_over(5 + RESERVED)
    assert offsets.hand_over(5) == 0
