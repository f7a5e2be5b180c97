"""Limits of addresses and of single clients against abuse. Times are monotonic, in seconds; a limit of 0 is none."""

from __future__ import annotations

from typing import Any, Dict, Final

MAX_ADDRESSES: Final = 65_536  # with remembered connects; the one that connected longest ago is forgotten first
CONNECT_BURST: Final = 10.0  # seconds of connects at the permitted rate that may come at once
RECEIVE_BURST: Final = 1.0  # seconds of messages or bytes at the permitted rate that may come at once


class AddressLimits:
    """The connections of one listener by address. At most `MAX_ADDRESSES` without connections are remembered."""

    def __init__(self) -> None:
        self.connections: Dict[str, int] = {}
        self.due: Dict[str, float] = {}  # when the bucket of connects is full again; the last one to connect is last

    def connect(self, address: str, rate: int, now: float) -> bool:
        """Count a connect; false if there were more than ``rate`` per second."""
        due = self.due
        # Each call forgets up to two addresses whose buckets are full, so the table shrinks while others connect.
        self._forget(now)
        self._forget(now)
        at: float = max(due.pop(address, now), now)
        admitted = at + 1.0 / rate - now <= CONNECT_BURST
        due[address] = at + 1.0 / rate if admitted else at
        if len(due) > MAX_ADDRESSES:
            del due[next(iter(due))]
        return admitted

    def _forget(self, now: float) -> None:
        for address in self.due:
            if self.due[address] <= now:
                del self.due[address]
            return

    def is_full(self, address: str, maximum: int) -> bool:
        return self.connections.get(address, 0) >= maximum

    def add(self, address: str) -> None:
        self.connections[address] = self.connections.get(address, 0) + 1

    def remove(self, address: str) -> None:
        left = self.connections[address] - 1
        if left:
            self.connections[address] = left
        else:
            del self.connections[address]


class ReceiveRate:
    """How fast one client may send: ``messages`` and ``size`` in bytes per second, 0 = unlimited."""

    def __init__(self, messages: int, size: int) -> None:
        self.timer: Any = None  # while the client is not read
        self._message_time = 1.0 / messages if messages else 0.0
        self._byte_time = 1.0 / size if size else 0.0
        self._messages_due = 0.0
        self._bytes_due = 0.0

    def receive(self, messages: int, size: int, now: float) -> float:
        """Count received messages and bytes; returns the seconds for which nothing more is to be read."""
        if messages:
            self._messages_due = max(self._messages_due, now) + self._message_time * messages
        self._bytes_due = max(self._bytes_due, now) + self._byte_time * size
        return max(self._messages_due, self._bytes_due) - RECEIVE_BURST - now
