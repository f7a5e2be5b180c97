"""Rows of the store for the sessions, queues and retained messages of a Mosquitto database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.core.routing.route import is_reserved
from mqttbroker.migration.mosquitto_database import (
    RESEND_PUBREL,
    WAIT_FOR_PUBACK,
    WAIT_FOR_PUBCOMP,
    WAIT_FOR_PUBREC,
    Client,
    ClientMessage,
    ClientSubscription,
    Database,
)
from sessions.journal import AWAIT_PUBACK, AWAIT_PUBCOMP, AWAIT_PUBREC, QUEUED
from sessions.message import Message
from sessions.row_kinds import RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.rows import EntryRow, ReceivedKey, SessionRow, SubscriptionRow, received_key
from sessions.session import NEVER, NO_LOCAL, RETAIN_AS_PUBLISHED
from sessions.write_set import WriteSet
from topic_matcher.filters import is_valid_filter, matches, parse_shared

_PHASES: Final = {
    WAIT_FOR_PUBACK: AWAIT_PUBACK,
    WAIT_FOR_PUBREC: AWAIT_PUBREC,
    RESEND_PUBREL: AWAIT_PUBCOMP,
    WAIT_FOR_PUBCOMP: AWAIT_PUBCOMP,
}
_SUBSCRIPTION_IDENTIFIER: Final = b"\x0b"
_MICROSECONDS: Final = 1_000_000

# Of one write set.
_ROWS: Final = 1000
_BYTES: Final = 4 << 20


class Counts(NamedTuple):
    """How much was converted."""

    sessions: int
    subscriptions: int
    queued: int
    retained: int


class _Entry(NamedTuple):
    """A message that a session is to get."""

    session_id: int
    store_id: int
    qos: int
    retain: bool
    packet_id: int
    phase: int
    identifiers: tuple[int, ...]


class Rows:
    """The rows for one database, for a store without rows.

    ``saved_at`` is when the database was saved, in Unix seconds; it stands for times that Mosquitto does not keep.
    ``not_carried`` has a line for everything that has no row.
    """

    def __init__(self, database: Database, saved_at: float) -> None:
        self.not_carried: list[str] = []
        self._database = database
        self._saved_at = saved_at
        self._sessions: dict[str, int] = {}
        for client in database.clients:
            self._sessions.setdefault(client.client_id, len(self._sessions) + 1)
        self._subscriptions = [one for one in database.subscriptions if self._is_usable(one)]
        self._received: list[ReceivedKey] = []
        self._retained: dict[str, Message] = {}
        self._entries: list[_Entry] = []
        for store_id in database.retained:
            self._retain(store_id)
        unreleased: list[ClientMessage] = []
        ignored = 0
        for one in database.client_messages:
            if one.client_id not in self._sessions or one.store_id not in database.messages or one.qos == 0:
                ignored += 1
            elif one.incoming:
                unreleased.append(one)
            else:
                self._entries.append(self._queued(one))
        if ignored:
            self.not_carried.append(f"{ignored} queued messages at QoS 0, or without a session or a message")
        for one in unreleased:
            self._release(one)

    @property
    def counts(self) -> Counts:
        return Counts(len(self._sessions), len(self._subscriptions), len(self._entries), len(self._retained))

    def _is_usable(self, subscription: ClientSubscription) -> bool:
        if subscription.client_id not in self._sessions:
            return False
        if is_valid_filter(subscription.topic_filter):
            return True
        self.not_carried.append(f"client {subscription.client_id!r}: topic filter {subscription.topic_filter!r}")
        return False

    def _message(self, store_id: int) -> Message:
        found = self._database.messages[store_id]
        timestamp = int(self._saved_at * _MICROSECONDS)
        expires_at = found.expires_at * _MICROSECONDS
        return Message(found.topic, found.payload, found.qos, found.retain, found.properties, found.publisher, timestamp, expires_at)

    def _retain(self, store_id: int) -> None:
        stored = self._database.messages.get(store_id)
        if stored is None or is_reserved(stored.topic):
            name = "that the database lacks" if stored is None else repr(stored.topic)
            self.not_carried.append(f"retained message {name}")
            return
        message = self._message(store_id)
        message.retain = True
        self._retained[message.topic] = message

    def _queued(self, one: ClientMessage) -> _Entry:
        phase = _PHASES.get(one.state, QUEUED)
        identifiers = (one.subscription_id,) if one.subscription_id else ()
        packet_id = 0 if phase == QUEUED else one.packet_id
        return _Entry(self._sessions[one.client_id], one.store_id, one.qos, one.retain, packet_id, phase, identifiers)

    def _release(self, one: ClientMessage) -> None:
        """Publish a QoS 2 message: Mosquitto does so when it gets the PUBREL, this broker when it gets the PUBLISH."""
        self._received.append(received_key(self._sessions[one.client_id], one.packet_id))
        stored = self._database.messages[one.store_id]
        if stored.retain and not is_reserved(stored.topic):
            self._retained.pop(stored.topic, None)
            if stored.payload:
                self._retain(one.store_id)
        groups: set[str] = set()
        found: dict[int, list[ClientSubscription]] = {}
        for subscription in self._subscriptions:
            shared = parse_shared(subscription.topic_filter)
            if not matches(subscription.topic_filter if shared is None else shared[1], stored.topic):
                continue
            if shared is not None:
                if subscription.topic_filter in groups:
                    continue
                groups.add(subscription.topic_filter)
            elif subscription.options & NO_LOCAL and subscription.client_id == one.client_id:
                continue
            found.setdefault(self._sessions[subscription.client_id], []).append(subscription)
        for session_id, subscriptions in found.items():
            qos = min(stored.qos, max(each.options & 3 for each in subscriptions))
            if qos:
                retain = stored.retain and any(each.options & RETAIN_AS_PUBLISHED for each in subscriptions)
                identifiers = tuple(each.identifier for each in subscriptions if each.identifier)
                self._entries.append(_Entry(session_id, one.store_id, qos, retain, 0, QUEUED, identifiers))

    # -- rows -------------------------------------------------------------------

    def write_sets(self) -> Iterator[WriteSet]:
        """Everything, in write sets of bounded size, each of which refers to rows of itself or of those before."""
        batch = _Batch()
        for client in self._database.clients:
            batch.write_set.saved(SESSIONS).append(self._session_row(client))
            yield from batch.grown(len(client.client_id))
        for one in self._subscriptions:
            row = SubscriptionRow(self._sessions[one.client_id], one.topic_filter, one.options & 3, one.options, one.identifier)
            batch.write_set.saved(SUBSCRIPTIONS).append(row)
            yield from batch.grown(len(one.topic_filter))
        for message in self._retained.values():
            batch.write_set.saved(RETAINED).append(message)
            yield from batch.grown(message.size)
        batch.write_set.received += self._received
        yield from self._queues(batch)
        yield batch.write_set

    def _queues(self, batch: _Batch) -> Iterator[WriteSet]:
        references = Counter(entry.store_id for entry in self._entries)
        messages: dict[int, Message] = {}
        for seq, entry in enumerate(self._entries, 1):
            message = messages.get(entry.store_id)
            if message is None:
                message = messages[entry.store_id] = self._message(entry.store_id)
                message.id = len(messages)
                batch.write_set.messages.append(message)
            shared = int(references[entry.store_id] > 1)
            identifiers = b"".join(_SUBSCRIPTION_IDENTIFIER + encode_varint(number) for number in entry.identifiers)
            row: EntryRow = (
                entry.session_id,
                seq,
                message.id,
                shared,
                entry.qos,
                int(entry.retain),
                identifiers,
                entry.packet_id,
                entry.phase,
                message.size,
                message.expires_at,
            )
            batch.write_set.entries.append(row)
            yield from batch.grown(message.size)

    def _session_row(self, client: Client) -> SessionRow:
        disconnected_at = self._saved_at
        if client.expires_at and client.expiry_interval != NEVER:
            disconnected_at = min(disconnected_at, float(client.expires_at - client.expiry_interval))
        return SessionRow(
            session_id=self._sessions[client.client_id],
            client_id=client.client_id,
            version=4,  # not known; the next CONNECT sets it
            expiry_interval=client.expiry_interval,
            disconnected_at=disconnected_at,
            will=None,
            will_due=None,
            username=client.username or None,
            rules=None,
        )


class _Batch:
    """The write set that grows."""

    def __init__(self) -> None:
        self.write_set = WriteSet()
        self._rows = 0
        self._bytes = 0

    def grown(self, size: int) -> Iterator[WriteSet]:
        """A row of ``size`` bytes was added; yields the write set if it is full, and begins another."""
        self._rows += 1
        self._bytes += size
        if self._rows >= _ROWS or self._bytes >= _BYTES:
            full, self.write_set = self.write_set, WriteSet()
            self._rows = self._bytes = 0
            yield full
