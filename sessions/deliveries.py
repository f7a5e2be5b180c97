"""The deliveries of one session: its messages at QoS 1 and 2 on their way to the client.

They leave in the order in which they were offered, each under one packet id from its first PUBLISH to its last
acknowledgement. Deliveries of a persistent session (``session_id`` is not 0) are recorded in the journal. While the client is
disconnected none is in memory; `Deliveries.redeliver` continues after the first page was loaded.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sessions.backpressure import Backpressure
from sessions.context import SessionContext
from sessions.counters import Drops
from sessions.delivery import (
    ClientConnection,
    Delivery,
    DeliveryOwner,
    delivery_from_row,
)
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
from sessions.message_queue import MessageQueue
from sessions.paging import Paging
from sessions.readers.in_flight import InFlightOwner, StreamInFlight
from sessions.room import RoomUser
from sessions.rows import PageRow
from sessions.window import InFlight, InFlightWindow, SharedInFlight, phase_of

# Outcomes of an acknowledgement.
UNKNOWN: Final = 0  # the packet id is not in use
ACCEPTED: Final = 1
REPEATED: Final = 2  # a second PUBREC: the PUBREL must be sent again
UNEXPECTED: Final = 3  # the packet id awaits another packet

_NO_BYTES: Final = b""


class Deliveries(DeliveryOwner):
    """The message queue of a session, its in-flight window and, while stored entries are read, its paging.

    ``connection`` is the one that they are sent over, from `attach` to `detach`.
    """

    def __init__(self, context: SessionContext, session_id: int) -> None:
        self.context = context
        self.session_id = session_id
        self.connection: ClientConnection | None = None
        self.queue = MessageQueue(context, session_id)
        self.window = InFlightWindow(context.in_flight, context.limits.max_inflight, context.limits.max_inflight_unpersisted)
        self.paging: Paging | None = None  # since the first page was requested
        self.backpressure: Backpressure | None = None  # from the high watermark until the queue is half as long
        self.room_user: RoomUser | None = None  # if the client reads streams

    @property
    def queued_messages(self) -> int:
        """Messages queued or in flight."""
        return self.queue.message_count

    @property
    def packet_ids_in_use(self) -> i64:
        return self.window.packet_ids_in_use

    # -- backpressure ---------------------------------------------------------

    @property
    def above_high_watermark(self) -> bool:
        """Whether the queue of the connected client, without the messages in flight, exceeds its high watermark."""
        limits = self.context.limits
        queue = self.queue
        most: int = limits.queue_high_watermark_messages
        return (
            most > 0
            and self.connection is not None
            and (queue.message_count - self.window.packet_ids_in_use > most or queue.waiting_bytes > limits.queue_high_watermark_bytes)
            and not self.connection.has_send_rate
        )

    def pause_publisher(self, publisher: Deliveries) -> None:
        """Pause the client that published to this queue while it is above its high watermark.

        A client with messages to acknowledge is not paused: two such clients could wait for each other.
        """
        connection = publisher.connection
        if connection is None or connection.paused_by is not None or publisher is self or publisher.window.packet_ids_in_use:
            return
        backpressure = self.backpressure
        if backpressure is None:
            backpressure = self.backpressure = Backpressure(self.context.backpressure_monitor)
        if not backpressure.suspended:
            backpressure.pause(connection)

    def _release_publishers(self, backpressure: Backpressure) -> None:
        """Resume the paused publishers if the queue is down to half its high watermark."""
        limits = self.context.limits
        queue = self.queue
        if (
            queue.message_count - self.window.packet_ids_in_use
        ) * 2 <= limits.queue_high_watermark_messages and queue.waiting_bytes * 2 <= limits.queue_high_watermark_bytes:
            self.backpressure = None
            backpressure.release()

    # -- new messages ---------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the next message would be sent at once."""
        connection = self.connection
        return connection is not None and connection.ready and not self.queue.entries and self.all_in_memory and self.window.is_open

    def allocate_unpersisted(self, qos: i64) -> i64:
        """The packet id of a QoS 1 or 2 message that is sent at once, without an entry; 0 if it must be offered.

        The session ends with its connection, and the message is not of a shared subscription.
        """
        queue = self.queue
        window = self.window
        if (
            self.session_id != 0
            or window.packet_ids_in_use >= i64(window.unpersisted_maximum)
            or queue.entries
            or queue.message_count >= self.context.limits.max_queued_messages
        ):
            return 0
        queue.message_count += 1
        return window.allocate_unpersisted(qos)

    def can_send_shared(self, size: int) -> bool:
        """Whether `allocate_shared` is allowed for a message of ``size`` bytes."""
        return self.session_id == 0 and self.open and not self.queue.full(size)

    def allocate_shared(self, message: SharedInFlight) -> i64:
        """The packet id of a QoS 1 message of a shared subscription that is sent at once; only if `can_send_shared`."""
        self.queue.message_count += 1
        return self.window.allocate_shared(message)

    def offer(
        self,
        message: Message,
        qos: int,
        retain: bool,
        subscription_ids: bytes,
        gate: Gate | None,
        group: object | None = None,
    ) -> Delivery | None:
        """Accept a message for delivery at QoS 1 or 2.

        Returns the delivery if the caller must send its PUBLISH now. None if it waits for the window, the client or
        the disk, or if it was dropped, which is counted by cause.
        """
        context = self.context
        queue = self.queue
        session_id: int = self.session_id
        size: int = message.size
        open_now: bool = self.open
        if not queue.has_room(size, open_now) and not self._make_room(size):
            return None
        entry = Delivery(self, session_id, message, qos, retain, subscription_ids)
        entry.group = group
        queue.count_in(size)
        if session_id == 0:
            if open_now:
                self._start(entry)
                return entry
            queue.append(entry)
            return None
        if open_now:
            context.journal.add_entry(entry, gate)
            self._start(entry)
            queue.loaded_seq = entry.seq
            return None if entry.phase == STORING else entry
        context.journal.add_entry(entry, gate)
        if message.expires_at != 0 and not 0 < context.next_expiry < message.expires_at:
            context.next_expiry = message.expires_at
        paging = self.paging
        if paging is not None and paging.reading:
            paging.add_arrived(entry)
        elif (
            self.connection is None
            or queue.stored_seq != 0
            or len(queue.entries) >= context.limits.max_queue_memory_messages
            or queue.memory_bytes + size > context.limits.max_transient_queue_bytes
            or context.memory_full(size)
        ):
            queue.stored_seq = entry.seq
        else:
            queue.append(entry)
            queue.loaded_seq = entry.seq
        return None

    def _make_room(self, size: int) -> bool:
        """Drop the oldest messages if that is the policy; if a new one still has no room, count it as dropped."""
        context = self.context
        queue = self.queue
        if queue.full(size):
            if not self._drop_oldest(size):
                self.drops().queue_full += 1
                return False
            if self.session_id == 0 or not context.full(1, size):
                return True
        if self.session_id != 0:
            self.drops().total_full += 1
        else:
            self.drops().memory_full += 1
        return False

    def drops(self) -> Drops:
        """The counters of messages dropped for this client."""
        connection = self.connection
        return self.context.counters.away if connection is None else connection.drops()

    def _drop_oldest(self, size: int) -> bool:
        queue = self.queue
        if not queue.may_drop_oldest(size):
            return False
        if self.session_id != 0 and self.connection is None:
            # A page that is being read may contain the oldest entries.
            return not self.reading_page and queue.drop_oldest_stored(size)
        dropped = queue.drop_oldest(size, self.drops())
        self._request_page_if_low()
        return dropped

    # -- acknowledgements -----------------------------------------------------

    def allocate_stream(self, message: StreamInFlight) -> i64:
        """The packet id of a QoS 1 message of a stream that is sent now; only while the window is open."""
        self.queue.count_in(0)
        return self.window.add(message)

    def acknowledge(self, packet_id: i64) -> int:
        """PUBACK [MQTT-4.3.2-5]."""
        queue = self.queue
        window = self.window
        if window.acknowledge_first(packet_id):
            queue.message_count -= 1
        else:
            message = window.find(packet_id)
            if message is None:
                return UNKNOWN
            if phase_of(message) != AWAIT_PUBACK:
                return UNEXPECTED
            self._finish(packet_id, message)
        if queue.entries or queue.stored_seq != 0:
            self.send_queued()
        elif self.room_user is not None:
            self.room_user.resume()
        return ACCEPTED

    def refuse(self, packet_id: i64, reason_code: int) -> int:
        """PUBACK with a reason code of 0x80 or above. It ends the delivery; only the reader of a stream is told."""
        message = self.window.find(packet_id)
        if not isinstance(message, StreamInFlight):
            return self.acknowledge(packet_id)
        self.window.remove(packet_id)
        self.queue.count_out(0)
        if message.owner is not None:
            message.owner.refused(message, reason_code)
        self.send_queued()
        return ACCEPTED

    def publish_received(self, packet_id: i64) -> int:
        """PUBREC with success: from now on the PUBLISH is never sent again [MQTT-4.3.3-8]."""
        window = self.window
        if window.release_first(packet_id):
            self._send_pubrel(packet_id)
            return ACCEPTED
        message = window.find(packet_id)
        if message is None:
            return UNKNOWN
        phase = phase_of(message)
        if phase == RELEASING:
            return ACCEPTED
        if phase == AWAIT_PUBCOMP:
            return REPEATED
        if phase != AWAIT_PUBREC:
            return UNEXPECTED
        if not isinstance(message, Delivery):
            window.await_pubcomp(packet_id)
            self._send_pubrel(packet_id)
            return ACCEPTED
        journal = self.context.journal
        if message.disk == MEMORY or not journal.gated:
            message.phase = AWAIT_PUBCOMP
            if message.disk != MEMORY:
                journal.update_entry(message)
            self._send_pubrel(packet_id)
        else:
            message.phase = RELEASING
            journal.update_entry(message)
        return ACCEPTED

    def publish_refused(self, packet_id: i64) -> int:
        """PUBREC with a reason code of 0x80 or above ends the delivery [MQTT-4.3.3-4]."""
        message = self.window.find(packet_id)
        if message is None:
            return UNKNOWN
        if phase_of(message) != AWAIT_PUBREC:
            return UNEXPECTED
        self._finish(packet_id, message)
        self.send_queued()
        return ACCEPTED

    def complete(self, packet_id: i64) -> int:
        """PUBCOMP: the packet id is free."""
        queue = self.queue
        window = self.window
        if window.complete_first(packet_id):
            queue.message_count -= 1
        else:
            message = window.find(packet_id)
            if message is None:
                return UNKNOWN
            if phase_of(message) != AWAIT_PUBCOMP:
                return UNEXPECTED
            self._finish(packet_id, message)
        if queue.entries or queue.stored_seq != 0:
            self.send_queued()
        elif self.room_user is not None:
            self.room_user.resume()
        return ACCEPTED

    def _finish(self, packet_id: i64, message: InFlight) -> None:
        """End the delivery of a message in flight."""
        self.window.remove(packet_id)
        if isinstance(message, Delivery):
            self.queue.finish(message)
        elif isinstance(message, StreamInFlight):
            self.queue.count_out(0)
            if message.owner is not None:
                message.owner.acknowledged(message)
        else:
            self.queue.message_count -= 1

    def abandon(self, entry: Delivery) -> None:
        if self.window.discard(entry):
            self.queue.finish(entry)

    # -- shared subscriptions -------------------------------------------------

    def shared_entries(self) -> list[Delivery]:
        """Deliveries of shared subscriptions that another member may get instead, oldest first.

        All but the QoS 2 messages that were sent [MQTT-4.8.2-4] [MQTT-4.8.2-5].
        """
        entries = self.shared_in_flight()
        for entry in self.queue.entries:
            if entry.group is not None and entry.disk != GONE:
                entries.append(entry)
        return entries

    def shared_in_flight(self) -> list[Delivery]:
        """The first of `shared_entries`: those that have a packet id."""
        entries: list[Delivery] = []
        window = self.window
        window.move_shared()
        for key, message in window.in_flight.items():
            if isinstance(message, SharedInFlight):
                message = self._delivery_of(message, key)
                window.replace(key, message)
            if isinstance(message, Delivery) and message.group is not None and message.phase in (AWAIT_PUBACK, STORING):
                entries.append(message)
        last: int = window.last_packet_id
        # In the order of sending: packet ids count up and start again after 65535.
        entries.sort(key=lambda entry: (entry.packet_id - last - 1) % 65535)
        return entries

    def give_up_queue(self) -> MessageQueue:
        """The queue of a session that ends with its connection, for the caller to empty; the session has none left."""
        queue = self.queue
        self.queue = MessageQueue(self.context, self.session_id)
        return queue

    def _delivery_of(self, shared: SharedInFlight, key: object) -> Delivery:
        message = shared.message()
        entry = Delivery(self, 0, message, 1, False, _NO_BYTES)
        assert isinstance(key, int)
        entry.packet_id = key
        entry.phase = AWAIT_PUBACK
        entry.group = shared.group
        self.queue.byte_count += message.size
        return entry

    def withdraw(self, entry: Delivery) -> None:
        """End a delivery, in flight or queued, that is no longer for this session."""
        self.window.discard(entry)
        self.queue.finish(entry)

    # -- sending --------------------------------------------------------------

    def send_queued(self) -> None:
        """Send queued messages while the window is open, and request a page when the queue in memory is low."""
        connection = self.connection
        if connection is None:
            return
        context = self.context
        journal = context.journal
        queue = self.queue
        window = self.window
        while queue.entries and window.is_open and connection.ready:
            entry = queue.pop()
            message = entry.message
            if entry.disk == GONE:
                continue
            if message.expires_at != 0 and message.expires_at <= context.clock.now and entry.packet_id == 0:
                self.drops().expired += 1
                window.skip_packet_id()
                queue.finish(entry)
                continue
            if entry.packet_id != 0:
                window.add_again(entry)
                connection.send_entry(entry, True)
                continue
            self._start(entry)
            journal.update_entry(entry)
            if entry.phase != STORING:
                connection.send_entry(entry, False)
        backpressure = self.backpressure
        if backpressure is not None:
            backpressure.progressed = True
            self._release_publishers(backpressure)
        self._request_page_if_low()
        if self.room_user is not None:
            self.room_user.resume()

    def _start(self, entry: Delivery) -> None:
        """Give an entry its packet id and its first phase. The journal has an entry of a persistent session already."""
        entry.packet_id = self.window.add(entry)
        journal = self.context.journal
        if entry.qos == 1:
            entry.phase = STORING if self.session_id != 0 and journal.delays(entry) else AWAIT_PUBACK
        elif self.session_id != 0 and journal.gated:
            entry.phase = STORING
        else:
            entry.phase = AWAIT_PUBREC

    def _send_pubrel(self, packet_id: i64) -> None:
        connection = self.connection
        if connection is not None:
            connection.send_pubrel(packet_id)

    # -- after commits --------------------------------------------------------

    def publish_stored(self, entry: Delivery) -> None:
        if not self.window.holds(entry):
            return
        if entry.qos == 1:
            entry.phase = AWAIT_PUBACK
        elif entry.changed:
            return
        else:
            entry.phase = AWAIT_PUBREC
        connection = self.connection
        if connection is not None:
            connection.send_entry(entry, False)
            if entry.disk == GONE:
                self.send_queued()

    def release_stored(self, entry: Delivery) -> None:
        if entry.changed or not self.window.holds(entry):
            return
        entry.phase = AWAIT_PUBCOMP
        self._send_pubrel(entry.packet_id)

    def entry_refused(self, entry: Delivery) -> None:
        """The store failed to write the entry: forget it. Its publisher gets an error, not an acknowledgement."""
        self.drops().store_failed += 1
        self.queue.count_out(entry.message.size)
        if entry.phase == STORING and self.window.discard(entry):
            self.send_queued()

    # -- connecting and disconnecting -----------------------------------------

    def attach(self, connection: ClientConnection, send_maximum: int) -> None:
        """Send over this connection from now on, at most ``send_maximum`` at a time (Receive Maximum)."""
        limits = self.context.limits
        self.connection = connection
        self.window.send_maximum = min(send_maximum, limits.max_inflight)
        self.window.unpersisted_maximum = min(send_maximum, limits.max_inflight_unpersisted)
        if self.above_high_watermark:
            # Messages queued while the client was disconnected must not pause publishers.
            self.backpressure = Backpressure(self.context.backpressure_monitor)
            self.backpressure.suspended = True

    def redeliver(self) -> None:
        """Send the messages that were in flight when the client disconnected again, then the others [MQTT-4.4.0-1]."""
        connection = self.connection
        if connection is None:
            return
        for message in list(self.window.in_flight.values()):
            if isinstance(message, Delivery) and message.phase == AWAIT_PUBCOMP:
                connection.send_pubrel(message.packet_id)
        self.send_queued()

    def detach(self) -> None:
        """The connection is closed: the messages of a persistent session stay on disk only."""
        self.connection = None
        backpressure = self.backpressure
        if backpressure is not None:
            self.backpressure = None
            backpressure.release()
        queue = self.queue
        window = self.window
        self._give_back_stream_messages()
        if self.session_id != 0 and (window.in_flight or queue.entries):
            queue.stored_seq = max(queue.stored_seq, queue.loaded_seq)
        window.clear()
        queue.clear_memory()
        queue.loaded_seq = 0
        if self.paging is not None:
            self.paging.disconnected()

    def _give_back_stream_messages(self) -> None:
        """Tell the readers of streams which of their messages the client has not acknowledged, in order of sending."""
        window = self.window
        found = [(key, message) for key, message in window.in_flight.items() if isinstance(message, StreamInFlight)]
        for key, message in found:
            assert isinstance(key, int)
            window.remove(key)
            self.queue.count_out(0)
            if message.owner is not None:
                message.owner.detached(message, key)

    def disown_stream_messages(self, owner: InFlightOwner) -> list[StreamInFlight]:
        """Have the acknowledgements of this owner's messages only free their packet ids; returns them in order."""
        found: list[StreamInFlight] = []
        for message in self.window.in_flight.values():
            if isinstance(message, StreamInFlight) and message.owner is owner:
                message.owner = None
                found.append(message)
        return found

    def end(self) -> None:
        """The session has ended: take its stored entries off the totals, and break reference cycles."""
        self._give_back_stream_messages()
        self.window.clear()
        self.queue.end()

    # -- pages ----------------------------------------------------------------

    @property
    def reading_page(self) -> bool:
        """Whether a page was requested for this connection and has not arrived."""
        paging = self.paging
        return paging is not None and paging.reading

    @property
    def all_in_memory(self) -> bool:
        """Whether no entry is only on disk, and no page is being read."""
        return self.queue.stored_seq == 0 and (self.paging is None or not self.paging.reading)

    def request_page(self, with_received: bool) -> None:
        """Request the next stored entries and, if asked, the QoS 2 packet ids received."""
        paging = self.paging
        if paging is None:
            paging = self.paging = Paging(self.context, self.queue)
        paging.request(with_received)

    def _request_page_if_low(self) -> None:
        """Request a page if entries are only on disk and the queue in memory is down to half its limit."""
        queue = self.queue
        if queue.stored_seq != 0 and not self.reading_page:
            limits = self.context.limits
            if len(queue.entries) <= limits.max_queue_memory_messages // 2 and queue.memory_bytes <= limits.max_transient_queue_bytes // 2:
                self.request_page(False)

    def page_arrived(self) -> bool:
        """Whether a page that arrived must be loaded: it was requested for this connection, not for an earlier one."""
        return self.paging is not None and self.paging.page_arrived()

    def page_failed(self) -> None:
        """The store could not read the page."""
        if self.paging is not None:
            self.paging.reading = False

    def load_page(self, rows: list[PageRow]) -> None:
        """Load a page of entries (`sessions.write_set.Page`)."""
        paging = self.paging
        assert paging is not None
        paging.reading = False
        queue = self.queue
        window = self.window
        for row in rows:
            entry = delivery_from_row(self, self.session_id, row)
            queue.loaded_seq = entry.seq
            window.last_packet_id = max(window.last_packet_id, entry.packet_id)
            if entry.phase == AWAIT_PUBCOMP:
                window.add_again(entry)
                self._send_pubrel(entry.packet_id)
            else:
                queue.append(entry)
        paging.page_loaded(not rows)
