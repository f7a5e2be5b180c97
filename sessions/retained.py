"""Retained messages (section 3.3.1.3): in memory, and in the store through the journal.

A scan never returns an expired message, and deletes it. Volatile messages (the broker's own ``$SYS`` topics) are not
stored.
"""

from __future__ import annotations

from typing import List, Optional, cast

from sessions.journal import Gate, Journal
from sessions.message import Message
from sessions.rows import RetainedRow
from topic_matcher.topic_tree import LevelScan, Scan, TopicTree


def message_from_row(row: RetainedRow) -> Message:
    return Message(
        row.topic, row.payload, row.qos, True, row.properties, row.publisher, row.timestamp, row.expires_at
    )


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
        self._sweep: Optional[RetainedScan] = None

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def branches(self) -> int:
        """Levels at which topics differ, each an object of its own."""
        return self._tree.branches

    def load(self, message: Message) -> None:
        """Add a message that was read from the store."""
        self._tree.set(message.topic, message)
        self._count(message, 1)

    def _count(self, message: Message, times: int) -> None:
        self.size += times * message.size
        self.payload_bytes += times * len(message.payload)
        if message.expires_at != 0:
            self.expiring += times

    def get(self, topic: str) -> Optional[Message]:
        return cast(Optional[Message], self._tree.get(topic))

    def set(self, message: Message, volatile: bool, gate: Optional[Gate]) -> None:
        """Replace a topic's retained message; an empty payload removes it [MQTT-3.3.1-6].

        ``gate`` stays closed until the change is on disk.
        """
        topic = message.topic
        old = cast(Optional[Message], self._tree.get(topic))
        if old is not None:
            self._count(old, -1)
        if message.payload:
            self._tree.set(topic, message)
            self._count(message, 1)
            if not volatile:
                self._journal.set_retained(topic, message)
        elif old is not None:
            self._tree.pop(topic)
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

    def levels(self, prefix: Optional[str]) -> LevelScan:
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

    def read(self, visits: int, now: int) -> List[Message]:
        """The matching messages of about the next ``visits`` (at least 1) topics and levels.

        Messages that have expired at ``now`` (µs since the Unix epoch) are left out. An empty list is the end only if
        `done`.
        """
        found: List[Message] = []
        for stored in self._scan.read_within(visits, visits):
            message = cast(Message, stored.value)
            if message.expires_at != 0 and message.expires_at <= now:
                self._retained.expire(message)
            else:
                found.append(message)
        return found
