"""Bans: after failed logins, protocol errors and too many reconnects, and by operators.

Failed logins count for the address, and for the user name at that address; a user name alone is never banned for them.
Each successful login raises the limit, at an address once per user name, so that one device with a wrong password does
not ban the others behind the same NAT. Protocol errors count for the address, reconnects for client id and user name at
an address. Each further ban of the same key lasts twice as long.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from mqttbroker.core.access.ban_list import FOREVER, OPERATOR, Ban, BanList, Key, short
from mqttbroker.core.access.offences import MAX_CREDIT, Offences, Record
from mqttbroker.core.terms.networks import Networks, address_of

audit = logging.getLogger("mqttbroker.audit")

# Causes of bans.
FAILED_LOGINS: Final = "failed_logins"
PROTOCOL_ERRORS: Final = "protocol_errors"
RECONNECTS: Final = "reconnects"

MAX_REASON: Final = 200  # characters


class BanTerms:
    """When to ban, from the settings of the same names; times in seconds.

    A limit of 0 = no bans for that cause: ``failures`` of a user name at an address, ``address_failures`` of an
    address, ``protocol_errors`` of an address, ``reconnects`` of a client id of a user at an address.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.address_failures = 0
        self.window = 0.0
        self.protocol_errors = 0
        self.reconnects = 0
        self.reconnect_window = 0.0
        self.first = 0.0
        self.longest = 0.0
        self.max_entries = 0
        self.exempt: list[Any] = []  # networks of `ipaddress`
        self.networks = Networks()


class Bans:
    """The bans of one broker, and the counts that lead to them. ``now`` is monotonic time in seconds.

    A ``peer`` is an address with a port. Clients of Unix sockets and of the exempt networks are banned by operators
    only.
    """

    def __init__(self, terms: BanTerms) -> None:
        self.failed_logins = 0
        self.refused_logins = 0  # of banned clients
        self.started: dict[str, int] = {FAILED_LOGINS: 0, PROTOCOL_ERRORS: 0, RECONNECTS: 0, OPERATOR: 0}
        self.on_change: Any = None  # called with True after a ban has begun or was lifted, False after other changes
        self._list = BanList(terms.max_entries)
        self._user_failures = Offences(FAILED_LOGINS)
        self._address_failures = Offences(FAILED_LOGINS)
        self._protocol_errors = Offences(PROTOCOL_ERRORS)
        self._reconnects = Offences(RECONNECTS)
        self.apply(terms)

    def apply(self, terms: BanTerms) -> None:
        """Use other terms. Bans in force keep their ends."""
        self.terms = terms
        self._list.maximum = terms.max_entries
        self._user_failures.limit = terms.failures
        self._address_failures.limit = terms.address_failures
        self._protocol_errors.limit = terms.protocol_errors
        self._reconnects.limit = terms.reconnects
        for offences in self._counts:
            offences.window = terms.reconnect_window if offences is self._reconnects else terms.window
            offences.memory = terms.longest
            offences.max_entries = terms.max_entries

    @property
    def _counts(self) -> list[Offences]:
        return [self._user_failures, self._address_failures, self._protocol_errors, self._reconnects]

    def network(self, peer: str) -> str:
        """The network of a peer as it is banned; "" if it is never banned."""
        return "" if self._is_exempt(peer) else self.terms.networks.of(peer)

    def _is_exempt(self, peer: str) -> bool:
        exempt = self.terms.exempt
        if not exempt:
            return False
        address = address_of(peer)
        if address is None:
            return False
        for network in exempt:
            if address.version == network.version and address in network:
                return True
        return False

    def refuses(self, peer: str, username: str | None, now: float, client_id: str = "") -> bool:
        """Whether the client is banned; counts the refused login."""
        if len(self._list) == 0:
            return False
        self._expire(now)
        if self._list.find(peer, username, client_id, self._is_exempt(peer)) is None:
            return False
        self.refused_logins += 1
        return True

    # --- failed logins ------------------------------------------------------------------------------------------------

    def suspects(self, peer: str, username: str, now: float) -> bool:
        """Whether recent logins from this address, or of this user name there, failed more often than others
        succeeded."""
        if not self._address_failures and not self._user_failures:
            return False
        address = self.network(peer)
        return self._address_failures.exceeds_credit((address, "", ""), now) or self._user_failures.exceeds_credit(
            (address, short(username), ""), now
        )

    def failed(self, peer: str, username: str | None, now: float) -> None:
        """A login failed; without ``username`` it counts only for the address."""
        self.failed_logins += 1
        address = self.network(peer)
        if address == "":
            return
        if username:
            self._offend(self._user_failures, (address, short(username), ""), now)
        self._offend(self._address_failures, (address, "", ""), now)

    def succeeded(self, peer: str, username: str) -> None:
        """A login succeeded."""
        terms = self.terms
        if terms.max_entries == 0 or (terms.failures == 0 and terms.address_failures == 0):
            return
        address = self.network(peer)
        if address == "":
            return
        name = short(username)
        if not self._address_failures.record((address, "", "")).credit_user(name):
            pair = self._user_failures.record((address, name, ""))
            pair.credit = min(pair.credit + 1, MAX_CREDIT)
            pair.count = 0
        self._changed(False)

    def passwords_changed(self, usernames: set[str]) -> None:
        """End the bans of user names for failed logins, and those of the addresses where they are banned: the failures
        may have been those of devices with the new password."""
        names = {short(username) for username in usernames}
        for ban in self._list.all():
            address, name, _ = ban.key
            if ban.cause == FAILED_LOGINS and name in names:
                self._lift(ban)
                other = self._list.get((address, "", ""), FAILED_LOGINS)
                if other is not None:
                    self._lift(other)

    # --- other offences -----------------------------------------------------------------------------------------------

    def protocol_error(self, peer: str, now: float) -> None:
        """A client of this address violated the protocol."""
        if self.terms.protocol_errors:
            address = self.network(peer)
            if address:
                self._offend(self._protocol_errors, (address, "", ""), now)

    def connected(self, peer: str, username: str | None, client_id: str, now: float) -> None:
        """A client was accepted, as ``username`` if it is authenticated; each time after the first is a reconnect."""
        if self.terms.reconnects:
            address = self.network(peer)
            if address:
                # Strangers elsewhere, or other users, cannot have a client banned by connecting with its client id.
                self._offend(self._reconnects, (address, short(username or ""), short(client_id)), now)

    def _offend(self, offences: Offences, key: Key, now: float) -> None:
        if offences.limit == 0:
            return
        self._expire(now)
        ban = self._list.get(key, offences.cause)
        if ban is not None:  # the offence began before the ban
            ban.record.count += 1
            return
        record = offences.count(key, now)
        if record is not None:
            self._ban(offences, record, now)

    def _ban(self, offences: Offences, record: Record, now: float) -> None:
        terms = self.terms
        seconds = min(terms.longest, terms.first * 2.0 ** min(record.bans, 40))
        record.bans += 1
        record.until = now + seconds
        # One more offence after the ban leads to the next.
        record.score -= 1.0
        record.updated = record.until
        offences.pop(record.key)
        address, username, client_id = record.key
        self._list.add(Ban(record.key, offences.cause, record.until, record.bans, "", record))
        self.started[offences.cause] += 1
        audit.warning(
            "event=banned address=%s user=%s client=%s cause=%s seconds=%d offences=%d",
            address, username, client_id, offences.cause, seconds, record.count,
        )  # fmt: skip
        record.count = 0
        self._changed(True)

    def _expire(self, now: float) -> None:
        """Move the records of bans that are over back to the counts."""
        for ban in self._list.expire(now):
            if ban.record is not None:
                self._counts_of(ban).put(ban.record)

    def _counts_of(self, ban: Ban) -> Offences:
        if ban.cause == FAILED_LOGINS:
            return self._user_failures if ban.key[1] else self._address_failures
        return self._protocol_errors if ban.cause == PROTOCOL_ERRORS else self._reconnects

    def _changed(self, bans: bool) -> None:
        if self.on_change is not None:
            self.on_change(bans)

    # --- for operators ------------------------------------------------------------------------------------------------

    def ban(self, key: Key, seconds: float, reason: str, now: float) -> Ban | None:
        """Ban the clients of a key for ``seconds``, or `FOREVER`; None if there are too many bans of operators.

        The address is "" or written as by `network_text`, the names are as in CONNECT.
        """
        address, username, client_id = key
        stored = (address, short(username), short(client_id))
        ban = Ban(stored, OPERATOR, now + seconds, 1, reason[:MAX_REASON])
        if not self._list.add(ban):
            return None
        self.started[OPERATOR] += 1
        audit.warning(
            "event=banned address=%s user=%s client=%s cause=%s seconds=%s reason=%s",
            address, username, client_id, OPERATOR, "unlimited" if seconds == FOREVER else int(seconds), ban.reason,
        )  # fmt: skip
        self._changed(True)
        return ban

    def banned(self, now: float) -> list[Ban]:
        """The bans in force, those of operators first."""
        self._expire(now)
        return self._list.all()

    def in_force(self, ban: Ban, now: float) -> bool:
        """Whether a ban is neither over nor lifted."""
        return ban.until > now and self._list.holds(ban)

    def active(self, now: float) -> int:
        """How many bans are in force."""
        self._expire(now)
        return len(self._list)

    def lift(self, address: str, username: str | None = None, client_id: str = "") -> bool:
        """End the bans of exactly this key, and forget their offences; False if there is none."""
        found = self._list.of((address, short(username or ""), short(client_id)))
        for ban in found:
            self._lift(ban)
        return bool(found)

    def _lift(self, ban: Ban) -> None:
        self._list.remove(ban)
        address, username, client_id = ban.key
        audit.info("event=ban_lifted address=%s user=%s client=%s cause=%s", address, username, client_id, ban.cause)
        self._changed(True)

    # --- for the file of an earlier process ---------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """The records of failed logins that are not banned, the one updated longest ago first."""
        return [*self._user_failures.records(), *self._address_failures.records()]

    def restore_ban(self, ban: Ban, credit: int, users: int) -> None:
        """Put a stored ban in force again."""
        if ban.cause != OPERATOR:
            record = ban.record = Record(ban.key)
            record.credit, record.users = credit, users
            record.bans, record.until, record.updated = ban.number, ban.until, ban.until
            offences = self._counts_of(ban)
            record.score = max(0.0, offences.limit + credit - 1.0)  # one more offence leads to the next ban
        self._list.add(ban)

    def restore_record(self, key: Key, credit: int, users: int, bans: int, until: float) -> None:
        """Restore the counts of right and wrong logins of an address or user name."""
        record = Record(key)
        record.credit, record.users, record.bans, record.until = credit, users, bans, until
        (self._user_failures if key[1] else self._address_failures).put(record)
