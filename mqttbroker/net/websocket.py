"""MQTT over WebSocket: between a socket and a `Wire`.

The rule kept here: a `Wire` sees bytes and never a frame [MQTT-6.0.0-2]; text
ends the connection [MQTT-6.0.0-1], and no client gets in without the
subprotocol ``mqtt`` [MQTT-6.0.0-3] [MQTT-6.0.0-4].

The `websockets` library shakes hands, and keeps RFC 6455 for every frame that
is not a whole binary message; see `websocket_frames` for those.  No task, no
future: what a read brings is handled where it arrives, in one call.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, List, Optional, Sequence, cast

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

from mqttbroker import build_kind
from mqttbroker.codec.reason_codes import PROTOCOL_ERROR
from mqttbroker.net.websocket_frames import FrameReader, binary_header
from mqttbroker.net.wire import LINGER, Wire

try:
    from websockets.speedups import apply_mask
except ImportError:
    from websockets.utils import apply_mask

MAX_HEAD = 16 * 1024  # bytes of the HTTP request
# A frame may hold several packets, so it may be longer than the longest of them.
FRAME_HEADROOM = 64 * 1024
# Payloads of so many bytes are unmasked in compiled code; interpreted, a call of C is always cheaper.
_SHORT = 256 if build_kind() == "compiled" else 0

# The library's words on each connection; ours are `Wire`'s, with client and address.
_silent = logging.getLogger("mqttbroker.websockets")
_silent.setLevel(logging.ERROR)


class WebSocket:
    """One client's WebSocket: by shape an asyncio protocol below, and a transport above.

    ``origins`` are the web pages that may connect; empty lets all.
    """

    def __init__(self, wire: Wire, origins: Sequence[str]) -> None:
        self._wire = wire
        self._transport: Any = None
        largest = wire.listener_policy.terms.max_packet_size + FRAME_HEADROOM
        self._library = ServerProtocol(
            origins=[*map(Origin, origins), None] if origins else None,
            subprotocols=[Subprotocol("mqtt")],
            max_size=(None, largest),
            logger=_silent,
        )
        self._reader = FrameReader(largest, apply_mask, _SHORT)
        self._head: Optional[bytes] = b""  # of the HTTP request; None once it was answered
        self._between = True  # not inside a fragmented message
        self._listening = True  # what comes in still goes to the wire
        self._congested = False
        self._held: List[bytes] = []  # the answer to the last ping that came while congested
        self._close_code = CloseCode.NORMAL_CLOSURE
        self._timer: Optional[asyncio.TimerHandle] = None

    # -- the socket's protocol -----------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._wire.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            data = self._shake_hands(self._head + data)
        reader = self._reader
        reader.feed(data)
        while True:
            frame = reader.take(self._between)
            if not frame:
                break
            self._unusual(frame)
        self._deliver()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._head is not None:
            self._failed()
        self._wire.connection_lost(error)

    def pause_writing(self) -> None:
        self._congested = True
        self._wire.pause_writing()

    def resume_writing(self) -> None:
        self._congested = False
        if self._held:
            self._transport.writelines(self._held)
            self._held.clear()
        self._wire.resume_writing()

    # -- the wire's transport ------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._library.state is State.OPEN:
            self._transport.writelines((binary_header(len(data)), data))

    def writelines(self, parts: List[bytes]) -> None:
        if self._library.state is State.OPEN:
            self._transport.writelines((binary_header(sum(map(len, parts))), *parts))

    def can_write_eof(self) -> bool:
        """WebSocket has a closing handshake instead."""
        return False

    def close(self) -> None:
        """Say goodbye, and wait `LINGER` seconds at most for the client to do so."""
        self._listening = False
        self._held.clear()
        if self._library.state is State.OPEN:
            self._library.send_close(self._close_code)
            self._send()
            self._transport.resume_reading()
            self._linger()
        elif self._timer is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    # -- between them --------------------------------------------------------

    def _shake_hands(self, head: bytes) -> bytes:
        """Answer the HTTP request once it is whole; what came after it."""
        end = head.find(b"\r\n\r\n") + 4
        library = self._library
        if end < 4 and len(head) <= MAX_HEAD:
            self._head = head
            return b""
        self._head = None
        if end < 4 or end > MAX_HEAD:
            response = library.reject(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {MAX_HEAD} bytes\n"
            )
            library.send_response(response)
        else:
            library.receive_data(head[:end])
            for request in library.events_received():
                library.send_response(library.accept(cast(Request, request)))
        if library.state is not State.OPEN:
            self._listening = False
            self._failed()
            self._wire.lost(f"WebSocket handshake: {library.handshake_exc or 'request too long'}")
            self._send()
            return b""
        self._send()
        return head[end:]

    def _failed(self) -> None:
        """The client is none, for it did not shake hands."""
        self._wire.broker.outbound.counters.websocket_failures += 1

    def _unusual(self, frame: bytes) -> None:
        """A frame that the library has to judge; the payload so far came before it."""
        library = self._library
        library.receive_data(frame)
        for event in library.events_received():
            assert isinstance(event, Frame)
            if event.opcode is Opcode.TEXT:
                self._deliver()
                self._refuse_text()
            elif event.opcode is Opcode.BINARY or event.opcode is Opcode.CONT:
                self._reader.add(bytes(event.data))
                self._between = event.fin
        if library.state is not State.OPEN and self._listening:
            self._deliver()
            self._listening = False
            received, sent = library.close_rcvd, library.close_sent
            self._wire.lost(f"WebSocket closed: {received}" if received else f"WebSocket: {sent}")
        self._send()

    def _refuse_text(self) -> None:
        if self._listening:  # [MQTT-6.0.0-1]
            self._listening = False
            self._close_code = CloseCode.UNSUPPORTED_DATA
            self._wire.refuse(PROTOCOL_ERROR, "WebSocket text frame")

    def _deliver(self) -> None:
        payload = self._reader.payload()
        if payload and self._listening:
            self._wire.data_received(payload)

    def _send(self) -> None:
        """Write what the library has to say."""
        for data in self._library.data_to_send():
            if not data:
                self._hang_up()
            elif self._congested and self._library.state is State.OPEN:
                self._held = [data]  # RFC 6455, section 5.5.3: the last ping's pong answers for all
            else:
                self._transport.write(data)

    def _hang_up(self) -> None:
        """The library has nothing more to say."""
        if self._library.close_rcvd is None and self._transport.can_write_eof():
            # Closing now would reset the connection when the client answers, and lose what it was told.
            self._transport.write_eof()
            self._linger()
        else:
            self._transport.close()

    def _linger(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(LINGER, self._transport.abort)
