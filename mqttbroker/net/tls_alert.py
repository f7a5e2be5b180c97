"""The alert that ends a failed TLS handshake (RFC 8446, section 6.2; RFC 5246, section 7.2.2).

OpenSSL writes it, but asyncio and uvloop close the socket without sending it. `AlertContext` takes it from OpenSSL, and
the acceptor of the socket sends it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from contextvars import ContextVar
from typing import Any


class Alert:
    """The alert of one handshake on ``sock``. To be made in the task that begins the handshake, whose context the
    handshake has."""

    def __init__(self, sock: socket.socket) -> None:
        self._data = b""
        self._handshaking: socket.socket | None = sock
        self._copy: socket.socket | None = None  # the event loop closes the socket itself
        _CURRENT.set(self)

    def failed(self, data: bytes) -> None:
        """The handshake has failed, and OpenSSL has written ``data``."""
        if data and self._handshaking is not None:
            try:
                self._copy = self._handshaking.dup()
            except OSError:
                return  # no file descriptor is left
            self._data = data

    def close(self) -> None:
        """The handshake has ended, and an alert was sent."""
        self._handshaking = None
        if self._copy is not None:
            self._copy.close()

    async def send(self, timeout: float) -> None:
        """Send the alert if there is one, and wait up to ``timeout`` seconds until the client closes the connection.

        If the socket were closed at once, the kernel would answer the client's next bytes with a reset, and the client
        would lose the alert.
        """
        sock = self._copy
        if sock is None:
            return
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the client is gone, or stays too long
            sock.send(self._data)
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(timeout):
                while await loop.sock_recv(sock, 65536):
                    pass


_CURRENT: ContextVar[Alert | None] = ContextVar("alert", default=None)


class _AlertObject(ssl.SSLObject):
    """An `ssl.SSLObject` that hands the alert of a failed handshake to the `Alert`."""

    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            alert = _CURRENT.get()
            if alert is not None:
                alert.failed(self.outgoing.read())
            raise


class AlertContext(ssl.SSLContext):
    """An `ssl.SSLContext` whose failed handshakes have an `Alert`."""

    sslobject_class = _AlertObject

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **names: Any) -> Any:
        wrapped: Any = super().wrap_bio(incoming, outgoing, *args, **names)
        wrapped.outgoing = outgoing
        return wrapped
