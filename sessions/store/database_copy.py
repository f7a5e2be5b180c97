"""Copies the database while a broker uses it.

The copy is of one commit, and the broker's writer does not wait for it: one read transaction covers all pages, so that
SQLite does not start again after a commit. Until it ends, the write-ahead log keeps growing.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sessions.store.check import open_to_read
from sessions.store.disk import sync_file

STEP_PAGES = 1024


def copy_database(source: Path, target: Path) -> None:
    """Copy the database at `source` to the new file `target`, and sync it. Raises `sqlite3.Error` or `OSError`."""
    reader = open_to_read(source)
    try:
        copy = sqlite3.connect(target, isolation_level=None)
        try:
            copy.execute("PRAGMA synchronous = OFF")
            copy.execute("PRAGMA journal_mode = OFF").fetchall()
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
            reader.backup(copy, pages=STEP_PAGES)
        finally:
            copy.close()
    finally:
        reader.close()
    sync_file(target)


def tables_position(source: Path) -> int:
    """The position of the commit log that the tables are at. Raises `sqlite3.Error`."""
    reader = open_to_read(source)
    try:
        row = reader.execute("SELECT position FROM commit_log").fetchone()
        return 0 if row is None else int(row[0])
    finally:
        reader.close()


def forget_log(copy: Path) -> None:
    """Make a copy a store of its own, with the tables alone: the log of the original continues without it."""
    connection = sqlite3.connect(copy, isolation_level=None)
    try:
        connection.execute("DELETE FROM commit_log")
    finally:
        connection.close()
    sync_file(copy)
