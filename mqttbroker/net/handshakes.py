"""Accepts TLS connections, with a task per handshake.

A protocol is created only after the handshake. A failed handshake is logged with address and reason, and counted: an
asyncio server would not report it, which is why connections are accepted here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any, Callable

from mqttbroker.net.wire import CLOSE_TIMEOUT
from sessions.counters import Counters

log = logging.getLogger("mqttbroker")

ACCEPTS = 100  # connections accepted per iteration of the event loop
RETRY = 1.0  # seconds until the next attempt if there was no file descriptor left


class Handshakes:
    """Accepts connections on ``sock``, which it owns, until `close`.

    ``context`` may be replaced, for later connections; ``new_client`` creates an asyncio protocol; ``timeout`` of a
    handshake in seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        timeout: float,
        new_client: Callable[[], Any],
        counters: Counters,
    ) -> None:
        self.context = context
        self._sock = sock
        self._timeout = timeout
        self._new_client = new_client
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._listen()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Stop accepting; open connections stay."""
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
            except OSError as error:  # the socket stays readable, so a retry at once would be a busy loop
                log.error("event=accept_failed reason=%s", error.strerror)
                self._loop.remove_reader(self._sock)
                self._loop.call_later(RETRY, self._listen)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._handshake(sock, f"{address[0]}:{address[1]}"))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handshake(self, sock: socket.socket, peer: str) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._new_client,
                sock,
                ssl=self.context,
                ssl_handshake_timeout=self._timeout,
                ssl_shutdown_timeout=CLOSE_TIMEOUT,
            )
        except OSError as error:
            self._counters.tls_failures += 1
            log.info("event=refused client=%s address=%s reason=%s", "", peer, f"TLS handshake: {reason_of(error)}")


def reason_of(error: OSError) -> str:
    """The reason of a failed handshake, as OpenSSL reports it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    if isinstance(error, ConnectionAbortedError):
        return "not done in time"
    return "closed by the client"
