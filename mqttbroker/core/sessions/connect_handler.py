"""CONNECT and AUTH: from CONNECT to CONNACK, and re-authentication.

A client gets its CONNACK after it is authenticated, after an older connection of its client id is closed
[MQTT-3.1.4-3], and after its session is read from the store or the discarded one is deleted there. No other packet but
AUTH goes before it [MQTT-3.2.0-1].
"""

from __future__ import annotations

import logging
from typing import Any, Final, cast

from mqttbroker.codec.packets import Auth, Connack, Connect, Will
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    BANNED,
    CLIENT_IDENTIFIER_NOT_VALID,
    CONTINUE_AUTHENTICATION,
    NOT_AUTHORIZED,
    PACKET_TOO_LARGE,
    PROTOCOL_ERROR,
    QUOTA_EXCEEDED,
    RE_AUTHENTICATE,
    RETAIN_NOT_SUPPORTED,
    SERVER_BUSY,
    SERVER_UNAVAILABLE,
    SESSION_TAKEN_OVER,
    SUCCESS,
    MQTTError,
    name,
    to_v3_connack,
)
from mqttbroker.core.access.bans import Bans
from mqttbroker.core.access.policy import (
    BAN_IN_FORCE,
    AuthenticationRequest,
    Identity,
    Permissions,
    Rules,
)
from mqttbroker.core.client.client_wire import ClientWire
from mqttbroker.core.client.connection import AUTHENTICATING, CLOSED, CONNECTED, CONNECTING, Connection
from mqttbroker.core.delivery.fan_out import FanOut
from mqttbroker.core.delivery.replay import Replays
from mqttbroker.core.routing.router import Router
from mqttbroker.core.sessions.clients import Clients
from mqttbroker.core.sessions.lifecycle import SessionLifecycle
from mqttbroker.core.sessions.own_shard import OwnShard
from mqttbroker.core.sessions.pending_connect import PendingConnect
from mqttbroker.core.terms.certificate_names import certificate_name
from mqttbroker.core.terms.memory_stage import MemoryStage
from mqttbroker.core.terms.terms import BrokerTerms
from mqttbroker.core.terms.users import Users
from sessions.journal import Journal
from sessions.message import Message
from sessions.registry import Registry
from sessions.session import CORE_PREFIX, NEVER, Session
from sessions.will import SessionWill
from topic_matcher.filters import text_bytes

log = logging.getLogger("mqttbroker.clients")

# The name of the user property, of any value, by which a CONNECT asks for the broker's durability setting.
DURABILITY: Final = "mqttbroker-durability"

# The beginning of the client ids that the broker's own bridges have.
OF_BRIDGES: Final = "$bridge/"

# Outcomes of authentications.
_ACCEPTED: Final = "accepted"
_REJECTED: Final = "rejected"
_UNAVAILABLE: Final = "unavailable"


class ConnectHandler:
    """Answers CONNECT and AUTH."""

    def __init__(
        self,
        journal: Journal,
        registry: Registry,
        router: Router,
        replays: Replays,
        lifecycle: SessionLifecycle,
        clients: Clients,
        users: Users,
        fan_out: FanOut,
        terms: BrokerTerms,
        rules: Rules,
        bans: Bans,
        memory: MemoryStage,
    ) -> None:
        self.memory = memory
        self.own_shard: OwnShard | None = None  # of a core of a cluster
        # Whether a client gets its CONNACK after the commit of its will. Without a cluster all that the client publishes
        # is in the same log behind the will; in one its retained messages may be in the log of another shard.
        self.waits_for_wills = False
        self.journal = journal
        self.registry = registry
        self.router = router
        self.replays = replays
        self.lifecycle = lifecycle
        self.clients = clients
        self.users = users
        self.fan_out = fan_out
        self.terms = terms
        self.rules = rules
        self.bans = bans
        # Answered authentications by the kind of the authenticator, "" if all ignored the client, and the outcome.
        self.logins: dict[tuple[str, str], int] = {}
        self.refused: dict[tuple[str, int], int] = {}  # CONNECTs by listener and reason code

    def connect(self, connection: Connection, packet: Connect) -> None:
        """Handle a CONNECT; the CONNACK may be sent in a later call."""
        connection.outbound.counters.connects += 1
        redirect = self.terms.redirect
        if redirect is not None and not connection.terms.own_bridges:
            self.refuse(connection, redirect.reason_code, "clients go to another server", packet.username)
            return
        if self.bans.refuses(connection.peer, packet.username, connection.last_received, packet.client_id):
            self.refuse(connection, BANNED, BAN_IN_FORCE, packet.username)
            return
        if self.memory.refuses_connections and not self._replaces_connection(connection):
            # Before any hash is computed.
            self.memory.refused_connections += 1
            self.refuse(connection, QUOTA_EXCEEDED, "no memory for new connections", packet.username)
            return
        connection.state = CONNECTING
        size = _connect_memory(packet)
        if not connection.hold_connect(size):
            self.refuse(connection, QUOTA_EXCEEDED, "too many CONNECT packets wait for an answer", packet.username)
            return
        pending = PendingConnect(connection, packet, self._old_session_deleted)
        pending.size = size
        longest = connection.terms.max_keep_alive
        if longest < 65535 and (packet.keep_alive == 0 or packet.keep_alive > longest):
            pending.keep_alive = longest
        connection.keep_alive = float(pending.keep_alive)
        connection.method = packet.properties.authentication_method
        wire = connection.wire
        assert wire is not None
        try:
            policy = wire.admit()
        except MQTTError as error:
            self.refuse(connection, error.reason_code, error.detail, packet.username)
            return
        policy.authenticate(ConnectAuthentication(self, pending, wire))

    def auth(self, connection: Connection, packet: Auth) -> None:
        """Handle AUTH: the next step of an authentication, or the start of a re-authentication (section 4.12)."""
        if connection.method is None:  # [MQTT-4.12.0-7]
            raise MQTTError(PROTOCOL_ERROR, "AUTH without an authentication method")
        if packet.properties.authentication_method != connection.method:  # [MQTT-4.12.0-5]
            raise MQTTError(PROTOCOL_ERROR, "AUTH with another method than CONNECT")
        request = connection.authentication
        expected = RE_AUTHENTICATE if request is None else CONTINUE_AUTHENTICATION
        if packet.reason_code != expected:  # [MQTT-4.12.0-3] [MQTT-4.12.1-1]
            raise MQTTError(PROTOCOL_ERROR, f"AUTH with {name(packet.reason_code)} now")
        if request is None:
            request = Reauthentication(self, connection)
        if connection.state == AUTHENTICATING:
            connection.state = CONNECTING
        connection.authentication = None
        request.client_data = packet.properties.authentication_data
        if connection.state != CONNECTED and not connection.hold_connect(len(request.client_data or b"")):
            self.refuse(connection, QUOTA_EXCEEDED, "too many CONNECT packets wait for an answer")
            return
        connection.authenticator.continue_exchange(request)

    def count_login(self, request: AuthenticationRequest, outcome: str) -> None:
        """Count an answered authentication; a limit that refuses a client before it is none."""
        authenticator = request.authenticator
        if authenticator is None and request.chain is None:
            return
        key = ("" if authenticator is None else authenticator.kind, outcome)
        self.logins[key] = self.logins.get(key, 0) + 1

    def login_succeeded(self, request: AuthenticationRequest, identity: Identity) -> None:
        self.count_login(request, _ACCEPTED)
        # Not the name that the client claims: a token or certificate goes with any, also that of another user.
        if identity.username is not None:
            self.bans.succeeded(request.peer, identity.username)

    def login_rejected(self, request: AuthenticationRequest, reason_code: int) -> None:
        self.count_login(request, _UNAVAILABLE if reason_code in (SERVER_UNAVAILABLE, SERVER_BUSY) else _REJECTED)

    def login_failed(self, request: AuthenticationRequest) -> None:
        """Wrong credentials, which count towards a ban also if the client has left: else it could guess at will."""
        self.count_login(request, _REJECTED)
        self.bans.failed(request.peer, request.username, self.lifecycle.clock.monotonic)

    def authenticated(self, pending: PendingConnect, identity: Identity) -> None:
        """Resume or create the session of an authenticated client."""
        connection = pending.connection
        packet = pending.packet
        if connection.state != CONNECTING:
            return
        connection.username = identity.username
        connection.expires_at = identity.expires_at
        assigned = packet.client_id == ""
        if identity.client_id is not None:
            if not assigned and identity.client_id != connection.client_id:
                self.refuse(connection, CLIENT_IDENTIFIER_NOT_VALID, "the login is for another client id")
                return
            connection.client_id = identity.client_id
            assigned = False
        allowed = connection.terms.allowed_client_id(connection.client_id, assigned, connection.username, pending.certificate)
        if allowed is None:
            self.refuse(connection, CLIENT_IDENTIFIER_NOT_VALID, "this listener does not allow the client id")
            return
        own_shard = self.own_shard
        if own_shard is not None:
            if assigned and connection.terms.assigns_any():
                allowed = own_shard.fitted(allowed)
            if allowed.startswith(CORE_PREFIX):
                self.refuse(connection, CLIENT_IDENTIFIER_NOT_VALID, "client ids of this kind are for cores of the cluster")
                return
            if not own_shard.owns(allowed):
                # Of an empty client id, the login or the listener made one.
                self.refuse(connection, CLIENT_IDENTIFIER_NOT_VALID, "not available in a cluster: send the client id")
                return
        client_id = connection.client_id = allowed
        if client_id.startswith(OF_BRIDGES) and not connection.terms.own_bridges:
            self.refuse(connection, CLIENT_IDENTIFIER_NOT_VALID, "client ids of this kind are for bridges of the broker")
            return
        # Again: the user name may be another one than in CONNECT, and a ban may have begun meanwhile.
        if self.bans.refuses(connection.peer, connection.username, connection.outbound.clock.monotonic, client_id):
            self.refuse(connection, BANNED, BAN_IN_FORCE)
            return
        if self._belongs_to_another(connection):
            # Before anything is closed or ended. The standard's meaning of 0x85 and of return code 2 is "not allowed
            # by the Server"; 0x87 would say that the user may not connect at all.
            self.refuse(connection, CLIENT_IDENTIFIER_NOT_VALID, "the session belongs to another user")
            return
        if not self._check_limits(connection):
            return
        if packet.will is not None and not self._check_will(connection, packet.will):
            return
        if not self._check_user(connection):
            return
        old = self._take_over(client_id)
        if old is not None and self.registry.is_over(old, self.lifecycle.now):
            self.lifecycle.end(old)
            old = None
        if packet.version < 5:
            expiry = 0 if packet.clean_start else NEVER
        else:
            expiry = max(0, packet.properties.session_expiry_interval)
        if not connection.terms.own_bridges:
            expiry = min(expiry, self.terms.max_session_expiry)
        if old is not None and not packet.clean_start:
            session = old
            pending.session_present = True  # [MQTT-3.1.2-5]
        else:
            if old is not None:
                self.lifecycle.end(old)  # [MQTT-3.1.2-4]
                if old.id != 0 and self.journal.gated:
                    self.journal.wait_for_commit(pending)
            session = self.registry.create(client_id, expiry > 0)
            self.users.session_added(session.username)
        self._set_user(session, connection, identity.permissions)
        self._count_user(connection)
        session.expiry_interval = expiry
        session.version = connection.version
        _set_will(session, packet.will)
        connection.session = session
        pending.session = session
        self.clients.pending[client_id] = pending
        self.lifecycle.save(session, False)
        if session.will is not None and self.waits_for_wills and self.journal.gated and not session.must_load:
            self.journal.wait_for_commit(pending)
        if session.must_load:
            session.request_page()
        elif pending.pending == 0:
            self._accept(pending)

    def _check_limits(self, connection: Connection) -> bool:
        """Whether the limits allow this client; refuses the CONNECT if not. It may replace its older connection."""
        known = self.registry.get(connection.client_id)
        counters = connection.outbound.counters
        if self.clients.connected >= self.terms.max_connections and not self._replaces_connection(connection):
            counters.limit_reached("max_connections")
            self.refuse(connection, SERVER_BUSY, "too many connections")
            return False
        if known is None and len(self.registry) >= self.terms.max_sessions:
            counters.limit_reached("max_sessions")
            self.refuse(connection, SERVER_BUSY, "too many sessions")
            return False
        if known is None and self.registry.context.sessions_full:
            counters.limit_reached("max_total_session_bytes")
            self.refuse(connection, QUOTA_EXCEEDED, "too much memory for sessions")
            return False
        return True

    def _replaces_connection(self, connection: Connection) -> bool:
        """Whether a client with this client id is connected."""
        known = self.registry.get(connection.client_id)
        return known is not None and known.connection is not None

    def _check_user(self, connection: Connection) -> bool:
        """Whether the limits of its user allow this client; refuses the CONNECT if not."""
        client_id, username = connection.client_id, connection.username
        known = self.registry.get(client_id)
        pending = self.clients.pending.get(client_id)
        older = None if known is None else known.connection
        if pending is not None:
            older = pending.connection
        replaces = older is not None and cast(Connection, older).username == username
        try:
            self.users.check(username, known is None or known.username != username, not replaces, connection.outbound.clock.monotonic)
        except MQTTError as error:
            self.refuse(connection, error.reason_code, error.detail)
            return False
        return True

    def _count_user(self, connection: Connection) -> None:
        """Count the connection for its user, and let the user's rates apply to it."""
        user = self.users.connected(connection.username, connection.outbound.clock.monotonic)
        if user is not None:
            connection.user = user
            connection.limit_received(user.received)
            connection.limit_sent(user.sent)

    def _check_will(self, connection: Connection, will: Will) -> bool:
        """Whether the will can be published; refuses the CONNECT if not."""
        if will.retain and not self.terms.retain_available:
            self.refuse(connection, RETAIN_NOT_SUPPORTED, "retained will")  # [MQTT-3.2.2-13]
            return False
        size: int = len(will.topic) + len(will.payload) + len(will.forward)
        session = self.registry.get(connection.client_id)
        replaced: int = 0 if session is None or session.will is None else session.will.message.size
        if self.memory.refuses_state and size > replaced:
            self.memory.refused_wills += 1
            self.refuse(connection, QUOTA_EXCEEDED, "no memory for wills")
            return False
        if self.registry.context.will_bytes + size > self.terms.max_total_will_bytes:
            connection.outbound.counters.limit_reached("max_total_will_bytes")
            self.refuse(connection, QUOTA_EXCEEDED, "too many wills")
            return False
        try:
            self.router.topic_of(will.topic.encode("utf-8"))
        except MQTTError as error:
            self.refuse(connection, error.reason_code, error.detail)
            return False
        return True

    def _take_over(self, client_id: str) -> Session | None:
        """Close any older connection of a client id [MQTT-3.1.4-3]; returns its session."""
        pending = self.clients.pending.get(client_id)
        if pending is not None:
            # No CONNACK reason code says this, and no other packet may go before a CONNACK.
            self.clients.close(pending.connection, False, "session taken over")
        session = self.registry.get(client_id)
        if session is not None and session.connection is not None:
            session.connection.disconnect(SESSION_TAKEN_OVER, "session taken over")
            session = self.registry.get(client_id)
        return session

    def _belongs_to_another(self, connection: Connection) -> bool:
        """Whether the session of this client id belongs to another user, with or without access rules.

        A session without a user belongs to the first one that takes it over.
        """
        session = self.registry.get(connection.client_id)
        if session is None or session.username is None or session.username == connection.username:
            return False
        return not self.registry.is_over(session, self.lifecycle.now)

    def _set_user(self, session: Session, connection: Connection, permissions: Permissions | None) -> None:
        """Give the session the rights of this user at this listener, and those that the login brings."""
        rules = connection.terms.rules
        old = session.permissions
        same = old is permissions or (old is not None and permissions is not None and cast(Permissions, old).text == permissions.text)
        if session.username != connection.username or session.rules != rules or not same:
            self.users.session_removed(session.username)
            self.users.session_added(connection.username)
            session.set_username(connection.username)
            session.rules = rules
            session.set_permissions(permissions, 0 if permissions is None else permissions.size)
            if self.rules.restrictive:
                self.router.invalidate_session(session)
        connection.restricted = self.rules.restricts(session)

    def _old_session_deleted(self, pending: PendingConnect) -> None:
        """The commit that deletes the discarded session, or stores the will, has succeeded or failed."""
        connection = pending.connection
        if connection.state != CONNECTING:
            return
        if pending.failed:
            self.refuse(connection, connection.outbound.store_failure, "the store failed")
        else:
            self._accept(pending)

    def session_loaded(self, session: Session) -> bool:
        """Answer the CONNECT that waited for the session's first page; False if there is none."""
        pending = self.clients.pending.get(session.client_id)
        if pending is None or pending.session is not session:
            return False
        self._accept(pending)
        return True

    def _accept(self, pending: PendingConnect) -> None:
        """Send CONNACK, and then the session's messages."""
        connection = pending.connection
        session = pending.session
        if connection.state != CONNECTING or session is None:
            return
        packet = pending.packet
        connack = self._connack(pending, session)
        if len(connack) > connection.maximum_packet_size:  # [MQTT-3.1.2-24]
            self.refuse(connection, PACKET_TOO_LARGE, "CONNACK is larger than the client's Maximum Packet Size")
            return
        del self.clients.pending[connection.client_id]
        connection.state = CONNECTED
        connection.release_connect()
        self.clients.count_connected()
        self.bans.connected(connection.peer, connection.username, connection.client_id, connection.outbound.clock.monotonic)
        receive_maximum = packet.properties.receive_maximum if packet.version >= 5 else -1
        session.attach(connection, receive_maximum if receive_maximum > 0 else 65535)
        self.fan_out.accepted(connection)
        connection.send(connack)
        log.info(
            "event=connected client=%s address=%s version=%d clean_start=%s keep_alive=%d user=%s listener=%s",
            connection.client_id,
            connection.peer,
            packet.version,
            packet.clean_start,
            pending.keep_alive,
            connection.username or "",
            connection.terms.listener,
        )
        if self.clients.on_connected is not None:
            self.clients.on_connected(connection, packet.clean_start)
        if pending.session_present:
            session.deliveries.redeliver()
            self.replays.begin(connection)
            self.lifecycle.subscriptions.streams.resumed(session)
        connection.request_flush()

    def _connack(self, pending: PendingConnect, session: Session) -> bytes:
        """The CONNACK of an accepted CONNECT."""
        connection = pending.connection
        packet = pending.packet
        properties = Properties()
        terms = connection.terms
        if packet.version >= 5:
            if max(0, packet.properties.session_expiry_interval) != session.expiry_interval:
                properties.session_expiry_interval = session.expiry_interval
            if terms.receive_maximum < 65535:  # the value without the property
                properties.receive_maximum = terms.receive_maximum
            properties.maximum_packet_size = terms.max_packet_size
            if not self.terms.retain_available:
                properties.retain_available = 0
            if terms.topic_alias_maximum:
                properties.topic_alias_maximum = terms.topic_alias_maximum
            if packet.client_id == "":
                properties.assigned_client_identifier = session.client_id  # [MQTT-3.1.3-7]
            if pending.keep_alive != packet.keep_alive:
                properties.server_keep_alive = pending.keep_alive  # [MQTT-3.1.2-21]
            if packet.properties.request_response_information == 1:  # [MQTT-3.1.2-28]
                properties.response_information = self.terms.response_topic_root(session.client_id, session.username)
            properties.authentication_method = connection.method  # [MQTT-4.12.0-5]
            properties.authentication_data = pending.authentication_data
            if any(key == DURABILITY for key, _ in packet.properties.user_properties):
                properties.user_properties.append((DURABILITY, self.terms.durability))
        present = pending.session_present and packet.version > 3  # in MQTT 3.1 that byte is reserved
        connack = Connack(present, SUCCESS, properties)
        encoded = connack.encode(packet.version)
        if properties.user_properties and len(encoded) > connection.maximum_packet_size:
            properties.user_properties.clear()  # [MQTT-3.2.2-20]
            encoded = connack.encode(packet.version)
        return encoded

    def refuse(self, connection: Connection, reason_code: int, detail: str, username: str | None = None) -> None:
        """Answer a CONNECT with an error and close the connection [MQTT-3.2.2-7].

        ``username`` is what the client claims to be, for the log.
        """
        if connection.state == CLOSED:
            return
        key = (connection.terms.listener, reason_code)
        self.refused[key] = self.refused.get(key, 0) + 1
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
        self.clients.close(connection, True, f"{name(reason_code)}: {detail}", username)


class ConnectAuthentication(AuthenticationRequest):
    """The authentication of a CONNECT."""

    def __init__(self, handler: ConnectHandler, pending: PendingConnect, wire: ClientWire) -> None:
        connection = pending.connection
        packet = pending.packet
        super().__init__(connection.client_id, connection.peer, packet.username, packet.password)
        self.handler = handler
        self.pending = pending
        self.size = pending.size
        self.listener = connection.terms.listener
        self.remote = wire.remote
        self.version = packet.version
        self.method = packet.properties.authentication_method
        self.client_data = packet.properties.authentication_data
        self._answered = False

    def send_challenge(self, data: bytes) -> None:
        connection = self.pending.connection
        connection.state = AUTHENTICATING
        connection.authenticator = self.authenticator
        _send_challenge(connection, self, data)

    @property
    def certificate(self) -> Any:
        wire = self.pending.connection.wire
        return None if wire is None else wire.certificate

    @property
    def certificate_name(self) -> str | None:
        certificate = self.certificate
        kinds = self.pending.connection.terms.certificate_identity
        return certificate_name(certificate, kinds) if certificate else None

    @property
    def waiting(self) -> bool:
        connection = self.pending.connection
        if connection.state != CONNECTING or self._answered:
            return False
        return not self._given_up()

    def _given_up(self) -> bool:
        """Whether the client has left and wants nothing but the answer. Nothing is read from it, so it is looked for."""
        wire = self.pending.connection.wire
        return wire is not None and wire.abort_if_client_left()

    def accept(self, identity: Identity) -> None:
        if not self._answer():
            return
        handler = self.handler
        handler.login_succeeded(self, identity)
        if self._given_up():  # it would take the session over from the next connection of its client
            return
        pending = self.pending
        pending.connection.authenticator = self.authenticator
        if pending.connection.terms.binds_certificates():
            pending.certificate = self.certificate
        pending.authentication_data = self.server_data
        handler.authenticated(pending, identity)

    def reject(self, reason_code: int, detail: str) -> None:
        if self._answer():
            self.handler.login_rejected(self, reason_code)
            self._refuse(reason_code, detail)

    def fail(self, reason_code: int, detail: str) -> None:
        if self._answer():
            self.handler.login_failed(self)
            self._refuse(reason_code, detail)

    def _answer(self) -> bool:
        """Whether this is the first answer."""
        first = not self._answered
        self._answered = True
        return first

    def _refuse(self, reason_code: int, detail: str) -> None:
        self.handler.refuse(self.pending.connection, reason_code, detail, self.username)


class Reauthentication(AuthenticationRequest):
    """The re-authentication of a connected client (section 4.12.1)."""

    def __init__(self, handler: ConnectHandler, connection: Connection) -> None:
        super().__init__(connection.client_id, connection.peer, None, None)
        self.handler = handler
        self.connection = connection
        self.method = connection.method
        self.authenticator = connection.authenticator

    @property
    def certificate(self) -> Any:
        return None

    @property
    def waiting(self) -> bool:
        return self.connection.state == CONNECTED

    def send_challenge(self, data: bytes) -> None:
        _send_challenge(self.connection, self, data)

    def accept(self, identity: Identity) -> None:
        connection = self.connection
        self.handler.login_succeeded(self, identity)
        if identity.username != connection.username:  # the session and its rights belong to the user of the CONNECT
            self._refuse(NOT_AUTHORIZED, "authenticated again as another user")
            return
        connection.expires_at = identity.expires_at
        _send_auth(connection, self, SUCCESS, self.server_data)

    def reject(self, reason_code: int, detail: str) -> None:
        self.handler.login_rejected(self, reason_code)
        self._refuse(reason_code, detail)

    def fail(self, reason_code: int, detail: str) -> None:
        self.handler.login_failed(self)
        self._refuse(reason_code, detail)

    def _refuse(self, reason_code: int, detail: str) -> None:
        # A DISCONNECT has no code for a ban.
        code = NOT_AUTHORIZED if reason_code == BANNED else reason_code
        self.connection.disconnect(code, detail)  # [MQTT-4.12.1-2]


def _connect_memory(packet: Connect) -> int:
    """An upper estimate of the memory of a CONNECT, in bytes."""
    size: int = text_bytes(packet.client_id) + len(packet.password or b"")
    size += len(packet.properties.authentication_data or b"")
    properties = packet.properties.user_properties
    if packet.username is not None:
        size += text_bytes(packet.username)
    if packet.will is not None:
        size += text_bytes(packet.will.topic) + len(packet.will.payload) + len(packet.will.forward)
        properties = properties + packet.will.properties.user_properties
    for key, value in properties:
        size += 80 + text_bytes(key) + text_bytes(value)
    return size


def _set_will(session: Session, will: Will | None) -> None:
    if will is None:
        session.set_will(None)
        return
    properties = will.properties
    message = Message(will.topic, will.payload, will.qos, will.retain, will.forward, session.client_id, 0, 0)
    session.set_will(SessionWill(message, max(0, properties.will_delay_interval), properties.message_expiry_interval))


def _send_challenge(connection: Connection, request: AuthenticationRequest, data: bytes) -> None:
    connection.authentication = request
    _send_auth(connection, request, CONTINUE_AUTHENTICATION, data)  # [MQTT-4.12.0-2]


def _send_auth(connection: Connection, request: AuthenticationRequest, reason_code: int, data: bytes | None) -> None:
    properties = Properties()
    properties.authentication_method = connection.method  # [MQTT-4.12.0-5]
    properties.authentication_data = data
    packet = Auth(reason_code, properties).encode(5)
    if len(packet) > connection.maximum_packet_size:
        request.reject(PACKET_TOO_LARGE, "AUTH is larger than the client's Maximum Packet Size")
        return
    connection.send(packet)
