"""CONNECT and AUTH: from CONNECT to CONNACK, and re-authentication.

A CONNECT takes five steps, in the order of the methods here:

1. admit: bans, a redirect, memory and the listener's limits, before anything is computed for the client;
2. authenticate: the listener's authenticators answer now or later;
3. own: the client id is the client's own, within all limits; an older connection of it is closed [MQTT-3.1.4-3], and its session is
   resumed or replaced;
4. load: the store reads the session, or deletes the one that was discarded;
5. accept: CONNACK, and then the session's messages.

No packet but AUTH goes before CONNACK [MQTT-3.2.0-1], and nothing is read from the client meanwhile. A step that refuses the client raises
MQTTError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, cast

from mqttbroker.codec.packets import Auth, Connect, Will
from mqttbroker.codec.reason_codes import (
    BANNED,
    CLIENT_IDENTIFIER_NOT_VALID,
    CONTINUE_AUTHENTICATION,
    IMPLEMENTATION_SPECIFIC_ERROR,
    PACKET_TOO_LARGE,
    PROTOCOL_ERROR,
    QUOTA_EXCEEDED,
    RE_AUTHENTICATE,
    RETAIN_NOT_SUPPORTED,
    SERVER_BUSY,
    SERVER_UNAVAILABLE,
    SESSION_TAKEN_OVER,
    MQTTError,
    name,
)
from mqttbroker.core.access.bans import Bans
from mqttbroker.core.access.policy import BAN_IN_FORCE, Identity, Permissions, Rules
from mqttbroker.core.client.connection import AUTHENTICATING, CLOSED, CONNECTED, CONNECTING, Connection
from mqttbroker.core.client.topic_aliases import TopicAliases
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.core.delivery.fan_out import FanOut
from mqttbroker.core.delivery.replay import Replays
from mqttbroker.core.routing.router import Router
from mqttbroker.core.sessions.authentications import ConnectAuthentication, Logins, Reauthentication
from mqttbroker.core.sessions.clients import Clients
from mqttbroker.core.sessions.connack import acceptance, refusal
from mqttbroker.core.sessions.lifecycle import SessionLifecycle
from mqttbroker.core.sessions.own_shard import OwnShard
from mqttbroker.core.sessions.pending_connect import ConnectFlow, PendingConnect
from mqttbroker.core.terms.memory_stage import MemoryStage
from mqttbroker.core.terms.terms import BrokerTerms
from mqttbroker.core.terms.users import Users
from sessions.counters import TAKEOVERS
from sessions.journal import Journal
from sessions.message import Message
from sessions.registry import Registry
from sessions.session import CORE_PREFIX, NEVER, Session
from sessions.will import SessionWill
from topic_matcher.filters import text_bytes

log = logging.getLogger("mqttbroker.clients")

# The beginning of the client ids that the broker's own bridges have.
OF_BRIDGES: Final = "$bridge/"


class ConnectHandler(ConnectFlow):
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
        cluster: ClusterPort | None,
    ) -> None:
        self.memory = memory
        self.own_shard = None if cluster is None else OwnShard(cluster.shard, cluster.shards)
        # Whether a client gets its CONNACK after the commit of its will. Without a cluster all that the client publishes
        # is in the same log behind the will; in one its retained messages may be in the log of another shard.
        self.waits_for_wills = cluster is not None
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
        self.logins = Logins(bans, lifecycle.clock)
        self.refused: dict[tuple[str, int], int] = {}  # CONNECTs by listener and reason code

    # -- admit --------------------------------------------------------------------

    def connect(self, connection: Connection, packet: Connect, new_client_id: Callable[[], str]) -> None:
        """Handle a CONNECT; the CONNACK may be sent in a later call. ``new_client_id`` makes a client id for a client that sends none."""
        _apply(packet, connection)
        if not packet.client_id:
            # 3.1.1 [MQTT-3.1.3-8]; 3.1 always requires a client id.
            if packet.version == 3 or (packet.version == 4 and not packet.clean_start):
                self.refuse(connection, CLIENT_IDENTIFIER_NOT_VALID, "empty client id")
                return
            connection.client_id = self._fitted(new_client_id())
        connection.outbound.counters.connects += 1
        wire = connection.wire
        assert wire is not None
        try:
            size = self._admit(connection, packet)
            policy = wire.admit()
        except MQTTError as error:
            self.refuse(connection, error.reason_code, error.detail, packet.username)
            return
        pending = PendingConnect(self, connection, packet)
        pending.size = size
        longest = connection.terms.max_keep_alive
        if longest < 65535 and (packet.keep_alive == 0 or packet.keep_alive > longest):
            pending.keep_alive = longest
        connection.keep_alive = float(pending.keep_alive)
        connection.method = packet.properties.authentication_method
        policy.authenticate(ConnectAuthentication(self.logins, pending, wire))

    def _fitted(self, client_id: str) -> str:
        """A client id that the broker makes, for this shard of a cluster."""
        return client_id if self.own_shard is None else self.own_shard.fitted(client_id)

    def _admit(self, connection: Connection, packet: Connect) -> int:
        """Hold the packet until the client has its answer; returns its memory in bytes."""
        redirect = self.terms.redirect
        if redirect is not None and not connection.terms.of_bridges:
            raise MQTTError(redirect.reason_code, "clients go to another server")
        if self.bans.refuses(connection.peer, packet.username, connection.last_received, packet.client_id):
            raise MQTTError(BANNED, BAN_IN_FORCE)
        if self.memory.refuses_connections and not self._replaces_connection(connection):
            self.memory.refused_connections += 1
            raise MQTTError(QUOTA_EXCEEDED, "no memory for new connections")
        connection.state = CONNECTING
        size = _memory_of(packet)
        if not connection.hold_connect(size):
            raise MQTTError(QUOTA_EXCEEDED, "too many CONNECT packets wait for an answer")
        return size

    def _replaces_connection(self, connection: Connection) -> bool:
        """Whether a client with this client id is connected."""
        known = self.registry.get(connection.client_id)
        return known is not None and known.connection is not None

    # -- authenticate -------------------------------------------------------------

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
            request = Reauthentication(self.logins, connection)
        if connection.state == AUTHENTICATING:
            connection.state = CONNECTING
        connection.authentication = None
        request.client_data = packet.properties.authentication_data
        if connection.state != CONNECTED and not connection.hold_connect(len(request.client_data or b"")):
            self.refuse(connection, QUOTA_EXCEEDED, "too many CONNECT packets wait for an answer")
            return
        authenticator = connection.authenticator
        assert authenticator is not None
        authenticator.continue_exchange(request)

    def authenticated(self, pending: PendingConnect, identity: Identity) -> None:
        connection = pending.connection
        if connection.state != CONNECTING:
            return
        try:
            self._identify(pending, identity)
            self._check(connection, pending.packet.will)
        except MQTTError as error:
            self.refuse(connection, error.reason_code, error.detail)
            return
        session = self._own(pending, identity.permissions)
        self._load(pending, session)

    # -- own ----------------------------------------------------------------------

    def _identify(self, pending: PendingConnect, identity: Identity) -> None:
        """Give the connection its user name and its client id."""
        connection = pending.connection
        connection.username = identity.username
        connection.expires_at = identity.expires_at
        assigned = pending.packet.client_id == ""
        if identity.client_id is not None:
            if not assigned and identity.client_id != connection.client_id:
                raise MQTTError(CLIENT_IDENTIFIER_NOT_VALID, "the login is for another client id")
            connection.client_id = identity.client_id
            assigned = False
        client_id = connection.terms.allowed_client_id(connection.client_id, assigned, connection.username, pending.certificate)
        if client_id is None:
            raise MQTTError(CLIENT_IDENTIFIER_NOT_VALID, "this listener does not allow the client id")
        own_shard = self.own_shard
        if own_shard is not None:
            if assigned and connection.terms.assigns_any():
                client_id = own_shard.fitted(client_id)
            if client_id.startswith(CORE_PREFIX):
                raise MQTTError(CLIENT_IDENTIFIER_NOT_VALID, "client ids of this kind are for cores of the cluster")
            if not own_shard.owns(client_id):
                # Of an empty client id, the login or the listener made one.
                raise MQTTError(CLIENT_IDENTIFIER_NOT_VALID, "not available in a cluster: send the client id")
        connection.client_id = client_id
        if client_id.startswith(OF_BRIDGES) and not connection.terms.of_bridges:
            raise MQTTError(CLIENT_IDENTIFIER_NOT_VALID, "client ids of this kind are for bridges of the broker")

    def _check(self, connection: Connection, will: Will | None) -> None:
        """Check what the client may have, before anything is closed or ended for it."""
        # Again: the user name may be another one than in CONNECT, and a ban may have begun meanwhile.
        if self.bans.refuses(connection.peer, connection.username, connection.outbound.clock.monotonic, connection.client_id):
            raise MQTTError(BANNED, BAN_IN_FORCE)
        if self._belongs_to_another(connection):
            # The standard's meaning of 0x85 and of return code 2 is "not allowed by the Server"; 0x87 would say that the
            # user may not connect at all.
            raise MQTTError(CLIENT_IDENTIFIER_NOT_VALID, "the session belongs to another user")
        self._check_limits(connection)
        if will is not None:
            self._check_will(connection, will)
        self._check_user(connection)

    def _belongs_to_another(self, connection: Connection) -> bool:
        """Whether the session of this client id belongs to another user, with or without access rules.

        A session without a user belongs to the first one that takes it over.
        """
        session = self.registry.get(connection.client_id)
        if session is None or session.username is None or session.username == connection.username:
            return False
        return not self.registry.is_over(session, self.lifecycle.now)

    def _check_limits(self, connection: Connection) -> None:
        """Check the limits of the broker. A client may replace its older connection."""
        known = self.registry.get(connection.client_id)
        counters = connection.outbound.counters
        if self.clients.connected >= self.terms.max_connections and not self._replaces_connection(connection):
            counters.limit_reached("max_connections")
            raise MQTTError(SERVER_BUSY, "too many connections")
        if known is None and len(self.registry) >= self.terms.max_sessions:
            counters.limit_reached("max_sessions")
            raise MQTTError(SERVER_BUSY, "too many sessions")
        if known is None and self.registry.context.sessions_full:
            counters.limit_reached("max_total_session_bytes")
            raise MQTTError(QUOTA_EXCEEDED, "too much memory for sessions")

    def _check_will(self, connection: Connection, will: Will) -> None:
        """Check whether the will can be kept and published."""
        if will.retain and not self.terms.retain_available:
            raise MQTTError(RETAIN_NOT_SUPPORTED, "retained will")  # [MQTT-3.2.2-13]
        size: int = len(will.topic) + len(will.payload) + len(will.forward)
        session = self.registry.get(connection.client_id)
        replaced: int = 0 if session is None or session.will is None else session.will.message.size
        if self.memory.refuses_state and size > replaced:
            self.memory.refused_wills += 1
            raise MQTTError(QUOTA_EXCEEDED, "no memory for wills")
        if self.registry.context.will_bytes + size > self.terms.max_total_will_bytes:
            connection.outbound.counters.limit_reached("max_total_will_bytes")
            raise MQTTError(QUOTA_EXCEEDED, "too many wills")
        self.router.topic_of(will.topic.encode("utf-8"))

    def _check_user(self, connection: Connection) -> None:
        """Check the limits of its user."""
        client_id, username = connection.client_id, connection.username
        known = self.registry.get(client_id)
        pending = self.clients.pending.get(client_id)
        older = None if known is None else known.connection
        if pending is not None:
            older = pending.connection
        replaces = older is not None and cast(Connection, older).username == username
        self.users.check(username, known is None or known.username != username, not replaces, connection.outbound.clock.monotonic)

    def _own(self, pending: PendingConnect, permissions: Permissions | None) -> Session:
        """Close an older connection of the client id, and resume its session or create one."""
        connection = pending.connection
        packet = pending.packet
        client_id = connection.client_id
        old = self._take_over(client_id)
        if old is not None and self.registry.is_over(old, self.lifecycle.now):
            self.lifecycle.end(old)
            old = None
        if packet.version < 5:
            expiry = 0 if packet.clean_start else NEVER
        else:
            expiry = max(0, packet.properties.session_expiry_interval)
        if not connection.terms.of_bridges:
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
        self._set_user(session, connection, permissions)
        self._count_user(connection)
        session.expiry_interval = expiry
        session.version = connection.version
        _set_will(session, packet.will)
        connection.session = session
        pending.session = session
        self.clients.pending[client_id] = pending
        self.lifecycle.save(session, False)
        return session

    def _take_over(self, client_id: str) -> Session | None:
        """Close any older connection of a client id; returns its session."""
        pending = self.clients.pending.get(client_id)
        if pending is not None:
            pending.connection.outbound.counters.count(TAKEOVERS)
            # No CONNACK reason code says this, and no other packet may go before a CONNACK.
            self.clients.close(pending.connection, False, "session taken over")
        session = self.registry.get(client_id)
        if session is not None and session.connection is not None:
            session.context.counters.count(TAKEOVERS)
            session.connection.disconnect(SESSION_TAKEN_OVER, "session taken over")
            session = self.registry.get(client_id)
        return session

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

    def _count_user(self, connection: Connection) -> None:
        """Count the connection for its user, and let the user's rates apply to it."""
        user = self.users.connected(connection.username, connection.outbound.clock.monotonic)
        if user is not None:
            connection.user = user
            connection.limit_received(user.received)
            connection.limit_sent(user.sent)

    # -- load ---------------------------------------------------------------------

    def _load(self, pending: PendingConnect, session: Session) -> None:
        """Have the session's first page read, if the store has messages of it, and wait for that and for the commits."""
        if session.must_load:
            pending.pending += 1  # until `session_loaded`
            session.request_page()
        elif session.will is not None and self.waits_for_wills and self.journal.gated:
            self.journal.wait_for_commit(pending)
        if pending.pending == 0:
            self.loaded(pending)

    def session_loaded(self, session: Session) -> bool:
        """The first page of a session is loaded; False if no CONNECT waits for it."""
        pending = self.clients.pending.get(session.client_id)
        if pending is None or pending.session is not session:
            return False
        pending.settle()
        return True

    def session_failed(self, session: Session) -> bool:
        """The first page of a session cannot be read; False if no CONNECT waits for it."""
        pending = self.clients.pending.get(session.client_id)
        if pending is None:
            return False
        self.refuse(pending.connection, IMPLEMENTATION_SPECIFIC_ERROR, "the store failed")
        return True

    def loaded(self, pending: PendingConnect) -> None:
        connection = pending.connection
        session = pending.session
        if connection.state != CONNECTING or session is None:
            return
        if pending.failed:
            self.refuse(connection, connection.outbound.store_failure, "the store failed")
        else:
            self._accept(pending, session)

    # -- accept -------------------------------------------------------------------

    def _accept(self, pending: PendingConnect, session: Session) -> None:
        """Send CONNACK, and then the session's messages."""
        connection = pending.connection
        packet = pending.packet
        connack = acceptance(pending, session, self.terms)
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

    # -- or refuse ----------------------------------------------------------------

    def refuse(self, connection: Connection, reason_code: int, detail: str, username: str | None = None) -> None:
        if connection.state == CLOSED:
            return
        key = (connection.terms.listener, reason_code)
        self.refused[key] = self.refused.get(key, 0) + 1
        connack = refusal(connection, reason_code, detail, self.terms.server_reference(reason_code))
        if connack:
            connection.send(connack)
        self.clients.close(connection, True, f"{name(reason_code)}: {detail}", username)

    def refuse_all(self, detail: str) -> None:
        """Refuse the clients that wait for the store."""
        for pending in list(self.clients.pending.values()):
            self.refuse(pending.connection, SERVER_UNAVAILABLE, detail)


def _apply(packet: Connect, connection: Connection) -> None:
    """Give the connection what its CONNECT says of it."""
    properties = packet.properties
    if packet.username is not None and connection.terms.ignores_username_query:
        username: str = packet.username.partition("?")[0]
        packet.username = username if username or packet.password is not None else None
    connection.version = 5 if packet.version == 5 else 4
    connection.bridge = packet.bridge and packet.version < 5
    connection.client_id = packet.client_id
    connection.zero_copy_version = connection.version
    if packet.version == 5:
        alias_maximum: int = min(properties.topic_alias_maximum, connection.terms.topic_alias_maximum)
        if alias_maximum > 0:
            connection.topic_aliases = TopicAliases(alias_maximum)
            connection.zero_copy_version = 0
        if properties.maximum_packet_size > 0:
            connection.maximum_packet_size = properties.maximum_packet_size
        connection.problem_information = properties.request_problem_information != 0


def _memory_of(packet: Connect) -> int:
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
