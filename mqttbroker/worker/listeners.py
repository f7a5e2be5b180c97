"""The listeners of a worker: they accept on the sockets that the broker has bound, and ask it about each connection
before a TLS handshake."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

from mqttbroker.net.acceptor import Acceptor, Handshake
from mqttbroker.net.link_frames import BEGUN, CLOSED, FAILED, OPENED, SECURED
from mqttbroker.net.listeners import BACKLOG
from mqttbroker.net.proxied_sockets import ProxiedPeer, ProxiedSockets
from mqttbroker.net.tls import server_context
from mqttbroker.net.tls_transport import TlsClient
from mqttbroker.net.websocket import WebSocket
from mqttbroker.net.wire import peer_text
from mqttbroker.net.worker_setup import Failed, ListenerSetup, Opened, Secured
from mqttbroker.worker.clients import LinkedClient, WorkerLink

if TYPE_CHECKING:
    from mqttbroker.worker.held_clients import HeldListener


class LinkedHandshake:
    """An unfinished handshake: ``admitted`` is whether the broker lets it begin TLS."""

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake
        self.admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def admit(self) -> None:
        if not self.admitted.done():
            self.admitted.set_result(True)


class LinkedAdmission:
    """The admission to a listener, which the broker decides about. An `Admission`.

    ``handshakes`` has those of all listeners by the numbers of their clients.
    """

    def __init__(self, link: WorkerLink, handshakes: dict[int, LinkedHandshake], index: int, secure: bool) -> None:
        self._link = link
        self._handshakes = handshakes
        self._index = index
        self._secure = secure
        self._numbers: dict[Handshake, int] = {}

    def begin(self, handshake: Handshake) -> bool:
        number = self._numbers[handshake] = self._link.new_number()
        self._handshakes[number] = LinkedHandshake(handshake)
        self._link.send(BEGUN, number, json.dumps(self._index).encode())
        return True

    async def admit(self, handshake: Handshake, address: str) -> bool:
        if not self._secure:
            return True
        number = self._numbers[handshake]
        self._link.send(OPENED, number, Opened(self._index, address).encode())
        return await self._handshakes[number].admitted

    def number(self, handshake: Handshake) -> int:
        """The number of the client that the handshake is for."""
        return self._numbers[handshake]

    def end(self, handshake: Handshake) -> None:
        number = self._numbers.pop(handshake)
        del self._handshakes[number]
        if number not in self._link.clients:
            self._link.send(CLOSED, number, b"")

    def header_failed(self, address: str, reason: str) -> None:
        self._link.send(FAILED, 0, Failed(self._index, address, True, reason).encode())

    def handshake_failed(self, handshake: Handshake, address: str, reason: str) -> None:
        self._link.send(FAILED, self._numbers[handshake], Failed(self._index, address, False, reason).encode())


class LinkedListener:
    """One listener, from `open` to `close`. With ``held`` its clients are for cores that their CONNECT tells."""

    def __init__(
        self,
        link: WorkerLink,
        handshakes: dict[int, LinkedHandshake],
        index: int,
        setup: ListenerSetup,
        held: HeldListener | None = None,
    ) -> None:
        self._held = held
        self._link = link
        self._index = index
        self._setup = setup
        self._context = server_context(setup.listener)
        self._admission = LinkedAdmission(link, handshakes, index, self._context is not None)
        self._servers: list[asyncio.AbstractServer] = []
        self._acceptors: list[Acceptor] = []

    async def open(self) -> None:
        """Start accepting."""
        setup = self._setup
        loop = asyncio.get_running_loop()
        start: Any = loop.create_unix_server if setup.listener.type == "unix" else loop.create_server
        proxied = ProxiedSockets(setup.listener.proxy_sources) if setup.listener.proxy_protocol else None
        for descriptor in setup.descriptors:
            sock = socket.socket(fileno=descriptor)
            sock.setblocking(False)
            if self._context is None and proxied is None:
                self._servers.append(await start(self._client, sock=sock, backlog=BACKLOG))
                continue
            self._acceptors.append(Acceptor(sock, self._context, setup.connect_timeout, self._client, self._admission, proxied))

    def reload(self, setup: ListenerSetup) -> None:
        """Use the limits of ``setup`` for later connections, and read the certificates again.

        Raises OSError, and changes nothing, for an invalid file.
        """
        context = server_context(setup.listener)
        self._setup = setup
        self._context = context
        if self._held is not None:
            self._held.reload(setup)
        for acceptor in self._acceptors:
            acceptor.context = context
            acceptor.timeout = setup.connect_timeout

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        for server in self._servers:
            server.close()
        for acceptor in self._acceptors:
            acceptor.close()

    def _client(self, peer: ProxiedPeer | None = None, handshake: Handshake | None = None) -> Any:
        """The protocol of a new connection."""
        client = self._client_behind_tls(peer, handshake)
        if self._context is None:
            return client
        return TlsClient(client, self._setup.listener.type == "wss")

    def _client_behind_tls(self, peer: ProxiedPeer | None, handshake: Handshake | None) -> Any:
        setup = self._setup
        if self._held is not None:
            return self._held.client(peer)

        def opened(transport: Any) -> tuple[int, bytes]:
            if peer is None:
                return OPENED, Opened(self._index, peer_text(transport.get_extra_info("peername"))).encode()
            return OPENED, Opened(self._index, peer.address, True, peer.remote, peer.common_name).encode()

        def secured(transport: Any) -> tuple[int, bytes]:
            return SECURED, Secured.of(transport.get_extra_info("ssl_object"), setup.version).encode()

        number = self._link.new_number() if handshake is None else self._admission.number(handshake)
        client = LinkedClient(self._link, number, opened if self._context is None else secured)
        if setup.listener.type in ("ws", "wss"):
            return WebSocket(client, setup.listener.origins, setup.max_packet_size, setup.max_connect_size)
        return client
