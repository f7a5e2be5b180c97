"""The changes of one commit and the reads after it: plain values in lists.

A write set belongs to one thread at a time: the event loop fills it and hands it to the writer, which hands it back
through the store's ``done``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

from mypy_extensions import mypyc_attr

from sessions.message import Message
from sessions.row_kinds import KINDS, K, R, RowKind
from sessions.rows import EntryKey, EntryRow, EntryUpdate, MessageRow, PageRow, ReceivedKey, StoredEntry


class PageRequest:
    """Asks for the stored entries of a session with ``seq > after_seq``, at most ``limit`` of them.

    The page also ends before the row whose size takes the sum of sizes beyond ``limit_bytes``, but has at least one
    row; 0 sets no such limit. ``with_received`` also asks for the QoS 2 packet ids that await their PUBREL.
    ``until_seq`` is the newest seq at the time of the request, 0 if it is not known: the page has no later entry.
    """

    def __init__(
        self,
        session_id: int,
        after_seq: int,
        limit: int,
        with_received: bool,
        limit_bytes: int = 0,
        until_seq: int = 0,
    ) -> None:
        self.session_id = session_id
        self.after_seq = after_seq
        self.limit = limit
        self.with_received = with_received
        self.limit_bytes = limit_bytes
        self.until_seq = until_seq


class Page:
    """The answer to a `PageRequest`, as of the commit it was submitted with.

    ``rows`` are in order of ``seq``; ``received`` is empty unless it was asked for. ``error`` says why the page could
    not be read; the commit before it is durable all the same.
    """

    def __init__(
        self,
        session_id: int,
        rows: list[PageRow],
        received: list[int],
        error: Exception | None = None,
    ) -> None:
        self.session_id = session_id
        self.rows = rows
        self.received = received
        self.error = error


@mypyc_attr(allow_interpreted_subclasses=True)
class EntryQuery:
    """Asks for stored entries that were never sent, at most ``limit``.

    With a ``session_id``: those of this session with ``seq > after_seq``, in order of ``seq``. With 0: those of all
    sessions that expire at ``until`` or before (µs since the Unix epoch) and come behind ``after`` (expires_at,
    session_id, seq), in that order. The writer fills ``rows``, and ``next_expiry`` with the first expiry after
    ``until``, 0 if there is none.
    """

    def __init__(self, limit: int, session_id: int, after_seq: int, until: int) -> None:
        self.limit = limit
        self.session_id = session_id
        self.after_seq = after_seq
        self.until = until
        self.after: tuple[int, int, int] = (0, 0, 0)
        self.rows: list[StoredEntry] = []
        self.next_expiry = 0

    @abstractmethod
    def answered(self) -> None:
        """Called on the event loop's thread when ``rows`` are filled."""


# Where messages that a write set publishes go: to all other shards, to a member of a shared subscription in one of them, or to a stream.
TO_ALL: Final = 0
TO_MEMBER: Final = 1
TO_STREAM: Final = 2
TO_OTHERS: Final = 3  # nowhere that this version knows


class BusMessages:
    """Messages for the other shards of a cluster, which read them in the log of this one.

    ``to_all`` are for their sessions and retained messages. ``to_members`` are each for a member of a shared subscription that one
    shard has, by the full name of the subscription and the shard.
    """

    def __init__(self) -> None:
        self.to_all: list[Message] = []
        self.to_members: dict[tuple[str, int], list[Message]] = {}

    @property
    def count(self) -> int:
        count: int = len(self.to_all)
        for messages in self.to_members.values():
            count += len(messages)
        return count


class WriteSet:
    """The changes of one transaction. Rows are those of `sessions.rows`.

    A key occurs at most once in a list. The id of a deleted session or reader is never used again, and nothing else of it occurs
    beside it.

    ``removed`` and ``saved`` of each of the `KINDS`
        deleted, with the rows that they own, then inserted; a row replaces the one with its key
    ``messages``, ``entries``
        inserted; a message has its `Message.id`. Then come ``entry_updates`` and ``deleted_entries``
    ``deleted_received``, ``received``
        deleted, then inserted; only a key that is deleted too may be there already
    ``stream_messages``
        records per (stream, partition), in their order
    ``bus``
        messages for other shards; in a cluster only
    ``pages``, ``queries``
        read as of this commit, after it
    ``after_failure``
        true if the commit before failed: this one first proves that the disk has room, and writes even if it has no
        changes
    """

    def __init__(self) -> None:
        self.rows: list[list[Any]] = [[] for _ in KINDS]  # by number of the kind
        self.removed_keys: list[list[Any]] = [[] for _ in KINDS]  # likewise
        self.messages: list[Message] = []
        self.entries: list[EntryRow] = []
        self.entry_updates: list[EntryUpdate] = []
        self.deleted_entries: list[EntryKey] = []
        self.received: list[ReceivedKey] = []
        self.deleted_received: list[ReceivedKey] = []
        self.stream_messages: dict[tuple[str, int], list[Message]] = {}
        self.bus: BusMessages | None = None
        self.pages: list[PageRequest] = []
        self.queries: list[EntryQuery] = []
        self.after_failure = False

    def saved(self, kind: RowKind[R, K]) -> list[R]:
        """The rows of a kind."""
        return self.rows[kind.number]

    def removed(self, kind: RowKind[R, K]) -> list[K]:
        """The keys of removed rows of a kind."""
        return self.removed_keys[kind.number]

    def has_changes(self) -> bool:
        """Whether there is anything to commit; pages and queries alone need no commit."""
        if self.stream_messages or self.bus is not None or self.has_rows():
            return True
        for rows in self.rows:
            if rows:
                return True
        for keys in self.removed_keys:
            if keys:
                return True
        return False

    def has_rows(self) -> bool:
        """Whether a record of the commit log has anything of it beside records of streams."""
        if (
            self.messages
            or self.entries
            or self.entry_updates
            or self.deleted_entries
            or self.received
            or self.deleted_received
            or self.after_failure
        ):
            return True
        for kind in KINDS:
            if kind.in_record and (self.rows[kind.number] or self.removed_keys[kind.number]):
                return True
        return False


def message_rows(messages: list[Message]) -> list[MessageRow]:
    """The columns of messages, in the order of `sessions.rows.MESSAGE_COLUMNS`."""
    return [
        (
            message.id,
            message.topic,
            message.payload,
            message.qos,
            message.retain,
            message.properties,
            message.publisher,
            message.timestamp,
            message.expires_at,
        )
        for message in messages
    ]
