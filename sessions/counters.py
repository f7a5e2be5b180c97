"""Counters of the whole broker: packets, PUBLISHes, bytes, and dropped messages by cause.

The event loop increments plain integers; `/metrics` and ``$SYS`` read them.
"""

from __future__ import annotations

from typing import Dict

from mypy_extensions import i64


class Counters:
    """Totals since the broker started."""

    def __init__(self) -> None:
        self.messages_received: i64 = 0
        self.messages_sent: i64 = 0
        self.publish_received: i64 = 0
        self.publish_sent: i64 = 0
        self.publish_dropped_slow = 0
        self.publish_dropped_memory = 0  # QoS 0, to a client that does not read, near `max_memory`
        self.publish_dropped_rate = 0
        self.publish_dropped_too_large = 0
        self.publish_dropped_denied = 0
        self.publish_dropped_retained = 0
        self.publish_refused = 0  # a queue was full
        self.publish_bytes_received: i64 = 0  # of payloads
        self.publish_bytes_sent: i64 = 0  # likewise
        self.publish_packet_bytes_sent: i64 = 0
        self.bytes_received: i64 = 0
        self.bytes_sent: i64 = 0
        self.connections = 0  # sockets
        self.connects = 0  # CONNECT packets
        self.connections_refused = 0  # no socket was free
        self.limits_reached: Dict[str, int] = {}  # by the name of the setting
        self.connections_evicted = 0  # closed without a CONNECT, for newer connections
        self.protocol_errors = 0
        self.tls_failures = 0
        self.websocket_failures = 0
        self.proxy_failures = 0
        # Messages dropped by sessions.
        self.queue_full = 0  # a new message for a full queue
        self.queue_full_oldest = 0  # the oldest message of a full queue
        self.total_full = 0  # a new message at the limit of all queues on disk
        self.memory_full = 0  # a new message at the limit of all queues in memory
        self.expired = 0
        self.store_failed = 0
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
        self.lost_records = 0  # stream records of failed commits

    def limit_reached(self, limit: str) -> None:
        """A limit has refused, delayed or closed something; ``limit`` is the name of its setting."""
        self.limits_reached[limit] = self.limits_reached.get(limit, 0) + 1
