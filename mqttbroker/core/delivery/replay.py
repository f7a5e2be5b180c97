"""Replays: messages of the past for new subscriptions, such as retained ones, sent while the broker serves others.

Each message of a source is sent once, as fast as the client accepts it. A SUBSCRIBE is answered with the first few;
all replays share a small budget per event-loop iteration while clients send packets, and a larger one otherwise.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.core.access.policy import Rules
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.client.outgoing import NO_BYTES, Outgoing
from sessions.counters import Counters
from sessions.journal import NOT_SENT_AGAIN
from sessions.message import Message
from sessions.retained import Retained, RetainedScan
from sessions.session import Session, Subscription

# The budget of all replays together in one event-loop iteration. Visiting a topic, sending a message, and each KiB of
# it cost 1.
BUSY_BUDGET: Final = 100
IDLE_BUDGET: Final = 800
IDLE_AFTER: Final = 64  # iterations without a packet from any client

LOOKED_AT: Final = 8  # topics and levels, to see whether anything matches a filter

MAX_QUEUED: Final = 200  # messages in a session's queue that pause its replay


@mypyc_attr(allow_interpreted_subclasses=True)
class ReplaySource:
    """The messages that one subscription is to be sent; each `read` returns the next few.

    ``visited`` is the cost of the last `read`, in topics or records visited.
    """

    def __init__(self) -> None:
        self.visited = 0

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `read` has returned all messages."""

    @property
    def waiting(self) -> bool:
        """Whether `read` has nothing until another process has answered; `Turns.wake` is called then."""
        return False

    def close(self) -> None:
        """The source is read no more."""

    @abstractmethod
    def read(self, budget: int, now: int) -> list[Message]:
        """The next messages, found at a cost of about ``budget`` (at least 1); possibly none though not `done`.

        ``now`` is in µs since the Unix epoch.
        """

    @abstractmethod
    def is_current(self, message: Message, now: int) -> bool:
        """Whether a message that was read earlier is still to be sent."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ReplaySources:
    """Opens the source of a subscription."""

    @abstractmethod
    def open(self, topic_filter: str) -> ReplaySource:
        """The messages that match a valid filter without ``$share``."""

    def may_match(self, topic_filter: str, now: int) -> bool:
        """False only if it is clear at once that there is no such message at ``now`` (µs since the Unix epoch)."""
        return True

    def tick(self) -> None:
        """Called about once a second."""


class RetainedSource(ReplaySource):
    """The retained messages that match a filter."""

    def __init__(self, retained: Retained, scan: RetainedScan) -> None:
        super().__init__()
        self._retained = retained
        self._scan = scan

    @property
    def done(self) -> bool:
        return self._scan.done

    def read(self, budget: int, now: int) -> list[Message]:
        messages = self._scan.read(budget, now)
        self.visited = self._scan.visited
        return messages

    def is_current(self, message: Message, now: int) -> bool:
        """A message that was replaced is not sent: the subscriber got the newer one when it was published."""
        return self._retained.is_current(message, now)


class RetainedSources(ReplaySources):
    """Opens the retained messages of a filter."""

    def __init__(self, retained: Retained) -> None:
        self._retained = retained

    def open(self, topic_filter: str) -> ReplaySource:
        return RetainedSource(self._retained, self._retained.scan(topic_filter))

    def may_match(self, topic_filter: str, now: int) -> bool:
        scan = self._retained.scan(topic_filter)
        return bool(scan.read(LOOKED_AT, now)) or not scan.done


class Replays:
    """All active replays of one broker."""

    def __init__(self, sources: ReplaySources, rules: Rules, counters: Counters) -> None:
        self.sources = sources
        self.rules = rules
        self.counters = counters
        self._active: dict[Connection, Replay] = {}  # the next to send first
        self._to_sweep: list[Connection] = []
        self._received = 0  # packets received before the last iteration
        self._idle = 0  # iterations since a packet was received

    def begin(self, connection: Connection) -> None:
        """Start the replay of a connection's new subscriptions: send a small part now, and the rest in `step`."""
        session = connection.session
        if session is None or not session.pending_retained or connection in self._active:
            return
        replay = Replay(self.sources, self.rules, connection, session)
        if replay.ready:
            replay.step(BUSY_BUDGET)
        if replay.done:
            replay.close()
        else:
            self._active[connection] = replay
            connection.request_flush()

    def step(self) -> bool:
        """Continue the replays whose clients accept more; true if there is more to send at once."""
        if not self._active:
            return False
        received: int = self.counters.messages_received
        self._idle = self._idle + 1 if received == self._received else 0
        self._received = received
        budget: int = IDLE_BUDGET if self._idle > IDLE_AFTER else BUSY_BUDGET
        left: int = budget
        for connection in list(self._active):
            replay = self._active[connection]
            if replay.ready:
                used = replay.step(left)
                left -= used
                if used:  # move it behind the others
                    del self._active[connection]
                    self._active[connection] = replay
            if replay.done:
                replay.close()
                del self._active[connection]
            if left <= 0:
                break
        return left < budget

    def sweep(self, visits: int) -> None:
        """Drop messages that are out of date from the replays, about ``visits`` of them; each call continues the last.

        Otherwise clients that do not read would keep retained messages in memory that were replaced.
        """
        self.sources.tick()
        if not self._to_sweep:
            self._to_sweep = list(self._active)
        while self._to_sweep and visits > 0:
            replay = self._active.get(self._to_sweep.pop())
            if replay is not None:
                visits -= 1 + replay.drop_outdated()


class Replay:
    """The messages of the past that one session's new subscriptions are to be sent (section 3.3.1.3).

    A subscription leaves ``session.pending_retained`` after its last message was sent, or queued if the session is
    stored; if the client reconnects or the broker restarts before that, its source is read again from the beginning.
    """

    def __init__(
        self,
        sources: ReplaySources,
        rules: Rules,
        connection: Connection,
        session: Session,
    ) -> None:
        self.sources = sources
        self.rules = rules
        self.connection = connection
        self.session = session
        self._subscription: Subscription | None = None  # the one that `_source` belongs to
        self._source: ReplaySource | None = None
        self._unsent: list[Message] = []  # read from the source; the last is sent first

    @property
    def done(self) -> bool:
        return not self.session.pending_retained or self.session.connection is not self.connection

    @property
    def ready(self) -> bool:
        """Whether there may be something to send, and the client accepts more: it reads, and has no older messages waiting."""
        connection = self.connection
        deliveries = self.session.deliveries
        source = self._source
        if source is not None and not self._unsent and source.waiting:
            return False
        return (
            connection.ready
            and not connection.outbox.writing_paused
            and len(deliveries.queue.entries) < MAX_QUEUED
            and deliveries.all_in_memory
            and (deliveries.session_id != 0 or deliveries.packet_ids_in_use < self._max_in_flight)
        )

    @property
    def _max_in_flight(self) -> int:
        """The part of a transient session's in-flight window that a replay may use; live messages have the rest."""
        session = self.session
        window = session.deliveries.window
        maximum: int = min(window.unpersisted_maximum, session.context.limits.max_queued_messages)
        return max(window.send_maximum, maximum // 2)

    def drop_outdated(self) -> int:
        """Drop the unsent messages that are out of date; returns how many were looked at."""
        unsent = self._unsent
        source = self._source
        if source is None or not unsent:
            return 0
        now = self.connection.outbound.clock.now
        self._unsent = [message for message in unsent if source.is_current(message, now)]
        return len(unsent)

    def step(self, budget: int) -> int:
        """Send a part; returns its cost, which is 0 if there was nothing to do."""
        session = self.session
        if self.done:
            return 0
        subscription = session.pending_retained[0]
        if subscription.topic_filter not in session.subscriptions:  # unsubscribed meanwhile
            session.retained_sent()
            return 1
        source = self._source
        if source is None or subscription is not self._subscription:
            self.close()
            self._subscription = subscription
            self._unsent.clear()
            source = self.sources.open(subscription.topic_filter)
            self._source = source
        visited: int = 0
        just_read: bool = not self._unsent
        if just_read:
            self._unsent = source.read(budget, self.connection.outbound.clock.now)
            self._unsent.reverse()
            visited = max(1, source.visited)
        sent = self._send(subscription, source, budget, just_read)
        if source.done and not self._unsent:
            session.retained_sent()
            self.close()
        return max(visited, sent)

    def close(self) -> None:
        """Nothing more is read from the source."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _send(self, subscription: Subscription, source: ReplaySource, budget: int, just_read: bool) -> int:
        """Send unsent messages while the client accepts them and the budget lasts; returns the cost.

        Unless they were just read, they may be out of date.
        """
        unsent = self._unsent
        session = self.session
        deliveries = session.deliveries
        connection = self.connection
        restrictive: bool = self.rules.restrictive
        granted: int = subscription.qos
        subscription_id: bytes = NO_BYTES
        if subscription.identifier:
            subscription_id = b"\x0b" + encode_varint(subscription.identifier)
        ready: bool = self.ready
        used: int = 0
        while unsent and ready and used < budget:
            message = unsent[-1]
            if deliveries.queued_messages and not deliveries.queue.has_room(message.size, deliveries.open):
                break
            unsent.pop()
            used += 1 + (message.size >> 10)
            if not just_read and not source.is_current(message, connection.outbound.clock.now):
                continue
            if restrictive and not self.rules.may_read(session, message.topic):
                continue
            if granted == 0 or message.qos == 0:
                connection.send_retained(message, subscription_id)
                ready = connection.ready
            else:
                self._offer(message, message.qos if message.qos < granted else granted, subscription_id)
                ready = self.ready
        return used

    def _offer(self, message: Message, qos: int, subscription_id: bytes) -> None:
        """Send a message at QoS 1 or 2, or have the session queue it until it can be sent."""
        connection = self.connection
        outgoing = Outgoing(message.topic.encode("utf-8"), message, connection.outbound.clock.now)
        if connection.send_unpersisted(outgoing, qos, True, subscription_id):
            return
        # The store counts the queue entries of a message, so this delivery gets its own.
        entry = self.session.deliveries.offer(message.copy(), qos, True, subscription_id, NOT_SENT_AGAIN)
        if entry is not None:
            connection.send_delivery(entry, outgoing, False)
