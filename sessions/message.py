"""The application message: what a PUBLISH carried, apart from any one delivery.

The rule kept here: a message never changes after it was received.  Whatever
belongs to one delivery (packet id, granted QoS, subscription identifiers,
topic alias, the seconds left until expiry) stands elsewhere.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr


@mypyc_attr(acyclic=True)
class Message:
    """One application message as the broker received it.

    ``topic`` is valid UTF-8 without wildcards; ``properties`` are the
    forwardable MQTT 5.0 PUBLISH properties, still encoded and without their
    length prefix, and opaque here (no topic alias, no message expiry interval,
    no subscription identifier).  ``timestamp`` and ``expires_at`` are
    microseconds since the Unix epoch, UTC; ``expires_at`` 0 means never.
    ``publisher`` is the client id, empty for the broker itself.  ``id`` is the
    store's row id, 0 as long as no store has been asked to keep the message;
    ``size`` is what it counts for against limits, in bytes.
    """

    def __init__(
        self,
        topic: str,
        payload: bytes,
        qos: int,
        retain: bool,
        properties: bytes,
        publisher: str,
        timestamp: int,
        expires_at: int,
    ) -> None:
        self.id = 0
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        self.properties = properties
        self.publisher = publisher
        self.timestamp = timestamp
        self.expires_at = expires_at
        self.size = len(topic) + len(payload) + len(properties)
