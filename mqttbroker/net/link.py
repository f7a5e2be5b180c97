"""The broker's end of a link: the clients of one connection worker, whose frames come and go over one Unix socket.

`LinkTransport` takes the place of a socket's transport for a `Wire`. Each direction of a client has a window: so many
bytes may be on the way, or wait for the slower side, until `TAKEN` frames make room. The broker grants none while it
does not read from a client, so TCP holds the publisher; a worker grants none while a client does not read.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from mypy_extensions import i64

from mqttbroker.net.link_flush import LinkFlush
from mqttbroker.net.link_frames import (
    ABORT,
    ACCEPTED,
    CLOSED,
    DATA,
    END,
    LARGEST_BODY,
    TAKEN,
    FrameHandler,
    FrameReader,
    FrameWriter,
    LinkError,
    data_prefix,
    number_bytes,
)
from mqttbroker.net.wire import READ_PAUSE, Wire

WINDOW: Final = 262_144  # bytes of one client that a worker sends before the broker has taken some
SEND_WINDOW: Final = 524_288  # bytes for one client after which nothing more is written until the worker has sent some
SHORT_SEND_WINDOW: Final = 65_536  # the same while all clients together have half of `Outbound.max_blocked`
RESUME_BELOW: Final = 131_072  # bytes of `SEND_WINDOW` in use below which writing continues
REPORTED: Final = 65_536  # bytes taken that are worth a frame
LINK_BUFFER: Final = 4_194_304  # bytes that wait for a worker that does not read, before its clients are not written to
FRAMES_AT_ONCE: Final = 32  # frames handled between two readings of the clock
READ_TIME: Final = 0.002  # seconds per iteration of the event loop in which frames of one link are handled


class LinkTransport:
    """The transport of a client that a worker serves; it has the methods of an asyncio transport that `Wire` uses.

    ``peername`` is the client's address as `peer_text` takes it. ``tls`` stands for the `ssl.SSLObject` of its
    handshake. ``websocket``: the worker is told when a CONNECT was accepted.
    """

    def __init__(self, link: Link, number: int, wire: Wire, peername: Any, tls: Any, websocket: bool) -> None:
        self.link = link
        self.number = number
        self.wire: Wire | None = wire
        self.receiver: Any = None  # in front of the wire, if there is one
        self._peername = peername
        self._tls = tls
        self._tell_accepted = websocket
        self._prefix: bytes = data_prefix(DATA, number)
        self._unsent: i64 = 0  # bytes written that the worker has not sent
        self._writing_paused = False
        self._reading = True
        self._not_taken: i64 = 0  # bytes received that the worker has not been told about
        self._held: deque[bytes] | None = None  # received while not reading
        self._incomplete: i64 = 0  # bytes of an incomplete WebSocket frame that the worker has
        self._lost: str | None = None  # the reason why nothing follows the held data
        self._closed: str | None = None  # the reason of a close that follows it
        self._timer: Any = None

    # -- from the worker --------------------------------------------------------

    def received(self, data: bytes, now: float) -> None:
        """The client sent bytes."""
        self._not_taken += len(data)
        if self._reading and self._held is None:
            self._deliver(data, now)
            return
        wire = self.wire
        if wire is None or wire.closing:
            return
        if self._held is None:
            self._held = deque()
        self._held.append(data)
        wire.hold_before(len(data))

    def _deliver(self, data: bytes, now: float) -> None:
        wire = self.wire
        if wire is None:
            return
        if self.receiver is not None:
            self.receiver.data_received(data)
        else:
            wire.received(data, now)
        if self._reading and self._not_taken >= REPORTED:
            self._report()

    def _report(self) -> None:
        self.link.send(TAKEN, self.number, number_bytes(self._not_taken))
        self._not_taken = 0

    def deliver_held(self, now: float) -> None:
        """Deliver the data that arrived while reading was paused."""
        held = self._held
        while self._reading and held:
            data = held.popleft()
            if self.wire is not None:
                self.wire.hold_before(-len(data))
            self._deliver(data, now)
        if not held:
            self._held = None
            if self._lost is not None and self.wire is not None:
                self.wire.lost(self._lost)
            if self._closed is not None:
                self._close()
            elif self._reading and self._not_taken >= REPORTED:
                self._report()

    def taken(self, size: i64) -> None:
        """The worker has sent bytes to the client."""
        if size > self._unsent:
            raise LinkError(f"{size} bytes were taken of {self._unsent}")
        self._unsent -= size
        self.link.outbound.linked_bytes -= size
        if self._writing_paused and self._unsent < RESUME_BELOW:
            if self.link.congested:
                self.link.waiting.append(self)
            else:
                self._resume_writing()

    def hold_before(self, more: i64) -> None:
        """The worker has so many bytes more, or fewer, of an incomplete WebSocket frame."""
        self._incomplete += more
        if self._incomplete < 0:
            raise LinkError(f"{self._incomplete} bytes of an incomplete frame")
        wire = self.wire
        if wire is not None:
            wire.hold_before(more)

    def resume_writing(self) -> None:
        """The link has room again."""
        if self._writing_paused and self._unsent < RESUME_BELOW:
            self._resume_writing()

    def _resume_writing(self) -> None:
        self._writing_paused = False
        if self.wire is not None:
            self._receiver().resume_writing()

    def _receiver(self) -> Any:
        return self.wire if self.receiver is None else self.receiver

    def left(self, reason: str) -> None:
        """Nothing more will be received, and the socket is open."""
        wire = self.wire
        if wire is not None and (self._held is None or wire.closing):
            wire.lost(reason)
        else:
            self._lost = reason

    def closed(self, reason: str) -> None:
        """The socket is closed. A client that waits for slow subscribers loses what is held: else it could have more held by leaving."""
        self._closed = reason
        wire = self.wire
        if self._held is None or wire is None or wire.closing or wire.connection.paused_by is not None:
            if wire is not None and self._held is not None:
                wire.closing = True
            self._close()
        else:
            self._timer = self.link.call_later(wire.broker.terms.left_client_timeout, self._give_up)

    def _give_up(self) -> None:
        """What is held was not handled in time."""
        wire = self.wire
        if wire is not None:
            wire.closing = True
            self._close()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.link.outbound.linked_bytes -= self._unsent
        self._unsent = 0
        receiver, reason = self._receiver(), self._closed
        self._held = None
        self.wire = self.receiver = None
        if receiver is not None:
            receiver.connection_lost(reason or None)

    # -- an asyncio transport ---------------------------------------------------

    def write(self, data: bytes) -> None:
        self.link.send_data(self._prefix, data)
        self._written(len(data))

    def writelines(self, parts: list[Any]) -> None:
        size: i64 = 0
        for part in parts:
            size += len(part)
        self.link.send_pieces(self._prefix, parts, size)
        self._written(size)

    def _written(self, size: i64) -> None:
        if self._tell_accepted and self.wire is not None and self.wire.accepted:
            self._tell_accepted = False
            self.link.send(ACCEPTED, self.number, b"")
        link = self.link
        self._unsent += size
        link.outbound.linked_bytes += size
        if not self._writing_paused and (self._unsent > SHORT_SEND_WINDOW or link.congested):
            outbound = link.outbound
            if self._unsent > SEND_WINDOW or link.congested or 2 * outbound.linked_bytes > outbound.max_blocked:
                self._writing_paused = True
                if link.congested:
                    link.waiting.append(self)
                self._receiver().pause_writing()

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        if self._held is not None or self._not_taken >= REPORTED:
            self.link.deliver_later(self)

    def can_write_eof(self) -> bool:
        """True for each kind of listener: the worker knows whether its socket can be closed in one direction."""
        return True

    def write_eof(self) -> None:
        self.link.send(END, self.number, b"")

    def close(self) -> None:
        self.write_eof()

    def abort(self) -> None:
        self.link.send(ABORT, self.number, b"")

    def get_extra_info(self, name: str) -> Any:
        if name == "peername":
            return self._peername
        if name == "ssl_object":
            return self._tls
        if name == "worker":
            return self.link.worker
        if name == "peercert":
            return None if self._tls is None else self._tls.getpeercert()
        return None


class Link(FrameHandler):
    """The clients of one worker. An asyncio protocol of the link's socket, without inheriting from asyncio's.

    ``control`` handles the frames for which there is no `LinkTransport`: ``control(kind, number, body)``. ``on_lost``
    is called when the link is closed, before its clients are lost.
    """

    def __init__(self, scheduler: LinkFlush, worker: int, control: Any, on_lost: Any) -> None:
        self.worker = worker
        self.clients: dict[int, LinkTransport] = {}
        self.congested = False
        self.waiting: list[LinkTransport] = []  # those that are not written to because the link is congested
        self.outbound = scheduler.outbound
        self._scheduler = scheduler
        self.call_later = scheduler.loop.call_later
        self._control = control
        self._on_lost = on_lost
        self.error = ""  # why the link was closed from this side
        self._transport: Any = None
        self._reader = FrameReader(self, LARGEST_BODY)
        self._writer = FrameWriter()
        self._writing = False  # there are frames for the end of this iteration
        self._reading_on = False  # frames of an earlier read wait for the next iteration
        self._to_deliver: list[LinkTransport] = []
        self._now = 0.0

    @property
    def buffered(self) -> int:
        """Bytes that the worker has not read."""
        return 0 if self._transport is None else int(self._transport.get_write_buffer_size()) + self._writer.size

    # -- an asyncio protocol ----------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(LINK_BUFFER)

    def data_received(self, data: bytes) -> None:
        if self.error:
            return
        self._reader.feed(data)
        if not self._reading_on:
            # libuv would read a link with much data many times in this iteration.
            self._handle_frames(len(data) >= READ_PAUSE)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Any) -> None:
        self._transport = None
        self._on_lost(self)
        for client in list(self.clients.values()):
            client.closed("its connection worker has ended")
        self.clients.clear()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        waiting, self.waiting = self.waiting, []
        for client in waiting:
            client.resume_writing()

    # -- reading ----------------------------------------------------------------

    def _read(self) -> None:
        self._handle_frames(False)

    def _handle_frames(self, pause: bool) -> None:
        """Handle frames for up to `READ_TIME`; the rest follows in the next iteration, after other clients.

        With ``pause`` the link is not read before that iteration either.
        """
        if self._transport is None or self.error:
            return
        scheduler = self._scheduler
        now = self._now = scheduler.update_clock()
        until = now + READ_TIME
        more = True
        while more and now < until:
            try:
                more = self._reader.read(FRAMES_AT_ONCE)
            except LinkError as error:
                self.fail(str(error))
                return
            now = self._now = scheduler.update_clock()
        if more or pause:
            if not self._reading_on:
                self._reading_on = True
                self._transport.pause_reading()
            scheduler.loop.call_soon(self._read)
        elif self._reading_on:
            self._reading_on = False
            self._transport.resume_reading()

    def handle(self, kind: i64, number: i64, data: bytes, start: i64, end: i64) -> None:
        client = self.clients.get(number)
        if client is None:
            self._control(kind, number, data[start:end])
        elif kind == DATA:
            client.received(data[start:end], self._now)
        elif kind == TAKEN:
            if end - start != 4:
                raise LinkError(f"a number of {end - start} bytes")
            client.taken(int.from_bytes(data[start:end], "big"))
        elif kind == CLOSED:
            del self.clients[number]
            client.closed(data[start:end].decode("utf-8", "replace"))
        else:
            self._control(kind, number, data[start:end])

    def deliver_later(self, client: LinkTransport) -> None:
        """Have `LinkTransport.deliver_held` called in the next iteration of the event loop."""
        self._to_deliver.append(client)
        if len(self._to_deliver) == 1:
            self._scheduler.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        clients, self._to_deliver = self._to_deliver, []
        now = self._scheduler.update_clock()
        for client in clients:
            client.deliver_held(now)

    # -- writing ----------------------------------------------------------------

    def send(self, kind: int, number: int, body: bytes) -> None:
        self._writer.add(kind, number, body)
        self._request_flush()

    def send_data(self, prefix: bytes, data: bytes) -> None:
        self._writer.add_data(prefix, data)
        self._request_flush()

    def send_pieces(self, prefix: bytes, pieces: list[bytes], size: i64) -> None:
        self._writer.add_pieces(prefix, pieces, size)
        self._request_flush()

    def _request_flush(self) -> None:
        if not self._writing:
            self._writing = True
            self._scheduler.flush_link(self)

    def flush(self) -> None:
        """Write everything gathered."""
        self._writing = False
        if self._transport is not None:
            self._writer.write_to(self._transport)

    def fail(self, reason: str) -> None:
        """Close the link at once, for the worker is killed."""
        self.error = reason
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Write everything gathered, and close the link."""
        if self._transport is not None:
            self.flush()
            self._transport.close()
