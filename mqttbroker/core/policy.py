"""Policies: which clients may connect, and what they may publish and read."""

from __future__ import annotations

import ipaddress
from abc import abstractmethod
from typing import Any, Dict, Final, Optional, Union

from mqttbroker.codec.reason_codes import BAD_AUTHENTICATION_METHOD, BAD_USER_NAME_OR_PASSWORD, NOT_AUTHORIZED
from sessions.session import Session

# The same for an unknown user and a wrong password, so that a client cannot tell them apart.
WRONG_CREDENTIALS: Final = "wrong user name or password"

TOO_MANY_FAILURES: Final = "too many failed logins"


# --- authentication ---------------------------------------------------------


class AuthenticationRequest:
    """A client that asks to be authenticated.

    It is answered by one call of `accept` or `reject`, now or later, on the event loop's thread.
    """

    def __init__(
        self, client_id: str, peer: str, username: Optional[str], password: Optional[bytes]
    ) -> None:
        self.client_id = client_id
        self.peer = peer  # its address
        self.remote = False  # it never counts as loopback, whatever the address
        self.username = username
        self.password = password
        # Enhanced authentication (section 4.12): the method, None without it; the last Authentication Data from the
        # client and to it; the authenticator, and the state of the method.
        self.method: Optional[str] = None
        self.client_data: Optional[bytes] = None
        self.server_data: Optional[bytes] = None
        self.authenticator: Any = None
        self.exchange: Any = None

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether the client is still connected and unanswered."""

    @abstractmethod
    def send_challenge(self, data: bytes) -> None:
        """Send Authentication Data; the client's response goes to `authenticator.continue_exchange`."""

    @abstractmethod
    def accept(self) -> None:
        """The client is authenticated as ``username``; None = anonymous."""

    @abstractmethod
    def reject(self, reason_code: int, detail: str) -> None:
        """Refuse the client; ``detail`` goes to the log and into an MQTT 5 Reason String."""


class AuthenticationPolicy:
    """Decides which clients may connect."""

    @abstractmethod
    def authenticate(self, request: AuthenticationRequest) -> None:
        """Answer the request, now or later."""


class AnonymousPolicy(AuthenticationPolicy):
    """Accepts clients everywhere (``allowed`` is True), from loopback only ("loopback"), or nowhere (False).

    User names are not checked, so all clients are anonymous.
    """

    def __init__(self, allowed: Union[bool, str]) -> None:
        self.allowed = allowed

    def authenticate(self, request: AuthenticationRequest) -> None:
        if request.method is not None:
            request.reject(BAD_AUTHENTICATION_METHOD, "no enhanced authentication without a password file")
        elif self.allowed is True or (
            self.allowed == "loopback" and not request.remote and is_loopback(request.peer)
        ):
            request.username = None
            request.accept()
        else:
            request.reject(NOT_AUTHORIZED, "anonymous clients are not allowed")


class PasswordPolicy(AuthenticationPolicy):
    """Has user names and passwords checked; a client without both is anonymous.

    ``authenticator`` has ``submit(request)``, which answers later, and ``continue_exchange(request)``, one step of an
    enhanced authentication.
    """

    def __init__(self, anonymous: AnonymousPolicy, authenticator: Any) -> None:
        self.anonymous = anonymous
        self.authenticator = authenticator

    def authenticate(self, request: AuthenticationRequest) -> None:
        if request.method is not None:
            request.authenticator = self.authenticator
            self.authenticator.continue_exchange(request)
        elif request.username is None and request.password is None:
            self.anonymous.authenticate(request)
        elif request.username is None or request.password is None:
            request.reject(BAD_USER_NAME_OR_PASSWORD, WRONG_CREDENTIALS)
        else:
            self.authenticator.submit(request)


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
    """Decides what clients may publish and read.

    ``username`` is the authenticated one, None for an anonymous client. ``restrictive`` is False if every answer is
    yes; it never changes. The answers may change, and then `Broker.rules_changed` is called.
    """

    def __init__(self, restrictive: bool) -> None:
        self.restrictive = restrictive

    @abstractmethod
    def may_publish(self, client_id: str, username: Optional[str], topic: str) -> bool:
        """Whether the client may publish to the topic."""

    @abstractmethod
    def may_subscribe(self, client_id: str, username: Optional[str], topic_filter: str) -> bool:
        """Whether a SUBSCRIBE to the filter succeeds; `may_read` decides on each topic."""

    @abstractmethod
    def may_read(self, client_id: str, username: Optional[str], topic: str) -> bool:
        """Whether the client may receive messages of the topic."""


class AllowAll(Authorizer):
    def __init__(self) -> None:
        super().__init__(False)

    def may_publish(self, client_id: str, username: Optional[str], topic: str) -> bool:
        return True

    def may_subscribe(self, client_id: str, username: Optional[str], topic_filter: str) -> bool:
        return True

    def may_read(self, client_id: str, username: Optional[str], topic: str) -> bool:
        return True


class DenyAll(Authorizer):
    def __init__(self) -> None:
        super().__init__(True)

    def may_publish(self, client_id: str, username: Optional[str], topic: str) -> bool:
        return False

    def may_subscribe(self, client_id: str, username: Optional[str], topic_filter: str) -> bool:
        return False

    def may_read(self, client_id: str, username: Optional[str], topic: str) -> bool:
        return False


_DENY_ALL: Final = DenyAll()


class Rules:
    """The authorizers: ``common`` for listeners without rules of their own, and others by the name of the rules.

    A session has the rules of the listener through which its client connected last; their name is stored with it, None
    for the common ones. If no listener has rules of that name any more, everything is denied until the client connects
    again.
    """

    def __init__(self, common: Authorizer, by_name: Dict[str, Authorizer]) -> None:
        self.common = common
        self.by_name = by_name
        self.restrictive = common.restrictive  # False if all authorizers allow everything
        for authorizer in by_name.values():
            if authorizer.restrictive:
                self.restrictive = True

    def of(self, name: Optional[str]) -> Authorizer:
        return self.common if name is None else self.by_name.get(name, _DENY_ALL)

    def may_read(self, session: Session, topic: str) -> bool:
        """Whether the session's client may receive messages of the topic."""
        return self.of(session.rules).may_read(session.client_id, session.username, topic)
