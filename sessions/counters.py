"""Counters of the whole broker: packets, PUBLISHes, bytes, and messages dropped by listener and cause.

The event loop increments plain integers. `COUNTERS` is the table of which the status, `/metrics`, ``$SYS`` and the metrics of a
cluster's node are made. A new counter is one `Counter` there, which `Counters.count` counts; one that is counted for each packet is an
attribute of `Counters`, too.
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


class Counter:
    """One counter.

    ``metric`` is its name in `/metrics`, without ``mqttbroker_`` and ``_total``, and ``text`` the help there. Counters with the same
    metric are told apart by ``label``, a name and a value. ``topic`` is its topic below ``$SYS/broker/``, one of ``streams/`` only if
    there are streams, and ``load`` that of its rates below ``load/``; "" for none.

    ``attribute`` is that of `Counters`; "" if `Counters.count` counts it. With ``by_front`` a cluster's node counts it as well, for
    connections that have no core yet.
    """

    def __init__(
        self,
        metric: str,
        text: str,
        attribute: str = "",
        topic: str = "",
        load: str = "",
        label: tuple[str, str] = ("", ""),
        by_front: bool = False,
    ) -> None:
        self.number = len(COUNTERS)
        self.metric = metric
        self.text = text
        self.attribute = attribute
        self.topic = topic
        self.load = load
        self.label = label
        self.by_front = by_front
        COUNTERS.append(self)

    @property
    def name(self) -> str:
        """Its name in the status."""
        return self.attribute or self.metric


COUNTERS: Final[list[Counter]] = []

Counter("packets_received", "Control packets received.", "messages_received", "messages/received", "messages/received")
Counter("packets_sent", "Control packets sent.", "messages_sent", "messages/sent", "messages/sent")
Counter("publish_received", "PUBLISH packets received.", "publish_received", "publish/messages/received", "publish/received")
Counter("publish_sent", "PUBLISH packets sent.", "publish_sent", "publish/messages/sent", "publish/sent")
Counter("publish_bytes_received", "Payload bytes of PUBLISH packets received.", "publish_bytes_received", "publish/bytes/received")
Counter("publish_bytes_sent", "Payload bytes of PUBLISH packets sent.", "publish_bytes_sent", "publish/bytes/sent")
Counter("bytes_received", "Bytes received from clients.", "bytes_received", "bytes/received", "bytes/received")
Counter("bytes_sent", "Bytes sent to clients.", "bytes_sent", "bytes/sent", "bytes/sent")
Counter("connections", "Network connections accepted.", "connections", load="sockets")
Counter("connects", "CONNECT packets received.", "connects", load="connections")
Counter("connections_refused", "Connections closed because no socket was free.", "connections_refused", by_front=True)
Counter(
    "connections_evicted",
    "Connections without a CONNECT that were closed for newer ones.",
    "connections_evicted",
    by_front=True,
)
Counter("protocol_errors", "Connections closed because of a protocol error.", "protocol_errors")
HANDSHAKES: Final = "Connections that failed before MQTT or HTTP began."
Counter("handshakes_failed", HANDSHAKES, "tls_failures", label=("layer", "tls"), by_front=True)
Counter("handshakes_failed", HANDSHAKES, "websocket_failures", label=("layer", "websocket"), by_front=True)
Counter("handshakes_failed", HANDSHAKES, "proxy_failures", label=("layer", "proxy"), by_front=True)
TAKEOVERS: Final = Counter("takeovers", "Connections closed because their client identifier connected again.", topic="clients/takeovers")
Counter("store_failures", "Commits that failed.", "commit_failures")
Counter(
    "stream_records_sent",
    "Records of streams sent to MQTT clients: subscriptions, groups and queues.",
    "stream_records_sent",
    "streams/records/sent",
)
Counter(
    "stream_records_returned",
    "Records given back by members of groups and queues that did not acknowledge them.",
    "stream_records_returned",
    "streams/records/returned",
)
Counter(
    "stream_records_missed",
    "Records that retention removed, or that are damaged, before an MQTT client was sent them.",
    "stream_records_missed",
    "streams/records/missed",
)
Counter("stream_repeats", "Messages not stored in a stream because it has their producer-id and seq.", "stream_repeats")
Counter("stream_gaps", "Messages whose seq leaves out numbers of their producer-id.", "stream_gaps")
Counter(
    "stream_numbers_invalid",
    "Messages for a stream with an unusable producer-id or seq; stored each time.",
    "stream_numbers_invalid",
)


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
        self.counted = [0 for _ in COUNTERS]  # those without an attribute, by number

    def drops_of(self, listener: str) -> Drops:
        """The drops of a listener; "" = those of clients that are not connected."""
        drops = self.drops.get(listener)
        if drops is None:
            drops = Drops()
            self.drops[listener] = drops
        return drops

    def count(self, counter: Counter) -> None:
        """Count a counter that has no attribute."""
        self.counted[counter.number] += 1

    def total(self, counter: Counter) -> int:
        """The value of a counter."""
        return getattr(self, counter.attribute) if counter.attribute else self.counted[counter.number]

    def limit_reached(self, limit: str) -> None:
        """A limit has refused, delayed or closed something; ``limit`` is the name of its setting."""
        self.limits_reached[limit] = self.limits_reached.get(limit, 0) + 1
