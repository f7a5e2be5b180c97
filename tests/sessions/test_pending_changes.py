"""Changes on their way to the tables: what was added and removed again does not reach them."""

from __future__ import annotations

from sessions.pending_changes import PendingChanges
from sessions.row_kinds import OFFSETS, READERS
from sessions.rows import OffsetsRow, ReaderRow, received_key
from sessions.write_set import WriteSet

PAIR = received_key(1, 10)


def received(*changes: str, salvaged: bool = False) -> tuple[bool, bool]:
    """Whether the packet id is inserted and deleted after these write sets."""
    pending = PendingChanges(salvaged)
    for change in changes:
        write_set = WriteSet()
        if "remove" in change:
            write_set.deleted_received.append(PAIR)
        if "add" in change:
            write_set.received.append(PAIR)
        pending.merge(write_set)
    left = pending.write_set()
    assert pending.size == 200 * len(left.received + left.deleted_received)
    return left.received == [PAIR], left.deleted_received == [PAIR]


def test_a_packet_id_that_was_added_and_removed_again_is_not_written() -> None:
    assert received("add", "remove") == (False, False)
    assert received("add", "remove", "add") == (True, False)
    assert received("add", "remove", "add", "remove") == (False, False)


def test_a_packet_id_that_the_tables_may_have_is_removed() -> None:
    assert received("remove") == (False, True)
    assert received("remove and add") == (True, False)
    assert received("remove and add", "remove") == (False, True)
    assert received("remove", "add", "remove") == (False, True)
    assert received("add", "remove", salvaged=True) == (False, True)


def test_of_many_offsets_of_a_partition_the_last_reach_the_tables() -> None:
    pending = PendingChanges()
    for position in range(100):
        write_set = WriteSet()
        write_set.saved(OFFSETS)[:] = [OffsetsRow(1, 0, position, position, bytes(24)), OffsetsRow(1, 1, 7, 7, b"")]
        pending.merge(write_set)
    assert pending.size == 2 * 200 + 24
    assert pending.write_set().saved(OFFSETS) == [OffsetsRow(1, 0, 99, 99, bytes(24)), OffsetsRow(1, 1, 7, 7, b"")]


def test_nothing_of_a_deleted_reader_is_written() -> None:
    pending = PendingChanges()
    made, deleted = WriteSet(), WriteSet()
    made.saved(READERS)[:] = [ReaderRow(key, 2, 0, f"g{key}", "s", "#", "latest", 0, 0) for key in (1, 2)]
    made.saved(OFFSETS)[:] = [OffsetsRow(key, 0, 5, 5, bytes(24)) for key in (1, 2)]
    deleted.removed(READERS)[:] = [1]
    pending.merge(made)
    pending.merge(deleted)
    left = pending.write_set()
    assert left.removed(READERS) == [1]
    assert left.saved(READERS) == made.saved(READERS)[1:] and left.saved(OFFSETS) == made.saved(OFFSETS)[1:]
