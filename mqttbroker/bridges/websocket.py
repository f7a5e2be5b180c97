"""The WebSocket of a bridge, as a client: a layer between the socket and the `Link`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from mqttbroker.bridges.relay_terms import RelayError
from mqttbroker.config.remote_address import Address

FRAME_HEADROOM: Final = 65_536  # bytes by which a frame may exceed the longest packet, because it may hold several
_LONGEST_HEADER: Final = 14  # bytes of a frame
MAX_UNREAD: Final = 1_048_576  # bytes of pongs that wait for a remote which does not read
_silent = logging.getLogger("mqttbroker.bridges.websocket")
_silent.setLevel(logging.CRITICAL)


class WebSocketClient:
    """An asyncio protocol for the socket, and the transport of ``link``, which sees MQTT bytes only.

    ``max_packet_size`` is that of the packets of the remote; ``timeout`` is for the handshake, in seconds.
    """

    def __init__(self, link: Any, address: Address, max_packet_size: int, timeout: float) -> None:
        self._link = link
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._transport: Any = None
        self._library = ClientProtocol(
            parse_uri(str(address)),
            subprotocols=[Subprotocol("mqtt")],
            max_size=max_packet_size + FRAME_HEADROOM,
            logger=_silent,
        )
        self._open = False
        self._closing = False
        self._full = False  # the socket takes no more
        self._unread = 0  # bytes of pongs since the socket is full

    # -- the socket ---------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self._refuse, "no WebSocket: no answer in time")
        self._library.send_request(self._library.connect())
        self._send()

    def data_received(self, data: bytes) -> None:
        library = self._library
        library.receive_data(data)
        try:
            for event in library.events_received():
                if isinstance(event, Frame):
                    self._frame(event)
        except RelayError as error:
            self._refuse(str(error))
        if not self._open and library.handshake_exc is not None:
            self._refuse(f"no WebSocket: {library.handshake_exc}")
            return
        if not self._open and library.state is State.OPEN:
            if library.subprotocol != "mqtt":  # [MQTT-6.0.0-3]
                self._refuse("no WebSocket: the remote does not speak the subprotocol mqtt")
                return
            self._open = True
            self._stop_timer()
            self._link.connection_made(self)
        self._send()
        if self._open and not self._closing and library.state is not State.OPEN:
            broken = library.parser_exc
            self._refuse("the remote closes the WebSocket" if broken is None else f"WebSocket: {broken}")

    def _frame(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.BINARY, Opcode.CONT):
            self._link.data_received(bytes(frame.data))
        elif frame.opcode is Opcode.TEXT:  # [MQTT-6.0.0-1]
            raise RelayError("the remote sends a WebSocket frame of text")
        elif frame.opcode is Opcode.PING and self._full:
            self._unread += len(frame.data) + _LONGEST_HEADER
            if self._unread > MAX_UNREAD:
                raise RelayError("the remote sends pings, and does not read the answers")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, reason: str) -> None:
        self._stop_timer()
        self._link.fail(RelayError(reason))
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool:
        self._library.receive_eof()
        return False

    def connection_lost(self, error: Any) -> None:
        self._stop_timer()
        self._transport = None
        self._library.parser.close()
        self._link.connection_lost(error)

    def pause_writing(self) -> None:
        self._full = True
        self._link.pause_writing()

    def resume_writing(self) -> None:
        self._full = False
        self._unread = 0
        self._link.resume_writing()

    # -- the link's transport -------------------------------------------------------

    def _send(self) -> None:
        if self._transport is None:
            return
        for data in self._library.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()

    def set_write_buffer_limits(self, high: int) -> None:
        self._transport.set_write_buffer_limits(high)

    def get_write_buffer_size(self) -> int:
        return 0 if self._transport is None else int(self._transport.get_write_buffer_size())

    def write(self, data: bytes) -> None:
        if self._library.state is State.OPEN:
            self._library.send_binary(data)
            self._send()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        self._closing = True
        if self._library.state is State.OPEN:
            self._library.send_close(1000)
            self._send()
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
