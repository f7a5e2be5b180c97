"""Which shard a row belongs to, and a write set as one write set of each shard.

The ids of sessions and readers of streams have the shard in their upper bits. Other rows belong to the shard of a hash: retained
messages by their topic, numbers of producers by user and producer.
"""

from __future__ import annotations

from typing import Any, Dict, Final, List

from mqttbroker.core.own_shard import shard_of
from sessions.message import Message
from sessions.rows import received_row
from sessions.write_set import WriteSet

ID_BITS: Final = 36  # of an id, below those of its shard: a packet id fits behind both
MAX_SHARDS: Final = 1 << 11  # so that all three fit into 63 bits


def first_id(shard: int) -> int:
    """The id before the first one of a shard."""
    return shard << ID_BITS


def shard_of_id(row_id: int) -> int:
    return row_id >> ID_BITS


class Shards:
    """The shards of a cluster, whose number never changes."""

    def __init__(self, count: int) -> None:
        if not 0 < count <= MAX_SHARDS:
            raise ValueError(f"{count} shards, not 1 to {MAX_SHARDS}")
        self.count = count

    def of_text(self, text: str) -> int:
        """The shard of a client id, a topic, or the name of a group or queue."""
        return shard_of(text, self.count)

    def of_producer(self, user: str, producer_id: str) -> int:
        return self.of_text(f"{user}\0{producer_id}")

    def split(self, write_set: WriteSet) -> Dict[int, WriteSet]:
        """The changes and reads of each shard that has any. A message is in each shard whose entries refer to it.

        Queries of the entries of all sessions, and streams, belong to no shard: the caller has taken them out.
        """
        assert not write_set.stream_messages, "streams are topics of Kafka"
        return _Split(self, write_set).parts


class _Split:
    def __init__(self, shards: Shards, whole: WriteSet) -> None:
        self.parts: Dict[int, WriteSet] = {}
        self._after_failure = whole.after_failure
        for session_id in whole.deleted_sessions:
            self._of_id(session_id).deleted_sessions.append(session_id)
        for session in whole.sessions:
            self._of_id(session.session_id).sessions.append(session)
        for subscription in whole.subscriptions:
            self._of_id(subscription.session_id).subscriptions.append(subscription)
        for key in whole.deleted_subscriptions:
            self._of_id(key[0]).deleted_subscriptions.append(key)
        self._entries(whole)
        for update in whole.entry_updates:
            self._of_id(update[2]).entry_updates.append(update)
        for entry_key in whole.deleted_entries:
            self._of_id(entry_key[0]).deleted_entries.append(entry_key)
        for received in whole.received:
            self._of_id(received_row(received)[0]).received.append(received)
        for received in whole.deleted_received:
            self._of_id(received_row(received)[0]).deleted_received.append(received)
        for message in whole.retained:
            self._of(shards.of_text(message.topic)).retained.append(message)
        for topic in whole.deleted_retained:
            self._of(shards.of_text(topic)).deleted_retained.append(topic)
        for producer_key in whole.deleted_producers:
            self._of(shards.of_producer(*producer_key[1:])).deleted_producers.append(producer_key)
        for producer in whole.producers:
            self._of(shards.of_producer(producer.user_name, producer.producer_id)).producers.append(producer)
        for reader_id in whole.deleted_readers:
            self._of_id(reader_id).deleted_readers.append(reader_id)
        for reader in whole.readers:
            self._of_id(reader.reader_id).readers.append(reader)
        for offsets in whole.offsets:
            self._of_id(offsets.reader_id).offsets.append(offsets)
        for page in whole.pages:
            self._of_id(page.session_id).pages.append(page)
        for query in whole.queries:
            assert query.session_id, "a query of all sessions"
            self._of_id(query.session_id).queries.append(query)

    def _of(self, shard: int) -> WriteSet:
        part = self.parts.get(shard)
        if part is None:
            part = self.parts[shard] = WriteSet()
            part.after_failure = self._after_failure
        return part

    def _of_id(self, row_id: int) -> WriteSet:
        return self._of(shard_of_id(row_id))

    def _entries(self, whole: WriteSet) -> None:
        """Entries with their messages: those of a message may be in several shards, and are not always neighbours."""
        messages: Dict[int, Message] = {message.id: message for message in whole.messages}
        added: Dict[int, Dict[int, bool]] = {}
        entries: List[Any] = whole.entries
        for entry in entries:
            shard = shard_of_id(entry[0])
            part = self._of(shard)
            part.entries.append(entry)
            message_id = entry[2]
            known = added.setdefault(shard, {})
            if message_id not in known:
                # Else it was stored earlier, in the shards of its earlier entries only.
                assert message_id in messages, f"message {message_id} is not in the commit of its entries"
                known[message_id] = True
                part.messages.append(messages[message_id])
