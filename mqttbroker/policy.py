"""Policy: who may do what, and how much of it.

The rule kept here: a decision is made from what the client said and what the
operator set, once per client and topic, never per message; whatever is refused
is refused with the reason code the standard names.
"""

from __future__ import annotations

import ipaddress
from typing import Optional, Union

from mqttbroker.reason_codes import NOT_AUTHORIZED


class Terms:
    """What the broker grants and allows; times in seconds, sizes in bytes."""

    def __init__(self) -> None:
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
        self.max_pending_write_bytes = 64 * 1024 * 1024


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

    def accept(self) -> None:
        """The client is who it says."""

    def reject(self, reason_code: int, detail: str) -> None:
        """The client is not let in; ``detail`` is for logs and a v5 reason string."""


class Policy:
    """This one lets everybody do everything; others override what they judge.

    ``restrictive`` tells whether `may_publish` ever says no.
    """

    restrictive = False

    def authenticate(self, challenge: Challenge) -> None:
        challenge.accept()

    def may_publish(self, client_id: str, topic: str) -> bool:
        return True

    def may_subscribe(self, client_id: str, topic_filter: str) -> bool:
        return True


class AnonymousPolicy(Policy):
    """Lets anonymous clients in, everywhere or on loopback only."""

    def __init__(self, allowed: Union[bool, str]) -> None:
        self.allowed = allowed

    def authenticate(self, challenge: Challenge) -> None:
        if self.allowed is True or (self.allowed == "loopback" and _is_loopback(challenge.peer)):
            challenge.accept()
        else:
            challenge.reject(NOT_AUTHORIZED, "anonymous clients are not allowed")


def _is_loopback(peer: str) -> bool:
    host = peer.rpartition(":")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True  # a Unix socket has no address
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
