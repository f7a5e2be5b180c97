"""sessions.database_copy: a copy of one moment, of a database that changes all the time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from store_writer import ENTRIES, KEPT, FileLog, Writer, commit_number

from sessions import database_copy
from sessions.database_copy import copy_database
from sessions.store import Store
from sessions.store_check import check_database


def test_the_copy_is_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_copy, "STEP_PAGES", 1)
    source, target = tmp_path / "data" / "broker.db", tmp_path / "copy.db"
    store = Store(source, "commit", FileLog(source.parent / "streams"))
    store.recover()
    writer = Writer(store)
    for number in range(300):
        writer.commit(commit_number(number))
    stopping = threading.Event()
    reached = [300]

    def write() -> None:
        while not stopping.is_set():
            writer.commit(commit_number(reached[0]))
            reached[0] += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(10):
            began = reached[0]
            copy_database(source, target)
            state = check_database(target)
            assert state.problems == []
            assert state.counts["queue"] == state.counts["messages"] == ENTRIES * KEPT
            assert state.ends is not None
            number = sum(state.ends.values()) - 1
            # Everything acknowledged before is there, and nothing of the future.
            assert began - 1 <= number <= reached[0]
            target.unlink()
    finally:
        stopping.set()
        thread.join()
        store.stop()
