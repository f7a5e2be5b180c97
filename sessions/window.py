"""The in-flight window: the packet ids in use towards one client, and the message under each.

No packet id stands for two messages at a time [MQTT-2.2.1-4]. Clients usually acknowledge in order, so unpersisted
messages under consecutive packet ids are a range of two integers; every other message is an entry of a dictionary.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i32, i64, mypyc_attr

from sessions.delivery import ENTRY_BYTES, Delivery
from sessions.journal import AWAIT_PUBACK, AWAIT_PUBCOMP, AWAIT_PUBREC
from sessions.message import Message
from sessions.readers.in_flight import IN_FLIGHT_BYTES, StreamInFlight

# The kind of message in the range of consecutive packet ids.
_QOS_1: Final = 0
_QOS_2: Final = 1
_SHARED: Final = 2  # QoS 1 messages of shared subscriptions

_ACKNOWLEDGED_AT_ONCE: Final = 64  # list slots that `SharedInFlightQueue` deletes together


@mypyc_attr(acyclic=True)
class Unpersisted:
    """An in-flight message of which only packet id and phase are known; one shared object per phase."""

    def __init__(self, phase: int) -> None:
        self.phase = phase


_AWAITS_PUBACK: Final = Unpersisted(AWAIT_PUBACK)
_AWAITS_PUBREC: Final = Unpersisted(AWAIT_PUBREC)
_AWAITS_PUBCOMP: Final = Unpersisted(AWAIT_PUBCOMP)


@mypyc_attr(acyclic=True)
class SharedInFlight:
    """An unpersisted QoS 1 message of the shared subscription ``group``, for redelivery to another member.

    ``tail`` is the end of the packet that was sent; the payload begins at offset ``payload`` of it. The other fields
    are those of `Message`.
    """

    def __init__(
        self,
        topic: str,
        tail: bytes,
        payload: int,
        properties: bytes,
        publisher: str,
        timestamp: int,
        expires_at: int,
        group: object,
    ) -> None:
        self.topic = topic
        self.tail = tail
        self.payload = payload
        self.properties = properties
        self.publisher = publisher
        self.timestamp = timestamp
        self.expires_at = expires_at
        self.group = group

    def message(self) -> Message:
        return Message(
            self.topic,
            self.tail[self.payload :],
            1,
            False,
            self.properties,
            self.publisher,
            self.timestamp,
            self.expires_at,
        )


class SharedInFlightQueue:
    """Shared in-flight messages under consecutive packet ids, oldest first."""

    def __init__(self) -> None:
        self._messages: list[SharedInFlight | None] = []  # None where acknowledged
        self._first: i64 = 0  # index of the oldest one in flight

    def append(self, message: SharedInFlight) -> None:
        self._messages.append(message)

    def pop(self) -> SharedInFlight:
        """Remove and return the oldest."""
        message = self._messages[self._first]
        assert message is not None
        self._messages[self._first] = None
        self._first += 1
        if self._first == _ACKNOWLEDGED_AT_ONCE:
            del self._messages[:_ACKNOWLEDGED_AT_ONCE]
            self._first = 0
        return message

    def clear(self) -> None:
        self._messages.clear()
        self._first = 0


_NO_SHARED: Final = SharedInFlightQueue()  # of clients without shared in-flight messages; always empty

InFlight = Delivery | SharedInFlight | Unpersisted | StreamInFlight


_NONE_IN_FLIGHT: Final[dict[object, InFlight]] = {}  # always empty, and shared: a dict takes 64 bytes


class InFlightTotal:
    """The memory of the messages in flight to all clients, in bytes. Unpersisted messages take none."""

    def __init__(self) -> None:
        self.size: i64 = 0
        self.maximum: i64 = 1 << 60


def phase_of(message: InFlight) -> int:
    """The acknowledgement that an in-flight message awaits, as a phase of `sessions.journal`."""
    return AWAIT_PUBACK if isinstance(message, (SharedInFlight, StreamInFlight)) else message.phase


def _memory_of(message: InFlight) -> i64:
    if isinstance(message, Delivery):
        return ENTRY_BYTES + message.message.size
    if isinstance(message, SharedInFlight):
        return ENTRY_BYTES + len(message.tail)
    return IN_FLIGHT_BYTES if isinstance(message, StreamInFlight) else 0


@mypyc_attr(acyclic=True)
class InFlightWindow:
    """The packet ids in use towards one client.

    While ``total`` is at its maximum, a client has one delivery in flight at most: so each makes progress.
    ``send_maximum`` limits deliveries (Receive Maximum, section 3.3.4); ``unpersisted_maximum`` limits all messages
    in flight when an unpersisted one is added.
    """

    def __init__(self, total: InFlightTotal, send_maximum: int, unpersisted_maximum: int) -> None:
        self.total = total
        self.size: i64 = 0  # part of `InFlightTotal.size`
        self.send_maximum: i32 = send_maximum
        self.unpersisted_maximum: i32 = unpersisted_maximum
        self.last_packet_id: i32 = 0
        self.range_kind: i32 = _QOS_1
        # Keys are ints typed as object: mypyc boxes each once, not at every lookup.
        self.in_flight = _NONE_IN_FLIGHT
        # Unpersisted messages of one kind under the consecutive ids from `range_start` up to but not including
        # `range_end`. At QoS 2 those before `range_released` await PUBCOMP, the others PUBREC.
        self.range_start: i64 = 1
        self.range_end: i64 = 1
        self.range_released: i64 = 1
        self.range_messages = _NO_SHARED  # those of the range, if its kind is _SHARED

    @property
    def packet_ids_in_use(self) -> i64:
        return len(self.in_flight) + self.range_end - self.range_start

    @property
    def is_open(self) -> bool:
        """Whether another delivery may be sent [MQTT-3.3.4-9]."""
        total = self.total
        return self.packet_ids_in_use < i64(self.send_maximum) and (self.size == 0 or total.size <= total.maximum)

    def _count(self, size: i64) -> None:
        self.size += size
        self.total.size += size

    # -- allocating packet ids ------------------------------------------------

    def allocate_unpersisted(self, qos: i64) -> i64:
        """The packet id of a new unpersisted message."""
        if qos == 2:
            return self._extend_range(_QOS_2) or self.add(_AWAITS_PUBREC)
        return self._extend_range(_QOS_1) or self.add(_AWAITS_PUBACK)

    def allocate_shared(self, message: SharedInFlight) -> i64:
        """The packet id of a new shared in-flight message."""
        packet_id = self._extend_range(_SHARED)
        if packet_id == 0:
            return self.add(message)
        if packet_id == self.range_start:
            if self.range_messages is _NO_SHARED:
                self.range_messages = SharedInFlightQueue()
            self.range_messages.clear()
        self.range_messages.append(message)
        self._count(_memory_of(message))
        return packet_id

    def _extend_range(self, kind: i32) -> i64:
        """Append the next packet id to the range; 0 if that id is in use or the range is of another kind."""
        packet_id: i64 = i64(self.last_packet_id) + 1
        if self.range_start == self.range_end:
            self.range_start = self.range_end = self.range_released = packet_id
            self.range_kind = kind
        if packet_id != self.range_end or self.range_kind != kind or packet_id > 65535 or (self.in_flight and packet_id in self.in_flight):
            return 0
        self.range_end = packet_id + 1
        self.last_packet_id = i32(packet_id)
        return packet_id

    def add(self, message: InFlight) -> i64:
        """Put a message in flight under the next unused packet id, counting 1, 2, 3 … [MQTT-2.2.1-4]."""
        in_flight = self.in_flight
        packet_id: i64 = i64(self.last_packet_id)
        while True:
            packet_id += 1
            if packet_id > 65535:
                packet_id = 1
            key: object = packet_id
            if key not in in_flight and not self.range_start <= packet_id < self.range_end:
                self._insert(key, message)
                self.last_packet_id = i32(packet_id)
                return packet_id

    def add_again(self, entry: Delivery) -> None:
        """Put a delivery in flight under the packet id it has."""
        self._insert(entry.packet_id, entry)

    def _insert(self, packet_id: object, message: InFlight) -> None:
        if self.in_flight is _NONE_IN_FLIGHT:
            self.in_flight = {}
        self.in_flight[packet_id] = message
        self._count(_memory_of(message))

    def replace(self, packet_id: object, message: InFlight) -> None:
        """Put another message in the place of one in `in_flight`."""
        self._count(_memory_of(message) - _memory_of(self.in_flight[packet_id]))
        self.in_flight[packet_id] = message

    def skip_packet_id(self) -> None:
        """Leave out the packet id of an expired message, so that the ids of the others do not depend on expiry."""
        self.last_packet_id = self.last_packet_id % 65535 + 1

    # -- acknowledgements of the range, in order ------------------------------

    def acknowledge_first(self, packet_id: i64) -> bool:
        """PUBACK: free the packet id if it is the first of a QoS 1 range."""
        kind = self.range_kind
        if packet_id != self.range_start or packet_id == self.range_end or kind == _QOS_2:
            return False
        self.range_start = packet_id + 1
        if kind == _SHARED:
            self._count(-_memory_of(self.range_messages.pop()))
        return True

    def release_first(self, packet_id: i64) -> bool:
        """PUBREC: await PUBCOMP if it is the first packet id of a QoS 2 range that awaits PUBREC."""
        if packet_id != self.range_released or packet_id == self.range_end or self.range_kind != _QOS_2:
            return False
        self.range_released = packet_id + 1
        return True

    def complete_first(self, packet_id: i64) -> bool:
        """PUBCOMP: free the packet id if it is the first of a QoS 2 range and awaits PUBCOMP."""
        if packet_id != self.range_start or packet_id >= self.range_released or self.range_kind != _QOS_2:
            return False
        self.range_start = packet_id + 1
        return True

    # -- everything else in flight --------------------------------------------

    def find(self, packet_id: i64) -> InFlight | None:
        """The message under a packet id, in `in_flight` from now on; None if the id is not in use."""
        if self.range_start <= packet_id < self.range_end:
            while self.range_start <= packet_id:
                self._move_first()
        return self.in_flight.get(packet_id)

    def holds(self, entry: Delivery) -> bool:
        """Whether the delivery is in flight."""
        return self.in_flight.get(entry.packet_id) is entry

    def remove(self, packet_id: i64) -> None:
        """Free the packet id of a message in `in_flight`."""
        self._count(-_memory_of(self.in_flight.pop(packet_id)))

    def discard(self, entry: Delivery) -> bool:
        """Free the packet id of a delivery; False if it is not in flight."""
        if self.in_flight.get(entry.packet_id) is not entry:
            return False
        del self.in_flight[entry.packet_id]
        self._count(-_memory_of(entry))
        return True

    def await_pubcomp(self, packet_id: i64) -> None:
        """PUBREC of an unpersisted message in `in_flight`."""
        self.in_flight[packet_id] = _AWAITS_PUBCOMP

    def move_shared(self) -> None:
        """Move the shared in-flight messages of the range into `in_flight`."""
        while self.range_kind == _SHARED and self.range_start < self.range_end:
            self._move_first()

    def _move_first(self) -> None:
        """Move the first message of the range into `in_flight`."""
        packet_id = self.range_start
        if self.range_kind == _QOS_2:
            self._insert(packet_id, _AWAITS_PUBCOMP if packet_id < self.range_released else _AWAITS_PUBREC)
            self.range_released = max(self.range_released, packet_id + 1)
        elif self.range_kind == _SHARED:
            shared = self.range_messages.pop()
            self._count(-_memory_of(shared))
            self._insert(packet_id, shared)
        else:
            self._insert(packet_id, _AWAITS_PUBACK)
        self.range_start = packet_id + 1

    def clear(self) -> None:
        """Forget all messages: the connection is closed."""
        self._count(-self.size)
        self.in_flight = _NONE_IN_FLIGHT
        self.range_start = self.range_released = self.range_end
        self.range_messages.clear()
