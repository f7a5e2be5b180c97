"""Entrances: what each listener grants to those who come in by it.

The rule kept here: a client is judged by the listener it came through, before
it is given a session; what that listener does not say for itself is what holds
for all.
"""

from __future__ import annotations

from typing import Any, Optional, cast

from mqttbroker.codec.reason_codes import BAD_USER_NAME_OR_PASSWORD, SERVER_BUSY
from mqttbroker.core.connect_handler import ConnectChallenge
from mqttbroker.core.policy import Challenge, Policy
from mqttbroker.core.terms import ListenerTerms


class ListenerPolicy:
    """One listener as policy sees it."""

    def __init__(
        self,
        policy: Policy,
        terms: ListenerTerms,
        max_connections: Optional[int],
        use_identity_as_username: bool,
    ) -> None:
        self.policy = policy
        self.terms = terms
        self.max_connections = max_connections
        self.use_identity_as_username = use_identity_as_username
        self.clients = 0  # connections that sent CONNECT and are still open


class Doorkeeper(Policy):
    """Asks the policy of the entrance who may come in, ``policy`` where there is none."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def authenticate(self, challenge: Challenge) -> None:
        connection = cast(ConnectChallenge, challenge).pending.connection
        wire = connection.wire
        if wire is None:
            self.policy.authenticate(challenge)
            return
        listener_policy: ListenerPolicy = wire.listener_policy
        limit = listener_policy.max_connections
        if limit is not None and listener_policy.clients >= limit:
            challenge.reject(SERVER_BUSY, "too many connections on this listener")
            return
        listener_policy.clients += 1
        wire.counted = True
        if listener_policy.use_identity_as_username and challenge.method is None:
            certificate = wire.transport.get_extra_info("peercert")
            if certificate:
                identity = common_name(certificate)
                if identity is None:
                    challenge.reject(BAD_USER_NAME_OR_PASSWORD, "certificate without a common name")
                    return
                challenge.username = identity
                challenge.accept()
                return
        listener_policy.policy.authenticate(challenge)


def common_name(certificate: Any) -> Optional[str]:
    """The subject's common name in what `ssl.SSLSocket.getpeercert` gives; the last if there are several."""
    found: Optional[str] = None
    for relative_name in certificate.get("subject", ()):
        for key, value in relative_name:
            if key == "commonName" and value:
                found = value
    return found
