"""Access to the HTTP server: tokens and client certificates, their roles, and the rights of each role.

Only SHA-256 digests of tokens are kept, and compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, NamedTuple

from mqttbroker.config.settings import HttpAccess, Settings
from mqttbroker.core.access.policy import Authorizer

ALL_STREAMS = "*"
# Of a request without MQTT client id: no pattern with %c matches it, because it is no single level.
NO_CLIENT_ID = "/"


class Right(Flag):
    """The rights that a request may need."""

    STATUS = auto()  # metrics and status
    LIST = auto()  # streams, clients, subscriptions, bans, listeners, configuration
    CONTENT = auto()  # retained messages
    OPERATE = auto()  # disconnect, delete, publish
    ADMINISTER = auto()  # log level, backup, reload

    NONE = 0


VIEW = Right.STATUS | Right.LIST | Right.CONTENT
ROLES: Mapping[str, Right] = {
    "reader": Right.NONE,
    "viewer": VIEW,
    "operator": VIEW | Right.OPERATE,
    "admin": VIEW | Right.OPERATE | Right.ADMINISTER,
}


def role_for(right: Right) -> str:
    """The least role that has a right."""
    return next(role for role, rights in ROLES.items() if right in rights)


@dataclass(frozen=True)
class Principal:
    """The sender of a request. ``streams`` are those that it may read, `ALL_STREAMS` for all.

    With a ``user``, the access rules for that MQTT user apply, too.
    """

    name: str
    role: str
    rights: Right
    streams: frozenset[str]
    user: str | None = None
    rules: Authorizer | None = None

    def may_read_stream(self, stream: str, filters: Iterable[str]) -> bool:
        """Whether it may read a stream that stores the topics of ``filters``."""
        if ALL_STREAMS not in self.streams and stream not in self.streams:
            return False
        rules = self.rules
        return rules is None or all(rules.may_read_all(NO_CLIENT_ID, self.user, each) for each in filters)

    def may_read(self, topic: str) -> bool:
        """Whether its user, if it has one, may read a topic."""
        return self.rules is None or self.rules.may_read(NO_CLIENT_ID, self.user, topic)

    def may_publish(self, topic: str) -> bool:
        """Whether its user, if it has one, may publish to a topic."""
        return self.rules is None or self.rules.may_publish(NO_CLIENT_ID, self.user, topic)


NOBODY = Principal("", "none", Right.NONE, frozenset())
"""The sender of a request that needs no credentials."""


class _Entry(NamedTuple):
    principal: Principal
    digest: bytes  # of the token; b"" = none
    certificate: str | None


class AccessList:
    """The senders that the HTTP server serves. ``anonymous`` sends requests without credentials; None = refused."""

    def __init__(self, entries: Sequence[_Entry], anonymous: Principal | None) -> None:
        self.anonymous = anonymous
        self._entries = entries

    def of_token(self, token: bytes) -> Principal | None:
        """The sender with this token; None if nobody has it."""
        digest = hashlib.sha256(token).digest()
        found: Principal | None = None
        for entry in self._entries:
            if hmac.compare_digest(digest, entry.digest) and found is None:
                found = entry.principal
        return found

    def of_certificate(self, certificate: Mapping[str, Any]) -> Principal | None:
        """The sender with a verified certificate (as from `ssl.SSLSocket.getpeercert`); None if there is none."""
        names = certificate_names(certificate)
        return next((entry.principal for entry in self._entries if entry.certificate in names), None)


def certificate_names(certificate: Mapping[str, Any]) -> list[str]:
    """The alternative names of a certificate (DNS, e-mail, URI, IP), and its common name."""
    names = [value for _, value in certificate.get("subjectAltName", ())]
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    return names + [value for key, value in subject if key == "commonName"]


def access_list(settings: Settings, rules: Authorizer) -> AccessList:
    """The access list of these settings; ``rules`` are those of ``acl_file``."""
    http = settings.http
    entries: list[_Entry] = []
    if http.token is not None:
        principal = Principal("token", "admin", ROLES["admin"], frozenset([ALL_STREAMS]))
        entries.append(_Entry(principal, _digest(http.token), None))
    entries += [_entry(access, rules) for access in http.access]
    return AccessList(entries, None if http.has_access else _anonymous(settings))


def _entry(access: HttpAccess, rules: Authorizer) -> _Entry:
    streams = set(access.streams)
    if access.role == "admin" or (access.user is not None and not streams):
        streams = {ALL_STREAMS}
    principal = Principal(
        access.name,
        access.role,
        ROLES[access.role],
        frozenset(streams),
        access.user,
        None if access.user is None else rules,
    )
    return _Entry(principal, b"" if access.token is None else _digest(access.token), access.certificate)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def streams_open(settings: Settings) -> bool:
    """Whether requests without credentials may read streams and messages, as anonymous MQTT clients on loopback may."""
    return settings.allow_anonymous is not False and settings.acl_file is None


def _anonymous(settings: Settings) -> Principal:
    """The sender of a request without credentials, which are configured for nobody; the server is on loopback."""
    if streams_open(settings):
        return Principal("anonymous", "viewer", VIEW, frozenset([ALL_STREAMS]))
    return Principal("anonymous", "viewer", Right.STATUS, frozenset())
