"""Logs what clients were refused: publications, subscriptions, wills, streams."""

from __future__ import annotations

import logging
from typing import Final

from mqttbroker.core.terms.line_limit import LineLimit
from sessions.context import Clock

audit = logging.getLogger("mqttbroker.audit")

NOT_ALLOWED: Final = "not allowed by the access rules"


class Denials:
    """Writes a line of the audit log for each denial, so few that a flood of refused packets costs nothing more."""

    def __init__(self, clock: Clock) -> None:
        self._lines = LineLimit(clock, audit.name, "denials_not_logged")
        self.counts: dict[str, int] = {}  # by action, since the start

    def may_log(self) -> bool:
        """Count a refusal; return whether it may have a line of the log."""
        return self._lines.permits()

    def log(
        self,
        action: str,
        target: str,
        client_id: str,
        peer: str,
        username: str | None,
        listener: str,
        reason: str = NOT_ALLOWED,
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
                reason,
                username or "",
                listener,
            )
