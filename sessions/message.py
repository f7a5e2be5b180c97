"""The Application Message: the part of a PUBLISH that is the same for every receiver.

A message does not change after it was received. Packet id, granted QoS, subscription identifiers, topic alias and the
remaining seconds until expiry belong to a delivery.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr


@mypyc_attr(acyclic=True)
class Message:
    """One Application Message as received.

    ``topic`` is a valid topic name. ``properties`` are the MQTT 5.0 PUBLISH properties to forward, encoded, without
    their length; topic alias, message expiry interval and subscription identifiers are not among them. ``timestamp``
    and ``expires_at`` are in µs since the Unix epoch; ``expires_at`` is 0 for messages that do not expire.
    ``publisher`` is the client id, empty for the broker itself. ``id`` is the row id in the store, 0 until the message
    is written. ``size`` is the number of bytes that count against limits.
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

    def copy(self) -> Message:
        """The same message, not in the store."""
        return Message(
            self.topic,
            self.payload,
            self.qos,
            self.retain,
            self.properties,
            self.publisher,
            self.timestamp,
            self.expires_at,
        )
