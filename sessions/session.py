"""The session: the state of one client in the server (section 4.1); its messages to the client are its `Deliveries`."""

from __future__ import annotations

from collections import deque
from typing import Final

from mypy_extensions import i64

from sessions.context import SESSION_BYTES, SessionContext
from sessions.deliveries import Deliveries
from sessions.delivery import ClientConnection
from sessions.row_kinds import SUBSCRIPTIONS
from sessions.rows import PageRow, SubscriptionRow
from sessions.will import SessionWill
from topic_matcher.filters import text_bytes

NEVER: Final = 0xFFFFFFFF  # a session expiry interval without end [MQTT-3.1.2.11.2]

# Subscription options, as on the wire [MQTT-3.8.3.1].
NO_LOCAL: Final = 0x04
RETAIN_AS_PUBLISHED: Final = 0x08

# A bit that only the store and the broker know: retained messages of the subscription are still to be sent.
AWAITS_RETAINED: Final = 0x100

# What is known about a QoS 2 packet id from the client.
ON_DISK: Final = 1
EARLIER: Final = 2  # it has not been used over the connection that the client has now

FREE_RECEIVED_IDS: Final = 16  # QoS 2 packet ids of a client that do not depend on those of others


CORE_PREFIX: Final = "$core/"  # of the client id of a session that stands for those of another core; its shard follows


def shard_of_core(client_id: str) -> int:
    """The shard of the core for which a session with this client id stands."""
    return int(client_id[len(CORE_PREFIX) :])


def _text_memory(text: str | None) -> int:
    return 0 if text is None else text_bytes(text)


class Subscription:
    """A session's subscription to a filter; ``options`` is the byte on the wire, and `AWAITS_RETAINED`."""

    def __init__(self, session: Session, topic_filter: str, options: int, identifier: int) -> None:
        self.session = session
        self.topic_filter = topic_filter
        self.options = options
        self.identifier = identifier
        self.qos = options & 3

    def row(self) -> SubscriptionRow:
        """The row of a persistent session's subscription."""
        return SubscriptionRow(self.session.id, self.topic_filter, self.qos, self.options, self.identifier)


_NO_SUBSCRIPTIONS: Final[deque[Subscription]] = deque(maxlen=0)  # always empty, and shared: a deque takes 600 bytes


class Session:
    """One client's session. A persistent one (``id`` is not 0) records every change in the journal."""

    def __init__(self, context: SessionContext, session_id: int, client_id: str) -> None:
        self.context = context
        self.id = session_id
        self.client_id = client_id
        self.connection: ClientConnection | None = None
        self.username: str | None = None  # None = anonymous
        self.rules: str | None = None  # name of the listener's access rules; None = the default ones
        self.permissions: object | None = None  # those that the last login brought; the rules know what they are
        self.permissions_bytes = 0  # their memory
        self.version = 4
        self.expiry_interval = 0  # seconds
        self.disconnected_at: float = 0.0  # Unix time; 0.0 while connected
        self.subscriptions: dict[str, Subscription] = {}
        self.filter_bytes = 0  # memory of the filters in `subscriptions`
        # Subscriptions whose retained messages must still be sent; once per SUBSCRIBE.
        self.pending_retained: deque[Subscription] = _NO_SUBSCRIPTIONS
        self.received: dict[object, int] = {}  # QoS 2 packet ids from the client -> `ON_DISK`, `EARLIER` or both
        self.received_earlier: i64 = 0  # how many of them are `EARLIER`
        # Flags stand side by side, so that a compiled object has no gaps.
        self.received_on_disk = False  # the store may have more of `received`, not read yet
        self.ended = False
        self.remote = False  # it stands for the sessions of another core of a cluster
        self.deliveries = Deliveries(context, session_id)
        self.will: SessionWill | None = None
        context.session_bytes += SESSION_BYTES + _text_memory(client_id)

    def add_pending_retained(self, subscriptions: list[Subscription]) -> None:
        """Send the retained messages of these subscriptions."""
        if self.pending_retained is _NO_SUBSCRIPTIONS:
            self.pending_retained = deque()
        self.pending_retained.extend(subscriptions)

    def retained_sent(self) -> None:
        """The retained messages of the first subscription in `pending_retained` were sent, or need not be."""
        sent = self.pending_retained.popleft()
        if not self.pending_retained:
            self.pending_retained = _NO_SUBSCRIPTIONS
        subscription = self.subscriptions.get(sent.topic_filter)
        if subscription is not None and subscription.options & AWAITS_RETAINED:
            # The client may have subscribed to the filter again, with or without another replay.
            if subscription is sent or subscription not in self.pending_retained:
                subscription.options &= ~AWAITS_RETAINED
                self.context.journal.save_later(SUBSCRIPTIONS, subscription.row())

    def set_will(self, will: SessionWill | None) -> None:
        """Set or delete the will."""
        context = self.context
        if self.will is not None:
            context.will_bytes -= self.will.message.size
        if will is not None:
            context.will_bytes += will.message.size
        self.will = will

    def set_username(self, username: str | None) -> None:
        """The session belongs to this user from now on; None = anonymous."""
        self.context.session_bytes += _text_memory(username) - _text_memory(self.username)
        self.username = username

    def set_permissions(self, permissions: object | None, size: int) -> None:
        """The session has these permissions from now on, which take ``size`` bytes of memory."""
        self.context.session_bytes += size - self.permissions_bytes
        self.permissions = permissions
        self.permissions_bytes = size

    # -- QoS 2 packet ids of the client ---------------------------------------

    def add_received(self, packet_id: object, stored: bool) -> None:
        """Remember a packet id, which is not in use, until PUBREL."""
        self.context.received_ids += 1
        self.received[packet_id] = ON_DISK if stored else 0

    def received_stored(self, packet_id: object) -> None:
        """A packet id that was just added is stored on disk."""
        self.received[packet_id] = ON_DISK

    def received_again(self, packet_id: object) -> None:
        """The client has used a packet id again that it has not released."""
        known = self.received[packet_id]
        if known >= EARLIER:
            self.received[packet_id] = known - EARLIER
            self.received_earlier -= 1

    def forget_received(self, packet_id: object) -> bool | None:
        """Free a packet id; returns whether it is stored on disk, None if it was not in use."""
        known = self.received.pop(packet_id, None)
        if known is None:
            return None
        self.context.received_ids -= 1
        if known >= EARLIER:
            self.received_earlier -= 1
        return known & ON_DISK != 0

    @property
    def received_full(self) -> bool:
        """Whether one more packet id would exceed the memory of all sessions. Each session may have a few."""
        return len(self.received) >= FREE_RECEIVED_IDS and self.context.sessions_full

    # -- connecting and disconnecting -----------------------------------------

    def attach(self, connection: ClientConnection, send_maximum: int) -> None:
        """A connection takes over the session. If the session `must_load`, the first page has been loaded before."""
        self.connection = connection
        self.version = connection.version
        if self.received:
            self.received = {packet_id: known | EARLIER for packet_id, known in self.received.items()}
        self.received_earlier = len(self.received)
        self.disconnected_at = 0.0
        self.deliveries.attach(connection, send_maximum)

    def detach(self, now: float) -> None:
        """The client disconnected at ``now`` (Unix time)."""
        self.connection = None
        self.disconnected_at = now
        self.deliveries.detach()

    def end(self) -> None:
        """The session has ended: take it off the totals, and break reference cycles."""
        self.ended = True
        self.set_will(None)
        self.set_username(None)
        self.set_permissions(None, 0)
        self.context.session_bytes -= SESSION_BYTES + _text_memory(self.client_id)
        self.context.received_ids -= len(self.received)
        self.received = {}
        self.received_earlier = 0
        self.pending_retained = _NO_SUBSCRIPTIONS
        self.deliveries.end()

    # -- the first page of what is stored ---------------------------------------

    @property
    def must_load(self) -> bool:
        """Whether a page must be loaded before the session can be resumed."""
        return self.received_on_disk or self.deliveries.queue.stored_seq != 0

    def request_page(self) -> None:
        """Request the next stored entries and, with the first ones, the received packet ids."""
        self.deliveries.request_page(self.received_on_disk)

    def load_page(self, rows: list[PageRow], received: list[int]) -> None:
        """Load a page of entries (`sessions.write_set.Page`) and, with the first one, the received packet ids."""
        for packet_id in received:
            self.forget_received(packet_id)
            self.add_received(packet_id, True)
        self.received_on_disk = False
        self.deliveries.load_page(rows)
