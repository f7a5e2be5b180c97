"""Policy: who may do what, and how much of it.

The rule kept here: a decision is made from what the client said and what the
operator set, once per client and topic, never per message; whatever is refused
is refused with the reason code the standard names.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Dict, Final, List, Optional, Union

from mqttbroker.codec.reason_codes import (
    BAD_AUTHENTICATION_METHOD,
    BAD_USER_NAME_OR_PASSWORD,
    NOT_AUTHORIZED,
    SERVER_MOVED,
    USE_ANOTHER_SERVER,
)
from sessions.session import Session

# The same whether or not there is such a user.
WRONG_CREDENTIALS: Final = "wrong user name or password"


class Redirect:
    """Where clients go instead; ``rate`` is how many connected ones are sent there each second."""

    def __init__(self, server_reference: str, permanent: bool, rate: int) -> None:
        self.server_reference = server_reference
        self.reason_code = SERVER_MOVED if permanent else USE_ANOTHER_SERVER
        self.rate = rate


class Terms:
    """What is granted and allowed to the clients of one listener; times in seconds, sizes in bytes.

    ``rules`` is the name of those that judge them, see `Rules`.
    """

    def __init__(self) -> None:
        self.rules: Optional[str] = None
        self.receive_maximum = 1000
        self.maximum_packet_size = 10 * 1024 * 1024
        self.topic_alias_maximum = 10
        self.max_keep_alive = 65535
        self.max_session_expiry = 0xFFFFFFFF
        self.max_connect_size = 256 * 1024
        self.max_connections = 100_000
        self.max_sessions = 1_000_000
        self.max_retained_messages = 1_000_000
        self.max_retained_bytes = 1024 * 1024 * 1024
        self.connect_timeout = 10.0
        self.max_topic_length = 65535
        self.max_topic_levels = 128
        self.max_subscriptions_per_client = 100_000
        self.retain_available = True
        self.durability = "commit"
        self.max_pending_write_bytes = 64 * 1024 * 1024
        # What a 5.0 client is told when rules deny a SUBSCRIBE or a PUBLISH (sections 3.9.3 and 3.4.2.1).
        self.denial = NOT_AUTHORIZED
        # A topic name for replies, in which the levels %c and %u stand for the client's names.
        self.response_information = ""
        self.redirect: Optional[Redirect] = None

    def server_reference(self, reason_code: int) -> Optional[str]:
        """Where a client is to go that is refused or disconnected with this code."""
        redirect = self.redirect
        if redirect is None or redirect.reason_code != reason_code:
            return None
        return redirect.server_reference

    def reply_root(self, client_id: str, username: Optional[str]) -> Optional[str]:
        """The response information for a client; None if there is none for one with these names."""
        levels: List[str] = []
        for level in self.response_information.split("/"):
            if level == "%c" or level == "%u":
                level = client_id if level == "%c" else username or ""
                if not level or "/" in level or "+" in level or "#" in level:
                    return None
            levels.append(level)
        root = "/".join(levels)
        return root if 0 < len(root.encode("utf-8")) <= self.max_topic_length else None


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
