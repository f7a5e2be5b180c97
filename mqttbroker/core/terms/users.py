"""Users: the limits of all connections and sessions of one user name together. Anonymous clients are no user."""

from __future__ import annotations

from typing import Final

from mqttbroker.codec.reason_codes import CONNECTION_RATE_EXCEEDED, QUOTA_EXCEEDED, MQTTError
from mqttbroker.core.terms.rates import ConnectRates, Rate
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.counters import Counters
from sessions.registry import Registry

MAX_IDLE: Final = 65_536  # users without connections that are remembered because they sent or received too fast


class User:
    """One user name with open connections."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.received = Rate("max_publish_rate_per_user", "max_receive_rate_per_user")
        self.sent = Rate("max_delivery_rate_per_user", "max_send_rate_per_user")


class Users:
    """The users of one broker. They are counted only while a limit needs it.

    ``now`` is monotonic time in seconds.
    """

    def __init__(self, registry: Registry, terms: BrokerTerms, counters: Counters) -> None:
        self.registry = registry
        self.terms = terms
        self.counters = counters
        self.users: dict[str, User] = {}
        self.idle: dict[str, User] = {}  # those that may not send or receive yet; the last one to leave is last
        self.sessions: dict[str, int] | None = None  # by user name; None = not counted
        self._connects = ConnectRates()
        self.terms_changed()

    def terms_changed(self) -> None:
        """The limits may have changed, or the sessions were loaded."""
        for user in [*self.users.values(), *self.idle.values()]:
            self._limit(user)
        self.sessions = None
        if self.terms.max_sessions_per_user:
            self.sessions = {}
            for session in self.registry.sessions.values():
                self.session_added(session.username)

    def _limit(self, user: User) -> None:
        terms = self.terms
        user.received.limit(terms.max_publish_rate_per_user, terms.max_receive_rate_per_user)
        user.sent.limit(terms.max_delivery_rate_per_user, terms.max_send_rate_per_user)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def session_added(self, username: str | None) -> None:
        """A session belongs to this user now."""
        sessions = self.sessions
        if sessions is not None and username is not None:
            sessions[username] = sessions.get(username, 0) + 1

    def session_removed(self, username: str | None) -> None:
        """A session of this user has ended."""
        sessions = self.sessions
        if sessions is not None and username is not None:
            left = sessions[username] - 1
            if left:
                sessions[username] = left
            else:
                del sessions[username]

    # --- connections --------------------------------------------------------------------------------------------------

    def check(self, username: str | None, new_session: bool, new_connection: bool, now: float) -> None:
        """Count a connect of an authenticated client. Raises MQTTError if it exceeds a limit of its user.

        ``new_session``: it gets another session than one that its user has; ``new_connection``: it replaces none.
        """
        terms = self.terms
        if username is None:
            return
        rate = terms.max_connect_rate_per_user
        if rate and not self._connects.connect(username, rate, now):
            self._refuse("max_connect_rate_per_user", CONNECTION_RATE_EXCEEDED, "too many connects of this user")
        maximum = terms.max_connections_per_user
        if maximum and new_connection:
            user = self.users.get(username)
            if user is not None and user.connections >= maximum:
                self._refuse("max_connections_per_user", QUOTA_EXCEEDED, "too many connections of this user")
        sessions = self.sessions
        if sessions is not None and new_session and sessions.get(username, 0) >= terms.max_sessions_per_user:
            # 0x97 is the standard's code for an administrative limit; 0x9B, QoS not supported, is none for it.
            self._refuse("max_sessions_per_user", QUOTA_EXCEEDED, "too many sessions of this user")

    def _refuse(self, limit: str, reason_code: int, detail: str) -> None:
        self.counters.limit_reached(limit)
        raise MQTTError(reason_code, detail)

    def connected(self, username: str | None, now: float) -> User | None:
        """Count a connection of a user; None if no limit needs it. `disconnected` follows."""
        terms = self.terms
        if username is None or not (
            terms.max_connections_per_user
            or terms.max_publish_rate_per_user
            or terms.max_receive_rate_per_user
            or terms.max_delivery_rate_per_user
            or terms.max_send_rate_per_user
        ):
            return None
        user = self.users.get(username)
        if user is None:
            self._forget(now)
            self._forget(now)
            user = self.idle.pop(username, None) or User(username)
            self._limit(user)
            self.users[username] = user
        user.connections += 1
        return user

    def disconnected(self, user: User, now: float) -> None:
        """A connection of this user is closed."""
        user.connections -= 1
        if user.connections == 0:
            del self.users[user.name]
            if user.received.wait(now) > 0.0 or user.sent.wait(now) > 0.0:
                self.idle[user.name] = user
                if len(self.idle) > MAX_IDLE:
                    del self.idle[next(iter(self.idle))]

    def _forget(self, now: float) -> None:
        """Forget the user that left first, if it may send and receive again."""
        for name, user in self.idle.items():
            if user.received.wait(now) <= 0.0 and user.sent.wait(now) <= 0.0:
                del self.idle[name]
            return
