"""The session: subscriptions, delivery windows and the packet ids of one client.

The rule kept here: entries leave in the order they came, at most
``send_maximum`` of them unacknowledged, each under one packet id from its
first PUBLISH to its last acknowledgement; what needs no entry, because it is
kept nowhere, may have ``pass_maximum`` under way.  A durable session (``id`` not 0)
tells its journal of every change; while its client is away it holds no message
in memory, and what its memory cannot hold while the client is there is paged
in from the store as the window opens.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Final, List, Optional, Tuple

from sessions.backpressure import Backpressure
from sessions.context import SessionContext
from sessions.delivery import ClientConnection, Delivery, delivery_from_row
from sessions.journal import (
    AWAIT_PUBACK,
    AWAIT_PUBCOMP,
    AWAIT_PUBREC,
    GONE,
    MEMORY,
    RELEASING,
    STORING,
    Gate,
)
from sessions.message import Message
from sessions.window import EXACTLY_ONCE, LENT, PASSED, RELEASED, SharedInFlight, Window
from sessions.write_set import PageRequest

NEVER: Final = 0xFFFFFFFF  # a session expiry interval that does not end [MQTT-3.1.2.11.2]

# Subscription options, as on the wire [MQTT-3.8.3.1].
NO_LOCAL: Final = 0x04
RETAIN_AS_PUBLISHED: Final = 0x08

# What a session does with an acknowledgement.
UNKNOWN: Final = 0  # no such packet id
ACCEPTED: Final = 1
REPEATED: Final = 2  # PUBREC again: answer PUBREL again
UNEXPECTED: Final = 3  # not what this packet id waits for

PAGE_ENTRIES: Final = 1000  # entries read from the store at a time


class Subscription:
    """One session's interest in a filter; ``options`` are the byte on the wire."""

    def __init__(
        self, session: "Session", topic_filter: str, options: int, identifier: int
    ) -> None:
        self.session = session
        self.topic_filter = topic_filter
        self.options = options
        self.identifier = identifier
        self.qos = options & 3


_NO_BYTES: Final = b""

# Of a session that has seen all, and that had none come late; never filled. A deque takes six hundred bytes.
_SEEN: Final[Deque[Subscription]] = deque(maxlen=0)
_NONE_LATE: Final[List[Delivery]] = []


class Session(Window):
    """The state the standard asks a server to keep for one client (section 4.1)."""

    def __init__(self, context: SessionContext, session_id: int, client_id: str) -> None:
        super().__init__(context, session_id)
        self.client_id = client_id
        self.username: Optional[str] = None  # of the client; None = anonymous
        self.rules: Optional[str] = None  # the name of those that say what it may; None = those for all
        self.version = 4
        self.expiry_interval = 0
        self.disconnected_at: float = 0.0  # Unix time; 0.0 while connected
        self.subscriptions: Dict[str, Subscription] = {}
        # Whose retained messages are still to be sent; a filter as often as it was subscribed to.
        self.pending_retained: Deque[Subscription] = _SEEN
        self.received: Dict[object, bool] = {}  # QoS 2 ids from the client -> kept on disk
        self.received_on_disk = False  # ids of an earlier run, not yet read
        # Live messages that came while a page was under way, unless there were too many.
        self.late = _NONE_LATE
        self.late_bytes = 0
        self.too_late = False
        self.abandoned_pages = 0  # asked for by an earlier connection and still to come
        self.page_limit_seq = 0  # the page asked for holds all entries up to this one
        self.backpressure: Optional[Backpressure] = None  # since the queue was crowded, until it is half as long
        self.will: Optional[Message] = None
        self.will_delay = 0  # seconds
        self.will_expiry = -1  # seconds; -1 = never
        self.will_due: float = 0.0  # Unix time at which a delayed will is published

    def add_pending_retained(self, subscriptions: List[Subscription]) -> None:
        """The client is to be sent the retained messages of these subscriptions."""
        if self.pending_retained is _SEEN:
            self.pending_retained = deque()
        self.pending_retained.extend(subscriptions)

    # -- publishers that are too fast ----------------------------------------

    @property
    def above_high_watermark(self) -> bool:
        """Whether more waits for the client, beyond what is in flight, than its publishers should add to."""
        limits = self.context.limits
        most: int = limits.crowded_queue_messages
        return (
            most > 0
            and self.connection is not None
            and (
                self.queued_messages - self.packet_ids_in_use > most
                or self._waiting_bytes > limits.crowded_queue_bytes
            )
        )

    @property
    def _waiting_bytes(self) -> int:
        # On disk they are counted with those in flight; who has some there has much waiting.
        return self.memory_bytes if self.stored_seq == 0 else self.queued_bytes

    def pause_publisher(self, publisher: "Session") -> None:
        """Have the client of a session wait that has published to this one, whose queue is crowded."""
        feeder = publisher.connection
        if feeder is None or feeder.paused_by is not None or publisher is self or publisher.packet_ids_in_use:
            return  # who has to acknowledge is read, so that no two wait for each other
        backpressure = self.backpressure
        if backpressure is None:
            backpressure = self.backpressure = Backpressure(self.context.backpressure_monitor)
        if not backpressure.given_up:
            backpressure.hold(feeder)

    def _ease(self, backpressure: Backpressure) -> None:
        """Let publishers go on if the queue is half as long as a crowded one."""
        limits = self.context.limits
        if (
            (self.queued_messages - self.packet_ids_in_use) * 2 <= limits.crowded_queue_messages
            and self._waiting_bytes * 2 <= limits.crowded_queue_bytes
        ):
            self.backpressure = None
            backpressure.release()

    # -- deliveries ---------------------------------------------------------

    def offer(
        self,
        message: Message,
        qos: int,
        retain: bool,
        subscription_ids: bytes,
        gate: Optional[Gate],
        group: Optional[object] = None,
    ) -> Optional[Delivery]:
        """Take a message for delivery at QoS 1 or 2.

        Returns the delivery when its PUBLISH is to be sent by the caller now;
        None when it waits for the window, the client or the disk, or when there
        is no room for it (counted in the counters).
        """
        context = self.context
        size: int = message.size
        open_now: bool = self.open
        if not self.has_room(size, open_now):
            return None
        entry = Delivery(self, self.id, message, qos, retain, subscription_ids)
        entry.group = group
        self.queued_messages += 1
        self.queued_bytes += size
        if self.id == 0:
            if open_now:
                self._start(entry)
                return entry
            self.enqueue(entry)
            return None
        context.queued_messages += 1
        context.queued_bytes += size
        if open_now:
            self._start(entry)
            context.journal.add_entry(entry, gate)
            self.loaded_seq = entry.seq
            return None if entry.phase == STORING else entry
        context.journal.add_entry(entry, gate)
        if message.expires_at != 0 and not 0 < context.next_expiry < message.expires_at:
            context.next_expiry = message.expires_at
        if self.paging:
            self._add_late(entry)
        elif (
            self.connection is None
            or self.stored_seq != 0
            or len(self.queue) >= context.limits.max_queue_memory_messages
            or self.memory_bytes + size > context.limits.max_transient_queue_bytes
            or context.memory_bytes + size > context.limits.max_total_queue_memory_bytes
        ):
            self.stored_seq = entry.seq
        else:
            self.enqueue(entry)
            self.loaded_seq = entry.seq
        return None

    @property
    def open(self) -> bool:
        """Whether the next message leaves at once."""
        outlet = self.connection
        return (
            outlet is not None
            and outlet.ready
            and self.stored_seq == 0
            and not self.paging
            and not self.queue
            and self.packet_ids_in_use < self.send_maximum
        )

    def can_send_shared(self, size: int) -> bool:
        """Whether a QoS 1 message of a shared subscription may pass through."""
        return self.open and self.id == 0 and not self.full(size)

    def _add_late(self, entry: Delivery) -> None:
        """Keep a live message at hand until the page is in, if memory allows."""
        limits = self.context.limits
        self.late_bytes += entry.message.size
        self.context.memory_bytes += entry.message.size
        if (
            self.too_late
            or len(self.late) >= limits.max_queue_memory_messages
            or self.late_bytes > limits.max_transient_queue_bytes // 2
        ):
            self.too_late = True
            self.late.clear()
            self.stored_seq = entry.seq
        else:
            if not self.late:
                self.late = []
            self.late.append(entry)

    def acknowledge(self, packet_id: int) -> int:
        """PUBACK [MQTT-4.3.2-5]."""
        kind = self.passing_kind
        if packet_id == self.passing and packet_id != self.passing_end and kind != EXACTLY_ONCE:
            self.passing = packet_id + 1
            self.queued_messages -= 1
            if kind == LENT:
                self.loans.drop()
        else:
            key: object = packet_id
            in_flight = self.in_flight
            self.skip_passing(packet_id)
            entry = in_flight.get(key)
            if isinstance(entry, Delivery):
                if entry.phase != AWAIT_PUBACK:
                    return UNEXPECTED
                del in_flight[key]
                self.finish(entry)
            elif entry is None and key not in in_flight:
                return UNKNOWN
            else:
                del in_flight[key]
                self.queued_messages -= 1
        if self.queue or self.stored_seq != 0:
            self.send_queued()
        return ACCEPTED

    def _unknown(self, packet_id: int) -> int:
        """What an acknowledgement is that does not fit the delivery of that id, if there is one."""
        return UNEXPECTED if self.uses(packet_id) else UNKNOWN

    def publish_received(self, packet_id: int) -> int:
        """PUBREC with success: from now on the PUBLISH is never sent again [MQTT-4.3.3-8]."""
        end = self.passing_end
        if packet_id == self.released and packet_id != end and self.passing_kind == EXACTLY_ONCE:
            self.released = packet_id + 1
            self._send_pubrel(packet_id)
            return ACCEPTED
        key: object = packet_id
        self.skip_passing(packet_id)
        entry = self.in_flight.get(key)
        if not isinstance(entry, Delivery):
            return self._unknown(packet_id)
        if entry is PASSED:
            self.in_flight[key] = RELEASED
            self._send_pubrel(packet_id)
            return ACCEPTED
        if entry.phase != AWAIT_PUBREC:
            if entry.phase == RELEASING:
                return ACCEPTED
            return REPEATED if entry.phase == AWAIT_PUBCOMP else UNEXPECTED
        if entry.disk == MEMORY or not self.context.journal.gated:
            entry.phase = AWAIT_PUBCOMP
            if entry.disk != MEMORY:
                self.context.journal.update_entry(entry)
            self._send_pubrel(packet_id)
        else:
            entry.phase = RELEASING
            self.context.journal.update_entry(entry)
        return ACCEPTED

    def publish_refused(self, packet_id: int) -> int:
        """PUBREC with a reason code of 0x80 or above ends the delivery [MQTT-4.3.3-4]."""
        self.skip_passing(packet_id)
        entry = self.in_flight.get(packet_id)
        if not isinstance(entry, Delivery) or entry.phase != AWAIT_PUBREC:
            return self._unknown(packet_id)
        del self.in_flight[packet_id]
        if entry is PASSED:
            self.queued_messages -= 1
        else:
            self.finish(entry)
        self.send_queued()
        return ACCEPTED

    def complete(self, packet_id: int) -> int:
        """PUBCOMP: the packet id is free again."""
        kind = self.passing_kind
        if packet_id == self.passing and packet_id < self.released and kind == EXACTLY_ONCE:
            self.passing = packet_id + 1
            self.queued_messages -= 1
        else:
            key: object = packet_id
            self.skip_passing(packet_id)
            entry = self.in_flight.get(key)
            if not isinstance(entry, Delivery) or entry.phase != AWAIT_PUBCOMP:
                return self._unknown(packet_id)
            del self.in_flight[key]
            if entry is RELEASED:
                self.queued_messages -= 1
            else:
                self.finish(entry)
        if self.queue or self.stored_seq != 0:
            self.send_queued()
        return ACCEPTED

    def shared_entries(self) -> List[Delivery]:
        """What came by a shared subscription and another member may have instead: all but the
        QoS 2 messages that were sent [MQTT-4.8.2-4] [MQTT-4.8.2-5]."""
        entries: List[Delivery] = []
        self.remember_loans()
        for key, entry in self.in_flight.items():
            if isinstance(entry, SharedInFlight):
                entry = self._entry_of(entry, key)
                self.in_flight[key] = entry
            if entry is not None and entry.group is not None and entry.phase == AWAIT_PUBACK:
                entries.append(entry)
        last: int = self.last_packet_id
        entries.sort(key=lambda entry: (entry.packet_id - last - 1) % 65535)  # as they were sent, within a turn of the ids
        for entry in self.queue:
            if entry.group is not None and entry.disk != GONE:
                entries.append(entry)
        return entries

    def _entry_of(self, loan: SharedInFlight, key: object) -> Delivery:
        message = loan.message()
        entry = Delivery(self, 0, message, 1, False, _NO_BYTES)
        assert isinstance(key, int)
        entry.packet_id = key
        entry.phase = AWAIT_PUBACK
        entry.group = loan.group
        self.queued_bytes += message.size
        return entry

    def withdraw(self, entry: Delivery) -> None:
        """The entry is not for this session any more."""
        self.in_flight.pop(entry.packet_id, None)
        self.finish(entry)

    def abandon(self, entry: Delivery) -> None:
        """End a delivery that its client cannot take."""
        if self.in_flight.get(entry.packet_id) is entry:
            del self.in_flight[entry.packet_id]
            self.finish(entry)

    def send_queued(self) -> None:
        """Send from the queue while the window is open; ask for a page when it runs low."""
        outlet = self.connection
        if outlet is None:
            return
        context = self.context
        journal = context.journal
        while self.queue and self.packet_ids_in_use < self.send_maximum and outlet.ready:
            entry = self.dequeue()
            message = entry.message
            if entry.disk == GONE:
                continue
            if message.expires_at != 0 and message.expires_at <= context.clock.now and entry.packet_id == 0:
                context.counters.expired += 1
                self.pass_over_packet_id()
                self.finish(entry)
                continue
            again: bool = entry.packet_id != 0
            phase: int = entry.phase
            self._start(entry)
            if again:
                entry.phase = phase
                outlet.send_entry(entry, True)
                continue
            journal.update_entry(entry)
            if entry.phase != STORING:
                outlet.send_entry(entry, False)
        backpressure = self.backpressure
        if backpressure is not None:
            backpressure.moving = True
            self._ease(backpressure)
        self.refill()

    def refill(self) -> None:
        """Ask for a page when the queue in memory runs low."""
        if self.stored_seq != 0 and not self.paging:
            limits = self.context.limits
            if (
                len(self.queue) <= limits.max_queue_memory_messages // 2
                and self.memory_bytes <= limits.max_transient_queue_bytes // 2
            ):
                self.request_page()

    def request_page(self) -> None:
        """Ask the store for the entries after the last one that was in memory."""
        context = self.context
        self.paging = True
        self.oldest = None
        self._forget_late()
        self.page_limit_seq = context.journal.next_seq - 1
        context.journal.request_page(
            PageRequest(
                self.id,
                self.loaded_seq,
                PAGE_ENTRIES,
                self.received_on_disk,
                max(
                    1,
                    min(
                        context.limits.max_transient_queue_bytes - self.memory_bytes,
                        context.limits.max_total_queue_memory_bytes - context.memory_bytes,
                    ),
                ),
            )
        )

    def page_came(self) -> bool:
        """Whether a page that came is for this connection, not for one before it."""
        if self.abandoned_pages > 0:
            self.abandoned_pages -= 1
            return False
        return self.paging

    def _start(self, entry: Delivery) -> None:
        """Give an entry its packet id and its first phase."""
        packet_id: int = entry.packet_id
        if packet_id == 0:
            packet_id = self.next_packet_id(entry)
            entry.packet_id = packet_id
        else:
            self.in_flight[packet_id] = entry
        if entry.qos == 1:
            entry.phase = AWAIT_PUBACK
        elif self.id != 0 and self.context.journal.gated:
            entry.phase = STORING
        else:
            entry.phase = AWAIT_PUBREC

    def pass_over_packet_id(self) -> None:
        """The id that an entry would have had: those of the others stay what they were when it came."""
        self.last_packet_id = self.last_packet_id % 65535 + 1

    def _send_pubrel(self, packet_id: int) -> None:
        outlet = self.connection
        if outlet is not None:
            outlet.send_pubrel(packet_id)

    # -- after commits ------------------------------------------------------

    def publish_stored(self, entry: Delivery) -> None:
        """The packet id of a QoS 2 delivery is on disk: its PUBLISH may leave."""
        if entry.changed or self.in_flight.get(entry.packet_id) is not entry:
            return
        entry.phase = AWAIT_PUBREC
        outlet = self.connection
        if outlet is not None:
            outlet.send_entry(entry, False)
            if entry.disk == GONE:
                self.send_queued()

    def release_stored(self, entry: Delivery) -> None:
        """The client's PUBREC is on disk: the PUBREL may leave."""
        if entry.changed or self.in_flight.get(entry.packet_id) is not entry:
            return
        entry.phase = AWAIT_PUBCOMP
        self._send_pubrel(entry.packet_id)

    def entry_refused(self, entry: Delivery) -> None:
        """The store could not keep an entry: forget it, the publisher was told."""
        self.context.counters.store_failed += 1
        self.count_out(entry.message.size)
        if entry.phase == STORING and self.in_flight.get(entry.packet_id) is entry:
            del self.in_flight[entry.packet_id]
            self.send_queued()

    # -- coming and going ---------------------------------------------------

    def attach(self, outlet: ClientConnection, send_maximum: int) -> None:
        """A client's connection takes the session over; a durable one must `resume` first."""
        self.connection = outlet
        self.version = outlet.version
        self.send_maximum = min(send_maximum, self.context.limits.max_inflight)
        self.pass_maximum = min(send_maximum, self.context.limits.max_inflight_unkept)
        self.disconnected_at = 0.0
        if self.above_high_watermark:
            # What has gathered while the client was away is for it alone to wait for.
            self.backpressure = Backpressure(self.context.backpressure_monitor)
            self.backpressure.given_up = True

    def detach(self, now: float) -> None:
        """The client is away: a durable session leaves its messages to the disk, another ends."""
        self.connection = None
        self.disconnected_at = now
        backpressure = self.backpressure
        if backpressure is not None:
            self.backpressure = None
            backpressure.release()
        if self.id != 0 and (self.in_flight or self.queue):
            self.stored_seq = max(self.stored_seq, self.loaded_seq)
        if self.late:
            self.stored_seq = max(self.stored_seq, self.late[len(self.late) - 1].seq)
        self._forget_late()
        self.in_flight.clear()
        self.forget_passing()
        self.forget_queue()
        self.loaded_seq = 0
        if self.paging:
            self.paging = False
            self.abandoned_pages += 1

    @property
    def must_load(self) -> bool:
        """Whether the store holds something that a resumed client needs first."""
        return self.stored_seq != 0 or self.received_on_disk

    def restore(self, rows: List[Tuple[object, ...]], received: List[int]) -> None:
        """Take a page of entries and, on a session's first, the received ids.

        Pages end by count or by bytes; the last one is known by its newest entry,
        or is empty when that entry was refused.
        """
        self.paging = False
        for packet_id in received:
            self.received[packet_id] = True
        self.received_on_disk = False
        for row in rows:
            entry = delivery_from_row(self, self.id, row)
            self.loaded_seq = entry.seq
            self.last_packet_id = max(self.last_packet_id, entry.packet_id)
            if entry.phase == AWAIT_PUBCOMP:
                self.in_flight[entry.packet_id] = entry
                self._send_pubrel(entry.packet_id)
            else:
                self.enqueue(entry)
        if self.stored_seq <= self.page_limit_seq:
            if not rows or self.loaded_seq >= self.stored_seq:
                self.stored_seq = 0
                self._take_late()
        if self.late:
            self.stored_seq = max(self.stored_seq, self.late[len(self.late) - 1].seq)
            self._forget_late()

    def _take_late(self) -> None:
        """All that was on disk is here: what came meanwhile follows it, but for what the page had."""
        for entry in self.late:
            if entry.seq > self.loaded_seq and entry.disk != GONE:
                self.enqueue(entry)
                self.loaded_seq = entry.seq
        self._forget_late()

    def _forget_late(self) -> None:
        self.late.clear()
        self.context.memory_bytes -= self.late_bytes
        self.late_bytes = 0
        self.too_late = False

    def redeliver(self) -> None:
        """Send again what was under way when the client left, then go on [MQTT-4.4.0-1]."""
        outlet = self.connection
        if outlet is None:
            return
        for entry in list(self.in_flight.values()):
            if isinstance(entry, Delivery) and entry.phase == AWAIT_PUBCOMP:
                outlet.send_pubrel(entry.packet_id)
        self.send_queued()
