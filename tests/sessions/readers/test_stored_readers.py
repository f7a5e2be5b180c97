"""sessions.readers.stored_readers: the rows of readers, by their kind, and what a restart finds."""

from __future__ import annotations

import pytest
from support.journal import close_batch

from sessions.journal import Journal
from sessions.readers.partition_offsets import PartitionOffsets
from sessions.readers.stored_readers import StoredReaders
from sessions.row_kinds import OFFSETS, READERS
from sessions.rows import GROUP_READER, QUEUE_READER, SUBSCRIPTION_READER, OffsetsRow


def test_a_restart_finds_readers_and_offsets() -> None:
    journal = Journal(True)
    readers = StoredReaders(journal)
    session = readers.create(SUBSCRIPTION_READER, 7, "$stream/s/a/#", "s", "a/#", "earliest", 1, 5, [0, 0])
    group = readers.create(GROUP_READER, 0, "g", "s", "", "latest", 0, 6, [10, 20])
    queue = readers.create(QUEUE_READER, 0, "g", "s", "", "", 0, 7, [1])
    group.partitions[1].leave_out(25)
    write_set = close_batch(journal)
    journal.committed()
    restored = StoredReaders(Journal(True))
    for reader_row in write_set.saved(READERS):
        restored.load(reader_row)
    for row in sorted(write_set.saved(OFFSETS)):
        restored.load_offsets(row)
    assert restored.next_id == 4
    for found, made in (
        (restored.subscription(7, "$stream/s/a/#"), session),
        (restored.group("g", "s"), group),
        (restored.queue("g", "s"), queue),
    ):
        assert found is not None and found.row == made.row
        assert [offsets.position for offsets in found.partitions] == [offsets.position for offsets in made.partitions]
    assert restored.groups("s") == 1 and restored.group("g", "t") is None and restored.subscription(8, "g") is None


def test_a_deleted_reader_is_not_written_again() -> None:
    journal = Journal(True)
    readers = StoredReaders(journal)
    group = readers.create(GROUP_READER, 0, "g", "s", "", "", 0, 0, [0])
    readers.delete(group)
    readers.delete(group)
    group.save(group.partitions[0])
    write_set = close_batch(journal)
    assert (write_set.saved(READERS), write_set.saved(OFFSETS), write_set.removed(READERS)) == ([], [], [1])
    assert readers.groups("s") == 0 and readers.of_stream("s") == []


def test_a_partition_that_is_missing_is_refused() -> None:
    journal = Journal(True)
    readers = StoredReaders(journal)
    readers.create(GROUP_READER, 0, "g", "s", "", "", 0, 0, [])
    with pytest.raises(ValueError):
        readers.load_offsets(OffsetsRow(1, 1, 0, 0, b""))


def test_messages_in_a_queue_whose_commit_failed_are_wanted_again() -> None:
    journal = Journal(True)
    offsets = PartitionOffsets(1, 0, 0)
    for offset in range(3):
        offsets.put_into_queue(offset)
    offsets.leave_out(4)
    journal.save_offsets(offsets)
    close_batch(journal)
    offsets.put_into_queue(4)
    journal.save_offsets(offsets)
    journal.failed()
    assert (offsets.next_wanted, offsets.returned, offsets.position) == (0, 3, 5)
    for offset in range(3):
        assert offsets.next_wanted == offset
        offsets.put_into_queue(offset)
    assert offsets.next_wanted == 5 and not offsets.pending
    close_batch(journal)
    journal.failed()
    assert (offsets.next_wanted, offsets.returned) == (0, 4)
