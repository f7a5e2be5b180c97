"""Accepts connections with a task for each until its protocol has a transport: after the header of a proxy, if there is
one, and the handshake with TLS.

A failed handshake is logged with address and reason, and counted: an asyncio server would not report it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.proxied_sockets import ProxiedPeer, ProxiedSockets
from mqttbroker.net.proxy_protocol import ProxyHeaderError
from mqttbroker.net.tls_alert import Alert
from mqttbroker.net.wire import CLOSE_TIMEOUT, peer_text
from sessions.counters import Counters

log = logging.getLogger("mqttbroker.network")

ACCEPTS = 100  # connections accepted per iteration of the event loop
TLS_READ_BUFFER = 1  # bytes that wait for decryption, from which on nothing more is read: TLS drops them when the client closes
RETRY = 1.0  # seconds until the next attempt if there was no file descriptor left


class Handshake:
    """An unfinished handshake, with the header of a proxy before it: a member of `OpenSockets` and `HalfOpen`."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.evicted = False
        self.limited = False  # in `ListenerPolicy.half_open`

    def abort(self) -> None:
        self.evicted = True
        self.task.cancel()


class Admission(Protocol):
    """Decides which accepted sockets may begin a handshake, and is told of those that fail."""

    def begin(self, handshake: Handshake) -> bool:
        """Count an accepted socket; false if there is no room, and it has to be closed. Else `end` follows."""

    async def admit(self, handshake: Handshake, address: str) -> bool:
        """Whether the client of this address may begin the handshake; if not, its socket has to be closed."""

    def end(self, handshake: Handshake) -> None:
        """It is done, or has failed."""

    def header_failed(self, address: str, reason: str) -> None:
        """A proxy sent no valid header."""

    def handshake_failed(self, handshake: Handshake, address: str, reason: str) -> None:
        """TLS could not be agreed on."""


class LocalAdmission:
    """The admission to a listener of this process. An `Admission`.

    Handshakes, each an object like `Handshake`, count in ``sockets`` and, with a ``policy``, by its limits of half-open
    connections. ``refusal`` gives the reason, or "", why the connection of an address is closed before the handshake.
    ``name`` is the listener's in the log.
    """

    def __init__(
        self,
        name: str,
        counters: Counters,
        sockets: OpenSockets,
        policy: ListenerPolicy | None = None,
        refusal: Callable[[str], str] | None = None,
    ) -> None:
        self._name = name
        self._counters = counters
        self._sockets = sockets
        self._policy = policy
        self._refusal = refusal

    def begin(self, handshake: Any) -> bool:
        return self._sockets.add(handshake)

    async def admit(self, handshake: Handshake, address: str) -> bool:
        return self.admits(handshake, address)

    def admits(self, handshake: Any, address: str) -> bool:
        """`admit` at once."""
        reason = "" if self._refusal is None else self._refusal(address)
        if reason:
            log_refused(self._name, address, reason)
            return False
        if self._policy is not None:
            handshake.limited = self._policy.limit_half_open(handshake, address)
        return True

    def end(self, handshake: Any) -> None:
        self._sockets.remove(handshake)
        if handshake.limited and self._policy is not None:
            self._policy.half_open.remove(handshake)

    def header_failed(self, address: str, reason: str) -> None:
        self._counters.proxy_failures += 1
        log_refused(self._name, address, f"PROXY header: {reason}")

    def handshake_failed(self, handshake: Any, address: str, reason: str) -> None:
        self._counters.tls_failures += 1
        log_refused(self._name, address, f"TLS handshake: {reason}")


def log_refused(listener: str, address: str, reason: str) -> None:
    """Log a connection that was closed before it had a client."""
    log.info("event=refused client=%s address=%s reason=%s user=%s listener=%s", "", address, reason, "", listener)


class Acceptor:
    """Accepts connections on ``sock``, which it owns, until `close`.

    With ``context`` they speak TLS; it may be replaced, for later connections, and so may ``timeout``. With ``proxied``
    they begin with a PROXY protocol header. ``new_client`` creates an asyncio protocol for a peer, None = the one of
    the socket, and ``on_open`` is called with the transport when it has one. ``timeout`` of a header, and of a
    handshake, is in seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        timeout: float,
        new_client: Callable[[ProxiedPeer | None, Handshake], Any],
        admission: Admission,
        proxied: ProxiedSockets | None = None,
        on_open: Callable[[asyncio.Transport], None] | None = None,
    ) -> None:
        self.context = context
        self.timeout = timeout
        self._sock = sock
        self._new_client = new_client
        self._admission = admission
        self._proxied = proxied
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
            task = self._loop.create_task(self._open(sock, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self, sock: socket.socket, address: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        handshake = Handshake(task)
        if not self._admission.begin(handshake):
            sock.close()
            return
        try:
            await self._open_as(sock, address, handshake)
        except asyncio.CancelledError:
            if not handshake.evicted:
                raise
        finally:
            self._admission.end(handshake)

    async def _open_as(self, sock: socket.socket, address: Any, handshake: Handshake) -> None:
        """Give the socket a transport, as that of the client behind the proxy if there is one."""
        peer: ProxiedPeer | None = None
        if self._proxied is not None:
            peer = await self._read_header(self._proxied, sock, address)
            if peer is None:
                return
        shown = peer_text(address) if peer is None else peer.address
        admitted = False
        try:
            admitted = await self._admission.admit(handshake, shown)
        finally:
            if not admitted:
                sock.close()
        if not admitted:
            return
        context = self.context
        tls: dict[str, Any] = {}
        if context is not None:
            tls = {"ssl": context, "ssl_handshake_timeout": self.timeout, "ssl_shutdown_timeout": CLOSE_TIMEOUT}
        alert = Alert(sock)
        transport: Any
        try:
            transport, _ = await self._loop.connect_accepted_socket(lambda: self._new_client(peer, handshake), sock, **tls)
        except OSError as error:
            self._admission.handshake_failed(handshake, shown, reason_of(error))
            await alert.send(CLOSE_TIMEOUT)
            return
        finally:
            alert.close()
        if context is not None:
            transport.set_read_buffer_limits(TLS_READ_BUFFER)
        if self._on_open is not None:
            self._on_open(transport)

    async def _read_header(self, proxied: ProxiedSockets, sock: socket.socket, address: Any) -> ProxiedPeer | None:
        """The peer in the proxy's header; None if there is no valid header in time, and the socket is closed."""
        peer: ProxiedPeer | None = None
        try:
            async with asyncio.timeout(self.timeout):
                peer = await proxied.read_header(sock, address)
        except (OSError, ProxyHeaderError) as error:
            reason = "not received in time" if isinstance(error, TimeoutError) else str(error)
            self._admission.header_failed(peer_text(address), reason)
        finally:
            if peer is None:
                sock.close()
        return peer


def reason_of(error: OSError) -> str:
    """The reason of a failed handshake, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    if isinstance(error, ConnectionAbortedError):
        return "not done in time"
    return "closed by the client"
