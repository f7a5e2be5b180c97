"""The sockets of clients, over all listeners: how many may be open, and which are closed for new ones.

A socket is evictable as long as its client has sent no CONNECT, and again once the broker has closed its side. Such
sockets cost their client nothing, so beyond ``max_evictable`` of them the oldest is closed for each new one. At
``maximum``, which the process's file descriptors allow, a new socket replaces the oldest evictable one, and is closed
itself if there is none.
"""

from __future__ import annotations

from typing import Any

from sessions.counters import Counters


class OpenSockets:
    """Counts sockets. A member is a `Wire` or a TLS handshake: an object whose ``abort`` closes its socket at once."""

    def __init__(self, maximum: int, max_evictable: int, counters: Counters) -> None:
        self.maximum = maximum
        self.max_evictable = max_evictable
        self.counters = counters
        self.count = 0
        self._evictable: dict[Any, bool] = {}  # oldest first

    def add(self, member: Any) -> bool:
        """Count an accepted socket as evictable; false if there is no room, and the caller has to close it."""
        if self.count >= self.maximum and not self._evictable:
            self.counters.connections_refused += 1
            return False
        if len(self._evictable) >= self.max_evictable:
            self.counters.limit_reached("max_half_open")
            self._evict()
        elif self.count >= self.maximum:
            self._evict()
        self.count += 1
        self._evictable[member] = True
        return True

    def protect(self, member: Any) -> None:
        """Its client sent a CONNECT."""
        self._evictable.pop(member, None)

    def unprotect(self, member: Any) -> None:
        """The broker has closed its side."""
        self._evictable[member] = True

    def remove(self, member: Any) -> None:
        """It is closed, or it was a TLS handshake that is done."""
        self.count -= 1
        self._evictable.pop(member, None)

    def _evict(self) -> None:
        oldest: Any = None
        for oldest in self._evictable:
            break
        del self._evictable[oldest]
        self.counters.connections_evicted += 1
        oldest.abort()
