"""Requests to the authenticators: of a client that sent CONNECT, and of a connected one that authenticates again."""

from __future__ import annotations

from typing import Any, Final

from mqttbroker.codec.packets import Auth
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    BANNED,
    CONTINUE_AUTHENTICATION,
    NOT_AUTHORIZED,
    PACKET_TOO_LARGE,
    SERVER_BUSY,
    SERVER_UNAVAILABLE,
    SUCCESS,
)
from mqttbroker.core.access.bans import Bans
from mqttbroker.core.access.policy import AuthenticationRequest, Identity
from mqttbroker.core.client.client_wire import ClientWire
from mqttbroker.core.client.connection import AUTHENTICATING, CONNECTED, CONNECTING, Connection
from mqttbroker.core.sessions.pending_connect import PendingConnect
from mqttbroker.core.terms.certificate_names import certificate_name
from sessions.context import Clock

# Outcomes of authentications.
_ACCEPTED: Final = "accepted"
_REJECTED: Final = "rejected"
_UNAVAILABLE: Final = "unavailable"


class Logins:
    """Counts the answered authentications, and tells the bans of those that count for them."""

    def __init__(self, bans: Bans, clock: Clock) -> None:
        self.bans = bans
        self.clock = clock
        # By the kind of the authenticator, "" if all ignored the client, and the outcome.
        self.counts: dict[tuple[str, str], int] = {}

    def succeeded(self, request: AuthenticationRequest, identity: Identity) -> None:
        self._count(request, _ACCEPTED)
        # Not the name that the client claims: a token or certificate goes with any, also that of another user.
        if identity.username is not None:
            self.bans.succeeded(request.peer, identity.username)

    def rejected(self, request: AuthenticationRequest, reason_code: int) -> None:
        self._count(request, _UNAVAILABLE if reason_code in (SERVER_UNAVAILABLE, SERVER_BUSY) else _REJECTED)

    def failed(self, request: AuthenticationRequest) -> None:
        """Wrong credentials, which count towards a ban also if the client has left: else it could guess at will."""
        self._count(request, _REJECTED)
        self.bans.failed(request.peer, request.username, self.clock.monotonic)

    def _count(self, request: AuthenticationRequest, outcome: str) -> None:
        authenticator = request.authenticator
        if authenticator is None and request.chain is None:
            return
        key = ("" if authenticator is None else authenticator.kind, outcome)
        self.counts[key] = self.counts.get(key, 0) + 1


class ConnectAuthentication(AuthenticationRequest):
    """The authentication of a CONNECT, which came over ``wire``."""

    def __init__(self, logins: Logins, pending: PendingConnect, wire: ClientWire) -> None:
        connection = pending.connection
        packet = pending.packet
        super().__init__(connection.client_id, connection.peer, packet.username, packet.password)
        self.logins = logins
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
        self.logins.succeeded(self, identity)
        if self._given_up():  # it would take the session over from the next connection of its client
            return
        pending = self.pending
        pending.connection.authenticator = self.authenticator
        if pending.connection.terms.binds_certificates():
            pending.certificate = self.certificate
        pending.authentication_data = self.server_data
        pending.flow.authenticated(pending, identity)

    def reject(self, reason_code: int, detail: str) -> None:
        if self._answer():
            self.logins.rejected(self, reason_code)
            self._refuse(reason_code, detail)

    def fail(self, reason_code: int, detail: str) -> None:
        if self._answer():
            self.logins.failed(self)
            self._refuse(reason_code, detail)

    def _answer(self) -> bool:
        """Whether this is the first answer."""
        first = not self._answered
        self._answered = True
        return first

    def _refuse(self, reason_code: int, detail: str) -> None:
        self.pending.flow.refuse(self.pending.connection, reason_code, detail, self.username)


class Reauthentication(AuthenticationRequest):
    """The re-authentication of a connected client (section 4.12.1)."""

    def __init__(self, logins: Logins, connection: Connection) -> None:
        super().__init__(connection.client_id, connection.peer, None, None)
        self.logins = logins
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
        self.logins.succeeded(self, identity)
        if identity.username != connection.username:  # the session and its rights belong to the user of the CONNECT
            self._refuse(NOT_AUTHORIZED, "authenticated again as another user")
            return
        connection.expires_at = identity.expires_at
        _send_auth(connection, self, SUCCESS, self.server_data)

    def reject(self, reason_code: int, detail: str) -> None:
        self.logins.rejected(self, reason_code)
        self._refuse(reason_code, detail)

    def fail(self, reason_code: int, detail: str) -> None:
        self.logins.failed(self)
        self._refuse(reason_code, detail)

    def _refuse(self, reason_code: int, detail: str) -> None:
        # A DISCONNECT has no code for a ban.
        code = NOT_AUTHORIZED if reason_code == BANNED else reason_code
        self.connection.disconnect(code, detail)  # [MQTT-4.12.1-2]


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
