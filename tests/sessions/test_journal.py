"""sessions.journal: the contents of a closed batch, and its outcome for gates and entries."""

from __future__ import annotations

import pytest
from support.journal import close_batch

from sessions.journal import (
    GONE,
    LATER_BYTES,
    MESSAGE_OVERHEAD,
    NOT_SENT_AGAIN,
    PENDING,
    ROW_OVERHEAD,
    STORED,
    Entry,
    Gate,
    Journal,
)
from sessions.message import Message
from sessions.readers.partition_offsets import RESERVED, PartitionOffsets
from sessions.row_kinds import OFFSETS, READERS, RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.rows import OffsetsRow, ReaderRow, SessionRow, SubscriptionRow, received_key
from sessions.write_set import PageRequest


def message(payload: bytes = b"x", topic: str = "t") -> Message:
    return Message(topic, payload, 1, False, b"", "p", 1, 0)


def entry(journal: Journal, of: Message, session_id: int = 1, gate: Gate | None = None) -> Entry:
    made = Entry(session_id, of, 1, False, b"")
    journal.add_entry(made, gate)
    return made


def test_a_new_journal_is_idle_and_empty() -> None:
    journal = Journal(True)
    assert journal.writer_idle and not journal.has_pending and journal.size == 0


def test_ids_continue_and_a_message_of_several_entries_is_stored_once() -> None:
    journal = Journal(True, next_message_id=7, next_seq=100)
    shared, sole = message(b"shared"), message(b"sole")
    entries = [entry(journal, shared, 1), entry(journal, shared, 2), entry(journal, sole, 1)]
    assert journal.size == 2 * shared.size + sole.size + 3 * MESSAGE_OVERHEAD
    write_set = close_batch(journal)
    assert [row.id for row in write_set.messages] == [7, 8]
    assert [row[:4] for row in write_set.entries] == [(1, 100, 7, 1), (2, 101, 7, 1), (1, 102, 8, 0)]
    assert not journal.writer_idle and not journal.has_pending
    journal.committed()
    assert journal.writer_idle and journal.size == 0
    assert [one.disk for one in entries] == [STORED] * 3


@pytest.mark.parametrize("shared", [True, False])
def test_a_removed_entry_names_its_message_and_whether_it_is_shared(shared: bool) -> None:
    journal = Journal(True)
    one = message()
    entries = [entry(journal, one, 1)] + ([entry(journal, one, 2)] if shared else [])
    close_batch(journal)
    journal.committed()
    journal.remove_entry(entries[0])
    write_set = close_batch(journal)
    assert write_set.deleted_entries == [(1, 1, 1, 1 if shared else 0)]


def test_an_entry_removed_before_the_batch_closes_is_not_written_and_settles_its_gate() -> None:
    journal = Journal(True)
    gate = Gate()
    one = message()
    gone, left = entry(journal, one, 1, gate), entry(journal, one, 2, gate)
    journal.remove_entry(gone)
    assert (gate.pending, gone.disk, left.disk) == (1, GONE, PENDING)
    assert journal.size == one.size + MESSAGE_OVERHEAD
    write_set = close_batch(journal)
    assert [row[0] for row in write_set.entries] == [2] and write_set.entries[0][3] == 0
    journal.committed()
    assert gate.pending == 0 and not gate.failed


def test_gates_open_with_the_commit_of_their_batch() -> None:
    journal = Journal(True)
    first, second, both = Gate(), Gate(), Gate()
    entry(journal, message(), 1, first)
    journal.wait_for_commit(both)
    close_batch(journal)
    entry(journal, message(), 1, second)
    journal.wait_for_commit(both)
    assert (first.pending, second.pending, both.pending) == (1, 1, 2)
    journal.committed()
    assert (first.pending, second.pending, both.pending) == (0, 1, 1)
    close_batch(journal)
    journal.committed()
    assert (second.pending, both.pending) == (0, 0)


def test_only_stored_entries_are_updated_and_only_once_per_batch() -> None:
    journal = Journal(True)
    one = entry(journal, message())
    one.packet_id = 5
    journal.update_entry(one)
    write_set = close_batch(journal)
    assert write_set.entries[0][7] == 5 and write_set.entry_updates == []
    one.packet_id = 6
    journal.update_entry(one)
    journal.update_entry(one)
    journal.committed()
    assert close_batch(journal).entry_updates == [(6, 0, 1, 1)]
    journal.committed()
    journal.update_entry(one)
    journal.remove_entry(one)
    assert close_batch(journal).entry_updates == []


def test_the_last_operation_on_a_key_counts() -> None:
    journal = Journal(True)
    journal.add_received(1, 10)
    journal.add_received(1, 11)
    journal.remove_received(1, 10)
    journal.save(SUBSCRIPTIONS, SubscriptionRow(1, "a", 1, 1, 0))
    journal.save(SUBSCRIPTIONS, SubscriptionRow(1, "b", 1, 1, 0))
    journal.remove(SUBSCRIPTIONS, (1, "a"))
    journal.set_retained("x", message(b"1", "x"))
    journal.set_retained("x", message(b"2", "x"))
    journal.set_retained("y", message(b"1", "y"))
    journal.set_retained("y", None)
    journal.save(SESSIONS, SessionRow(1, "c", 4, 0, None, None, None, None, None))
    journal.save(SESSIONS, SessionRow(1, "c", 5, 0, None, None, None, None, None))
    write_set = close_batch(journal)
    assert (write_set.received, write_set.deleted_received) == ([received_key(1, 11)], [received_key(1, 10)])
    assert write_set.saved(SUBSCRIPTIONS) == [(1, "b", 1, 1, 0)] and write_set.removed(SUBSCRIPTIONS) == [(1, "a")]
    assert [(row.topic, row.payload) for row in write_set.saved(RETAINED)] == [("x", b"2")]
    assert write_set.removed(RETAINED) == ["y"]
    assert [row.version for row in write_set.saved(SESSIONS)] == [5]


def test_a_packet_id_that_was_removed_and_added_again_is_in_both_lists() -> None:
    journal = Journal(True)
    journal.remove_received(1, 10)
    journal.add_received(1, 10)
    close_batch(journal)
    journal.add_received(1, 10)
    journal.add_received(1, 11)
    journal.failed()
    write_set = close_batch(journal)
    assert (write_set.received, write_set.deleted_received) == ([received_key(1, 10), received_key(1, 11)], [received_key(1, 10)])
    journal.failed()
    write_set = close_batch(journal)
    assert (write_set.received, write_set.deleted_received) == ([], [received_key(1, 10)])


def test_deleting_a_session_removes_its_operations_from_the_batch() -> None:
    journal = Journal(True)
    gate = Gate()
    journal.save(SESSIONS, SessionRow(1, "c", 4, 0, None, None, None, None, None))
    journal.save(SUBSCRIPTIONS, SubscriptionRow(1, "a", 1, 1, 0))
    journal.add_received(1, 10)
    entry(journal, message(), 1, gate)
    kept = entry(journal, message(), 2)
    journal.remove(SESSIONS, 1)
    write_set = close_batch(journal)
    assert gate.pending == 0
    assert write_set.removed(SESSIONS) == [1]
    assert not write_set.saved(SESSIONS) and not write_set.saved(SUBSCRIPTIONS) and not write_set.received
    assert [row[1] for row in write_set.entries] == [kept.seq]


def test_a_failed_batch_refuses_new_entries_and_retries_the_rest() -> None:
    journal = Journal(True)
    stored = entry(journal, message())
    done = entry(journal, message())
    close_batch(journal)
    journal.committed()
    refused, waiting = Gate(), Gate()
    lost = entry(journal, message(), 1, refused)
    journal.remove_entry(done)
    stored.packet_id = 3
    journal.update_entry(stored)
    journal.save(SUBSCRIPTIONS, SubscriptionRow(1, "a", 1, 1, 0))
    journal.save(SUBSCRIPTIONS, SubscriptionRow(1, "b", 1, 1, 0))
    journal.remove_received(1, 10)
    journal.add_received(1, 11)
    journal.remove(SESSIONS, 9)
    journal.set_retained("x", message(b"old", "x"))
    journal.request_page(PageRequest(1, 0, 10, False))
    journal.wait_for_commit(waiting)
    close_batch(journal)
    journal.remove(SUBSCRIPTIONS, (1, "b"))
    journal.set_retained("x", None)
    journal.failed()
    assert journal.counters.commit_failures == 1 and journal.writer_idle and journal.has_pending
    assert refused.failed and waiting.failed and refused.pending == waiting.pending == 0
    assert lost.disk == GONE
    write_set = close_batch(journal)
    assert not write_set.entries and not write_set.messages and not write_set.received
    assert write_set.deleted_entries == [(1, done.seq, done.message.id, 0)]
    assert write_set.entry_updates == [(3, 0, 1, stored.seq)]
    assert write_set.saved(SUBSCRIPTIONS) == [(1, "a", 1, 1, 0)] and write_set.removed(SUBSCRIPTIONS) == [(1, "b")]
    assert write_set.deleted_received == [received_key(1, 10)] and write_set.removed(SESSIONS) == [9]
    assert not write_set.saved(RETAINED) and write_set.removed(RETAINED) == ["x"]
    assert len(write_set.pages) == 1


def session_row(session_id: int, will: bytes = b"") -> SessionRow:
    return SessionRow(session_id, f"c{session_id}", 5, 0, None, will, None, None, None)


def test_a_row_that_may_wait_is_in_the_next_commit() -> None:
    journal = Journal(True)
    journal.save_later(SESSIONS, session_row(1))
    journal.save_later(SUBSCRIPTIONS, SubscriptionRow(1, "a", 1, 1, 0))
    assert not journal.has_pending and journal.size > 0
    journal.set_retained("x", None)
    assert journal.has_pending
    write_set = close_batch(journal)
    assert [row.session_id for row in write_set.saved(SESSIONS)] == [1] and len(write_set.saved(SUBSCRIPTIONS)) == 1
    journal.committed()
    journal.set_retained("x", None)
    journal.save_later(SESSIONS, session_row(2))
    assert journal.has_pending


def test_rows_that_wait_are_written_once_per_second_and_when_they_take_much_memory() -> None:
    journal = Journal(True)
    journal.write_rest()
    assert not journal.has_pending
    journal.save_later(SESSIONS, session_row(1))
    journal.write_rest()
    assert journal.has_pending
    close_batch(journal)
    journal.committed()
    journal.save_later(SESSIONS, session_row(2, b"x" * LATER_BYTES))
    assert journal.has_pending


def test_a_failed_batch_keeps_entries_that_nobody_sends_again() -> None:
    of_others = NOT_SENT_AGAIN.pending  # of journals that other tests of this process gave up
    journal = Journal(True)
    refused, kept = entry(journal, message(), 1, Gate()), entry(journal, message(), 1, NOT_SENT_AGAIN)
    done = entry(journal, message(), 1, NOT_SENT_AGAIN)
    close_batch(journal)
    journal.remove_entry(done)
    later = entry(journal, message())
    journal.failed()
    assert [one.disk for one in (refused, kept, done, later)] == [GONE, PENDING, GONE, PENDING]
    assert [row[1] for row in close_batch(journal).entries] == [kept.seq, later.seq]
    journal.committed()
    assert journal.size == 0 and NOT_SENT_AGAIN.pending == of_others


def test_an_entry_acknowledged_before_the_failure_is_not_refused() -> None:
    journal = Journal(True)
    gate = Gate()
    one = entry(journal, message(), 1, gate)
    close_batch(journal)
    journal.remove_entry(one)
    assert gate.pending == 1
    journal.failed()
    assert gate.pending == 0 and not gate.failed


def test_a_repeated_packet_id_waits_for_the_batch_that_stores_it() -> None:
    journal = Journal(True)
    journal.add_received(1, 10)
    close_batch(journal)
    journal.add_received(1, 11)
    writing, gathering, neither = Gate(), Gate(), Gate()
    journal.wait_for_received(writing, 1, 10)
    journal.wait_for_received(gathering, 1, 11)
    journal.wait_for_received(neither, 1, 12)
    assert (writing.pending, gathering.pending, neither.pending) == (1, 1, 0)
    journal.failed()
    assert writing.failed and not gathering.failed
    close_batch(journal)
    journal.committed()
    assert gathering.pending == 0


def test_streams_keep_the_order_of_their_records() -> None:
    journal = Journal(True)
    messages = [message(b"%d" % n) for n in range(4)]
    for n, one in enumerate(messages):
        journal.append_to_stream("s", n % 2, one)
    assert journal.size == 4 * (messages[0].size + MESSAGE_OVERHEAD)
    assert close_batch(journal).stream_messages == {("s", 0): messages[::2], ("s", 1): messages[1::2]}


def test_a_batch_is_closed_and_settled_in_parts() -> None:
    journal = Journal(True)
    gate, last = Gate(), Gate()
    shared = message()
    entries = [entry(journal, shared, number, gate) for number in range(1, 11)]
    journal.wait_for_commit(last)
    size = journal.size
    journal.begin_closing()
    assert journal.continue_closing(4) is None and journal.closing and not journal.writer_idle
    before, after = entries[1], entries[6]
    journal.remove_entry(before)  # its row is in the write set: the next batch deletes it
    journal.remove_entry(after)  # it has no row yet
    new = entry(journal, message(), 1, gate)
    journal.remove_entry(new)
    assert journal.size == size - shared.size - MESSAGE_OVERHEAD + ROW_OVERHEAD
    assert journal.continue_closing(5) is None
    write_set = journal.continue_closing(5)
    assert write_set is not None and not journal.closing
    assert [row[0] for row in write_set.entries] == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert {row[3] for row in write_set.entries} == {1} and write_set.messages == [shared]
    journal.begin_settling()
    visits = 0
    while journal.settling:
        assert not journal.writer_idle and last.pending == 1
        visits += journal.continue_settling(4)
    assert visits == 2 * 9 and (gate.pending, last.pending) == (0, 0)
    assert journal.writer_idle and journal.size == ROW_OVERHEAD
    assert [key[:2] for key in close_batch(journal).deleted_entries] == [(2, before.seq)]


def test_a_message_is_shared_if_its_next_needed_entry_comes_after_a_part() -> None:
    journal = Journal(True)
    one, two = message(b"1"), message(b"2")
    entries = [entry(journal, found, number) for number, found in enumerate((one, one, one, two, two), 1)]
    journal.remove_entry(entries[1])
    journal.remove_entry(entries[4])
    journal.begin_closing()
    write_set = None
    while write_set is None:
        write_set = journal.continue_closing(1)
    assert [(row[0], row[3]) for row in write_set.entries] == [(1, 1), (3, 1), (4, 0)]
    assert write_set.messages == [one, two]


def test_offsets_are_stored_as_they_are_when_the_batch_closes_and_reserve_after_the_commit() -> None:
    journal = Journal(True)
    offsets = PartitionOffsets(3, 1, 10)
    journal.save_offsets(offsets)
    offsets.leave_out(12)
    journal.save_offsets(offsets)
    write_set = close_batch(journal)
    assert write_set.has_changes()
    assert write_set.saved(OFFSETS) == [OffsetsRow(3, 1, 12, 12 + RESERVED, b"")]
    offsets.leave_out(13)
    journal.save_offsets(offsets)
    assert not offsets.may_hand_over(13)
    journal.committed()
    assert offsets.may_hand_over(13)
    assert close_batch(journal).saved(OFFSETS) == [OffsetsRow(3, 1, 13, 13 + RESERVED, b"")]


def test_readers_and_offsets_of_a_failed_commit_are_written_again() -> None:
    journal = Journal(True)
    offsets = PartitionOffsets(3, 1, 10)
    row = ReaderRow(3, 2, 0, "g", "s", "#", "latest", 0, 0)
    journal.save(READERS, row)
    journal.save_offsets(offsets)
    journal.remove(READERS, 2)
    close_batch(journal)
    journal.failed()
    assert not offsets.may_hand_over(10)
    again = close_batch(journal)
    assert (again.saved(READERS), again.removed(READERS), again.saved(OFFSETS)[0].position) == ([row], [2], 10)
    journal.remove(READERS, 3)
    journal.failed()
    last = close_batch(journal)
    assert (last.saved(READERS), sorted(last.removed(READERS)), last.saved(OFFSETS)) == ([], [2, 3], [])
