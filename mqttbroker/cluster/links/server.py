"""Links between the processes of a cluster: TCP, with TLS and certificates of both sides, and lines of JSON before the link's own protocol
begins: the side that connects sends a `Hello`, gets a nonce, proves that it knows the key of the accepting node (`keys`), and gets
the other side's proof, or why there is no link.

A connection is half-open until its proof is there. Half-open ones cost their sender nothing, so they are bounded in number, bytes and time.
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
from typing import Any, Final

import msgspec

from mqttbroker.cluster.formats import SPOKEN, Versions
from mqttbroker.cluster.links.keys import key_of, new_nonce, proof, proves
from mqttbroker.net.acceptor import Acceptor, Handshake
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.listeners import BACKLOG, tcp_sockets
from mqttbroker.net.passed_sockets import PassedSockets
from mqttbroker.net.proxied_sockets import ProxiedPeer

log = logging.getLogger("mqttbroker.cluster")

MAX_LINE: Final = 16_384  # bytes of a line before a link begins
GREETING_TIMEOUT: Final = 5.0  # seconds for the TLS handshake, and again for the lines before a link begins
MAX_HALF_OPEN: Final = 128  # half-open links; one more closes the oldest
MAX_CLOCK_DIFFERENCE: Final = 1.0  # seconds
KEEP_ALIVE_SECONDS: Final = 2  # without traffic until TCP asks whether the other side is there
REFUSAL_INTERVAL: Final = 60.0  # seconds between two log lines on the same reason for the same address
MAX_REFUSALS: Final = 256  # addresses and reasons in that time with a line of their own
STRANGERS_INTERVAL: Final = 1.0  # seconds between two log lines on connections that have not proved to be of the cluster
LOST_AFTER_MS: Final = 6_000  # without an answer of TCP, until the link is closed

WORKER: Final = "worker"
CORE: Final = "core"

CONNECTS: Final = "connects"  # sides of a link, in proofs
ACCEPTS: Final = "accepts"


class LinkRefused(OSError):
    """The other side refuses the link; the text is its reason."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the side that connects.

    ``protocol`` is the newest version that it speaks, ``oldest`` the oldest one; the link's version is the newest one of both sides.
    ``cluster`` is the id of the cluster in hexadecimal, ``kind`` `WORKER` or `CORE`, ``node`` the name of its node, ``from_shard`` the shard of a core,
    ``shard`` the one whose core is meant, ``listeners`` the names of the listeners of a worker, ``now`` Unix seconds (set by
    `connect_link`, as ``nonce`` is), ``digest`` of the settings that must be the same on all nodes.
    """

    protocol: int = SPOKEN.newest
    oldest: int = SPOKEN.oldest
    cluster: str
    kind: str
    node: str
    from_shard: int | None = None
    shard: int
    version: str
    listeners: tuple[str, ...] = ()
    now: float = 0.0
    digest: str = ""
    nonce: str = ""


class _Proof(msgspec.Struct):
    """The second line of the side that connects."""

    proof: str


class _Answer(msgspec.Struct, omit_defaults=True):
    """A line of the side that accepts: first a nonce, then ``ok`` with its proof; or, in the place of either, an error."""

    nonce: str = ""
    ok: bool = False
    error: str = ""
    proof: str = ""


_encode = msgspec.json.encode
_decode_hello = msgspec.json.Decoder(Hello).decode
_decode_proof = msgspec.json.Decoder(_Proof).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


def server_context(cafile: Path | None, certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """The TLS context of a `LinkServer`; None without a certificate. Raises OSError or `ssl.SSLError` for a file that cannot
    be used."""
    return _context(ssl.PROTOCOL_TLS_SERVER, cafile, certfile, keyfile)


def client_context(cafile: Path | None, certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """The TLS context for `connect_link`; None without a certificate. As `server_context`."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, cafile, certfile, keyfile)


def _context(protocol: int, cafile: Path | None, certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
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


class StrangersLog:
    """Logs connections that have not proved to be of the cluster: a line in `STRANGERS_INTERVAL`, with the number of those since the last
    one. Addresses and reasons are the last one's, for who has no key may have many of both."""

    def __init__(self) -> None:
        self._logged = -STRANGERS_INTERVAL
        self._count = 0

    def refused(self, address: str, reason: str, now: float) -> None:
        """``now`` is monotonic time in seconds."""
        self._count += 1
        if now - self._logged >= STRANGERS_INTERVAL:
            log.warning("event=link_refused address=%s count=%d reason=%s", address, self._count, reason)
            self._logged = now
            self._count = 0


class LinkServer:
    """Accepts links at ``host`` and ``port``, with TLS if there is a context ``tls``, from those who know the node's ``key``.

    ``check`` returns why a link with this first line is refused, or "". ``protocols`` makes the asyncio protocol of an
    accepted one, by its kind; it gets the bytes behind the lines.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        key: str,
        check: Callable[[Hello], str],
        protocols: Mapping[str, Callable[[Hello], Any]],
    ) -> None:
        self.port = port  # the one in use after `start`
        self.refused = 0
        self._host = host
        self._tls = tls
        self._key = key
        self._check = check
        self._protocols = protocols
        self._acceptors: list[Acceptor] = []
        self._half_open: dict[Any, bool] = {}  # `Handshake`s and `_Greeted`s, oldest first
        self._refusals = RefusalLog()
        self._strangers = StrangersLog()

    async def start(self) -> None:
        """Listen. Raises OSError with the address and the reason."""
        try:
            sockets = await tcp_sockets(self._host, self.port, PassedSockets({}))
            for sock, _ in sockets:
                sock.listen(BACKLOG)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"cluster: cannot listen for links on {self._host}:{self.port}: {reason}") from None
        self.port = sockets[0].sock.getsockname()[1]
        self._acceptors = [Acceptor(sock, self._tls, GREETING_TIMEOUT, self._greet, self) for sock, _ in sockets]

    def _greet(self, _: ProxiedPeer | None, handshake: Handshake) -> Any:
        return _Greeted(self, handshake)

    @property
    def half_open(self) -> int:
        """The number of connections that have not proved to be of the cluster."""
        return len(self._half_open)

    def close(self) -> None:
        """Accept no more links; those that are open stay."""
        for acceptor in self._acceptors:
            acceptor.close()
        for one in list(self._half_open):
            one.abort()

    # -- an `Admission` of the acceptors --------------------------------------------

    def begin(self, handshake: Any) -> bool:
        """Count a half-open link, in the place of the oldest if there are too many."""
        if len(self._half_open) >= MAX_HALF_OPEN:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            self.refuse_stranger("", f"{MAX_HALF_OPEN} later ones are half-open, too")
            oldest.abort()
        self._half_open[handshake] = True
        return True

    async def admit(self, handshake: Handshake, address: str) -> bool:
        return True

    def end(self, handshake: Any) -> None:
        """It is half-open no more."""
        self._half_open.pop(handshake, None)

    def header_failed(self, address: str, reason: str) -> None:
        """There is no proxy in front of links."""

    def handshake_failed(self, handshake: Handshake, address: str, reason: str) -> None:
        self.refuse_stranger(address, f"TLS handshake: {reason}")

    # -- for `_Greeted` ---------------------------------------------------------

    def refuse(self, address: str, reason: str) -> None:
        """Count and log a refused link of a process of the cluster."""
        self.refused += 1
        self._refusals.refused(address, reason, asyncio.get_running_loop().time())

    def refuse_stranger(self, address: str, reason: str) -> None:
        """Count and log a connection that has not proved to be of the cluster."""
        self.refused += 1
        self._strangers.refused(address, reason, asyncio.get_running_loop().time())

    def proof(self, given: str, hello: Hello, first: bytes, challenge: bytes) -> str:
        """The proof that answers ``given``; "" if that proves nothing."""
        key = key_of(self._key, hello.kind)
        return proof(key, ACCEPTS, first, challenge) if proves(given, key, CONNECTS, first, challenge) else ""

    def accept(self, hello: Hello) -> tuple[Any, str]:
        """The protocol for a link with this first line, or why it is refused."""
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
    """An accepted connection until it is a link."""

    def __init__(self, server: LinkServer, handshake: Handshake) -> None:
        self._server = server
        self._handshake = handshake
        self._transport: Any = None
        self._received = b""
        self._hello: Hello | None = None
        self._first = b""  # the line of the hello
        self._challenge = b""  # the line of its answer
        self._ended = False  # it is refused, or a link
        self._timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        _keep_alive(transport)
        self._server.end(self._handshake)
        self._server.begin(self)
        self._timeout = asyncio.get_running_loop().call_later(GREETING_TIMEOUT, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        received = self._received + data
        while not self._ended:
            line, end, rest = received.partition(b"\n")
            if len(line) > MAX_LINE:
                self._refuse_stranger("a line is too long")
                return
            if not end:
                self._received = line
                return
            received = rest
            if self._hello is None:
                self._take_hello(line)
            else:
                self._take_proof(self._hello, line, rest)

    def _take_hello(self, line: bytes) -> None:
        try:
            hello = _decode_hello(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._refuse_stranger(f"not a first line: {error}")
            return
        theirs = Versions(hello.oldest, hello.protocol)
        if SPOKEN.common(theirs) is None:
            self._refuse_stranger(f"node {hello.node} ({hello.version}) speaks {theirs} of the links, this one {SPOKEN}")
            return
        self._hello = hello
        self._first = line
        self._challenge = _encode(_Answer(nonce=new_nonce()))
        self._transport.write(self._challenge + b"\n")

    def _take_proof(self, hello: Hello, line: bytes, rest: bytes) -> None:
        given = ""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            given = _decode_proof(line).proof
        answer = self._server.proof(given, hello, self._first, self._challenge)
        if not answer:
            self._refuse_stranger("it does not know the key of this node, which is new at each start")
            return
        protocol, reason = self._server.accept(hello)
        if reason:
            self._server.refuse(self._address, reason)
            self._end(reason)
            return
        self._ended = True
        self._forget()
        self._transport.write(_encode(_Answer(ok=True, proof=answer)) + b"\n")
        _hand_over(self._transport, protocol, rest)

    @property
    def _address(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return peer[0] if peer else ""

    def _refuse_stranger(self, reason: str) -> None:
        self._server.refuse_stranger(self._address, reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        """Close, behind the reason. It is half-open until it is closed, at the latest when its time is over."""
        self._ended = True
        self._received = b""
        self._transport.write(_encode(_Answer(error=reason)) + b"\n")
        self._transport.close()

    def _forget(self) -> None:
        self._server.end(self)
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()

    def abort(self) -> None:
        self._ended = True
        self._forget()
        self._transport.abort()


class _Greeting(asyncio.Protocol):
    """A connection to a `LinkServer` until it is a link; ``rest`` is what came behind the lines."""

    def __init__(self, hello: bytes, key: str) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.rest = b""
        self.lost = False
        self._hello = hello
        self._key = key
        self._challenge = b""
        self._transport: Any = None
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        _keep_alive(transport)
        transport.write(self._hello + b"\n")

    def data_received(self, data: bytes) -> None:
        if self.answered.done():
            self.rest += data
            return
        line, end, rest = (self._received + data).partition(b"\n")
        self._received = line
        if end or len(line) > MAX_LINE:
            self._received = b""
            self._take_line(line, rest)

    def _take_line(self, line: bytes, rest: bytes) -> None:
        try:
            answer = _decode_answer(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            answer = _Answer(error="the answer to the first line is none")
        if answer.nonce and not self._challenge:
            self._challenge = line
            own = proof(self._key, CONNECTS, self._hello, line)
            self._transport.write(_encode(_Proof(own)) + b"\n")
            if rest:
                self.data_received(rest)
        elif not answer.ok:
            self._refuse(answer.error)
        elif not self._challenge or not proves(answer.proof, self._key, ACCEPTS, self._hello, self._challenge):
            self._refuse("what listens there does not know the key of its node")
        else:
            self.rest = rest
            self.answered.set_result(None)

    def _refuse(self, reason: str) -> None:
        self.answered.set_exception(LinkRefused(reason))
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if not self.answered.done():
            self.answered.set_exception(OSError(str(error) if error else "closed before its answer"))


async def connect_link(
    address: LinkAddress, tls: ssl.SSLContext | None, hello: Hello, protocol: Any, timeout: float = GREETING_TIMEOUT
) -> Any:
    """Open a link; returns its transport, which has called ``protocol.connection_made``.

    Raises OSError if there is no link within ``timeout`` seconds, `LinkRefused` if the other side wants none.
    """
    if not address.key:
        raise LinkRefused("the key of its node is not known")
    loop = asyncio.get_running_loop()
    line = _encode(msgspec.structs.replace(hello, now=time.time(), nonce=new_nonce()))
    transport: Any = None
    done = False
    try:
        async with asyncio.timeout(timeout):
            transport, greeting = await loop.create_connection(lambda: _Greeting(line, address.key), address.host, address.port, ssl=tls)
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
