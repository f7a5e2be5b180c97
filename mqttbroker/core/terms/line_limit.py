"""Limits the lines per second in the log about events that clients can cause in any number."""

from __future__ import annotations

import logging
from typing import Final

from mypy_extensions import i64

from sessions.context import Clock

MAX_LINES: Final = 100  # per second
_SECOND: Final = 1_000_000


class LineLimit:
    """Permits `MAX_LINES` lines per second. ``logger`` logs the number of further ones as the event ``excess``."""

    def __init__(self, clock: Clock, logger: str, excess: str) -> None:
        self._clock = clock
        self._log = logging.getLogger(logger)
        self._excess = excess
        self._ends: i64 = 0
        self._count: i64 = 0

    def permits(self) -> bool:
        """Count an event; return whether it may have a line."""
        now: i64 = self._clock.now
        if now >= self._ends:
            if self._count > MAX_LINES:
                self._log.info("event=%s count=%d", self._excess, self._count - MAX_LINES)
            self._ends = now + _SECOND
            self._count = 0
        self._count += 1
        return self._count <= MAX_LINES
