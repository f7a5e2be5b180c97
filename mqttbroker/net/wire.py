"""The wire: one socket's transport, and the one flush per turn of the event loop.

The rule kept here: all that a turn of the loop produced leaves in one write per
connection and one write set for the store, but for what is long, which leaves
a part a turn; a connection whose socket is full, or whose input must wait,
costs the others nothing; who sends much is heard for `SHARE` seconds, then
everybody else is.

`Wire` is an asyncio protocol by shape, not by inheritance, so that it compiles
to a native class.  Its transport too is one by shape: a socket's, or what
stands between.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Final, List

from mqttbroker.core.broker import Broker
from mqttbroker.core.connection import CLOSED, Connection
from mqttbroker.core.protocol import Protocol
from mqttbroker.net.listener_policy import ListenerPolicy

log = logging.getLogger("mqttbroker")

SLICE: Final = 16_384  # bytes that are taken without a look at the clock
SHARE: Final = 0.002  # seconds in which more than that is taken from one client in a turn
MUCH: Final = 131_072  # bytes of one read after which a client is read no further in a turn: there may be as many again
BULK: Final = 262_144  # bytes of what is bulky that leave for one client in a turn
ALL_BULK: Final = 1_048_576  # bytes of it that leave for all clients in a turn
LINGER: Final = 5.0  # seconds a closed connection may take to accept its last bytes


class FlushScheduler:
    """The end of each turn of the event loop.

    ``submit`` takes a write set; it is called at most once until `stored` has
    been told of that set.  With ``eager`` false the owner calls `write` itself.
    """

    def __init__(self, broker: Broker, loop: Any, submit: Callable[[Any], None], eager: bool) -> None:
        self.broker = broker
        self.loop = loop
        self.submit = submit
        self.eager = eager
        self.room = 0  # bytes of what is bulky that may still leave in this turn
        self.served: List[Connection] = []  # of which some of it has left in this turn, and some is left
        self._scheduled = False
        self._watching = False
        broker.outbound.wake = self.wake
        broker.context.backpressure_monitor.wake = self.watch

    def wake(self) -> None:
        """Have `flush` run at the end of this turn."""
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self.flush)

    def tell_time(self) -> float:
        """Set the broker's clock; gives monotonic seconds."""
        self.broker.outbound.clock.now = time.time_ns() // 1000
        now: float = self.loop.time()
        return now

    def flush(self) -> None:
        """Write what every connection has to send and what the store has to keep."""
        self._scheduled = False
        outbound = self.broker.outbound
        if self.broker.replays.step():
            self.wake()
        dirty = outbound.dirty
        outbound.dirty = []
        self.room = ALL_BULK
        for connection in dirty:
            connection.dirty = False
            try:
                _flush(connection)
            except Exception:
                connection.wire.on_error(connection)
        # After those for whom there was no room.
        for connection in self.served:
            connection.touch()
        self.served.clear()
        if self.eager or self.broker.journal.has_page_requests:
            self.write()

    def write_bulk(self, connection: Connection, transport: Any) -> None:
        """Write a part of what is bulky; the rest of it leaves in turns to come, and others' packets between them."""
        share: int = max(min(BULK, self.room), connection.excess)
        if share <= 0:
            connection.touch()
            return
        self.room = max(0, self.room - share)
        transport.writelines(connection.take_parts(share))
        if connection.outbox and not connection.congested:
            self.served.append(connection)

    def write(self) -> None:
        """Hand the store what it is to write, if it is free."""
        write_set = self.broker.commits.next_write_set()
        if write_set is not None:
            self.submit(write_set)

    def stored(self, pages: Any, error: str, full: bool) -> None:
        """The store answered; on the loop's thread."""
        self.tell_time()
        self.broker.commits.answered(pages, error, full)
        if not error:
            self.wake()

    def tick(self) -> None:
        self.broker.tick(self.tell_time())
        self.wake()

    def watch(self) -> None:
        """Have no publisher wait too long for a client that is slow to take its messages."""
        if not self._watching:
            self._watching = True
            self.loop.call_later(self.broker.context.backpressure_monitor.max_pause / 2, self._look)

    def _look(self) -> None:
        backpressure_monitor = self.broker.context.backpressure_monitor
        self._watching = False
        backpressure_monitor.check()
        if backpressure_monitor.active:
            self.watch()


def _flush(connection: Connection) -> None:
    if connection.wire is None:
        return
    wire: Wire = connection.wire
    transport = wire.transport
    if connection.state == CLOSED:
        if connection.outbox and not wire.closing:
            transport.write(connection.take())
        wire.close()
        return
    if connection.outbox and not connection.congested:
        if connection.bulky:
            wire.turn.write_bulk(connection, transport)
        else:
            transport.write(connection.take())
        if not connection.congested:
            connection.relieved()
    if wire.paused:
        if wire.protocol.blocked:
            wire.await_store()
            return
        wire.paused = False
        transport.resume_reading()
        wire.protocol.resume()
        wire.check_blocked()
        if wire.rest and not wire.paused:
            wire.go_on(wire.turn.tell_time())


class Wire:
    """One client's transport and its protocol."""

    def __init__(
        self, turn: FlushScheduler, listener_policy: ListenerPolicy, new_client_id: Callable[[], str], on_error: Any
    ) -> None:
        self.turn = turn
        self.broker = turn.broker
        self.listener_policy = listener_policy
        self.counted = False  # among the clients of its entrance
        self.new_client_id = new_client_id
        self.on_error = on_error
        self.transport: Any = None
        self.closing = False
        self.paused = False
        self.linger: Any = None
        self.rest: bytes = b""  # what came and was not taken in yet
        self.taken = 0  # bytes of it that were

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "local")
        self.protocol = Protocol(
            self.broker, address, self.turn.tell_time(), self.new_client_id, self.listener_policy.terms
        )
        self.protocol.wire = self

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        now = self.turn.tell_time()
        if not self.rest:
            if len(data) <= SLICE:
                self.take(data, 0, -1, now)
                return
            self.rest = data
        else:
            self.rest = self.rest[self.taken :] + data
        self.taken = 0
        if not self.paused:
            self.go_on(now)

    def go_on(self, now: float) -> None:
        """Take in what came for a while, and the rest of it when the others had their turn."""
        data = self.rest
        size: int = len(data)
        position: int = self.taken
        until = now + SHARE
        while position < size and now < until and not self.paused and not self.closing:
            position = self.take(data, position, position + SLICE, now)
            now = self.turn.tell_time()
        if position >= size:
            self.rest = b""
            if size < MUCH:
                return
        self.taken = position
        if not self.paused and not self.closing:
            self.paused = True
            self.transport.pause_reading()
            self.protocol.touch()

    def take(self, data: bytes, start: int, stop: int, now: float) -> int:
        """Have the protocol take bytes in; gives the position of what it did not take."""
        turn = self.turn
        position: int = len(data)
        try:
            position = self.protocol.receive(data, now, start, min(stop, position))
        except Exception:
            # A defect of the broker must cost no one but the client that met it.
            self.on_error(self.protocol)
        if self.protocol.blocked:
            self.check_blocked()
        journal = self.broker.journal
        if journal.has_pending and journal.writer_idle and (turn.eager or journal.has_page_requests):
            turn.wake()
        return position

    def check_blocked(self) -> None:
        """Stop reading while the protocol cannot take more."""
        protocol = self.protocol
        if protocol.blocked and not self.paused and not self.closing:
            self.paused = True
            self.transport.pause_reading()
            self.await_store()

    def await_store(self) -> None:
        """Be looked at again when the store has caught up, if it is what we wait for."""
        if self.broker.commits.backlogged:
            self.broker.commits.paused[self.protocol] = True

    def pause_writing(self) -> None:
        self.protocol.congest()

    def resume_writing(self) -> None:
        self.protocol.congested = False
        self.protocol.relieved()
        self.protocol.touch()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Any) -> None:
        self.closing = True
        if self.linger is not None:
            self.linger.cancel()
            self.linger = None
        if self.counted:
            self.counted = False
            self.listener_policy.clients -= 1
        self.lost(f"connection lost: {error}" if error else "closed by the client")
        # Nothing may be left that only a collection of cycles would find: it stops the loop for everybody.
        self.protocol.wire = None
        self.transport = None
        self.rest = b""

    def lost(self, why: str) -> None:
        """Nothing more will come from the client."""
        self.turn.tell_time()
        self.protocol.lost(why)
        self.protocol.release()

    def refuse(self, reason_code: int, detail: str) -> None:
        """What carries the packets was not used as the standard says."""
        self.turn.tell_time()
        self.broker.outbound.counters.protocol_errors += 1
        self.protocol.disconnect(reason_code, detail)

    def close(self) -> None:
        """End our side once its last bytes are out, and hear out the client's for `LINGER` seconds.

        Closing at once would have the kernel answer what the client still sends with a reset,
        which takes from it what it has not read yet, the DISCONNECT that tells it why included.
        """
        if self.closing:
            return
        self.closing = True
        transport = self.transport
        if transport.can_write_eof():
            transport.write_eof()
            if self.paused:
                transport.resume_reading()
        else:
            transport.close()
        self.linger = self.turn.loop.call_later(LINGER, transport.abort)
