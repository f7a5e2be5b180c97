"""TLS handshakes: between a socket that accepts and the protocol of a client that speaks TLS.

The rule kept here: a connection becomes a client only when its handshake is done; one that fails, or takes too long,
costs one line of the log with its address and the reason, and is counted.

An asyncio server tells nobody of a handshake that failed, so connections are accepted here, one task each until its
handshake is done.
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

ACCEPTS = 100  # connections taken at once before anybody else gets a turn
RETRY = 1.0  # seconds until accepting is tried again when there was no file descriptor left


class Handshakes:
    """Accepts on ``sock``, which is its own, until `close`.

    ``context`` may be replaced and then holds for who comes next; ``new_client`` gives an
    asyncio protocol; ``timeout`` in seconds.
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
        self._stats = counters
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._listen()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Accept no one any more."""
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
            except OSError as error:  # a listening socket stays readable, and would be asked for ever
                log.error("event=accept_failed reason=%s", error.strerror)
                self._loop.remove_reader(self._sock)
                self._loop.call_later(RETRY, self._listen)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._shake_hands(sock, f"{address[0]}:{address[1]}"))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, sock: socket.socket, peer: str) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._new_client,
                sock,
                ssl=self.context,
                ssl_handshake_timeout=self._timeout,
                ssl_shutdown_timeout=CLOSE_TIMEOUT,
            )
        except OSError as error:
            self._stats.tls_failures += 1
            log.info("event=refused client=%s address=%s reason=%s", "", peer, f"TLS handshake: {reason_of(error)}")


def reason_of(error: OSError) -> str:
    """Why a handshake failed, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    if isinstance(error, ConnectionAbortedError):
        return "not done in time"
    return "closed by the client"
