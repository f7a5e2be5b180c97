"""Clients: the connections of one broker, and how each of them ends.

A connection ends once. In the same step it is detached from its session, and a 5.0 client is sent the reason first
where the standard allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from mqttbroker.codec.reason_codes import KEEP_ALIVE_TIMEOUT, NOT_AUTHORIZED, SERVER_SHUTTING_DOWN
from mqttbroker.core.client.connection import AUTHENTICATING, AWAIT_CONNECT, CLOSED, CONNECTED, Connection, ConnectionOwner
from mqttbroker.core.client.redirector import Redirector
from mqttbroker.core.delivery.turns import PART_WORK, LongWork, Turns
from mqttbroker.core.sessions.lifecycle import SessionLifecycle
from mqttbroker.core.sessions.pending_connect import PendingConnect
from mqttbroker.core.terms.terms import BrokerTerms
from mqttbroker.core.terms.users import Users
from sessions.registry import Registry

CHECKED_PER_WORK: Final = 8  # connections that are not overdue
CLOSE_WORK: Final = 30  # of one connection that is closed

log = logging.getLogger("mqttbroker.clients")
audit = logging.getLogger("mqttbroker.audit")


class Clients(ConnectionOwner):
    """All connections of one broker.

    ``pending`` holds, by client id, the CONNECTs that have a session and wait for the store. ``on_connected`` is called
    with the connection and the Clean Start of a client after its CONNACK, ``on_disconnected`` with the connection and the
    reason when it ends.
    """

    def __init__(self, registry: Registry, lifecycle: SessionLifecycle, terms: BrokerTerms, users: Users, turns: Turns) -> None:
        self.turns = turns
        self.overdue = _Overdue()
        self.registry = registry
        self.lifecycle = lifecycle
        self.terms = terms
        self.users = users
        self.redirector = Redirector(terms)
        self.connections: dict[Connection, bool] = {}
        self.pending: dict[str, PendingConnect] = {}
        self.connected = 0
        self.connected_maximum = 0
        self.on_connected: Callable[[Connection, bool], None] | None = None
        self.on_disconnected: Callable[[Connection, str], None] | None = None

    def count_connected(self) -> None:
        """A client was sent its CONNACK."""
        self.connected += 1
        self.connected_maximum = max(self.connected_maximum, self.connected)

    def close(self, connection: Connection, with_will: bool, reason: str, username: str | None = None) -> None:
        if connection.state == CLOSED:
            return
        was_connected = connection.state == CONNECTED and not connection.is_link
        connection.state = CLOSED
        connection.acks.clear()
        connection.release_connect()
        if connection.paused_by is not None:
            connection.paused_by.remove(connection)
        self.connections.pop(connection, None)
        if connection.user is not None:
            self.users.disconnected(connection.user, connection.outbound.clock.monotonic)
            connection.user = None
        connection.request_flush()
        if was_connected:
            self.connected -= 1
            log.info(
                "event=disconnected client=%s address=%s reason=%s user=%s listener=%s",
                connection.client_id,
                connection.peer,
                reason,
                connection.username or "",
                connection.terms.listener,
            )
        elif reason and not connection.is_link:
            audit.info(
                "event=refused client=%s address=%s reason=%s user=%s listener=%s",
                connection.client_id,
                connection.peer,
                reason,
                username or connection.username or "",
                connection.terms.listener,
            )
        if was_connected and self.on_disconnected is not None:
            self.on_disconnected(connection, reason)
        if connection.is_link:
            return
        session = connection.session
        pending = self.pending.get(connection.client_id)
        if pending is not None and pending.connection is connection:
            del self.pending[connection.client_id]
        elif session is None or session.connection is not connection:
            return
        if session is not None and self.registry.get(session.client_id) is session:
            self.lifecycle.disconnected(session, with_will and was_connected)

    def release(self, connection: Connection) -> None:
        self.connections.pop(connection, None)

    def tick(self, monotonic: float) -> None:
        """Close the connections that are overdue or whose login has expired, redirect some, publish due wills and end
        expired sessions, in parts.

        To be called at least once a second. ``monotonic`` is on the clock of `Connection.last_received`; the caller has
        set the broker's `Clock`.
        """
        overdue = self.overdue
        if overdue.done:
            overdue.begin(self, monotonic)
            overdue.step(PART_WORK)
            if not overdue.done:
                self.turns.add(overdue)
        self.redirector.tick(self.connections, monotonic)
        self.lifecycle.tick(self.pending)

    def shut_down(self) -> LongWork:
        """Work that disconnects every client; sessions stay."""
        return _ShutDown(self.connections, self._leaving_code())

    def send_away(self, connections: list[Connection]) -> LongWork:
        """Work that disconnects some clients, whose sockets are in a process that ends."""
        return _ShutDown(dict.fromkeys(connections, True), self._leaving_code())

    def _leaving_code(self) -> int:
        redirect = self.terms.redirect
        return SERVER_SHUTTING_DOWN if redirect is None else redirect.reason_code


class _ShutDown(LongWork):
    """The end of all connections in ``connections``, also of those that are added meanwhile."""

    def __init__(self, connections: dict[Connection, bool], reason_code: int) -> None:
        self._connections = connections
        self._reason_code = reason_code

    @property
    def done(self) -> bool:
        return not self._connections

    def step(self, budget: int) -> int:
        used: int = 0
        while self._connections and used < budget:
            connection = next(iter(self._connections))
            connection.disconnect(self._reason_code, "server shutting down")
            self._connections.pop(connection, None)
            used += CLOSE_WORK
        return used


class _Overdue(LongWork):
    """The check of all connections for those whose client is overdue."""

    def __init__(self) -> None:
        self._clients: Clients | None = None
        self._unchecked: list[Connection] = []  # not checked yet
        self._now = 0.0  # monotonic seconds
        self._time = 0.0  # Unix seconds
        self._clock_stopped = 0.0  # `Clock.stopped` at the last check
        self._stopped = 0.0  # seconds since then in which the process did not run

    @property
    def done(self) -> bool:
        return not self._unchecked

    def begin(self, clients: Clients, monotonic: float) -> None:
        self._clients = clients
        self._unchecked = list(clients.connections)
        self._now = monotonic
        self._time = clients.lifecycle.now
        stopped = clients.lifecycle.clock.stopped
        self._stopped = stopped - self._clock_stopped
        self._clock_stopped = stopped

    def step(self, budget: int) -> int:
        left = self._unchecked
        used: int = 0  # in units of `CHECKED_PER_WORK`
        while left and used < budget * CHECKED_PER_WORK:
            used += 1
            if self._check(left.pop()):
                used += CLOSE_WORK * CHECKED_PER_WORK
        return 1 + used // CHECKED_PER_WORK

    def _check(self, connection: Connection) -> bool:
        """Close a connection that is overdue; whether it was."""
        now = self._now
        if self._stopped > 0.0:
            # What the client sent while the process did not run may not be read yet.
            connection.last_received = min(connection.last_received + self._stopped, max(connection.last_received, now))
            if connection.state == AWAIT_CONNECT or connection.state == AUTHENTICATING:
                connection.accepted = min(connection.accepted + self._stopped, max(connection.accepted, now))
        if connection.state == AWAIT_CONNECT or connection.state == AUTHENTICATING:
            if now - connection.accepted <= connection.terms.connect_timeout or self._clients is None:
                return False
            self._clients.close(connection, False, "not authenticated in time" if connection.client_id else "no CONNECT in time")
            return True
        if connection.state == CLOSED:
            return False
        if connection.expires_at and connection.expires_at <= self._time and connection.state == CONNECTED:
            connection.disconnect(NOT_AUTHORIZED, "the login has expired")
            return True
        if connection.keep_alive == 0.0:
            return False
        if connection.blocked:
            connection.last_received = max(connection.last_received, now)  # the broker does not read from it
        if now - connection.last_received <= connection.keep_alive * 1.5:
            return False
        connection.disconnect(KEEP_ALIVE_TIMEOUT, "keep alive timeout")  # [MQTT-3.1.2-22]
        return True
