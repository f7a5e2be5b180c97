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
import sqlite3
from itertools import chain
from typing import Any, Sequence

from sessions.write_set import Page, PageRequest

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

    Rows of NULL fill the table up to its size, so the statement must pass over
    a row whose first value is NULL.
    """

    def __init__(self, sql: str, width: int) -> None:
        row = "(" + ",".join("?" * width) + ")"
        self._padding = (None,) * width
        self.by_size: dict[int, str] = {}
        size = 1
        while size <= CHUNK:
            values = "(VALUES " + ",".join([row] * size) + ")"
            self.by_size[size] = sql.replace("{rows}", values)
            size *= 2

    def run(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            size = 1 << (len(part) - 1).bit_length()
            parameters = list(chain.from_iterable(part))
            parameters += self._padding * (size - len(part))
            connection.execute(self.by_size[size], parameters)


class PayloadStatement(Statement):
    """A statement over rows with a payload and properties, at these columns."""

    def __init__(self, sql: str, width: int, payload: int, properties: int) -> None:
        super().__init__(sql, width)
        self._payload = payload
        self._properties = properties

    def run(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        payload, properties = self._payload, self._properties
        large = [row for row in rows if len(row[payload]) + len(row[properties]) > LARGE_BYTES]
        if large:
            rows = [row for row in rows if len(row[payload]) + len(row[properties]) <= LARGE_BYTES]
            for row in large:
                connection.execute(self.by_size[1], row)
            connection.execute(self.by_size[1], self._padding)
        super().run(connection, rows)


def _insert(table: str, columns: str, keys: str = "") -> Statement:
    """Insert rows, or update those whose `keys` are there already."""
    names = columns.split(", ")
    sql = f"INSERT INTO {table} ({columns}) SELECT * FROM {{rows}} WHERE column1 IS NOT NULL"
    if keys:
        rest = [f"{name} = excluded.{name}" for name in names if name not in keys.split(", ")]
        action = f"UPDATE SET {', '.join(rest)}" if rest else "NOTHING"
        sql += f" ON CONFLICT ({keys}) DO {action}"
    if "payload" in names:
        return PayloadStatement(
            sql, len(names), names.index("payload"), names.index("properties")
        )
    return Statement(sql, len(names))


def _delete(table: str, keys: str, condition: str = "") -> Statement:
    # SQLite searches by a row value only if the list is no bare VALUES; a bare
    # one makes it scan the whole table.
    return Statement(
        f"DELETE FROM {table} WHERE ({keys}) IN (SELECT * FROM {{rows}}){condition}",
        len(keys.split(", ")),
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
    "session_id, client_id, version, expiry_interval, disconnected_at, will, will_due, username",
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
)
# The size stands beside the entry so that a start need not read the messages.
ENTRIES = Statement(
    "INSERT INTO queue (session_id, seq, message_id, shared, qos, retain, subscription_ids,"
    " packet_id, state, size) SELECT *,"
    " (SELECT length(topic) + length(payload) + length(properties) FROM messages"
    " WHERE id = column3) FROM {rows} WHERE column1 IS NOT NULL",
    9,
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
)
UNRETAINED = _delete("retained", "topic")
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

# A page comes as one row of JSON, since fetching costs the GIL once a row; blobs
# stand in it as hexadecimal text, and those of a large message not at all.
PAGE = (
    "SELECT json_group_array(json_array(seq, entry_qos, entry_retain, hex(subscription_ids),"
    " packet_id, state, message_id, shared, topic, iif(size > ?4, NULL, hex(payload)), qos,"
    " retain, iif(size > ?4, NULL, hex(properties)), publisher, timestamp, expires_at, size))"
    " FROM (SELECT q.seq, q.qos AS entry_qos, q.retain AS entry_retain, q.subscription_ids,"
    " q.packet_id, q.state, q.message_id, q.shared, m.*,"
    " length(m.payload) + length(m.properties) AS size"
    " FROM queue AS q CROSS JOIN messages AS m ON m.id = q.message_id"
    " WHERE q.session_id = ?1 AND q.seq > ?2 ORDER BY q.seq LIMIT ?3)"
)
PAGE_BLOBS = "SELECT payload, properties FROM messages WHERE id = ?"
PAGE_RECEIVED = "SELECT json_group_array(packet_id) FROM received WHERE session_id = ?"

QUEUES = "SELECT session_id, count(*), sum(size), max(seq) FROM queue GROUP BY session_id"


def queues_of(connection: sqlite3.Connection, ended: list[Row]) -> dict[int, int]:
    """The last seq of each of these sessions that has a queue."""
    found: dict[int, int] = {}
    for start in range(0, len(ended), CHUNK):
        part = ended[start : start + CHUNK]
        size = 1 << (len(part) - 1).bit_length()
        parameters = list(chain.from_iterable(part)) + [None] * (size - len(part))
        found.update(connection.execute(FIND_QUEUES.by_size[size], parameters).fetchall())
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
        (found,) = connection.execute(
            PAGE, (request.session_id, request.after_seq, request.limit, LARGE_BYTES)
        ).fetchone()
        rows: list[Row] = sorted(map(tuple, json.loads(found)))
        size = 0
        for row in rows:
            size += len(row[8]) + row[16]
            if request.limit_bytes and page.rows and size > request.limit_bytes:
                break
            page.rows.append(_page_row(connection, row))
        if request.with_received:
            (found,) = connection.execute(PAGE_RECEIVED, (request.session_id,)).fetchone()
            page.received = sorted(json.loads(found))
    except Exception as error:
        page.rows = []
        page.error = error
    return page


def _page_row(connection: sqlite3.Connection, row: Row) -> Row:
    subscription_ids = bytes.fromhex(row[3])
    if row[9] is None:
        payload, properties = connection.execute(PAGE_BLOBS, (row[6],)).fetchone()
    else:
        payload, properties = bytes.fromhex(row[9]), bytes.fromhex(row[12])
    return (*row[:3], subscription_ids, *row[4:9], payload, *row[10:12], properties, *row[13:16])
