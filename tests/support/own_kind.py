"""A kind of rows that the broker does not have, on the way of all kinds: journal, commit log, tables, shards of a cluster and back.

A program, since a kind is in the table before the store is imported: ``python -m support.own_kind write|read DIRECTORY``.
``write`` commits rows and ends as a killed process does, before the tables have them; ``read`` compares what is there.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from sessions.row_kinds import KINDS, SESSIONS, RowKind
from sessions.rows import SessionRow


class NoteRow(NamedTuple):
    """A text that belongs to a session."""

    session_id: int
    name: str
    text: bytes


NOTES: Final[RowKind[NoteRow, tuple[int, str]]] = RowKind(
    "notes", "notes", NoteRow, (int, str, bytes), ("session_id", "name"), 20, 19, owner=SESSIONS, order="session_id, name"
)

from mqttbroker.cluster.log.body import encode_body  # noqa: E402
from mqttbroker.cluster.log.view import ViewState  # noqa: E402
from mqttbroker.cluster.shard.tables import ShardTables  # noqa: E402
from mqttbroker.cluster.shards import Shards  # noqa: E402
from mqttbroker.cluster.transfer.conversion import StoreRows  # noqa: E402
from mqttbroker.cluster.transfer.store_merge import merge_shards  # noqa: E402
from sessions.journal import Journal  # noqa: E402
from sessions.store.check import check_database  # noqa: E402
from sessions.store.database import Database  # noqa: E402
from sessions.store.interface import Recovered  # noqa: E402
from sessions.store.tables import SqliteTables  # noqa: E402
from sessions.store.writer import SqliteStore  # noqa: E402
from support.journal import close_batch  # noqa: E402
from support.store_writer import Writer  # noqa: E402

SHARDS = 3
CLUSTER = b"cluster1"
TABLE = (
    "CREATE TABLE notes (session_id INTEGER NOT NULL, name TEXT NOT NULL, text BLOB NOT NULL, PRIMARY KEY (session_id, name)) WITHOUT ROWID"
)
KEPT = {("c1", "kept"): b"2", ("c1", "later"): b"4", ("c2", "kept"): b"2", ("c2", "later"): b"4"}


def session(number: int) -> SessionRow:
    return SessionRow(number, f"c{number}", 5, 3600, 1.0, None, None, None, None)


def make(database: Path) -> None:
    """A new database with the table, which a migration would make."""
    new = Database(database, durable=True)
    new.open(may_be_new=True)
    new.connection.execute(TABLE)
    new.close()


def opened(database: Path, apply_interval: float) -> tuple[SqliteStore, Recovered]:
    store = SqliteStore(database, "commit", None, apply_interval=apply_interval)
    return store, store.recover()


def write(database: Path) -> None:
    make(database)
    journal = Journal(True)
    store, _ = opened(database, 3600.0)
    writer = Writer(store)

    def commit() -> None:
        assert writer.outcome(close_batch(journal)) is None
        journal.committed()

    for number in (1, 2, 3):
        journal.save(SESSIONS, session(number))
        journal.save(NOTES, NoteRow(number, "kept", b"1"))
        journal.save(NOTES, NoteRow(number, "kept", b"2"))
        journal.save(NOTES, NoteRow(number, "gone", b"3"))
    commit()
    journal.remove(SESSIONS, 3)
    for number in (1, 2):
        journal.remove(NOTES, (number, "gone"))
        journal.save(NOTES, NoteRow(number, "later", b"4"))
    close_batch(journal)
    journal.failed()  # written again with the next batch
    commit()
    os._exit(0)


def notes_of(recovered: Recovered) -> dict[tuple[str, str], bytes]:
    """By client id and name."""
    clients = {row.session_id: row.client_id for row in recovered.rows(SESSIONS)}
    return {(clients[row.session_id], row.name): row.text for row in recovered.rows(NOTES)}


def read(directory: Path, database: Path) -> None:
    store, recovered = opened(database, 1.0)
    Writer(store)
    assert notes_of(recovered) == KEPT, recovered.rows(NOTES)
    store.stop()
    state = check_database(database)
    assert (state.problems, state.counts["notes"]) == ([], len(KEPT)), state

    shards = Shards(SHARDS)
    tables = [ShardTables(directory / str(shard), shard, CLUSTER) for shard in range(SHARDS)]
    for shard in tables:
        make(shard.database.path)
        shard.open()
    with closing(sqlite3.connect(database)) as connection:
        rows = StoreRows(connection, shards, 1 << 20, 7.0)
        for end, (number, write_set) in enumerate(rows.write_sets(), 1):
            tables[number].changed(ViewState(end, 0, b"node-aaa", end, False), encode_body(write_set))
    for number, shard in enumerate(tables):
        of_shard = {key: text for key, text in KEPT.items() if shards.of_text(key[0]) == number}
        assert notes_of(shard.recover()) == of_shard
        shard.close()

    merged = directory / "merged" / "mqttbroker.db"
    make(merged)
    merge_shards(merged, [shard.database.path for shard in tables])
    whole = Database(merged, durable=True)
    whole.open(may_be_new=False)
    assert notes_of(SqliteTables(whole.connection, merged).recover()) == KEPT
    whole.connection.execute("INSERT INTO notes VALUES (99, 'lost', x'')")
    whole.close()
    assert check_database(merged).problems == ["1 notes without a session"]


def main(step: str, directory: str) -> None:
    assert KINDS[-1] is NOTES
    database = Path(directory) / "single" / "mqttbroker.db"
    if step == "write":
        write(database)
    else:
        read(Path(directory), database)


if __name__ == "__main__":
    main(*sys.argv[1:])
