"""Retained messages for operators: lists, the tree of their topics, deleting."""

from __future__ import annotations

from collections.abc import Callable

from mqttbroker.admin.control.slices import MAX_VISITS, SLICE, ControlError, Cursors, Slices, check_filter, check_limit, wake
from mqttbroker.admin.control.views import LevelPage, RetainedMessage, RetainedPage, TopicLevel
from mqttbroker.core.client.outbox import Outbound
from sessions.context import Clock
from sessions.message import Message
from sessions.retained import Retained, RetainedScan
from topic_matcher.filters import is_valid_topic

PAGE_BYTES = 1 << 20  # payloads and properties of one page; the message that exceeds them is the last of its page
BACKLOG_WAIT = 0.01  # seconds between slices while too much waits for the disk


class RetainedControl:
    """The retained messages of one broker."""

    def __init__(self, retained: Retained, clock: Clock, outbound: Outbound) -> None:
        self._retained = retained
        self._clock = clock
        self._outbound = outbound
        self._cursors: Cursors[_RetainedListing] = Cursors()
        self._level_cursors: Cursors[_LevelListing] = Cursors()

    def message(self, topic: str) -> RetainedMessage | None:
        """The retained message of a topic; None if there is none."""
        message = self._retained.get(topic) if is_valid_topic(topic) else None
        if message is None or not self._retained.is_current(message, self._clock.now):
            return None
        return _retained_message(message)

    def open(self, topic_filter: str) -> int:
        """A cursor for the retained messages that match a filter."""
        check_filter(topic_filter, may_be_shared=False)
        return self._cursors.open(_RetainedListing(self._retained, self._clock, topic_filter))

    def page(self, cursor: int, limit: int = 100) -> Slices[RetainedPage]:
        """The next ``limit`` messages of a cursor, fewer if they have more than `PAGE_BYTES`, or after `MAX_VISITS` topics.

        A topic that has a retained message from the first page to the last is in exactly one of them.
        """
        check_limit(limit)
        listing = self._cursors.take(cursor)
        found: list[RetainedMessage] = []
        room = PAGE_BYTES
        for _ in range(MAX_VISITS // SLICE):
            messages = listing.step(limit - len(found), room)
            found += map(_retained_message, messages)
            room -= sum(map(_content_bytes, messages))
            if listing.done:
                return RetainedPage(tuple(found), 0)
            if len(found) == limit or room <= 0:
                break
            yield 0.0
        return RetainedPage(tuple(found), self._cursors.open(listing))

    def open_levels(self, parent: str | None) -> int:
        """A cursor for the levels that follow ``parent`` in retained topics; None = their first levels."""
        return self._level_cursors.open(_LevelListing(self._retained, self._clock, parent))

    def levels(self, cursor: int, limit: int = 100, readable: Callable[[str], bool] | None = None) -> Slices[LevelPage]:
        """The next levels of a cursor. Levels without a topic for which ``readable`` holds are left out.

        To find one it visits all topics below a level, unless ``readable`` is None: every topic is readable.
        """
        check_limit(limit)
        listing = self._level_cursors.take(cursor)
        found: list[TopicLevel] = []
        while not listing.scan.done and len(found) < limit:
            for level in listing.step(min(SLICE, limit - len(found))):
                if readable is None or (yield from self._shows(level, readable)):
                    readable_here = readable is None or readable(level.topic)
                    found.append(level if readable_here else level._replace(message=None))
            yield 0.0
        return LevelPage(tuple(found), 0 if listing.scan.done else self._level_cursors.open(listing))

    def _shows(self, level: TopicLevel, readable: Callable[[str], bool]) -> Slices[bool]:
        """Whether there is a retained message that may be read at or below a level."""
        if level.message is not None and readable(level.topic):
            return True
        below = _RetainedListing(self._retained, self._clock, f"{level.topic}/#") if level.below else None
        while below is not None and not below.done:
            if any(readable(message.topic) for message in below.step(SLICE)):
                return True
            yield 0.0
        return False

    def clear(self, topic_filter: str, may_clear: Callable[[str], bool] = lambda topic: True) -> Slices[int]:
        """Delete the retained messages that match a filter, of topics for which ``may_clear`` holds; returns how many
        there were.

        Subscribers are not notified. The broker's own messages (``$SYS``) stay.
        """
        check_filter(topic_filter, may_be_shared=False)
        if topic_filter == "$SYS" or topic_filter.startswith("$SYS/"):
            raise ControlError("the messages of $SYS are the broker's")
        listing = _RetainedListing(self._retained, self._clock, topic_filter)
        cleared = 0
        while not listing.done:
            for message in listing.step(SLICE):
                if not may_clear(message.topic):
                    continue
                self._retained.set(Message(message.topic, b"", 0, True, b"", "", 0, 0), False, None)
                cleared += 1
            wake(self._outbound)
            yield BACKLOG_WAIT if self._outbound.backlogged else 0.0
        return cleared


class _RetainedListing:
    """The retained messages that match a filter, a slice at a time."""

    def __init__(self, retained: Retained, clock: Clock, topic_filter: str) -> None:
        self._retained = retained
        self._clock = clock
        self._scan: RetainedScan = retained.scan(topic_filter)
        self._scanned: list[Message] = []  # and not listed yet

    @property
    def done(self) -> bool:
        return self._scan.done and not self._scanned

    def step(self, limit: int, room: int = PAGE_BYTES) -> list[Message]:
        """Visit a slice; returns up to ``limit`` messages, the last of which fills ``room`` bytes."""
        now = self._clock.now
        if not self._scanned:
            self._scanned = self._scan.read(SLICE, now)
        found: list[Message] = []
        visited = 0
        while visited < min(limit, len(self._scanned)) and room > 0:
            message = self._retained.get(self._scanned[visited].topic)
            visited += 1
            if message is not None and not 0 < message.expires_at <= now:
                found.append(message)
                room -= _content_bytes(message)
        del self._scanned[:visited]
        return found


class _LevelListing:
    """The levels that follow a prefix of retained topics, a slice at a time."""

    def __init__(self, retained: Retained, clock: Clock, parent: str | None) -> None:
        self._retained = retained
        self._clock = clock
        self._parent = parent
        self.scan = retained.levels(parent)

    def step(self, visits: int) -> list[TopicLevel]:
        retained, now = self._retained, self._clock.now
        found: list[TopicLevel] = []
        for level in self.scan.read(visits):
            topic = level.name if self._parent is None else f"{self._parent}/{level.name}"
            message = None if level.own is None else retained.get(topic)
            if message is not None and not retained.is_current(message, now):
                message = None
            if message is not None or level.below:
                shown = None if message is None else _retained_message(message)
                found.append(TopicLevel(topic, level.name, level.below, shown))
        return found


def _content_bytes(message: Message) -> int:
    return len(message.payload) + len(message.properties)


def _retained_message(message: Message) -> RetainedMessage:
    return RetainedMessage(
        topic=message.topic,
        payload=message.payload,
        qos=message.qos,
        properties=message.properties,
        client_id=message.publisher,
        received_at=message.timestamp / 1_000_000,
        expires_at=message.expires_at / 1_000_000,
    )
