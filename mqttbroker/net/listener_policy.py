"""The policy of a listener: its authentication, its terms, and the limits of its connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from mqttbroker.codec.reason_codes import CONNECTION_RATE_EXCEEDED, NOT_AUTHORIZED, QUOTA_EXCEEDED, SERVER_BUSY, MQTTError
from mqttbroker.core.access.policy import AuthenticationPolicy
from mqttbroker.core.terms.rates import Rate
from mqttbroker.core.terms.terms import ListenerTerms
from mqttbroker.net.abuse_limits import AddressLimits, HalfOpen
from sessions.counters import Counters


class ListenerPolicy:
    """The policy for clients of one listener.

    ``max_connections`` None and ``max_half_open`` 0 = only the broker's limits.
    """

    def __init__(
        self,
        policy: AuthenticationPolicy,
        terms: ListenerTerms,
        max_connections: int | None,
        counters: Counters,
        max_half_open: int = 0,
    ) -> None:
        self.policy = policy
        self.terms = terms
        self.max_connections = max_connections
        self.max_half_open = max_half_open
        self.counters = counters
        counters.drops_of(terms.listener)  # a counter that begins at 0 has a rate from its first drop on
        # Given the transport at a CONNECT: why its certificate is refused now, None if it is not.
        self.refuses_certificate: Callable[[Any], str | None] | None = None
        self.clients = 0  # open connections that sent CONNECT
        self.addresses = AddressLimits()
        self.half_open = HalfOpen(counters)
        self.received = Rate("max_publish_rate_per_listener", "max_receive_rate_per_listener")
        self.sent = Rate("max_delivery_rate_per_listener", "max_send_rate_per_listener")
        self.terms_changed()

    def terms_changed(self) -> None:
        """The terms were replaced."""
        terms = self.terms
        self.received.limit(terms.max_publish_rate_per_listener, terms.max_receive_rate_per_listener)
        self.sent.limit(terms.max_delivery_rate_per_listener, terms.max_send_rate_per_listener)

    def check_address(self, peer: str, now: float) -> str:
        """Count a connect of this peer; returns "" or the name of the limit because of which it is refused."""
        terms = self.terms
        listener_rate = terms.max_connect_rate
        rate = terms.max_connect_rate_per_address
        maximum = terms.max_connections_per_address
        if rate == 0 and maximum == 0 and listener_rate == 0:
            return ""
        addresses = self.addresses
        address = terms.networks.of(peer) if rate or maximum else ""
        limit = ""
        if rate and address and not addresses.rates.connect(address, rate, now):
            limit = "max_connect_rate_per_address"
        elif maximum and address and addresses.is_full(address, maximum):
            limit = "max_connections_per_address"
        elif listener_rate and not addresses.rates.connect("", listener_rate, now):
            limit = "max_connect_rate"
        if limit:
            self.counters.limit_reached(limit)
        return limit

    def count_address(self, peer: str) -> str:
        """Count an open connection, if they are limited; returns the address to forget when it is closed, or ""."""
        if self.terms.max_connections_per_address == 0:
            return ""
        address = self.terms.networks.of(peer)
        if address:
            self.addresses.add(address)
        return address

    def admit(self, transport: Any) -> AuthenticationPolicy:
        """Count a client that sent CONNECT; returns the policy that authenticates it. Raises MQTTError if it is refused."""
        limit = self.max_connections
        if limit is not None and self.clients >= limit:
            self.counters.limit_reached("max_connections")
            raise MQTTError(SERVER_BUSY, "too many connections on this listener")
        if self.refuses_certificate is not None:
            reason = self.refuses_certificate(transport)
            if reason is not None:
                raise MQTTError(NOT_AUTHORIZED, reason)
        self.clients += 1
        return self.policy

    def limit_half_open(self, member: Any, peer: str) -> bool:
        """Count a connection without a CONNECT, if they are limited; then `HalfOpen.remove` follows."""
        per_address = self.terms.max_half_open_per_address
        if self.max_half_open == 0 and per_address == 0:
            return False
        self.half_open.add(member, self.terms.networks.of(peer) if per_address else "", self.max_half_open, per_address)
        return True

    def forget_address(self, address: str) -> None:
        self.addresses.remove(address)


# The reason for which a client is refused, by limit.
REFUSALS: Final[dict[str, tuple[int, str]]] = {
    "max_connect_rate": (CONNECTION_RATE_EXCEEDED, "too many connects"),
    "max_connect_rate_per_address": (CONNECTION_RATE_EXCEEDED, "too many connects of this address"),
    "max_connections_per_address": (QUOTA_EXCEEDED, "too many connections of this address"),
}
