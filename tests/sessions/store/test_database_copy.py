"""sessions.store.database_copy: a copy of one commit while the database changes between any two pages."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from support.store_writer import ENTRIES, KEPT, FileLog, Writer, commit_number

from sessions.store import database_copy
from sessions.store.check import check_database, open_to_read
from sessions.store.database_copy import copy_database
from sessions.store.writer import SqliteStore

COMMITS = 40


class Interrupted:
    """A connection whose backup has the writer commit between any two pages."""

    def __init__(self, path: Path, writer: Writer) -> None:
        self.connection = open_to_read(path)
        self.writer = writer
        self.number = COMMITS

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def backup(self, target: sqlite3.Connection, pages: int) -> None:
        self.connection.backup(target, pages=1, progress=self._commit)

    def _commit(self, *_: int) -> None:
        if self.number < 2 * COMMITS:
            self.writer.commit(commit_number(self.number))
            self.number += 1


def test_the_copy_has_the_commit_at_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "data" / "broker.db", tmp_path / "copy.db"
    store = SqliteStore(source, "commit", FileLog(source.parent / "streams"))
    store.recover()
    writer = Writer(store)
    for number in range(COMMITS):
        writer.commit(commit_number(number))
    reader = Interrupted(source, writer)
    monkeypatch.setattr(database_copy, "open_to_read", lambda path: reader)
    copy_database(source, target)
    assert reader.number > COMMITS
    state = check_database(target)
    assert state.problems == []
    assert state.counts["queue"] == state.counts["messages"] == ENTRIES * KEPT
    assert state.ends is not None and sum(state.ends.values()) == COMMITS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db", "data"]
    store.stop()
    assert check_database(source).problems == []
