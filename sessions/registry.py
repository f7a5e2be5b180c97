"""All sessions by client id [MQTT-3.1.3-2], and their expiry.

A session ends when its client has been disconnected for the session expiry interval, when `next_expired` returns it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from sessions.context import SessionContext
from sessions.session import CORE_PREFIX, NEVER, Session
from sessions.sorted_ids import SortedIds


class Registry:
    """All sessions of one broker. Times are Unix times in seconds.

    With ``has_cores`` sessions from the store may stand for those of another core of a cluster.
    """

    def __init__(self, context: SessionContext, next_session_id: int = 1, has_cores: bool = False) -> None:
        self.context = context
        self.sessions: dict[str, Session] = {}
        self.client_ids = SortedIds()  # the keys of `sessions`
        self.by_id: dict[int, Session] = {}  # persistent sessions by row id
        self.next_session_id = next_session_id
        self.has_cores = has_cores
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self.sessions)

    def get(self, client_id: str) -> Session | None:
        return self.sessions.get(client_id)

    def create(self, client_id: str, persistent: bool) -> Session:
        """Create a session; it replaces the one of the same client id."""
        session_id = 0
        if persistent:
            session_id = self.new_id()
        if client_id not in self.sessions:
            self.client_ids.add(client_id)
        return self._insert(session_id, client_id)

    def new_id(self) -> int:
        """The id of one more row."""
        session_id = self.next_session_id
        self.next_session_id += 1
        return session_id

    def load(self, session_id: int, client_id: str) -> Session:
        """Create the session of a row that was read from the store."""
        if client_id not in self.sessions:
            self.client_ids.load(client_id)
        session = self._insert(session_id, client_id)
        session.remote = self.has_cores and client_id.startswith(CORE_PREFIX)
        return session

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
        """The client disconnected: end its session after the expiry interval."""
        if session.expiry_interval != NEVER:
            ends = self._ends
            heappush(ends, (self._end_of(session), session.client_id))
            # Clients that reconnect leave outdated entries: remove them before they are the majority.
            if len(ends) > 2 * len(self.sessions) + 1000:
                disconnected = [
                    session for session in self.sessions.values() if session.connection is None and session.expiry_interval != NEVER
                ]
                self._ends = [(self._end_of(session), session.client_id) for session in disconnected]
                heapify(self._ends)

    def _end_of(self, session: Session) -> float:
        return session.disconnected_at + session.expiry_interval

    def is_over(self, session: Session, now: float) -> bool:
        """Whether the client has been disconnected for the expiry interval."""
        return (
            session.connection is None
            and session.expiry_interval != NEVER
            and session.disconnected_at != 0.0
            and self._end_of(session) <= now
        )

    def next_expired(self, now: float) -> Session | None:
        """Unschedule and return a session that has expired at ``now``, for the caller to end; None if there is none."""
        ends = self._ends
        while ends and ends[0][0] <= now:
            _, client_id = heappop(ends)
            session = self.sessions.get(client_id)
            if session is not None and self.is_over(session, now):
                return session
        return None
