"""Damage of the database: recognised in SQLite's errors, and noted beside the file for the next start."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from sessions.store.interface import CorruptStore

logger = logging.getLogger(__name__)


def is_corrupt(error: BaseException | None) -> bool:
    """Whether an error of SQLite means that the file is damaged."""
    if not isinstance(error, sqlite3.Error):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # raised by the sqlite3 module for text that is not UTF-8
        return isinstance(error, sqlite3.OperationalError) and "decode" in str(error)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class DamageMarker:
    """The file ``<database>.suspect``: it makes the next start check every page.

    ``found`` is SQLite's message about the first damaged page since the start.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = database.with_name(f"{database.name}.suspect")
        self.found = ""

    def check(self, connection: sqlite3.Connection) -> None:
        """Check every page if the marker is there, and remove it. Raises `CorruptStore`."""
        if not self._path.exists():
            return
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise CorruptStore(f"{self._database}: {' '.join(found.split())}")
        self._path.unlink()

    def noted(self) -> str:
        """The text of the marker; "" if it is not there."""
        try:
            return " ".join(self._path.read_text(encoding="utf-8", errors="replace").split()) or "is damaged"
        except FileNotFoundError:
            return ""

    def forget(self) -> None:
        """Remove the marker."""
        self.found = ""
        self._path.unlink(missing_ok=True)

    def note(self, error: Exception | None) -> None:
        """Write the marker if the error is the first that means damage."""
        if self.found or not (is_corrupt(error) or isinstance(error, CorruptStore)):
            return
        self.found = str(error)
        try:
            self._path.write_text(f"{error}\n")
        except OSError as failure:
            logger.error("event=damage_not_noted file=%s reason=%s", self._path, failure.strerror)
