"""The results of `Controls`: immutable values that any thread may read.

Points in time are Unix times in seconds, sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class SessionFilter(NamedTuple):
    """Conditions on sessions, all of which must hold; the defaults hold for every session."""

    prefix: str = ""  # the client identifier begins with this
    contains: str = ""  # the client identifier contains this
    connected: bool | None = None
    username: str | None = None
    listener: str | None = None  # that of the connection
    network: str = ""  # the address of the connection, or a network that it is in


class SessionSummary(NamedTuple):
    """One session, as lists show it."""

    client_id: str
    username: str | None  # None = anonymous
    protocol_version: int  # 3 (MQTT 3.1), 4 (3.1.1) or 5
    persistent: bool  # the session outlives its connection and is stored
    connected: bool
    address: str  # "" unless connected
    listener: str  # "" unless connected
    connected_at: float  # 0.0 unless connected
    disconnected_at: float  # 0.0 while connected
    subscriptions: int
    queued_messages: int  # QoS 1 and 2 messages that the client has not acknowledged, in flight or not
    queued_bytes: int
    in_flight: int
    expiry_interval: int  # seconds; 0xFFFFFFFF = never


class SessionDetail(NamedTuple):
    """One session with its queue and its limits."""

    summary: SessionSummary
    keep_alive: float  # seconds; 0.0 = off
    max_in_flight: int
    queued_memory_bytes: int
    incoming_qos2: int  # QoS 2 PUBLISHes received and not yet released
    retained_pending: int  # subscriptions whose retained messages are still to be sent
    has_will: bool
    congested: bool  # the client's socket takes no more
    worker: int  # the connection worker that has the socket; 0 = none
    # Of the connection: bytes as MQTT packets, without those of TLS and WebSocket; messages are PUBLISH packets.
    bytes_received: int
    bytes_sent: int
    messages_received: int
    messages_sent: int


class SessionPage(NamedTuple):
    """Sessions in the order of their client identifiers."""

    sessions: tuple[SessionSummary, ...]
    after: str  # where the next page begins; "" if this is the last one


class SortedPage(NamedTuple):
    """Sessions in the order of a value, and of their client identifiers where it is the same."""

    sessions: tuple[SessionSummary, ...]
    after: tuple[float, str] | None  # where the next page begins; None if this is the last one


class SubscriptionView(NamedTuple):
    """One subscription of one session; options as in section 3.8.3.1."""

    client_id: str
    topic_filter: str  # with $share/{ShareName}/ if it is shared
    qos: int
    no_local: bool
    retain_as_published: bool
    identifier: int  # Subscription Identifier; 0 = none
    connected: bool


class SubscriptionPage(NamedTuple):
    """Subscriptions in no particular order."""

    subscriptions: tuple[SubscriptionView, ...]
    cursor: int  # of the next page; 0 if this is the last one


class RetainedMessage(NamedTuple):
    """The retained message of a topic."""

    topic: str
    payload: bytes
    qos: int
    properties: bytes  # encoded as in an MQTT 5.0 PUBLISH, without their length
    client_id: str  # of the publisher; "" = the broker
    received_at: float
    expires_at: float  # 0.0 = never


class RetainedPage(NamedTuple):
    """Retained messages in no particular order."""

    messages: tuple[RetainedMessage, ...]
    cursor: int  # of the next page; 0 if this is the last one


class TopicLevel(NamedTuple):
    """One level of the tree of retained topics."""

    topic: str  # up to this level
    level: str
    below: bool  # retained topics continue after it
    message: RetainedMessage | None  # of the topic that ends here


class LevelPage(NamedTuple):
    """Levels in no particular order."""

    levels: tuple[TopicLevel, ...]
    cursor: int  # of the next page; 0 if this is the last one


class WorkerStatus(NamedTuple):
    """A connection worker. CPU time and memory are those of its process now, as of a second ago."""

    number: int
    up: bool
    clients: int  # open connections
    cpu_seconds: float
    resident_bytes: int
    link_bytes: int  # written to its link and not read by it
    starts: int


class BanView(NamedTuple):
    """A ban of the clients to which address, user name and client id apply; "" = any."""

    address: str  # a network with its prefix length, "2001:db8::/64"
    username: str  # a digest of a long one
    client_id: str  # likewise
    cause: str  # "operator", "failed_logins", "protocol_errors" or "reconnects"
    reason: str  # as the operator gave it
    bans: int  # of these clients for this cause so far
    seconds_left: float | None  # None = until it is lifted


class BanPage(NamedTuple):
    """Bans, those of operators last."""

    bans: tuple[BanView, ...]
    cursor: int  # of the next page; 0 if this is the last one


class MemoryPart(NamedTuple):
    """The memory of one kind of state, and its limit, in bytes; ``limit`` 0 if the limit is a number of things."""

    name: str
    held: int
    limit: int


class MemoryStatus(NamedTuple):
    """The broker's memory in bytes: ``used``, the larger of ``counted`` and ``resident``, stays below ``maximum``."""

    maximum: int  # 0 = unlimited
    used: int
    counted: int
    resident: int
    stage: int
    stage_name: str
    parts: tuple[MemoryPart, ...]
    refused: Mapping[str, int]  # "connections", "subscriptions", "retained", "wills"


class JwksStatus(NamedTuple):
    """Fetches of the key set for tokens, and its keys in use; ``fetched_at`` is the last successful one, 0 = none."""

    successes: int
    failures: int
    keys: int
    fetched_at: float


class AuthenticatorStatus(NamedTuple):
    """An authenticator in another process. ``failures`` are logins that it could not decide."""

    kind: str  # "http_callback" or "plugin"
    up: bool
    waiting: int
    in_progress: int
    failures: int
    restarts: int


class QueueStatus(NamedTuple):
    """A work queue; ``depth`` counts the messages that are not acknowledged, those ``in_flight`` included."""

    stream: str
    depth: int
    in_flight: int
    consumers: int
    redeliveries: int
    dead_letters: int


class BrokerStatus(NamedTuple):
    """Counters and gauges of a broker at one moment."""

    durability: str
    totals: Mapping[str, int]  # the counters of `sessions.counters`, by name
    drops: Mapping[str, int]  # messages not delivered, by cause
    drops_by_listener: Mapping[tuple[str, ...], int]  # by listener, "" = clients that are not connected, and cause
    clients_connected: int
    clients_connected_maximum: int
    sessions: int
    sessions_expired: int
    subscriptions: int  # one per shared subscription, however many members it has
    shared_subscriptions: int
    retained_messages: int
    retained_bytes: int
    retained_payload_bytes: int
    route_cache_entries: int
    queued_messages: int  # of persistent sessions, on disk
    queued_bytes: int
    queue_memory_bytes: int
    store_pending_bytes: int
    bans: int  # in force
    bans_started: Mapping[str, int]  # by cause
    limits_reached: Mapping[str, int]  # by the name of the setting
    logins: dict[tuple[str, str], int]  # by authenticator and outcome
    logins_failed: int
    connects_refused: Mapping[tuple[str, ...], float]  # by listener and reason
    denials: Mapping[str, int]  # of the access rules, by action
    logins_banned: int  # refused because of a ban
    publishers_waiting: int
    publisher_waits: int
    stream_producers: int
    queues: Mapping[str, QueueStatus]  # by name, with the filter if there is one
    memory: MemoryStatus
