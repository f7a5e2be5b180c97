"""Clients and their sessions for operators: lists, disconnecting, deleting."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable
from functools import lru_cache
from heapq import nlargest, nsmallest
from typing import Any, NamedTuple

from mqttbroker.admin.control.slices import MAX_VISITS, SLICE, Slices, check_limit, wake
from mqttbroker.admin.control.views import SessionDetail, SessionFilter, SessionPage, SessionSummary, SortedPage
from mqttbroker.codec.reason_codes import ADMINISTRATIVE_ACTION
from mqttbroker.core.client.connection import CONNECTED, Connection
from mqttbroker.core.client.outbox import Outbound
from mqttbroker.core.sessions.clients import Clients
from mqttbroker.core.sessions.lifecycle import SessionLifecycle
from mqttbroker.core.sessions.rankings import (
    CONNECTED_AT,
    DISCONNECTED_AT,
    QUEUED_MESSAGES,
    SUBSCRIPTIONS,
    SessionRankings,
    connected_at,
)
from mqttbroker.core.sessions.subscriptions import Subscriptions
from mqttbroker.core.terms.networks import address_of
from sessions.registry import Registry
from sessions.session import Session

MAX_CONNECTIONS = 2000  # that are visited and sorted for conditions on them: the sort is one slice
SESSIONS_PER_CONNECTION = 10  # beyond which the connections are visited for conditions on them

_Ranked = tuple[float, str]  # a value and a client identifier


class SessionControl:
    """The sessions of one broker. ``monotonic`` is the clock of `Connection.accepted`."""

    def __init__(
        self,
        registry: Registry,
        clients: Clients,
        subscriptions: Subscriptions,
        lifecycle: SessionLifecycle,
        outbound: Outbound,
        monotonic: Callable[[], float],
    ) -> None:
        self.rankings = SessionRankings(registry)  # of no sessions until somebody calls `step`
        self._registry = registry
        self._clients = clients
        self._subscriptions = subscriptions
        self._lifecycle = lifecycle
        self._outbound = outbound
        self._monotonic = monotonic

    def page(
        self, where: SessionFilter = SessionFilter(), after: str = "", limit: int = 100, descending: bool = False
    ) -> Slices[SessionPage]:
        """The first ``limit`` sessions by client identifier behind ``after`` that satisfy ``where``; "" = from the start.

        A page after which `MAX_VISITS` sessions were visited has fewer. A session that exists from the first page to the
        last is in exactly one of them.
        """
        check_limit(limit)
        connected = yield from self._connected(where)
        if connected is not None:
            return self._page_of(connected, after, limit, descending)
        registry = self._registry
        ids = registry.client_ids
        found: list[SessionSummary] = []
        visits = 0
        # No client identifier contains U+0000 [MQTT-1.5.4-2], so this is the least one after ``after``.
        start = max(where.prefix, after + "\0" if after else "")
        end = after or _behind_prefix(where.prefix)
        while True:
            client_ids = ids.below(end, SLICE) if descending else ids.at_least(start, SLICE)
            for client_id in client_ids:
                if not client_id.startswith(where.prefix):
                    return SessionPage(tuple(found), "")
                if where.contains not in client_id:
                    continue
                session = registry.sessions[client_id]
                if _satisfies(session, where):
                    found.append(self._summary(session))
                    if len(found) == limit:
                        return SessionPage(tuple(found), client_id)
            if len(client_ids) < SLICE:
                return SessionPage(tuple(found), "")
            visits += SLICE
            end = client_ids[-1]
            if visits >= MAX_VISITS:
                return SessionPage(tuple(found), end)
            start = end + "\0"
            yield 0.0

    def _connected(self, where: SessionFilter) -> Slices[list[Session] | None]:
        """The sessions that satisfy ``where``, in no order; None unless they have connections, and few sessions have one."""
        connections = self._clients.connections
        if not (where.connected or where.listener is not None or where.network):
            return None
        if len(connections) > min(MAX_CONNECTIONS, len(self._registry) // SESSIONS_PER_CONNECTION):
            return None
        found: list[Session] = []
        for visits, connection in enumerate(list(connections)):
            if visits % SLICE == SLICE - 1:
                yield 0.0
            session = connection.session
            if session is None or session.connection is not connection or not _has_id(session.client_id, where):
                continue
            if _satisfies(session, where):
                found.append(session)
        return found

    def _page_of(self, sessions: list[Session], after: str, limit: int, descending: bool) -> SessionPage:
        """The page of some sessions behind ``after``."""
        by_id = {session.client_id: session for session in sessions}
        behind = (name for name in by_id if not after or (name < after if descending else name > after))
        first = (nlargest if descending else nsmallest)(limit + 1, behind)
        found = tuple(self._summary(by_id[name]) for name in first[:limit])
        return SessionPage(found, first[limit - 1] if len(first) > limit else "")

    def sorted_page(
        self,
        sort: str,
        descending: bool,
        where: SessionFilter = SessionFilter(),
        after: tuple[float, str] | None = None,
        limit: int = 100,
    ) -> Slices[SortedPage]:
        """The first ``limit`` sessions that satisfy ``where``, in the order of one of `SORTS`, behind ``after``.

        If there are more than `MAX_VISITS` sessions, the order is that of the last pass of `SessionRankings` as far as that
        knows the page; else all sessions are visited. A session whose value changes meanwhile may be in no page, or in two.
        """
        check_limit(limit)
        key = SORTS[sort]
        best = yield from self._ranked_page(key, descending, where, after, limit)
        if best is None:
            best = yield from self._visited_page(key, descending, where, after, limit)
        found: list[SessionSummary] = []
        for first in range(0, min(limit, len(best)), SLICE):
            shown = best[first : min(limit, first + SLICE)]
            sessions = (self._registry.get(name) for _, name in shown)
            found += [self._summary(session) for session in sessions if session is not None]
            yield 0.0
        return SortedPage(tuple(found), best[limit - 1] if len(best) > limit else None)

    def _ranked_page(
        self, key: _SortKey, descending: bool, where: SessionFilter, after: tuple[float, str] | None, limit: int
    ) -> Slices[list[_Ranked] | None]:
        """The sessions of a page, and one more, by the last pass of `SessionRankings`; None if it lacks some of them."""
        registry = self._registry
        if not self.rankings.passes or len(registry) <= MAX_VISITS:
            return None
        found: list[_Ranked] = []
        for visits, entry in enumerate(self.rankings.ranking(key.number, descending).sessions):
            if visits % SLICE == SLICE - 1:
                yield 0.0
            session = registry.get(entry[1])
            if session is None or not _is_behind(entry, after, descending):
                continue
            if _has_id(entry[1], where) and _satisfies(session, where):
                found.append(entry)
                if len(found) > limit:
                    return found
        return None

    def _visited_page(
        self, key: _SortKey, descending: bool, where: SessionFilter, after: tuple[float, str] | None, limit: int
    ) -> Slices[list[_Ranked]]:
        """The sessions of a page, and one more, by their values now."""
        connected = yield from self._connected(where)
        if connected is not None:
            entries = [(key.of(session), session.client_id) for session in connected]
            behind = (entry for entry in entries if _is_behind(entry, after, descending))
            return (nlargest if descending else nsmallest)(limit + 1, behind)
        registry = self._registry
        best: list[_Ranked] = []
        start = where.prefix
        client_ids = [""]
        while client_ids:
            client_ids = registry.client_ids.at_least(start, SLICE)
            for client_id in client_ids:
                session = registry.sessions[client_id]
                if not client_id.startswith(where.prefix):
                    client_ids = []
                    break
                if where.contains not in client_id or not _satisfies(session, where):
                    continue
                entry = (key.of(session), client_id)
                if _is_behind(entry, after, descending):
                    best.append(entry)
            best = sorted(best, reverse=descending)[: limit + 1]
            if client_ids:
                start = client_ids[-1] + "\0"
                yield 0.0
        return best

    def detail(self, client_id: str) -> SessionDetail | None:
        """The session of a client identifier; None if there is none."""
        session = self._registry.get(client_id)
        if session is None:
            return None
        connection = _connection(session)
        return SessionDetail(
            summary=self._summary(session),
            keep_alive=0.0 if connection is None else connection.keep_alive,
            max_in_flight=session.deliveries.window.send_maximum,
            queued_memory_bytes=session.deliveries.queue.memory_bytes,
            incoming_qos2=len(session.received),
            retained_pending=len(session.pending_retained),
            has_will=session.will is not None,
            congested=connection is not None and connection.outbox.writing_paused,
            worker=0 if connection is None or connection.wire is None else connection.wire.worker,
            bytes_received=0 if connection is None else connection.bytes_received,
            bytes_sent=0 if connection is None else connection.outbox.bytes_sent,
            messages_received=0 if connection is None else connection.publish_received,
            messages_sent=0 if connection is None else connection.outbox.publish_sent,
        )

    def _summary(self, session: Session) -> SessionSummary:
        connection = _connection(session)
        connected_at = 0.0
        if connection is not None:
            connected_at = self._now - (self._monotonic() - connection.accepted)
        return SessionSummary(
            client_id=session.client_id,
            username=session.username,
            protocol_version=session.version,
            persistent=session.id != 0,
            connected=connection is not None,
            address="" if connection is None else connection.peer,
            listener="" if connection is None else connection.terms.listener,
            connected_at=connected_at,
            disconnected_at=session.disconnected_at,
            subscriptions=len(session.subscriptions),
            queued_messages=session.deliveries.queued_messages,
            queued_bytes=session.deliveries.queue.byte_count,
            in_flight=session.deliveries.packet_ids_in_use,
            expiry_interval=session.expiry_interval,
        )

    @property
    def _now(self) -> float:
        return self._registry.context.clock.now / 1_000_000

    def disconnect(self, client_id: str) -> bool:
        """Disconnect a client with reason code 0x98; its session stays. False if it is not connected."""
        pending = self._clients.pending.get(client_id)
        session = self._registry.get(client_id)
        if pending is not None:
            disconnect_by_operator(self._clients, pending.connection, "disconnected by an operator")
            return True
        connection = None if session is None else _connection(session)
        if connection is None:
            return False
        disconnect_by_operator(self._clients, connection, "disconnected by an operator")
        return True

    def delete(self, client_id: str) -> Slices[bool]:
        """Disconnect a client and delete its session. False if there is none.

        A will is published, as at any end of a session [MQTT-3.1.2-8].
        """
        registry = self._registry
        session = registry.get(client_id)
        if session is None:
            return False
        self.disconnect(client_id)
        while registry.get(client_id) is session and len(session.subscriptions) > SLICE:
            for topic_filter in list(session.subscriptions)[:SLICE]:
                self._subscriptions.remove(session.subscriptions.pop(topic_filter))
            yield 0.0
        if registry.get(client_id) is session:
            self.disconnect(client_id)  # it may have connected again
        if registry.get(client_id) is session:
            self._lifecycle.end(session)
            wake(self._outbound)
        return True


def disconnect_by_operator(clients: Clients, connection: Connection, reason: str) -> None:
    """Disconnect a client with reason code 0x98."""
    if connection.state == CONNECTED:
        connection.disconnect(ADMINISTRATIVE_ACTION, reason)
    else:
        # No CONNACK has this reason code, and no other packet may come first [MQTT-3.2.0-1].
        clients.close(connection, False, reason)


def _has_id(client_id: str, where: SessionFilter) -> bool:
    """Whether the conditions on the client identifier hold."""
    return client_id.startswith(where.prefix) and where.contains in client_id


def _satisfies(session: Session, where: SessionFilter) -> bool:
    """Whether the conditions hold that are not on the client identifier."""
    connection = _connection(session)
    if where.connected not in (None, connection is not None) or where.username not in (None, session.username):
        return False
    if where.listener is not None and (connection is None or connection.terms.listener != where.listener):
        return False
    if not where.network:
        return True
    address = None if connection is None else address_of(connection.peer)
    return address is not None and address in _network(where.network)


@lru_cache(maxsize=16)
def _network(text: str) -> Any:
    return ipaddress.ip_network(text)


def _is_behind(entry: _Ranked, after: _Ranked | None, descending: bool) -> bool:
    return after is None or (entry < after if descending else entry > after)


def _behind_prefix(prefix: str) -> str:
    """The least text that is greater than all that begin with ``prefix``; "" if there is none."""
    prefix = prefix.rstrip(chr(sys.maxunicode))
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


def _connection(session: Session) -> Connection | None:
    connection = session.connection
    assert connection is None or isinstance(connection, Connection)
    return connection


class _SortKey(NamedTuple):
    """A value of sessions to sort by: its number in `SessionRankings`, and how to get it."""

    number: int
    of: Callable[[Session], float]


SORTS: dict[str, _SortKey] = {
    "connected_at": _SortKey(CONNECTED_AT, connected_at),
    "disconnected_at": _SortKey(DISCONNECTED_AT, lambda session: session.disconnected_at),
    "subscriptions": _SortKey(SUBSCRIPTIONS, lambda session: len(session.subscriptions)),
    "queued_messages": _SortKey(QUEUED_MESSAGES, lambda session: session.deliveries.queued_messages),
}
"""Orders of sessions beside that of their client identifiers."""
