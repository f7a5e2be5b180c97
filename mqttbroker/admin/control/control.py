"""Queries and commands on a running broker, for the HTTP server, ``$SYS`` and the command line.

All of it runs on the event loop's thread; other threads use a `ControlRunner`. An operation that may visit many objects
is a generator: it yields after each slice of at most `SLICE` objects, how many seconds to wait before the next one, and
returns the result. A command is in effect when it returns, and on disk with the next commit.
"""

from __future__ import annotations

import ipaddress
import secrets
import sys
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from heapq import nlargest, nsmallest
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from mqttbroker.admin.control.views import (
    BanPage,
    BanView,
    BrokerStatus,
    LevelPage,
    MemoryPart,
    MemoryStatus,
    QueueStatus,
    RetainedMessage,
    RetainedPage,
    SessionDetail,
    SessionFilter,
    SessionPage,
    SessionSummary,
    SortedPage,
    SubscriptionPage,
    SubscriptionView,
    TopicLevel,
)
from mqttbroker.codec.reason_codes import ADMINISTRATIVE_ACTION, MQTTError
from mqttbroker.core.access.ban_list import FOREVER, Ban, BanList, Key
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.connection import AWAIT_CONNECT, CONNECTED, Connection
from mqttbroker.core.delivery.broker_messages import BrokerMessage
from mqttbroker.core.routing.groups import Group, Member
from mqttbroker.core.routing.route import is_reserved
from mqttbroker.core.routing.router import Router
from mqttbroker.core.sessions.rankings import (
    CONNECTED_AT,
    DISCONNECTED_AT,
    QUEUED_MESSAGES,
    SUBSCRIPTIONS,
    SessionRankings,
    connected_at,
)
from mqttbroker.core.terms.memory_stage import STAGE_NAMES
from mqttbroker.core.terms.networks import address_of, network_text
from sessions.counters import CAUSES, COUNTERS
from sessions.journal import Gate
from sessions.message import Message
from sessions.reason_names import REASON_NAMES
from sessions.registry import Registry
from sessions.retained import RetainedScan
from sessions.session import NO_LOCAL, RETAIN_AS_PUBLISHED, Session, Subscription
from topic_matcher.filters import is_valid_filter, is_valid_topic, parse_shared
from topic_matcher.trie import TrieSearch

SLICE = 256  # sessions, subscriptions or topics visited in one slice: less than a millisecond without compilation
MAX_VISITS = 20_000  # sessions, subscriptions or topics visited for one page, except in another order: some 20 ms
MAX_CONNECTIONS = 2000  # that are visited and sorted for conditions on them: the sort is one slice
SESSIONS_PER_CONNECTION = 10  # beyond which the connections are visited for conditions on them
MAX_PAGE = 1000  # sessions, subscriptions or messages in one page
MATCHES = 2048  # subscriptions that a listing holds; if there are more, all sessions are visited
PAGE_BYTES = 1 << 20  # payloads and properties of one page; the message that exceeds them is the last of its page
MAX_CURSORS = 32  # open cursors of each kind; opening one more closes the one used longest ago
MAX_BAN = 100 * 365 * 86_400  # seconds
MAX_WAITING = 1000  # messages of operators and wills that wait to be published
COMMIT_WAIT = 0.002  # seconds between looks whether a message is on disk
BACKLOG_WAIT = 0.01  # seconds between slices while too much waits for the disk

T = TypeVar("T")
_Ranked = tuple[float, str]  # a value and a client identifier
Slices = Generator[float, None, T]


class ControlError(Exception):
    """The request cannot be served; the message is one line for its sender."""


class BrokerControl:
    """Queries and commands on one broker.

    ``monotonic`` is the clock of `Connection.accepted`.
    """

    def __init__(self, broker: Broker, monotonic: Callable[[], float]) -> None:
        self._broker = broker
        self._monotonic = monotonic
        self.rankings: SessionRankings | None = None  # None: its owner does not keep any
        self._subscription_cursors: Cursors[_SubscriptionListing] = Cursors()
        self._retained_cursors: Cursors[_RetainedListing] = Cursors()
        self._level_cursors: Cursors[_LevelListing] = Cursors()
        self._ban_cursors: Cursors[list[Ban]] = Cursors()

    # --- sessions -----------------------------------------------------------------------------------------------------

    def sessions(
        self, where: SessionFilter = SessionFilter(), after: str = "", limit: int = 100, descending: bool = False
    ) -> Slices[SessionPage]:
        """The first ``limit`` sessions by client identifier behind ``after`` that satisfy ``where``; "" = from the start.

        A page after which `MAX_VISITS` sessions were visited has fewer. A session that exists from the first page to the
        last is in exactly one of them.
        """
        _check_limit(limit)
        connected = yield from self._connected(where)
        if connected is not None:
            return self._page(connected, after, limit, descending)
        registry = self._broker.registry
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
        connections = self._broker.clients.connections
        if not (where.connected or where.listener is not None or where.network):
            return None
        if len(connections) > min(MAX_CONNECTIONS, len(self._broker.registry) // SESSIONS_PER_CONNECTION):
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

    def _page(self, sessions: list[Session], after: str, limit: int, descending: bool) -> SessionPage:
        """The page of some sessions behind ``after``."""
        by_id = {session.client_id: session for session in sessions}
        behind = (name for name in by_id if not after or (name < after if descending else name > after))
        first = (nlargest if descending else nsmallest)(limit + 1, behind)
        found = tuple(self._summary(by_id[name]) for name in first[:limit])
        return SessionPage(found, first[limit - 1] if len(first) > limit else "")

    def sorted_sessions(
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
        _check_limit(limit)
        key = SORTS[sort]
        best = yield from self._ranked_page(key, descending, where, after, limit)
        if best is None:
            best = yield from self._visited_page(key, descending, where, after, limit)
        found: list[SessionSummary] = []
        for first in range(0, min(limit, len(best)), SLICE):
            shown = best[first : min(limit, first + SLICE)]
            sessions = (self._broker.registry.get(name) for _, name in shown)
            found += [self._summary(session) for session in sessions if session is not None]
            yield 0.0
        return SortedPage(tuple(found), best[limit - 1] if len(best) > limit else None)

    def _ranked_page(
        self, key: _SortKey, descending: bool, where: SessionFilter, after: tuple[float, str] | None, limit: int
    ) -> Slices[list[_Ranked] | None]:
        """The sessions of a page, and one more, by the last pass of `SessionRankings`; None if it lacks some of them."""
        registry = self._broker.registry
        if self.rankings is None or not self.rankings.passes or len(registry) <= MAX_VISITS:
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
        registry = self._broker.registry
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

    def session(self, client_id: str) -> SessionDetail | None:
        """The session of a client identifier; None if there is none."""
        session = self._broker.registry.get(client_id)
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
        return self._broker.context.clock.now / 1_000_000

    def disconnect(self, client_id: str) -> bool:
        """Disconnect a client with reason code 0x98; its session stays. False if it is not connected."""
        pending = self._broker.clients.pending.get(client_id)
        session = self._broker.registry.get(client_id)
        if pending is not None:
            self._disconnect(pending.connection, "disconnected by an operator")
            return True
        connection = None if session is None else _connection(session)
        if connection is None:
            return False
        self._disconnect(connection, "disconnected by an operator")
        return True

    def _disconnect(self, connection: Connection, reason: str) -> None:
        if connection.state == CONNECTED:
            connection.disconnect(ADMINISTRATIVE_ACTION, reason)
        else:
            # No CONNACK has this reason code, and no other packet may come first [MQTT-3.2.0-1].
            self._broker.clients.close(connection, False, reason)

    def delete_session(self, client_id: str) -> Slices[bool]:
        """Disconnect a client and delete its session. False if there is none.

        A will is published, as at any end of a session [MQTT-3.1.2-8].
        """
        broker = self._broker
        session = broker.registry.get(client_id)
        if session is None:
            return False
        self.disconnect(client_id)
        while broker.registry.get(client_id) is session and len(session.subscriptions) > SLICE:
            for topic_filter in list(session.subscriptions)[:SLICE]:
                broker.subscriptions.remove(session.subscriptions.pop(topic_filter))
            yield 0.0
        if broker.registry.get(client_id) is session:
            self.disconnect(client_id)  # it may have connected again
        if broker.registry.get(client_id) is session:
            broker.lifecycle.end(session)
            self._wake()
        return True

    # --- bans ---------------------------------------------------------------------------------------------------------

    def open_bans(self) -> int:
        """A cursor for the bans in force."""
        return self._ban_cursors.open(self._broker.bans.banned(self._monotonic()))

    def bans(self, cursor: int, limit: int = 100) -> BanPage:
        """The next ``limit`` bans of a cursor; those that have ended since it was opened are left out."""
        _check_limit(limit)
        listing = self._ban_cursors.take(cursor)
        now = self._monotonic()
        found: list[BanView] = []
        while listing and len(found) < limit:
            ban = listing.pop()
            if self._broker.bans.in_force(ban, now):
                left = None if ban.until == FOREVER else ban.until - now
                found.append(BanView(*ban.key, ban.cause, ban.reason, ban.number, left))
        return BanPage(tuple(found), self._ban_cursors.open(listing) if listing else 0)

    def ban(
        self,
        address: str = "",
        username: str = "",
        client_id: str = "",
        seconds: float | None = None,
        reason: str = "",
    ) -> Slices[int]:
        """Ban the clients to which all of address or network, user name and client id apply that are not "".

        Those that are connected are disconnected with reason code 0x98; returns how many. The ban ends after
        ``seconds``; None = when it is lifted. It replaces the operator's ban of the same clients.
        """
        key = _ban_key(address, username, client_id)
        if seconds is not None and not 0 < seconds <= MAX_BAN:
            raise ControlError(f"a ban lasts up to {MAX_BAN} seconds, or until it is lifted")
        broker = self._broker
        ban = broker.bans.ban(key, FOREVER if seconds is None else seconds, reason, self._monotonic())
        if ban is None:
            raise ControlError(f"too many bans: bans.max_entries is {broker.bans.terms.max_entries}")
        only = BanList(1)
        only.add(ban)
        connections = list(broker.clients.connections)
        found = 0
        for start in range(0, len(connections), SLICE):
            if start:
                yield 0.0
            for connection in connections[start : start + SLICE]:
                if connection.closed or connection.state == AWAIT_CONNECT:
                    continue
                if only.find(connection.peer, connection.username, connection.client_id) is not None:
                    found += 1
                    self._disconnect(connection, "banned by an operator")
        return found

    def lift_ban(self, address: str = "", username: str = "", client_id: str = "") -> bool:
        """End the bans of exactly these clients, for any cause, and forget their offences. False if there is none.

        The values are those of `BanView`, or of `ban`.
        """
        return self._broker.bans.lift(*_ban_key(address, username, client_id))

    # --- subscriptions ------------------------------------------------------------------------------------------------

    def open_client_subscriptions(self, client_id: str) -> int:
        """A cursor for the subscriptions of one session."""
        session = self._broker.registry.get(client_id)
        if session is None:
            raise ControlError(f"no session {client_id!r}")
        return self._subscription_cursors.open(_SubscriptionListing(list(session.subscriptions.values())))

    def open_subscribers(self, topic_filter: str) -> int:
        """A cursor for the subscriptions to exactly this filter, which may be shared."""
        _check_filter(topic_filter)
        shared = parse_shared(topic_filter)
        if shared is not None:
            group = self._broker.router.groups.get(f"{shared[0]}/{shared[1]}")
            return self._subscription_cursors.open(_SubscriptionListing([] if group is None else [group]))
        # A filter matches the topic that has a letter in the place of each wildcard.
        listing = self._matching(topic_filter.replace("+", "x").replace("#", "x"), topic_filter)
        return self._subscription_cursors.open(listing)

    def open_receivers(self, topic: str) -> int:
        """A cursor for the subscriptions that match a topic, of the sessions that may read it.

        A message of the topic goes to one member of a shared subscription only.
        """
        if not is_valid_topic(topic):
            raise ControlError(f"not a topic name: {topic!r}")
        rules = self._broker.rules
        may_read = (lambda session: rules.may_read(session, topic)) if rules.restrictive else None
        return self._subscription_cursors.open(self._matching(topic, "", may_read))

    def _matching(self, topic: str, topic_filter: str, may_read: Callable[[Session], bool] | None = None) -> _SubscriptionListing:
        """The subscriptions that match a topic; only those to ``topic_filter`` unless that is empty."""
        search = _MatchingSearch(self._broker.router, self._broker.registry, topic, topic_filter)
        return _SubscriptionListing([], topic_filter, may_read, search)

    def subscriptions(self, cursor: int, limit: int = 100) -> Slices[SubscriptionPage]:
        """The next ``limit`` subscriptions of a cursor; those that have ended since it was opened are left out.

        There are fewer if `MAX_VISITS` subscriptions and sessions were visited.
        """
        _check_limit(limit)
        listing = self._subscription_cursors.take(cursor)
        found: list[SubscriptionView] = []
        for _ in range(MAX_VISITS // SLICE):
            found += listing.step(limit - len(found))
            if listing.done:
                return SubscriptionPage(tuple(found), 0)
            if len(found) == limit:
                break
            yield 0.0
        return SubscriptionPage(tuple(found), self._subscription_cursors.open(listing))

    # --- retained messages --------------------------------------------------------------------------------------------

    def retained_message(self, topic: str) -> RetainedMessage | None:
        """The retained message of a topic; None if there is none."""
        message = self._broker.retained.get(topic) if is_valid_topic(topic) else None
        if message is None or not self._broker.retained.is_current(message, self._broker.context.clock.now):
            return None
        return _retained_message(message)

    def open_retained(self, topic_filter: str) -> int:
        """A cursor for the retained messages that match a filter."""
        _check_filter(topic_filter, may_be_shared=False)
        return self._retained_cursors.open(_RetainedListing(self._broker, topic_filter))

    def retained(self, cursor: int, limit: int = 100) -> Slices[RetainedPage]:
        """The next ``limit`` messages of a cursor, fewer if they have more than `PAGE_BYTES`, or after `MAX_VISITS` topics.

        A topic that has a retained message from the first page to the last is in exactly one of them.
        """
        _check_limit(limit)
        listing = self._retained_cursors.take(cursor)
        found: list[RetainedMessage] = []
        room = PAGE_BYTES
        for _ in range(MAX_VISITS // SLICE):
            messages = listing.step(limit - len(found), room)
            found += map(_retained_message, messages)
            room -= sum(map(_content_bytes, messages))
            if listing.done:
                return RetainedPage(tuple(found), 0)
            if len(found) == limit or room <= 0:
                break
            yield 0.0
        return RetainedPage(tuple(found), self._retained_cursors.open(listing))

    def open_levels(self, parent: str | None) -> int:
        """A cursor for the levels that follow ``parent`` in retained topics; None = their first levels."""
        return self._level_cursors.open(_LevelListing(self._broker, parent))

    def levels(self, cursor: int, limit: int = 100, readable: Callable[[str], bool] | None = None) -> Slices[LevelPage]:
        """The next levels of a cursor. Levels without a topic for which ``readable`` holds are left out.

        To find one it visits all topics below a level, unless ``readable`` is None: every topic is readable.
        """
        _check_limit(limit)
        listing = self._level_cursors.take(cursor)
        found: list[TopicLevel] = []
        while not listing.scan.done and len(found) < limit:
            for level in listing.step(min(SLICE, limit - len(found))):
                if readable is None or (yield from self._shows(level, readable)):
                    readable_here = readable is None or readable(level.topic)
                    found.append(level if readable_here else level._replace(message=None))
            yield 0.0
        return LevelPage(tuple(found), 0 if listing.scan.done else self._level_cursors.open(listing))

    def _shows(self, level: TopicLevel, readable: Callable[[str], bool]) -> Slices[bool]:
        """Whether there is a retained message that may be read at or below a level."""
        if level.message is not None and readable(level.topic):
            return True
        below = _RetainedListing(self._broker, f"{level.topic}/#") if level.below else None
        while below is not None and not below.done:
            if any(readable(message.topic) for message in below.step(SLICE)):
                return True
            yield 0.0
        return False

    def set_retained(self, topic: str, payload: bytes, qos: int = 1, properties: bytes = b"") -> None:
        """Publish a retained message in the name of the broker: subscribers get it, too."""
        if not payload:
            raise ControlError("a retained message has a payload")
        self._publish(topic, payload, qos, True, properties, None, None)

    def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        retain: bool = False,
        properties: bytes = b"",
        expiry: int | None = None,
    ) -> Slices[int]:
        """Publish a message in the name of the broker; it expires after ``expiry`` seconds.

        Returns how many subscriptions and streams it went to, at QoS 1 and 2 after it is on disk where it has to be.
        An empty retained one deletes the retained message.
        """
        gate = Gate()
        published = self._publish(topic, payload, qos, retain, properties, expiry, gate if qos or retain else None)
        while published.recipients < 0 or gate.pending:
            yield COMMIT_WAIT
        if gate.failed:
            raise ControlError(f"the message could not be stored: {self._broker.commits.error or 'the disk failed'}")
        return published.recipients

    def _publish(
        self,
        topic: str,
        payload: bytes,
        qos: int,
        retain: bool,
        properties: bytes,
        expiry: int | None,
        gate: Gate | None,
    ) -> BrokerMessage:
        broker = self._broker
        if not is_valid_topic(topic):
            raise ControlError(f"not a topic name: {topic!r}")
        if retain and not broker.terms.retain_available:
            raise ControlError("this broker retains no messages")
        now = broker.context.clock.now
        message = Message(topic, payload, qos, retain, properties, "", now, 0 if expiry is None else now + expiry * 1_000_000)
        if retain and payload and broker.publisher.retained_full(topic, message.size):
            raise ControlError("no room for one more retained message")
        try:
            broker.router.topic_of(topic.encode("utf-8"))
        except MQTTError as error:
            raise ControlError(error.detail) from None
        if is_reserved(topic) and broker.router.queue_topic(topic) is None:
            raise ControlError(f"{topic!r} is reserved for the broker")
        if broker.messages.waiting > MAX_WAITING:
            raise ControlError("too many messages wait for their subscribers")
        published = broker.messages.publish(message, gate)
        self._wake()
        return published

    def clear_retained(self, topic_filter: str, may_clear: Callable[[str], bool] = lambda topic: True) -> Slices[int]:
        """Delete the retained messages that match a filter, of topics for which ``may_clear`` holds; returns how many
        there were.

        Subscribers are not notified. The broker's own messages (``$SYS``) stay.
        """
        _check_filter(topic_filter, may_be_shared=False)
        if topic_filter == "$SYS" or topic_filter.startswith("$SYS/"):
            raise ControlError("the messages of $SYS are the broker's")
        broker = self._broker
        listing = _RetainedListing(broker, topic_filter)
        cleared = 0
        while not listing.done:
            for message in listing.step(SLICE):
                if not may_clear(message.topic):
                    continue
                broker.retained.set(Message(message.topic, b"", 0, True, b"", "", 0, 0), False, None)
                cleared += 1
            self._wake()
            yield BACKLOG_WAIT if broker.outbound.backlogged else 0.0
        return cleared

    # --- the broker itself --------------------------------------------------------------------------------------------

    def status(self) -> BrokerStatus:
        """All counters and gauges."""
        broker = self._broker
        context = broker.context
        counters = context.counters
        drops: dict[tuple[str, ...], int] = {
            (listener, cause): getattr(drops, cause) for listener, drops in counters.drops.items() for cause in CAUSES
        }
        return BrokerStatus(
            durability=broker.terms.durability,
            totals=MappingProxyType({counter.name: counters.total(counter) for counter in COUNTERS}),
            drops=MappingProxyType(_by_cause(drops)),
            drops_by_listener=MappingProxyType(drops),
            clients_connected=broker.clients.connected,
            clients_connected_maximum=broker.clients.connected_maximum,
            sessions=len(broker.registry),
            sessions_expired=broker.lifecycle.expired,
            subscriptions=broker.router.subscriptions,
            shared_subscriptions=len(broker.router.groups),
            retained_messages=len(broker.retained),
            retained_bytes=broker.retained.size,
            retained_payload_bytes=broker.retained.payload_bytes,
            route_cache_entries=len(broker.router.cache),
            queued_messages=context.queued_messages,
            queued_bytes=context.queued_bytes,
            queue_memory_bytes=context.memory_bytes,
            store_pending_bytes=broker.journal.size,
            bans=broker.bans.active(self._monotonic()),
            bans_started=MappingProxyType(dict(broker.bans.started)),
            limits_reached=MappingProxyType(dict(counters.limits_reached)),
            logins=dict(broker.connect_handler.logins.counts),
            logins_failed=broker.bans.failed_logins,
            connects_refused=MappingProxyType(_refused(broker)),
            denials=MappingProxyType(dict(broker.outbound.denials.counts)),
            logins_banned=broker.bans.refused_logins,
            publishers_waiting=context.backpressure_monitor.paused,
            publisher_waits=context.backpressure_monitor.pauses,
            stream_producers=len(broker.producers),
            queues=MappingProxyType(
                {
                    name: QueueStatus(
                        queue.stored.row.stream,
                        queue.depth,
                        queue.in_flight,
                        len(queue.consumers),
                        queue.redeliveries,
                        queue.dead_letters,
                    )
                    for name, queue in broker.work_queues.all.items()
                }
            ),
            memory=_memory_status(broker),
        )

    @property
    def publishing(self) -> bool:
        """Whether messages of the broker wait to be published, because they have very many subscribers."""
        return self._broker.messages.waiting > 0

    @property
    def waiting(self) -> int:
        """The number of messages of the broker, of operators and of wills that wait to be published."""
        return self._broker.messages.waiting

    def publish_own(self, topic: str, payload: bytes, retain: bool = True) -> None:
        """Publish a message of the broker itself (``$SYS``); a retained one is not stored."""
        self._broker.messages.publish_status(topic, payload, retain)

    def _wake(self) -> None:
        """Have the next flush hand the gathered batch of the journal to the store."""
        if self._broker.outbound.on_flush_needed is not None:
            self._broker.outbound.on_flush_needed()


class Cursors(Generic[T]):
    """Unfinished listings by cursor: the last `MAX_CURSORS` opened.

    A cursor is good for one page, and not after a restart: a page whose answer was lost cannot be taken for the next.
    """

    def __init__(self) -> None:
        self._listings: dict[int, T] = {}
        self._last = secrets.randbits(48)

    def open(self, listing: T) -> int:
        if len(self._listings) >= MAX_CURSORS:
            del self._listings[next(iter(self._listings))]
        self._last += 1
        self._listings[self._last] = listing
        return self._last

    def take(self, cursor: int) -> T:
        """The listing of a cursor, which ends with it."""
        listing = self._listings.pop(cursor, None)
        if listing is None:
            raise ControlError(f"no cursor {cursor}: it was used, or {MAX_CURSORS} others have been opened since")
        return listing


class _SessionWalk:
    """The subscriptions of all sessions to any of these filters, a slice at a time."""

    def __init__(self, registry: Registry, filters: set[str]) -> None:
        self._registry = registry
        self._filters = filters
        self._start = ""
        self._client_ids: list[str] = []  # of the next sessions, the first one last
        self._subscriptions: Mapping[str, Subscription] = {}  # of the session that is visited
        self._candidates: list[str] = []  # filters that it may have
        self.done = not filters

    def step(self) -> list[Subscription]:
        found: list[Subscription] = []
        visits = SLICE
        while visits > 0 and not self.done:
            if not self._candidates:
                self._next_session()
                visits -= not self._candidates
            while self._candidates and visits > 0:
                visits -= 1
                topic_filter = self._candidates.pop()
                subscription = self._subscriptions.get(topic_filter)
                if subscription is not None and topic_filter in self._filters:
                    found.append(subscription)
        return found

    def _next_session(self) -> None:
        if not self._client_ids:
            self._client_ids = self._registry.client_ids.at_least(self._start, SLICE)
            if not self._client_ids:
                self.done = True
                return
            self._start = self._client_ids[-1] + "\0"
            self._client_ids.reverse()
        session = self._registry.get(self._client_ids.pop())
        own = self._subscriptions = {} if session is None else session.subscriptions
        self._candidates = list(own if len(own) < len(self._filters) else self._filters)


class _MatchingSearch:
    """The subscriptions and shared subscriptions that match a topic, a slice at a time; if they are many, only those to
    ``topic_filter`` unless it is empty."""

    def __init__(self, router: Router, registry: Registry, topic: str, topic_filter: str) -> None:
        self._router = router
        self._registry = registry
        self._topic = topic
        self._topic_filter = topic_filter
        self._filters: set[str] = set()
        self._groups: list[Any] = []  # shared subscriptions with these filters
        self._matches = 0
        self._counting = router.search(topic, True)
        self._matching: TrieSearch | None = None
        self._walk: _SessionWalk | None = None

    @property
    def done(self) -> bool:
        if self._walk is not None:
            return self._walk.done
        return self._matching is not None and self._matching.done and not self._matching.found

    def step(self) -> list[Any]:
        if self._walk is not None:
            return list(self._walk.step())
        if self._matching is not None:
            self._matching.step(SLICE)
            return _take(self._matching)
        self._counting.step(SLICE)
        for value, count in _take(self._counting):
            self._matches += count
            if self._topic_filter in ("", value.topic_filter):
                self._filters.add(value.topic_filter)
                if not self._topic_filter:
                    self._groups += self._router.groups_of(value.topic_filter)
        if not self._counting.done:
            return []
        if self._matches <= MATCHES:
            self._matching = self._router.search(self._topic)
            return []
        self._walk = _SessionWalk(self._registry, self._filters)
        return self._groups


def _take(search: TrieSearch) -> list[Any]:
    found = list(search.found)
    search.found.clear()
    return found


class _SubscriptionListing:
    """Subscriptions, a slice at a time: ``matching``, and then those of a ``search``.

    Listed are those to ``topic_filter``, if it is not empty, of the sessions for which ``may_read`` holds.
    """

    def __init__(
        self,
        matching: list[Any],
        topic_filter: str = "",
        may_read: Callable[[Session], bool] | None = None,
        search: _MatchingSearch | None = None,
    ) -> None:
        self._left = matching  # Subscription, Group, or Member of the last Group visited
        self._search = search
        self._topic_filter = topic_filter
        self._may_read = may_read
        self._group_filter = ""

    @property
    def done(self) -> bool:
        return not self._left and (self._search is None or self._search.done)

    def step(self, limit: int) -> list[SubscriptionView]:
        """Visit a slice; returns up to ``limit`` subscriptions."""
        found: list[SubscriptionView] = []
        if not self._left and self._search is not None and not self._search.done:
            self._left = self._search.step()
        visits = SLICE
        while self._left and visits and len(found) < limit:
            visits -= 1
            item = self._left.pop()
            if isinstance(item, Group):
                self._group_filter = f"$share/{item.name}/{item.topic_filter}"
                if self._topic_filter in ("", self._group_filter):
                    self._left += item.members
                continue
            topic_filter = self._group_filter if isinstance(item, Member) else item.topic_filter
            subscription = item.session.subscriptions.get(topic_filter)
            if subscription is None or self._topic_filter not in ("", topic_filter):
                continue
            if self._may_read is None or self._may_read(item.session):
                found.append(_subscription_view(subscription))
        return found


class _RetainedListing:
    """The retained messages that match a filter, a slice at a time."""

    def __init__(self, broker: Broker, topic_filter: str) -> None:
        self._retained = broker.retained
        self._clock = broker.context.clock
        self._scan: RetainedScan = broker.retained.scan(topic_filter)
        self._scanned: list[Message] = []  # and not listed yet

    @property
    def done(self) -> bool:
        return self._scan.done and not self._scanned

    def step(self, limit: int, room: int = PAGE_BYTES) -> list[Message]:
        """Visit a slice; returns up to ``limit`` messages, the last of which fills ``room`` bytes."""
        now = self._clock.now
        if not self._scanned:
            self._scanned = self._scan.read(SLICE, now)
        found: list[Message] = []
        visited = 0
        while visited < min(limit, len(self._scanned)) and room > 0:
            message = self._retained.get(self._scanned[visited].topic)
            visited += 1
            if message is not None and not 0 < message.expires_at <= now:
                found.append(message)
                room -= _content_bytes(message)
        del self._scanned[:visited]
        return found


class _LevelListing:
    """The levels that follow a prefix of retained topics, a slice at a time."""

    def __init__(self, broker: Broker, parent: str | None) -> None:
        self._broker = broker
        self._parent = parent
        self.scan = broker.retained.levels(parent)

    def step(self, visits: int) -> list[TopicLevel]:
        retained, now = self._broker.retained, self._broker.context.clock.now
        found: list[TopicLevel] = []
        for level in self.scan.read(visits):
            topic = level.name if self._parent is None else f"{self._parent}/{level.name}"
            message = None if level.own is None else retained.get(topic)
            if message is not None and not retained.is_current(message, now):
                message = None
            if message is not None or level.below:
                shown = None if message is None else _retained_message(message)
                found.append(TopicLevel(topic, level.name, level.below, shown))
        return found


def _content_bytes(message: Message) -> int:
    return len(message.payload) + len(message.properties)


def _ban_key(address: str, username: str, client_id: str) -> Key:
    if not (address or username or client_id):
        raise ControlError("a ban needs an address, a user name or a client id")
    if not address:
        return "", username, client_id
    try:
        network = ipaddress.ip_network(address)
    except ValueError as error:
        raise ControlError(f"not an address or network: {error}") from None
    return network_text(network.network_address, network.prefixlen), username, client_id


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_PAGE:
        raise ControlError(f"a page has 1 to {MAX_PAGE} entries, not {limit}")


def _check_filter(topic_filter: str, may_be_shared: bool = True) -> None:
    if not is_valid_filter(topic_filter):
        raise ControlError(f"not a topic filter: {topic_filter!r}")
    if not may_be_shared and parse_shared(topic_filter) is not None:
        raise ControlError(f"a shared subscription has no retained messages: {topic_filter!r}")


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


def _memory_status(broker: Broker) -> MemoryStatus:
    memory = broker.memory
    stage = broker.memory_stage
    refused = {
        "connections": stage.refused_connections,
        "subscriptions": stage.refused_subscriptions,
        "retained": stage.refused_retained,
        "wills": stage.refused_wills,
    }
    return MemoryStatus(
        maximum=broker.terms.max_memory,
        used=memory.used,
        counted=memory.counted,
        resident=memory.resident,
        stage=stage.stage,
        stage_name=STAGE_NAMES[stage.stage],
        parts=tuple(MemoryPart(part.name, part.held, part.maximum) for part in memory.parts()),
        refused=MappingProxyType(refused),
    )


def _by_cause(drops: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    """The drops of all listeners together."""
    totals = dict.fromkeys(CAUSES, 0)
    for (_, cause), count in drops.items():
        totals[cause] += count
    return totals


def _refused(broker: Broker) -> dict[tuple[str, ...], float]:
    """Refused CONNECTs by listener and the name of the reason code, "not_authorized"."""
    return {
        (listener, REASON_NAMES.get(code, f"{code:#x}").lower().replace(" ", "_")): count
        for (listener, code), count in broker.connect_handler.refused.items()
    }


def _connection(session: Session) -> Connection | None:
    connection = session.connection
    assert connection is None or isinstance(connection, Connection)
    return connection


def _subscription_view(subscription: Subscription) -> SubscriptionView:
    session = subscription.session
    return SubscriptionView(
        client_id=session.client_id,
        topic_filter=subscription.topic_filter,
        qos=subscription.qos,
        no_local=bool(subscription.options & NO_LOCAL),
        retain_as_published=bool(subscription.options & RETAIN_AS_PUBLISHED),
        identifier=subscription.identifier,
        connected=session.connection is not None,
    )


def _retained_message(message: Message) -> RetainedMessage:
    return RetainedMessage(
        topic=message.topic,
        payload=message.payload,
        qos=message.qos,
        properties=message.properties,
        client_id=message.publisher,
        received_at=message.timestamp / 1_000_000,
        expires_at=message.expires_at / 1_000_000,
    )
