"""Bans for operators."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from mqttbroker.admin.control.sessions import disconnect_by_operator
from mqttbroker.admin.control.slices import SLICE, ControlError, Cursors, Slices, check_limit
from mqttbroker.admin.control.views import BanPage, BanView
from mqttbroker.core.access.ban_list import FOREVER, Ban, BanList, Key
from mqttbroker.core.access.bans import Bans
from mqttbroker.core.client.connection import AWAIT_CONNECT
from mqttbroker.core.sessions.clients import Clients
from mqttbroker.core.terms.networks import network_text

MAX_BAN = 100 * 365 * 86_400  # seconds


class BanControl:
    """The bans of one broker. ``monotonic`` is the clock of `Bans`."""

    def __init__(self, bans: Bans, clients: Clients, monotonic: Callable[[], float]) -> None:
        self._bans = bans
        self._clients = clients
        self._monotonic = monotonic
        self._cursors: Cursors[list[Ban]] = Cursors()

    def open(self) -> int:
        """A cursor for the bans in force."""
        return self._cursors.open(self._bans.banned(self._monotonic()))

    def page(self, cursor: int, limit: int = 100) -> BanPage:
        """The next ``limit`` bans of a cursor; those that have ended since it was opened are left out."""
        check_limit(limit)
        listing = self._cursors.take(cursor)
        now = self._monotonic()
        found: list[BanView] = []
        while listing and len(found) < limit:
            ban = listing.pop()
            if self._bans.in_force(ban, now):
                left = None if ban.until == FOREVER else ban.until - now
                found.append(BanView(*ban.key, ban.cause, ban.reason, ban.number, left))
        return BanPage(tuple(found), self._cursors.open(listing) if listing else 0)

    def ban(
        self,
        address: str = "",
        username: str = "",
        client_id: str = "",
        seconds: float | None = None,
        reason: str = "",
    ) -> Slices[int]:
        """Ban the clients to which all of address or network, user name and client id apply that are not "".

        Those that are connected are disconnected with reason code 0x98; returns how many. The ban ends after
        ``seconds``; None = when it is lifted. It replaces the operator's ban of the same clients.
        """
        key = _ban_key(address, username, client_id)
        if seconds is not None and not 0 < seconds <= MAX_BAN:
            raise ControlError(f"a ban lasts up to {MAX_BAN} seconds, or until it is lifted")
        ban = self._bans.ban(key, FOREVER if seconds is None else seconds, reason, self._monotonic())
        if ban is None:
            raise ControlError(f"too many bans: bans.max_entries is {self._bans.terms.max_entries}")
        only = BanList(1)
        only.add(ban)
        connections = list(self._clients.connections)
        found = 0
        for start in range(0, len(connections), SLICE):
            if start:
                yield 0.0
            for connection in connections[start : start + SLICE]:
                if connection.closed or connection.state == AWAIT_CONNECT:
                    continue
                if only.find(connection.peer, connection.username, connection.client_id) is not None:
                    found += 1
                    disconnect_by_operator(self._clients, connection, "banned by an operator")
        return found

    def lift(self, address: str = "", username: str = "", client_id: str = "") -> bool:
        """End the bans of exactly these clients, for any cause, and forget their offences. False if there is none.

        The values are those of `BanView`, or of `ban`.
        """
        return self._bans.lift(*_ban_key(address, username, client_id))


def _ban_key(address: str, username: str, client_id: str) -> Key:
    if not (address or username or client_id):
        raise ControlError("a ban needs an address, a user name or a client id")
    if not address:
        return "", username, client_id
    try:
        network = ipaddress.ip_network(address)
    except ValueError as error:
        raise ControlError(f"not an address or network: {error}") from None
    return network_text(network.network_address, network.prefixlen), username, client_id
