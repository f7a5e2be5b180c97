"""The record of a run: messages sent, acknowledgements, deliveries in their order, and faults.

Only clients write it.  A message is identified by its number, with which its payload begins.  Numbers increase in the
order in which messages were first sent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

MISSING_1 = "acknowledged QoS 1 messages missing at a persistent subscriber"
MISSING_2 = "acknowledged QoS 2 messages missing at a persistent subscriber"
TWICE = "QoS 2 messages delivered twice"
ORDER = "first deliveries and acknowledgements out of order"
RETAINED = "retained values older than the last acknowledged"
SESSION = "persistent sessions that were lost"
PROTOCOL = "packets that a broker must not send, or that are missing"
LOG_MISSING = "acknowledged messages missing in the stream log"
LOG_TWICE = "QoS 2 messages twice in the stream log"
LOG_ORDER = "messages out of order in the stream log"
LOG_CHANGED = "records of the stream log that changed after they were read"
LOG_READERS = "records that the two readers of the log decode differently"
LEFT = "rows left in the database after all messages were delivered"
ROWS = (
    MISSING_1, MISSING_2, TWICE, ORDER, RETAINED, SESSION, PROTOCOL,
    LOG_MISSING, LOG_TWICE, LOG_ORDER, LOG_CHANGED, LOG_READERS, LEFT,
)  # fmt: skip

RETAINED_TOPICS = "kept/"  # prefix of topics with retained messages, one QoS each


class Sent(NamedTuple):
    """A message as its publisher sent it; an empty payload clears the retained message."""

    number: int
    publisher: str
    topic: str
    qos: int
    retain: bool
    payload: bytes

    def __str__(self) -> str:
        return f"message {self.number} of {self.publisher} to {self.topic} at QoS {self.qos}"


class Record:
    """The record of one run.

    A CONNACK or DISCONNECT with a reason code among ``unavailable`` is no fault, nor is a DISCONNECT with one among ``undecided``:
    the client connects again. ``on_packet``
    is called with the name of every packet that a client receives, ``progressed`` after it. Faults are in ``rows``; ``on_fault`` is called
    with the row and the text of each.
    """

    def __init__(self, rows: Sequence[str] = ROWS) -> None:
        self.rows = rows
        self.sent: dict[int, Sent] = {}
        self.acknowledged: set[int] = set()
        self.acknowledged_at: dict[int, float] = {}  # Unix seconds
        self.deliveries: dict[str, list[tuple[int, int]]] = {}  # by subscriber: number, QoS
        self.seen: dict[str, set[int]] = {}
        # By subscriber, the last number sent before its SUBACK.  Earlier messages may reach it only when they are
        # sent again, after later ones, so their order is not checked.
        self.since: dict[str, int] = {}
        self.cleared: dict[str, list[int]] = {}  # by topic, numbers that cleared it
        self.last_retained: dict[str, int] = {}  # by topic, the last number that was acknowledged
        self.checked: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, list[str]] = {row: [] for row in rows}
        self.unavailable: frozenset[int] = frozenset()
        self.undecided: frozenset[int] = frozenset()
        self.on_packet: Callable[[str], None] = lambda kind: None
        self.progressed: Callable[[], None] = lambda: None
        self.on_fault: Callable[[str, str], object] = lambda row, text: None

    # --- publishers -----------------------------------------------------------------------------------------------

    def send(self, publisher: str, topic: str, qos: int, retain: bool, size: int) -> Sent:
        """A new message; size 0 clears the topic's retained message."""
        number = len(self.sent) + 1
        payload = b"%d " % number
        message = Sent(number, publisher, topic, qos, retain, payload + b"." * (size - len(payload)) if size else b"")
        self.sent[number] = message
        if not size:
            self.cleared.setdefault(topic, []).append(number)
        return message

    def acknowledge(self, message: Sent) -> None:
        """The publisher received PUBACK or PUBREC."""
        self.acknowledged.add(message.number)
        self.acknowledged_at.setdefault(message.number, time.time())
        if message.retain:
            self.last_retained[message.topic] = max(message.number, self.last_retained.get(message.topic, 0))

    def all_acknowledged(self) -> list[Sent]:
        return [self.sent[number] for number in sorted(self.acknowledged)]

    # --- subscribers ----------------------------------------------------------------------------------------------

    def identify(self, receiver: str, topic: str, payload: bytes, qos: int) -> Sent | None:
        """The message with this topic and payload, sent at this QoS or a higher one; else a fault and None."""
        digits, _, _ = payload.partition(b" ")
        message = self.sent.get(int(digits)) if digits.isdigit() else None
        self.checked[PROTOCOL] += 1
        if message is None or (message.topic, message.payload) != (topic, payload) or not 0 < qos <= message.qos:
            self.fault(PROTOCOL, f"{receiver} was sent {payload[:20]!r} to {topic} at QoS {qos}, which nobody published")
            return None
        return message

    def deliver(self, subscriber: str, message: Sent, qos: int) -> None:
        """A delivery that is not a recognisable repetition."""
        self.deliveries.setdefault(subscriber, []).append((message.number, qos))
        self.seen.setdefault(subscriber, set()).add(message.number)

    def fault(self, row: str, text: str) -> None:
        self.faults[row].append(text)
        self.on_fault(row, text)
