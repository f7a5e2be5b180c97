"""The transport of a client that has left although not all that it sent has been handled."""

from __future__ import annotations

from typing import Any, List


class LeftClient:
    """Takes the place of the transport of a `Wire` whose socket is closed with ``error``, until the wire closes it."""

    def __init__(self, wire: Any, transport: Any, error: Any) -> None:
        self._wire = wire
        self._error = error
        self._tls = transport.get_extra_info("ssl_object")

    client_left = True

    def get_extra_info(self, name: str) -> Any:
        return self._tls if name == "ssl_object" else None

    def write(self, data: bytes) -> None:
        """Drop it."""

    def writelines(self, parts: List[bytes]) -> None:
        """Drop them."""

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """There is nothing to read."""

    def resume_reading(self) -> None:
        """There is nothing to read."""

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.endpoint.scheduler.loop.call_soon(lambda: wire.connection_lost(self._error))
