"""The rows that cross between the broker and its store: every layout is defined here, and the SQL follows from it.

Rows that are read by name are NamedTuples. A NamedTuple takes 0.1 µs longer to make than a tuple, and queueing a
message takes 3 µs in all; so the rows of each queued, changed or removed entry are plain tuples with typed columns,
whose names stand beside them. Times are µs since the Unix epoch unless a field says otherwise.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class SessionRow(NamedTuple):
    """A durable session. ``disconnected_at`` and ``will_due`` are Unix seconds; None while the client is connected, or
    if no will waits for its delay. ``permissions`` are those of the last login, as JSON."""

    session_id: int
    client_id: str
    version: int
    expiry_interval: int
    disconnected_at: float | None
    will: bytes | None
    will_due: float | None
    username: str | None
    rules: str | None
    permissions: str | None = None


class SubscriptionRow(NamedTuple):
    """A subscription of a durable session; ``subscription_id`` is 0 if it has none."""

    session_id: int
    topic_filter: str
    qos: int
    options: int
    subscription_id: int


class RetainedRow(NamedTuple):
    """The retained message of a topic."""

    topic: str
    payload: bytes
    qos: int
    properties: bytes
    publisher: str
    timestamp: int
    expires_at: int


class ProducerRow(NamedTuple):
    """The numbers that a producer has stored in a stream; ``missing`` are little-endian bits, of which bit i stands for
    ``last - i``. ``used`` is when its last message was received."""

    stream: str
    user_name: str
    producer_id: str
    last: int
    missing: bytes
    used: int


class ReaderRow(NamedTuple):
    """A reader of a stream whose offsets are stored: a session's subscription, a group, or a queue.

    ``kind`` is one of the constants below. ``session_id`` is -kind but for a subscription; ``name`` is the filter of a
    subscription, or the name of a group or queue.
    ``topic_filter`` selects messages of the stream; ``#`` takes all. ``start`` is the text that said where it begins,
    ``options`` are bits that the core defines.
    """

    reader_id: int
    kind: int
    session_id: int
    name: str
    stream: str
    topic_filter: str
    start: str
    options: int
    created: int


SUBSCRIPTION_READER: Final = 1
GROUP_READER: Final = 2
QUEUE_READER: Final = 3


class OffsetsRow(NamedTuple):
    """How far a reader is in a partition: ``position`` and ``pending`` are those of `PartitionOffsets`; offsets before
    ``reserved`` may have been handed over."""

    reader_id: int
    partition: int
    position: int
    reserved: int
    pending: bytes


class MarkRow(NamedTuple):
    """How far a shard of a cluster has routed the log of another shard, ``log``: all records before ``offset``, and the first
    ``routed`` messages of that one. The other fields are the state of the log's view behind the records before ``offset``."""

    log: int
    offset: int
    routed: int
    epoch: int
    owner: bytes
    sequence: int
    released: bool


class QueueRow(NamedTuple):
    """The extent of one session's queue; ``size`` is the sum of `Message.size` over its entries."""

    session_id: int
    entries: int
    size: int
    last_seq: int


class PageRow(NamedTuple):
    """A stored entry and its message, as a page has them.

    ``qos`` and ``retain`` are the delivery's, ``message_qos`` and ``message_retain`` the publisher's; ``size`` is
    `Message.size`.
    """

    seq: int
    qos: int
    retain: int
    subscription_ids: bytes
    packet_id: int
    state: int
    message_id: int
    shared: int
    topic: str
    payload: bytes
    message_qos: int
    message_retain: int
    properties: bytes
    publisher: str
    timestamp: int
    expires_at: int
    size: int


class StoredEntry(NamedTuple):
    """A stored entry that was never sent, as an `EntryQuery` finds it; ``expires_at`` is 0 if it never expires."""

    expires_at: int
    session_id: int
    seq: int
    message_id: int
    shared: int
    size: int


# The columns of a message are attributes of `Message`.
MESSAGE_COLUMNS: Final = ("id", "topic", "payload", "qos", "retain", "properties", "publisher", "timestamp", "expires_at")

MessageRow = tuple[int, str, bytes, int, bool, bytes, str, int, int]

# A new entry. `shared` is 1 if another entry refers to the message, now or earlier; `packet_id` is 0 until the entry
# is sent; `size` is `Message.size`.
EntryRow = tuple[int, int, int, int, int, int, bytes, int, int, int, int]
ENTRY_COLUMNS: Final = (
    "session_id",
    "seq",
    "message_id",
    "shared",
    "qos",
    "retain",
    "subscription_ids",
    "packet_id",
    "state",
    "size",
    "expires_at",
)

# A stored entry that was sent, or acknowledged in part: its packet id, state, session id and number.
EntryUpdate = tuple[int, int, int, int]

# A stored entry that is to be deleted. The store deletes its message with the last entry that refers to it.
EntryKey = tuple[int, int, int, int]
ENTRY_KEY_COLUMNS: Final = ("session_id", "seq", "message_id", "shared")

# A QoS 2 packet id that a client used and has not released, as one number: a tuple takes longer to make, hash
# and encode.
ReceivedKey = int
RECEIVED_COLUMNS: Final = ("session_id", "packet_id")


def received_key(session_id: int, packet_id: int) -> ReceivedKey:
    return session_id << 16 | packet_id


def received_row(key: ReceivedKey) -> tuple[int, int]:
    """The columns of a key."""
    return key >> 16, key & 0xFFFF


# A producer's key.
ProducerKey = tuple[str, str, str]

# The key of a reader's offsets in one partition.
OffsetsKey = tuple[int, int]

# A subscription's key.
SubscriptionKey = tuple[int, str]
