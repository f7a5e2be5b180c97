"""The journal: what the event loop wants on disk, gathered until the writer takes it.

The rule kept here: at most one batch is with the writer while the next one
gathers, everything that is still wanted when a batch is taken leaves in one
`WriteSet` of plain values, and nobody waits on a `Gate` longer than for the
commit of the batch that holds what the gate stands for.  An `Entry` whose
subscriber acknowledges before its batch is taken leaves the batch.

No clock, no thread and no file here: the caller hands the write set to a store
and tells the journal how it went.
"""

from __future__ import annotations

from typing import Dict, Final, List, Optional, Tuple

from mypy_extensions import mypyc_attr

from sessions.counters import Counters
from sessions.message import Message
from sessions.write_set import EntryQuery, PageRequest, WriteSet

# Where an entry is kept.
MEMORY: Final = 0  # nowhere but here
PENDING: Final = 1  # in the batch that gathers now
STORED: Final = 2  # with the writer or on disk
GONE: Final = 3  # acknowledged, dropped or refused

# The phases of one QoS 1 or 2 delivery, as seen from the broker (section 4.3).
QUEUED: Final = 0
STORING: Final = 1  # QoS 2: the PUBLISH leaves after the commit of its packet id
AWAIT_PUBACK: Final = 2
AWAIT_PUBREC: Final = 3
RELEASING: Final = 4  # PUBREC came: the PUBREL leaves after the commit of that fact
AWAIT_PUBCOMP: Final = 5

# What the disk says of a phase: the one that begins when the commit is through.
_STORED_PHASE: Final = bytes((QUEUED, AWAIT_PUBREC, AWAIT_PUBACK, AWAIT_PUBREC, AWAIT_PUBCOMP, AWAIT_PUBCOMP))

# What a message costs beside its payload while it waits for the disk, in bytes.
MESSAGE_OVERHEAD: Final = 200


class Gate:
    """An acknowledgement that waits for the disk.

    ``pending`` counts what is not safe yet.  When the last hold is settled the
    gate opens; one failure makes it a refusal.  Subclasses say what follows.
    """

    def __init__(self) -> None:
        self.pending = 0
        self.failed = False

    def settle(self) -> None:
        """One of the things waited for is safe, or no longer matters."""
        self.pending -= 1
        if self.pending == 0:
            self.opened()

    def fail(self) -> None:
        """One of the things waited for could not be written."""
        self.failed = True
        self.settle()

    def opened(self) -> None:
        """Every hold is settled; `failed` tells how it went."""


# The garbage collector passes entries over: whoever ends a session lets go of its entries.
@mypyc_attr(acyclic=True)
class Entry:
    """One message in one session's queue, the unit the queue table holds.

    ``seq`` orders the entries of a session; ``subscription_ids`` are encoded
    MQTT 5.0 properties; ``packet_id`` is 0 until the entry was first sent.
    """

    def __init__(
        self, session_id: int, message: Message, qos: int, retain: bool, subscription_ids: bytes
    ) -> None:
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
        self.gate: Optional[Gate] = None

    def committed(self) -> None:
        """What this entry waited for is on disk."""

    def refused(self) -> None:
        """The batch that should have kept this entry failed."""


class _Batch:
    """What is gathered between two takes."""

    def __init__(self) -> None:
        self.entries: List[Entry] = []
        self.updates: List[Entry] = []
        self.deletes: List[Tuple[int, int]] = []
        self.sole_messages: List[int] = []
        self.shared_messages: Dict[int, bool] = {}
        self.received: Dict[Tuple[int, int], bool] = {}
        self.retained: Dict[str, Optional[Message]] = {}
        self.sessions: Dict[int, Tuple[object, ...]] = {}
        self.ended: Dict[int, bool] = {}
        self.subscriptions: Dict[Tuple[int, str], Optional[Tuple[object, ...]]] = {}
        self.streams: Dict[Tuple[str, int], List[Message]] = {}
        self.pages: List[PageRequest] = []
        self.listings: List[EntryQuery] = []
        self.gates: List[Gate] = []
        self.probe = False
        self.size = 0
        self.empty = True


class Journal:
    """Operations on their way to the store.

    ``gated`` tells whether acknowledgements wait for commits (durability
    ``commit``).  `size` is the memory, in bytes, of messages that wait for the
    disk, those that the writer has included.
    """

    def __init__(self, gated: bool, next_message_id: int = 1, next_seq: int = 1) -> None:
        self.gated = gated
        self.next_message_id = next_message_id
        self.next_seq = next_seq
        self.counters = Counters()  # of the whole broker
        self._gathering = _Batch()
        self._writing: Optional[_Batch] = None
        self._written: List[Entry] = []

    @property
    def size(self) -> int:
        writing = self._writing
        return self._gathering.size + (writing.size if writing is not None else 0)

    @property
    def writer_idle(self) -> bool:
        """Whether the writer has no batch of ours."""
        return self._writing is None

    @property
    def has_page_requests(self) -> bool:
        """Whether somebody waits for a page."""
        return bool(self._gathering.pages)

    @property
    def has_pending(self) -> bool:
        """Whether a take would bring anything."""
        return not self._gathering.empty

    # -- queue entries ------------------------------------------------------

    def add_entry(self, entry: Entry, gate: Optional[Gate]) -> None:
        """Keep a new entry; `gate` stays shut until it is safe or no longer matters."""
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

    def update_entry(self, entry: Entry) -> None:
        """The packet id or phase of an entry changed; `Entry.committed` follows the commit."""
        if entry.disk == STORED and not entry.changed:
            entry.changed = True
            self._gathering.updates.append(entry)
            self._gathering.empty = False

    def remove_entry(self, entry: Entry) -> None:
        """The entry is done with: acknowledged, expired or dropped."""
        batch = self._gathering
        if entry.disk == PENDING:
            batch.size -= entry.message.size + MESSAGE_OVERHEAD
            self._settle_unwritten(entry)
        elif entry.disk == STORED:
            self.remove_stored_entry(entry.session_id, entry.seq, entry.message.id, entry.shared)
        entry.disk = GONE

    def remove_stored_entry(self, session_id: int, seq: int, message_id: int, shared: bool) -> None:
        """Delete an entry that is on disk."""
        batch = self._gathering
        batch.deletes.append((session_id, seq))
        if shared:
            batch.shared_messages[message_id] = True
        else:
            batch.sole_messages.append(message_id)
        batch.empty = False

    def _settle_unwritten(self, entry: Entry) -> None:
        """Nobody needs an entry any more that was not written yet."""
        entry.disk = GONE
        gate = entry.gate
        if gate is not None:
            entry.gate = None
            gate.settle()

    # -- everything else ----------------------------------------------------

    def add_received(self, session_id: int, packet_id: int) -> None:
        """A QoS 2 packet id is taken until it is released."""
        self._gathering.received[(session_id, packet_id)] = True
        self._gathering.empty = False

    def remove_received(self, session_id: int, packet_id: int) -> None:
        self._gathering.received[(session_id, packet_id)] = False
        self._gathering.empty = False

    def set_retained(self, topic: str, message: Optional[Message]) -> None:
        """Set the retained message of a topic, or clear it with None."""
        batch = self._gathering
        batch.retained[topic] = message
        if message is not None:
            batch.size += message.size + MESSAGE_OVERHEAD
        batch.empty = False

    def save_session(self, session_id: int, row: Tuple[object, ...]) -> None:
        """Insert or replace a session's row (`WriteSet.sessions` has its columns)."""
        self._gathering.sessions[session_id] = row
        self._gathering.empty = False

    def delete_session(self, session_id: int) -> None:
        """Forget a session with all that belongs to it."""
        batch = self._gathering
        batch.ended[session_id] = True
        batch.sessions.pop(session_id, None)
        batch.empty = False

    def save_subscription(
        self, session_id: int, topic_filter: str, qos: int, options: int, subscription_id: int
    ) -> None:
        row = (session_id, topic_filter, qos, options, subscription_id)
        self._gathering.subscriptions[(session_id, topic_filter)] = row
        self._gathering.empty = False

    def delete_subscription(self, session_id: int, topic_filter: str) -> None:
        self._gathering.subscriptions[(session_id, topic_filter)] = None
        self._gathering.empty = False

    def append_to_stream(self, stream: str, partition: int, message: Message) -> None:
        """Append a message to a stream's partition."""
        batch = self._gathering
        batch.size += message.size + MESSAGE_OVERHEAD
        batch.empty = False
        records = batch.streams.get((stream, partition))
        if records is None:
            batch.streams[(stream, partition)] = [message]
        else:
            records.append(message)

    def request_page(self, request: PageRequest) -> None:
        """Read a page after everything gathered so far is committed."""
        self._gathering.pages.append(request)
        self._gathering.empty = False

    def query_entries(self, listing: EntryQuery) -> None:
        """Find entries after everything gathered so far is committed."""
        self._gathering.listings.append(listing)
        self._gathering.empty = False

    def wait_for_commit(self, gate: Gate) -> None:
        """Keep a gate shut until the batch that gathers now is committed."""
        gate.pending += 1
        self._gathering.gates.append(gate)
        self._gathering.empty = False

    def wait_for_received(self, gate: Gate, session_id: int, packet_id: int) -> None:
        """Keep a gate shut until a QoS 2 packet id that is taken already is on disk."""
        pair = (session_id, packet_id)
        for batch in (self._writing, self._gathering):
            if batch is not None and batch.received.get(pair, False):
                gate.pending += 1
                batch.gates.append(gate)

    def wait_for_retained(self, gate: Gate, topic: str) -> None:
        """Keep a gate shut until what was last asked for a topic is on disk."""
        for batch in (self._writing, self._gathering):
            if batch is not None and topic in batch.retained:
                gate.pending += 1
                batch.gates.append(gate)

    # -- towards the writer -------------------------------------------------

    def close_batch(self) -> WriteSet:
        """Close the gathering batch and give its rows; only when `idle`."""
        batch = self._gathering
        self._gathering = _Batch()
        self._writing = batch
        write_set = WriteSet()
        write_set.ended = list(batch.ended)
        write_set.sessions = [
            row for session_id, row in batch.sessions.items() if session_id not in batch.ended
        ]
        ended = batch.ended
        for key, row in batch.subscriptions.items():
            if key[0] in ended:
                continue
            if row is not None:
                write_set.subscriptions.append(row)
            else:
                write_set.unsubscriptions.append(key)
        self._add_entry_rows(batch, write_set)
        write_set.deletes = batch.deletes
        write_set.sole_messages = batch.sole_messages
        write_set.shared_messages = list(batch.shared_messages)
        for pair, present in batch.received.items():
            if pair[0] in ended:
                continue
            if present:
                write_set.received.append(pair)
            else:
                write_set.released.append(pair)
        for topic, message in batch.retained.items():
            if message is None:
                write_set.unretained.append(topic)
            else:
                write_set.retained.append(
                    (
                        topic,
                        message.payload,
                        message.qos,
                        message.properties,
                        message.publisher,
                        message.timestamp,
                        message.expires_at,
                    )
                )
        write_set.stream_messages = batch.streams
        write_set.pages = batch.pages
        write_set.listings = batch.listings
        write_set.probe = batch.probe
        return write_set

    def _add_entry_rows(self, batch: _Batch, write_set: WriteSet) -> None:
        """Rows of the entries that still matter; their messages once each."""
        if batch.ended:
            for entry in batch.entries:
                if entry.session_id in batch.ended and entry.disk == PENDING:
                    self._settle_unwritten(entry)
        wanted: List[Entry] = [entry for entry in batch.entries if entry.disk == PENDING]
        last: int = len(wanted) - 1
        index: int = 0
        while index <= last:
            entry = wanted[index]
            message = entry.message
            # One publication adds its entries in a row, so neighbours tell
            # whether a message has more than one.
            entry.shared = (
                entry.shared
                or (index > 0 and wanted[index - 1].message is message)
                or (index < last and wanted[index + 1].message is message)
            )
            if message.id == 0:
                message.id = self.next_message_id
                self.next_message_id += 1
                write_set.messages.append(
                    (
                        message.id,
                        message.topic,
                        message.payload,
                        message.qos,
                        1 if message.retain else 0,
                        message.properties,
                        message.publisher,
                        message.timestamp,
                        message.expires_at,
                    )
                )
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
                    _STORED_PHASE[entry.phase],
                    message.size,
                    message.expires_at,
                )
            )
            entry.disk = STORED
            index += 1
        self._written = wanted
        for entry in batch.updates:
            entry.changed = False
            if entry.disk == STORED and entry.session_id not in batch.ended:
                write_set.updates.append(
                    (entry.packet_id, _STORED_PHASE[entry.phase], entry.session_id, entry.seq)
                )

    def committed(self) -> None:
        """The batch with the writer is on disk: open what waited for it."""
        batch = self._writing
        assert batch is not None
        written = self._written
        self._writing = None
        self._written = []
        for entry in written:
            gate = entry.gate
            if gate is not None:
                entry.gate = None
                gate.settle()
        # What was on disk before came before what is new there [MQTT-4.6.0-6].
        for entry in batch.updates:
            entry.committed()
        for entry in written:
            entry.committed()
        for gate in batch.gates:
            gate.settle()
        for listing in batch.listings:
            listing.answered()

    def failed(self) -> None:
        """The batch with the writer was rolled back.

        New messages are refused: their gates fail and their entries are gone.
        Everything else stays wanted and goes with the next batch, unless newer
        operations there have overtaken it.
        """
        batch = self._writing
        assert batch is not None
        written = self._written
        self._writing = None
        self._written = []
        self.counters.commit_failures += 1
        for records in batch.streams.values():
            self.counters.lost_records += len(records)
        self._retry(batch)
        # All are gone before the first session hears of it and looks for what to send next.
        refused: List[Entry] = []
        for entry in written:
            gate = entry.gate
            if entry.disk == STORED:
                refused.append(entry)
            elif gate is not None:
                entry.gate = None
                gate.settle()
            entry.disk = GONE
        for entry in refused:
            entry.refused()
            gate = entry.gate
            if gate is not None:
                entry.gate = None
                gate.fail()
        for gate in batch.gates:
            gate.fail()

    def _retry(self, old: _Batch) -> None:
        """Put what must not be lost back before what gathered since."""
        new = self._gathering
        for session_id in old.ended:
            new.ended[session_id] = True
        for session_id, row in old.sessions.items():
            if session_id not in new.sessions and session_id not in new.ended:
                new.sessions[session_id] = row
        for key, subscription in old.subscriptions.items():
            if key not in new.subscriptions and key[0] not in new.ended:
                new.subscriptions[key] = subscription
        for pair, present in old.received.items():
            if pair not in new.received and not present and pair[0] not in new.ended:
                new.received[pair] = False
        for topic, message in old.retained.items():
            if topic not in new.retained:
                new.retained[topic] = message
        again: List[Entry] = []
        for entry in old.updates:
            if entry.disk == STORED and not entry.changed:
                entry.changed = True
                again.append(entry)
        new.updates = again + new.updates
        new.deletes = old.deletes + new.deletes
        new.sole_messages = old.sole_messages + new.sole_messages
        new.shared_messages.update(old.shared_messages)
        new.pages = old.pages + new.pages
        new.listings = old.listings + new.listings
        # Only something written shows that the store is well again.
        new.probe = True
        new.empty = False
