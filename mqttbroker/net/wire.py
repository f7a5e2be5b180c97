"""The wire: one client's socket.

A client that sends much is read for a bounded time per event-loop iteration, so that no client delays the others for long. `Wire` has the
methods of an asyncio protocol but does not inherit from one, because mypyc compiles it to a native class. Its transport is that of a socket
or a `WebSocket`.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from typing import Any, Final

from mypy_extensions import i64

from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.access.policy import AuthenticationPolicy
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.client_wire import ClientWire
from mqttbroker.core.client.connection import AWAIT_CONNECT, CLOSED, CONNECTED, CONNECTING
from mqttbroker.core.packets.packet_reader import PacketReader
from mqttbroker.core.packets.protocol import Protocol
from mqttbroker.core.terms.rates import Throttle
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.left_client import LEFT_BYTES, LeftClient, is_drained, last_bytes, unread
from mqttbroker.net.listener_policy import REFUSALS, ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets

log = logging.getLogger("mqttbroker.clients")

READ_SLICE: Final = 16_384  # bytes handled between two readings of the clock
READ_TIME: Final = 0.002  # seconds per event-loop iteration in which slices of one client's data are handled
READ_PAUSE: Final = 131_072  # bytes of one read after which the client is not read again in the same iteration
CROWD: Final = 64  # a client has a crowd of receivers if it causes so many times the bytes that it sends
POLLRDHUP: Final[int] = getattr(select, "POLLRDHUP", 0)  # Linux has it
CLOSE_TIMEOUT: Final = 5.0  # seconds in which a client may take the last bytes and close its side


def peer_text(address: Any) -> str:
    """A socket's address for logs; "local" for an unnamed Unix socket."""
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "local")


def has_peer_left(descriptor: int) -> bool:
    """Whether the peer of a socket has closed its side; false where the system cannot tell."""
    if POLLRDHUP == 0:
        return False
    poll = select.poll()
    poll.register(descriptor, POLLRDHUP)
    return bool(poll.poll(0))


def is_finished(descriptor: int) -> bool:
    """Whether the peer of a socket has closed its side, and all that it sent is read; false where the system cannot tell."""
    return has_peer_left(descriptor) and is_drained(descriptor)


class Endpoint:
    """The objects that all wires of one listener share.

    ``new_client_id`` makes a client id for a client that sends none. ``on_error`` is called with the connection for an
    exception that is a defect of the broker. ``secure``: with TLS, and `ListenerPolicy.check_address`
    has admitted the address before the handshake. ``websocket``: the transport is a `WebSocket`.
    """

    def __init__(
        self,
        scheduler: FlushScheduler,
        policy: ListenerPolicy,
        sockets: OpenSockets,
        new_client_id: Callable[[], str],
        on_error: Any,
        secure: bool = False,
        websocket: bool = False,
    ) -> None:
        self.secure = secure
        self.websocket = websocket
        self.scheduler = scheduler
        self.policy = policy
        self.sockets = sockets
        self.new_client_id = new_client_id
        self.on_error = on_error


class Wire(ClientWire):
    """One client's transport, and the connection behind it."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self.endpoint = endpoint
        # Flags stand side by side, so that a compiled object has no gaps.
        self.counted_open = False  # in `OpenSockets`
        self.half_open = False  # until a CONNECT was received
        self.counted = False  # in `ListenerPolicy.clients`
        self.limited_half_open = False  # in `ListenerPolicy.half_open`
        self.closing = False
        self.reading_paused = False
        self.traced = False  # `transport` is a `Tap`
        self._has_crowd = False  # many clients receive what it publishes
        self.proxied_address = ""  # the client's, as a proxy told it; "" = the socket's
        self.proxied_common_name: str | None = None  # of the client's certificate, as a proxy told it
        self.refusal = ""  # the limit because of which the CONNECT is refused
        self.counted_address = ""  # in `ListenerPolicy.addresses`
        self.left = ""  # why nothing more will be received, while not everything is handled
        self.transport: Any = None
        self._close_timer: Any = None
        self._unhandled: bytes = b""  # received data that is not handled yet, from `_unhandled_from` on
        self._unhandled_from = 0
        self._unhandled_counted: i64 = 0  # its bytes that the reader counts

    @property
    def broker(self) -> Broker:
        return self.endpoint.scheduler.broker

    @property
    def worker(self) -> int:
        """The number of the connection worker that has the socket; 0 = it is in this process."""
        number: int = self.transport.get_extra_info("worker") or 0
        return number

    @property
    def certificate(self) -> Any:
        """The client's verified certificate as from `ssl.SSLSocket.getpeercert`; None or empty if it has none."""
        if self.proxied_common_name is not None:
            return {"subject": ((("commonName", self.proxied_common_name),),)}
        return self.transport.get_extra_info("peercert")

    # -- asyncio's protocol -----------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        address = self.proxied_address or peer_text(transport.get_extra_info("peername"))
        endpoint = self.endpoint
        now = endpoint.scheduler.update_clock()
        broker = self.broker
        self.connection = broker.accept(address, endpoint.policy.terms, now)
        self.connection.wire = self
        if endpoint.websocket:
            broker.outbound.websocket_connections += 1
        if endpoint.secure:
            broker.outbound.secure_connections += 1
        else:
            self.refusal = endpoint.policy.check_address(address, now)
        if self.refusal == "":
            self.counted_address = endpoint.policy.count_address(address)
        self.connection.limit_received(endpoint.policy.received)
        self.connection.limit_sent(endpoint.policy.sent)
        self.reader = PacketReader(Protocol(broker, self.connection, endpoint.new_client_id))
        self.counted_open = self.half_open = endpoint.sockets.add(self)
        if not self.counted_open:
            self.abort()
        else:
            self.limited_half_open = endpoint.policy.limit_half_open(self, address)
        if endpoint.scheduler.on_opened is not None:
            endpoint.scheduler.on_opened(self)

    def data_received(self, data: bytes) -> None:
        if not self.closing:
            self.received(data, self.endpoint.scheduler.update_clock())

    def received(self, data: bytes, now: float) -> None:
        """The client sent bytes; ``now`` is the clock as it was just updated."""
        if self.closing:
            return
        if self.traced:
            self.transport.trace_received(data)
        # In the middle of a round, another message to the crowd would cost one more write for each of its clients.
        waits = self._has_crowd and self.endpoint.scheduler.round_begun
        if not self._unhandled:
            if len(data) <= READ_SLICE and not waits:
                self._handle(data, 0, -1, now)
                return
            self._unhandled = data
        else:
            self._unhandled = self._unhandled[self._unhandled_from :] + data
        self._unhandled_from = 0
        if not self.reading_paused:
            self._handle_slices(now, 0.0 if waits else READ_TIME)

    def pause_writing(self) -> None:
        self.connection.outbox.pause(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self.connection.outbox.resume()
        self.connection.resume_sending()
        self.connection.request_flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Any) -> None:
        reason = f"connection lost: {error}" if error else "closed by the client"
        if not self.closing and (error is not None or self.endpoint.secure):
            self._take_unread()
        if not self.closing and (self.left or self._has_rest()):
            self.left = self.left or reason
            self.transport = LeftClient(self, self.transport, error, self.broker.terms.left_client_timeout)
            self.connection.request_flush()
            return
        self.closing = True
        if self.endpoint.secure:
            self.broker.outbound.secure_connections -= 1
        if self.endpoint.websocket:
            self.broker.outbound.websocket_connections -= 1
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None
        if self.counted_open:
            self.counted_open = False
            self.endpoint.sockets.remove(self)
        if self.counted:
            self.counted = False
            self.endpoint.policy.clients -= 1
        if self.counted_address:
            self.endpoint.policy.forget_address(self.counted_address)
            self.counted_address = ""
        if self.limited_half_open:
            self.limited_half_open = False
            self.endpoint.policy.half_open.remove(self)
        connection = self.connection
        for throttle in (connection.throttle, connection.outbox.throttle):
            if throttle is not None and throttle.timer is not None:
                throttle.timer.cancel()
                throttle.timer = None
        connection.throttle = connection.outbox.throttle = None
        self.lost(reason)
        # No reference cycle may remain: only the garbage collector would find it, which stops the loop.
        self.connection.wire = None
        self.transport = None
        self._unhandled = b""

    def _has_rest(self) -> bool:
        """Whether the client has sent something that is not handled yet.

        A client that waits for slow subscribers loses its rest: else a client could have the broker hold more by leaving.
        """
        if not self.reading_paused or self.closing:
            return False
        if self.connection.state == CONNECTING:  # a client need not wait for CONNACK (section 3.1.4)
            return self._holds_packets
        return self.accepted and self.connection.paused_by is None

    @property
    def _holds_packets(self) -> bool:
        """Whether something is received and not handled."""
        return len(self._unhandled) > 0 or not self.reader.between_packets or self.reader.held_before > 0

    def room_for_rest(self) -> int:
        """How many bytes of the client are read after its connection was lost; of one that waits for slow subscribers none."""
        waits = self.connection.paused_by is not None
        return LEFT_BYTES if not waits and (self.accepted or self.connection.state == CONNECTING) else 0

    def _take_unread(self) -> None:
        """Take what the client sent before its connection was lost, such as DISCONNECT [MQTT-3.14.4-3], to be handled in turns."""
        room = self.room_for_rest()
        data = unread(self.transport, room) if room else b""
        if not data:
            return
        self.reading_paused = True
        self._feed(data)
        if self._unhandled:
            self._count_unhandled()

    def admit(self) -> AuthenticationPolicy:
        if self.refusal:
            reason_code, detail = REFUSALS[self.refusal]
            raise MQTTError(reason_code, detail)
        policy = self.endpoint.policy.admit(self.transport)
        self.counted = True
        return policy

    def abort_if_client_left(self) -> bool:
        """Whether the client has given up its CONNECT, which waits for an answer; if so, close the connection.

        Such a client has closed its side and sent nothing behind its CONNECT. It is not read, so the socket is looked at.
        A worker reads its sockets to the end, and `lost` or `connection_lost` tell it here.
        """
        if self.closing or not self.reading_paused:
            return self.closing
        sock = self.transport.get_extra_info("socket")
        if sock is None or self._holds_packets or not has_peer_left(sock.fileno()):
            return False
        data = last_bytes(self.transport, sock.fileno())
        if data is None:
            return False
        if data:
            self._feed(data)
            if self._holds_packets or self.connection.state == CLOSED:
                return self.connection.state == CLOSED
        self.abort()
        return True

    def _feed(self, data: bytes) -> None:
        """Take bytes that were read past the transport."""
        transport = self.transport
        if hasattr(transport, "feed"):
            transport.feed(data)
        else:
            self.data_received(data)

    @property
    def between_packets(self) -> bool:
        """Whether neither direction is in the middle of a packet."""
        return self.reader.between_packets and not self._unhandled and not self.connection.outbox.parts

    # -- reading ----------------------------------------------------------------

    def _handle_slices(self, now: float, seconds: float) -> None:
        """Handle received data for up to ``seconds``; the rest follows after a later flush."""
        data = self._unhandled
        size: int = len(data)
        position: int = self._unhandled_from
        until = now + seconds
        while position < size and now < until and not self.reading_paused and not self.closing:
            position = self._handle(data, position, position + READ_SLICE, now)
            now = self.endpoint.scheduler.update_clock()
        if position >= size:
            self._unhandled = b""
            if self._unhandled_counted:
                self._count_unhandled()
            if size < READ_PAUSE:
                return
        else:
            self._count_unhandled()
        self._unhandled_from = position
        if not self.reading_paused and not self.closing:
            self.reading_paused = True
            self.transport.pause_reading()
            self.connection.request_flush()

    def _count_unhandled(self) -> None:
        size: i64 = len(self._unhandled)
        counted = self._unhandled_counted
        self._unhandled_counted = size
        self.reader.hold_before(size - counted)

    def _handle(self, data: bytes, start: int, stop: int, now: float) -> int:
        """Handle the packets that begin before ``stop``; returns the position after them."""
        scheduler = self.endpoint.scheduler
        connection = self.connection
        position: int = len(data)
        throttle = connection.throttle
        counters = scheduler.broker.outbound.counters
        published: i64 = counters.publish_received
        sent: i64 = counters.publish_packet_bytes_sent
        try:
            position = self.reader.receive(data, now, start, min(stop, position))
        except Exception:
            self.failed()
        handled: i64 = position - start
        self._has_crowd = counters.publish_packet_bytes_sent - sent > CROWD * handled
        if self.half_open and connection.state != AWAIT_CONNECT:
            self.half_open = False
            self.endpoint.sockets.protect(self)
            if self.limited_half_open:
                self.limited_half_open = False
                self.endpoint.policy.half_open.remove(self)
        if connection.blocked:
            self._pause_reading_if_blocked()
        if throttle is not None:
            self._limit_rate(throttle, throttle.count(counters.publish_received - published, position - start, now))
        journal = scheduler.broker.journal
        if journal.has_pending and journal.writer_idle and (scheduler.eager or journal.has_page_requests):
            scheduler.schedule()
        return position

    def _pause_reading_if_blocked(self) -> None:
        if self.connection.blocked and not self.reading_paused and not self.closing:
            self.reading_paused = True
            if self.left and self.connection.paused_by is not None:
                self.abort()
                return
            self.transport.pause_reading()
            self._wait_for_store()

    def _limit_rate(self, throttle: Throttle, seconds: float) -> None:
        """Do not read for ``seconds``; then `_check_rate` looks whether that was enough."""
        if seconds <= 0.0 or throttle.timer is not None or self.closing:
            return
        scheduler = self.endpoint.scheduler
        now: float = scheduler.loop.time()
        self.connection.last_received = now + seconds  # the silence is not the client's
        if not self.reading_paused:
            self.reading_paused = True
            self.transport.pause_reading()
            self.broker.outbound.counters.limit_reached(throttle.reached(now))
        throttle.timer = scheduler.loop.call_later(seconds, self._check_rate)

    def _check_rate(self) -> None:
        throttle = self.connection.throttle
        if throttle is None:
            return
        throttle.timer = None
        self._limit_rate(throttle, throttle.wait(self.endpoint.scheduler.update_clock()))
        if throttle.timer is None:
            self.connection.request_flush()

    def _wait_for_store(self) -> None:
        """If the store blocks the connection, have it flushed when the store has caught up."""
        if self.broker.outbound.backlogged:
            self.broker.commits.paused[self.connection] = True

    # -- writing ----------------------------------------------------------------

    def resume_sending_in(self, seconds: float) -> None:
        """Have `Connection.resume_sending` called when the client's rate permits more."""
        throttle = self.connection.outbox.throttle
        if throttle is None or throttle.timer is not None or self.closing:
            return
        scheduler = self.endpoint.scheduler
        self.broker.outbound.counters.limit_reached(throttle.reached(scheduler.loop.time()))
        throttle.timer = scheduler.loop.call_later(seconds, self._resume_sending)

    def _resume_sending(self) -> None:
        throttle = self.connection.outbox.throttle
        if throttle is None:
            return
        throttle.timer = None
        self.endpoint.scheduler.update_clock()
        self.connection.resume_sending()
        self.connection.request_flush()

    def flush(self) -> None:
        """Write the outbox, and have reading that was paused continue."""
        connection = self.connection
        outbox = connection.outbox
        transport = self.transport
        if connection.state == CLOSED:
            if outbox.parts and not self.closing:
                transport.write(outbox.drain())
            self.close()
            return
        if self.closing:
            return  # aborted: its transport may be closed
        if outbox.parts and not outbox.writing_paused:
            if outbox.has_large_part:
                self.endpoint.scheduler.write_large(connection, transport)
            else:
                transport.write(outbox.drain())
            if not outbox.writing_paused:
                connection.resume_sending()
        if self.reading_paused:
            self.endpoint.scheduler.resume_later(self)

    @property
    def loud(self) -> bool:
        """Whether the client is not read because it has had its share."""
        return self.connection.halted or len(self._unhandled) > 0

    def resume_reading(self) -> None:
        """Continue with reading that was paused, if nothing else prevents it."""
        if not self.reading_paused or self.closing:
            return
        self.connection.go_on()
        if self.connection.blocked:
            self._wait_for_store()
            return
        throttle = self.connection.throttle
        if throttle is not None and throttle.timer is not None:
            return
        self.reading_paused = False
        self.transport.resume_reading()
        self.reader.resume()
        self._pause_reading_if_blocked()
        if self._unhandled and not self.reading_paused:
            self._handle_slices(self.endpoint.scheduler.update_clock(), READ_TIME)
        if self.left and not self.reading_paused:
            self._end(self.left)
            self.connection.request_flush()

    # -- a WebSocket's owner ----------------------------------------------------

    @property
    def accepted(self) -> bool:
        """Whether a CONNECT was accepted."""
        return self.connection.state == CONNECTED

    def hold_before(self, more: int) -> None:
        """Count more bytes, or fewer, of a frame that is not complete."""
        self.reader.hold_before(more)

    def take_answers(self) -> bytes:
        """Remove and return the packets that wait to be written."""
        outbox = self.connection.outbox
        return outbox.drain() if outbox.parts else b""

    def websocket_failed(self) -> None:
        """There was no valid handshake."""
        self.broker.outbound.counters.websocket_failures += 1

    # -- the end ----------------------------------------------------------------

    def failed(self) -> None:
        """A defect of the broker ends the connection that met it, and no other. To be called in an ``except`` block."""
        self.endpoint.on_error(self.connection)

    def lost(self, reason: str) -> None:
        """Nothing more will be received."""
        if self._has_rest():
            self.left = reason
            self.connection.request_flush()
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.endpoint.scheduler.update_clock()
        self.reader.protocol.lost(reason)

    def refuse(self, reason_code: int, detail: str) -> None:
        """The client violated the protocol that carries the packets."""
        now = self.endpoint.scheduler.update_clock()
        self.broker.outbound.counters.protocol_errors += 1
        self.broker.bans.protocol_error(self.connection.peer, now)
        self.connection.disconnect(reason_code, detail)

    def abort(self) -> None:
        """Close the socket at once."""
        self.closing = True
        self.transport.abort()

    def close(self) -> None:
        """Close the sending side; the other one is closed when the client closes it, or after `CLOSE_TIMEOUT`.

        If both were closed at once, the kernel would answer the client's next bytes with a reset, and the client would
        lose the bytes that it has not read yet, such as a DISCONNECT with the reason.
        """
        if self.closing:
            return
        self.closing = True
        self._unhandled = b""
        if self.counted_open:
            self.endpoint.sockets.unprotect(self)
        transport = self.transport
        if transport.can_write_eof():
            transport.write_eof()
            if self.reading_paused:
                transport.resume_reading()
        else:
            transport.close()
        self._close_timer = self.endpoint.scheduler.loop.call_later(CLOSE_TIMEOUT, transport.abort)
