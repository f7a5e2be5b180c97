"""The clients of one worker as the broker admits them: from an accepted connection to a `Wire`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.link import Link, LinkTransport
from mqttbroker.net.link_flush import LinkFlush
from mqttbroker.net.link_frames import (
    ABORT,
    ADMITTED,
    BEGUN,
    CLOSED,
    DATA,
    END,
    ENDS,
    FAILED,
    HELD,
    HOLDS,
    JOINED,
    LEFT,
    OPENED,
    READY,
    REFUSED,
    SECURED,
    STATUS,
    WEBSOCKET_FAILED,
    LinkError,
)
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.proxied_sockets import ProxiedPeer
from mqttbroker.net.tls import ListenerContext
from mqttbroker.net.worker_setup import Failed, Joined, Opened, Secured, from_worker, listener_index, listener_name

log = logging.getLogger("mqttbroker.network")


class LinkedTls:
    """The TLS connection of a worker's client, with the methods of an `ssl.SSLObject` that the broker uses."""

    def __init__(self, secured: Secured, context: ListenerContext | None) -> None:
        self.context = context
        self.session_reused = secured.session_reused
        self._secured = secured

    def getpeercert(self, binary_form: bool = False) -> Any:
        return self._secured.der if binary_form else self._secured.certificate

    def get_verified_chain(self) -> list[bytes]:
        return list(self._secured.chain)


class LinkedHandshake:
    """An unfinished PROXY header or TLS handshake in a worker: a member of `OpenSockets` and `HalfOpen`."""

    def __init__(self, link: Link, number: int, listener: OpenListener) -> None:
        self.limited = False
        self.listener = listener
        self.opened: Opened | None = None
        self._link = link
        self._number = number

    def abort(self) -> None:
        self._link.send(ABORT, self._number, b"")


class WorkerClients:
    """Handles the frames of one worker's link other than the bytes of clients.

    ``on_message`` is called with the kind and body of the frames that are about the worker itself. Frames that no honest
    worker sends, such as those of more than ``max_clients``, raise LinkError, which ends the link.
    """

    def __init__(
        self,
        worker: int,
        listeners: Sequence[OpenListener],
        scheduler: LinkFlush,
        on_message: Callable[[int, bytes], None],
        on_lost: Callable[[], None],
        max_clients: int,
    ) -> None:
        self.link = Link(scheduler, worker, self._control, self._link_lost)
        self._listeners = listeners
        self._on_message = on_message
        self._on_lost = on_lost
        self._max_clients = max_clients
        self._handshakes: dict[int, LinkedHandshake] = {}

    def _link_lost(self, _: Link) -> None:
        for number in list(self._handshakes):
            self._end_handshake(number)
        self._on_lost()

    def _control(self, kind: int, number: int, body: bytes) -> None:
        if kind == BEGUN:
            self._begun(number, self._listener(from_worker(listener_index, body)))
        elif kind == OPENED:
            self._opened(number, from_worker(Opened.decode, body))
        elif kind == SECURED:
            self._secured(number, from_worker(Secured.decode, body))
        elif kind == FAILED:
            self._failed(number, from_worker(Failed.decode, body))
        elif kind == CLOSED:
            self._end_handshake(number)
        elif kind in (READY, STATUS, HOLDS):
            self._on_message(kind, body)
        else:
            self._of_client(kind, number, body)

    def _listener(self, index: int) -> OpenListener:
        if not 0 <= index < len(self._listeners):
            raise LinkError(f"there is no listener {index}")
        return self._listeners[index]

    def _check_new(self, number: int) -> None:
        """Whether this may be the number of a new client."""
        if number in self.link.clients or number in self._handshakes:
            raise LinkError(f"there is a client {number}")
        if len(self.link.clients) + len(self._handshakes) >= self._max_clients:
            raise LinkError(f"more than {self._max_clients} clients")

    def _of_client(self, kind: int, number: int, body: bytes) -> None:
        """A frame of a client's WebSocket."""
        client = self.link.clients.get(number)
        if client is None or client.wire is None:
            return
        wire = client.wire
        if kind == HELD and len(body) == 4:
            client.hold_before(int.from_bytes(body, "big", signed=True))
        elif kind == LEFT:
            answers = wire.take_answers()
            if answers:
                client.write(answers)
            client.left(body.decode("utf-8", "replace"))
        elif kind == REFUSED and body:
            wire.refuse(body[0], body[1:].decode("utf-8", "replace"))
        elif kind == WEBSOCKET_FAILED:
            wire.websocket_failed()
        elif kind != DATA:
            raise LinkError(f"a frame of kind {kind}")

    def _begun(self, number: int, listener: OpenListener) -> None:
        self._check_new(number)
        handshake = LinkedHandshake(self.link, number, listener)
        if listener.admission.begin(handshake):
            self._handshakes[number] = handshake
        else:
            handshake.abort()

    def _opened(self, number: int, opened: Opened) -> None:
        listener = self._listener(opened.listener)
        if not listener.secure:
            self._end_handshake(number)
            self._check_new(number)
            self._connect(number, listener, opened, None)
            return
        handshake = self._handshakes.get(number)
        if handshake is None:
            return  # it was aborted
        if handshake.opened is not None or handshake.listener is not listener:
            raise LinkError(f"client {number} was opened before")
        if listener.admission.admits(handshake, opened.address):
            handshake.opened = opened
            self.link.send(ADMITTED, number, b"")
        else:
            handshake.abort()

    def _secured(self, number: int, secured: Secured) -> None:
        handshake = self._end_handshake(number)
        self._check_new(number)
        if handshake is None or handshake.opened is None:
            self.link.send(ABORT, number, b"")
            return
        tls = LinkedTls(secured, handshake.listener.context_of(secured.version))
        self._connect(number, handshake.listener, handshake.opened, tls)

    def _failed(self, number: int, failed: Failed) -> None:
        admission = self._listener(failed.listener).admission
        if failed.header:
            admission.header_failed(failed.address, failed.reason)
            return
        handshake = self._end_handshake(number)
        if handshake is not None:
            admission.handshake_failed(handshake, failed.address, failed.reason)

    def _end_handshake(self, number: int) -> LinkedHandshake | None:
        handshake = self._handshakes.pop(number, None)
        if handshake is not None:
            handshake.listener.admission.end(handshake)
        return handshake

    def _connect(self, number: int, listener: OpenListener, opened: Opened | Joined, tls: LinkedTls | None) -> None:
        peer = ProxiedPeer(opened.address, opened.remote, opened.common_name) if opened.proxied else None
        wire, receiver = listener.new_wire(peer)
        transport = LinkTransport(self.link, number, wire, opened.address, tls, listener.websocket)
        if receiver is not wire:
            transport.receiver = receiver
        self.link.clients[number] = transport
        receiver.connection_made(transport)


class JoinedClients(WorkerClients):
    """The clients of one worker as the core of a shard has them: the worker has admitted them, and each begins with its CONNECT.

    ``node`` is the name of the worker's node, for the log. The link is taken out of ``links`` when it is lost. A frame that no honest worker
    sends ends it. While ``accepts`` returns false, clients that come are closed before they are answered.
    """

    def __init__(
        self,
        listeners: Sequence[OpenListener],
        scheduler: FlushScheduler,
        node: str,
        max_clients: int,
        links: dict[Link, bool],
        accepts: Callable[[], bool],
    ) -> None:
        super().__init__(0, listeners, scheduler, _ignore, self._ended, max_clients)
        self._scheduler = scheduler
        self._accepts = accepts
        self._links = links
        self._by_name = {listener_name(index, one.listener): one for index, one in enumerate(listeners)}
        self._node = node
        self._worker_ends = False

    def _control(self, kind: int, number: int, body: bytes) -> None:
        if kind == JOINED:
            self._joined(number, from_worker(Joined.decode, body))
        elif kind == CLOSED:
            pass  # it was not known any more
        elif kind == ENDS:
            self._send_away()
        else:
            self._of_client(kind, number, body)

    def _joined(self, number: int, joined: Joined) -> None:
        if not self._accepts():
            self.link.send(END, number, b"")
            return
        self._check_new(number)
        listener = self._by_name.get(joined.listener)
        if listener is None:
            raise LinkError(f"there is no listener {joined.listener}")
        if listener.secure != (joined.secured is not None):
            raise LinkError(f"a client of {joined.listener} {'without' if listener.secure else 'with'} TLS")
        # The handshake was in another process, whose certificates and lists may be others.
        tls = None if joined.secured is None else LinkedTls(joined.secured, None)
        self._connect(number, listener, joined, tls)

    def _send_away(self) -> None:
        """Disconnect all clients: their sockets are about to be closed."""
        if self._worker_ends:
            raise LinkError("the worker ends a second time")
        self._worker_ends = True
        wires = [client.wire for client in self.link.clients.values()]
        clients = self._scheduler.broker.clients
        clients.turns.add(clients.send_away([wire.connection for wire in wires if wire is not None]))

    def _ended(self) -> None:
        self._links.pop(self.link, None)
        if self.link.error:
            log.error("event=link_failed node=%s reason=%s", self._node, self.link.error)


def _ignore(kind: int, body: bytes) -> None:
    """A worker of a cluster says nothing of itself to a core."""
