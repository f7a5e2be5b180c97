"""The recorder: what was sent, what was acknowledged to whom, who received what in which order.

Rule: it stands outside the broker and believes the clients alone. A message is known by its number, which its payload
begins with; numbers rise in the order in which messages were first sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Optional

MISSING_1 = "acknowledged QoS 1 messages missing at a persistent subscriber"
MISSING_2 = "acknowledged QoS 2 messages missing at a persistent subscriber"
TWICE = "QoS 2 messages delivered twice"
ORDER = "first deliveries and acknowledgements out of order"
RETAINED = "retained values older than the last acknowledged"
SESSION = "sessions that were there before and are not present"
PROTOCOL = "packets that no broker may send, or that do not come"
LOG_MISSING = "acknowledged messages missing in the stream log"
LOG_TWICE = "QoS 2 messages twice in the stream log"
LOG_ORDER = "messages out of order in the stream log"
LOG_CHANGED = "records of the stream log that a reader saw and that changed"
LOG_READERS = "records that the log's two readers see differently"
LEFT = "rows left in the database once all was delivered"
ROWS = (
    MISSING_1, MISSING_2, TWICE, ORDER, RETAINED, SESSION, PROTOCOL,
    LOG_MISSING, LOG_TWICE, LOG_ORDER, LOG_CHANGED, LOG_READERS, LEFT,
)  # fmt: skip

KEPT = "kept/"  # topics whose messages are retained, one QoS each


class Sent(NamedTuple):
    """A message as its publisher sent it; an empty payload clears what is retained."""

    number: int
    publisher: str
    topic: str
    qos: int
    retain: bool
    payload: bytes

    def __str__(self) -> str:
        return f"message {self.number} of {self.publisher} to {self.topic} at QoS {self.qos}"


class Record:
    """One run's memory.  ``heard`` is told the name of every packet that a client was sent."""

    def __init__(self) -> None:
        self.sent: dict[int, Sent] = {}
        self.acknowledged: set[int] = set()
        self.deliveries: dict[str, list[tuple[int, int]]] = {}  # by subscriber: number, QoS
        self.seen: dict[str, set[int]] = {}
        # By subscriber, the last number sent when its subscription was there; what was sent before may come to it
        # first when it is repeated, and so after what was sent later.
        self.since: dict[str, int] = {}
        self.cleared: dict[str, list[int]] = {}  # by topic, numbers that cleared it
        self.last_kept: dict[str, int] = {}  # by topic, the last number that was acknowledged
        self.checked: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, list[str]] = {row: [] for row in ROWS}
        self.heard: Callable[[str], None] = lambda kind: None
        self.progressed: Callable[[], None] = lambda: None

    # --- publishers -----------------------------------------------------------------------------------------------

    def send(self, publisher: str, topic: str, qos: int, retain: bool, size: int) -> Sent:
        """A new message; size 0 makes it one that clears a topic."""
        number = len(self.sent) + 1
        payload = b"%d " % number
        message = Sent(number, publisher, topic, qos, retain, payload + b"." * (size - len(payload)) if size else b"")
        self.sent[number] = message
        if not size:
            self.cleared.setdefault(topic, []).append(number)
        return message

    def acknowledge(self, message: Sent) -> None:
        """PUBACK, or PUBREC: the broker has it."""
        self.acknowledged.add(message.number)
        if message.retain:
            self.last_kept[message.topic] = max(message.number, self.last_kept.get(message.topic, 0))

    def all_acknowledged(self) -> list[Sent]:
        return [self.sent[number] for number in sorted(self.acknowledged)]

    # --- subscribers ----------------------------------------------------------------------------------------------

    def identify(self, who: str, topic: str, payload: bytes, qos: int) -> Optional[Sent]:
        """The message, if it is as somebody sent it at that QoS or a higher one."""
        digits, _, _ = payload.partition(b" ")
        message = self.sent.get(int(digits)) if digits.isdigit() else None
        self.checked[PROTOCOL] += 1
        if message is None or (message.topic, message.payload) != (topic, payload) or not 0 < qos <= message.qos:
            self.fault(PROTOCOL, f"{who} was sent {payload[:20]!r} to {topic} at QoS {qos}, which nobody published")
            return None
        return message

    def deliver(self, subscriber: str, message: Sent, qos: int) -> None:
        """A delivery that the subscriber does not know for a repetition."""
        self.deliveries.setdefault(subscriber, []).append((message.number, qos))
        self.seen.setdefault(subscriber, set()).add(message.number)

    def fault(self, row: str, text: str) -> None:
        self.faults[row].append(text)
