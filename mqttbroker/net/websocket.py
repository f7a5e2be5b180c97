"""MQTT over WebSocket: a layer between a socket and the owner of its client, such as a `Wire`.

The owner sees MQTT bytes and never a frame [MQTT-6.0.0-2]. A text frame ends the connection [MQTT-6.0.0-1], and the
client must offer the subprotocol ``mqtt`` [MQTT-6.0.0-3] [MQTT-6.0.0-4], or ``mqttv3.1``, as clients of MQTT 3.1 do.
The `websockets` library does the handshake and handles close frames and violations of RFC 6455; `FrameReader` decodes
all other frames. Everything is handled in the call that brings the bytes, without tasks or futures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Protocol, cast

from websockets.exceptions import InvalidMessage
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

from mqttbroker import build_kind
from mqttbroker.codec.reason_codes import PROTOCOL_ERROR
from mqttbroker.net.left_client import unread
from mqttbroker.net.websocket_frames import FrameReader, PacketFrames
from mqttbroker.net.wire import CLOSE_TIMEOUT

try:
    from websockets.speedups import apply_mask
except ImportError:
    from websockets.utils import apply_mask

MAX_HEAD = 16 * 1024  # bytes of the HTTP request
FRAME_HEADROOM = 64 * 1024  # bytes by which a frame may be longer than the longest packet, as it may hold several
FRAMES_PER_ITERATION = 2048  # of one client in one iteration of the event loop
# Payloads up to this size are unmasked in compiled code; in plain Python a call of the library's C code is cheaper.
_SHORT = 256 if build_kind() == "compiled" else 0

# The owner logs connections with client and address; the library's log lines have neither.
_silent = logging.getLogger("mqttbroker.websockets")
_silent.setLevel(logging.ERROR)


class Owner(Protocol):
    """The owner of a client, as its WebSocket calls it; its methods for the socket are those of an asyncio protocol."""

    @property
    def accepted(self) -> bool:
        """Whether a CONNECT was accepted."""

    def hold_before(self, more: int) -> None:
        """Count more bytes, or fewer, of a frame that is not complete."""

    def websocket_failed(self) -> None:
        """There was no valid handshake."""

    def room_for_rest(self) -> int:
        """How many bytes of the client are read after its connection was lost."""

    def take_answers(self) -> bytes:
        """Remove and return the packets that wait to be written."""

    def lost(self, reason: str) -> None:
        """Nothing more will be received. The owner calls `WebSocket.close`, and may write before."""

    def refuse(self, reason_code: int, detail: str) -> None:
        """The client violated MQTT over WebSocket."""

    def pause_writing(self) -> None:
        """The socket's buffer is full."""

    def resume_writing(self) -> None:
        """The socket's buffer has room again."""


class WebSocket:
    """One client's WebSocket: an asyncio protocol for the socket, and a transport for its ``owner``.

    ``origins`` are the web pages that may connect; empty allows all. ``max_packet_size`` and, before a CONNECT is
    accepted, ``max_connect_size`` limit the frames, in bytes. ``receiver`` gets the MQTT bytes: the owner, or a
    `PacketLog` in front of it.
    """

    def __init__(self, owner: Owner, origins: Sequence[str], max_packet_size: int, max_connect_size: int, receiver: Any = None) -> None:
        self._owner = owner
        self._receiver: Any = owner if receiver is None else receiver
        self._transport: Any = None
        largest = max_packet_size + FRAME_HEADROOM
        self._library = ServerProtocol(
            origins=[*map(Origin, origins), None] if origins else None,
            subprotocols=[Subprotocol("mqtt"), Subprotocol("mqttv3.1")],
            max_size=(None, largest),
            logger=_silent,
        )
        self._largest = largest
        # Until CONNECT is accepted an unknown client may send no more than a CONNECT.
        self._reader = FrameReader(min(largest, max_connect_size + FRAME_HEADROOM), apply_mask, _SHORT)
        self._frames = PacketFrames()
        self._request: bytes | None = b""  # the HTTP request so far; None once it was answered
        self._receiving = True  # received payload goes to the owner
        self._paused_by_owner = False
        self._reading_on = False  # frames of an earlier read wait for the next iteration of the loop
        self._congested = False
        self._ending = False  # the frames that end the WebSocket follow the owner's last packets
        self._lost = False
        self._counted = 0  # bytes of an incomplete frame that the packet reader counts
        self._pong: list[bytes] = []  # the answer to the last ping that came while congested
        self._close_code = CloseCode.NORMAL_CLOSURE
        self._timer: asyncio.TimerHandle | None = None

    # -- the socket's protocol -----------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._receiver.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._request is not None:
            data = self._handshake(self._request + data)
        self._reader.feed(data)
        if not self._reading_on:
            self._read_frames()
        held = self._reader.held
        if held != self._counted and not self._lost:
            counted, self._counted = self._counted, held
            self._owner.hold_before(held - counted)

    def _read_frames(self) -> None:
        """Read some frames; the rest of a long read follows in the next iteration of the loop, after other clients."""
        if self._lost:
            return
        self._read_some_frames()
        if self._reader.unread:
            if not self._reading_on:
                self._reading_on = True
                self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_frames)
        elif self._reading_on:
            self._reading_on = False
            if not self._paused_by_owner:
                self._transport.resume_reading()

    def _read_some_frames(self) -> None:
        reader = self._reader
        if reader.largest != self._largest and self._owner.accepted:
            reader.largest = self._largest
        frame = reader.read(FRAMES_PER_ITERATION)
        while frame:
            self._handle_other(frame)
            frame = reader.read(FRAMES_PER_ITERATION)
        if reader.ping is not None:
            if self._library.state is State.OPEN:
                self._library.send_pong(reader.ping)
                self._send()
            reader.ping = None
        self._deliver()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._request is not None:
            self._owner.websocket_failed()
        rest = unread(self._transport, self._owner.room_for_rest())
        if rest and self._request is None and self._receiving:
            self._reader.feed(rest)
        while self._reader.unread:
            self._read_some_frames()
        if self._counted:
            counted, self._counted = self._counted, 0
            self._owner.hold_before(-counted)
        self._lost = True
        self._receiver.connection_lost(error)
        # No reference cycle may remain. The library's generator and the tracebacks of its errors refer to it.
        library = self._library
        library.parser.close()
        library.parser_exc = library.handshake_exc = None

    def pause_writing(self) -> None:
        self._congested = True
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._congested = False
        if self._pong:
            self._transport.writelines(self._pong)
            self._pong.clear()
        self._owner.resume_writing()

    # -- the owner's transport ------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take bytes of the socket."""
        self.data_received(data)

    def set_protocol(self, owner: Any) -> None:
        """Have another owner, which gets the MQTT bytes, too."""
        self._owner = self._receiver = owner

    def write(self, data: bytes) -> None:
        if self._library.state is State.OPEN or self._ending:
            self._transport.write(self._frames.frame_short(data))

    def writelines(self, parts: list[bytes]) -> None:
        if self._library.state is State.OPEN or self._ending:
            self._transport.writelines(self._frames.frame(parts))

    def can_write_eof(self) -> bool:
        """WebSocket has a closing handshake instead."""
        return False

    def close(self) -> None:
        """Send a close frame, and wait for the client's for `CLOSE_TIMEOUT` seconds at most."""
        self._stop_receiving()
        self._pong.clear()
        if self._ending:
            self._ending = False
            self._send()
        elif self._library.state is State.OPEN:
            self._library.send_close(self._close_code)
            self._send()
            self._transport.resume_reading()
            self._linger()
        elif self._timer is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        self._paused_by_owner = True
        if not self._reading_on:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused_by_owner = False
        if not self._reading_on:
            self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        size: int = self._transport.get_write_buffer_size()
        return size

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    # -- between them --------------------------------------------------------

    def _handshake(self, request: bytes) -> bytes:
        """Answer the HTTP request once it is whole; returns the bytes after it."""
        end = request.find(b"\r\n\r\n") + 4
        library = self._library
        if end < 4 and len(request) <= MAX_HEAD:
            self._request = request
            return b""
        self._request = None
        if end < 4 or end > MAX_HEAD:
            response = library.reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {MAX_HEAD} bytes\n")
            library.send_response(response)
        else:
            library.receive_data(request[:end])
            for event in library.events_received():
                library.send_response(library.accept(cast(Request, event)))
            if isinstance(library.handshake_exc, InvalidMessage):  # the library sends no response
                self._transport.write(library.reject(HTTPStatus.BAD_REQUEST, "not an HTTP request\n").serialize())
        if library.state is not State.OPEN:
            self._stop_receiving()
            self._owner.websocket_failed()
            self._owner.lost(f"WebSocket handshake: {library.handshake_exc or 'request too long'}")
            self._send()
            return b""
        self._send()
        return request[end:]

    def _stop_receiving(self) -> None:
        self._receiving = False
        self._reader.discard()

    def _handle_other(self, frame: bytes) -> None:
        """Give the library a frame that `FrameReader` does not decode, after the payload before it."""
        self._deliver()
        library = self._library
        if self._reader.too_long and library.state is State.OPEN:
            library.fail(CloseCode.MESSAGE_TOO_BIG, f"a frame of more than {self._reader.largest} bytes")
        elif self._reader.fragmented and frame[0] & 0x0F < 8 and library.state is State.OPEN:
            library.fail(CloseCode.PROTOCOL_ERROR, "a new message inside a fragmented one")
        else:
            library.receive_data(frame)
        for event in library.events_received():
            if cast(Frame, event).opcode is Opcode.TEXT:
                self._refuse_text()
        if library.state is not State.OPEN and self._receiving:
            self._stop_receiving()
            self._ending = True
            answers = b"" if self._congested else self._owner.take_answers()
            if answers:
                self.write(answers)
            received, sent = library.close_rcvd, library.close_sent
            self._owner.lost(f"WebSocket closed: {received}" if received else f"WebSocket: {sent}")
        if not self._ending:
            self._send()

    def _refuse_text(self) -> None:
        if self._receiving:  # [MQTT-6.0.0-1]
            self._stop_receiving()
            self._close_code = CloseCode.UNSUPPORTED_DATA
            self._owner.refuse(PROTOCOL_ERROR, "WebSocket text frame")

    def _deliver(self) -> None:
        payload = self._reader.payload()
        if payload and self._receiving:
            self._receiver.data_received(payload)

    def _send(self) -> None:
        """Write the frames that the library has to send."""
        for data in self._library.data_to_send():
            if not data:
                self._end()
            elif self._congested and self._library.state is State.OPEN:
                self._pong = [data]  # a pong for the last ping answers all earlier ones (RFC 6455, section 5.5.3)
            else:
                self._transport.write(data)

    def _end(self) -> None:
        """The library has nothing more to send."""
        if self._library.close_rcvd is None and self._transport.can_write_eof():
            # A close at once would reset the connection when the client answers, and discard our close frame.
            self._transport.write_eof()
            self._linger()
        else:
            self._transport.close()

    def _linger(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(CLOSE_TIMEOUT, self._transport.abort)
