"""Logs what clients were refused: publications, subscriptions, wills, streams."""

from __future__ import annotations

import logging
from typing import Dict, Final, Optional

from mypy_extensions import i64

from sessions.context import Clock

audit = logging.getLogger("mqttbroker.audit")

MAX_LINES: Final = 100  # per second; further denials are counted in one line
_SECOND: Final = 1_000_000


class Denials:
    """Writes a line of the audit log for each denial, so few that a flood of refused packets costs nothing more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: i64 = 0
        self._count: i64 = 0
        self.counts: Dict[str, int] = {}  # by action, since the start

    def may_log(self) -> bool:
        """Count a refusal; return whether it may have a line of the log."""
        now: i64 = self._clock.now
        if now >= self._ends:
            if self._count > MAX_LINES:
                audit.info("event=denials_not_logged count=%d", self._count - MAX_LINES)
            self._ends = now + _SECOND
            self._count = 0
        self._count += 1
        return self._count <= MAX_LINES

    def log(
        self, action: str, target: str, client_id: str, peer: str, username: Optional[str], listener: str
    ) -> None:
        """Log that a client may not do ``action`` ("publish", "subscribe", "will") to a topic or filter."""
        self.counts[action] = self.counts.get(action, 0) + 1
        if self.may_log():
            audit.info(
                "event=denied action=%s target=%s client=%s address=%s reason=%s user=%s listener=%s",
                action,
                target,
                client_id,
                peer,
                "not allowed by the access rules",
                username or "",
                listener,
            )
