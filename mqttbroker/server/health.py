"""The answers of `/readyz`: whether clients should connect now, and problems that keep only some of them away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from bridge_spark.log.archive.archiver import Archiver
from mqttbroker.admin.data.repair import SalvageReport
from mqttbroker.auth.security import Security
from mqttbroker.core.broker import Broker
from mqttbroker.net.listeners import OpenListener
from mqttbroker.server.reload import Reloader
from sessions.store.interface import Store


class Health:
    """``repairs``: the store is repaired at a restart if it is damaged. ``parts_unready`` returns more reasons."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        security: Security,
        archiver: Archiver,
        listeners: Sequence[OpenListener],
        reloader: Reloader,
        repairs: bool,
        salvage: SalvageReport,
        parts_unready: Callable[[], list[str]],
    ) -> None:
        self._broker = broker
        self._store = store
        self._security = security
        self._archiver = archiver
        self._listeners = listeners
        self._reloader = reloader
        self._repairs = repairs
        self._salvage = salvage
        self._parts_unready = parts_unready

    def unready(self) -> list[str]:
        """The reasons why clients should not connect now; empty if there is none. Called on the event loop's thread."""
        reasons = []
        commits = self._broker.commits
        if self._store.damage:
            cure = "a restart repairs it" if self._repairs else "stop the broker and run mqttbroker repair-store"
            refusing = "changes are refused, " if commits.error else ""
            reasons.append(f"store: {self._store.damage}; {refusing}{cure}")
        elif commits.error:
            reasons.append(f"store: {commits.error}")
        if self._broker.outbound.backlogged:
            reasons.append("store: too much waits for the disk")
        if memory := self._broker.memory.reason():
            reasons.append(memory)
        redirect = self._broker.terms.redirect
        if redirect is not None:
            reasons.append(f"redirect: clients go to {redirect.server_reference}")
        return reasons + self._parts_unready()

    def warnings(self) -> list[str]:
        """Problems that keep no client away from all listeners; called on the HTTP server's thread."""
        warnings = [f"reload: {problem}" for problem in self._reloader.problems]
        if salvaged := self._salvage.reason:
            warnings.append(f"store: {salvaged}")
        warnings += self._archiver.problems()
        if self._security.jwt is not None:
            warnings += self._security.jwt.problems
        now = datetime.now(UTC)
        for listener in list(self._listeners):
            invalid = None if listener.revocations is None else listener.revocations.problem(now)
            for problem in (listener.refresh_problem, invalid):
                if problem is not None:
                    warnings.append(f"listener {listener.listener.address}: {problem}")
        return warnings
