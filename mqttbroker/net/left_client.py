"""The transport of a client that has left although not all that it sent has been handled."""

from __future__ import annotations

import os
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mqttbroker.net.wire import Wire

READ_AT_ONCE: Final = 16_384  # bytes
LEFT_BYTES: Final = 4_194_304  # that are read after a connection was lost: of one client, or of all that a link has not sent

KEPT: Final = ("ssl_object", "peercert", "worker")  # what is known of a client whose login is not decided yet


def unread(transport: Any, limit: int) -> bytes:
    """What a client sent before its connection was lost and ``transport`` has not delivered, ``limit`` bytes at most.

    For use in ``connection_lost``: a transport whose write fails reads no more.
    """
    if hasattr(transport, "unread"):
        data: bytes = transport.unread(limit)
        return data
    sock = transport.get_extra_info("socket")
    return b"" if sock is None else read_rest(sock.fileno(), limit)


def read_rest(descriptor: int, limit: int) -> bytes:
    """The bytes that wait in a socket, ``limit`` at most."""
    pieces: list[bytes] = []
    size = 0
    try:
        while size < limit:
            piece = os.read(descriptor, min(READ_AT_ONCE, limit - size))
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
    except OSError:  # there are no more, or the connection was reset
        pass
    return b"".join(pieces)


def last_bytes(transport: Any, descriptor: int) -> bytes | None:
    """Up to `READ_AT_ONCE` bytes of a client that has closed its side and is not read; TLS is decrypted, WebSocket is not.

    Empty if there are no more. None if ``transport`` itself is about to receive them.
    """
    tls = transport.get_extra_info("ssl_object")
    try:
        if tls is None:
            return os.read(descriptor, READ_AT_ONCE)
        data: bytes = tls.read(READ_AT_ONCE)
        return data
    except ssl.SSLWantReadError:  # nothing is held back from TLS
        return b"" if is_drained(descriptor) else None
    except OSError:  # the connection was reset, or TLS ended
        return b""


def is_drained(descriptor: int) -> bool:
    """Whether nothing that the peer of a socket sent waits to be read."""
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        try:
            return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # reset
            return True


class LeftClient:
    """Takes the place of the transport of a `Wire` whose socket is closed with ``error``, until the wire closes it.

    After ``timeout`` seconds it drops what is not handled.
    """

    def __init__(self, wire: Wire, transport: Any, error: Any, timeout: float) -> None:
        self._wire: Wire | None = wire
        self._error = error
        # Not the transport itself, whose buffers would stay.
        self._info = {name: transport.get_extra_info(name) for name in KEPT}
        self._timer = wire.endpoint.scheduler.loop.call_later(timeout, wire.abort)

    def get_extra_info(self, name: str) -> Any:
        return self._info.get(name)

    def write(self, data: bytes) -> None:
        """Drop it."""

    def writelines(self, parts: list[bytes]) -> None:
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
            self._timer.cancel()
            wire.endpoint.scheduler.loop.call_soon(lambda: wire.connection_lost(self._error))
