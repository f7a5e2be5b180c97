"""Changes that the tables do not have yet: several write sets as one, without what they added and removed again.

Kept by key, so that the last change of a row is the only one. An entry that is removed before it was applied is never
written, nor is a message that no entry refers to any more.
"""

from __future__ import annotations

from typing import Dict, Final, List, Optional, Tuple

from sessions.message import Message
from sessions.rows import (
    EntryKey,
    EntryRow,
    EntryUpdate,
    ProducerKey,
    ProducerRow,
    ReceivedKey,
    SessionRow,
    SubscriptionKey,
    SubscriptionRow,
)
from sessions.write_set import WriteSet

# Memory of a message beside its `Message.size`, and of another row, in bytes.
MESSAGE_OVERHEAD: Final = 300
ROW_OVERHEAD: Final = 200


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
        self._deleted_sessions: Dict[int, bool] = {}
        self._sessions: Dict[int, SessionRow] = {}
        self._subscriptions: Dict[SubscriptionKey, Optional[SubscriptionRow]] = {}  # None: delete
        self._messages: Dict[int, Message] = {}
        self._references: Dict[int, int] = {}  # entries in `_entries` that share a message
        self._entries: Dict[Tuple[int, int], EntryRow] = {}
        self._updates: Dict[Tuple[int, int], EntryUpdate] = {}
        self._deleted_entries: Dict[Tuple[int, int], EntryKey] = {}
        self._received: Dict[ReceivedKey, int] = {}
        self._retained: Dict[str, Optional[Message]] = {}  # None: delete
        self._deleted_producers: Dict[ProducerKey, bool] = {}
        self._producers: Dict[ProducerKey, ProducerRow] = {}

    @property
    def size(self) -> int:
        """About the memory that the changes take, in bytes."""
        rows: int = len(self._deleted_sessions) + len(self._sessions) + len(self._subscriptions) + len(self._retained)
        rows += len(self._entries) + len(self._updates) + len(self._deleted_entries) + len(self._received)
        rows += len(self._deleted_producers) + len(self._producers)
        return self._bytes + ROW_OVERHEAD * rows

    def merge(self, write_set: WriteSet) -> None:
        """Add the changes of a later write set."""
        self.empty = False
        for session_id in write_set.deleted_sessions:
            self._deleted_sessions[session_id] = True
            self._sessions.pop(session_id, None)
        for session in write_set.sessions:
            self._sessions[session.session_id] = session
        for subscription in write_set.subscriptions:
            self._subscriptions[(subscription.session_id, subscription.topic_filter)] = subscription
            self._bytes += len(subscription.topic_filter)
        for subscription_key in write_set.deleted_subscriptions:
            self._subscriptions[subscription_key] = None
        messages = self._messages
        for message in write_set.messages:
            messages[message.id] = message
            self._bytes += MESSAGE_OVERHEAD + message.size
        self._merge_entries(write_set)
        pairs = self._received
        for received in write_set.deleted_received:
            if pairs.get(received, _REMOVE) == _INSERT:
                del pairs[received]
            else:
                pairs[received] = _REMOVE
        for received in write_set.received:
            pairs[received] = _STORE if received in pairs else self._received_before
        for message in write_set.retained:
            self._retained[message.topic] = message
            self._bytes += MESSAGE_OVERHEAD + message.size
        for topic in write_set.deleted_retained:
            self._retained[topic] = None
        for producer_key in write_set.deleted_producers:
            self._producers.pop(producer_key, None)
            self._deleted_producers[producer_key] = True
        for producer in write_set.producers:
            self._producers[(producer.stream, producer.user_name, producer.producer_id)] = producer
            self._bytes += len(producer.missing)

    def _merge_entries(self, write_set: WriteSet) -> None:
        entries = self._entries
        for row in write_set.entries:
            entries[(row[0], row[1])] = row
            if row[3] != 0:
                self._references[row[2]] = self._references.get(row[2], 0) + 1
        updates = self._updates
        for update in write_set.entry_updates:
            updates[(update[2], update[3])] = update
        for key in write_set.deleted_entries:
            place = (key[0], key[1])
            updates.pop(place, None)
            removed = entries.pop(place, None)
            if removed is None or not self._release(removed):
                self._deleted_entries[place] = key

    def _release(self, entry: EntryRow) -> bool:
        """An entry that was not applied is gone; false if its message is in the tables and no pending entry refers to
        it, so that they are to look for others."""
        message_id: int = entry[2]
        if entry[3] != 0:
            left: int = self._references.get(message_id, 1) - 1
            if left > 0:
                self._references[message_id] = left
                return True
            self._references.pop(message_id, None)
        message = self._messages.pop(message_id, None)
        if message is None:
            return False
        self._bytes -= MESSAGE_OVERHEAD + message.size
        return True

    def write_set(self) -> WriteSet:
        """All changes as one write set, without streams and reads. Nothing may be merged afterwards."""
        deleted = self._deleted_sessions
        if deleted:
            self._leave_out_deleted()
        result = WriteSet()
        result.deleted_sessions = list(deleted)
        result.sessions = list(self._sessions.values())
        for key, subscription in self._subscriptions.items():
            if subscription is None:
                result.deleted_subscriptions.append(key)
            else:
                result.subscriptions.append(subscription)
        result.messages = list(self._messages.values())
        entries = self._entries
        for place, update in self._updates.items():
            row = entries.get(place)
            if row is None:
                result.entry_updates.append(update)
            else:
                entries[place] = (
                    row[0], row[1], row[2], row[3], row[4], row[5], row[6], update[0], update[1], row[9], row[10]
                )
        result.entries = list(entries.values())
        result.deleted_entries = list(self._deleted_entries.values())
        for received, change in self._received.items():
            if change == _REMOVE:
                result.deleted_received.append(received)
            else:
                result.received.append(received)
        for topic, message in self._retained.items():
            if message is None:
                result.deleted_retained.append(topic)
            else:
                result.retained.append(message)
        result.deleted_producers = list(self._deleted_producers)
        result.producers = list(self._producers.values())
        return result

    def _leave_out_deleted(self) -> None:
        """Drop the rows of deleted sessions, which the tables delete as a whole."""
        deleted = self._deleted_sessions
        self._subscriptions = {key: row for key, row in self._subscriptions.items() if key[0] not in deleted}
        self._received = {key: row for key, row in self._received.items() if key[0] not in deleted}
        self._updates = {key: row for key, row in self._updates.items() if key[0] not in deleted}
        gone: List[Tuple[int, int]] = [key for key in self._entries if key[0] in deleted]
        for key in gone:
            row = self._entries.pop(key)
            if not self._release(row):
                self._deleted_entries[key] = (row[0], row[1], row[2], row[3])
