"""Changes that the tables do not have yet: several write sets as one, without what they added and removed again.

Kept by key, so that the last change of a row is the only one. An entry that is removed before it was applied is never
written, nor is a message that no entry refers to any more.

Rows and keys of entries and packet ids are objects here, not typed tuples: compiled code would unpack each typed tuple
that it takes from a list, and make a new one to keep it.
"""

from __future__ import annotations

from typing import Any, Final

from sessions.message import Message
from sessions.row_kinds import KINDS, SESSIONS, RowKind, changes_of_kinds
from sessions.rows import PageRow, received_row
from sessions.write_set import WriteSet

# Memory of a message beside its `Message.size`, and of another row, in bytes.
MESSAGE_OVERHEAD: Final = 300
ROW_OVERHEAD: Final = 200


_Row = tuple[Any, ...]

# The change of a packet id; `_STORE` if the tables may have it, `_INSERT` if they do not.
_REMOVE: Final = 0
_STORE: Final = 1
_INSERT: Final = 2


class PendingChanges:
    """The sum of the write sets that were merged.

    The tables have exactly what was committed before, unless they are ``salvaged``.
    """

    def __init__(self, salvaged: bool = False) -> None:
        self._received_before: int = _STORE if salvaged else _INSERT
        self._bytes = 0  # of messages, and of texts of variable length
        self.empty = True
        self._kinds = changes_of_kinds()
        self._deleted_sessions = self._kinds[SESSIONS.number].removed
        self._messages: dict[object, Message] = {}
        self._references: dict[object, int] = {}  # entries in `_entries` that share a message, by its id
        # By seq, which no two entries of a store have in common.
        self._entries: dict[object, _Row] = {}
        self._updates: dict[object, _Row] = {}
        self._deleted_entries: dict[object, _Row] = {}
        self.last_seq = 0  # of the entries that were added, removed again or not
        self._received: dict[object, int] = {}

    @property
    def size(self) -> int:
        """About the memory that the changes take, in bytes."""
        rows: int = len(self._entries) + len(self._updates) + len(self._deleted_entries) + len(self._received)
        for changes in self._kinds:
            rows += len(changes.saved) + len(changes.removed)
        return self._bytes + ROW_OVERHEAD * rows

    def merge(self, write_set: WriteSet) -> None:
        """Add the changes of a later write set."""
        self.empty = False
        for kind in KINDS:
            keys = write_set.removed_keys[kind.number]
            rows = write_set.rows[kind.number]
            if keys or rows:
                self._merge_kind(kind, keys, rows)
        messages = self._messages
        for message in write_set.messages:
            messages[message.id] = message
            self._bytes += MESSAGE_OVERHEAD + message.size
        self._merge_entries(write_set)
        self._merge_received(write_set)

    def _merge_kind(self, kind: RowKind[Any, Any], keys: list[Any], rows: list[Any]) -> None:
        changes = self._kinds[kind.number]
        overhead: int = MESSAGE_OVERHEAD if kind.of_messages else 0
        for key in keys:
            before: object = changes.saved.get(key)
            if before is not None:
                self._bytes -= kind.size_of(before) + overhead
            changes.remove(key)
        for row in rows:
            key = kind.key_of(row)
            before = changes.saved.get(key)
            if before is not None:
                self._bytes -= kind.size_of(before) + overhead
            self._bytes += kind.size_of(row) + overhead
            changes.save(key, row)

    def _merge_received(self, write_set: WriteSet) -> None:
        changes = self._received
        key: object
        keys: list[Any] = write_set.deleted_received
        for key in keys:
            if changes.get(key, _REMOVE) == _INSERT:
                del changes[key]
            else:
                changes[key] = _REMOVE
        keys = write_set.received
        for key in keys:
            changes[key] = _STORE if key in changes else self._received_before

    def _merge_entries(self, write_set: WriteSet) -> None:
        row: _Row
        seq: object
        entries = self._entries
        rows: list[Any] = write_set.entries
        for row in rows:
            entries[row[1]] = row
            if row[3]:
                self._references[row[2]] = self._references.get(row[2], 0) + 1
        if rows:
            self.last_seq = max(self.last_seq, rows[len(rows) - 1][1])
        updates = self._updates
        rows = write_set.entry_updates
        for row in rows:
            updates[row[3]] = row
        rows = write_set.deleted_entries
        for row in rows:
            seq = row[1]
            if seq in updates:
                del updates[seq]
            added = entries.get(seq)
            if added is not None:
                del entries[seq]
                if self._release(added):
                    continue
            self._deleted_entries[seq] = row

    def changes_rows(self, session_id: int, page: list[PageRow]) -> bool:
        """Whether any of these entries, read from the tables, is changed or removed."""
        if session_id in self._deleted_sessions:
            return True
        updates = self._updates
        deleted = self._deleted_entries
        if not updates and not deleted:
            return False
        for row in page:
            if row.seq in updates or row.seq in deleted:
                return True
        return False

    def _release(self, entry: _Row) -> bool:
        """An entry that was not applied is gone; false if its message is in the tables and no pending entry refers to
        it, so that they are to look for others."""
        message_id: object = entry[2]
        if entry[3]:
            left: int = self._references.get(message_id, 1) - 1
            if left > 0:
                self._references[message_id] = left
                return True
            self._references.pop(message_id, None)
        message = self._messages.get(message_id)
        if message is None:
            return False
        del self._messages[message_id]
        self._bytes -= MESSAGE_OVERHEAD + message.size
        return True

    def write_set(self) -> WriteSet:
        """All changes as one write set, without streams and reads. Nothing may be merged afterwards."""
        if self._deleted_sessions:
            self._leave_out_deleted()
        result = WriteSet()
        for kind in KINDS:
            changes = self._kinds[kind.number]
            owner = kind.owner
            if owner is not None and kind.removed_with_owner:
                owners = self._kinds[owner.number].removed
                if owners:
                    changes.leave_out(owners)
            result.rows[kind.number] = list(changes.saved.values())
            result.removed_keys[kind.number] = list(changes.removed)
        result.messages = list(self._messages.values())
        entries = self._entries
        changed: list[Any] = result.entry_updates
        for seq, update in self._updates.items():
            row = entries.get(seq)
            if row is None:
                changed.append(update)
            else:
                entries[seq] = row[:7] + update[:2] + row[9:]
        added: list[Any] = list(entries.values())
        result.entries = added
        deleted_entries: list[Any] = list(self._deleted_entries.values())
        result.deleted_entries = deleted_entries
        inserted: list[Any] = result.received
        removed: list[Any] = result.deleted_received
        for received, change in self._received.items():
            if change == _REMOVE:
                removed.append(received)
            else:
                inserted.append(received)
        return result

    def _leave_out_deleted(self) -> None:
        """Drop the rows of deleted sessions, which the tables delete as a whole."""
        deleted = self._deleted_sessions
        received: list[Any] = list(self._received)
        for key in received:
            if received_row(key)[0] in deleted:
                del self._received[key]
        self._updates = {seq: row for seq, row in self._updates.items() if row[2] not in deleted}
        gone: list[_Row] = [row for row in self._entries.values() if row[0] in deleted]
        for row in gone:
            del self._entries[row[1]]
            if not self._release(row):
                self._deleted_entries[row[1]] = row[:4]
