"""The connections of one listener by address: how many are open, and how many have sent no CONNECT."""

from __future__ import annotations

from typing import Any

from mqttbroker.core.terms.rates import ConnectRates
from sessions.counters import Counters


class AddressLimits:
    """Connections and connects by address; "" = of the whole listener."""

    def __init__(self) -> None:
        self.rates = ConnectRates()
        self.connections: dict[str, int] = {}

    def is_full(self, address: str, maximum: int) -> bool:
        return self.connections.get(address, 0) >= maximum

    def add(self, address: str) -> None:
        self.connections[address] = self.connections.get(address, 0) + 1

    def remove(self, address: str) -> None:
        left = self.connections[address] - 1
        if left:
            self.connections[address] = left
        else:
            del self.connections[address]


class HalfOpen:
    """Connections of one listener that have sent no CONNECT. Beyond a maximum the oldest is closed for a new one.

    A member is an object whose ``abort`` closes its socket at once.
    """

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._all: dict[Any, str] = {}  # addresses by member, oldest first
        self._by_address: dict[str, dict[Any, bool]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, member: Any, address: str, maximum: int, maximum_per_address: int) -> None:
        """Count a connection; a maximum of 0 is none, and an ``address`` of "" is not counted by itself."""
        of_address = self._by_address.get(address)
        if maximum_per_address and of_address is not None and len(of_address) >= maximum_per_address:
            self._evict(next(iter(of_address)), "max_half_open_per_address")
        elif maximum and len(self._all) >= maximum:
            self._evict(next(iter(self._all)), "max_half_open")
        self._all[member] = address
        if address:
            self._by_address.setdefault(address, {})[member] = True

    def remove(self, member: Any) -> None:
        """It sent a CONNECT, or is closed."""
        address = self._all.pop(member, "")
        if address:
            of_address = self._by_address[address]
            del of_address[member]
            if not of_address:
                del self._by_address[address]

    def _evict(self, member: Any, limit: str) -> None:
        self.remove(member)
        self.counters.connections_evicted += 1
        self.counters.limit_reached(limit)
        member.abort()
