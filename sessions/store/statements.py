"""The SQL of the store: statements over lists of rows, pages and queries.

Python's sqlite3 releases the GIL several times per statement and once per fetched row, and each time a busy event
loop may delay the writer. So a list of any length takes one statement or a few, a page is fetched as one row, and no
statement scans a table that grows. Column names come from `sessions.rows`.

Measured against `executemany` beside a uvloop thread that never idles (batches of 2000 messages of 64 bytes with an
entry each, synced commits, two loaded cores, medians of three), in thousands per second: messages 37 against 15,
updates 63 against 17, deletes 52 against 27; without the loop 74 against 51, 134 against 41, 130 against 48.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter, itemgetter
from typing import Any

from sessions.message import Message
from sessions.row_kinds import KINDS, RowKind
from sessions.rows import (
    ENTRY_COLUMNS,
    ENTRY_KEY_COLUMNS,
    MESSAGE_COLUMNS,
    RECEIVED_COLUMNS,
    EntryKey,
    PageRow,
    StoredEntry,
    received_row,
)
from sessions.write_set import EntryQuery, Page, PageRequest, message_rows

logger = logging.getLogger(__name__)

# The most rows of one statement. Lists are padded to a power of two, so that twelve prepared statements serve every
# length.
CHUNK = 2048
# Messages with more bytes have a statement of their own, since a prepared statement keeps its parameters in memory.
LARGE_BYTES = 4096

# The most entries of deleted sessions that one transaction deletes, and of how many sessions.
PURGE_ENTRIES = 4096
PURGE_SESSIONS = 64

_EMPTY = bytearray()


class Statement:
    """One statement over a list of rows: ``{rows}`` becomes a table of parameters.

    A row is a sequence of ``width`` values, or one bare value if the width is 1; ``values_of`` makes such a sequence
    of another object. ``filler`` is a value that no row begins with; rows of it pad the table, so the statement must
    ignore them. NULL would do, but sqlite3 binds it ten times slower than an int. It binds bytes and bool as slowly:
    the columns in ``blobs``, which are bytes in every row, are bound as bytearrays, those in ``flags`` as ints.
    """

    def __init__(
        self,
        sql: str,
        width: int,
        filler: int | str = 0,
        blobs: Sequence[int] = (),
        flags: Sequence[int] = (),
        values_of: Callable[[Any], Iterable[Any]] | None = None,
    ) -> None:
        self.width = width
        self._filler = filler
        self._blobs = blobs
        self._flags = flags
        self.values_of = values_of
        row = "(" + ",".join("?" * width) + ")"
        self.by_size: dict[int, str] = {}
        size = 1
        while size <= CHUNK:
            values = "(VALUES " + ",".join([row] * size) + ")"
            self.by_size[size] = sql.replace("{rows}", values)
            size *= 2

    def bind(self, rows: Sequence[Any]) -> tuple[str, list[Any]]:
        """The statement for at most `CHUNK` rows, and its parameters."""
        width = self.width
        size = 1 << (len(rows) - 1).bit_length()
        if self.values_of is not None:
            rows_of_values: Iterable[Any] = map(self.values_of, rows)
        else:
            rows_of_values = rows
        parameters = list(rows if width == 1 else chain.from_iterable(rows_of_values))
        for column in self._blobs:
            blobs = parameters[column::width]
            parameters[column::width] = list(map(bytearray, blobs)) if any(blobs) else [_EMPTY] * len(blobs)
        for column in self._flags:
            flags = parameters[column::width]
            parameters[column::width] = list(map(int, flags)) if any(flags) else [0] * len(flags)
        parameters += [self._filler] * (width * (size - len(rows)))
        return self.by_size[size], parameters

    def run(self, connection: sqlite3.Connection, rows: Sequence[Any]) -> None:
        for start in range(0, len(rows), CHUNK):
            connection.execute(*self.bind(rows[start : start + CHUNK]))


class MessageStatement(Statement):
    """A statement over messages, of which ``rows_of`` makes rows."""

    def __init__(self, sql: str, columns: Sequence[str], rows_of: Callable[[list[Message]], Sequence[Iterable[Any]]]) -> None:
        blobs = [columns.index("payload"), columns.index("properties")]
        flags = [columns.index("retain")] if "retain" in columns else []
        super().__init__(sql, len(columns), 0, blobs, flags)
        self._rows_of = rows_of

    def run(self, connection: sqlite3.Connection, rows: Sequence[Message]) -> None:
        large = [message for message in rows if message.size > LARGE_BYTES]
        if large:
            for row in self._rows_of(large):
                connection.execute(self.by_size[1], tuple(row))
            connection.execute(self.by_size[1], [0] * self.width)  # replaces the last large parameters
        super().run(connection, self._rows_of([message for message in rows if message.size <= LARGE_BYTES]))


def _insert_sql(table: str, columns: Sequence[str], keys: Sequence[str] = ()) -> str:
    """Insert rows, or update those whose `keys` are there already."""
    names = ", ".join(columns)
    sql = f"INSERT INTO {table} ({names}) SELECT * FROM {{rows}} WHERE column1 IS NOT 0"
    if keys:
        rest = [f"{name} = excluded.{name}" for name in columns if name not in keys]
        action = f"UPDATE SET {', '.join(rest)}" if rest else "NOTHING"
        sql += f" ON CONFLICT ({', '.join(keys)}) DO {action}"
    return sql


def _insert(table: str, columns: Sequence[str], keys: Sequence[str] = (), blobs: Sequence[str] = ()) -> Statement:
    return Statement(_insert_sql(table, columns, keys), len(columns), blobs=[columns.index(name) for name in blobs])


def _delete(
    table: str,
    keys: Sequence[str],
    condition: str = "",
    filler: int | str = 0,
    values_of: Callable[[Any], Iterable[Any]] | None = None,
) -> Statement:
    # SQLite searches by a row value only if the list is a SELECT; with a bare VALUES it scans the whole table.
    sql = f"DELETE FROM {table} WHERE ({', '.join(keys)}) IN (SELECT * FROM {{rows}}){condition}"
    return Statement(sql, len(keys), filler, values_of=values_of)


class KindStatements:
    """The statements of one of the `KINDS`: ``saved`` for rows, ``removed`` for keys, ``removed_with_owner`` for keys of owners."""

    def __init__(self, kind: RowKind[Any, Any]) -> None:
        types = dict(zip(kind.columns, kind.types))
        filler = "" if types[kind.key[0]] is str else 0
        self.number = kind.number
        self.saved: Statement
        if kind.of_messages:
            columns_of: Callable[[Message], Iterable[Any]] = attrgetter(*kind.columns)
            self.saved = MessageStatement(
                _insert_sql(kind.table, kind.columns, kind.key), kind.columns, lambda messages: list(map(columns_of, messages))
            )
        else:
            self.saved = _insert(kind.table, kind.columns, kind.key, [column for column in kind.columns if types[column] is bytes])
        self.removed = _delete(kind.table, kind.key, filler=filler)
        self.owner = kind.owner.number if kind.owner is not None and kind.removed_with_owner else None
        self.removed_with_owner = _delete(kind.table, [kind.owner_column]) if self.owner is not None else None


OF_KINDS = [KindStatements(kind) for kind in KINDS if kind.in_record]
DELETE_RECEIVED_OF = _delete("received", ["session_id"])
FIND_QUEUES = Statement(
    "SELECT column1, (SELECT max(seq) FROM queue WHERE session_id = column1) FROM {rows}"
    " WHERE EXISTS (SELECT 1 FROM queue WHERE session_id = column1)",
    1,
)
# Rows that are there already are replaced: a repair may apply a part of the commit log again.
MESSAGES = MessageStatement(_insert_sql("messages", MESSAGE_COLUMNS, ["id"]), MESSAGE_COLUMNS, message_rows)
# An entry has the size of its message, so that a start need not read the messages.
ENTRIES = _insert("queue", ENTRY_COLUMNS, ["session_id", "seq"], blobs=["subscription_ids"])
UPDATE_ENTRIES = Statement(
    "UPDATE queue SET packet_id = v.column1, state = v.column2 FROM {rows} AS v"
    " WHERE queue.session_id = v.column3 AND queue.seq = v.column4",
    4,
)
DELETE_ENTRIES = _delete("queue", ENTRY_KEY_COLUMNS[:2], values_of=itemgetter(0, 1))
DELETE_SOLE_MESSAGES = _delete("messages", ["id"])
DELETE_SHARED_MESSAGES = _delete(
    "messages",
    ["id"],
    " AND NOT EXISTS (SELECT 1 FROM queue WHERE shared = 1 AND message_id = messages.id)",
)
RECEIVED = Statement(_insert_sql("received", RECEIVED_COLUMNS, RECEIVED_COLUMNS), 2, values_of=received_row)
DELETE_RECEIVED = _delete("received", RECEIVED_COLUMNS, values_of=received_row)
STREAM_ENDS = _insert("stream_ends", ["stream", "partition", "end_offset"], ["stream", "partition"])

# Delete the entries of a session up to a seq, in this order, and the messages that no other entry refers to.
PURGE = (
    "DELETE FROM messages WHERE id IN (SELECT message_id FROM queue WHERE session_id = ?1 AND seq <= ?2 AND shared = 0)",
    "DELETE FROM messages WHERE id IN"
    " (SELECT message_id FROM queue AS q WHERE session_id = ?1 AND seq <= ?2 AND shared = 1"
    " AND NOT EXISTS (SELECT 1 FROM queue AS other WHERE other.shared = 1"
    " AND other.message_id = q.message_id"
    " AND NOT (other.session_id = ?1 AND other.seq <= ?2)))",
    "DELETE FROM queue WHERE session_id = ?1 AND seq <= ?2",
)
PURGE_END = "SELECT seq FROM queue WHERE session_id = ? AND seq <= ? ORDER BY seq LIMIT 1 OFFSET ?"

# A page is fetched as one row, since each row releases the GIL: per column a JSON array, or for blobs hexadecimal text,
# without those of large messages.
_PAYLOAD = PageRow._fields.index("payload")
_page_row: Callable[[Iterable[Any]], PageRow] = partial(tuple.__new__, PageRow)  # faster than `_make`
_PAGE_BLOBS = {
    "subscription_ids": "hex(subscription_ids)",
    "payload": "iif(size > ?4, '', hex(payload))",
    "properties": "iif(size > ?4, '', hex(properties))",
}
PAGE = (
    "SELECT "
    + ", ".join(f"group_concat({_PAGE_BLOBS[name]})" if name in _PAGE_BLOBS else f"json_group_array({name})" for name in PageRow._fields)
    + " FROM (SELECT q.seq, q.qos, q.retain, q.subscription_ids, q.packet_id, q.state,"
    " q.message_id, q.shared, q.size, m.topic, m.payload, m.qos AS message_qos,"
    " m.retain AS message_retain, m.properties, m.publisher, m.timestamp, m.expires_at"
    " FROM queue AS q CROSS JOIN messages AS m ON m.id = q.message_id"
    " WHERE q.session_id = ?1 AND q.seq > ?2 ORDER BY q.seq LIMIT ?3)"
)
PAGE_BLOBS = "SELECT payload, properties FROM messages WHERE id = ?"
PAGE_RECEIVED = "SELECT json_group_array(packet_id) FROM received WHERE session_id = ?"

# Entries that were never sent, as one row too.
_FIND_ENTRIES = (
    "SELECT json_group_array(json_array("
    + ", ".join("ifnull(expires_at, 0)" if name == "expires_at" else name for name in StoredEntry._fields)
    + ")) FROM (SELECT * FROM queue WHERE "
)
FIND_UNSENT = _FIND_ENTRIES + "session_id = ?1 AND seq > ?2 AND packet_id = 0 ORDER BY seq LIMIT ?3)"
FIND_EXPIRED = (
    _FIND_ENTRIES + "expires_at > 0 AND (expires_at, session_id, seq) > (?1, ?2, ?3)"
    " AND expires_at <= ?4 AND packet_id = 0 ORDER BY expires_at, session_id, seq LIMIT ?5)"
)
NEXT_EXPIRY = "SELECT min(expires_at) FROM queue WHERE expires_at > 0 AND expires_at > ?"

QUEUES = "SELECT session_id, count(*), sum(size), max(seq) FROM queue GROUP BY session_id"


_MESSAGE_ID, _SHARED = ENTRY_KEY_COLUMNS.index("message_id"), ENTRY_KEY_COLUMNS.index("shared")


def delete_entries(connection: sqlite3.Connection, entries: Sequence[EntryKey]) -> None:
    """Delete entries, and each message with the last entry that refers to it."""
    DELETE_ENTRIES.run(connection, entries)
    DELETE_SOLE_MESSAGES.run(connection, [entry[_MESSAGE_ID] for entry in entries if not entry[_SHARED]])
    DELETE_SHARED_MESSAGES.run(connection, [entry[_MESSAGE_ID] for entry in entries if entry[_SHARED]])


def queues_of(connection: sqlite3.Connection, session_ids: list[int]) -> dict[int, int]:
    """The last seq of each of these sessions that has stored entries."""
    found: dict[int, int] = {}
    for start in range(0, len(session_ids), CHUNK):
        query = FIND_QUEUES.bind(session_ids[start : start + CHUNK])
        found.update(connection.execute(*query).fetchall())
    return found


def purge(connection: sqlite3.Connection, deleted: dict[int, int]) -> None:
    """Delete some entries of `deleted` sessions (id to last seq), and remove from it those that have none left."""
    left = PURGE_ENTRIES
    for session_id, last_seq in list(deleted.items())[:PURGE_SESSIONS]:
        row = connection.execute(PURGE_END, (session_id, last_seq, left)).fetchone()
        until = last_seq if row is None else row[0]
        for statement in PURGE:
            left -= max(0, connection.execute(statement, (session_id, until)).rowcount)
        if row is not None:
            return
        del deleted[session_id]
        if left <= 0:
            return


def read_page(connection: sqlite3.Connection, request: PageRequest) -> Page:
    """The page; a failure is its ``error``, as the commit before it is durable."""
    page = Page(request.session_id, [], [])
    try:
        found = connection.execute(PAGE, (request.session_id, request.after_seq, request.limit, LARGE_BYTES)).fetchone()
        page.rows = _page_rows(connection, found, request.limit_bytes)
        if request.with_received:
            (received,) = connection.execute(PAGE_RECEIVED, (request.session_id,)).fetchone()
            page.received = sorted(json.loads(received))
    except Exception as error:
        page.rows = []
        page.error = error
    return page


def _page_rows(connection: sqlite3.Connection, found: tuple[Any, ...], limit_bytes: int) -> list[PageRow]:
    if found[_PAYLOAD] is None:  # group_concat of no rows
        return []
    rows = list(map(_page_row, zip(*_page_columns(found))))
    rows.sort(key=attrgetter("seq"))
    sizes = [row.size for row in rows]
    if limit_bytes:
        count = max(1, bisect_right(list(accumulate(sizes)), limit_bytes))
        del rows[count:], sizes[count:]
    if max(sizes) > LARGE_BYTES:
        for at, row in enumerate(rows):
            if row.size > LARGE_BYTES:
                payload, properties = connection.execute(PAGE_BLOBS, (row.message_id,)).fetchone()
                rows[at] = row._replace(payload=payload, properties=properties)
    return rows


def _page_columns(found: tuple[Any, ...]) -> Iterator[Sequence[Any]]:
    """The columns of a page. In most pages some columns are empty or have the same digit in every row."""
    count = found[_PAYLOAD].count(",") + 1
    for name, text in zip(PageRow._fields, found):
        if name in _PAGE_BLOBS:
            yield [b""] * count if len(text) < count else list(map(bytes.fromhex, text.split(",")))
        elif len(text) == 2 * count + 1 and text.count(text[1]) == count:
            yield [int(text[1])] * count
        else:
            yield json.loads(text)


def run_query(connection: sqlite3.Connection, query: EntryQuery) -> None:
    """Fill in the result of a query; its rows stay empty if they cannot be read."""
    try:
        if query.session_id:
            bounds: tuple[int, ...] = (query.session_id, query.after_seq, query.limit)
            (found,) = connection.execute(FIND_UNSENT, bounds).fetchone()
        else:
            bounds = (*query.after, query.until, query.limit)
            (found,) = connection.execute(FIND_EXPIRED, bounds).fetchone()
            (first,) = connection.execute(NEXT_EXPIRY, (query.until,)).fetchone()
            query.next_expiry = first or 0
        query.rows = list(map(StoredEntry._make, sorted(json.loads(found))))
    except sqlite3.Error:
        logger.exception("event=defect in=listing")
