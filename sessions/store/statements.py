"""What the store says to SQLite: every statement of the writer's inner loop.

The rule kept here: as few steps as possible.  Python's sqlite3 gives up the GIL
several times per statement and once per row fetched, and each time a busy event
loop may keep the writer waiting.  So a list of any length is one statement or
few, a page is one row, and no statement scans a table that grows.

Measured against `executemany` beside a uvloop thread that never idles (batches of
2000 messages of 64 bytes with an entry each, synced commits, two cores that other
programs loaded as well, medians of three): messages 37,000 a second against
15,000, updates 63,000 against 17,000, deletes 52,000 against 27,000; without the
loop 74,000 against 51,000, 134,000 against 41,000, 130,000 against 48,000.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from bisect import bisect_right
from itertools import accumulate, chain
from typing import Any, Iterator, Sequence

from sessions.write_set import EntryQuery, Page, PageRequest

logger = logging.getLogger(__name__)

# The most rows of one statement.  Lists are padded to a power of two, so that
# a handful of statements serve every length and stay prepared.
CHUNK = 2048
# A prepared statement holds on to its parameters: rows with more bytes than this go alone.
LARGE_BYTES = 4096

# How many entries of an ended session go with one transaction, of how many sessions.
PURGE_ENTRIES = 4096
PURGE_SESSIONS = 64

Row = tuple[Any, ...]


class Statement:
    """One statement over a list of rows: ``{rows}`` becomes a table of parameters.

    ``filler`` is what no row begins with, 0 where rows begin with an id; rows of it
    fill the table up to its size, so the statement must pass over them.  NULL would
    do, but sqlite3 binds it ten times slower than an int, and bytes as slow, which
    therefore go as bytearrays: ``blobs`` are their columns.
    """

    def __init__(
        self, sql: str, width: int, filler: int | str = 0, blobs: Sequence[int] = ()
    ) -> None:
        self.width = width
        self.blobs = blobs
        self._filler = filler
        row = "(" + ",".join("?" * width) + ")"
        self.by_size: dict[int, str] = {}
        size = 1
        while size <= CHUNK:
            values = "(VALUES " + ",".join([row] * size) + ")"
            self.by_size[size] = sql.replace("{rows}", values)
            size *= 2

    def bind(self, rows: Sequence[Row]) -> tuple[str, list[Any]]:
        """The statement for at most `CHUNK` rows, and its parameters."""
        width = self.width
        size = 1 << (len(rows) - 1).bit_length()
        parameters = list(chain.from_iterable(rows))
        for column in self.blobs:
            parameters[column::width] = map(bytearray, parameters[column::width])
        parameters += [self._filler] * (width * (size - len(rows)))
        return self.by_size[size], parameters

    def run(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), CHUNK):
            connection.execute(*self.bind(rows[start : start + CHUNK]))


class PayloadStatement(Statement):
    """A statement over rows with a payload and properties, the first and the second blob."""

    def run(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        payload, properties = self.blobs
        large = [row for row in rows if len(row[payload]) + len(row[properties]) > LARGE_BYTES]
        if large:
            rows = [row for row in rows if len(row[payload]) + len(row[properties]) <= LARGE_BYTES]
            for row in large:
                connection.execute(self.by_size[1], row)
            connection.execute(self.by_size[1], [self._filler] * self.width)
        super().run(connection, rows)


def _insert(table: str, columns: str, keys: str = "", blobs: str = "") -> Statement:
    """Insert rows, or update those whose `keys` are there already.

    ``blobs`` names the columns that are bytes in every row; another may be.
    """
    names = columns.split(", ")
    sql = f"INSERT INTO {table} ({columns}) SELECT * FROM {{rows}} WHERE column1 IS NOT 0"
    if keys:
        rest = [f"{name} = excluded.{name}" for name in names if name not in keys.split(", ")]
        action = f"UPDATE SET {', '.join(rest)}" if rest else "NOTHING"
        sql += f" ON CONFLICT ({keys}) DO {action}"
    kind = PayloadStatement if "payload" in names else Statement
    return kind(sql, len(names), blobs=[names.index(name) for name in blobs.split()])


def _delete(table: str, keys: str, condition: str = "", filler: int | str = 0) -> Statement:
    # SQLite searches by a row value only if the list is no bare VALUES; a bare
    # one makes it scan the whole table.
    return Statement(
        f"DELETE FROM {table} WHERE ({keys}) IN (SELECT * FROM {{rows}}){condition}",
        len(keys.split(", ")),
        filler,
    )


END_SESSIONS = _delete("sessions", "session_id")
END_SUBSCRIPTIONS = _delete("subscriptions", "session_id")
END_RECEIVED = _delete("received", "session_id")
FIND_QUEUES = Statement(
    "SELECT column1, (SELECT max(seq) FROM queue WHERE session_id = column1) FROM {rows}"
    " WHERE EXISTS (SELECT 1 FROM queue WHERE session_id = column1)",
    1,
)
SESSIONS = _insert(
    "sessions",
    "session_id, client_id, version, expiry_interval, disconnected_at, will, will_due, username,"
    " rules",
    "session_id",
)
SUBSCRIPTIONS = _insert(
    "subscriptions",
    "session_id, topic_filter, qos, options, subscription_id",
    "session_id, topic_filter",
)
UNSUBSCRIPTIONS = _delete("subscriptions", "session_id, topic_filter")
MESSAGES = _insert(
    "messages",
    "id, topic, payload, qos, retain, properties, publisher, timestamp, expires_at",
    blobs="payload properties",
)
# The size stands beside the entry so that a start need not read the messages.
ENTRIES = _insert(
    "queue",
    "session_id, seq, message_id, shared, qos, retain, subscription_ids, packet_id, state, size,"
    " expires_at",
    blobs="subscription_ids",
)
UPDATES = Statement(
    "UPDATE queue SET packet_id = v.column1, state = v.column2 FROM {rows} AS v"
    " WHERE queue.session_id = v.column3 AND queue.seq = v.column4",
    4,
)
DELETES = _delete("queue", "session_id, seq")
SOLE_MESSAGES = _delete("messages", "id")
SHARED_MESSAGES = _delete(
    "messages",
    "id",
    " AND NOT EXISTS (SELECT 1 FROM queue WHERE shared = 1 AND message_id = messages.id)",
)
RECEIVED = _insert("received", "session_id, packet_id", "session_id, packet_id")
RELEASED = _delete("received", "session_id, packet_id")
RETAINED = _insert(
    "retained",
    "topic, payload, qos, properties, publisher, timestamp, expires_at",
    "topic",
    "payload properties",
)
UNRETAINED = _delete("retained", "topic", filler="")
STREAM_ENDS = _insert("stream_ends", "stream, partition, end_offset", "stream, partition")

# An ended session's entries up to a seq, in the order in which they must go.
PURGE = (
    "DELETE FROM messages WHERE id IN"
    " (SELECT message_id FROM queue WHERE session_id = ?1 AND seq <= ?2 AND shared = 0)",
    "DELETE FROM messages WHERE id IN"
    " (SELECT message_id FROM queue AS q WHERE session_id = ?1 AND seq <= ?2 AND shared = 1"
    " AND NOT EXISTS (SELECT 1 FROM queue AS other WHERE other.shared = 1"
    " AND other.message_id = q.message_id"
    " AND NOT (other.session_id = ?1 AND other.seq <= ?2)))",
    "DELETE FROM queue WHERE session_id = ?1 AND seq <= ?2",
)
PURGE_END = "SELECT seq FROM queue WHERE session_id = ? AND seq <= ? ORDER BY seq LIMIT 1 OFFSET ?"

# A page comes as one row, since fetching costs the GIL once a row: a list of JSON for
# each column, and for blobs hexadecimal text, without those of a large message.
_PAGE_COLUMNS = (
    "seq, qos, retain, subscription_ids, packet_id, state, message_id, shared, topic, payload,"
    " message_qos, message_retain, properties, publisher, timestamp, expires_at, size"
).split(", ")
_PAGE_BLOBS = {
    "subscription_ids": "hex(subscription_ids)",
    "payload": "iif(size > ?4, '', hex(payload))",
    "properties": "iif(size > ?4, '', hex(properties))",
}
_PAYLOAD, _PROPERTIES = _PAGE_COLUMNS.index("payload"), _PAGE_COLUMNS.index("properties")
PAGE = (
    "SELECT "
    + ", ".join(
        f"group_concat({_PAGE_BLOBS[name]})" if name in _PAGE_BLOBS else f"json_group_array({name})"
        for name in _PAGE_COLUMNS
    )
    + " FROM (SELECT q.seq, q.qos, q.retain, q.subscription_ids, q.packet_id, q.state,"
    " q.message_id, q.shared, q.size, m.topic, m.payload, m.qos AS message_qos,"
    " m.retain AS message_retain, m.properties, m.publisher, m.timestamp, m.expires_at"
    " FROM queue AS q CROSS JOIN messages AS m ON m.id = q.message_id"
    " WHERE q.session_id = ?1 AND q.seq > ?2 ORDER BY q.seq LIMIT ?3)"
)
PAGE_BLOBS = "SELECT payload, properties FROM messages WHERE id = ?"
PAGE_RECEIVED = "SELECT json_group_array(packet_id) FROM received WHERE session_id = ?"

# Entries that may be dropped, as one row too.
_LISTED = (
    "SELECT json_group_array(json_array(ifnull(expires_at, 0), session_id, seq, message_id, shared,"
    " size))"
    " FROM (SELECT * FROM queue WHERE "
)
LIST_SESSION = _LISTED + "session_id = ?1 AND seq > ?2 AND packet_id = 0 ORDER BY seq LIMIT ?3)"
LIST_EXPIRED = (
    _LISTED + "expires_at > 0 AND (expires_at, session_id, seq) > (?1, ?2, ?3)"
    " AND expires_at <= ?4 AND packet_id = 0 ORDER BY expires_at, session_id, seq LIMIT ?5)"
)
NEXT_EXPIRY = "SELECT min(expires_at) FROM queue WHERE expires_at > 0 AND expires_at > ?"

QUEUES = "SELECT session_id, count(*), sum(size), max(seq) FROM queue GROUP BY session_id"


def queues_of(connection: sqlite3.Connection, ended: list[Row]) -> dict[int, int]:
    """The last seq of each of these sessions that has a queue."""
    found: dict[int, int] = {}
    for start in range(0, len(ended), CHUNK):
        query = FIND_QUEUES.bind(ended[start : start + CHUNK])
        found.update(connection.execute(*query).fetchall())
    return found


def purge(connection: sqlite3.Connection, ending: dict[int, int]) -> None:
    """Delete some entries of ended sessions; takes a session out of `ending` with its last."""
    left = PURGE_ENTRIES
    for session_id, last_seq in list(ending.items())[:PURGE_SESSIONS]:
        row = connection.execute(PURGE_END, (session_id, last_seq, left)).fetchone()
        until = last_seq if row is None else row[0]
        for statement in PURGE:
            left -= max(0, connection.execute(statement, (session_id, until)).rowcount)
        if row is not None:
            return
        del ending[session_id]
        if left <= 0:
            return


def read_page(connection: sqlite3.Connection, request: PageRequest) -> Page:
    """A failure stays in the page: the commit that it follows is through."""
    page = Page(request.session_id, [], [])
    try:
        found = connection.execute(
            PAGE, (request.session_id, request.after_seq, request.limit, LARGE_BYTES)
        ).fetchone()
        page.rows = _page_rows(connection, found, request.limit_bytes)
        if request.with_received:
            (received,) = connection.execute(PAGE_RECEIVED, (request.session_id,)).fetchone()
            page.received = sorted(json.loads(received))
    except Exception as error:
        page.rows = []
        page.error = error
    return page


def _page_rows(connection: sqlite3.Connection, found: Row, limit_bytes: int) -> list[Row]:
    rows: list[Row] = sorted(zip(*_page_columns(found)))
    sizes = [row[-1] for row in rows]
    if limit_bytes:
        count = max(1, bisect_right(list(accumulate(sizes)), limit_bytes))
        del rows[count:], sizes[count:]
    if sizes and max(sizes) > LARGE_BYTES:
        for at, row in enumerate(rows):
            if row[-1] > LARGE_BYTES:
                blobs = connection.execute(PAGE_BLOBS, (row[_PAGE_COLUMNS.index("message_id")],))
                whole = list(row)
                whole[_PAYLOAD], whole[_PROPERTIES] = blobs.fetchone()
                rows[at] = tuple(whole)
    return rows


def _page_columns(found: Row) -> Iterator[Sequence[Any]]:
    if found[_PAYLOAD] is None:
        return  # no rows
    for name, text in zip(_PAGE_COLUMNS, found):
        yield list(map(bytes.fromhex, text.split(","))) if name in _PAGE_BLOBS else json.loads(text)


def read_listing(connection: sqlite3.Connection, listing: EntryQuery) -> None:
    """Fill a listing; it stays empty if it cannot be read."""
    try:
        if listing.session_id:
            query = (listing.session_id, listing.after_seq, listing.limit)
            (found,) = connection.execute(LIST_SESSION, query).fetchone()
        else:
            bounds = (*listing.after, listing.until, listing.limit)
            (found,) = connection.execute(LIST_EXPIRED, bounds).fetchone()
            (first,) = connection.execute(NEXT_EXPIRY, (listing.until,)).fetchone()
            listing.next_expiry = first or 0
        listing.rows = sorted(json.loads(found))
    except sqlite3.Error:
        logger.exception("event=defect in=listing")
