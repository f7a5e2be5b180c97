"""Log lines for operations of the writer that failed and will be tried again."""

from __future__ import annotations

import logging
import sqlite3

logger = logging.getLogger(__name__)


class FailureLog:
    """Logs each kind of disk failure once until a commit succeeds, and a defect every time with its traceback."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def report(self, what: str, error: Exception) -> None:
        if not isinstance(error, (OSError, sqlite3.Error)):
            logger.error("event=store_trouble what=%s", what, exc_info=error)
        elif what not in self._logged:
            self._logged.add(what)
            logger.warning("event=store_trouble what=%s reason=%s", what, error)

    def clear(self) -> None:
        """A commit succeeded."""
        self._logged.clear()
