"""Admission: from CONNECT to CONNACK.

The rule kept here: a client gets its CONNACK when it has been authenticated,
when any older connection of its client id is closed [MQTT-3.1.4-3], and when
what it resumes has been read, or what it discards is gone, from the store; no
other packet goes before it [MQTT-3.2.0-1].
"""

from __future__ import annotations

import logging
from typing import Dict, Final, Optional

from mqttbroker.codec.packets import Auth, Connack, Connect, Will
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    CONTINUE_AUTHENTICATION,
    NOT_AUTHORIZED,
    PACKET_TOO_LARGE,
    PROTOCOL_ERROR,
    RE_AUTHENTICATE,
    RETAIN_NOT_SUPPORTED,
    SERVER_BUSY,
    SESSION_TAKEN_OVER,
    SUCCESS,
    MQTTError,
    name,
    to_v3_connack,
)
from mqttbroker.core.clients import Clients
from mqttbroker.core.connection import AUTHENTICATING, CLOSED, CONNECTED, CONNECTING, Connection
from mqttbroker.core.policy import Challenge, Policy, Rules, Terms
from sessions.journal import Gate, Journal
from sessions.message import Message
from sessions.registry import Registry
from sessions.session import NEVER, Session

log = logging.getLogger("mqttbroker")

# A CONNECT with this user property, whatever its value, is told how durable an acknowledgement is.
DURABILITY: Final = "mqttbroker-durability"


class ConnectHandler:
    """The CONNECTs that are being answered."""

    def __init__(
        self,
        journal: Journal,
        registry: Registry,
        clients: Clients,
        terms: Terms,
        policy: Policy,
        rules: Rules,
    ) -> None:
        self.journal = journal
        self.registry = registry
        self.clients = clients
        self.terms = terms
        self.policy = policy
        self.rules = rules
        self._pending: Dict[str, PendingConnect] = {}

    def connect(self, connection: Connection, packet: Connect) -> None:
        """A CONNECT that decoded; the answer may come in a later call."""
        redirect = self.terms.redirect
        if redirect is not None:
            self.refuse(connection, redirect.reason_code, "clients go to another server")
            return
        connection.state = CONNECTING
        pending_connect = PendingConnect(self, connection, packet)
        longest = connection.terms.max_keep_alive
        if longest < 65535 and (packet.keep_alive == 0 or packet.keep_alive > longest):
            pending_connect.keep_alive = longest
        connection.keep_alive = float(pending_connect.keep_alive)
        connection.method = packet.properties.authentication_method
        self.policy.authenticate(ConnectChallenge(pending_connect))

    def auth(self, connection: Connection, packet: Auth) -> None:
        """AUTH: the next step of an authentication, or the first of another one (section 4.12)."""
        if connection.method is None:  # [MQTT-4.12.0-7]
            raise MQTTError(PROTOCOL_ERROR, "AUTH without an authentication method")
        if packet.properties.authentication_method != connection.method:  # [MQTT-4.12.0-5]
            raise MQTTError(PROTOCOL_ERROR, "AUTH with another method than CONNECT")
        challenge = connection.challenge
        expected = RE_AUTHENTICATE if challenge is None else CONTINUE_AUTHENTICATION
        if packet.reason_code != expected:  # [MQTT-4.12.0-3] [MQTT-4.12.1-1]
            raise MQTTError(PROTOCOL_ERROR, f"AUTH with {name(packet.reason_code)} now")
        if challenge is None:
            challenge = Renewal(connection)
        if connection.state == AUTHENTICATING:
            connection.state = CONNECTING
        connection.challenge = None
        challenge.data = packet.properties.authentication_data
        connection.authenticator.converse(challenge)

    def admit(self, pending_connect: PendingConnect) -> None:
        """The client is who it says: give it its session."""
        connection = pending_connect.connection
        packet = pending_connect.packet
        if connection.state != CONNECTING:
            return
        client_id = connection.client_id
        if not self._has_room(connection):
            return
        if packet.will is not None and not self._may_leave(connection, packet.will):
            return
        old = self._take_over(client_id)
        if old is not None and self.registry.is_over(old, self.clients.now):
            self.clients.end_session(old)
            old = None
        expiry = self._session_expiry(packet)
        if old is not None and not packet.clean_start and self._may_resume(connection, old):
            session = old
            pending_connect.session_present = True  # [MQTT-3.1.2-5]
        else:
            if old is not None:
                self.clients.end_session(old)  # [MQTT-3.1.2-4]
                if old.id != 0 and self.journal.gated:
                    self.journal.wait_for_commit(pending_connect)
            session = self.registry.create(client_id, expiry > 0)
        self._give_rights(session, connection)
        session.expiry_interval = expiry
        session.version = connection.version
        self._set_will(session, packet)
        connection.session = session
        pending_connect.session = session
        self._pending[client_id] = pending_connect
        self.clients.waiting[client_id] = connection
        self.clients.save(session, False)
        if session.must_load:
            session.request_page()
        elif pending_connect.pending == 0:
            self._welcome(pending_connect)

    def _has_room(self, connection: Connection) -> bool:
        """Whether one more client, or one in the place of its older self, may come in."""
        known = self.registry.get(connection.client_id)
        if self.clients.connected >= self.terms.max_connections:
            if known is None or known.connection is None:
                self.refuse(connection, SERVER_BUSY, "too many connections")
                return False
        if known is None and len(self.registry) >= self.terms.max_sessions:
            self.refuse(connection, SERVER_BUSY, "too many sessions")
            return False
        return True

    def _take_over(self, client_id: str) -> Optional[Session]:
        """The session of a client id, with any connection it has closed [MQTT-3.1.4-3]."""
        pending = self._pending.pop(client_id, None)
        if pending is not None:
            # No code of a CONNACK says this, and nothing may go before a CONNACK.
            self.clients.close(pending.connection, False, "session taken over")
        session = self.registry.get(client_id)
        if session is not None and session.connection is not None:
            session.connection.disconnect(SESSION_TAKEN_OVER, "session taken over")
            session = self.registry.get(client_id)
        return session

    def _may_resume(self, connection: Connection, session: Session) -> bool:
        """Whether what the session was sent may be read by the user who comes for it.

        Under rules each user has its own; a session from before there were names is
        for whoever comes first.
        """
        if not self.rules.restrictive or session.username == connection.username:
            return True
        return session.username is None

    def _give_rights(self, session: Session, connection: Connection) -> None:
        """From now on the session's rights are those of this user at this listener."""
        rules = connection.terms.rules
        if session.username != connection.username or session.rules != rules:
            session.username = connection.username
            session.rules = rules
            if self.rules.restrictive:
                self.clients.publisher.router.invalidate_session(session)

    def _session_expiry(self, packet: Connect) -> int:
        if packet.version < 5:
            wanted = 0 if packet.clean_start else NEVER
        else:
            wanted = max(0, packet.properties.session_expiry_interval)
        return min(wanted, self.terms.max_session_expiry)

    def _may_leave(self, connection: Connection, will: Will) -> bool:
        """Whether this will can be published when the time comes; refuses the CONNECT if not."""
        if will.retain and not self.terms.retain_available:
            self.refuse(connection, RETAIN_NOT_SUPPORTED, "retained will")  # [MQTT-3.2.2-13]
            return False
        try:
            self.clients.publisher.router.route(will.topic.encode("utf-8"))
        except MQTTError as error:
            self.refuse(connection, error.reason_code, error.detail)
            return False
        return True

    def _set_will(self, session: Session, packet: Connect) -> None:
        will = packet.will
        if will is None:
            session.will = None
            session.will_delay = 0
            return
        properties = will.properties
        session.will_delay = max(0, properties.will_delay_interval)
        session.will_expiry = properties.message_expiry_interval
        session.will = Message(
            will.topic, will.payload, will.qos, will.retain, will.forward, session.client_id, 0, 0
        )

    def forget(self, connection: Connection) -> None:
        """The connection is over: its CONNECT waits no longer."""
        pending = self._pending.get(connection.client_id)
        if pending is not None and pending.connection is connection:
            del self._pending[connection.client_id]

    def discarded(self, pending_connect: PendingConnect) -> None:
        """The end of the old session is on disk, or could not be written."""
        if pending_connect.connection.state != CONNECTING:
            return
        if pending_connect.failed:
            connection = pending_connect.connection
            self.refuse(connection, connection.outbound.refusal, "the store failed")
            return
        self._welcome(pending_connect)

    def _welcome(self, pending_connect: PendingConnect) -> None:
        """Send CONNACK and let the session's messages flow."""
        connection = pending_connect.connection
        session = pending_connect.session
        if connection.state != CONNECTING or session is None:
            return
        packet = pending_connect.packet
        connack = self._connack(pending_connect, session)
        if len(connack) > connection.maximum_packet_size:  # [MQTT-3.1.2-24]
            self.refuse(connection, PACKET_TOO_LARGE, "the client takes no packet as long as its CONNACK")
            return
        self._pending.pop(connection.client_id, None)
        self.clients.waiting.pop(connection.client_id, None)
        connection.state = CONNECTED
        self.clients.count_in()
        window = packet.properties.receive_maximum if packet.version >= 5 else -1
        session.attach(connection, window if window > 0 else 65535)
        connection.send(connack)
        log.info(
            "event=connected client=%s address=%s version=%d clean_start=%s keep_alive=%d",
            connection.client_id,
            connection.peer,
            packet.version,
            packet.clean_start,
            pending_connect.keep_alive,
        )
        if pending_connect.session_present:
            session.redeliver()
            self.clients.subscriptions.replays.begin(connection)
        connection.touch()

    def _connack(self, pending_connect: PendingConnect, session: Session) -> bytes:
        packet = pending_connect.packet
        properties = Properties()
        terms = pending_connect.connection.terms
        if packet.version >= 5:
            asked = max(0, packet.properties.session_expiry_interval)
            if asked != session.expiry_interval:
                properties.session_expiry_interval = session.expiry_interval
            properties.receive_maximum = terms.receive_maximum
            properties.maximum_packet_size = terms.maximum_packet_size
            if not terms.retain_available:
                properties.retain_available = 0
            if terms.topic_alias_maximum:
                properties.topic_alias_maximum = terms.topic_alias_maximum
            if packet.client_id == "":
                properties.assigned_client_identifier = session.client_id  # [MQTT-3.1.3-7]
            if pending_connect.keep_alive != packet.keep_alive:
                properties.server_keep_alive = pending_connect.keep_alive  # [MQTT-3.1.2-21]
            if packet.properties.request_response_information == 1:  # [MQTT-3.1.2-28]
                properties.response_information = terms.reply_root(session.client_id, session.username)
            properties.authentication_method = pending_connect.connection.method  # [MQTT-4.12.0-5]
            properties.authentication_data = pending_connect.proof
            if any(key == DURABILITY for key, _ in packet.properties.user_properties):
                properties.user_properties.append((DURABILITY, terms.durability))
        present = pending_connect.session_present and packet.version > 3  # to 3.1 that byte is reserved
        connack = Connack(present, SUCCESS, properties)
        encoded = connack.encode(packet.version)
        if properties.user_properties and len(encoded) > pending_connect.connection.maximum_packet_size:
            properties.user_properties.clear()  # [MQTT-3.2.2-20]
            encoded = connack.encode(packet.version)
        return encoded

    def resumed(self, session: Session) -> bool:
        """The session's first page is in memory; False if no CONNECT waits for it."""
        pending_connect = self._pending.get(session.client_id)
        if pending_connect is None or pending_connect.session is not session:
            return False
        self._welcome(pending_connect)
        return True

    def refuse(self, connection: Connection, reason_code: int, detail: str) -> None:
        """Answer a CONNECT with an error and close [MQTT-3.2.2-7]."""
        if connection.state == CLOSED:
            return
        if connection.version >= 5:
            properties = Properties()
            properties.server_reference = self.terms.server_reference(reason_code)
            if connection.problem_information and properties.server_reference is None:
                properties.reason_string = detail
            connack = Connack(False, reason_code, properties).encode(5)
            if len(connack) > connection.maximum_packet_size:  # [MQTT-3.2.2-19]
                connack = Connack(False, reason_code).encode(5)
            if len(connack) <= connection.maximum_packet_size:
                connection.send(connack)
        else:
            code = to_v3_connack(reason_code)
            if code > 0:
                connection.send(Connack(False, code).encode(4))
        self.clients.close(connection, True, f"{name(reason_code)}: {detail}")


class PendingConnect(Gate):
    """One CONNECT on its way to its CONNACK."""

    def __init__(self, connect_handler: ConnectHandler, connection: Connection, packet: Connect) -> None:
        super().__init__()
        self.connect_handler = connect_handler
        self.connection = connection
        self.packet = packet
        self.session: Optional[Session] = None
        self.session_present = False
        self.keep_alive = packet.keep_alive
        self.proof: Optional[bytes] = None  # what an enhanced authentication ends with

    def opened(self) -> None:
        self.connect_handler.discarded(self)


class ConnectChallenge(Challenge):
    """The question to the authenticator."""

    def __init__(self, pending_connect: PendingConnect) -> None:
        connection = pending_connect.connection
        packet = pending_connect.packet
        super().__init__(connection.client_id, connection.peer, packet.username, packet.password)
        self.pending_connect = pending_connect
        self.method = packet.properties.authentication_method
        self.data = packet.properties.authentication_data

    def ask(self, data: bytes) -> None:
        connection = self.pending_connect.connection
        connection.state = AUTHENTICATING
        connection.authenticator = self.authenticator
        _ask(connection, self, data)

    @property
    def waiting(self) -> bool:
        return self.pending_connect.connection.state == CONNECTING

    def accept(self) -> None:
        connection = self.pending_connect.connection
        connection.username = self.username
        self.pending_connect.proof = self.answer
        self.pending_connect.connect_handler.admit(self.pending_connect)

    def reject(self, reason_code: int, detail: str) -> None:
        self.pending_connect.connect_handler.refuse(self.pending_connect.connection, reason_code, detail)


class Renewal(Challenge):
    """The question to the authenticator about a client that is connected (section 4.12.1)."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.client_id, connection.peer, None, None)
        self.connection = connection
        self.method = connection.method

    def ask(self, data: bytes) -> None:
        _ask(self.connection, self, data)

    def accept(self) -> None:
        connection = self.connection
        if self.username != connection.username:  # its session and its rights are another's
            self.reject(NOT_AUTHORIZED, "authenticated again as another user")
            return
        _send_auth(connection, self, SUCCESS, self.answer)

    def reject(self, reason_code: int, detail: str) -> None:
        self.connection.disconnect(reason_code, detail)  # [MQTT-4.12.1-2]


def _ask(connection: Connection, challenge: Challenge, data: bytes) -> None:
    connection.challenge = challenge
    _send_auth(connection, challenge, CONTINUE_AUTHENTICATION, data)  # [MQTT-4.12.0-2]


def _send_auth(
    connection: Connection, challenge: Challenge, reason_code: int, data: Optional[bytes]
) -> None:
    properties = Properties()
    properties.authentication_method = connection.method  # [MQTT-4.12.0-5]
    properties.authentication_data = data
    packet = Auth(reason_code, properties).encode(5)
    if len(packet) > connection.maximum_packet_size:
        challenge.reject(PACKET_TOO_LARGE, "AUTH is larger than the client's Maximum Packet Size")
        return
    connection.send(packet)
