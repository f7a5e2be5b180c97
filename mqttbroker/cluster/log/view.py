"""Which records of a shard's log are valid. A pure function of the log, so every reader finds the same.

A takeover is valid only if it ends the epoch that is in force where it stands in the log: of two takeovers the first
counts, and one that arrives late deposes nobody. Every other record needs the epoch in force and the next sequence: so records
of an owner that was deposed are void, and an append that was made twice counts once.

The parts of a long body have effect with the last one, `LogView.body`. Parts without the last one have none: what follows them
is another body, a release or a takeover.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mqttbroker.cluster.log.records import (
    CHANGES,
    CONTINUED,
    HEADER_BYTES,
    MORE,
    NO_EPOCH,
    RELEASE,
    TAKEOVER,
    BadRecord,
    Header,
)

VALID: Final = 0
LATE_TAKEOVER: Final = 1  # another takeover came first
OLDER_EPOCH: Final = 2  # the owner had been deposed, or had released the shard
REPEATED: Final = 3  # a record of this sequence is in the log already
OUT_OF_SEQUENCE: Final = 4  # an earlier record of the owner is missing; no owner has two appends under way

CAUSES: Final = ("", "late takeover", "older epoch", "repeated", "out of sequence")


class ViewState(NamedTuple):
    """What a `LogView` knows, to be stored with what the records before ``end`` add up to."""

    end: int
    epoch: int
    owner: bytes
    sequence: int
    released: bool


class LogView:
    """One reader's view of the log of ``shard``, of which it has the records before ``end``."""

    def __init__(self, shard: int, cluster: bytes) -> None:
        self.shard = shard
        self.cluster = cluster
        self.end = 0
        self.epoch = NO_EPOCH
        self.owner = b""  # of the epoch
        self.sequence = 0  # of the last valid record of the epoch
        self.released = False
        self._parts: list[bytes] = []  # of a body whose last part was not read
        self._before: ViewState | None = None  # the first of them

    @property
    def state(self) -> ViewState:
        """The state behind the last record that has had its effect: in front of the first part of an unfinished body."""
        return self._state() if self._before is None else self._before

    def _state(self) -> ViewState:
        return ViewState(self.end, self.epoch, self.owner, self.sequence, self.released)

    def restore(self, state: ViewState) -> None:
        """Go on behind the records that led to ``state``; before the first `read`."""
        self.end, self.epoch, self.owner, self.sequence, self.released = state

    @property
    def is_owned(self) -> bool:
        """Whether the log has an owner that has not released it."""
        return self.epoch != NO_EPOCH and not self.released

    def read(self, offset: int, header: Header) -> int:
        """Read the next record; whether it is valid, or the cause why it is void. Raises `BadRecord`."""
        if offset < self.end:
            raise ValueError(f"the record of offset {offset} was read before")
        if header.shard != self.shard:
            raise BadRecord(f"a record of shard {header.shard} in the log of shard {self.shard}")
        if header.cluster != self.cluster:
            raise BadRecord(f"a record of another cluster, {header.cluster.hex()}; this is {self.cluster.hex()}")
        before = self._state()
        self.end = offset + 1
        if header.kind == TAKEOVER:
            if header.epoch != self.epoch:
                return LATE_TAKEOVER
            self._drop_parts()
            self.epoch = offset
            self.owner = header.owner
            self.sequence = 0
            self.released = False
            return VALID
        if header.epoch != self.epoch or self.released:
            return OLDER_EPOCH
        if header.sequence != self.sequence + 1:
            return REPEATED if header.sequence <= self.sequence else OUT_OF_SEQUENCE
        self.sequence = header.sequence
        self.released = header.kind == RELEASE
        if not header.flags & CONTINUED:
            self._drop_parts()
        if header.kind == CHANGES and header.flags & MORE and self._before is None:
            self._before = before
        return VALID

    def skip(self, offset: int) -> None:
        """Pass over a `ForeignRecord`, which is void."""
        if offset < self.end:
            raise ValueError(f"the record of offset {offset} was read before")
        self.end = offset + 1

    def _drop_parts(self) -> None:
        self._parts.clear()
        self._before = None

    def body(self, header: Header, record: bytes) -> bytes | None:
        """The body that ends with this record; None if that has more parts. To be called for each valid record of changes
        behind `read`."""
        return self.with_part(header, record[HEADER_BYTES:])

    def with_part(self, header: Header, part: bytes) -> bytes | None:
        """As `body`, with the part of it that the record has."""
        if header.flags & MORE:
            self._parts.append(part)
            return None
        if not self._parts:
            return part
        self._parts.append(part)
        body = b"".join(self._parts)
        self._drop_parts()
        return body
