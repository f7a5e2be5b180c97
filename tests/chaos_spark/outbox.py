"""A publisher's journal: its readings by number and the state of each QoS 2 handshake.

A line is written before the packet it is about is sent; a line torn by a kill is ignored.  So after a restart the
publisher knows every reading that the broker may know, and never sends one again under another packet id.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

PACKET_IDS = 200  # few, so that packet ids are soon reused
BAD = 50  # one in this many readings does not parse
SCHEMA = "sensor string not null, n long not null, value double not null"
_SENT, _RECEIVED, _COMPLETE = "P", "R", "C"


class Reading(NamedTuple):
    """Reading ``n`` (from 1) of a sensor; its other values are computed from these two."""

    sensor: str
    n: int

    @property
    def topic(self) -> str:
        return f"chaos/{self.sensor}"

    @property
    def qos(self) -> int:
        return 2

    @property
    def value(self) -> float:
        return self.n * 0.25

    @property
    def parses(self) -> bool:
        return self.n % BAD != BAD - 1

    @property
    def payload(self) -> bytes:
        if not self.parses:
            return f"{self.sensor} {self.n} out of order".encode()
        return json.dumps({"sensor": self.sensor, "n": self.n, "value": self.value, "text": "x" * 60}).encode()


def reading_of(payload: bytes) -> Reading:
    """The reading of a dead letter; raises ValueError."""
    sensor, number, _ = payload.decode().split(" ", 2)
    return Reading(sensor, int(number))


class Outbox:
    """The journal at ``path``, created if missing.

    ``outgoing``: by packet id, in sending order, the number of each incomplete reading and whether its PUBREC arrived.
    ``last``: the last number used.  ``known``: the broker has acknowledged a reading.
    """

    def __init__(self, path: Path) -> None:
        self.outgoing: dict[int, tuple[int, bool]] = {}
        self.last = 0
        self.known = False
        self._last_packet_id = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        text = b""
        while part := os.read(self._file, 1 << 20):
            text += part
        whole = text.rfind(b"\n") + 1
        for line in text[:whole].decode().splitlines():
            kind, *numbers = line.split()
            self._apply(kind, *map(int, numbers))
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)

    def next_reading(self) -> tuple[int, int]:
        """Record the next reading; returns its packet id and number."""
        packet_id = self._last_packet_id % PACKET_IDS + 1
        while packet_id in self.outgoing:
            packet_id = packet_id % PACKET_IDS + 1
        number = self.last + 1
        self._write(_SENT, packet_id, number)
        return packet_id, number

    def received(self, packet_id: int) -> None:
        """Record a PUBREC."""
        self._write(_RECEIVED, packet_id)

    def complete(self, packet_id: int) -> None:
        """Record a PUBCOMP, which frees the packet id."""
        self._write(_COMPLETE, packet_id)

    def _write(self, kind: str, *numbers: int) -> None:
        os.write(self._file, f"{kind} {' '.join(map(str, numbers))}\n".encode())
        self._apply(kind, *numbers)

    def _apply(self, kind: str, packet_id: int, number: int = 0) -> None:
        if kind == _SENT:
            self.outgoing[packet_id] = (number, False)
            self.last = number
            self._last_packet_id = packet_id
        elif kind == _RECEIVED:
            self.outgoing[packet_id] = (self.outgoing[packet_id][0], True)
            self.known = True
        else:
            del self.outgoing[packet_id]

    def close(self) -> None:
        os.close(self._file)
