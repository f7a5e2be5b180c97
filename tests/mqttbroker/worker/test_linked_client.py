"""A client's socket at the worker's end of a link."""

from __future__ import annotations

import asyncio
import socket

from support.manual_loop import Loop, Transport
from support.patience import PATIENCE

from mqttbroker.net.left_client import LEFT_BYTES
from mqttbroker.net.link_frames import CLOSED, DATA, END, OPENED
from mqttbroker.worker.clients import LinkedClient, WorkerLink


async def test_what_the_broker_sends_behind_the_end_of_a_client_is_dropped() -> None:
    """A worker that ends, or loses a link, closes its clients' sockets before the broker hears of it."""
    loop = asyncio.get_running_loop()
    link = WorkerLink(loop, lambda kind, number, body: None, lambda: None)
    to_broker, broker = socket.socketpair()
    to_client, client = socket.socketpair()
    broker.setblocking(False)
    client.setblocking(False)
    with broker, client:
        link_transport, _ = await loop.create_connection(lambda: link, sock=to_broker)  # type: ignore[type-var]
        number = link.new_number()
        linked = LinkedClient(link, number, lambda transport: (OPENED, b""))
        await loop.create_connection(lambda: linked, sock=to_client)  # type: ignore[arg-type, return-value]
        link.handle(DATA, number, b"before", 0, 6)
        link.shut_down()
        link.handle(DATA, number, b"behind", 0, 6)
        link.handle(END, number, b"", 0, 0)
        received = b""
        while part := await asyncio.wait_for(loop.sock_recv(client, 100), PATIENCE):
            received += part
        assert received == b"before"
        client.close()
        sent = b""
        while bytes([CLOSED]) not in sent:
            sent += await asyncio.wait_for(loop.sock_recv(broker, 100), PATIENCE)
        assert not link.clients
        link_transport.close()


class LeftSocket(Transport):
    """The transport of a lost client, with much that was not read."""

    def unread(self, limit: int) -> bytes:
        return bytes(min(limit, LEFT_BYTES))


class FullLink(Transport):
    """A link that the broker does not read."""

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return len(self.written)


def test_what_many_lost_clients_left_is_bounded_for_all_of_them_together() -> None:
    loop, transport = Loop(), FullLink()
    link = WorkerLink(loop, lambda kind, number, body: None, lambda: None)
    link.connection_made(transport)
    for flushed in (False, True):  # in one iteration of the event loop, and over many
        for _ in range(10):
            client = LinkedClient(link, link.new_number(), lambda _: (OPENED, b""))
            client.connection_made(LeftSocket())
            client.connection_lost(ConnectionResetError("reset"))
            if flushed:
                loop.run()
        loop.run()
        assert LEFT_BYTES <= len(transport.written) < LEFT_BYTES + 10_000
    assert not link.clients
