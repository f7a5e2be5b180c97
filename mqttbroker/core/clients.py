"""Clients: who is connected, and what follows when one leaves.

The rule kept here: a connection ends once, and with it in the same step its
hold on the session, its will (section 3.1.2.5) and, when the time has come,
the session itself.  Whoever ends it, the client of a 5.0 connection is told
why first, where the standard allows it.
"""

from __future__ import annotations

import logging
from heapq import heapify, heappop, heappush
from typing import Dict, List, Optional, Tuple

from mqttbroker.codec.packets import Publish, decode, encode_publish
from mqttbroker.codec.properties import decode_publish_properties, decode_varint
from mqttbroker.codec.reason_codes import KEEP_ALIVE_TIMEOUT, SERVER_SHUTTING_DOWN
from mqttbroker.core.connection import (
    AUTHENTICATING,
    AWAIT_CONNECT,
    CLOSED,
    CONNECTED,
    Connection,
    Outbound,
)
from mqttbroker.core.policy import Terms
from mqttbroker.core.publisher import Publisher
from mqttbroker.core.subscriptions import Subscriptions
from sessions.journal import Journal
from sessions.message import Message
from sessions.registry import Registry
from sessions.session import Session

log = logging.getLogger("mqttbroker")


class Clients:
    """All connections of one broker and the sessions they leave behind."""

    def __init__(
        self,
        journal: Journal,
        registry: Registry,
        publisher: Publisher,
        subscriptions: Subscriptions,
        outbound: Outbound,
        terms: Terms,
    ) -> None:
        self.journal = journal
        self.registry = registry
        self.publisher = publisher
        self.subscriptions = subscriptions
        self.outbound = outbound
        self.terms = terms
        self.connections: Dict[Connection, bool] = {}
        self.connected = 0
        self.connected_maximum = 0
        self.expired = 0  # sessions that ended because their time was over
        # Clients whose CONNECT waits for the store, by client id.
        self.waiting: Dict[str, Connection] = {}
        self._wills: List[Tuple[float, str]] = []
        self._looked = 0.0  # monotonic time of the last tick
        self._due = 0.0  # clients to be sent to another server by now

    @property
    def now(self) -> float:
        """Unix time in seconds."""
        return self.outbound.clock.now / 1_000_000

    def close(self, connection: Connection, will: bool, why: str) -> None:
        """The connection is over, whoever ended it; ``will`` tells whether its will is due."""
        if connection.state == CLOSED:
            return
        was_connected = connection.state == CONNECTED
        connection.state = CLOSED
        connection.closing_reason = why
        connection.acks.clear()
        if connection.paused_by is not None:
            connection.paused_by.forget(connection)
        self.connections.pop(connection, None)
        connection.touch()
        session = connection.session
        if was_connected:
            self.connected -= 1
            log.info(
                "event=disconnected client=%s address=%s reason=%s",
                connection.client_id,
                connection.peer,
                why,
            )
        elif why:
            log.info(
                "event=refused client=%s address=%s reason=%s",
                connection.client_id,
                connection.peer,
                why,
            )
        if self.waiting.get(connection.client_id) is connection:
            del self.waiting[connection.client_id]
        elif session is None or session.connection is not connection:
            return
        if session is None or self.registry.get(session.client_id) is not session:
            return
        session.connection = None
        self.publisher.pass_on(session)
        session.detach(self.now)
        if not will or not was_connected:
            session.will = None  # [MQTT-3.1.2-10]
        if session.expiry_interval == 0:
            self.end_session(session)
            return
        if session.will is not None:
            if session.will_delay == 0:
                self._publish_will(session)
            else:
                session.will_due = self.now + session.will_delay
                self._schedule_will(session)
        self.registry.schedule_end(session)
        self.save(session, True)

    def restore(self, session: Session) -> None:
        """Schedule what a session loaded from the store is due; `disconnected_at` is set."""
        if session.will is not None:
            if session.will_due == 0.0:
                session.will_due = session.disconnected_at + session.will_delay
            self._schedule_will(session)
        self.registry.schedule_end(session)

    def _schedule_will(self, session: Session) -> None:
        wills = self._wills
        heappush(wills, (session.will_due, session.client_id))
        # A client that comes and goes leaves an entry each time.
        if len(wills) > 2 * len(self.registry) + 1000:
            self._wills = [
                (session.will_due, client_id)
                for client_id, session in self.registry.sessions.items()
                if session.connection is None and session.will is not None
            ]
            heapify(self._wills)

    def count_in(self) -> None:
        """One more client is connected."""
        self.connected += 1
        self.connected_maximum = max(self.connected_maximum, self.connected)

    def end_session(self, session: Session) -> None:
        """The session is over: its will is published if still due, the rest forgotten."""
        if session.will is not None and session.connection is None:
            self._publish_will(session)  # [MQTT-3.1.2-8]
        for subscription in list(session.subscriptions.values()):
            self.subscriptions.withdraw(subscription)
        session.subscriptions.clear()
        session.end()
        self.registry.remove(session)
        if session.id != 0:
            self.journal.delete_session(session.id)

    def _publish_will(self, session: Session) -> None:
        will = session.will
        if will is None:
            return
        session.will = None
        now = self.outbound.clock.now
        will.timestamp = now
        if session.will_expiry >= 0:
            will.expires_at = now + session.will_expiry * 1_000_000
        self.publisher.publish_message(will, session)

    def save(self, session: Session, away: bool) -> None:
        """Write a durable session's row."""
        if session.id != 0:
            due = session.will_due if away and session.will is not None else None
            self.journal.save_session(
                session.id,
                (
                    session.id,
                    session.client_id,
                    session.version,
                    session.expiry_interval,
                    session.disconnected_at if away else None,
                    _encode_will(session),
                    due,
                    session.username,
                    session.rules,
                ),
            )

    def tick(self, monotonic: float) -> None:
        """Do what time asks for; to be called about once a second or more often.

        ``monotonic`` is on the clock that `Connection.last_received` is on; the
        shelf's clock has been set by the caller.
        """
        overdue: List[Connection] = []
        for connection in self.connections:
            if connection.blocked:
                connection.last_received = monotonic  # it is we who do not listen
            silence: float = monotonic - connection.last_received
            if connection.state == AWAIT_CONNECT or connection.state == AUTHENTICATING:
                if monotonic - connection.accepted > connection.terms.connect_timeout:
                    overdue.append(connection)
            elif connection.keep_alive and silence > connection.keep_alive * 1.5:
                overdue.append(connection)
        for connection in overdue:
            if connection.state == AWAIT_CONNECT or connection.state == AUTHENTICATING:
                self.close(connection, False, "not authenticated in time" if connection.client_id else "no CONNECT in time")
            else:
                connection.disconnect(KEEP_ALIVE_TIMEOUT, "keep alive timeout")  # [MQTT-3.1.2-22]
        self._send_away(monotonic - self._looked)
        self._looked = monotonic
        now = self.now
        wills = self._wills
        while wills and wills[0][0] <= now:
            _, client_id = heappop(wills)
            session = self.registry.get(client_id)
            if session is not None and session.connection is None and session.will is not None:
                if session.will_due <= now and client_id not in self.waiting:
                    self._publish_will(session)
                    self.save(session, True)
        for session in self.registry.expired(now):
            if session.client_id not in self.waiting:
                self.expired += 1
                self.end_session(session)

    def _send_away(self, seconds: float) -> None:
        """Disconnect the clients that are to go to another server in so many seconds."""
        redirect = self.terms.redirect
        if redirect is None:
            self._due = 0.0
            return
        self._due = min(self._due + seconds * redirect.rate, redirect.rate)
        leaving: List[Connection] = []
        for connection in self.connections:
            if self._due < 1.0:
                break
            if connection.state == CONNECTED:
                self._due -= 1.0
                leaving.append(connection)
        for connection in leaving:
            connection.disconnect(redirect.reason_code, "clients go to another server")

    def shut_down(self) -> None:
        """Say goodbye to every client; sessions stay."""
        redirect = self.terms.redirect
        reason_code = SERVER_SHUTTING_DOWN if redirect is None else redirect.reason_code
        for connection in list(self.connections):
            connection.disconnect(reason_code, "server shutting down")


def _encode_will(session: Session) -> Optional[bytes]:
    """A session's will as the store keeps it: delay and expiry, then a 5.0 PUBLISH."""
    will = session.will
    if will is None:
        return None
    head = session.will_delay.to_bytes(4, "big") + (session.will_expiry + 1).to_bytes(5, "big")
    return head + encode_publish(
        will.topic.encode("utf-8"), will.payload, will.qos, will.retain, False, 1, 5, will.properties
    )


def restore_will(session: Session, stored: bytes) -> None:
    """Put back what `_encode_will` wrote."""
    session.will_delay = int.from_bytes(stored[0:4], "big")
    session.will_expiry = int.from_bytes(stored[4:9], "big") - 1
    packet, end = decode(stored, 5, 9)
    assert isinstance(packet, Publish)
    _, body = decode_varint(stored, 10, end)
    start = body + 2 + len(packet.topic.encode("utf-8")) + (2 if packet.qos else 0)
    properties = decode_publish_properties(stored, start, end).forward
    session.will = Message(
        packet.topic,
        packet.payload,
        packet.qos,
        packet.retain,
        properties,
        session.client_id,
        0,
        0,
    )
