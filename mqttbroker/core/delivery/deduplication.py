"""Publisher deduplication: streams store a message with the user properties ``producer-id`` and ``seq`` once.

The decision and the number are in the batch that stores the message. So after a failed commit the message is new again,
and a repeat that arrives before the commit is acknowledged after it.
"""

from __future__ import annotations

from typing import Final

from mqttbroker.codec.properties import user_property
from mqttbroker.core.routing.route import Route, StreamRule, StreamSink
from sessions.counters import Counters
from sessions.journal import Gate, Journal
from sessions.message import Message
from sessions.producers import MAX_NAME, MAX_NUMBER, Producers
from sessions.rows import ProducerRow

_PRODUCER: Final = b"producer-id"
_NUMBER: Final = b"seq"
_MAX_DIGITS: Final = 19


class Deduplication:
    """Decides which streams of a route store a message."""

    def __init__(self, producers: Producers, journal: Journal, streams: list[StreamRule], counters: Counters) -> None:
        self.producers = producers
        self.journal = journal
        self.counters = counters
        self._limits: dict[str, int] = {}
        for rule in streams:
            self.set_limit(rule.name, rule.producers)

    def set_limit(self, stream: str, limit: int) -> None:
        """The most producers of a stream whose repeats are recognised; 0 = none. `forget_excess` comes first."""
        if limit:
            self._limits[stream] = limit
        else:
            self._limits.pop(stream, None)

    def forget_excess(self, stream: str, limit: int, most: int) -> bool:
        """Forget producers of a stream beyond a lower limit, at most so many; whether that was all."""
        kept: int = max(limit, self.producers.count(stream) - most)
        self._remove_excess(stream, kept)
        return kept == limit

    def load(self, row: ProducerRow) -> None:
        """Restore a producer; rows come in the order of their last use.

        Those of a stream without deduplication are deleted, because they may store more messages meanwhile.
        """
        if row.stream in self._limits:
            self.producers.load(row)
            self._remove_excess(row.stream, self._limits[row.stream])
        else:
            self.journal.delete_producer((row.stream, row.user_name, row.producer_id), None)

    def streams_for(self, route: Route, message: Message, username: str | None, gate: Gate | None) -> list[StreamSink]:
        """The streams of a route that are to store a message; none if it is a repeat for every stream that recognises
        repeats. ``gate`` then waits until the message is on disk."""
        name = user_property(message.properties, _PRODUCER)
        if not name:
            return route.streams
        digits = user_property(message.properties, _NUMBER)
        user = username or ""
        number = int(digits) if digits.isdigit() and len(digits) <= _MAX_DIGITS else -1
        if len(name) + len(user) > MAX_NAME or not 0 <= number <= MAX_NUMBER:
            self.counters.stream_numbers_invalid += 1
            return route.streams
        key = (user, name.decode("utf-8"))
        without: list[StreamSink] = []
        storing: list[StreamSink] = []
        for sink in route.streams:
            if sink.rule.producers == 0:
                without.append(sink)
                continue
            producer = self.producers.find(sink.rule.name, key)
            if producer is not None and producer.has_stored(number):
                self.counters.stream_repeats += 1
                if gate is not None:
                    self.journal.wait_for_producer(gate, producer)
                continue
            if producer is None:
                producer = self.producers.create(sink.rule.name, key)
            elif number > producer.last + 1:
                self.counters.stream_gaps += 1
            producer.add(number)
            if self.journal.add_number(producer, number):
                self.producers.use(producer, message.timestamp)
                self._remove_excess(sink.rule.name, sink.rule.producers)
            storing.append(sink)
        return storing + without if storing else storing

    def _remove_excess(self, stream: str, limit: int) -> None:
        for producer in self.producers.remove_excess(stream, limit):
            user, producer_id = producer.key
            self.journal.delete_producer((stream, user, producer_id), producer)
