"""Random write sets, the rows that they add up to, and a process that commits them.

As a program, it commits the write sets of a seed from a number on, and prints the number of each commit once it is
durable.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

from sessions.message import Message
from sessions.row_kinds import OFFSETS, PRODUCERS, READERS, RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.rows import (
    ENTRY_COLUMNS,
    EntryRow,
    OffsetsKey,
    OffsetsRow,
    ProducerKey,
    ProducerRow,
    ReaderRow,
    ReceivedKey,
    RetainedRow,
    SessionRow,
    StoredEntry,
    SubscriptionKey,
    SubscriptionRow,
    received_key,
    received_row,
)
from sessions.session import AWAITS_RETAINED
from sessions.store.interface import Recovered
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet
from support.store_cases import query
from support.store_writer import FileLog, Writer, message

SEQ, MESSAGE, SHARED, PACKET, STATE, SIZE, EXPIRES = map(
    ENTRY_COLUMNS.index, ("seq", "message_id", "shared", "packet_id", "state", "size", "expires_at")
)
EVERYTHING = 10**6


class Query:
    """The attributes of an `EntryQuery`, which in the compiled build no other class can inherit from."""

    def __init__(self, limit: int, session_id: int, after_seq: int, until: int) -> None:
        self.limit = limit
        self.session_id = session_id
        self.after_seq = after_seq
        self.until = until
        self.after = (0, 0, 0)
        self.rows: list[StoredEntry] = []
        self.next_expiry = 0


class Rows:
    """The rows that write sets add up to."""

    def __init__(self) -> None:
        self.sessions: dict[int, SessionRow] = {}
        self.subscriptions: dict[SubscriptionKey, SubscriptionRow] = {}
        self.messages: dict[int, Message] = {}
        self.queue: dict[tuple[int, int], EntryRow] = {}
        self.received: set[ReceivedKey] = set()
        self.retained: dict[str, Message] = {}
        self.producers: dict[ProducerKey, ProducerRow] = {}
        self.readers: dict[int, ReaderRow] = {}
        self.offsets: dict[OffsetsKey, OffsetsRow] = {}
        self.records: dict[tuple[str, int], list[int]] = {}

    def apply(self, changes: WriteSet) -> None:
        for session_id in changes.removed(SESSIONS):
            self._delete_session(session_id)
        self.sessions.update((row.session_id, row) for row in changes.saved(SESSIONS))
        for key in changes.removed(SUBSCRIPTIONS):
            self.subscriptions.pop(key, None)
        self.subscriptions.update(((row.session_id, row.topic_filter), row) for row in changes.saved(SUBSCRIPTIONS))
        self.messages.update((one.id, one) for one in changes.messages)
        self.queue.update(((entry[0], entry[SEQ]), entry) for entry in changes.entries)
        for packet_id, state, session_id, seq in changes.entry_updates:
            entry = self.queue[session_id, seq]
            self.queue[session_id, seq] = (*entry[:PACKET], packet_id, state, *entry[SIZE:])
        for session_id, seq, _, _ in changes.deleted_entries:
            del self.queue[session_id, seq]
        self.received -= set(changes.deleted_received)
        self.received |= set(changes.received)
        for topic in changes.removed(RETAINED):
            self.retained.pop(topic, None)
        self.retained.update((one.topic, one) for one in changes.saved(RETAINED))
        for producer in changes.removed(PRODUCERS):
            self.producers.pop(producer, None)
        self.producers.update((row[:3], row) for row in changes.saved(PRODUCERS))
        for reader_id in changes.removed(READERS):
            del self.readers[reader_id]
            self.offsets = {key: row for key, row in self.offsets.items() if key[0] != reader_id}
        self.readers.update((reader.reader_id, reader) for reader in changes.saved(READERS))
        self.offsets.update((offsets[:2], offsets) for offsets in changes.saved(OFFSETS))
        for partition, messages in changes.stream_messages.items():
            self.records.setdefault(partition, []).extend(int.from_bytes(one.payload, "big") for one in messages)
        used = {entry[MESSAGE] for entry in self.queue.values()}
        self.messages = {key: one for key, one in self.messages.items() if key in used}

    def _delete_session(self, session_id: int) -> None:
        del self.sessions[session_id]
        self.subscriptions = {key: row for key, row in self.subscriptions.items() if key[0] != session_id}
        self.queue = {key: entry for key, entry in self.queue.items() if key[0] != session_id}
        self.received = {key for key in self.received if received_row(key)[0] != session_id}


class Changes:
    """Makes write sets as the journal does, and as `WriteSet` allows."""

    def __init__(self, rows: Rows, chance: Random) -> None:
        self.rows = rows
        self.chance = chance
        self.last_session = self.last_message = self.last_seq = self.last_record = self.last_reader = 0

    def next(self) -> WriteSet:
        made = WriteSet()
        chance = self.chance
        for _ in range(chance.randrange(1, 6)):
            chance.choice(
                (self._session, self._subscribe, self._queue, self._queue, self._queue, self._advance, self._advance,
                 self._acknowledge, self._acknowledge, self._receive, self._retain, self._produce, self._stream, self._read)
            )(made)  # fmt: skip
        if chance.random() < 0.1:
            self._end_session(made)
        return made

    def _sessions(self, made: WriteSet) -> list[int]:
        """Sessions that are there, and do not end with this write set."""
        known = {**self.rows.sessions, **{row.session_id: row for row in made.saved(SESSIONS)}}
        return [session_id for session_id in known if session_id not in made.removed(SESSIONS)]

    def _session(self, made: WriteSet) -> None:
        changed = {row.session_id for row in made.saved(SESSIONS)}
        known = [session_id for session_id in self._sessions(made) if session_id not in changed]
        if known and self.chance.random() < 0.6:
            session_id = self.chance.choice(known)
        else:
            session_id = self.last_session = self.last_session + 1
        at = self.chance.choice((None, self.chance.random()))
        made.saved(SESSIONS).append(SessionRow(session_id, f"c{session_id}", 5, 9, at, b"will", None, "user", None))

    def _end_session(self, made: WriteSet) -> None:
        changed = {row.session_id for row in made.saved(SESSIONS)}
        changed |= {row.session_id for row in made.saved(SUBSCRIPTIONS)} | {entry[0] for entry in made.entries}
        changed |= {received_row(key)[0] for key in (*made.received, *made.deleted_received)}
        changed |= {key[0] for key in made.removed(SUBSCRIPTIONS)}
        changed |= {update[2] for update in made.entry_updates} | {key[0] for key in made.deleted_entries}
        left = [session_id for session_id in self.rows.sessions if session_id not in changed]
        if left:
            made.removed(SESSIONS).append(self.chance.choice(left))

    def _subscribe(self, made: WriteSet) -> None:
        for session_id in self._some(self._sessions(made)):
            options = self.chance.choice((0, AWAITS_RETAINED))
            row = SubscriptionRow(session_id, f"a/{self.chance.randrange(3)}", self.chance.randrange(3), options, 0)
            key = (session_id, row.topic_filter)
            if key not in [(other.session_id, other.topic_filter) for other in made.saved(SUBSCRIPTIONS)]:
                made.saved(SUBSCRIPTIONS).append(row)
            if self.chance.random() < 0.4 and key not in made.removed(SUBSCRIPTIONS):
                made.removed(SUBSCRIPTIONS).append(key)

    def _queue(self, made: WriteSet) -> None:
        targets = self._some(self._sessions(made))
        if not targets:
            return
        chance = self.chance
        self.last_message += 1
        payload = chance.randbytes(chance.choice((0, 5, 100, 6000)))
        expires_at = chance.choice((0, 0, chance.randrange(1, 1000)))
        one = message(self.last_message, f"t/{self.last_message}", payload, timestamp=chance.randrange(1000))
        one = message(one.id, one.topic, payload, timestamp=one.timestamp, expires_at=expires_at)
        made.messages.append(one)
        for session_id in targets:
            self._entry(made, session_id, one, len(targets) > 1)

    def _entry(self, made: WriteSet, session_id: int, one: Message, shared: bool) -> None:
        self.last_seq += 1
        size = len(one.topic) + len(one.payload)
        made.entries.append((session_id, self.last_seq, one.id, int(shared), 1, 0, b"\1", 0, 0, size, one.expires_at))

    def _entries(self, made: WriteSet) -> list[EntryRow]:
        """Entries that are there, or come with this write set, and that it does not change otherwise."""
        gone = {key[:2] for key in made.deleted_entries} | {update[2:] for update in made.entry_updates}
        ended = made.removed(SESSIONS)
        found = [*self.rows.queue.values(), *made.entries]
        return [entry for entry in found if (entry[0], entry[SEQ]) not in gone and entry[0] not in ended]

    def _advance(self, made: WriteSet) -> None:
        for entry in self._some(self._entries(made)):
            made.entry_updates.append((self.chance.randrange(1, 65536), self.chance.randrange(1, 4), *entry[:2]))

    def _acknowledge(self, made: WriteSet) -> None:
        for entry in self._some(self._entries(made)):
            made.deleted_entries.append((entry[0], entry[SEQ], entry[MESSAGE], entry[SHARED]))

    def _receive(self, made: WriteSet) -> None:
        for session_id in self._some(self._sessions(made)):
            key = received_key(session_id, self.chance.randrange(1, 5))
            if key in made.received or key in made.deleted_received:
                continue
            added = self.chance.random() < 0.5
            if added:
                made.received.append(key)
            if not added or key in self.rows.received:
                made.deleted_received.append(key)

    def _retain(self, made: WriteSet) -> None:
        topic = f"r/{self.chance.randrange(4)}"
        if topic not in [one.topic for one in made.saved(RETAINED)] and topic not in made.removed(RETAINED):
            if self.chance.random() < 0.7:
                made.saved(RETAINED).append(Message(topic, self.chance.randbytes(20), 1, True, b"", "p", self.last_seq, 0))
            else:
                made.removed(RETAINED).append(topic)

    def _produce(self, made: WriteSet) -> None:
        key = ("s", "", f"p{self.chance.randrange(4)}")
        if self.chance.random() < 0.3 and key not in made.removed(PRODUCERS):
            made.removed(PRODUCERS).append(key)
        if self.chance.random() < 0.8 and key not in [row[:3] for row in made.saved(PRODUCERS)]:
            made.saved(PRODUCERS).append(ProducerRow(*key, self.chance.randrange(99), b"\1", self.chance.randrange(10**6)))

    def _read(self, made: WriteSet) -> None:
        self.last_reader += 1
        made.saved(READERS).append(ReaderRow(self.last_reader, 2, 0, f"g{self.last_reader}", "s", "#", "latest", 0, self.last_seq))
        changed = {row.reader_id for row in made.saved(OFFSETS)}
        known = [key for key in (*self.rows.readers, self.last_reader) if key not in {*made.removed(READERS), *changed}]
        if len(known) > 1 and self.chance.random() < 0.5:
            made.removed(READERS).append(known.pop(0))
        for reader_id in self._some(known):
            pending = self.chance.randbytes(24 * self.chance.randrange(3))
            made.saved(OFFSETS).append(OffsetsRow(reader_id, self.chance.randrange(2), self.last_seq, self.last_seq, pending))

    def _stream(self, made: WriteSet) -> None:
        for partition in self._some([0, 1]):
            records = made.stream_messages.setdefault(("s", partition), [])
            self.last_record += 1
            payload = self.last_record.to_bytes(8, "big")
            records.append(Message("s", payload, 1, False, b"", "p", self.last_record, 0))

    def _some(self, found: list[Any]) -> list[Any]:
        return self.chance.sample(found, min(len(found), self.chance.choice((1, 1, 1, 2, 5))))


def check_later_page(writer: Writer, rows: Rows, chance: Random) -> None:
    """A page of any session behind any of its entries, which the tables may have or not."""
    if not rows.sessions:
        return
    session_id = chance.choice(sorted(rows.sessions))
    mine = sorted((entry for key, entry in rows.queue.items() if key[0] == session_id), key=lambda e: e[SEQ])
    after = chance.choice([0, *(entry[SEQ] for entry in mine)])
    page = writer.next_page(session_id, after, 3)
    assert page.error is None
    assert [(row.seq, row.message_id, row.packet_id, row.state) for row in page.rows] == [
        (entry[SEQ], entry[MESSAGE], entry[PACKET], entry[STATE]) for entry in mine if entry[SEQ] > after
    ][:3]


def check_reads(writer: Writer, rows: Rows) -> None:
    """Pages and queries of every session."""
    for session_id in rows.sessions:
        page = writer.page(session_id)
        assert page.error is None
        mine = sorted((entry for key, entry in rows.queue.items() if key[0] == session_id), key=lambda e: e[SEQ])
        assert [(row.seq, row.message_id, row.packet_id, row.state) for row in page.rows] == [
            (entry[SEQ], entry[MESSAGE], entry[PACKET], entry[STATE]) for entry in mine
        ]
        assert [(row.topic, row.payload) for row in page.rows] == [
            (rows.messages[entry[MESSAGE]].topic, rows.messages[entry[MESSAGE]].payload) for entry in mine
        ]
        assert page.received == sorted(packet_id for key, packet_id in map(received_row, rows.received) if key == session_id)
    asked = WriteSet()
    unsent = [Query(EVERYTHING, session_id, 0, 0) for session_id in rows.sessions]
    expired = Query(EVERYTHING, 0, 0, 500)
    asked.queries = [*unsent, expired]  # type: ignore[list-item]
    writer.commit(asked)
    waiting = [entry for entry in rows.queue.values() if entry[PACKET] == 0]
    for query_ in unsent:
        assert query_.rows == sorted(stored(entry) for entry in waiting if entry[0] == query_.session_id)
    assert expired.rows == sorted(stored(entry) for entry in waiting if 0 < entry[EXPIRES] <= 500)
    assert expired.next_expiry == min((e[EXPIRES] for e in rows.queue.values() if e[EXPIRES] > 500), default=0)


def stored(entry: EntryRow) -> StoredEntry:
    return StoredEntry(entry[EXPIRES], entry[0], entry[SEQ], entry[MESSAGE], entry[SHARED], entry[SIZE])


def check_recovered(recovered: Recovered, rows: Rows) -> None:
    assert {row.session_id: row for row in recovered.rows(SESSIONS)} == rows.sessions
    assert {(row.session_id, row.topic_filter): row for row in recovered.rows(SUBSCRIPTIONS)} == rows.subscriptions
    assert sorted(recovered.rows(RETAINED)) == sorted(map(retained_row, rows.retained.values()))
    assert sorted(recovered.rows(PRODUCERS)) == sorted(rows.producers.values())
    assert recovered.rows(READERS) == [rows.readers[key] for key in sorted(rows.readers)]
    assert sorted(recovered.rows(OFFSETS)) == sorted(rows.offsets.values())
    queues = {row.session_id: (row.entries, row.size, row.last_seq) for row in recovered.queues}
    for session_id in rows.sessions:
        mine = [entry for key, entry in rows.queue.items() if key[0] == session_id]
        wanted = (len(mine), sum(entry[SIZE] for entry in mine), max((entry[SEQ] for entry in mine), default=0))
        assert queues.get(session_id, (0, 0, 0)) == wanted
    assert recovered.next_session_id > max(rows.sessions, default=0)
    assert recovered.next_message_id > max(rows.messages, default=0)
    assert recovered.next_seq > max((key[1] for key in rows.queue), default=0)


def retained_row(one: Message) -> RetainedRow:
    return RetainedRow(*(getattr(one, name) for name in RetainedRow._fields))


def check_tables(database: Path, rows: Rows) -> None:
    """The tables as another process reads them."""
    entries = query(database, f"SELECT {', '.join(ENTRY_COLUMNS)} FROM queue ORDER BY session_id, seq")
    # A NULL expiry is one of an older version.
    assert entries == [entry for _, entry in sorted(rows.queue.items())]
    messages = query(database, "SELECT id, topic, payload, timestamp, expires_at FROM messages ORDER BY id")
    assert messages == [(one.id, one.topic, one.payload, one.timestamp, one.expires_at) for _, one in sorted(rows.messages.items())]
    assert set(query(database, "SELECT session_id, packet_id FROM received")) == set(map(received_row, rows.received))
    assert query(database, "PRAGMA integrity_check") == ["ok"]


def check_records(directory: Path, rows: Rows) -> None:
    log = FileLog(directory)
    assert {key: log.records(key) for key in rows.records} == rows.records


class RandomCommits:
    """The write sets of a seed, each made for the rows that those before it add up to."""

    def __init__(self, seed: int) -> None:
        self.rows = Rows()
        self.number = 0
        self._changes = Changes(self.rows, Random(seed))

    def next(self) -> WriteSet:
        """The next write set, which is in the rows."""
        made = self._changes.next()
        self.rows.apply(made)
        self.number += 1
        return made

    def skip_to(self, number: int) -> None:
        while self.number < number:
            self.next()


def main(directory: str, seed: str, number: str) -> None:
    commits = RandomCommits(int(seed))
    commits.skip_to(int(number))
    store = SqliteStore(Path(directory) / "broker.db", "commit", FileLog(Path(directory) / "streams"))
    check_recovered(store.recover(), commits.rows)
    writer = Writer(store)
    chance = Random(commits.number)
    while True:
        made = commits.next()
        error = writer.outcome(made)
        if error is not None:
            raise error
        os.write(1, b"%d\n" % commits.number)
        if chance.random() < 0.05:
            check_reads(writer, commits.rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
