"""The flush at the end of each event-loop iteration: it writes once per connection, and hands the store one write set.

Large packets are written in parts, a bounded amount per flush.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from mypy_extensions import i64

from mqttbroker.core.broker import Broker
from mqttbroker.core.client.client_wire import ClientWire
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.terms.deadline import STOPPED
from mqttbroker.net.link_flush import LinkFlush
from mqttbroker.net.stream_turns import StreamTurns

LARGE_WRITE: Final = 262_144  # bytes per flush that are written to one client whose outbox has large parts
LARGE_WRITES: Final = 1_048_576  # bytes per flush that are written to all such clients
FLUSH_TIME: Final = 0.001  # seconds per flush for short outboxes, and as much for the others
SHORT_OUTBOX: Final = 1024  # bytes
GATHERING_FLUSHES: Final = 8  # in which the outboxes of a crowd are not written while its publishers are read
GATHERED_BYTES: Final = 16_777_216  # in all outboxes meanwhile
FLUSHED_AT_LEAST: Final = 32  # long outboxes, however long it takes
FLUSHED_AT_ONCE: Final = 16  # outboxes between two readings of the clock


class FlushScheduler(LinkFlush):
    """Flushes connections and journal at the end of an event-loop iteration in which there was something to flush.

    ``submit`` takes a write set for the store. It is called again only after `Commits.answered` was called for the
    last one. With ``eager`` false the owner calls `write` itself.
    """

    def __init__(self, broker: Broker, loop: Any, submit: Callable[[Any], None], eager: bool) -> None:
        super().__init__(broker.outbound, loop)
        self.broker = broker
        self.submit = submit
        self.eager = eager
        self._large_write_room = 0  # bytes that may still be written from outboxes with large parts in this flush
        self._partly_written: list[Connection] = []  # in this flush
        self._unwritten: list[Connection] = []  # connections with long outboxes, or for which there was no time
        # Connections to be written before clients that send much, or to a crowd, are read again.
        self._round: i64 = 0  # end of the round in `_unwritten`
        self._written: i64 = 0  # how many of them are done
        self._flushes = 0  # that this round has taken
        self._gathering = 0  # flushes that leave them as they are
        self._gathered_until = 0  # `Counters.publish_packet_bytes_sent`
        self._to_resume: deque[ClientWire] = deque()  # wires that continue to read
        self._loud: deque[ClientWire] = deque()  # the same, of clients that send much; in turn
        self._stream_turns = StreamTurns(broker.stream_consumers, broker.outbound.counters)
        self._flushing = False  # `_links` are written at the end of this iteration
        self._write_refused = False  # by the journal, which was held
        self._monitoring = False
        self._ticked = 0.0  # when `tick` was called last
        self.on_opened: Callable[[ClientWire], None] | None = None  # called with each new wire
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
        if self._unwritten or self._to_resume or self._loud:
            self.schedule()
        flushed = not (more or self._unwritten or broker.outbound.flush_queue)
        if broker.stream_consumers.active and self._stream_turns.step():
            self.schedule()
        broker.memory.check()
        self._write_if_due()
        self._flush_links()
        if self._sample_from >= 0.0 and flushed:
            self._end_sample()

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

    @property
    def flushing(self) -> bool:
        """Whether there are outboxes that the next iterations write, or connections that they close."""
        return bool(self.broker.outbound.flush_queue or self._unwritten)

    def flush_all(self) -> None:
        """`flush`, however long it takes, for the end of the broker."""
        while self.broker.turns.step():
            pass
        while self.broker.outbound.flush_queue or self._unwritten:
            self._flush_connections(60.0)
        self._write_if_due()
        self._flush_links()

    def _flush_connections(self, seconds: float) -> None:
        """Flush short outboxes for up to ``seconds``, and then the others for as long."""
        outbound = self.broker.outbound
        connections = outbound.flush_queue
        outbound.flush_queue = []
        unwritten = self._unwritten
        self._large_write_room = LARGE_WRITES
        size: i64 = len(connections)
        until: float = self.loop.time() + seconds if size > FLUSHED_AT_ONCE else 0.0
        flushed: i64 = 0
        count: i64 = 0
        while count < size:
            connection = connections[count]
            count += 1
            if connection.outbox.backlog > SHORT_OUTBOX:
                unwritten.append(connection)
                continue
            self._flush_connection(connection)
            flushed += 1
            if flushed % FLUSHED_AT_ONCE == 0 and self.loop.time() > until:
                unwritten.extend(connections[count:])
                break
        if unwritten and not self._gather():
            self._flush_unwritten(seconds)
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

    def _flush_unwritten(self, seconds: float) -> None:
        unwritten = self._unwritten
        if self._round == 0:
            self._round = len(unwritten)
        written = self._written
        at_least: i64 = written + FLUSHED_AT_LEAST
        until: float = self.loop.time() + seconds if self._round > at_least else 0.0
        while written < self._round:
            self._flush_connection(unwritten[written])
            written += 1
            if written >= at_least and written % FLUSHED_AT_ONCE == 0 and self.loop.time() > until:
                break
        if written < self._round:
            self._written = written
            self._flushes += 1
            return
        del unwritten[:written]
        self._round = self._written = 0
        if self._flushes:
            self._gathering = min(2 * self._flushes, GATHERING_FLUSHES)
            self._gathered_until = self.broker.outbound.counters.publish_packet_bytes_sent + GATHERED_BYTES
            self._flushes = 0

    @property
    def round_begun(self) -> bool:
        """Whether some outboxes of a crowd were written, and others are to follow."""
        return self._round > 0

    def resume_later(self, wire: ClientWire) -> None:
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

    def _resume(self, wire: ClientWire) -> None:
        try:
            wire.resume_reading()
        except Exception:
            wire.failed()

    def _flush_connection(self, connection: Connection) -> None:
        connection.flush_requested = False
        wire = connection.wire
        if wire is None:
            return
        try:
            wire.flush()
        except Exception:
            wire.failed()

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
