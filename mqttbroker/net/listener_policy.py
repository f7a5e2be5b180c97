"""The policy of a listener: its authentication, its terms and its connection limit."""

from __future__ import annotations

from typing import Any, Callable, Optional, cast

from mqttbroker.codec.reason_codes import CONNECTION_RATE_EXCEEDED, NOT_AUTHORIZED, QUOTA_EXCEEDED, SERVER_BUSY
from mqttbroker.core.connect_handler import ConnectAuthentication
from mqttbroker.core.policy import AuthenticationPolicy, AuthenticationRequest
from mqttbroker.core.terms import ListenerTerms
from mqttbroker.net.abuse_limits import AddressLimits


class ListenerPolicy:
    """The policy for clients of one listener; ``max_connections`` None = only the broker's limit."""

    def __init__(
        self,
        policy: AuthenticationPolicy,
        terms: ListenerTerms,
        max_connections: Optional[int],
    ) -> None:
        self.policy = policy
        self.terms = terms
        self.max_connections = max_connections
        # Given the transport at a CONNECT: why its certificate is refused now, None if it is not.
        self.refuses_certificate: Optional[Callable[[Any], Optional[str]]] = None
        self.clients = 0  # open connections that sent CONNECT
        self.addresses = AddressLimits()

    def check_address(self, peer: str, now: float) -> int:
        """Count a connect of this peer; returns 0 or the reason code with which it is refused."""
        terms = self.terms
        rate = terms.max_connect_rate_per_address
        maximum = terms.max_connections_per_address
        if rate == 0 and maximum == 0:
            return 0
        address = terms.networks.of(peer)
        if address == "":
            return 0
        if rate and not self.addresses.connect(address, rate, now):
            return CONNECTION_RATE_EXCEEDED
        if maximum and self.addresses.is_full(address, maximum):
            return QUOTA_EXCEEDED
        return 0

    def count_address(self, peer: str) -> str:
        """Count an open connection, if they are limited; returns the address to forget when it is closed, or ""."""
        if self.terms.max_connections_per_address == 0:
            return ""
        address = self.terms.networks.of(peer)
        if address:
            self.addresses.add(address)
        return address

    def forget_address(self, address: str) -> None:
        self.addresses.remove(address)


def refusal_text(reason_code: int) -> str:
    """Why `ListenerPolicy.check_address` refuses a client."""
    if reason_code == CONNECTION_RATE_EXCEEDED:
        return "too many connects of this address"
    return "too many connections of this address"


class PolicyByListener(AuthenticationPolicy):
    """Applies the policy of the client's listener; ``policy`` applies to a connection without a socket."""

    def __init__(self, policy: AuthenticationPolicy) -> None:
        self.policy = policy

    def authenticate(self, request: AuthenticationRequest) -> None:
        connection = cast(ConnectAuthentication, request).pending.connection
        wire = connection.wire
        if wire is None:
            self.policy.authenticate(request)
            return
        request.remote = wire.remote
        if wire.refusal:
            request.reject(wire.refusal, refusal_text(wire.refusal))
            return
        listener_policy: ListenerPolicy = wire.listener_policy
        limit = listener_policy.max_connections
        if limit is not None and listener_policy.clients >= limit:
            request.reject(SERVER_BUSY, "too many connections on this listener")
            return
        if listener_policy.refuses_certificate is not None:
            reason = listener_policy.refuses_certificate(wire.transport)
            if reason is not None:
                request.reject(NOT_AUTHORIZED, reason)
                return
        listener_policy.clients += 1
        wire.counted = True
        listener_policy.policy.authenticate(request)
