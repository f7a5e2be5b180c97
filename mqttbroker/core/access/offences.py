"""Counts of offences, such as failed logins, by address, user name and client id."""

from __future__ import annotations

import zlib
from typing import Final

from mqttbroker.core.access.ban_list import Key

MAX_CREDIT: Final = 4096  # by which successful logins raise a limit, and the number of bits in `Record.users`


class Record:
    """The offences of one key."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.score = 0.0  # offences that are not forgotten, as of ``updated``
        self.updated = 0.0
        self.count = 0  # offences since the last ban, or since all were forgotten
        self.credit = 0  # by which the limit is raised
        self.users: int = 0  # of an address: a bit for each user name that logged in (hashed to `MAX_CREDIT` bits)
        self.bans = 0
        self.until = 0.0  # end of the last ban

    def credit_user(self, name: str) -> bool:
        """Raise the limit, once for each user name; false if this one has raised it."""
        bit = 1 << (zlib.crc32(name.encode("utf-8", "surrogatepass")) & (MAX_CREDIT - 1))
        if self.users & bit:
            return False
        self.users |= bit
        self.credit += 1
        return True


class Offences:
    """Offences of one kind by key, each in a leaky bucket that loses ``limit`` offences in ``window`` seconds.

    ``limit`` 0 = they are not counted. Keys with no offences for ``window`` and ``memory`` seconds lose their bans. Of
    more than ``max_entries`` keys the one that was updated longest ago is forgotten.
    """

    def __init__(self, cause: str) -> None:
        self.cause = cause
        self.limit = 0
        self.window = 1.0
        self.memory = 0.0
        self.max_entries = 0
        self._records: dict[Key, Record] = {}  # the one updated longest ago first

    def __len__(self) -> int:
        return len(self._records)

    def record(self, key: Key) -> Record:
        """The record of a key, as the one updated last."""
        record = self._records.pop(key, None)
        if record is None:
            record = Record(key)
        self.put(record)
        return record

    def put(self, record: Record) -> None:
        """Add a record that `pop` removed, or that was stored."""
        if record.key not in self._records and len(self._records) >= self.max_entries:
            del self._records[next(iter(self._records))]
        self._records[record.key] = record

    def get(self, key: Key) -> Record | None:
        return self._records.get(key)

    def pop(self, key: Key) -> None:
        self._records.pop(key, None)

    def records(self) -> list[Record]:
        return list(self._records.values())

    def count(self, key: Key, now: float) -> Record | None:
        """Count an offence; returns the record if that exceeds the limit."""
        record = self.record(key)
        self.forgive(record, now)
        record.score += 1.0
        record.count += 1
        # The score has fallen slightly since the first offence.
        return record if record.score > self.limit + record.credit - 0.5 else None

    def forgive(self, record: Record, now: float) -> None:
        """Let the score fall with time."""
        if record.score > 0.0:
            forgiven = max(0.0, now - record.updated) * (self.limit + record.credit) / self.window
            record.score = max(0.0, record.score - forgiven)
            if record.score == 0.0:
                record.count = 0
                if now - record.until > self.window + self.memory:
                    record.bans = 0
        record.updated = now

    def exceeds_credit(self, key: Key, now: float) -> bool:
        """Whether offences that are not forgotten are more than the credit."""
        record = self._records.get(key)
        if record is None or record.score == 0.0:
            return False
        self.forgive(record, now)
        return record.score > record.credit
