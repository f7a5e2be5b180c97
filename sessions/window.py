"""The window: the packet ids of one client, and what is under way beneath them.

The rule kept here: no id stands for two messages at a time [MQTT-2.2.1-4]. Clients acknowledge in order, so
what is kept nowhere and passed through under consecutive ids is counted, not remembered; what is
acknowledged out of turn, and all else, stands in a dictionary.
"""

from __future__ import annotations

from typing import Dict, Final, List, Optional, Union

from mypy_extensions import mypyc_attr

from sessions.context import SessionContext
from sessions.delivery import Delivery, Owner
from sessions.journal import AWAIT_PUBCOMP, AWAIT_PUBREC
from sessions.message import Message
from sessions.message_queue import MessageQueue

# QoS 2 messages that only pass through: what stands for them in flight, before and after PUBREC.
PASSED: Final = Delivery(Owner(), 0, Message("", b"", 2, False, b"", "", 0, 0), 2, False, b"")
PASSED.phase = AWAIT_PUBREC
RELEASED: Final = Delivery(Owner(), 0, PASSED.message, 2, False, b"")
RELEASED.phase = AWAIT_PUBCOMP

# What passes through: to one client at QoS 1 or 2, or at QoS 1 to one member of a group.
AT_LEAST_ONCE: Final = 0
EXACTLY_ONCE: Final = 1
LENT: Final = 2

_RETURNED_AT_ONCE: Final = 64  # loans whose places are given up together


@mypyc_attr(acyclic=True)
class SharedInFlight:
    """A QoS 1 message that passed through to one member of a shared subscription, ``group``, and is
    kept in case that another has to have it.

    ``tail`` is the end of the packet that left, in which the payload begins at ``payload``; the other
    fields are those of a `Message`.
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
        """The message that was lent."""
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
    """What is lent under consecutive packet ids, oldest first: who acknowledges in order costs no look."""

    def __init__(self) -> None:
        self._loans: List[Optional[SharedInFlight]] = []  # None where one was returned
        self._returned = 0  # how many of them, from the first on

    def add(self, loan: SharedInFlight) -> None:
        self._loans.append(loan)

    def drop(self) -> None:
        """The oldest is acknowledged."""
        self._loans[self._returned] = None
        self._returned += 1
        if self._returned == _RETURNED_AT_ONCE:
            del self._loans[:_RETURNED_AT_ONCE]
            self._returned = 0

    def take(self) -> SharedInFlight:
        """Take the oldest out."""
        loan = self._loans[self._returned]
        assert loan is not None
        self.drop()
        return loan

    def clear(self) -> None:
        self._loans.clear()
        self._returned = 0


_NO_LOANS: Final = SharedInFlightQueue()  # of a client that has none; never filled


class Window(MessageQueue):
    """What one client has to acknowledge."""

    def __init__(self, context: SessionContext, session_id: int) -> None:
        super().__init__(context, session_id)
        self.send_maximum = context.limits.max_inflight
        self.pass_maximum = context.limits.max_inflight_unkept
        self.last_packet_id = 0
        # Unacknowledged deliveries and loans by packet id; None for what only passed through.
        # The keys are ints; as objects they are made once per packet, not once per look.
        self.in_flight: Dict[object, Union[Delivery, SharedInFlight, None]] = {}
        # Beside them what passed through under the ids from `passing` up to `passing_end`:
        # clients acknowledge in order, so that counting does. All of it is of one kind.
        self.passing = 1
        self.passing_end = 1
        self.passing_kind = AT_LEAST_ONCE
        self.released = 1  # at QoS 2, the first id that awaits PUBREC; those before it await PUBCOMP
        self.loans = _NO_LOANS

    @property
    def packet_ids_in_use(self) -> int:
        """How many packet ids are in use."""
        return len(self.in_flight) + self.passing_end - self.passing

    def allocate_unpersisted(self, qos: int) -> int:
        """A packet id for a QoS 1 or 2 message that leaves at once and is nowhere kept, since this
        session ends with its connection and no other may have the message instead; 0 if the
        message has to be offered."""
        if (
            self.id != 0
            or self.packet_ids_in_use >= self.pass_maximum
            or self.queue
            or self.queued_messages >= self.context.limits.max_queued_messages
        ):
            return 0
        self.queued_messages += 1
        if qos == 2:
            return self._next_in_line(EXACTLY_ONCE) or self.next_packet_id(PASSED)
        return self._next_in_line(AT_LEAST_ONCE) or self.next_packet_id(None)

    def _next_in_line(self, kind: int) -> int:
        """The packet id after the last one, for what passes through beside the like; 0 if it cannot be had."""
        packet_id: int = self.last_packet_id + 1
        if self.passing == self.passing_end:
            self.passing = self.passing_end = self.released = packet_id
            self.passing_kind = kind
        if (
            packet_id != self.passing_end
            or self.passing_kind != kind
            or packet_id > 65535
            or (self.in_flight and packet_id in self.in_flight)
        ):
            return 0
        self.passing_end = packet_id + 1
        self.last_packet_id = packet_id
        return packet_id

    def allocate_shared(self, loan: SharedInFlight) -> int:
        """The packet id of a message that passes through, where the session `can_send_shared`."""
        self.queued_messages += 1
        packet_id = self._next_in_line(LENT)
        if packet_id == 0:
            return self.next_packet_id(loan)
        if packet_id == self.passing:
            if self.loans is _NO_LOANS:
                self.loans = SharedInFlightQueue()
            self.loans.clear()
        self.loans.add(loan)
        return packet_id

    def next_packet_id(self, entry: Union[Delivery, SharedInFlight, None]) -> int:
        """Put `entry` in flight under the next unused non-zero id, counting 1, 2, 3 …
        [MQTT-2.2.1-4]."""
        in_flight = self.in_flight
        packet_id: int = self.last_packet_id
        while True:
            packet_id += 1
            if packet_id > 65535:
                packet_id = 1
            key: object = packet_id
            if key not in in_flight and not self.passing <= packet_id < self.passing_end:
                in_flight[key] = entry
                self.last_packet_id = packet_id
                return packet_id

    def uses(self, packet_id: int) -> bool:
        """Whether something is under way beneath the id."""
        return packet_id in self.in_flight or self.passing <= packet_id < self.passing_end

    def skip_passing(self, packet_id: int) -> None:
        """Part from the others an id that is acknowledged out of turn, if it is one that passed through."""
        if self.passing <= packet_id < self.passing_end:
            while self.passing <= packet_id:
                self._skip_one()

    def _skip_one(self) -> None:
        packet_id = self.passing
        if self.passing_kind == EXACTLY_ONCE:
            self.in_flight[packet_id] = RELEASED if packet_id < self.released else PASSED
            self.released = max(self.released, packet_id + 1)
        else:
            self.in_flight[packet_id] = self.loans.take() if self.passing_kind == LENT else None
        self.passing = packet_id + 1

    def remember_loans(self) -> None:
        """Part all that is lent from the others: another member may have to have it."""
        while self.passing_kind == LENT and self.passing < self.passing_end:
            self._skip_one()

    def forget_passing(self) -> None:
        """The client is gone, and with it what only passed through."""
        self.passing = self.released = self.passing_end
        self.loans.clear()
