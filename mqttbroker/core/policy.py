"""Policy: who may do what, and how much of it.

The rule kept here: a decision is made from what the client said and what the
operator set, once per client and topic, never per message; whatever is refused
is refused with the reason code the standard names.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Dict, Final, Optional, Union

from mqttbroker.codec.reason_codes import (
    BAD_AUTHENTICATION_METHOD,
    BAD_USER_NAME_OR_PASSWORD,
    NOT_AUTHORIZED,
)
from sessions.session import Session

# The same whether or not there is such a user.
WRONG_CREDENTIALS: Final = "wrong user name or password"


class Challenge:
    """A client that asks to be let in.  One of the two answers is given, now or later,
    on the thread of the broker."""

    def __init__(
        self, client_id: str, peer: str, username: Optional[str], password: Optional[bytes]
    ) -> None:
        self.client_id = client_id
        self.peer = peer
        self.username = username
        self.password = password
        # Of enhanced authentication (section 4.12): the method if the client asked for one, what it
        # sent last, what it is sent last, and what belongs to the method.
        self.method: Optional[str] = None
        self.data: Optional[bytes] = None
        self.answer: Optional[bytes] = None
        self.authenticator: Any = None
        self.exchange: Any = None

    @property
    def waiting(self) -> bool:
        """Whether the client is still there to hear the answer."""
        return True

    def ask(self, data: bytes) -> None:
        """Send the client this; its answer comes as ``data`` to ``authenticator.converse``."""

    def accept(self) -> None:
        """The client is who ``username`` says; None is anybody."""

    def reject(self, reason_code: int, detail: str) -> None:
        """The client is not let in; ``detail`` is for logs and a v5 reason string."""


class Policy:
    """Who is let in.  This one takes everybody for nobody in particular."""

    def authenticate(self, challenge: Challenge) -> None:
        challenge.username = None
        challenge.accept()


class AnonymousPolicy(Policy):
    """Lets anonymous clients in, everywhere or on loopback only.

    No name is checked, so none counts: everybody is anonymous.
    """

    def __init__(self, allowed: Union[bool, str]) -> None:
        self.allowed = allowed

    def authenticate(self, challenge: Challenge) -> None:
        if challenge.method is not None:
            challenge.reject(BAD_AUTHENTICATION_METHOD, "no enhanced authentication without a password file")
        elif self.allowed is True or (self.allowed == "loopback" and _is_loopback(challenge.peer)):
            challenge.username = None
            challenge.accept()
        else:
            challenge.reject(NOT_AUTHORIZED, "anonymous clients are not allowed")


class PasswordPolicy(Policy):
    """Has user names and passwords checked; who brings neither is anonymous.

    ``authenticator`` has a method ``submit(challenge)``, which answers later, and
    ``converse(challenge)``, which takes one step of an enhanced authentication.
    """

    def __init__(self, anonymous: AnonymousPolicy, authenticator: Any) -> None:
        self.anonymous = anonymous
        self.authenticator = authenticator

    def authenticate(self, challenge: Challenge) -> None:
        if challenge.method is not None:
            challenge.authenticator = self.authenticator
            self.authenticator.converse(challenge)
        elif challenge.username is None and challenge.password is None:
            self.anonymous.authenticate(challenge)
        elif challenge.username is None or challenge.password is None:
            challenge.reject(BAD_USER_NAME_OR_PASSWORD, WRONG_CREDENTIALS)
        else:
            self.authenticator.submit(challenge)


class Authorizer:
    """Who may publish and read what; this one lets everybody do everything.

    ``username`` is the one the client was let in with, None if it is anonymous.
    ``restrictive`` tells whether the answer is ever no; it never changes, the
    answers may, and then `Broker.rules_changed` is called.
    """

    restrictive = False

    def may_publish(self, client_id: str, username: Optional[str], topic: str) -> bool:
        return True

    def may_subscribe(self, client_id: str, username: Optional[str], topic_filter: str) -> bool:
        return True

    def may_read(self, client_id: str, username: Optional[str], topic: str) -> bool:
        """Whether a message of that topic may be delivered to the client."""
        return True


class Nothing(Authorizer):
    """Lets nobody do anything."""

    def __init__(self) -> None:
        self.restrictive = True

    def may_publish(self, client_id: str, username: Optional[str], topic: str) -> bool:
        return False

    def may_subscribe(self, client_id: str, username: Optional[str], topic_filter: str) -> bool:
        return False

    def may_read(self, client_id: str, username: Optional[str], topic: str) -> bool:
        return False


_NOTHING: Final = Nothing()


class Rules:
    """Who judges whom: what holds for all, and by name what listeners have of their own.

    A session is under the rules of the listener its client came by last; None names those
    for all. Where a session is under rules that no listener has any more, nothing is allowed
    until its client comes again.
    """

    def __init__(self, common: Authorizer, own: Dict[str, Authorizer]) -> None:
        self.common = common
        self.own = own
        self.restrictive = common.restrictive  # whether anybody is ever told no
        for authorizer in own.values():
            if authorizer.restrictive:
                self.restrictive = True

    def of(self, name: Optional[str]) -> Authorizer:
        return self.common if name is None else self.own.get(name, _NOTHING)

    def may_read(self, session: Session, topic: str) -> bool:
        """Whether a message of that topic may be delivered to the session's client."""
        return self.of(session.rules).may_read(session.client_id, session.username, topic)


def _is_loopback(peer: str) -> bool:
    host = peer.rpartition(":")[0]
    if host.startswith("127.") or host == "::1":  # most are; the module below takes a quarter of a CONNECT
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True  # a Unix socket has no address
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
