"""The table of the kinds of rows that a key identifies.

A kind is one `RowKind` here. From it follow its changes in the journal and in a `WriteSet`, its place in a record of the commit
log, its changes that wait for the tables, the SQL of its table, what a start reads, the checks of a database, and where its rows go
in a cluster and back. A new kind is one more, and a migration that makes its table (`sessions.store.schema`).

Messages, entries of queues, packet ids and records of streams are no such kinds: a commit may have very many of them, so each has
a typed list of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic, TypeVar

from sessions.message import Message
from sessions.rows import (
    MarkRow,
    OffsetsKey,
    OffsetsRow,
    ProducerKey,
    ProducerRow,
    ReaderRow,
    RetainedRow,
    SessionRow,
    SubscriptionKey,
    SubscriptionRow,
)

R = TypeVar("R")  # a row of a kind, as the broker has it
K = TypeVar("K")  # the key of such a row

_TEXTS: Final[tuple[Any, ...]] = (str, bytes, str | None, bytes | None)

# By number; an owner comes before what it owns.
KINDS: Final[list[RowKind[Any, Any]]] = []


class RowKind(Generic[R, K]):
    """A kind of rows; a new one is the last of `KINDS`.

    ``name`` is that of several rows in reports, ``table`` that of their table. ``row_type`` is the NamedTuple of a row with the
    ``types`` of its columns, and ``key`` the column or columns that identify it: a row replaces the one with its key. A key
    that is one number is never used again when its row is removed. With ``of_messages`` the broker has a `Message` instead of a row.

    ``saved_at`` and ``removed_at`` are the places of rows and of the keys of removed rows in a record of the commit log; -1: they
    are in none.

    With an ``owner``, the column that has the name of the owner's key is the key of the row that owns this one, or less than 1. If
    the key of this kind begins with it, rows are removed with their owner.

    In a cluster a row is in the shard of its owner; without one, in that of the text in the column ``placed_by``; without both, in
    every shard. ``order`` are the columns in whose order rows are read; "" if it does not matter.
    """

    def __init__(
        self,
        name: str,
        table: str,
        row_type: Any,
        types: tuple[Any, ...],
        key: tuple[str, ...],
        saved_at: int,
        removed_at: int,
        owner: RowKind[Any, Any] | None = None,
        placed_by: str = "",
        order: str = "",
        of_messages: bool = False,
    ) -> None:
        self.number = len(KINDS)
        self.name = name
        self.table = table
        self.row_type = row_type
        self.columns: tuple[str, ...] = row_type._fields
        self.types = types
        self.key = key
        self.saved_at = saved_at
        self.removed_at = removed_at
        self.owner = owner
        self.owner_column = "" if owner is None else owner.key[0]
        self.removed_with_owner = owner is not None and key[0] == owner.key[0]
        self.placed_by = placed_by
        self.table_in_order = f"{table} ORDER BY {order}" if order else table
        self.of_messages = of_messages
        self._texts = [place for place, one in enumerate(types) if one in _TEXTS]
        places = [self.columns.index(column) for column in key]
        self.numbered = len(key) == 1 and types[places[0]] is int
        self._key_of: Callable[[Any], Any] = attrgetter(*key) if of_messages else itemgetter(*places)
        KINDS.append(self)

    @property
    def in_record(self) -> bool:
        """Whether it is in records of the commit log, and has a table in every store; else the cluster stores it."""
        return self.saved_at >= 0

    def key_of(self, row: Any) -> Any:
        return self._key_of(row)

    def size_of(self, row: Any) -> int:
        """The bytes of its texts, about."""
        size: int = 0
        if self.of_messages:
            message: Message = row
            return message.size
        for place in self._texts:
            text = row[place]
            if text is not None:
                size += len(text)
        return size

    def key_size(self, key: Any) -> int:
        """The bytes of the texts of a key, about."""
        size: int = 0
        for part in key if isinstance(key, tuple) else (key,):
            if isinstance(part, str):
                size += len(part)
        return size


class KindChanges:
    """Changes of the rows of one kind, by key; of several on one key the last counts, but a number that was removed stays so."""

    def __init__(self, kind: RowKind[Any, Any]) -> None:
        self.saved: dict[Any, Any] = {}
        self.removed: dict[Any, bool] = {}
        self._numbered: bool = kind.numbered

    def save(self, key: Any, row: Any) -> None:
        self.saved[key] = row
        if self.removed and not self._numbered:
            self.removed.pop(key, None)

    def remove(self, key: Any) -> None:
        self.removed[key] = True
        if self.saved:
            self.saved.pop(key, None)

    def leave_out(self, owners: dict[Any, bool]) -> None:
        """Drop the changes of rows that are removed with one of these owners."""
        for key in [key for key in self.saved if key[0] in owners]:
            del self.saved[key]
        for key in [key for key in self.removed if key[0] in owners]:
            del self.removed[key]


def changes_of_kinds() -> list[KindChanges]:
    """No changes of any kind, by number."""
    return [KindChanges(kind) for kind in KINDS]


SESSIONS: Final[RowKind[SessionRow, int]] = RowKind(
    "sessions", "sessions", SessionRow,
    (int, str, int, int, float | None, bytes | None, float | None, str | None, str | None, str | None),
    ("session_id",), 3, 2, placed_by="client_id", order="session_id",
)  # fmt: skip
SUBSCRIPTIONS: Final[RowKind[SubscriptionRow, SubscriptionKey]] = RowKind(
    "subscriptions", "subscriptions", SubscriptionRow, (int, str, int, int, int),
    ("session_id", "topic_filter"), 4, 5, owner=SESSIONS,
)  # fmt: skip
RETAINED: Final[RowKind[Message, str]] = RowKind(
    "retained messages", "retained", RetainedRow, (str, bytes, int, bytes, str, int, int),
    ("topic",), 11, 12, placed_by="topic", of_messages=True,
)  # fmt: skip
PRODUCERS: Final[RowKind[ProducerRow, ProducerKey]] = RowKind(
    "producers", "producers", ProducerRow, (str, str, str, int, bytes, int),
    ("stream", "user_name", "producer_id"), 15, 14, order="used",
)  # fmt: skip
READERS: Final[RowKind[ReaderRow, int]] = RowKind(
    "stream readers", "stream_readers", ReaderRow, (int, int, int, str, str, str, str, int, int),
    ("reader_id",), 17, 16, owner=SESSIONS, placed_by="name", order="reader_id",
)  # fmt: skip
OFFSETS: Final[RowKind[OffsetsRow, OffsetsKey]] = RowKind(
    "offsets of stream readers", "stream_offsets", OffsetsRow, (int, int, int, int, bytes),
    ("reader_id", "partition"), 18, -1, owner=READERS, order="reader_id, partition",
)  # fmt: skip
MARKS: Final[RowKind[MarkRow, int]] = RowKind("marks", "marks", MarkRow, (int, int, int, int, bytes, int, bool), ("log",), -1, -1)
