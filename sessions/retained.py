"""Retained messages (section 3.3.1.3): in memory, and in the store through the journal.

A scan never returns an expired message, and deletes it. Volatile messages (the broker's own ``$SYS`` topics) are not
stored.
"""

from __future__ import annotations

from typing import Final, cast

from sessions.journal import Gate, Journal
from sessions.message import Message
from sessions.rows import RetainedRow
from sessions.sorted_ids import SortedIds
from topic_matcher.filters import has_wildcard, matches
from topic_matcher.topic_tree import LevelScan, Scan, TopicTree

_SYS: Final = "$SYS/"


def message_from_row(row: RetainedRow) -> Message:
    return Message(row.topic, row.payload, row.qos, True, row.properties, row.publisher, row.timestamp, row.expires_at)


class Retained:
    """The retained messages of one broker.

    ``size`` is the sum of their sizes in bytes, ``payload_bytes`` that of their payloads.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._tree = TopicTree()
        self.size = 0
        self.payload_bytes = 0
        self.expiring = 0  # messages that have an expiry
        self._sweep: RetainedScan | None = None
        self._sorted: SortedIds | None = None  # the topics but those of ``$SYS``, if there are to be `SortedScan`s

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def branches(self) -> int:
        """Levels at which topics differ, each an object of its own."""
        return self._tree.branches

    def keep_sorted(self) -> None:
        """Allow `sorted_scan`. To be called before any message but those of ``$SYS`` is added."""
        self._sorted = SortedIds()

    def load(self, message: Message) -> None:
        """Add a message that was read from the store."""
        self._tree.set(message.topic, message)
        if self._sorted is not None and not message.topic.startswith(_SYS):
            self._sorted.load(message.topic)
        self._count(message, 1)

    def _count(self, message: Message, times: int) -> None:
        self.size += times * message.size
        self.payload_bytes += times * len(message.payload)
        if message.expires_at != 0:
            self.expiring += times

    def get(self, topic: str) -> Message | None:
        return cast(Message | None, self._tree.get(topic))

    def set(self, message: Message, volatile: bool, gate: Gate | None) -> None:
        """Replace a topic's retained message; an empty payload removes it [MQTT-3.3.1-6].

        ``gate`` stays closed until the change is on disk.
        """
        topic = message.topic
        old = cast(Message | None, self._tree.get(topic))
        if old is not None:
            self._count(old, -1)
        if message.payload:
            self._tree.set(topic, message)
            self._count(message, 1)
            if self._sorted is not None and old is None and not topic.startswith(_SYS):
                self._sorted.add(topic)
            if not volatile:
                self._journal.set_retained(topic, message)
        elif old is not None:
            self._tree.pop(topic)
            if self._sorted is not None and not topic.startswith(_SYS):
                self._sorted.remove(topic)
            if not volatile:
                self._journal.set_retained(topic, None)
        else:
            if gate is not None:
                self._journal.wait_for_retained(gate, topic)
            return
        if gate is not None and not volatile:
            self._journal.wait_for_commit(gate)

    def scan(self, topic_filter: str) -> RetainedScan:
        """The messages that match a filter, to be read in parts."""
        return RetainedScan(self, self._tree.scan(topic_filter))

    def sorted_scan(self, topic_filter: str, after: str) -> SortedScan:
        """The messages but those of ``$SYS`` that match a filter, of topics greater than ``after``; "" = of all.

        Only after `keep_sorted`.
        """
        assert self._sorted is not None
        return SortedScan(self, self._sorted, topic_filter, after)

    def levels(self, prefix: str | None) -> LevelScan:
        """The levels of topics after ``prefix`` and a slash, those of expired messages included; None = the first levels."""
        return self._tree.levels(prefix)

    def is_current(self, message: Message, now: int) -> bool:
        """Whether the message is still its topic's and has not expired at ``now`` (µs since the Unix epoch)."""
        return self._tree.get(message.topic) is message and (message.expires_at == 0 or message.expires_at > now)

    def expire(self, message: Message) -> None:
        """Delete an expired message."""
        if self._tree.get(message.topic) is message:
            self._tree.pop(message.topic)
            self._count(message, -1)
            if self._sorted is not None and not message.topic.startswith(_SYS):
                self._sorted.remove(message.topic)
            self._journal.set_retained(message.topic, None)

    def sweep(self, visits: int, now: int) -> None:
        """Delete the expired messages among the next ``visits`` topics; each call continues where the last ended."""
        if self.expiring == 0:
            return
        scan = self._sweep
        if scan is None or scan.done:
            scan = self.scan("#")
            self._sweep = scan
        scan.read(visits, now)


class RetainedScan:
    """The retained messages that match a filter, each topic at most once, while others are added and deleted."""

    def __init__(self, retained: Retained, scan: Scan) -> None:
        self._retained = retained
        self._scan = scan

    @property
    def done(self) -> bool:
        return self._scan.done

    @property
    def visited(self) -> int:
        """Topics and levels visited by the last `read`."""
        return self._scan.visited

    def read(self, visits: int, now: int) -> list[Message]:
        """The matching messages of about the next ``visits`` (at least 1) topics and levels.

        Messages that have expired at ``now`` (µs since the Unix epoch) are left out. An empty list is the end only if
        `done`.
        """
        found: list[Message] = []
        for stored in self._scan.read_within(visits, visits):
            message = cast(Message, stored.value)
            if message.expires_at != 0 and message.expires_at <= now:
                self._retained.expire(message)
            else:
                found.append(message)
        return found


class SortedScan:
    """The retained messages that match a filter, in the order of their topics.

    So another process can continue it from `after` on, also one that has taken over from the process that began it.
    """

    def __init__(self, retained: Retained, topics: SortedIds, topic_filter: str, after: str) -> None:
        self._retained = retained
        self._topics = topics
        self._filter = topic_filter
        self.after = after  # no topic that is not greater will be found
        self.done = False
        end: int = len(topic_filter)
        for wildcard in ("+", "#"):
            position: int = topic_filter.find(wildcard)
            if 0 <= position < end:
                end = position
        self._prefix = topic_filter[:end]  # of all topics that match, but for the parent level of "#"

    def read(self, visits: int, now: int) -> list[Message]:
        """The matching messages of the next ``visits`` (at least 1) topics, without those that have expired at ``now`` (µs
        since the Unix epoch). An empty list is the end only if `done`."""
        found: list[Message] = []
        topic_filter = self._filter
        prefix = self._prefix
        if not has_wildcard(topic_filter):
            if self.after < topic_filter:
                self._add(topic_filter, now, found)
            self.after = topic_filter
            self.done = True
            return found
        parent: str = prefix[:-1] if len(prefix) + 1 == len(topic_filter) and topic_filter[-1] == "#" else ""
        if parent and self.after < parent:  # [MQTT-4.7.1-2]
            self._add(parent, now, found)
            self.after = parent
        topics = self._topics.at_least(prefix if self.after < prefix else self.after + "\0", visits)
        for topic in topics:
            if not topic.startswith(prefix):
                self.done = True
                return found
            self.after = topic
            if matches(topic_filter, topic):
                self._add(topic, now, found)
        self.done = len(topics) < visits
        return found

    def _add(self, topic: str, now: int, found: list[Message]) -> None:
        message = self._retained.get(topic)
        if message is None:
            return
        if message.expires_at != 0 and message.expires_at <= now:
            self._retained.expire(message)
        else:
            found.append(message)
