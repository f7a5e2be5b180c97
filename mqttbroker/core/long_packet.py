"""A long packet while it comes: the pieces in which it came, and where its payload begins.

The rule kept here: what is long is not copied to be whole where nobody needs it whole, and its pieces are few,
however small the reads were that brought them.
"""

from __future__ import annotations

from typing import Final, List

LONG: Final = 262_144  # bytes of a packet that is kept in pieces while it comes
PIECE: Final = 131_072  # bytes of a piece, at least, the last one apart


class LongPacket:
    """The first ``len(data)`` bytes of a packet of ``size`` bytes, and what follows them."""

    def __init__(self, data: bytes, size: int) -> None:
        self.size = size
        self.missing = size - len(data)
        self._pieces: List[bytes] = []
        self._gathered = bytearray()
        if len(data) >= PIECE:
            self._pieces.append(data)
        else:
            self._gathered += data

    def add(self, data: bytes) -> None:
        """Take the next ``len(data)`` bytes, at most `missing`."""
        self.missing -= len(data)
        gathered = self._gathered
        if not gathered and len(data) >= PIECE:
            self._pieces.append(data)
            return
        gathered += data
        if len(gathered) >= PIECE:
            self._flush()

    def take(self) -> List[bytes]:
        """All pieces, the first of `PIECE` bytes or more, once nothing is missing."""
        if self._gathered:
            self._flush()
        return self._pieces

    def _flush(self) -> None:
        self._pieces.append(bytes(self._gathered))
        self._gathered = bytearray()


def total(pieces: List[bytes]) -> int:
    """The bytes of all pieces."""
    size: int = 0
    for piece in pieces:
        size += len(piece)
    return size


def payload_start(data: bytes, body: int, qos: int, version: int) -> int:
    """Where the payload of a PUBLISH begins whose variable header is at ``body``; beyond ``data`` if that does not
    hold all of the header."""
    size: int = len(data)
    beyond: int = size + 1
    if body + 2 > size:
        return beyond
    start: int = body + 2 + ((data[body] << 8) | data[body + 1])
    if qos:
        start += 2
    if version < 5:
        return start
    length: int = 0
    shift: int = 0
    while start < size and shift <= 21:
        byte: int = data[start]
        start += 1
        length |= (byte & 127) << shift
        if byte < 128:
            return start + length
        shift += 7
    return beyond
