"""Redirection of connected clients to another server (section 4.11)."""

from __future__ import annotations

from mqttbroker.core.client.connection import CONNECTED, Connection
from mqttbroker.core.terms.terms import BrokerTerms


class Redirector:
    """Disconnects clients at the configured rate, with the other server's address, while a redirect is configured."""

    def __init__(self, terms: BrokerTerms) -> None:
        self.terms = terms
        self._last_tick = 0.0  # monotonic seconds
        self._allowed = 0.0  # clients that may be disconnected now; at most those of one second

    def tick(self, connections: dict[Connection, bool], monotonic: float) -> None:
        elapsed = monotonic - self._last_tick
        self._last_tick = monotonic
        redirect = self.terms.redirect
        if redirect is None:
            self._allowed = 0.0
            return
        self._allowed = min(self._allowed + elapsed * redirect.rate, redirect.rate)
        leaving: list[Connection] = []
        for connection in connections:
            if self._allowed < 1.0:
                break
            if connection.state == CONNECTED and not connection.terms.of_bridges:
                self._allowed -= 1.0
                leaving.append(connection)
        for connection in leaving:
            connection.disconnect(redirect.reason_code, "clients go to another server")
