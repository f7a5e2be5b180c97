"""The first and the last sessions by each of some values, for brokers with too many sessions to visit for one page.

A pass visits all sessions within `PASS_SECONDS`, a few at a time. The rankings are those of the last pass.
"""

from __future__ import annotations

from typing import Final, cast

from mqttbroker.core.client.connection import Connection
from sessions.registry import Registry
from sessions.session import Session

MAX_RANKED: Final = 2000  # sessions of one ranking
PASS_SECONDS: Final = 300.0  # a pass takes 2.4 s of CPU for a million sessions
SLICE: Final = 256  # sessions visited in one step
CONNECTED_AT: Final = 0
DISCONNECTED_AT: Final = 1
SUBSCRIPTIONS: Final = 2
QUEUED_MESSAGES: Final = 3
KEYS: Final = 4


def connected_at(session: Session) -> float:
    """The monotonic time of a session's connection; 0.0 if it has none."""
    connection = session.connection
    return 0.0 if connection is None else cast(Connection, connection).accepted


class Ranking:
    """The `MAX_RANKED` sessions with the lowest or the highest values, each as its value and its client id."""

    def __init__(self, descending: bool) -> None:
        self.descending = descending
        self.sessions: list[tuple[float, str]] = []  # of the last pass, sorted
        self._found: list[tuple[float, str]] = []  # in this pass, in any order
        self._full = False
        self._bound = 0.0  # the value of the last session, if full

    def offer(self, value: float, client_id: str) -> None:
        """Consider a session; each client id is greater than those before."""
        if self._full and (value < self._bound if self.descending else value >= self._bound):
            return
        self._found.append((value, client_id))

    @property
    def is_long(self) -> bool:
        return len(self._found) >= MAX_RANKED + 4 * SLICE

    def cut(self) -> None:
        """Sort, and forget the sessions behind the first `MAX_RANKED`."""
        self._found.sort(reverse=self.descending)
        del self._found[MAX_RANKED:]
        if len(self._found) == MAX_RANKED:
            self._full = True
            self._bound = self._found[MAX_RANKED - 1][0]

    def finish(self) -> None:
        """End a pass, after `cut`."""
        self.sessions, self._found, self._full = self._found, [], False


class SessionRankings:
    """All rankings of the sessions of a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._rankings = [Ranking(descending) for _ in range(KEYS) for descending in (False, True)]
        self._start = ""
        self._cut = 0  # rankings that are to be cut at the end of this pass
        self._next_cut = 0
        self.passes = 0

    def ranking(self, key: int, descending: bool) -> Ranking:
        return self._rankings[2 * key + int(descending)]

    def step(self) -> float:
        """Visit some sessions; returns the seconds to wait before the next step."""
        if self._cut:
            self._end_pass()
        else:
            self._visit()
        return PASS_SECONDS * SLICE / (len(self._registry) + SLICE)

    def _visit(self) -> None:
        registry = self._registry
        client_ids = registry.client_ids.at_least(self._start, SLICE)
        for client_id in client_ids:
            session = registry.sessions[client_id]
            self._offer(CONNECTED_AT, connected_at(session), client_id)
            self._offer(DISCONNECTED_AT, session.disconnected_at, client_id)
            self._offer(SUBSCRIPTIONS, float(len(session.subscriptions)), client_id)
            self._offer(QUEUED_MESSAGES, float(session.deliveries.queued_messages), client_id)
        # One cut in each step, because it takes as long as the visits.
        self._next_cut = (self._next_cut + 1) % len(self._rankings)
        if self._rankings[self._next_cut].is_long:
            self._rankings[self._next_cut].cut()
        if len(client_ids) < SLICE:
            self._cut = len(self._rankings)
        else:
            self._start = client_ids[-1] + "\0"  # no client id has U+0000 [MQTT-1.5.4-2]

    def _offer(self, key: int, value: float, client_id: str) -> None:
        self._rankings[2 * key].offer(value, client_id)
        self._rankings[2 * key + 1].offer(value, client_id)

    def _end_pass(self) -> None:
        self._cut -= 1
        self._rankings[self._cut].cut()
        if not self._cut:
            for ranking in self._rankings:
                ranking.finish()
            self._start = ""
            self.passes += 1
