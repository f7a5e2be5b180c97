"""Listeners: the sockets on which clients are accepted.

The rule kept here: a listener either listens or startup fails with one line
that names its address and the reason.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from mqttbroker.config import Listener
from mqttbroker.connection import Connection
from mqttbroker.reason_codes import IMPLEMENTATION_SPECIFIC_ERROR
from mqttbroker.wire import Turn, Wire

log = logging.getLogger("mqttbroker")

BACKLOG = 4096  # connections the kernel holds until they are accepted


def new_client_id() -> str:
    """A client id for a client that brought none."""
    return f"auto-{secrets.token_hex(11)}"


def defect(connection: Connection) -> None:
    """Log an exception that should not be, and end the connection that met it."""
    log.exception(
        "event=defect client=%s address=%s", connection.client_id, connection.peer
    )
    connection.disconnect(IMPLEMENTATION_SPECIFIC_ERROR, "internal error")


async def listen(listener: Listener, turn: Turn) -> asyncio.AbstractServer:
    """Accept clients on a TCP address; OSError with a clear message if that cannot be."""
    loop = asyncio.get_running_loop()
    factory: Any = lambda: Wire(turn, new_client_id, defect)  # noqa: E731 - a protocol by shape
    try:
        server = await loop.create_server(
            factory, listener.host, listener.port, backlog=BACKLOG
        )
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {listener.host}:{listener.port}: {reason}") from None
    for socket in server.sockets:
        host, port = socket.getsockname()[:2]
        log.info("event=listening type=%s host=%s port=%d", listener.type, host, port)
    return server
