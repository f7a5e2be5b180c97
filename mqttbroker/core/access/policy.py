"""Policies: which clients may connect, and which topics they may publish to and read."""

from __future__ import annotations

import ipaddress
import logging
from abc import abstractmethod
from typing import Any, Final, cast

from mypy_extensions import mypyc_attr

from mqttbroker.codec.reason_codes import (
    BAD_AUTHENTICATION_METHOD,
    BAD_USER_NAME_OR_PASSWORD,
    NOT_AUTHORIZED,
    SERVER_UNAVAILABLE,
)
from sessions.session import Session

log = logging.getLogger("mqttbroker.auth")

# The same for an unknown user and a wrong password, so that a client cannot tell them apart.
WRONG_CREDENTIALS: Final = "wrong user name or password"

NO_METHOD: Final = "no enhanced authentication without a password file"

BAN_IN_FORCE: Final = "a ban is in force"


# --- authentication ---------------------------------------------------------


class Identity:
    """A client that an authenticator accepts.

    ``username`` None = anonymous. With a ``client_id`` the client must have that one. ``permissions`` are rules of its
    own. The connection ends at ``expires_at``, in Unix seconds; 0 = never.
    """

    def __init__(
        self,
        username: str | None,
        client_id: str | None = None,
        permissions: Permissions | None = None,
        expires_at: float = 0.0,
    ) -> None:
        self.username = username
        self.client_id = client_id
        self.permissions = permissions
        self.expires_at = expires_at


class AuthenticationRequest:
    """A client that asks to be authenticated, with the user name and the password that it claims.

    Each authenticator that is asked answers with one call of `accept`, `reject`, `fail`, `unavailable` or `ignore`, now
    or later, on the event loop's thread. After all but `ignore` the request is answered, and further calls do nothing.
    """

    def __init__(self, client_id: str, peer: str, username: str | None, password: bytes | None) -> None:
        self.client_id = client_id
        self.peer = peer  # its address
        self.listener = ""  # the address of its listener
        self.version = 5  # of MQTT
        self.remote = False  # it never counts as loopback, whatever the address
        self.username = username
        self.password = password
        self.size = 0  # memory in bytes of the packet that it belongs to
        # Enhanced authentication (section 4.12): the method, None without it; the last Authentication Data from the
        # client and to it; the state of the method.
        self.method: str | None = None
        self.client_data: bytes | None = None
        self.server_data: bytes | None = None
        self.exchange: Any = None
        # Set by the chain: the authenticator that is asked, None if none was left, and those that follow it.
        self.authenticator: Authenticator | None = None
        self.chain: AuthenticationChain | None = None
        self.position = 0

    @property
    def is_last(self) -> bool:
        """Whether no authenticator follows the one that is asked."""
        return self.chain is None or self.position == len(self.chain.authenticators)

    @property
    @abstractmethod
    def certificate(self) -> Any:
        """The client's verified certificate as from `ssl.SSLSocket.getpeercert`; None or empty if it has none."""

    @property
    def certificate_name(self) -> str | None:
        """The name in the certificate that the listener takes for the client's."""
        return None

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether the client is still connected and unanswered."""

    @abstractmethod
    def send_challenge(self, data: bytes) -> None:
        """Send Authentication Data; the client's response goes to `authenticator.continue_exchange`."""

    @abstractmethod
    def accept(self, identity: Identity) -> None:
        """The client is authenticated."""

    @abstractmethod
    def reject(self, reason_code: int, detail: str) -> None:
        """Refuse the client; ``detail`` goes to the log and into an MQTT 5 Reason String."""

    @abstractmethod
    def fail(self, reason_code: int, detail: str) -> None:
        """Refuse the client for wrong credentials, which leads to a ban if it is repeated."""

    def unavailable(self, detail: str) -> None:
        """Refuse the client because the authenticator cannot decide; no other authenticator is asked."""
        self.reject(SERVER_UNAVAILABLE, detail)

    def ignore(self) -> None:
        """Leave the decision to the next authenticator."""
        if self.chain is not None:
            self.chain.ask_next(self)


class AuthenticationPolicy:
    """Decides which clients may connect."""

    @abstractmethod
    def authenticate(self, request: AuthenticationRequest) -> None:
        """Answer the request, now or later."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Authenticator:
    """One way to authenticate clients; ``kind`` is its name in the settings and metrics.

    An authenticator that cannot decide, because of an error or a timeout, refuses the client as `unavailable`; it never
    leaves the decision to the next one. `check_credentials` is False if it decides without user name and password.
    """

    def __init__(self, kind: str, checks_credentials: bool = True) -> None:
        self.kind = kind
        self.checks_credentials = checks_credentials

    @abstractmethod
    def authenticate(self, request: AuthenticationRequest) -> None:
        """Answer the request, now or later."""

    def continue_exchange(self, request: AuthenticationRequest) -> None:
        """Take one step of an enhanced authentication that this authenticator has begun."""
        request.reject(BAD_AUTHENTICATION_METHOD, NO_METHOD)


class AnonymousPolicy(Authenticator):
    """Accepts clients everywhere (``allowed`` is True), from loopback only ("loopback"), or nowhere (False).

    User names are not checked, so all clients are anonymous.
    """

    def __init__(self, allowed: bool | str) -> None:
        super().__init__("anonymous", False)
        self.allowed = allowed
        where = 'from this machine only (allow_anonymous = "loopback")' if allowed == "loopback" else "nowhere (allow_anonymous = false)"
        self._reason = f"anonymous clients are allowed {where}"

    def authenticate(self, request: AuthenticationRequest) -> None:
        if self.allowed is True or (self.allowed == "loopback" and not request.remote and is_loopback(request.peer)):
            request.accept(Identity(None))
        else:
            request.reject(NOT_AUTHORIZED, self._reason)


class AuthenticationChain(AuthenticationPolicy):
    """Asks authenticators in their order until one accepts or refuses the client.

    If all ignore it, a client without user name and password, or with both empty, is anonymous, as with Mosquitto, and
    any other is refused. Without an authenticator that checks user names and passwords these are not looked at: every
    client is anonymous.
    """

    def __init__(self, authenticators: list[Authenticator], anonymous: AnonymousPolicy) -> None:
        self.authenticators = authenticators
        self.anonymous = anonymous
        self._checks_credentials = False
        for authenticator in authenticators:
            if authenticator.checks_credentials:
                self._checks_credentials = True

    def authenticate(self, request: AuthenticationRequest) -> None:
        request.chain = self
        self.ask_next(request)

    def ask_next(self, request: AuthenticationRequest) -> None:
        """Ask the next authenticator, or decide if there is none."""
        if request.position < len(self.authenticators):
            authenticator = self.authenticators[request.position]
            request.position += 1
            _ask(authenticator, request)
        elif request.method is not None:
            request.authenticator = None
            request.reject(BAD_AUTHENTICATION_METHOD, NO_METHOD)
        elif not self._checks_credentials or (not request.username and not request.password):
            _ask(self.anonymous, request)
        else:
            request.authenticator = None
            if request.username is None or request.password is None:
                request.reject(BAD_USER_NAME_OR_PASSWORD, WRONG_CREDENTIALS)
            else:
                request.fail(BAD_USER_NAME_OR_PASSWORD, WRONG_CREDENTIALS)


def _ask(authenticator: Authenticator, request: AuthenticationRequest) -> None:
    request.authenticator = authenticator
    try:
        authenticator.authenticate(request)
    except Exception:
        log.exception("event=authentication_failed authenticator=%s client=%s", authenticator.kind, request.client_id)
        request.unavailable("the authenticator failed")


def is_loopback(peer: str) -> bool:
    """Whether an address and port, or the name of a Unix socket, is of this machine."""
    host = peer.rpartition(":")[0]
    if host.startswith("127.") or host == "::1":  # the usual case; `ipaddress` takes a quarter of a CONNECT's time
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True  # a Unix socket has no address
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


# --- authorization ----------------------------------------------------------


class Authorizer:
    """Decides which topics clients may publish to and read.

    ``username`` is the authenticated one, None for an anonymous client. ``restrictive`` is False if every answer is
    yes; it never changes. The answers may change, and then `Broker.rules_changed` is called.
    """

    def __init__(self, restrictive: bool) -> None:
        self.restrictive = restrictive

    @abstractmethod
    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        """Whether the client may publish to the topic."""

    @abstractmethod
    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        """Whether a SUBSCRIBE to the filter succeeds; `may_read` decides on each topic."""

    @abstractmethod
    def may_read(self, client_id: str, username: str | None, topic: str) -> bool:
        """Whether the client may receive messages of the topic."""

    def may_read_all(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        """Whether the client may receive messages of every topic that matches the filter; False if that is unknown."""
        return False

    def may_read_some(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        """Whether the client may receive messages of a topic that matches the filter; True if that is unknown."""
        return True

    def denies(self, client_id: str, username: str | None, topic: str) -> bool:
        """Whether a rule says that the client may not read the topic; False if it is only not allowed."""
        return False


class AllowAll(Authorizer):
    def __init__(self) -> None:
        super().__init__(False)

    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        return True

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return True

    def may_read(self, client_id: str, username: str | None, topic: str) -> bool:
        return True

    def may_read_all(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return True


class DenyAll(Authorizer):
    def __init__(self) -> None:
        super().__init__(True)

    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        return False

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return False

    def may_read(self, client_id: str, username: str | None, topic: str) -> bool:
        return False

    def may_read_all(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return False

    def may_read_some(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return False


_DENY_ALL: Final = DenyAll()


# Decisions of permissions.
DENIED: Final = 0
ALLOWED: Final = 1
UNDECIDED: Final = 2


class Permissions:
    """The permissions that a login brings: they decide before the rules of the listener.

    ``text`` is the form in the store, and the same for equal permissions. The answers are ALLOWED, DENIED, and
    UNDECIDED = the rules of the listener decide; without such rules it is denied.
    """

    def __init__(self, text: str, size: int) -> None:
        self.text = text
        self.size = size  # of all in memory, in bytes

    @abstractmethod
    def may_publish(self, client_id: str, username: str | None, topic: str) -> int:
        """Whether the client may publish to the topic."""

    @abstractmethod
    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> int:
        """Whether a SUBSCRIBE to the filter succeeds; `may_read` decides on each topic."""

    @abstractmethod
    def may_read(self, client_id: str, username: str | None, topic: str) -> int:
        """Whether the client may receive messages of the topic."""

    @abstractmethod
    def may_read_some(self, client_id: str, username: str | None, topic_filter: str) -> int:
        """Whether the client may receive messages of a topic that matches the filter."""


class Rules:
    """The authorizers: ``common`` for listeners without rules of their own, and others by the name of the rules.

    A session has the rules of the listener through which its client connected last; their name is stored with it, None
    for the common ones. If no listener has rules of that name any more, everything is denied until the client connects
    again. The permissions of a session decide before them; ``with_permissions`` says that sessions may have some.
    """

    def __init__(self, common: Authorizer, by_name: dict[str, Authorizer], with_permissions: bool = False) -> None:
        self.common = common
        self.by_name = by_name
        # False if every session may do everything.
        self.restrictive = common.restrictive or with_permissions
        for authorizer in by_name.values():
            if authorizer.restrictive:
                self.restrictive = True

    def of(self, name: str | None) -> Authorizer:
        return self.common if name is None else self.by_name.get(name, _DENY_ALL)

    def restricts(self, session: Session) -> bool:
        """Whether there may be something that the session's client may not do."""
        return session.permissions is not None or self.of(session.rules).restrictive

    def may_read(self, session: Session, topic: str) -> bool:
        """Whether the session's client may receive messages of the topic."""
        authorizer = self.of(session.rules)
        if session.permissions is not None:
            decision = cast(Permissions, session.permissions).may_read(session.client_id, session.username, topic)
            if decision != UNDECIDED or not authorizer.restrictive:
                return decision == ALLOWED
        return authorizer.may_read(session.client_id, session.username, topic)

    def may_publish(self, session: Session, topic: str) -> bool:
        """Whether the session's client may publish to the topic.

        Of a topic ``$queue/NAME/TOPIC``, the rules for this topic, for ``$queue/NAME`` and for TOPIC may permit it.
        """
        if not topic.startswith("$queue/"):
            return self._may_publish(session, topic)
        parts = topic.split("/", 2)
        queue = f"$queue/{parts[1]}"
        if self.denies(session, queue) or self.denies(session, topic):
            return False
        if self._may_publish(session, queue) or self._may_publish(session, topic):
            return True
        return len(parts) > 2 and self._may_publish(session, parts[2])

    def _may_publish(self, session: Session, topic: str) -> bool:
        authorizer = self.of(session.rules)
        if session.permissions is not None:
            decision = cast(Permissions, session.permissions).may_publish(session.client_id, session.username, topic)
            if decision != UNDECIDED or not authorizer.restrictive:
                return decision == ALLOWED
        return authorizer.may_publish(session.client_id, session.username, topic)

    def may_subscribe(self, session: Session, topic_filter: str) -> bool:
        """Whether a SUBSCRIBE of the session's client to the filter succeeds."""
        authorizer = self.of(session.rules)
        if session.permissions is not None:
            permissions = cast(Permissions, session.permissions)
            decision = permissions.may_subscribe(session.client_id, session.username, topic_filter)
            if decision != UNDECIDED or not authorizer.restrictive:
                return decision == ALLOWED
        return authorizer.may_subscribe(session.client_id, session.username, topic_filter)

    def may_read_some(self, session: Session, topic_filter: str) -> bool:
        """Whether the session's client may receive messages of a topic that matches the filter; True if unknown."""
        authorizer = self.of(session.rules)
        if session.permissions is not None:
            permissions = cast(Permissions, session.permissions)
            decision = permissions.may_read_some(session.client_id, session.username, topic_filter)
            if decision != UNDECIDED or not authorizer.restrictive:
                return decision == ALLOWED
        return authorizer.may_read_some(session.client_id, session.username, topic_filter)

    def denies(self, session: Session, topic: str) -> bool:
        """Whether a rule of the listener says that the session's client may not read the topic."""
        return self.of(session.rules).denies(session.client_id, session.username, topic)
