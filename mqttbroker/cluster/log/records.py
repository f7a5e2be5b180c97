"""The records of a shard's log: a header that says who wrote it and when in its time as owner, and a body.

Little-endian: magic ``MQK1``, kind, flags, shard (u16), the cluster (8 bytes), the owner (8 bytes), epoch (i64) and
sequence (u64). A long body is in several records, its parts: each has the next sequence, and all but the last the flag `MORE`.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

import msgspec

PREFIX: Final = b"MQK"  # of all versions
VERSION: Final = b"1"
MAGIC: Final = PREFIX + VERSION
ID_BYTES: Final = 8  # of the id of a cluster, and of an owner

TAKEOVER: Final = 1
CHANGES: Final = 2
RELEASE: Final = 3

NO_EPOCH: Final = -1

MORE: Final = 1  # flag: the next record goes on with the body
CONTINUED: Final = 2  # flag: the body goes on with that of the record before

_HEADER: Final = Struct("<4sBBH8s8sqQ")
HEADER_BYTES: Final = _HEADER.size


class BadRecord(ValueError):
    """The bytes are no record of this log; the text names the reason."""


class ForeignRecord(BadRecord):
    """No version of this program has written the bytes: they count as a void record."""


class Header(NamedTuple):
    """The header of a record.

    ``owner`` is new for each start of a node. The ``epoch`` of a takeover is the one that it ends, `NO_EPOCH` for the first of
    a log; that of any other record is the offset of its owner's takeover. ``sequence`` is 0 for a takeover, and counts the
    others from 1 in each epoch. ``flags`` are those of a part.
    """

    kind: int
    shard: int
    cluster: bytes
    owner: bytes
    epoch: int
    sequence: int
    flags: int = 0


class Takeover(msgspec.Struct, array_like=True):
    """The body of a takeover, for operators: the name of the node, its address for links, its program's version."""

    node: str
    address: str
    version: str


def encode_record(header: Header, body: bytes) -> bytes:
    kind, shard, cluster, owner, epoch, sequence, flags = header
    return _HEADER.pack(MAGIC, kind, flags, shard, cluster, owner, epoch, sequence) + body


def decode_header(record: bytes) -> Header:
    """The header of a record, whose body begins at `HEADER_BYTES`. Raises `BadRecord`."""
    if len(record) < HEADER_BYTES:
        raise ForeignRecord(f"a record of {len(record)} bytes")
    magic, kind, flags, shard, cluster, owner, epoch, sequence = _HEADER.unpack_from(record)
    if magic != MAGIC and magic.startswith(PREFIX):
        # To pass over it would lose its messages.
        version = magic[len(PREFIX) :].decode("latin-1")
        raise BadRecord(f"a record of version {version!r}, this program reads {VERSION.decode()}: written by a newer program?")
    if magic != MAGIC:
        raise ForeignRecord(f"a record that begins with {magic!r}, not with {MAGIC!r}")
    header = Header(kind, shard, cluster, owner, epoch, sequence, flags)
    if header.kind not in (TAKEOVER, CHANGES, RELEASE):
        raise BadRecord(f"a record of the unknown kind {header.kind}: written by a newer program?")
    return header


def encode_takeover(takeover: Takeover) -> bytes:
    return msgspec.msgpack.encode(takeover)


def decode_takeover(record: bytes) -> Takeover:
    """The body of a takeover record. Raises `BadRecord`."""
    try:
        return msgspec.msgpack.decode(record[HEADER_BYTES:], type=Takeover)
    except msgspec.MsgspecError as error:
        raise BadRecord(f"not a takeover: {error}") from None
