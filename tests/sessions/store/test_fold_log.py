"""sessions.store.log_repair: a repair that cannot write everything keeps the commit log."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.store_cases import query
from support.store_writer import Writer, retained, retained_rows

from sessions.row_kinds import RETAINED, SESSIONS
from sessions.store import log_repair
from sessions.store import salvage as salvage_module
from sessions.store.interface import StoreError
from sessions.store.log_repair import fold_log
from sessions.store.recovery import LOG_DIRECTORY
from sessions.store.salvage import salvage
from sessions.store.writer import SqliteStore
from sessions.write_set import WriteSet

NAME = "mqttbroker.db"
COUNT = 20


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """A data directory as a killed broker leaves it, whose tables have nothing of the log."""
    running, left = tmp_path / "running", tmp_path / "left"
    store = SqliteStore(running / NAME, "commit", None, apply_interval=1000.0)
    store.recover()
    writer = Writer(store)
    for number in range(COUNT):
        assert writer.outcome(changes(number)) is None
    shutil.copytree(running, left)
    assert query(left / NAME, "SELECT count(*) FROM retained") == [0]
    yield left
    store.stop()


def changes(number: int) -> WriteSet:
    write_set = WriteSet()
    write_set.saved(RETAINED)[:] = [retained(f"r/{number}", bytes(20_000))]
    return write_set


def fold(data: Path) -> list[str]:
    return fold_log(data / NAME, data / LOG_DIRECTORY, False, "stamp", lambda records: [])


def found_after(data: Path) -> list[str]:
    """The topics that a start finds, which gets everything that the log has."""
    store = SqliteStore(data / NAME, "commit", None)
    recovered = store.recover()
    store.start(lambda *_: None, lambda *_: None)
    store.stop()
    assert recovered.rows(SESSIONS) == []
    return sorted(row.topic for row in recovered.rows(RETAINED))


EVERYTHING = sorted(f"r/{number}" for number in range(COUNT))


def test_a_salvaged_database_still_knows_its_log(killed: Path) -> None:
    """As a repair leaves it that is killed before it reaches the log."""
    salvage(killed / NAME, "stamp", "the test says so")
    assert found_after(killed) == EVERYTHING


def test_a_database_that_forgot_its_log_is_refused_until_a_repair_applies_it(killed: Path) -> None:
    connection = sqlite3.connect(killed / NAME)
    connection.execute("DELETE FROM commit_log")
    connection.commit()
    connection.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="which commit log belongs to it"):
            found_after(killed)
    assert fold(killed) == []
    assert found_after(killed) == EVERYTHING


def test_no_database_is_made_beside_a_log(killed: Path) -> None:
    for path in killed.glob(f"{NAME}*"):
        path.unlink()
    before = sorted(path.name for path in killed.iterdir())
    with pytest.raises(StoreError, match="is missing, but its commit log is there"):
        found_after(killed)
    assert sorted(path.name for path in killed.iterdir()) == before


def test_a_start_finishes_a_salvage_that_was_killed_while_the_database_had_no_name(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(salvage_module, "_rename_side_files", die)
        with pytest.raises(KeyboardInterrupt):
            salvage(killed / NAME, "stamp", "the test says so")
    assert not (killed / NAME).exists()
    assert found_after(killed) == EVERYTHING


def test_a_disk_that_gets_full_during_a_repair_takes_nothing(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_little_room(*args: Any, **more: Any) -> sqlite3.Connection:
        connection = sqlite3.Connection(*args, **more)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 5}")
        return connection

    segments = sorted(path.name for path in (killed / LOG_DIRECTORY).glob("*.log"))
    with monkeypatch.context() as patch:
        patch.setattr(log_repair.sqlite3, "connect", with_little_room)
        with pytest.raises(sqlite3.OperationalError, match="full"):
            fold(killed)
    assert sorted(path.name for path in (killed / LOG_DIRECTORY).glob("*.log")) == segments
    assert fold(killed) == []
    store = SqliteStore(killed / NAME, "commit", None)
    recovered = store.recover()
    store.stop()
    assert sorted(recovered.rows(RETAINED)) == sorted(row for number in range(COUNT) for row in retained_rows(changes(number)))
