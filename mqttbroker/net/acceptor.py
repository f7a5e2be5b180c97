"""Accepts connections with a task for each until its protocol has a transport, which is after the handshake with TLS.

A failed handshake is logged with address and reason, and counted: an asyncio server would not report it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any, Callable, Optional

from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.wire import CLOSE_TIMEOUT
from sessions.counters import Counters

log = logging.getLogger("mqttbroker")

ACCEPTS = 100  # connections accepted per iteration of the event loop
RETRY = 1.0  # seconds until the next attempt if there was no file descriptor left


class Acceptor:
    """Accepts connections on ``sock``, which it owns, until `close`.

    With ``context`` they speak TLS; it may be replaced, for later connections. ``new_client`` creates an asyncio protocol,
    and ``on_open`` is called with the transport when it has one. ``timeout`` of a handshake is in seconds. Unfinished
    handshakes count in ``sockets``.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: Optional[ssl.SSLContext],
        timeout: float,
        new_client: Callable[[], Any],
        counters: Counters,
        sockets: Optional[OpenSockets] = None,
        on_open: Optional[Callable[[asyncio.Transport], None]] = None,
    ) -> None:
        self.context = context
        self._sock = sock
        self._timeout = timeout
        self._new_client = new_client
        self._counters = counters
        self._sockets = sockets
        self._on_open = on_open
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._listen()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Stop accepting."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # the listening socket would stay readable
                log.error("event=accept_failed reason=%s", error.strerror)
                self._loop.remove_reader(self._sock)
                self._loop.call_later(RETRY, self._listen)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._open(sock, f"{address[0]}:{address[1]}"))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self, sock: socket.socket, peer: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        handshake = _Handshake(task)
        if self._sockets is not None and not self._sockets.add(handshake):
            sock.close()
            return
        try:
            transport = await self._connect(sock)
        except OSError as error:
            self._counters.tls_failures += 1
            log.info("event=refused client=%s address=%s reason=%s", "", peer, f"TLS handshake: {reason_of(error)}")
        except asyncio.CancelledError:
            if not handshake.evicted:
                raise
        else:
            if self._on_open is not None:
                self._on_open(transport)
        finally:
            if self._sockets is not None:
                self._sockets.remove(handshake)

    async def _connect(self, sock: socket.socket) -> asyncio.Transport:
        tls: dict[str, Any] = {}
        if self.context is not None:
            tls = {"ssl": self.context, "ssl_handshake_timeout": self._timeout, "ssl_shutdown_timeout": CLOSE_TIMEOUT}
        transport, _ = await self._loop.connect_accepted_socket(self._new_client, sock, **tls)
        return transport


class _Handshake:
    """An unfinished handshake as a member of `OpenSockets`."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.evicted = False

    def abort(self) -> None:
        self.evicted = True
        self.task.cancel()


def reason_of(error: OSError) -> str:
    """The reason of a failed handshake, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    if isinstance(error, ConnectionAbortedError):
        return "not done in time"
    return "closed by the client"
