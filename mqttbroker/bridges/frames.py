"""Cuts the bytes of one direction of a bridge into packets."""

from __future__ import annotations

from typing import Final

from mqttbroker.codec.reason_codes import MALFORMED_PACKET, PACKET_TOO_LARGE, MQTTError

_LONGEST_HEADER: Final = 5  # bytes


class Frames:
    """Packets of at most ``max_packet_size`` bytes, cut from the bytes that are fed."""

    def __init__(self, max_packet_size: int) -> None:
        self.max_packet_size = max_packet_size
        self._data = b""
        self._position = 0  # of the next packet in the data
        self._chunks: list[bytes] = []  # that follow the data
        self._waiting = 0  # bytes in the chunks
        self._needed = 2  # bytes of the next packet that there must be before it is parsed

    @property
    def held(self) -> int:
        """Bytes that were fed and not returned."""
        return len(self._data) - self._position + self._waiting

    def feed(self, data: bytes) -> None:
        if data:
            self._chunks.append(data)
            self._waiting += len(data)

    def next(self) -> tuple[int, bytes] | None:
        """The first byte of the next packet, and what follows its fixed header; None if it is incomplete.

        Raises MQTTError for a Remaining Length that is malformed, or larger than allowed.
        """
        if len(self._data) - self._position < self._needed:
            if self.held < self._needed:
                return None
            self._join()
        while True:
            found = self._parse()
            if found is not None or not self._chunks or self.held < self._needed:
                return found
            self._join()

    def _join(self) -> None:
        self._data = b"".join((self._data[self._position :], *self._chunks))
        self._position = 0
        self._chunks = []
        self._waiting = 0

    def _parse(self) -> tuple[int, bytes] | None:
        """The next packet if all of it is in the data; else `_needed` is set."""
        data, start = self._data, self._position
        size = len(data) - start
        remaining = shift = 0
        header = 1
        byte = 128
        while byte >= 128:
            if header >= size:
                self._needed = header + 1
                return None
            if header >= _LONGEST_HEADER:
                raise MQTTError(MALFORMED_PACKET, "Remaining Length of more than 4 bytes")
            byte = data[start + header]
            remaining |= (byte & 127) << shift
            shift += 7
            header += 1
        if header + remaining > self.max_packet_size:
            raise MQTTError(PACKET_TOO_LARGE, f"packet of {header + remaining} bytes, more than {self.max_packet_size}")
        if header + remaining > size:
            self._needed = header + remaining
            return None
        self._needed = 2
        self._position = start + header + remaining
        return data[start], data[start + header : self._position]
