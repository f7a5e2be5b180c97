"""A long packet while it is being received: a list of pieces, so that it is never copied as a whole."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

LONG_PACKET: Final = 262_144  # bytes; packets of at least this size are lists of pieces
MIN_PIECE: Final = 131_072  # bytes of each piece but the last; smaller reads are joined


class LongPacket:
    """A packet of ``size`` bytes that begins with ``data``."""

    def __init__(self, data: bytes, size: i64) -> None:
        self.size = size
        self.missing = size - len(data)
        self._pieces: list[bytes] = []
        self._small_reads = bytearray()
        if len(data) >= MIN_PIECE:
            self._pieces.append(data)
        else:
            self._small_reads += data

    def append(self, data: bytes) -> None:
        """Add the next bytes, at most `missing`."""
        self.missing -= len(data)
        small_reads = self._small_reads
        if not small_reads and len(data) >= MIN_PIECE:
            self._pieces.append(data)
            return
        small_reads += data
        if len(small_reads) >= MIN_PIECE:
            self._join()

    def finish(self) -> list[bytes]:
        """All pieces, when nothing is missing; the first has at least `MIN_PIECE` bytes."""
        if self._small_reads:
            self._join()
        return self._pieces

    def _join(self) -> None:
        self._pieces.append(bytes(self._small_reads))
        self._small_reads = bytearray()


def total_size(pieces: list[bytes]) -> i64:
    """The bytes of all pieces."""
    size: i64 = 0
    for piece in pieces:
        size += len(piece)
    return size


def payload_start(data: bytes, body: i64, qos: i64, version: i64) -> i64:
    """The position of the payload of a PUBLISH whose variable header begins at ``body``.

    Beyond ``data`` if that does not hold the whole variable header.
    """
    size: i64 = len(data)
    incomplete: i64 = size + 1
    if body + 2 > size:
        return incomplete
    start: i64 = body + 2 + ((data[body] << 8) | data[body + 1])
    if qos:
        start += 2
    if version < 5:
        return start
    length: i64 = 0
    shift: i64 = 0
    while start < size and shift <= 21:
        byte: i64 = data[start]
        start += 1
        length |= (byte & 127) << shift
        if byte < 128:
            return start + length
        shift += 7
    return incomplete
