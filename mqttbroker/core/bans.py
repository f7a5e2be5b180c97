"""Bans of addresses, and of user names at an address, after failed logins.

Failed logins count for the address, an IPv6 one by its /64 network, and for the user name at that address; a user name
alone is never banned. A count is a leaky bucket: it falls by ``limit`` in ``window`` seconds. Each successful login
raises the limit, at an address once per user name, so that one device with a wrong password does not ban the others
behind the same NAT. Each further ban of the same address lasts twice as long.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
from heapq import heappop, heappush
from typing import Any, Dict, Final, List, Optional, Set, Tuple

log = logging.getLogger("mqttbroker")

MAX_CREDIT: Final = 4096  # by which successful logins raise a limit, and the number of bits in `Record.users`
MAX_NAME: Final = 64  # characters of a user name; of a longer one the digest is stored


class BanTerms:
    """When to ban, from the settings of the same names; times in seconds.

    ``failures`` or ``address_failures`` of 0 = no bans of user names or of addresses.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.address_failures = 0
        self.window = 0.0
        self.first = 0.0
        self.longest = 0.0
        self.max_entries = 0
        self.exempt: List[Any] = []  # networks of `ipaddress`


class Record:
    """The logins from one address, or of one user name there; ``username`` None = of all together."""

    def __init__(self, address: str, username: Optional[str]) -> None:
        self.address = address
        self.username = username
        self.score = 0.0  # failures that are not forgotten, as of ``updated``
        self.updated = 0.0
        self.failures = 0  # since the last successful login or ban
        self.credit = 0
        self.users: int = 0  # of an address: a bit for each user name that logged in (hashed to `MAX_CREDIT` bits)
        self.bans = 0
        self.until = 0.0


class Bans:
    """The failed logins and bans of one broker. ``now`` is monotonic time in seconds.

    A ``peer`` is an address with a port. Clients of Unix sockets and of the exempt networks are never banned.
    """

    def __init__(self, terms: BanTerms) -> None:
        self.terms = terms
        self.failed_logins = 0
        self.refused_logins = 0  # of banned clients
        self.started = 0
        self._counts: Dict[Tuple[str, Optional[str]], Record] = {}  # the one updated longest ago first
        self._banned: Dict[Tuple[str, Optional[str]], Record] = {}
        self._ends: List[Tuple[float, str, str]] = []  # a heap; the user name of an address is ""

    def network(self, peer: str) -> str:
        """The address of a peer as it is banned; "" if it is never banned."""
        host = peer.rpartition(":")[0]
        exempt = self.terms.exempt
        if ":" not in host and not exempt:
            return host
        try:
            address: Any = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return ""  # a Unix socket
        if address.version == 6 and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        for network in exempt:
            if address.version == network.version and address in network:
                return ""
        if address.version == 4:
            return str(address)
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))

    def refuses(self, peer: str, username: Optional[str], now: float) -> bool:
        """Whether the client is banned; counts the refused login. Without ``username`` only its address counts."""
        self._expire(now)
        if not self._banned:
            return False
        address = self.network(peer)
        if address == "":
            return False
        if (address, None) in self._banned or (username is not None and (address, _short(username)) in self._banned):
            self.refused_logins += 1
            return True
        return False

    def suspects(self, peer: str, username: str, now: float) -> bool:
        """Whether recent logins from this address, or of this user name there, failed more often than others succeeded."""
        if not self._counts:
            return False
        address = self.network(peer)
        return self._exceeds_credit((address, None), now) or self._exceeds_credit((address, _short(username)), now)

    def _exceeds_credit(self, key: Tuple[str, Optional[str]], now: float) -> bool:
        record = self._counts.get(key)
        if record is None or record.score == 0.0:
            return False
        self._forgive(record, now)
        return record.score > record.credit

    def failed(self, peer: str, username: Optional[str], now: float) -> None:
        """A login failed; without ``username`` it counts only for the address."""
        self.failed_logins += 1
        address = self.network(peer)
        if address == "":
            return
        if username is not None:
            self._fail(address, _short(username), self.terms.failures, now)
        self._fail(address, None, self.terms.address_failures, now)

    def _fail(self, address: str, username: Optional[str], limit: int, now: float) -> None:
        if limit == 0:
            return
        key = (address, username)
        banned = self._banned.get(key)
        if banned is not None:  # a login that began before the ban
            banned.failures += 1
            return
        record = self._record(key)
        self._forgive(record, now)
        record.score += 1.0
        record.failures += 1
        if record.score > limit + record.credit - 0.5:  # the score has fallen slightly since the first failure
            self._ban(key, record, now)

    def succeeded(self, peer: str, username: str, now: float) -> None:
        """A login succeeded."""
        if self.terms.max_entries == 0 or (self.terms.failures == 0 and self.terms.address_failures == 0):
            return
        address = self.network(peer)
        if address == "":
            return
        name = _short(username)
        record = self._record((address, None))
        bit = 1 << (hash(name) & (MAX_CREDIT - 1))
        if record.users & bit == 0:
            record.users |= bit
            record.credit += 1
            return
        pair = self._record((address, name))
        pair.credit = min(pair.credit + 1, MAX_CREDIT)
        pair.failures = 0

    def _record(self, key: Tuple[str, Optional[str]]) -> Record:
        """The count of a key, moved to the end of `_counts`."""
        record = self._counts.pop(key, None)
        if record is None:
            record = Record(key[0], key[1])
            if len(self._counts) >= self.terms.max_entries:
                del self._counts[next(iter(self._counts))]
        self._counts[key] = record
        return record

    def _forgive(self, record: Record, now: float) -> None:
        """Let the score fall with time."""
        limit = self.terms.address_failures if record.username is None else self.terms.failures
        if record.score > 0.0:
            forgiven = max(0.0, now - record.updated) * (limit + record.credit) / self.terms.window
            record.score = max(0.0, record.score - forgiven)
            if record.score == 0.0:
                record.failures = 0
                if now - record.until > self.terms.window + self.terms.longest:
                    record.bans = 0
        record.updated = now

    def _ban(self, key: Tuple[str, Optional[str]], record: Record, now: float) -> None:
        terms = self.terms
        seconds = min(terms.longest, terms.first * 2.0 ** min(record.bans, 40))
        record.bans += 1
        record.until = now + seconds
        # One more failure after the ban leads to the next.
        record.score -= 1.0
        record.updated = record.until
        del self._counts[key]
        if len(self._banned) >= terms.max_entries:
            del self._banned[next(iter(self._banned))]
        self._banned[key] = record
        heappush(self._ends, (record.until, record.address, record.username or ""))
        self.started += 1
        log.warning(
            "event=banned address=%s user=%s seconds=%d failures=%d",
            record.address,
            record.username or "",
            seconds,
            record.failures,
        )
        record.failures = 0

    def _expire(self, now: float) -> None:
        """Move the bans that are over back to the counts."""
        ends = self._ends
        while ends and ends[0][0] <= now:
            _, address, name = heappop(ends)
            for key in ((address, name), (address, None)):
                record = self._banned.get(key)
                if record is not None and record.until <= now:
                    del self._banned[key]
                    self._counts[key] = record
                    if len(self._counts) > self.terms.max_entries:
                        del self._counts[next(iter(self._counts))]

    # --- for operators ------------------------------------------------------------------------------------------------

    def banned(self, now: float) -> List[Record]:
        """The bans in force."""
        self._expire(now)
        return list(self._banned.values())

    def in_force(self, record: Record, now: float) -> bool:
        """Whether a ban is neither over nor lifted."""
        return record.until > now and self._banned.get((record.address, record.username)) is record

    def active(self, now: float) -> int:
        """How many bans are in force."""
        self._expire(now)
        return len(self._banned)

    def lift(self, address: str, username: Optional[str]) -> bool:
        """End the ban of an address, or of a user name there, and forget its failures; False if there is none."""
        record = self._banned.pop((address, None if username is None else _short(username)), None)
        if record is not None:
            log.info("event=ban_lifted address=%s user=%s", address, username or "")
        return record is not None

    def passwords_changed(self, usernames: Set[str]) -> None:
        """End the bans of user names, and those of the addresses where they are banned: the failures may have been
        those of devices with the new password."""
        if not self._banned:
            return
        names = {_short(username) for username in usernames}
        for key in list(self._banned):
            if key[1] is not None and key[1] in names:
                self.lift(key[0], key[1])
                self.lift(key[0], None)


def _short(username: str) -> str:
    """A user name as a key: a digest of a long one."""
    if len(username) <= MAX_NAME:
        return username
    return hashlib.sha256(username.encode("utf-8", "surrogatepass")).hexdigest()
