"""Counters of the whole broker: packets, PUBLISHes, bytes, and messages dropped by listener and cause.

The event loop increments plain integers; `/metrics` and ``$SYS`` read them.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

# The fields of `Drops`.
CAUSES: Final[tuple[str, ...]] = (
    "queue_full",
    "queue_full_oldest",
    "total_full",
    "memory_full",
    "refused",
    "slow_subscriber",
    "memory",
    "rate",
    "too_large",
    "not_authorized",
    "retained_full",
    "expired",
    "store_failed",
    "no_member",
)


class Drops:
    """Messages that were not delivered, by cause: for clients of one listener, or refused when these published them."""

    def __init__(self) -> None:
        self.queue_full = 0  # a new message for a full queue
        self.queue_full_oldest = 0  # the oldest message of a full queue
        self.total_full = 0  # a new message at the limit of all queues on disk
        self.memory_full = 0  # a new message at the limit of all queues in memory
        self.refused = 0  # a queue was full, and the publisher is to send the message again
        self.slow_subscriber = 0  # QoS 0, to a client that does not read
        self.memory = 0  # the same, near `max_memory`
        self.rate = 0  # QoS 0, to a client that is sent as much as it may be
        self.too_large = 0  # for the client's Maximum Packet Size
        self.not_authorized = 0
        self.retained_full = 0
        self.expired = 0
        self.store_failed = 0
        self.no_member = 0  # for a shared subscription on this core of a cluster, that has no permitted member on any core


class Counters:
    """Totals since the broker started."""

    def __init__(self) -> None:
        self.messages_received: i64 = 0
        self.messages_sent: i64 = 0
        self.publish_received: i64 = 0
        self.publish_sent: i64 = 0
        self.publish_bytes_received: i64 = 0  # of payloads
        self.publish_bytes_sent: i64 = 0  # likewise
        self.publish_packet_bytes_sent: i64 = 0
        self.bytes_received: i64 = 0
        self.bytes_sent: i64 = 0
        self.connections = 0  # sockets
        self.connects = 0  # CONNECT packets
        self.connections_refused = 0  # no socket was free
        self.limits_reached: dict[str, int] = {}  # by the name of the setting
        self.connections_evicted = 0  # closed without a CONNECT, for newer connections
        self.protocol_errors = 0
        self.tls_failures = 0
        self.websocket_failures = 0
        self.proxy_failures = 0
        self.away = Drops()  # for clients that are not connected, and of streams
        self.drops: dict[str, Drops] = {"": self.away}  # by listener
        # Records of streams for subscriptions that read them.
        self.stream_records_sent: i64 = 0
        self.stream_records_returned = 0  # by members of groups that left before they acknowledged them
        self.stream_records_missed = 0  # removed by retention before they were read, or damaged
        # Numbered messages for streams with deduplication.
        self.stream_repeats = 0
        self.stream_gaps = 0
        self.stream_numbers_invalid = 0
        # The store.
        self.commit_failures = 0

    def drops_of(self, listener: str) -> Drops:
        """The drops of a listener; "" = those of clients that are not connected."""
        drops = self.drops.get(listener)
        if drops is None:
            drops = Drops()
            self.drops[listener] = drops
        return drops

    def limit_reached(self, limit: str) -> None:
        """A limit has refused, delayed or closed something; ``limit`` is the name of its setting."""
        self.limits_reached[limit] = self.limits_reached.get(limit, 0) + 1
