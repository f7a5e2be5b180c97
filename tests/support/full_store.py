"""A database with rows in every table and pages of every type, and ways to damage it."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

from sessions import row_kinds
from sessions.row_kinds import OFFSETS, PRODUCERS, READERS, RETAINED, SUBSCRIPTIONS
from sessions.rows import OffsetsRow, ProducerRow, ReaderRow, SessionRow, SubscriptionRow, received_key
from sessions.store.pages import PageFile
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet
from support.store_writer import Writer, message, retained

TABLES = (
    "sessions",
    "subscriptions",
    "messages",
    "queue",
    "received",
    "retained",
    "stream_ends",
    "producers",
    "stream_readers",
    "stream_offsets",
)
PAGE = 4096
SESSIONS = 30
EACH = 30  # messages per session

Rows = dict[str, set[tuple[object, ...]]]


def fill(path: Path, keep_wal: bool = False) -> None:
    """Create the database at `path`; with `keep_wal` in the state that a crash leaves."""
    made = path if not keep_wal else path.with_name(f"{path.name}.making")
    shutil.rmtree(path.with_name("log"), ignore_errors=True)
    store = SqliteStore(made, "commit", None)
    store.recover()
    writer = Writer(store)
    chance = random.Random(7)
    for number in range(SESSIONS):
        writer.commit(_commit(number, chance))
    if keep_wal:
        for suffix in ("", "-wal"):
            path.with_name(path.name + suffix).write_bytes(made.with_name(made.name + suffix).read_bytes())
        shutil.copytree(path.with_name("log"), path.with_name("log of the crash"))
    store.stop()
    if keep_wal:
        made.unlink()
        path.with_name("log").rmdir()
        path.with_name("log of the crash").rename(path.with_name("log"))


def _commit(number: int, chance: random.Random) -> WriteSet:
    write_set = WriteSet()
    key = number + 1
    will, name = (b"will" if number % 2 else None), (f"user {number}" if number % 3 else None)
    write_set.saved(row_kinds.SESSIONS)[:] = [SessionRow(key, f"client-{number}", 5, 3600, 1.5, will, None, name, None)]
    write_set.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(key, f"sensors/{i}/ü", 1, 1, i) for i in range(20)]
    ids = range(number * EACH + 1, (number + 1) * EACH + 1)
    payloads = [chance.randbytes(chance.choice((0, 9, 90, 900, 9000))) for _ in ids]
    write_set.messages = [message(i, f"sensors/{i}", payload, timestamp=i) for i, payload in zip(ids, payloads)]
    write_set.entries = [(key, i, i, 0, 1, 0, b"", 0, 0, len(f"sensors/{i}") + len(payload), 0) for i, payload in zip(ids, payloads)]
    write_set.received = [received_key(key, i) for i in range(1, 40)]
    write_set.saved(RETAINED)[:] = [retained(f"meta/{number}", chance.randbytes(3000), timestamp=number)]
    write_set.saved(PRODUCERS)[:] = [ProducerRow("s", "", f"producer-{number}-{i}", i, chance.randbytes(i), 0) for i in range(40)]
    write_set.saved(READERS)[:] = [ReaderRow(key, 2, 0, f"group-{number}", "s", "sensors/#", "latest", 0, number)]
    write_set.saved(OFFSETS)[:] = [OffsetsRow(key, i, 100 + number, 1124 + number, chance.randbytes(24 * i)) for i in range(8)]
    if number > 10:
        done = range((number - 11) * EACH + 1, (number - 10) * EACH)
        write_set.deleted_entries = [(number - 10, i, i, 0) for i in done]
    return write_set


def rows_of(path: Path) -> Rows:
    """All rows that SQLite can read."""
    connection = sqlite3.connect(path)
    try:
        return {table: set(connection.execute(f"SELECT * FROM {table}")) for table in TABLES}
    finally:
        connection.close()


def page_kinds(path: Path) -> dict[str, list[int]]:
    """The page numbers of an undamaged database by page type."""
    connection = sqlite3.connect(path)
    roots = dict(connection.execute("SELECT rootpage, name FROM sqlite_master WHERE rootpage > 1"))
    connection.close()
    pages = PageFile(path)
    kinds: dict[str, list[int]] = {}
    names = {2: "interior index", 5: "interior table", 10: "leaf index", 13: "leaf table"}
    for number in range(1, pages.page_count + 1):
        data = pages.page(number) or b""
        each = PAGE // 5 + 1
        if number == 1:
            kind = "header"
        elif (number - 2) % each == 0:
            kind = "pointer map"
        else:
            state = (pages.page((number - 2) // each * each + 2) or b"")[5 * ((number - 2) % each - 1)]
            kind = {2: "free", 3: "overflow", 4: "overflow"}.get(state) or names[data[0]]
            kind = f"root {kind}" if number in roots and kind.startswith("interior") else kind
        kinds.setdefault(kind, []).append(number)
    pages.close()
    return kinds


def overwrite(path: Path, page: int, change: Callable[[bytes], bytes]) -> None:
    """Replace a page of a file."""
    with open(path, "r+b") as file:
        file.seek((page - 1) * PAGE)
        data = file.read(PAGE)
        file.seek((page - 1) * PAGE)
        file.write(change(data))


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: random.Random(5).randbytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "half": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "shifted": lambda data: b"\0" + data[:-1],
}
