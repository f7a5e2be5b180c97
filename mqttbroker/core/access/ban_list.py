"""The bans in force: of addresses and networks, user names, client ids, and combinations of them."""

from __future__ import annotations

import hashlib
import ipaddress
from heapq import heapify, heappop, heappush
from typing import Any, Final

from mqttbroker.core.terms.networks import address_of, network_text

# Address, user name and client id of clients; "" = any.
Key = tuple[str, str, str]

MAX_NAME: Final = 64  # characters of a user name or client id in a key; of a longer one the digest is stored
FOREVER: Final = float("inf")
BAN_FILE: Final = "bans.jsonl"  # in the data directory; keeps the bans over a restart
OPERATOR: Final = "operator"  # the cause of a ban that an operator made


def short(name: str) -> str:
    """A user name or client id in a key: a digest of a long one."""
    if len(name) <= MAX_NAME:
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


class Ban:
    """A ban of the clients to which all parts of ``key`` apply, until ``until`` in monotonic seconds.

    ``number`` counts the bans of this key for this cause. ``record`` is what the cause's counts keep of the key.
    """

    def __init__(self, key: Key, cause: str, until: float, number: int, reason: str = "", record: Any = None) -> None:
        self.key = key
        self.cause = cause
        self.until = until
        self.number = number
        self.reason = reason
        self.record = record


class BanList:
    """The bans in force, up to ``maximum`` for each cause; beyond it an operator's is not added, and the oldest of
    the others are dropped.

    ``now`` is monotonic time in seconds. An address in a key is written as by `network_text`.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._tables: dict[str, dict[Key, Ban]] = {OPERATOR: {}}  # by cause; the oldest ban first
        self._ends: list[tuple[float, int, Ban]] = []  # a heap
        self._last = 0  # of the numbers in `_ends`
        self._prefixes: dict[tuple[int, int], int] = {}  # bans by IP version and prefix length of their address
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, ban: Ban) -> bool:
        """Put a ban in force instead of the one of the same key and cause; false if there are too many of operators."""
        table = self._tables.setdefault(ban.cause, {})
        old = table.get(ban.key)
        if old is None and len(table) >= self.maximum:
            if ban.cause == OPERATOR:
                return False
            old = next(iter(table.values()))
        if old is not None:
            self.remove(old)
        table[ban.key] = ban
        self._length += 1
        self._count_prefix(ban, 1)
        if ban.until != FOREVER:
            self._last += 1
            heappush(self._ends, (ban.until, self._last, ban))
            if len(self._ends) > 2 * self._length + 1000:  # lifted and replaced bans are the majority
                self._ends = [entry for entry in self._ends if self.holds(entry[2])]
                heapify(self._ends)
        return True

    def remove(self, ban: Ban) -> None:
        if self.holds(ban):
            del self._tables[ban.cause][ban.key]
            self._length -= 1
            self._count_prefix(ban, -1)

    def holds(self, ban: Ban) -> bool:
        """Whether the ban has neither ended nor been removed."""
        return self.get(ban.key, ban.cause) is ban

    def get(self, key: Key, cause: str) -> Ban | None:
        """The ban of exactly this key for this cause."""
        table = self._tables.get(cause)
        return None if table is None else table.get(key)

    def of(self, key: Key) -> list[Ban]:
        """The bans of exactly this key."""
        return [table[key] for table in self._tables.values() if key in table]

    def _count_prefix(self, ban: Ban, change: int) -> None:
        address = ban.key[0]
        if address == "":
            return
        network: Any = ipaddress.ip_network(address)
        prefix = (network.version, network.prefixlen)
        count = self._prefixes.get(prefix, 0) + change
        if count:
            self._prefixes[prefix] = count
        else:
            del self._prefixes[prefix]

    def find(self, peer: str, username: str | None, client_id: str, exempt: bool = False) -> Ban | None:
        """A ban of this client; of an ``exempt`` one only an operator's."""
        addresses = [""]
        if self._prefixes:
            address = address_of(peer)
            if address is not None:
                for version, prefix in self._prefixes:
                    if version == address.version:
                        addresses.append(network_text(address, prefix))
        names = ["", short(username)] if username else [""]
        ids = ["", short(client_id)] if client_id else [""]
        for cause, table in self._tables.items():
            if not table or (exempt and cause != OPERATOR):
                continue
            for network in addresses:
                for name in names:
                    for identifier in ids:
                        ban = table.get((network, name, identifier))
                        if ban is not None:
                            return ban
        return None

    def expire(self, now: float) -> list[Ban]:
        """Remove the bans that are over; returns them."""
        ended: list[Ban] = []
        while self._ends and self._ends[0][0] <= now:
            ban = heappop(self._ends)[2]
            if self.holds(ban):
                self.remove(ban)
                ended.append(ban)
        return ended

    def all(self) -> list[Ban]:
        """All bans, those by operators first."""
        return [ban for table in self._tables.values() for ban in table.values()]
