"""Retained messages: the last one of each topic, in memory, and in the store through the journal.

The rule kept here: what `match` returns is exactly what a new subscriber is
owed now.  A message whose expiry has passed is never returned and leaves the
store; a message marked volatile (the broker's own ``$SYS`` topics) never
reaches it.
"""

from __future__ import annotations

from typing import List, Optional, cast

from sessions.journal import Gate, Journal
from sessions.message import Message
from topic_matcher.topic_tree import TopicTree


class Retained:
    """The retained messages of one broker; ``size`` is their payloads, in bytes."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._tree = TopicTree()
        self.size = 0

    def __len__(self) -> int:
        return len(self._tree)

    def load(self, message: Message) -> None:
        """Put back a message that the store has."""
        self._tree.set(message.topic, message)
        self.size += len(message.payload)

    def get(self, topic: str) -> Optional[Message]:
        return cast(Optional[Message], self._tree.get(topic))

    def set(self, message: Message, volatile: bool, gate: Optional[Gate]) -> None:
        """Replace a topic's retained message; an empty payload removes it [MQTT-3.3.1-6].

        ``gate`` stays shut until the change is on disk.
        """
        topic = message.topic
        old = cast(Optional[Message], self._tree.get(topic))
        if old is not None:
            self.size -= len(old.payload)
        if message.payload:
            self._tree.set(topic, message)
            self.size += len(message.payload)
            if not volatile:
                self._journal.retain(topic, message)
        elif old is not None:
            self._tree.pop(topic)
            if not volatile:
                self._journal.retain(topic, None)
        else:
            return
        if gate is not None and not volatile:
            self._journal.hold(gate)

    def match(self, topic_filter: str, now: int) -> List[Message]:
        """All messages under a filter that live at `now` (µs since the Unix epoch)."""
        found: List[Message] = []
        for topic, value in self._tree.match(topic_filter):
            message = cast(Message, value)
            if message.expires_at != 0 and message.expires_at <= now:
                self._expire(topic, message)
            else:
                found.append(message)
        return found

    def _expire(self, topic: str, message: Message) -> None:
        self._tree.pop(topic)
        self.size -= len(message.payload)
        self._journal.retain(topic, None)
