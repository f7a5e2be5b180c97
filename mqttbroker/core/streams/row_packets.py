"""Rows of a stream as PUBLISH packets of one client."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.properties import user_property
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.streams.chunk import NO_BYTES, ChunkRows, user_property_bytes
from sessions.counters import Counters
from sessions.message import Message
from sessions.session import RETAIN_AS_PUBLISHED, Subscription

REDELIVERED: Final = user_property_bytes(b"redelivered", b"1")


class TopicPlan:
    """The packets of a topic for one consumer: ``field`` is the topic with its length, ``key`` the encoded user property
    `key`, empty if it depends on the row."""

    def __init__(self, wanted: bool, field: bytes, key: bytes) -> None:
        self.wanted = wanted
        self.field = field
        self.key = key


class RowPackets:
    """Packets that are made of rows, until `flush` puts all of them into the outbox of their client.

    One object serves all consumers of a broker: each calls `begin` first and `flush` last.
    """

    def __init__(self, counters: Counters) -> None:
        self.size: i64 = 0  # bytes of the packets
        self.subscription_ids: bytes = NO_BYTES  # encoded
        self._counters = counters
        self._parts: list[bytes] = []
        self._count: i64 = 0
        self._payload: i64 = 0  # bytes of `size`
        self._version: i64 = 4
        self._maximum: i64 = 0  # bytes of a packet
        self._as_published = False
        self._key = ""
        self._partition: bytes = NO_BYTES
        self._behind_key: bytes = NO_BYTES

    def begin(self, connection: Connection, subscription: Subscription, key: str, partition: bytes) -> None:
        """Make packets for this client and subscription; ``key`` is that of the stream, ``partition`` an encoded property."""
        self._version = connection.version
        self._maximum = connection.maximum_packet_size
        self._as_published = subscription.options & RETAIN_AS_PUBLISHED != 0
        self._key = key
        self._partition = partition
        self.subscription_ids = NO_BYTES
        self._behind_key = partition
        if subscription.identifier:
            self.subscription_ids = b"\x0b" + encode_varint(subscription.identifier)
            self._behind_key = partition + self.subscription_ids

    def add(self, rows: ChunkRows, plan: TopicPlan, qos: i64, packet_id: i64, mark: bytes) -> i64:
        """Add the packet of a row; returns its size, 0 if that is above the client's Maximum Packet Size [MQTT-3.1.2-25].

        ``mark`` are encoded properties that a version 5 client gets behind the others.
        """
        added: bytes = NO_BYTES
        if self._version >= 5:
            behind = self._behind_key if not mark else self._partition + mark + self.subscription_ids
            added = (plan.key or self._key_property(rows)) + behind
        first_byte: i64 = 0x30 | qos << 1 | (1 if self.retains(rows) else 0)
        written = rows.append_packet(self._parts, self._version, first_byte, plan.field, packet_id, added, self._maximum)
        if written:
            self.size += written
            self._payload += rows.payload_size
            self._count += 1
        return written

    def message(self, rows: ChunkRows, plan: TopicPlan, mark: bytes) -> Message:
        """The message of a row, with the properties that its packet would have; the subscription identifier is not one."""
        properties = rows.properties
        if self._version >= 5:
            key = plan.key or self._key_property(rows)
            properties = b"".join((properties, rows.place_properties(), key, self._partition, mark))
        return rows.message(properties)

    def retains(self, rows: ChunkRows) -> bool:
        """Whether the client gets the row with RETAIN."""
        return self._as_published and rows.retain

    def _key_property(self, rows: ChunkRows) -> bytes:
        """The user property `key` of a record whose key is not its topic."""
        key = self._key
        value = rows.client_id if key == "client" else user_property(rows.properties, key.partition(":")[2].encode())
        return user_property_bytes(b"key", value)

    def flush(self, connection: Connection) -> None:
        """Put the packets into the outbox of the client of `begin`."""
        if self._count:
            connection.send_publish_packets(self._parts, self.size, self._count, self._payload)
            self._counters.stream_records_sent += self._count
            self._parts = []
            self.size = self._count = self._payload = 0
