"""A client's socket at the worker's end of a link."""

from __future__ import annotations

import asyncio
import socket

from support.patience import PATIENCE

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
