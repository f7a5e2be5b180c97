"""WebSocket below a connection of a load: the `websockets` library does the handshake and the frames."""

from __future__ import annotations

import asyncio
from typing import Any

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidMessage
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

_DATA = (Opcode.BINARY, Opcode.CONT)


class WebSocket(asyncio.Protocol):
    """Stands between a connection and its socket, and is the transport of the connection."""

    def __init__(self, uri: str, above: asyncio.Protocol) -> None:
        self._protocol = ClientProtocol(parse_uri(uri), subprotocols=[Subprotocol("mqtt")], max_size=None)
        self._above = above
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._protocol.send_request(self._protocol.connect())
        self._send()

    def data_received(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        received = b""
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                if self._protocol.handshake_exc is None:
                    self._above.connection_made(self)  # type: ignore[arg-type]
            elif isinstance(event, Frame) and event.opcode in _DATA:
                received += event.data
        if received:
            self._above.data_received(received)
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        refused = self._protocol.handshake_exc
        if isinstance(refused, (InvalidHandshake, InvalidMessage)):
            error = refused
        self._above.connection_lost(error)

    def pause_writing(self) -> None:
        self._above.pause_writing()

    def resume_writing(self) -> None:
        self._above.resume_writing()

    # --- as a transport -----------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self._protocol.send_binary(data)
        self._send()

    def is_closing(self) -> bool:
        """Whether nothing can be written: the other end may have sent a close frame while the socket is open."""
        return self._protocol.state is not State.OPEN or bool(self._transport.is_closing())

    def close(self) -> None:
        self._transport.close()

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    def _send(self) -> None:
        for data in self._protocol.data_to_send():
            if self._transport.is_closing():
                return
            if data:
                self._transport.write(data)
            else:
                self._transport.close()
