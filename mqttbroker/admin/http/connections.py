"""The connections of the HTTP server: a bounded number, of which those that wait for their client give way to new ones."""

from __future__ import annotations

import asyncio
import sys


class HttpConnections:
    """At most ``maximum`` open connections; one without a request for ``idle_timeout`` seconds is closed.

    A client that still receives an answer is idle only if it took no byte in that time. If there are too many, the one
    that has waited longest for a request, or for the body of one, is closed.
    """

    def __init__(self, maximum: int, idle_timeout: float) -> None:
        self.maximum = maximum
        self.idle_timeout = idle_timeout
        # The timer of each connection that waits for its client, the longest first; None while it has a request.
        self._open: dict[asyncio.Transport, asyncio.TimerHandle | None] = {}

    def opened(self, transport: asyncio.Transport) -> None:
        """A connection was accepted; it, or another one in its place, is closed if there are too many."""
        if len(self._open) >= self.maximum:
            self._forget_closed()
        if len(self._open) >= self.maximum:
            idle = next((found for found, timer in self._open.items() if timer is not None), None)
            (idle or transport).abort()
            if idle is None:
                return
            self._remove(idle)
        self._idle(transport)

    def request_started(self, transport: asyncio.Transport) -> None:
        timer = self._open.get(transport)
        if timer is not None:
            timer.cancel()
            self._open[transport] = None

    def body_awaited(self, transport: asyncio.Transport) -> None:
        """The body of a request is to come: until `body_received` the connection may be closed for a new one."""
        if transport in self._open:
            self._remove(transport)
            self._idle(transport)

    def body_received(self, transport: asyncio.Transport) -> None:
        self.request_started(transport)

    def request_ended(self, transport: asyncio.Transport) -> None:
        if transport in self._open:
            self._remove(transport)
            if not transport.is_closing():
                self._idle(transport)

    def close_idle(self) -> None:
        """Close the connections without a request."""
        for transport in [found for found, timer in self._open.items() if timer is not None]:
            self._remove(transport)
            transport.close()

    def _idle(self, transport: asyncio.Transport, unsent: int = sys.maxsize) -> None:
        """Close the connection later; ``unsent`` bytes of answers wait for its client, as far as is known."""
        self._open[transport] = asyncio.get_running_loop().call_later(self.idle_timeout, self._time_out, transport, unsent)

    def _time_out(self, transport: asyncio.Transport, before: int) -> None:
        unsent = transport.get_write_buffer_size()
        if 0 < unsent < before:
            self._idle(transport, unsent)
            return
        self._remove(transport)
        if unsent:
            transport.abort()  # `close` would wait for the client without end
        else:
            transport.close()

    def _remove(self, transport: asyncio.Transport) -> None:
        timer = self._open.pop(transport)
        if timer is not None:
            timer.cancel()

    def _forget_closed(self) -> None:
        for transport in [found for found in self._open if found.is_closing()]:
            self._remove(transport)
