"""The local end of a bridge: the transport of the `Wire` of its client, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mqttbroker.net.wire import Wire


class Owner(Protocol):
    """The owner of a local client, which takes what the broker sends to it."""

    def local_wrote(self, data: bytes) -> None:
        """The broker has sent bytes. Nothing may be delivered to the client in this call."""

    def local_reading_changed(self) -> None:
        """`LocalTransport.reading` has changed."""

    def local_lost(self) -> None:
        """The broker has closed the client's connection."""

    @property
    def unsent(self) -> int:
        """Bytes that were written and not sent."""


class LocalTransport:
    """What `Wire` uses of an asyncio transport. ``call_soon`` is that of the event loop."""

    def __init__(self, owner: Owner, call_soon: Callable[..., Any], peer: str) -> None:
        self.reading = True
        self.wire: Wire | None = None
        self._owner = owner
        self._call_soon = call_soon
        self._peer = peer
        self._closed = False

    def open(self, wire: Wire) -> None:
        self.wire = wire
        wire.connection_made(self)

    def lose(self, reason: str) -> None:
        """The remote is gone: so is the client."""
        wire, self.wire = self.wire, None
        self._closed = True
        if wire is not None:
            wire.connection_lost(reason or None)

    # -- an asyncio transport -----------------------------------------------------

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._owner.local_wrote(data)

    def writelines(self, parts: list[Any]) -> None:
        self.write(b"".join(parts))

    def get_write_buffer_size(self) -> int:
        return self._owner.unsent

    def pause_reading(self) -> None:
        self.reading = False
        self._owner.local_reading_changed()

    def resume_reading(self) -> None:
        self.reading = True
        self._owner.local_reading_changed()

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._call_soon(self._lost)

    def _lost(self) -> None:
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.connection_lost(None)
            self._owner.local_lost()

    def get_extra_info(self, name: str) -> Any:
        return self._peer if name == "peername" else None
