"""What the broker counts while it works.

The rule kept here: counting is adding to an integer; who wants to know, `/metrics` or ``$SYS``, reads it.
"""

from __future__ import annotations


class Stats:
    """What the broker counted since it started: packets, PUBLISHes, bytes on the wire, handshakes that failed."""

    def __init__(self) -> None:
        self.messages_received = 0
        self.messages_sent = 0
        self.publish_received = 0
        self.publish_sent = 0
        self.publish_dropped_slow = 0
        self.publish_dropped_too_large = 0
        self.publish_dropped_denied = 0
        self.publish_dropped_retained = 0
        self.publish_refused = 0  # for want of room in a queue
        self.publish_bytes_received = 0
        self.publish_bytes_sent = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.connections = 0
        self.protocol_errors = 0
        self.tls_failures = 0
        self.websocket_failures = 0
