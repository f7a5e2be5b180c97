"""The worker's end of a link: sockets of clients on one side, frames on the other.

At the end of the event loop's iteration the bytes of all clients are written to the link together. A client is not
read while `WINDOW` bytes of it wait for the broker, or while the link itself takes nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from mypy_extensions import i64

from mqttbroker.net.left_client import LEFT_BYTES, unread
from mqttbroker.net.link import REPORTED, WINDOW
from mqttbroker.net.link_frames import (
    ABORT,
    ACCEPTED,
    CLOSED,
    DATA,
    END,
    HELD,
    LARGEST_DATA,
    LEFT,
    REFUSED,
    TAKEN,
    WEBSOCKET_FAILED,
    FrameHandler,
    FrameReader,
    FrameWriter,
    data_prefix,
    number_bytes,
)

LINK_BUFFER: Final = 1_048_576  # bytes that the broker has not read, before no client is read any more
FRAMES_AT_ONCE: Final = 1 << 30
READ_AT_ONCE: Final = 524_288  # bytes of the link per iteration of the event loop, after which clients are read first


class LinkedClient:
    """One client's socket. An asyncio protocol, and the owner of a WebSocket.

    ``opening`` is called with the transport when there is one, and returns the kind and the body of the frame that
    tells the broker.
    """

    def __init__(self, link: WorkerLink, number: int, opening: Any) -> None:
        self.accepted = False  # the broker has accepted a CONNECT
        self._link = link
        self._number = number
        self._opening = opening
        self._prefix: bytes = data_prefix(DATA, number)
        self._transport: Any = None
        self._not_taken: i64 = 0  # bytes sent over the link that the broker has not taken
        self._reading_paused = False
        self._written: i64 = 0  # bytes given to the transport that the broker has not been told about
        self._writing_paused = False
        self.ended = False  # the sending side is closed, or will be behind what was written

    # -- the socket -------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        link = self._link
        kind, body = self._opening(transport)
        self._opening = None
        link.clients[self._number] = self
        link.send(kind, self._number, body)

    def data_received(self, data: bytes) -> None:
        link = self._link
        size: i64 = len(data)
        self._not_taken += size
        if size <= LARGEST_DATA:
            link.send_data(self._prefix, data)
        else:  # a long WebSocket message
            self._send(data)
        if not self._reading_paused and (self._not_taken > WINDOW or link.congested):
            self._reading_paused = True
            self._transport.pause_reading()
            if self._not_taken <= WINDOW:
                link.waiting.append(self)

    def _send(self, data: bytes) -> None:
        size: i64 = len(data)
        start: i64 = 0
        while start < size:
            self._link.send_data(self._prefix, data[start : start + LARGEST_DATA])
            start += LARGEST_DATA

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Any) -> None:
        rest = unread(self._transport, self.room_for_rest())
        self._transport = None
        link = self._link
        if link.clients.pop(self._number, None) is not None:
            self._send(rest)
            link.send(CLOSED, self._number, str(error or "").encode())

    def room_for_rest(self) -> int:
        """How many bytes of the client are read after its connection was lost: all such clients share what the link may gather."""
        return self._link.room_for_rest()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._report()

    # -- the broker -------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self.ended:
            return  # the worker is ending, or the link was given up, and the broker has not heard of it
        self._transport.write(data)
        self._written += len(data)
        if self._written >= REPORTED and not self._writing_paused:
            self._report()

    def _report(self) -> None:
        """Tell the broker how many bytes the socket has taken."""
        if self._transport is None:
            return
        unsent: i64 = self._transport.get_write_buffer_size()
        sent = self._written - unsent
        if sent > 0:
            self._written = unsent
            self._link.send(TAKEN, self._number, number_bytes(sent))

    def taken(self, size: i64) -> None:
        self._not_taken -= size
        self.resume_reading()

    def resume_reading(self) -> None:
        """Read again, if there is room."""
        if self._reading_paused and self._transport is not None and self._not_taken <= WINDOW // 2:
            self._reading_paused = False
            self._transport.resume_reading()

    def end(self) -> None:
        """Close the sending side behind everything that was written."""
        if self.ended:
            return
        self.ended = True
        transport = self._transport
        if transport.can_write_eof():
            transport.write_eof()
            if self._reading_paused:
                self._reading_paused = False
                transport.resume_reading()
        else:
            transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # -- a WebSocket's owner ----------------------------------------------------

    def hold_before(self, more: int) -> None:
        self._link.send(HELD, self._number, more.to_bytes(4, "big", signed=True))

    def take_answers(self) -> bytes:
        """The broker has them, and writes them when it is told that the client is lost."""
        return b""

    def websocket_failed(self) -> None:
        self._link.send(WEBSOCKET_FAILED, self._number, b"")

    def lost(self, reason: str) -> None:
        self._link.send(LEFT, self._number, reason.encode())

    def refuse(self, reason_code: int, detail: str) -> None:
        self._link.send(REFUSED, self._number, reason_code.to_bytes(1, "big") + detail.encode())


class WorkerLink(FrameHandler):
    """The link to the broker. An asyncio protocol, without inheriting from asyncio's.

    ``control`` handles the frames that are for no open client: ``control(kind, number, body)``; ``on_lost`` is called
    when the link is closed.
    """

    def __init__(self, loop: Any, control: Any, on_lost: Any) -> None:
        self.clients: dict[int, LinkedClient] = {}
        self.congested = False
        self.waiting: deque[LinkedClient] = deque()  # those that are not read because the link takes nothing
        self._loop = loop
        self._control = control
        self._on_lost = on_lost
        self._transport: Any = None
        self._reader = FrameReader(self)
        self._writer = FrameWriter()
        self._flushing = False  # `_flush` is called in the next iteration of the event loop
        self._read: i64 = 0  # bytes of the link since `_flush`
        self._reading_paused = False
        self._last_number = 0

    def new_number(self) -> int:
        """A number for a client that no open one has."""
        number: int = self._last_number
        while True:
            number = number % 0xFFFFFFFF + 1
            if number not in self.clients:
                self._last_number = number
                return number

    # -- an asyncio protocol ----------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(LINK_BUFFER)

    def data_received(self, data: bytes) -> None:
        self._read += len(data)
        if self._read > READ_AT_ONCE and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
            self._request_flush()
        self._reader.feed(data)
        self._reader.read(FRAMES_AT_ONCE)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Any) -> None:
        self._transport = None
        self._on_lost()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        while self.waiting and not self.congested:
            self.waiting.popleft().resume_reading()

    def handle(self, kind: i64, number: i64, data: bytes, start: i64, end: i64) -> None:
        client = self.clients.get(number)
        if client is None:
            self._control(kind, number, data[start:end])
        elif kind == DATA:
            client.write(data[start:end])
        elif kind == TAKEN:
            client.taken(int.from_bytes(data[start:end], "big"))
        elif kind == END:
            client.end()
        elif kind == ABORT:
            client.abort()
        elif kind == ACCEPTED:
            client.accepted = True

    # -- writing ----------------------------------------------------------------

    def send(self, kind: int, number: int, body: bytes) -> None:
        self._writer.add(kind, number, body)
        self._request_flush()

    def send_data(self, prefix: bytes, data: bytes) -> None:
        self._writer.add_data(prefix, data)
        self._request_flush()

    def _request_flush(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write everything gathered, and read the link again."""
        self._flushing = False
        self._read = 0
        if self._transport is None:
            self._writer.take()
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._writer.write_to(self._transport)

    def room_for_rest(self) -> int:
        """`LEFT_BYTES` without what the broker has not been sent yet."""
        if self._transport is None:
            return 0
        unsent: int = self._writer.size + self._transport.get_write_buffer_size()
        return max(0, LEFT_BYTES - unsent)

    def close(self) -> None:
        """Close the link at once, whatever it has not sent."""
        if self._transport is not None:
            self._transport.abort()

    def shut_down(self) -> None:
        """Close all clients' sockets, behind everything that was written."""
        for client in list(self.clients.values()):
            client.end()
