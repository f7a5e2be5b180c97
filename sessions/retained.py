"""Retained messages: the last one of each topic, in memory, and in the store through the journal.

The rule kept here: what a scan returns is exactly what a new subscriber is
owed now.  A message whose expiry has passed is never returned and leaves the
store; a message marked volatile (the broker's own ``$SYS`` topics) never
reaches it.
"""

from __future__ import annotations

from typing import List, Optional, cast

from sessions.journal import Gate, Journal
from sessions.message import Message
from topic_matcher.topic_tree import Scan, TopicTree


class Retained:
    """The retained messages of one broker; ``size`` is what they hold, in bytes."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._tree = TopicTree()
        self.size = 0
        self.expiring = 0  # messages that expire some time
        self._sweep: Optional[RetainedScan] = None

    def __len__(self) -> int:
        return len(self._tree)

    def load(self, message: Message) -> None:
        """Put back a message that the store has."""
        self._tree.set(message.topic, message)
        self._count(message, 1)

    def _count(self, message: Message, times: int) -> None:
        self.size += times * message.size
        if message.expires_at != 0:
            self.expiring += times

    def get(self, topic: str) -> Optional[Message]:
        return cast(Optional[Message], self._tree.get(topic))

    def set(self, message: Message, volatile: bool, gate: Optional[Gate]) -> None:
        """Replace a topic's retained message; an empty payload removes it [MQTT-3.3.1-6].

        ``gate`` stays shut until the change is on disk.
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
        """The messages under a filter, to be taken a few at a time."""
        return RetainedScan(self, self._tree.scan(topic_filter))

    def holds(self, message: Message, now: int) -> bool:
        """Whether a message found before is still its topic's, and lives at `now` (µs since the Unix epoch)."""
        return self._tree.get(message.topic) is message and (message.expires_at == 0 or message.expires_at > now)

    def expire(self, message: Message) -> None:
        """The message's time is over: forget it here and in the store."""
        if self._tree.get(message.topic) is message:
            self._tree.pop(message.topic)
            self._count(message, -1)
            self._journal.set_retained(message.topic, None)

    def sweep(self, visits: int, now: int) -> None:
        """Visit so many of the next topics, if any message expires, and forget those that have."""
        if self.expiring == 0:
            return
        scan = self._sweep
        if scan is None or scan.done:
            scan = self.scan("#")
            self._sweep = scan
        scan.take(visits, now)


class RetainedScan:
    """What a new subscription is owed, whatever changes meanwhile: each topic at most once."""

    def __init__(self, retained: Retained, scan: Scan) -> None:
        self._retained = retained
        self._scan = scan

    @property
    def done(self) -> bool:
        return self._scan.done

    @property
    def visited(self) -> int:
        """How many topics and levels the last ``take`` came by."""
        return self._scan.visited

    def take(self, visits: int, now: int) -> List[Message]:
        """Those of about the next `visits` topics and levels (at least 1) that match and live at `now` (µs since the
        Unix epoch); an empty list is the end only when `done`."""
        found: List[Message] = []
        for stored in self._scan.take_within(visits, visits):
            message = cast(Message, stored.value)
            if message.expires_at != 0 and message.expires_at <= now:
                self._retained.expire(message)
            else:
                found.append(message)
        return found
