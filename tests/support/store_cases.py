"""Fixtures that open a store, and small write sets."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sessions.rows import SessionRow
from sessions.store.interface import Recovered
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet
from support.store_writer import FileLog, Writer, message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "broker.db"


@pytest.fixture
def log(path: Path) -> FileLog:
    return FileLog(path.parent / "streams")


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., tuple[Recovered, Writer]]]:
    """A function that opens a store after closing the one before it."""
    stores: list[SqliteStore] = []

    def open_store(durability: str = "commit", log: FileLog | None = None) -> tuple[Recovered, Writer]:
        for store in stores:
            store.stop()
        store = SqliteStore(path, durability, log)
        stores.append(store)
        recovered = store.recover()
        return recovered, Writer(store)

    yield open_store
    for store in stores:
        store.stop()


Opened = Callable[..., tuple[Recovered, Writer]]


def query(path: Path, sql: str) -> list[Any]:
    """Rows as another process sees them; bare values if they have one column."""
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute(sql).fetchall()
    finally:
        connection.close()
    return [row[0] if len(row) == 1 else row for row in rows]


def queued(session_id: int, keys: list[int], payload: bytes = b"p") -> WriteSet:
    """Messages queued for one session; seq and message id are the key."""
    write_set = WriteSet()
    write_set.messages = [message(key, "t", payload, timestamp=key) for key in keys]
    write_set.entries = [(session_id, key, key, 0, 1, 0, b"", 0, 0, 1 + len(payload), 0) for key in keys]
    return write_set


def session_row(session_id: int, disconnected_at: float | None = None) -> SessionRow:
    return SessionRow(session_id, f"client-{session_id}", 5, 3600, disconnected_at, None, None, None, None)
