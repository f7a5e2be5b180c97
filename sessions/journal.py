"""The journal: gathers the event loop's changes until the store's writer is free.

At most one batch is with the writer while the next one gathers. Closing a batch turns the operations that are still
needed into one `WriteSet`; an `Entry` whose subscriber acknowledges before that is never written. A `Gate` waits only
for the commit of the batch that holds its data.

The caller hands the write set to a store and reports the outcome by `committed` or `failed`. A batch with very many
entries is closed and settled in parts, between which the event loop serves clients; it is still one commit.
"""

from __future__ import annotations

from typing import Any, Final

from mypy_extensions import mypyc_attr

from sessions.counters import Counters
from sessions.message import Message
from sessions.producers import Producer
from sessions.readers.partition_offsets import PartitionOffsets
from sessions.row_kinds import KINDS, MARKS, OFFSETS, PRODUCERS, READERS, RETAINED, SESSIONS, K, KindChanges, R, RowKind, changes_of_kinds
from sessions.rows import EntryKey, OffsetsRow, ProducerKey, received_key, received_row
from sessions.write_set import BusMessages, EntryQuery, PageRequest, WriteSet

# The changes of a row in a batch.
_REMOVED: Final = 0
_ADDED: Final = 1
_REPLACED: Final = 2  # removed, and added again

# Where an entry is.
MEMORY: Final = 0  # in memory only; it is never stored
PENDING: Final = 1  # in the batch that gathers
STORED: Final = 2  # with the writer, or on disk
GONE: Final = 3  # acknowledged, dropped or refused

# The phases of one QoS 1 or 2 delivery, on the sender's side [MQTT-4.3].
QUEUED: Final = 0
STORING: Final = 1  # the PUBLISH is sent after a commit: of the packet id at QoS 2, of the message at QoS 1
AWAIT_PUBACK: Final = 2
AWAIT_PUBREC: Final = 3
RELEASING: Final = 4  # PUBREC received: the PUBREL is sent after its commit
AWAIT_PUBCOMP: Final = 5

# The phase to store for each phase, at QoS 1 and 2: a phase that waits for a commit is over once that commit is on disk.
_STORED_PHASE_1: Final = bytes((QUEUED, AWAIT_PUBACK, AWAIT_PUBACK, AWAIT_PUBREC, AWAIT_PUBCOMP, AWAIT_PUBCOMP))
_STORED_PHASE_2: Final = bytes((QUEUED, AWAIT_PUBREC, AWAIT_PUBACK, AWAIT_PUBREC, AWAIT_PUBCOMP, AWAIT_PUBCOMP))

CLOSED_AT_ONCE: Final = 4000  # entries that one call of `continue_closing` turns into rows
SETTLED_AT_ONCE: Final = 8000  # entries that one call of `continue_settling` visits

_UNLIMITED: Final = 1 << 60

LATER_BYTES: Final = 64 * 1024  # of rows that wait for another commit

# Memory of a message that waits for the disk, beside its `Message.size`, and of another row without its texts, in bytes.
MESSAGE_OVERHEAD: Final = 200
ROW_OVERHEAD: Final = 150


class Gate:
    """An acknowledgement that waits for writes.

    ``pending`` counts the writes that are not committed. When it comes to 0, `opened` is called; ``failed`` is true if
    any of them failed.
    """

    def __init__(self) -> None:
        self.pending = 0
        self.failed = False

    def settle(self) -> None:
        """One write is committed, or no longer needed."""
        self.pending -= 1
        if self.pending == 0:
            self.opened()

    def fail(self) -> None:
        """One write failed."""
        self.failed = True
        self.settle()

    def opened(self) -> None:
        """Called when no write is pending; a gate without an acknowledgement does nothing."""


# The gate of entries whose message is in the log of another shard already.
IN_ANOTHER_LOG: Final = Gate()

# The gate of entries that nobody waits for and nobody sends again: a failed commit does not refuse them.
NOT_SENT_AGAIN: Final = Gate()


# Not traced by the garbage collector: ending a session removes its entries.
@mypyc_attr(acyclic=True)
class Entry:
    """One message in one session's queue: a row of the queue table.

    ``seq`` orders the entries of a session; ``subscription_ids`` are encoded MQTT 5.0 properties; ``packet_id`` is 0
    until the entry is first sent; ``changed`` is true while an update of the stored row is pending.
    """

    def __init__(self, session_id: int, message: Message, qos: int, retain: bool, subscription_ids: bytes) -> None:
        self.session_id = session_id
        self.message = message
        self.qos = qos
        self.retain = retain
        self.subscription_ids = subscription_ids
        self.seq = 0
        self.packet_id = 0
        self.phase = QUEUED
        self.disk = MEMORY
        self.shared = False
        self.changed = False
        self.gate: Gate | None = None

    def committed(self) -> None:
        """Called when the last change of this entry is on disk; does nothing if no packet waits for it."""

    def refused(self) -> None:
        """Called when the commit of this new entry failed; does nothing if no session counts it."""

    def stored_phase(self) -> int:
        """The phase of its row in the next commit; an imported row may have a phase of another QoS."""
        return _STORED_PHASE_1[self.phase] if self.qos == 1 else _STORED_PHASE_2[self.phase]


# Of all batches in which no row of a kind changes, which spares most commits many empty dictionaries.
_NO_CHANGES: Final = changes_of_kinds()


class _Batch:
    """The operations between two closings; of several on one key the last counts."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.updates: list[Entry] = []
        self.deleted_entries: list[EntryKey] = []
        self.received: dict[object, int] = {}  # by `received_key`
        self.kinds = _NO_CHANGES  # by number; others than these once a row changes
        self.deleted_sessions = self.kinds[SESSIONS.number].removed
        self.streams: dict[tuple[str, int], list[Message]] = {}
        self.bus: BusMessages | None = None  # in a cluster
        self.producers: dict[Producer, list[int]] = {}  # the numbers of their messages in `streams`
        self.offsets: list[PartitionOffsets] = []
        self.offset_rows: list[OffsetsRow] = []  # of `offsets`, when the batch is closed
        self.pages: list[PageRequest] = []
        self.queries: list[EntryQuery] = []
        self.gates: list[Gate] = []
        self.after_failure = False
        self.size = 0
        self.rows = 0  # bytes of other rows than messages, part of `size`
        self.carried = 0  # bytes of rows of failed batches, not part of `size`: they stop no client from being read
        self.empty = True

    def changes_of(self, kind: RowKind[Any, Any]) -> KindChanges:
        """The changes of a kind, to which the caller may add."""
        if self.kinds is _NO_CHANGES:
            self.kinds = changes_of_kinds()
            self.deleted_sessions = self.kinds[SESSIONS.number].removed
        return self.kinds[kind.number]

    def count_row(self, text_size: int) -> None:
        size: int = ROW_OVERHEAD + text_size
        self.size += size
        self.rows += size
        self.empty = False


class Journal:
    """Operations on their way to the store.

    ``gated`` says whether acknowledgements wait for commits (durability ``commit``), ``gated_deliveries`` whether the first
    delivery of an entry at QoS 1 waits for the commit of its message, as in a cluster. `size` is the memory, in bytes, of what
    waits for the disk, in the gathering batch and with the writer.
    """

    def __init__(self, gated: bool, next_message_id: int = 1, next_seq: int = 1, gated_deliveries: bool = False) -> None:
        self.gated = gated
        self.gated_deliveries = gated_deliveries
        self.next_message_id = next_message_id
        self.next_seq = next_seq
        self.counters = Counters()  # of the whole broker
        self.held = False  # the gathering batch is not to be closed yet: it has a part of what belongs into one commit
        self._gathering = _Batch()
        self._writing: _Batch | None = None  # closed, and not settled
        self._written: list[Entry] = []
        self._closing: WriteSet | None = None  # of the batch in `_writing`, until it is complete
        self._first_gathered = next_seq  # the entries of `_gathering` have this seq or a later one
        self._first_unsettled = next_seq  # those with a lower seq are on disk, and were told so
        self._settling = 0  # the next step of settling `_writing`; 0 until it is committed
        self._visited = 0  # entries that the current step has visited

    @property
    def closing(self) -> bool:
        """Whether `continue_closing` is to be called."""
        return self._closing is not None

    @property
    def settling(self) -> bool:
        """Whether `continue_settling` is to be called."""
        return self._settling > 0

    @property
    def size(self) -> int:
        writing = self._writing
        return self._gathering.size + (writing.size if writing is not None else 0)

    @property
    def memory(self) -> int:
        """`size`, and the rows of failed batches that are written again."""
        writing = self._writing
        return self.size + self._gathering.carried + (writing.carried if writing is not None else 0)

    @property
    def writer_idle(self) -> bool:
        """Whether no batch is being closed, with the writer, or being settled."""
        return self._writing is None

    @property
    def has_page_requests(self) -> bool:
        """Whether the gathering batch asks for a page."""
        return bool(self._gathering.pages)

    @property
    def has_pending(self) -> bool:
        """Whether the gathering batch has anything for the store."""
        return not self._gathering.empty

    # -- queue entries ------------------------------------------------------

    def add_entry(self, entry: Entry, gate: Gate | None) -> None:
        """Store a new entry; `gate` waits until it is stored or no longer needed."""
        batch = self._gathering
        entry.seq = self.next_seq
        self.next_seq += 1
        entry.disk = PENDING
        batch.entries.append(entry)
        batch.size += entry.message.size + MESSAGE_OVERHEAD
        batch.empty = False
        if gate is not None:
            gate.pending += 1
            entry.gate = gate

    def delays(self, entry: Entry) -> bool:
        """Whether an entry at QoS 1 is to be sent after `Entry.committed` only.

        An owner of a shard that was stopped may have lost the shard without knowing it: so it sends nothing that the log may
        not have, or its client got the message before earlier ones that the next owner took.
        """
        return self.gated_deliveries and entry.seq >= self._first_unsettled and entry.gate is not IN_ANOTHER_LOG

    def update_entry(self, entry: Entry) -> None:
        """Store the packet id and phase of an entry; `Entry.committed` is called after the commit."""
        if entry.disk == STORED and not entry.changed:
            entry.changed = True
            self._gathering.updates.append(entry)
            self._gathering.count_row(0)

    def remove_entry(self, entry: Entry) -> None:
        """The entry was acknowledged, dropped, or has expired."""
        if entry.disk == PENDING:
            writing = self._writing
            batch = self._gathering if writing is None or entry.seq >= self._first_gathered else writing
            batch.size -= entry.message.size + MESSAGE_OVERHEAD
            self._settle_unwritten(entry)
        elif entry.disk == STORED:
            self.remove_stored_entry(entry.session_id, entry.seq, entry.message.id, entry.shared)
        entry.disk = GONE

    def remove_stored_entry(self, session_id: int, seq: int, message_id: int, shared: bool) -> None:
        """Delete an entry that is on disk, and its message with the last entry that refers to it.

        The caller passes the message id and ``shared``, which it has in memory, so that the store can delete the
        message without looking the entry up. A trigger that does so takes 0.3 µs per entry, a third of the deletion.
        """
        batch = self._gathering
        batch.deleted_entries.append((session_id, seq, message_id, 1 if shared else 0))
        batch.count_row(0)

    def _settle_unwritten(self, entry: Entry) -> None:
        """Drop an entry that was not written and no longer needs to be."""
        entry.disk = GONE
        gate = entry.gate
        if gate is not None:
            entry.gate = None
            gate.settle()

    # -- everything else ----------------------------------------------------

    def add_received(self, session_id: int, packet_id: int) -> None:
        """Store a QoS 2 packet id of the client until it is released."""
        received = self._gathering.received
        key: object = received_key(session_id, packet_id)
        received[key] = _ADDED if received.get(key, _ADDED) == _ADDED else _REPLACED
        self._gathering.count_row(0)

    def remove_received(self, session_id: int, packet_id: int) -> None:
        self._gathering.received[received_key(session_id, packet_id)] = _REMOVED
        self._gathering.count_row(0)

    def set_retained(self, topic: str, message: Message | None) -> None:
        """Store the retained message of a topic; None deletes it."""
        batch = self._gathering
        if message is None:
            batch.changes_of(RETAINED).remove(topic)
            batch.count_row(len(topic))
        else:
            batch.changes_of(RETAINED).save(topic, message)
            batch.count_row(message.size)

    def save(self, kind: RowKind[R, K], row: R) -> None:
        """Store a row in the place of the one with its key."""
        batch = self._gathering
        changes = batch.changes_of(kind)
        key: object = kind.key_of(row)
        size: int = kind.size_of(row)
        before: object = changes.saved.get(key)
        if before is None:
            batch.count_row(size)
        else:
            more: int = size - kind.size_of(before)
            batch.size += more
            batch.rows += more
            batch.empty = False
        changes.save(key, row)

    def save_later(self, kind: RowKind[R, K], row: R) -> None:
        """`save` in a commit that there is anyhow; without one, when such rows take `LATER_BYTES`, or at `write_rest`."""
        empty: bool = self._gathering.empty
        self.save(kind, row)
        batch = self._gathering
        batch.empty = empty and batch.size < LATER_BYTES

    def remove(self, kind: RowKind[R, K], key: K) -> None:
        """Delete the row with a key, and all that it owns: those of a session are its subscriptions, packet ids and entries."""
        assert kind.removed_at >= 0, "rows of this kind are removed with their owners only"
        batch = self._gathering
        batch.changes_of(kind).remove(key)
        batch.count_row(kind.key_size(key))

    def write_rest(self) -> None:
        """Have everything written that waits for another commit. To be called about once a second, and at the end."""
        if self._gathering.size:
            self._gathering.empty = False

    def publish_to_shards(self, message: Message) -> None:
        """Have all other shards of a cluster route a message."""
        self._bus_of(message).to_all.append(message)

    def publish_to_member(self, group: str, shard: int, message: Message) -> None:
        """Have a shard give a message to one of its members of the shared subscription with this full name."""
        members = self._bus_of(message).to_members
        messages = members.get((group, shard))
        if messages is None:
            members[(group, shard)] = [message]
        else:
            messages.append(message)

    def _bus_of(self, message: Message) -> BusMessages:
        """The messages to the bus in the batch that gathers, which will have one more."""
        batch = self._gathering
        batch.size += message.size + MESSAGE_OVERHEAD
        batch.empty = False
        if batch.bus is None:
            batch.bus = BusMessages()
        return batch.bus

    def append_to_stream(self, stream: str, partition: int, message: Message) -> None:
        batch = self._gathering
        batch.size += message.size + MESSAGE_OVERHEAD
        batch.empty = False
        records = batch.streams.get((stream, partition))
        if records is None:
            batch.streams[(stream, partition)] = [message]
        else:
            records.append(message)

    def add_number(self, producer: Producer, number: int) -> bool:
        """Store the number of a message that is appended to a stream; whether it is the producer's first in this
        batch."""
        batch = self._gathering
        numbers = batch.producers.get(producer)
        if numbers is None:
            batch.producers[producer] = [number]
            batch.count_row(producer.size)
            return True
        numbers.append(number)
        return False

    def delete_producer(self, key: ProducerKey, producer: Producer | None) -> None:
        """Delete a producer's numbers; ``producer`` is None if it is on disk only."""
        if producer is not None:
            self._gathering.producers.pop(producer, None)
        self.remove(PRODUCERS, key)

    def save_offsets(self, offsets: PartitionOffsets) -> None:
        """Store the offsets of a reader as they are when this batch is closed."""
        if not offsets.changed:
            offsets.changed = True
            self._gathering.offsets.append(offsets)
            self._gathering.count_row(0)

    def request_page(self, request: PageRequest) -> None:
        """Read a page after the commit of everything gathered so far."""
        self._gathering.pages.append(request)
        self._gathering.empty = False

    def query_entries(self, query: EntryQuery) -> None:
        """Run a query after the commit of everything gathered so far."""
        self._gathering.queries.append(query)
        self._gathering.empty = False

    def wait_for_commit(self, gate: Gate, size: int = 0) -> None:
        """Have a gate wait for the commit of the gathering batch; ``size`` is the memory of a long answer in bytes."""
        if size:
            self._gathering.count_row(size)
        gate.pending += 1
        self._gathering.gates.append(gate)
        self._gathering.empty = False

    def wait_for_received(self, gate: Gate, session_id: int, packet_id: int) -> None:
        """Have a gate wait until a QoS 2 packet id added before is on disk."""
        key: object = received_key(session_id, packet_id)
        for batch in (self._writing, self._gathering):
            if batch is not None and batch.received.get(key, _REMOVED) != _REMOVED:
                gate.pending += 1
                batch.gates.append(gate)

    def wait_for_producer(self, gate: Gate, producer: Producer) -> None:
        """Have a gate wait until the numbers of a producer added before are on disk."""
        for batch in (self._writing, self._gathering):
            if batch is not None and producer in batch.producers:
                gate.pending += 1
                batch.gates.append(gate)

    def wait_for_retained(self, gate: Gate, topic: str) -> None:
        """Have a gate wait until earlier changes of a topic's retained message are on disk."""
        for batch in (self._writing, self._gathering):
            if batch is None:
                continue
            changes = batch.kinds[RETAINED.number]
            if topic in changes.saved or topic in changes.removed:
                gate.pending += 1
                batch.gates.append(gate)

    # -- towards the writer -------------------------------------------------

    def begin_closing(self) -> None:
        """Close the gathering batch; `continue_closing` returns its rows. Only when `writer_idle`."""
        batch = self._gathering
        self._gathering = _Batch()
        self._first_gathered = self.next_seq
        self._writing = batch
        self._visited = 0
        write_set = WriteSet()
        if batch.kinds is not _NO_CHANGES:
            self._add_kinds(batch, write_set)
        deleted = batch.deleted_sessions
        write_set.deleted_entries = batch.deleted_entries
        pair: Any
        removed: list[Any] = write_set.deleted_received
        added: list[Any] = write_set.received
        for pair, change in batch.received.items():
            if deleted and received_row(pair)[0] in deleted:
                continue
            if change != _ADDED:
                removed.append(pair)
            if change != _REMOVED:
                added.append(pair)
        write_set.stream_messages = batch.streams
        write_set.bus = batch.bus
        for producer in batch.producers:
            write_set.rows[PRODUCERS.number].append(producer.row())
        if batch.offsets:
            readers = batch.kinds[READERS.number].removed
            batch.offsets = [each for each in batch.offsets if each.reader_id not in readers]
            for offsets in batch.offsets:
                offsets.changed = False
                batch.offset_rows.append(offsets.row())
            write_set.rows[OFFSETS.number] = list(batch.offset_rows)
        write_set.pages = batch.pages
        write_set.queries = batch.queries
        write_set.after_failure = batch.after_failure
        self._closing = write_set

    def _add_kinds(self, batch: _Batch, write_set: WriteSet) -> None:
        """Add the rows of all kinds, without those that are removed with their owners."""
        for kind in KINDS:
            changes = batch.kinds[kind.number]
            if not changes.saved and not changes.removed:
                continue
            owner = kind.owner
            if owner is not None and kind.removed_with_owner:
                owners = batch.kinds[owner.number].removed
                if owners:
                    changes.leave_out(owners)
            gone = changes.removed
            if kind.numbered and gone:
                write_set.rows[kind.number] = [row for key, row in changes.saved.items() if key not in gone]
            else:
                write_set.rows[kind.number] = list(changes.saved.values())
            write_set.removed_keys[kind.number] = list(gone)

    def continue_closing(self, count: int = CLOSED_AT_ONCE) -> WriteSet | None:
        """Turn the next ``count`` entries into rows; returns all rows if that was the last part."""
        batch = self._writing
        write_set = self._closing
        assert batch is not None and write_set is not None
        if self._visited < len(batch.entries):
            self._add_entry_rows(batch, write_set, count)
            if self._visited < len(batch.entries):
                return None
        for entry in batch.updates:
            entry.changed = False
            if entry.disk == STORED and entry.session_id not in batch.deleted_sessions:
                write_set.entry_updates.append((entry.packet_id, entry.stored_phase(), entry.session_id, entry.seq))
        self._closing = None
        return write_set

    def _add_entry_rows(self, batch: _Batch, write_set: WriteSet, count: int) -> None:
        """Add the rows of the next entries that are still needed, and each of their messages once.

        The entries that are not yet rows may be removed between two calls.
        """
        entries = batch.entries
        written = self._written
        deleted = batch.deleted_sessions
        previous: Message | None = written[len(written) - 1].message if written else None
        index: int = self._visited
        size: int = len(entries)
        end: int = min(size, index + count)
        while index < end:
            entry = entries[index]
            index += 1
            if entry.disk != PENDING:
                continue
            if deleted and entry.session_id in deleted:
                self._settle_unwritten(entry)
                continue
            message = entry.message
            # Entries of one publication are added one after the other, so a message of several has a neighbour.
            following: int = index
            while following < size and entries[following].message is message and entries[following].disk != PENDING:
                following += 1
            entry.shared = entry.shared or previous is message or (following < size and entries[following].message is message)
            previous = message
            if message.id == 0:
                message.id = self.next_message_id
                self.next_message_id += 1
                write_set.messages.append(message)
            write_set.entries.append(
                (
                    entry.session_id,
                    entry.seq,
                    message.id,
                    1 if entry.shared else 0,
                    entry.qos,
                    1 if entry.retain else 0,
                    entry.subscription_ids,
                    entry.packet_id,
                    entry.stored_phase(),
                    message.size,
                    message.expires_at,
                )
            )
            entry.disk = STORED
            written.append(entry)
        self._visited = index

    def committed(self) -> None:
        """The batch with the writer is on disk: settle its gates, and notify its entries."""
        self.begin_settling()
        while self.settling:
            self.continue_settling(_UNLIMITED)

    def begin_settling(self) -> None:
        """The batch with the writer is on disk: `continue_settling` does what `committed` does, in parts."""
        assert self._writing is not None and self._closing is None
        self._settling = 1
        self._visited = 0

    def continue_settling(self, count: int = SETTLED_AT_ONCE) -> int:
        """Visit about ``count`` entries; returns how many were visited. Until the end the next batch is not closed."""
        batch = self._writing
        assert batch is not None
        written = self._written
        visited: int = 0
        if self._settling == 1:
            visited = self._settle_entries(written, count)
        if self._settling == 2:
            # Entries stored earlier are sent before new ones [MQTT-4.6.0-6].
            visited += self._notify_entries(batch.updates, count - visited)
        if self._settling == 3:
            visited += self._notify_written(written, count - visited)
        if self._settling == 4:
            self._writing = None
            self._written = []
            self._settling = 0
            for number, offsets in enumerate(batch.offsets):
                offsets.stored(batch.offset_rows[number])
            for waiting in batch.gates:
                waiting.settle()
        return visited

    def _settle_entries(self, entries: list[Entry], count: int) -> int:
        end: int = min(len(entries), self._visited + count)
        index: int = self._visited
        while index < end:
            entry = entries[index]
            index += 1
            gate = entry.gate
            if gate is not None:
                entry.gate = None
                gate.settle()
        return self._advance(index, len(entries))

    def _notify_entries(self, entries: list[Entry], count: int) -> int:
        end: int = min(len(entries), self._visited + count)
        index: int = self._visited
        while index < end:
            entries[index].committed()
            index += 1
        return self._advance(index, len(entries))

    def _notify_written(self, entries: list[Entry], count: int) -> int:
        end: int = min(len(entries), self._visited + count)
        index: int = self._visited
        while index < end:
            entry = entries[index]
            # From now on it may be sent at once: those before it have been.
            self._first_unsettled = entry.seq + 1
            entry.committed()
            index += 1
        return self._advance(index, len(entries))

    def _advance(self, visited: int, size: int) -> int:
        """Begin the next step if this one has visited all entries; returns how many it visited now."""
        count: int = visited - self._visited
        self._visited = visited
        if visited >= size:
            self._settling += 1
            self._visited = 0
        return count

    def failed(self) -> None:
        """The batch with the writer was rolled back.

        New entries are refused: their gates fail. Everything else goes into the gathering batch, unless a newer
        operation on the same key is there. Entries of messages that nobody sends again are kept; in a batch with marks, all
        without a publisher are.
        """
        batch = self._writing
        assert batch is not None
        written = self._written
        self._writing = None
        self._written = []
        self.counters.commit_failures += 1
        for records in batch.streams.values():
            self.counters.away.store_failed += len(records)
        if batch.bus is not None:
            self.counters.away.store_failed += batch.bus.count
        for producer, numbers in batch.producers.items():
            producer.remove(numbers)
        self._retry(batch)
        # All entries are marked before the first session is notified, because it then searches for an entry to send.
        refused: list[Entry] = []
        kept: list[Entry] = []
        marks = batch.kinds[MARKS.number].saved
        for entry in written:
            gate = entry.gate
            if entry.disk == STORED:
                if gate is NOT_SENT_AGAIN or (marks and (gate is None or gate is IN_ANOTHER_LOG)):
                    kept.append(entry)
                    continue
                refused.append(entry)
            elif gate is not None:
                entry.gate = None
                gate.settle()
            entry.disk = GONE
        if kept:
            self._keep(kept)
        for entry in refused:
            entry.refused()
            gate = entry.gate
            if gate is not None:
                entry.gate = None
                gate.fail()
        for gate in batch.gates:
            gate.fail()

    def _keep(self, entries: list[Entry]) -> None:
        """Put entries of a failed batch before those gathered since."""
        new = self._gathering
        for entry in entries:
            entry.disk = PENDING
            entry.message.id = 0
            new.size += entry.message.size + MESSAGE_OVERHEAD
        new.entries = entries + new.entries

    def _retry(self, old: _Batch) -> None:
        """Put the changes of a failed batch before those gathered since."""
        new = self._gathering
        new.carried += old.carried + old.rows
        if old.kinds is not _NO_CHANGES:
            self._retry_kinds(old)
        pair: Any
        for pair, change in old.received.items():
            # What was added is refused, but not what was removed before it.
            if change != _ADDED and received_row(pair)[0] not in new.deleted_sessions:
                new.received[pair] = _REMOVED if new.received.get(pair, _REMOVED) == _REMOVED else _REPLACED
        updates: list[Entry] = []
        for entry in old.updates:
            if entry.disk == STORED and not entry.changed:
                entry.changed = True
                updates.append(entry)
        new.updates = updates + new.updates
        new.deleted_entries = old.deleted_entries + new.deleted_entries
        for offsets in old.offsets:
            offsets.not_stored()
            if not offsets.changed:
                offsets.changed = True
                new.offsets.append(offsets)
        new.pages = old.pages + new.pages
        new.queries = old.queries + new.queries
        # Only a write shows that the store has recovered.
        new.after_failure = True
        new.empty = False

    def _retry_kinds(self, old: _Batch) -> None:
        new = self._gathering
        for kind in KINDS:
            later = new.changes_of(kind)
            earlier = old.kinds[kind.number]
            owner = kind.owner
            for key in earlier.removed:
                if key not in later.saved:
                    later.removed[key] = True
            for key, row in earlier.saved.items():
                if key not in later.saved and key not in later.removed:
                    later.saved[key] = row
            if owner is not None and kind.removed_with_owner and new.kinds[owner.number].removed:
                later.leave_out(new.kinds[owner.number].removed)
