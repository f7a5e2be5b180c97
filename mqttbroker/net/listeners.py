"""Listeners: the sockets on which clients are accepted.

A listener opens on all addresses of its host, or the start fails with one line that names the address and the reason.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import stat
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqttbroker.codec.reason_codes import IMPLEMENTATION_SPECIFIC_ERROR, NOT_AUTHORIZED
from mqttbroker.config.settings import Listener
from mqttbroker.core.client.connection import Connection
from mqttbroker.net.acceptor import Acceptor, Handshake, LocalAdmission
from mqttbroker.net.file_version import file_version
from mqttbroker.net.listener_policy import REFUSALS, ListenerPolicy
from mqttbroker.net.packet_log import PacketLog
from mqttbroker.net.packet_log import log as packet_log
from mqttbroker.net.passed_sockets import OWN, ListeningSocket, PassedSockets
from mqttbroker.net.proxied_sockets import ProxiedPeer, ProxiedSockets
from mqttbroker.net.shared_admission import SharedAdmission
from mqttbroker.net.tls import FileProblem, ListenerContext, server_context
from mqttbroker.net.tls_transport import TlsClient
from mqttbroker.net.wire import Endpoint, Wire
from mqttbroker.net.worker_setup import ListenerSetup

if TYPE_CHECKING:
    from mqttbroker.net.revocation import RevocationLists, RevokedCertificates

log = logging.getLogger("mqttbroker.network")

BACKLOG = 4096  # connections that the kernel queues until they are accepted
SWEPT = 50  # connections whose certificates are checked in one iteration of the event loop
_EVERYWHERE = ("", "*", "::")
_SAME_PORT_TRIES = 10
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def new_client_id() -> str:
    """A client id for a CONNECT with an empty one."""
    return f"auto-{uuid.uuid4()}"


def defect(connection: Connection) -> None:
    """Log the current exception, a bug of the broker, and close the connection that it occurred in."""
    log.exception("event=defect client=%s address=%s", connection.client_id, connection.peer)
    connection.disconnect(IMPLEMENTATION_SPECIFIC_ERROR, "internal error")


class OpenListener:
    """The sockets of a listener, from `open` to `close`. With ``workers`` others accept on them.

    ``shared`` is what it has in common with the other listeners.
    """

    def __init__(
        self,
        listener: Listener,
        listener_policy: ListenerPolicy,
        shared: SharedAdmission,
        workers: bool = False,
    ) -> None:
        self.workers = workers
        self.listener = listener
        self.listener_policy = listener_policy
        self.shared = shared
        self.secure = secure = listener.type in ("tls", "wss")
        self.websocket = websocket = listener.type in ("ws", "wss")
        self._endpoint: Endpoint | None = None
        if shared.scheduler is not None:
            self._endpoint = Endpoint(shared.scheduler, listener_policy, shared.sockets, new_client_id, defect, secure, websocket)
        self._sockets: list[ListeningSocket] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._acceptors: list[Acceptor] = []
        self._inode: tuple[int, int] | None = None
        self._context: ListenerContext | None = None
        self._crl_version: tuple[int, int, int] | None = None
        self.refresh_problem: str | None = None  # of the last reload because of a changed ``crlfile``
        self._expiry_warning = 0.0
        self._logged: tuple[str, RevocationLists | None] = ("", None)  # the last event about revocation lists
        self._version = 0  # of the certificates
        self._revoked: RevokedCertificates | None = None  # by the lists of the last reload
        self.on_reloaded: Callable[[], Awaitable[None]] | None = None  # awaited after the certificates were read again
        listener_policy.refuses_certificate = self._refuses_certificate if secure else None
        self.admission = LocalAdmission(
            listener.address,
            shared.counters,
            shared.sockets,
            listener_policy,
            self._refusal if secure else None,
        )

    async def open(self, passed: PassedSockets) -> None:
        """Start listening, on the sockets of ``passed`` that have the listener's address, else on new ones. Raises
        FileProblem, or OSError with the address and the reason."""
        listener = self.listener
        try:
            context = self._context = self._read_context()
            if listener.type == "unix":
                assert listener.path is not None
                self._sockets = [_unix_socket(listener.path, listener.mode, passed)]
                if self._sockets[0].name == OWN:
                    found = listener.path.stat()
                    self._inode = (found.st_dev, found.st_ino)
            else:
                self._sockets = await tcp_sockets(listener.host, listener.port, passed)
            await self._serve(context)
        except FileProblem:
            self.close()
            raise
        except OSError as error:
            self.close()
            reason = error.strerror or str(error)
            raise OSError(f"cannot listen on {listener.address}: {reason}") from None
        for sock, _ in self._sockets:
            if listener.type == "unix":
                log.info("event=listening type=unix path=%s", listener.path)
            else:
                host, port = sock.getsockname()[:2]
                log.info("event=listening type=%s host=%s port=%d", listener.type, host, port)

    def open_for_links(self) -> None:
        """Serve clients whose sockets are in workers of other processes. Raises OSError with the address and the reason."""
        try:
            self._context = self._read_context()
        except OSError as error:
            raise OSError(f"cannot serve {self.listener.address}: {error.strerror or error}") from None

    async def reload(self) -> list[str]:
        """Read the certificates again and disconnect the clients whose certificates are revoked now.

        If a file is invalid, those in use stay, and the problem is returned.
        """
        self.refresh_problem = None
        problem = await self._reload()
        if problem is None:
            return []
        log.error("event=reload_failed listener=%s reason=%s", self.listener.address, problem)
        return [f"listener {self.listener.address}: {problem}"]

    async def refresh_revocations(self, warning: float) -> None:
        """Reload if the ``crlfile`` has changed. Log once if its lists are not valid now, or expire in ``warning``
        seconds."""
        self._expiry_warning = warning
        crlfile = self.listener.crlfile
        if crlfile is None or self._context is None or self._context.revocations is None:
            return
        if file_version(crlfile) != self._crl_version:
            problem = await self._reload()
            if problem is not None and problem != self.refresh_problem:
                log.error("event=reload_failed listener=%s reason=%s", self.listener.address, problem)
            self.refresh_problem = problem
        self._log_expiry(self._context.revocations)

    async def _reload(self) -> str | None:
        """Returns the problem if a file is invalid."""
        loop = asyncio.get_running_loop()
        try:
            context = await loop.run_in_executor(None, self._read_context)
        except OSError as error:
            return str(error)
        if context is None:
            return None
        if context.revocations is not None:
            self._revoked = await loop.run_in_executor(None, context.revocations.revoked)
        self._context = context
        self._version += 1
        for acceptor in self._acceptors:
            acceptor.context = context
        if self.on_reloaded is not None:
            await self.on_reloaded()
        log.info("event=certificates_reloaded listener=%s", self.listener.address)
        if context.revocations is not None:
            self._log_expiry(context.revocations)
            await self._disconnect_revoked()
        return None

    def _log_expiry(self, revocations: RevocationLists) -> None:
        now = datetime.now(UTC)
        problem = revocations.problem(now)
        expires = revocations.expires
        level, event = logging.ERROR, "crl_not_valid"
        if problem is None:
            if expires is None or expires - timedelta(seconds=self._expiry_warning) > now:
                return
            level, event = logging.WARNING, "crl_expires_soon"
            problem = f"crlfile {self.listener.crlfile}: expires at {expires:%Y-%m-%dT%H:%M:%SZ}"
        if self._logged != (event, revocations):
            self._logged = (event, revocations)
            log.log(level, "event=%s listener=%s reason=%s", event, self.listener.address, problem)

    @property
    def context(self) -> ListenerContext | None:
        """The one for new connections; None without TLS."""
        return self._context

    @property
    def revocations(self) -> RevocationLists | None:
        return None if self._context is None else self._context.revocations

    async def _disconnect_revoked(self) -> None:
        for number, connection in enumerate(list(self.shared.connections)):
            if number % SWEPT == 0:
                await asyncio.sleep(0)
            wire = connection.wire
            if not isinstance(wire, Wire) or wire.endpoint.policy is not self.listener_policy:
                continue
            if self._is_revoked(wire.transport.get_extra_info("ssl_object")):
                self.shared.flush.update_clock()
                connection.disconnect(NOT_AUTHORIZED, "the certificate was revoked")

    def _is_revoked(self, ssl_object: Any) -> bool:
        """Whether the lists of the last reload revoke the client's certificate."""
        return self._revoked is not None and self._revoked.include(ssl_object)

    def _read_context(self) -> ListenerContext | None:
        crlfile = self.listener.crlfile
        version = None if crlfile is None else file_version(crlfile)
        context = server_context(self.listener)
        self._crl_version = version
        return context

    def _refuses_certificate(self, transport: Any) -> str | None:
        """Why a client is refused although its TLS handshake succeeded, None if it is not."""
        ssl_object = transport.get_extra_info("ssl_object")
        context = self._context
        assert context is not None
        if context.verify_mode == ssl.CERT_NONE:
            return None
        if ssl_object.context is not context and self._is_revoked(ssl_object):
            # The handshake was before a reload, and `_disconnect_revoked` did not see the connection.
            return "the certificate was revoked"
        return context.refusal(ssl_object, datetime.now(UTC))

    def describe(self) -> dict[str, Any]:
        """Type, address, ports, and how many connections have sent CONNECT."""
        ports = {sock.getsockname()[1] for sock, _ in self._sockets} if self.listener.type != "unix" else set()
        return {
            "type": self.listener.type,
            "address": self.listener.address,
            "ports": sorted(ports),
            "clients": self.listener_policy.clients,
        }

    def terms_changed(self) -> None:
        """The terms of the policy were replaced."""
        self.listener_policy.terms_changed()
        for acceptor in self._acceptors:
            acceptor.timeout = self.listener_policy.terms.connect_timeout

    @property
    def sockets_bound(self) -> list[ListeningSocket]:
        """The listening sockets that a broker has bound, this one or one before a restart."""
        return [one for one in self._sockets if one.name == OWN]

    def keep_file(self) -> None:
        """Have `close` leave the file of a Unix socket, because others hold the socket."""
        self._inode = None

    def release(self) -> list[ListeningSocket]:
        """The listening sockets, which `close` then leaves open."""
        released, self._sockets = self._sockets, []
        self._inode = None
        return released

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        for server in self._servers:
            server.close()
        for acceptor in self._acceptors:
            acceptor.close()
        for sock, _ in self._sockets:
            sock.close()
        if self._inode is not None:
            _remove_socket(self.listener.path, self._inode)

    async def _serve(self, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        start: Any = loop.create_unix_server if self.listener.type == "unix" else loop.create_server
        proxied = ProxiedSockets(self.listener.proxy_sources) if self.listener.proxy_protocol else None
        for sock, _ in self._sockets:
            if self.workers:
                sock.listen(BACKLOG)
                continue
            if context is None and proxied is None:
                self._servers.append(await start(self._client, sock=sock.dup(), backlog=BACKLOG))
                continue
            sock.listen(BACKLOG)
            self._acceptors.append(
                Acceptor(sock.dup(), context, self.listener_policy.terms.connect_timeout, self._client, self.admission, proxied)
            )

    def _refusal(self, peer: str) -> str:
        """Why a connection of this address is closed before its TLS handshake; "" if it is not."""
        stage = self.shared.memory
        if stage.refuses_connections:
            stage.refused_connections += 1
            return "no memory for new connections"
        now: float = self.shared.flush.loop.time()
        limit = self.listener_policy.check_address(peer, now)
        return REFUSALS[limit][1] if limit else ""

    def _client(self, peer: ProxiedPeer | None = None, _: Handshake | None = None) -> Any:
        """The protocol of a new connection; it has asyncio's methods, but does not inherit from asyncio."""
        wire, receiver = self.new_wire(peer)
        if self.websocket:
            from mqttbroker.net.websocket import WebSocket

            terms = self.listener_policy.terms
            max_connect_size = self.shared.terms.max_connect_size
            receiver = WebSocket(wire, self.listener.origins, terms.max_packet_size, max_connect_size, receiver)
        return TlsClient(receiver, self.websocket) if self.secure else receiver

    def new_wire(self, peer: ProxiedPeer | None) -> tuple[Wire, Any]:
        """The wire of a new connection, and the receiver of its bytes: the wire, or a `PacketLog` in front of it."""
        assert self._endpoint is not None, "the clients are in other processes"
        wire = Wire(self._endpoint)
        if peer is not None:
            wire.proxied_address, wire.remote, common_name = peer
            if common_name is not None and self.listener.type in ("tcp", "ws"):
                wire.proxied_common_name = common_name
        return wire, PacketLog(wire) if packet_log.isEnabledFor(logging.DEBUG) else wire

    # -- workers --------------------------------------------------------------

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of the listening sockets."""
        return [sock.fileno() for sock, _ in self._sockets]

    def setup(self) -> ListenerSetup:
        """The listener as a worker is to serve it now."""
        terms = self.listener_policy.terms
        return ListenerSetup(
            self.listener,
            tuple(self.descriptors),
            self._version,
            terms.connect_timeout,
            terms.max_packet_size,
            self.shared.terms.max_connect_size,
            self.listener_policy.max_half_open,
            terms.max_half_open_per_address,
            (terms.networks.ipv4_prefix, terms.networks.ipv6_prefix),
        )

    def context_of(self, version: int) -> ListenerContext | None:
        """The context of this version of the certificates; None if they were reloaded since."""
        return self._context if version == self._version else None


# --- TCP --------------------------------------------------------------------


async def tcp_sockets(host: str, port: int, passed: PassedSockets) -> list[ListeningSocket]:
    """A bound socket for each address of the host, all with the same port."""
    if host in _EVERYWHERE:
        found = passed.take_everywhere(port)
        if found:
            return found
        if socket.has_dualstack_ipv6():
            return [ListeningSocket(_bound(socket.AF_INET6, ("::", port), True))]
    loop = asyncio.get_running_loop()
    known = await loop.getaddrinfo(
        "0.0.0.0" if host in _EVERYWHERE else host,
        port,
        type=socket.SOCK_STREAM,
        flags=socket.AI_PASSIVE,
    )
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in known))
    for _ in range(_SAME_PORT_TRIES):
        try:
            return _bind_all(addresses, port, passed)
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE:
                raise
    raise OSError("no free port that all its addresses have in common")


def _bind_all(addresses: list[Any], port: int, passed: PassedSockets) -> list[ListeningSocket]:
    """A bound socket for each of the addresses that this machine has; OSError if it has none of them."""
    sockets: list[ListeningSocket] = []
    missing: OSError | None = None
    try:
        for family, address in addresses:
            full_address = (address[0], port, *address[2:])
            try:
                one = passed.take(family, full_address) or ListeningSocket(_bound(family, full_address, False))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing = error
                continue
            sockets.append(one)
            port = one.sock.getsockname()[1]
    except OSError:
        for sock, _ in sockets:
            sock.close()
        raise
    if not sockets and missing is not None:
        raise missing
    return sockets


def _bound(family: int, address: Any, dual_stack: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual_stack else 1)
        sock.bind(address)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


# --- Unix sockets -----------------------------------------------------------


def _unix_socket(path: Path, mode: int, passed: PassedSockets) -> ListeningSocket:
    """A bound socket. Replaces the file of a socket on which no process listens."""
    found = passed.take_unix(path)
    if found is not None:
        if found.name == OWN:
            path.chmod(mode)
        return found
    if path.is_socket() and not _is_in_use(path):
        path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        # Before listen() no client can connect, so none does with the default permissions.
        path.chmod(mode)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE and not path.is_socket():
            raise OSError("the file exists and is not a socket") from None
        raise
    return ListeningSocket(sock)


def _is_in_use(path: Path) -> bool:
    """Whether a process listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


def _remove_socket(path: Path | None, inode: tuple[int, int]) -> None:
    """Remove the socket's file unless another process has replaced it."""
    try:
        if path is not None:
            found = path.lstat()
            if stat.S_ISSOCK(found.st_mode) and (found.st_dev, found.st_ino) == inode:
                path.unlink()
    except FileNotFoundError:
        pass
