"""The wire: one client's socket, and the flush at the end of each event-loop iteration.

A flush writes once per connection and hands the store one write set. Large packets are written in parts, a bounded
amount per flush, and a client that sends much is read for a bounded time per iteration, so that no client delays the
others for long. `Wire` has the methods of an asyncio protocol but does not inherit from one, because mypyc compiles it
to a native class. Its transport is that of a socket or a `WebSocket`.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from mypy_extensions import i64

from mqttbroker.core.broker import Broker
from mqttbroker.core.client.connection import AWAIT_CONNECT, CLOSED, CONNECTED, CONNECTING, Connection
from mqttbroker.core.packets.packet_reader import PacketReader
from mqttbroker.core.packets.protocol import Protocol
from mqttbroker.core.terms.deadline import STOPPED
from mqttbroker.core.terms.rates import Throttle
from mqttbroker.net.left_client import LEFT_BYTES, LeftClient, is_drained, last_bytes, unread
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from sessions.write_set import EntryQuery, Page

log = logging.getLogger("mqttbroker.clients")

READ_SLICE: Final = 16_384  # bytes handled between two readings of the clock
READ_TIME: Final = 0.002  # seconds per event-loop iteration in which slices of one client's data are handled
READ_PAUSE: Final = 131_072  # bytes of one read after which the client is not read again in the same iteration
LARGE_WRITE: Final = 262_144  # bytes per flush that are written to one client whose outbox has large parts
LARGE_WRITES: Final = 1_048_576  # bytes per flush that are written to all such clients
FLUSH_TIME: Final = 0.001  # seconds per flush for short outboxes, and as much for the others
STREAM_TIME: Final = 0.00005  # seconds per event-loop iteration for the consumers of streams
IDLE_STREAM_TIME: Final = 0.00025  # the same while no client publishes
IDLE_AFTER: Final = 64  # iterations without a PUBLISH from any client
STREAM_PART: Final = 32  # records, or KiB, between two readings of the clock
SHORT_OUTBOX: Final = 1024  # bytes
GATHERING_FLUSHES: Final = 8  # in which the outboxes of a crowd are not written while its publishers are read
GATHERED_BYTES: Final = 16_777_216  # in all outboxes meanwhile
FLUSHED_AT_LEAST: Final = 32  # long outboxes, however long it takes
FLUSHED_AT_ONCE: Final = 16  # outboxes between two readings of the clock
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


class FlushScheduler:
    """Flushes connections and journal at the end of an event-loop iteration in which there was something to flush.

    ``submit`` takes a write set for the store. It is called again only after `store_answered` was called for the last
    one. With ``eager`` false the owner calls `write` itself.
    """

    def __init__(self, broker: Broker, loop: Any, submit: Callable[[Any], None], eager: bool) -> None:
        self.broker = broker
        self.loop = loop
        self.submit = submit
        self.eager = eager
        self.on_stored: Any = None  # called at the end of `store_answered`
        self._large_write_room = 0  # bytes that may still be written from outboxes with large parts in this flush
        self._partly_written: list[Connection] = []  # in this flush
        self._left_over: list[Connection] = []  # connections with long outboxes, or for which there was no time
        # Connections to be written before clients that send much, or to a crowd, are read again.
        self._round: i64 = 0  # end of the round in `_left_over`
        self._written: i64 = 0  # how many of them are done
        self._flushes = 0  # that this round has taken
        self._gathering = 0  # flushes that leave them as they are
        self._gathered_until = 0  # `Counters.publish_packet_bytes_sent`
        self._to_resume: deque[Wire] = deque()  # wires that continue to read
        self._loud: deque[Wire] = deque()  # the same, of clients that send much; in turn
        self._published: i64 = 0  # messages received before `_step_streams` was called last
        self._idle: i64 = 0  # calls of it since a message was received
        self._links: list[Any] = []  # `Link`s that have something to write
        self._flushing = False  # `_links` are written at the end of this iteration
        self._write_refused = False  # by the journal, which was held
        self._scheduled = False
        self._monitoring = False
        self._ticked = 0.0  # when `tick` was called last
        self.on_opened: Callable[[Wire], None] | None = None  # called with each new wire
        self.sample_wanted = False  # time the next work
        self.on_sample: Callable[[float], None] | None = None  # called with the seconds that it took
        self._sample_from = -1.0  # monotonic time; negative if nothing is timed
        broker.outbound.on_flush_needed = self.schedule
        broker.context.backpressure_monitor.wake = self._monitor_backpressure

    def schedule(self) -> None:
        """Run `flush` at the end of this event-loop iteration."""
        if not self._scheduled:
            self._scheduled = True
            if self.sample_wanted and self._sample_from < 0.0:
                self.sample_wanted = False
                self._sample_from = self.broker.outbound.clock.monotonic
            self.loop.call_soon(self.flush)

    def update_clock(self) -> float:
        """Set the broker's clock; returns monotonic seconds."""
        clock = self.broker.outbound.clock
        clock.now = time.time_ns() // 1000
        now: float = self.loop.time()
        clock.monotonic = now
        return now

    def flush(self) -> None:
        """Write the outboxes of the connections, and hand the store a write set.

        If that takes long, it is continued in the next iteration, and short outboxes come first: so other clients do
        not wait for the many receivers of one message. Clients that send much are read again when the outboxes of such
        a crowd are empty, and then several times before these are written again, because small writes cost more.
        """
        self._scheduled = False
        broker = self.broker
        held = broker.journal.held
        more = broker.turns.step()
        if held and not broker.journal.held:
            self._write_if_due()
        if broker.replays.step() or more:
            self.schedule()
        self._flushing = True
        self._flush_connections(FLUSH_TIME)
        self._resume_wires(FLUSH_TIME)
        self._flushing = False
        if self._left_over or self._to_resume or self._loud:
            self.schedule()
        flushed = not (more or self._left_over or broker.outbound.flush_queue)
        if broker.stream_consumers.active:
            self._step_streams()
        broker.memory.check()
        self._write_if_due()
        self._flush_links()
        if self._sample_from >= 0.0 and flushed:
            self._end_sample()

    def _step_streams(self) -> None:
        """Have a consumer of a stream send for a while: the next flush writes it, behind what other clients get."""
        consumers = self.broker.stream_consumers
        published: i64 = self.broker.outbound.counters.publish_received
        self._idle = self._idle + 1 if published == self._published else 0
        self._published = published
        until = time.monotonic() + (IDLE_STREAM_TIME if self._idle > IDLE_AFTER else STREAM_TIME)
        while consumers.step(STREAM_PART):
            if time.monotonic() >= until:
                consumers.end_turn()
                break
        if consumers.active:
            self.schedule()

    def _end_sample(self) -> None:
        """Everything that was received before the sample began is handled and written."""
        seconds: float = self.loop.time() - self._sample_from
        self._sample_from = -1.0
        if self.on_sample is not None:
            self.on_sample(seconds)

    def flush_link(self, link: Any) -> None:
        """Flush a link at the end of this event-loop iteration."""
        self._links.append(link)
        if not self._flushing:
            self.schedule()

    def _flush_links(self) -> None:
        links, self._links = self._links, []
        for link in links:
            link.flush()

    @property
    def flushing(self) -> bool:
        """Whether there are outboxes that the next iterations write, or connections that they close."""
        return bool(self.broker.outbound.flush_queue or self._left_over)

    def flush_all(self) -> None:
        """`flush`, however long it takes, for the end of the broker."""
        while self.broker.turns.step():
            pass
        while self.broker.outbound.flush_queue or self._left_over:
            self._flush_connections(60.0)
        self._write_if_due()
        self._flush_links()

    def _flush_connections(self, seconds: float) -> None:
        """Flush short outboxes for up to ``seconds``, and then the others for as long."""
        outbound = self.broker.outbound
        connections = outbound.flush_queue
        outbound.flush_queue = []
        left_over = self._left_over
        self._large_write_room = LARGE_WRITES
        size: i64 = len(connections)
        until: float = self.loop.time() + seconds if size > FLUSHED_AT_ONCE else 0.0
        flushed: i64 = 0
        count: i64 = 0
        while count < size:
            connection = connections[count]
            count += 1
            if connection.outbox.backlog > SHORT_OUTBOX:
                left_over.append(connection)
                continue
            self._flush_connection(connection)
            flushed += 1
            if flushed % FLUSHED_AT_ONCE == 0 and self.loop.time() > until:
                left_over.extend(connections[count:])
                break
        if left_over and not self._gather():
            self._flush_left_over(seconds)
        # Behind the connections for which there was no room in this flush.
        for connection in self._partly_written:
            connection.request_flush()
        self._partly_written.clear()

    def _gather(self) -> bool:
        """Whether those left over are not written in this flush."""
        if self._gathering:
            self._gathering -= 1
            if self._loud and self.broker.outbound.counters.publish_packet_bytes_sent < self._gathered_until:
                return True
            self._gathering = 0
        return False

    def _flush_left_over(self, seconds: float) -> None:
        left_over = self._left_over
        if self._round == 0:
            self._round = len(left_over)
        written = self._written
        at_least: i64 = written + FLUSHED_AT_LEAST
        until: float = self.loop.time() + seconds if self._round > at_least else 0.0
        while written < self._round:
            self._flush_connection(left_over[written])
            written += 1
            if written >= at_least and written % FLUSHED_AT_ONCE == 0 and self.loop.time() > until:
                break
        if written < self._round:
            self._written = written
            self._flushes += 1
            return
        del left_over[:written]
        self._round = self._written = 0
        if self._flushes:
            self._gathering = min(2 * self._flushes, GATHERING_FLUSHES)
            self._gathered_until = self.broker.outbound.counters.publish_packet_bytes_sent + GATHERED_BYTES
            self._flushes = 0

    @property
    def round_begun(self) -> bool:
        """Whether some outboxes of a crowd were written, and others are to follow."""
        return self._round > 0

    def resume_later(self, wire: Wire) -> None:
        """Continue to read at the end of this flush or of a later one."""
        if wire.loud:
            self._loud.append(wire)
        else:
            self._to_resume.append(wire)

    def _resume_wires(self, seconds: float) -> None:
        for _ in range(len(self._to_resume)):
            self._resume(self._to_resume.popleft())
        count: int = len(self._loud)
        if count == 0 or self._round:
            return
        until: float = self.loop.time() + seconds
        while count > 0:
            self._resume(self._loud.popleft())
            count -= 1
            if self.loop.time() > until:
                return

    def _resume(self, wire: Wire) -> None:
        try:
            wire.resume_reading()
        except Exception:
            wire.endpoint.on_error(wire.connection)

    def _flush_connection(self, connection: Connection) -> None:
        connection.flush_requested = False
        wire: Wire | None = connection.wire
        if wire is None:
            return
        try:
            wire.flush()
        except Exception:
            wire.endpoint.on_error(connection)

    def _write_if_due(self) -> None:
        journal = self.broker.journal
        if self.eager or journal.has_page_requests or journal.closing or (self._write_refused and not journal.held):
            self.write()

    def write_large(self, connection: Connection, transport: Any) -> None:
        """Write a part of an outbox that has large parts; the rest follows in later flushes."""
        outbox = connection.outbox
        share: int = max(min(LARGE_WRITE, self._large_write_room), outbox.excess)
        if share <= 0:
            connection.request_flush()
            return
        self._large_write_room = max(0, self._large_write_room - share)
        transport.writelines(outbox.drain_parts(share))
        if outbox.parts and not outbox.writing_paused:
            self._partly_written.append(connection)

    # -- the store --------------------------------------------------------------

    def write(self) -> None:
        """Hand the store a write set if it has none and there is something to write."""
        journal = self.broker.journal
        self._write_refused = journal.held
        write_set = self.broker.commits.next_write_set()
        if write_set is not None:
            self.submit(write_set)
        elif journal.closing:
            self.schedule()

    def store_answered(self, error: str, disk_full: bool) -> None:
        """`Commits.answered`; called on the loop's thread."""
        self.update_clock()
        self.broker.commits.answered(error, disk_full)
        if not error:
            self.schedule()
        if self.on_stored is not None:
            self.on_stored()

    def read_done(self, queries: list[EntryQuery], pages: list[Page]) -> None:
        """`Commits.read_done`; called on the loop's thread."""
        self.update_clock()
        self.broker.commits.read_done(queries, pages)
        self.schedule()

    # -- time -------------------------------------------------------------------

    def tick(self) -> None:
        """Run the periodic work of the broker. To be called more than once a second."""
        now = self.update_clock()
        if self._ticked and now - self._ticked > STOPPED:
            self.broker.outbound.clock.stopped += now - self._ticked
        self._ticked = now
        self.broker.tick(now)
        self.schedule()

    def _monitor_backpressure(self) -> None:
        if not self._monitoring:
            self._monitoring = True
            self.loop.call_later(self.broker.context.backpressure_monitor.max_pause / 2, self._check_backpressure)

    def _check_backpressure(self) -> None:
        monitor = self.broker.context.backpressure_monitor
        self._monitoring = False
        monitor.check()
        if monitor.active:
            self._monitor_backpressure()


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


class Wire:
    """One client's transport, and the connection behind it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        # Flags stand side by side, so that a compiled object has no gaps.
        self.counted_open = False  # in `OpenSockets`
        self.half_open = False  # until a CONNECT was received
        self.counted = False  # in `ListenerPolicy.clients`
        self.remote = False  # never counts as loopback
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

    @property
    def listener_policy(self) -> ListenerPolicy:
        return self.endpoint.policy

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
            # A defect of the broker ends the connection that met it, and no other.
            self.endpoint.on_error(connection)
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
