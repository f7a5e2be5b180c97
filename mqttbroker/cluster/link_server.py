"""Links between the processes of a cluster: TCP, with TLS and certificates of both sides, and one line of JSON from each
before the link's own protocol begins.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Optional

import msgspec

log = logging.getLogger("mqttbroker.cluster")

PROTOCOL: Final = 1  # version of the links
MAX_LINE: Final = 16_384  # bytes of a first line
GREETING_TIMEOUT: Final = 5.0  # seconds from the connection to the end of the first line
MAX_GREETING: Final = 256  # connections whose first line is awaited; one more closes the oldest
MAX_CLOCK_DIFFERENCE: Final = 1.0  # seconds
KEEP_ALIVE_SECONDS: Final = 2  # without traffic until TCP asks whether the other side is there
REFUSAL_INTERVAL: Final = 60.0  # seconds between two log lines on the same reason for the same address
MAX_REFUSALS: Final = 256  # addresses and reasons in that time with a line of their own
LOST_AFTER_MS: Final = 6_000  # without an answer of TCP, until the link is closed

WORKER: Final = "worker"
CORE: Final = "core"


class LinkRefused(OSError):
    """The other side refuses the link; the text is its reason."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the side that connects.

    ``cluster`` is the id of the cluster in hexadecimal, ``kind`` `WORKER` or `CORE`, ``node`` the name of its node, ``from_shard`` the shard of a core,
    ``shard`` the one whose core is meant, ``listeners`` the names of the listeners of a worker, ``now`` Unix seconds (set by
    `connect_link`), ``digest`` of the settings that must be the same on all nodes.
    """

    protocol: int = PROTOCOL
    cluster: str
    kind: str
    node: str
    from_shard: Optional[int] = None
    shard: int
    version: str
    listeners: tuple[str, ...] = ()
    now: float = 0.0
    digest: str = ""


class _Answer(msgspec.Struct, omit_defaults=True):
    ok: bool = False
    error: str = ""


_encode = msgspec.json.encode
_decode_hello = msgspec.json.Decoder(Hello).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


def server_context(cafile: Optional[Path], certfile: Optional[Path], keyfile: Optional[Path]) -> Optional[ssl.SSLContext]:
    """The TLS context of a `LinkServer`; None without a certificate. Raises OSError or `ssl.SSLError` for a file that cannot
    be used."""
    return _context(ssl.PROTOCOL_TLS_SERVER, cafile, certfile, keyfile)


def client_context(cafile: Optional[Path], certfile: Optional[Path], keyfile: Optional[Path]) -> Optional[ssl.SSLContext]:
    """The TLS context for `connect_link`; None without a certificate. As `server_context`."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, cafile, certfile, keyfile)


def _context(
    protocol: int, cafile: Optional[Path], certfile: Optional[Path], keyfile: Optional[Path]
) -> Optional[ssl.SSLContext]:
    if certfile is None:
        return None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # a certificate of this authority makes a member, wherever it is
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certfile, keyfile)
    context.load_verify_locations(cafile)
    return context


def difference(theirs: Hello, cluster: str, shard: int, digest: str, listeners: frozenset[str]) -> str:
    """Why the core of ``shard`` cannot have a link with this first line; "" if it can."""
    if theirs.cluster != cluster:
        return f"node {theirs.node} is of the cluster {theirs.cluster}, this one of {cluster}"
    if theirs.shard != shard:
        return f"node {theirs.node} asks for shard {theirs.shard}, this is shard {shard}"
    if theirs.digest != digest:
        return f"node {theirs.node} has other settings of listeners, streams or limits: all nodes need the same ones"
    missing = sorted(frozenset(theirs.listeners) - listeners)
    if missing:
        return f"node {theirs.node} has listeners that are not in the settings here: {', '.join(missing)}"
    return ""


class RefusalLog:
    """Logs refused links: one line per address and reason in `REFUSAL_INTERVAL`, with the number of those since the last one."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[float, int]] = {}  # the time of the last line, and those refused since

    def refused(self, address: str, reason: str, now: float) -> None:
        """``now`` is monotonic time in seconds."""
        key = (address, reason)
        if key not in self._last and len(self._last) >= MAX_REFUSALS:
            self._last = {one: last for one, last in self._last.items() if now - last[0] < REFUSAL_INTERVAL}
            if len(self._last) >= MAX_REFUSALS:
                return
        logged, count = self._last.get(key, (now - REFUSAL_INTERVAL, 0))
        count += 1
        if now - logged < REFUSAL_INTERVAL:
            self._last[key] = (logged, count)
            return
        self._last[key] = (now, 0)
        log.warning("event=link_refused address=%s count=%d reason=%s", address, count, reason)


class LinkServer:
    """Accepts links at ``host`` and ``port``, with TLS if there is a context ``tls``.

    ``check`` returns why a link with this first line is refused, or "". ``protocols`` makes the asyncio protocol of an
    accepted one, by its kind; it gets the bytes behind the first line.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: Optional[ssl.SSLContext],
        check: Callable[[Hello], str],
        protocols: Mapping[str, Callable[[Hello], Any]],
    ) -> None:
        self.port = port  # the one in use after `start`
        self.refused = 0
        self._host = host
        self._tls = tls
        self._check = check
        self._protocols = protocols
        self._server: Optional[asyncio.AbstractServer] = None
        self._greeting: dict[_Greeted, bool] = {}  # oldest first
        self._refusals = RefusalLog()

    async def start(self) -> None:
        """Listen. Raises OSError with the address and the reason."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Greeted(self), self._host, self.port, ssl=self._tls)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"cluster: cannot listen for links on {self._host}:{self.port}: {reason}") from None
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Accept no more links; those that are open stay."""
        if self._server is not None:
            self._server.close()
        for greeted in list(self._greeting):
            greeted.abort()

    # -- for `_Greeted` ---------------------------------------------------------

    def refuse(self, address: str, reason: str) -> None:
        """Count and log a refused link."""
        self.refused += 1
        self._refusals.refused(address, reason, asyncio.get_running_loop().time())

    def began(self, greeted: _Greeted) -> None:
        if len(self._greeting) >= MAX_GREETING:
            next(iter(self._greeting)).abort()
        self._greeting[greeted] = True

    def ended(self, greeted: _Greeted) -> None:
        self._greeting.pop(greeted, None)

    def accept(self, line: bytes) -> tuple[Any, str]:
        """The protocol for a link with this first line, or why it is refused."""
        try:
            hello = _decode_hello(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return None, f"not a first line: {error}"
        if hello.protocol != PROTOCOL:
            return None, f"node {hello.node} has version {hello.protocol} of the links, this one has {PROTOCOL}"
        if hello.kind not in self._protocols:
            return None, f"node {hello.node}: no links of the kind {hello.kind!r}"
        reason = self._check(hello)
        if reason:
            return None, reason
        apart = hello.now - time.time()
        if abs(apart) > MAX_CLOCK_DIFFERENCE:
            log.warning("event=clocks_apart node=%s seconds=%.1f", hello.node, apart)
        return self._protocols[hello.kind](hello), ""


class _Greeted(asyncio.Protocol):
    """An accepted connection until its first line is there."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self._transport: Any = None
        self._line = b""
        self._timeout: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        _keep_alive(transport)
        self._server.began(self)
        self._timeout = asyncio.get_running_loop().call_later(GREETING_TIMEOUT, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._timeout is None:
            return  # refused
        self._line += data
        line, end, rest = self._line.partition(b"\n")
        if not end:
            if len(line) > MAX_LINE:
                self._refuse("the first line is too long")
            return
        protocol, reason = self._server.accept(line)
        if reason:
            self._refuse(reason)
            return
        self._done()
        self._transport.write(_encode(_Answer(ok=True)) + b"\n")
        _hand_over(self._transport, protocol, rest)

    def _refuse(self, reason: str) -> None:
        peer = self._transport.get_extra_info("peername")
        self._server.refuse(peer[0] if peer else "", reason)
        self._done()
        self._transport.write(_encode(_Answer(error=reason)) + b"\n")
        self._transport.close()

    def _done(self) -> None:
        self._server.ended(self)
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def connection_lost(self, error: Optional[Exception]) -> None:
        self._done()

    def abort(self) -> None:
        self._done()
        self._transport.abort()


class _Greeting(asyncio.Protocol):
    """A connection to a `LinkServer` until its answer is there; ``rest`` is what came behind it."""

    def __init__(self, first: bytes) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.rest = b""
        self.lost = False
        self._first = first
        self._transport: Any = None
        self._line = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        _keep_alive(transport)
        transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        if self.answered.done():
            self.rest += data
            return
        self._line += data
        line, end, rest = self._line.partition(b"\n")
        if not end and len(line) <= MAX_LINE:
            return
        try:
            answer = _decode_answer(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            answer = _Answer(error="the answer to the first line is none")
        if not answer.ok:
            self.answered.set_exception(LinkRefused(answer.error))
            self._transport.abort()
            return
        self.rest = rest
        self.answered.set_result(None)

    def connection_lost(self, error: Optional[Exception]) -> None:
        self.lost = True
        if not self.answered.done():
            self.answered.set_exception(OSError(str(error) if error else "closed before its answer"))


async def connect_link(
    host: str, port: int, tls: Optional[ssl.SSLContext], hello: Hello, protocol: Any, timeout: float = GREETING_TIMEOUT
) -> Any:
    """Open a link; returns its transport, which has called ``protocol.connection_made``.

    Raises OSError if there is no link within ``timeout`` seconds, `LinkRefused` if the other side wants none.
    """
    loop = asyncio.get_running_loop()
    line = _encode(msgspec.structs.replace(hello, now=time.time())) + b"\n"
    transport: Any = None
    done = False
    try:
        async with asyncio.timeout(timeout):
            transport, greeting = await loop.create_connection(lambda: _Greeting(line), host, port, ssl=tls)
            await greeting.answered
        if greeting.lost:
            raise OSError("closed behind its answer")
        # Not before: if this task is cancelled, uvloop may close the transport without `connection_lost`.
        _hand_over(transport, protocol, greeting.rest)
        done = True
    except TimeoutError:
        raise OSError(f"no answer in {timeout:g} s") from None
    finally:
        if not done and transport is not None:
            transport.abort()
    return transport


def _hand_over(transport: Any, protocol: Any, rest: bytes) -> None:
    """Have another protocol from here on, which gets the bytes that came behind the first line."""
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    if rest:
        protocol.data_received(rest)


def _keep_alive(transport: Any) -> None:
    """Have TCP notice that the other machine is gone, or cannot be reached."""
    sock = transport.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_MS)
