"""Clients of a cluster's node whose CONNECT is not there yet, or whose core is not reachable yet.

Such a client costs its sender nothing, so they are bounded in number, bytes and time; the oldest gives way.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from mqttbroker.codec.packets import Connack
from mqttbroker.codec.reason_codes import QUOTA_EXCEEDED, SERVER_UNAVAILABLE, to_v3_connack
from mqttbroker.core.terms.deadline import Deadline
from mqttbroker.core.terms.networks import Networks
from mqttbroker.net.abuse_limits import HalfOpen
from mqttbroker.net.left_client import unread
from mqttbroker.net.link_frames import JOINED
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.proxied_sockets import ProxiedPeer
from mqttbroker.net.websocket import WebSocket
from mqttbroker.net.wire import CLOSE_TIMEOUT, is_finished, peer_text
from mqttbroker.net.worker_setup import FrontSetup, Joined, ListenerSetup, Secured, listener_name
from mqttbroker.worker.clients import LinkedClient, WorkerLink
from mqttbroker.worker.core_links import CoreLinks
from mqttbroker.worker.first_packet import FirstPacket
from sessions.counters import Counters

log = logging.getLogger("mqttbroker.clients")

COUNTED = 4096  # bytes of an unfinished CONNECT; shorter ones are not counted
WAITING_BYTES = 1024  # of a client that waits, beside its CONNECT


class HeldClients:
    """All of a worker, of all listeners: those that ``links`` has no link for, or whose first packet is not there. The
    worker has no more than ``max_sockets`` clients, these and others."""

    def __init__(self, loop: Any, setup: FrontSetup, links: CoreLinks, max_sockets: int) -> None:
        self.loop = loop
        self.place = links.place
        self.leave = links.leave
        self._links = links
        self._max_sockets = max_sockets
        self.counters = Counters()
        self.clients: dict[HeldClient, bool] = {}
        self._sockets = OpenSockets(sys.maxsize, setup.max_half_open, self.counters)
        self._bytes = 0
        self._large: dict[HeldClient, int] = {}  # counted bytes; the CONNECT that began first in front
        self._waiting = 0  # bytes
        self.reload(setup)

    def reload(self, setup: FrontSetup) -> None:
        """Use other limits."""
        self.patience = setup.patience
        self._max_bytes = setup.max_incomplete_bytes
        self._max_waiting = setup.max_connect_bytes
        self._sockets.max_evictable = setup.max_half_open

    def add(self, client: HeldClient, limits: HeldListener) -> None:
        """Count a new client; it is aborted if the worker has as many sockets as it can have."""
        if len(self.clients) + self._links.clients >= self._max_sockets:
            self.counters.connections_refused += 1
            client.abort()
            return
        self.clients[client] = True
        self._sockets.add(client)
        limits.add(client)

    def complete(self, client: HeldClient, limits: HeldListener) -> None:
        """The client has sent its first packet."""
        self.count(client, 0)
        self._sockets.protect(client)
        limits.half_open.remove(client)

    def closing(self, client: HeldClient) -> None:
        """This side is closed: the socket may be closed for a new one at any time."""
        self.count(client, 0)
        self._sockets.unprotect(client)
        self.leave(client)

    def remove(self, client: HeldClient, limits: HeldListener) -> None:
        if self.clients.pop(client, False):
            self.count(client, 0)
            self._sockets.remove(client)
            limits.half_open.remove(client)

    def wait(self, size: int) -> bool:
        """Count a waiting client; false if there is no room for its CONNECT. `waited` follows in any case."""
        self._waiting += WAITING_BYTES + size
        if self._waiting <= self._max_waiting:
            return True
        self.counters.limit_reached("max_total_connect_bytes")
        return False

    def waited(self, size: int) -> None:
        self._waiting -= WAITING_BYTES + size

    def count(self, client: HeldClient, size: int) -> None:
        """The client has ``size`` bytes of an unfinished packet now."""
        counted = size if size >= COUNTED else 0
        self._bytes += counted - self._large.get(client, 0)
        if counted:
            self._large[client] = counted
        else:
            self._large.pop(client, None)
        while self._bytes > self._max_bytes and len(self._large) > 1:
            oldest = next(iter(self._large))
            self.counters.limit_reached("max_total_incomplete_bytes")
            oldest.close("too many unfinished packets")

    def end(self) -> None:
        """Close all of them."""
        for client in list(self.clients):
            client.close("the worker ends")


class HeldListener:
    """The clients of one listener, and their limits."""

    def __init__(self, held: HeldClients, index: int, setup: ListenerSetup) -> None:
        self.held = held
        self.half_open = HalfOpen(held.counters)
        self._index = index
        self.reload(setup)

    def reload(self, setup: ListenerSetup) -> None:
        """Use the limits of ``setup`` for later connections."""
        self.setup = setup
        self._networks = Networks(*setup.prefixes)

    def add(self, client: HeldClient) -> None:
        """Count a client without a CONNECT."""
        setup = self.setup
        if setup.max_half_open or setup.max_half_open_per_address:
            address = self._networks.of(client.address) if setup.max_half_open_per_address else ""
            self.half_open.add(client, address, setup.max_half_open, setup.max_half_open_per_address)

    def client(self, peer: ProxiedPeer | None) -> Any:
        """The protocol of a new connection."""
        setup = self.setup
        client = HeldClient(self, setup, peer)
        if setup.listener.type in ("ws", "wss"):
            return WebSocket(client, setup.listener.origins, setup.max_packet_size, setup.max_connect_size)
        return client

    def joined(self, client: HeldClient, setup: ListenerSetup, peer: ProxiedPeer | None, transport: Any) -> bytes:
        """The body of the frame JOINED."""
        proxied, remote, common_name = (False, False, None) if peer is None else (True, peer.remote, peer.common_name)
        ssl_object = transport.get_extra_info("ssl_object")
        secured = None if ssl_object is None else Secured.of(ssl_object, setup.version)
        name = listener_name(self._index, setup.listener)
        return Joined(name, client.address, proxied, remote, common_name, secured).encode()


class HeldClient:
    """One client's socket until a core has it. An asyncio protocol, and the owner of a WebSocket."""

    accepted = False  # by a core

    def __init__(self, listener: HeldListener, setup: ListenerSetup, peer: ProxiedPeer | None) -> None:
        self.address = "" if peer is None else peer.address
        self._held = listener.held
        self._listener = listener
        self._setup = setup  # when it was accepted: the version is that of its TLS handshake
        self._peer = peer
        self._transport: Any = None
        self._first = FirstPacket(setup.max_connect_size)
        self._late = b""  # received while it waits for a core
        self._incomplete = 0  # bytes of an incomplete WebSocket frame
        self._complete = False
        self._waits = False
        self._closing = False
        self._timer: Any = None

    @property
    def client_id(self) -> str:
        """The client id of the CONNECT; empty if any core can have the client."""
        return "" if self._first.connect is None else self._first.connect.client_id

    # -- the socket -------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._peer is None:
            self.address = peer_text(transport.get_extra_info("peername"))
        self._timer = Deadline(self._held.loop, self._setup.connect_timeout, self._no_connect)
        self._held.add(self, self._listener)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._complete:
            self._late += data
            return
        if not self._first.add(data):
            self._held.count(self, self._first.size)
            return
        self._complete = True
        self._cancel_timer()
        self._held.complete(self, self._listener)
        self._held.place(self)

    def eof_received(self) -> bool:
        return False

    def room_for_rest(self) -> int:
        return 0

    def connection_lost(self, error: Any) -> None:
        self._closing = True
        unread(self._transport, 0)  # closes the second descriptor
        self._transport = None
        self._stop_waiting()
        self._held.remove(self, self._listener)
        self._held.leave(self)

    def pause_writing(self) -> None:
        """A CONNACK is all that is written."""

    def resume_writing(self) -> None:
        """A CONNACK is all that is written."""

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- waiting for a core -----------------------------------------------------

    def wait(self) -> None:
        """Read nothing more; if `join` does not follow in time, the client is refused."""
        if self._waits:
            return
        self._waits = True
        self._transport.pause_reading()
        self._timer = Deadline(self._held.loop, self._held.patience, self._no_core)
        if not self._held.wait(self._first.size):
            self._refuse(QUOTA_EXCEEDED, "too many CONNECT packets wait for an answer")

    def _no_core(self) -> None:
        self._refuse(SERVER_UNAVAILABLE, "no core for the client id is reachable")

    def join(self, link: WorkerLink) -> None:
        """Pass the socket on to a client of ``link``, unless nobody is there any more.

        A CONNECT that its client has given up may come late, from a node that was stopped or a link that was cut. It would take the
        session over from the next connection of that client.
        """
        if self._given_up():
            self.close("the client left before its CONNECT was answered")
            return
        waited = self._waits
        self._stop_waiting()
        self._held.remove(self, self._listener)
        transport, self._transport = self._transport, None
        client = LinkedClient(link, link.new_number(), self._opening)
        transport.set_protocol(client)
        client.connection_made(transport)
        if waited:
            transport.resume_reading()
        client.data_received(self._first.data + self._late)
        if self._incomplete:
            client.hold_before(self._incomplete)

    def _given_up(self) -> bool:
        sock = self._transport.get_extra_info("socket")
        return self._first.alone and not self._late and sock is not None and is_finished(sock.fileno())

    def _opening(self, transport: Any) -> tuple[int, bytes]:
        return JOINED, self._listener.joined(self, self._setup, self._peer, transport)

    def _stop_waiting(self) -> None:
        self._cancel_timer()
        if self._waits:
            self._waits = False
            self._held.waited(self._first.size)

    # -- the end ----------------------------------------------------------------

    def _refuse(self, reason_code: int, reason: str) -> None:
        """Answer the CONNECT, if it is one, and close."""
        connect = self._first.connect
        if connect is not None:
            code = reason_code if connect.version == 5 else to_v3_connack(reason_code)
            self._transport.write(Connack(False, code).encode(connect.version))
        self.close(reason)

    def _no_connect(self) -> None:
        self.close("no CONNECT in time")

    def close(self, reason: str) -> None:
        """Close the sending side; the socket when the client has closed its side, or after `CLOSE_TIMEOUT`."""
        if self._closing or self._transport is None:
            return
        self._closing = True
        connect = self._first.connect
        log.info(
            "event=refused client=%s address=%s reason=%s user=%s listener=%s",
            self.client_id,
            self.address,
            reason,
            "" if connect is None else connect.username or "",
            self._setup.listener.address,
        )
        waited = self._waits
        self._stop_waiting()
        self._held.closing(self)
        self._first = FirstPacket(0)
        self._late = b""
        transport = self._transport
        if transport.can_write_eof():
            transport.write_eof()
            if waited:
                transport.resume_reading()
        else:
            transport.close()
        self._timer = self._held.loop.call_later(CLOSE_TIMEOUT, self.abort)

    def abort(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- a WebSocket's owner ----------------------------------------------------

    def hold_before(self, more: int) -> None:
        self._incomplete += more
        self._held.count(self, self._first.size + self._incomplete)

    def take_answers(self) -> bytes:
        """There are none before a core has the client."""
        return b""

    def websocket_failed(self) -> None:
        self._held.counters.websocket_failures += 1

    def lost(self, reason: str) -> None:
        self.close(reason)

    def refuse(self, reason_code: int, detail: str) -> None:
        self.close(detail)
