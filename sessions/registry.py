"""The registry: every session by its client id, and the moment each one ends.

The rule kept here: one client id, one session [MQTT-3.1.3-2], and a session
whose client is away ends when its expiry interval has passed, not before and
at most one `expired` call after.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Dict, List, Optional, Tuple

from sessions.context import SessionContext
from sessions.session import NEVER, Session
from sessions.sorted_ids import SortedIds


class Registry:
    """All sessions of one broker.  Times are Unix times in seconds."""

    def __init__(self, context: SessionContext, next_session_id: int = 1) -> None:
        self.context = context
        self.sessions: Dict[str, Session] = {}
        self.client_ids = SortedIds()  # the keys of `sessions`
        self.by_id: Dict[int, Session] = {}  # the durable ones, by row id
        self.next_session_id = next_session_id
        self._ends: List[Tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self.sessions)

    def get(self, client_id: str) -> Optional[Session]:
        return self.sessions.get(client_id)

    def create(self, client_id: str, durable: bool) -> Session:
        """A new session in the place of any other of that client id."""
        session_id = 0
        if durable:
            session_id = self.next_session_id
            self.next_session_id += 1
        if client_id not in self.sessions:
            self.client_ids.add(client_id)
        return self._insert(session_id, client_id)

    def load(self, session_id: int, client_id: str) -> Session:
        """A session under the row id it has in the store; 0 for one that is not stored."""
        if client_id not in self.sessions:
            self.client_ids.load(client_id)
        return self._insert(session_id, client_id)

    def _insert(self, session_id: int, client_id: str) -> Session:
        session = Session(self.context, session_id, client_id)
        self.sessions[client_id] = session
        if session_id:
            self.by_id[session_id] = session
        return session

    def remove(self, session: Session) -> None:
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
            self.client_ids.remove(session.client_id)
        self.by_id.pop(session.id, None)

    def schedule_end(self, session: Session) -> None:
        """The client went away: its session ends an expiry interval later."""
        if session.expiry_interval != NEVER:
            ends = self._ends
            heappush(ends, (self._end_of(session), session.client_id))
            # A client that comes and goes leaves an entry each time.
            if len(ends) > 2 * len(self.sessions) + 1000:
                away = [
                    session
                    for session in self.sessions.values()
                    if session.connection is None and session.expiry_interval != NEVER
                ]
                self._ends = [(self._end_of(session), session.client_id) for session in away]
                heapify(self._ends)

    def _end_of(self, session: Session) -> float:
        return session.disconnected_at + session.expiry_interval

    def is_over(self, session: Session, now: float) -> bool:
        """Whether the session's client has been away longer than its expiry interval."""
        return (
            session.connection is None
            and session.expiry_interval != NEVER
            and session.disconnected_at != 0.0
            and self._end_of(session) <= now
        )

    def expired(self, now: float) -> List[Session]:
        """The sessions whose time is over; the caller ends them."""
        ended: Dict[Session, bool] = {}
        ends = self._ends
        while ends and ends[0][0] <= now:
            _, client_id = heappop(ends)
            session = self.sessions.get(client_id)
            if session is not None and self.is_over(session, now):
                ended[session] = True
        return list(ended)
