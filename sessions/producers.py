"""Producers: which numbered messages each publisher has stored in a stream, so that a repeat is recognised.

A producer numbers its messages 0, 1, 2 …. For each one the broker knows the greatest number, and which of those before
it are missing within a window; lower numbers count as stored. A number that comes late, because its commit failed or
its packet was refused, is in the window, as long as the window is larger than what the producer has in flight.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from sessions.rows import ProducerRow

ProducerKey = tuple[str, str]  # user name and producer id

MAX_NUMBER: Final = (1 << 63) - 1
# Characters of user name and producer id together.
MAX_NAME: Final = 512


class Producer:
    """The numbers that one producer has stored in one stream: all up to ``last`` but those in ``missing``.

    Bit i of ``missing`` stands for ``last - i``. ``last`` is -1 before the first message. ``used`` is when the last
    message was received, in µs since the Unix epoch.
    """

    def __init__(self, owner: Producers, stream: str, key: ProducerKey) -> None:
        self.stream = stream
        self.key = key
        self.last = -1
        self.missing = 0
        self.used = 0
        self._owner = owner

    @property
    def size(self) -> int:
        """Bytes of its names and missing numbers."""
        user, producer_id = self.key
        return len(user) + len(producer_id) + self.missing.bit_length() // 8

    def has_stored(self, number: int) -> bool:
        behind = self.last - number
        return behind >= 0 and (behind >= self._owner.window or (self.missing >> behind) & 1 == 0)

    def add(self, number: int) -> None:
        """A message with this number, which is not stored, is in the batch that gathers."""
        step = number - self.last
        if step <= 0:
            self.missing ^= 1 << -step
            return
        self.last = number
        if step > 1 or self.missing:
            window = self._owner.window
            if step >= window:
                self.missing = (1 << window) - 2
            else:
                self.missing = (self.missing << step | ((1 << step) - 2)) & ((1 << window) - 1)

    def remove(self, numbers: list[int]) -> None:
        """The commit of these numbers failed."""
        for number in numbers:
            behind = self.last - number
            if behind < self._owner.window:
                self.missing |= 1 << behind

    def row(self) -> ProducerRow:
        user, producer_id = self.key
        missing = self.missing.to_bytes((self.missing.bit_length() + 7) // 8, "little")
        return ProducerRow(self.stream, user, producer_id, self.last, missing, self.used)


class _StreamProducers:
    """The producers of one stream: by user, each user's in the order of their last use."""

    def __init__(self) -> None:
        self.count = 0
        self._users: dict[str, OrderedDict[str, Producer]] = {}
        # The users with so many producers, in the order of their last use.
        self._users_by_count: dict[int, OrderedDict[str, None]] = {}
        self._most = 0

    def find(self, key: ProducerKey) -> Producer | None:
        producers = self._users.get(key[0])
        return None if producers is None else producers.get(key[1])

    def add(self, producer: Producer) -> None:
        user, producer_id = producer.key
        producers = self._users.get(user)
        if producers is None:
            producers = OrderedDict()
            self._users[user] = producers
        producers[producer_id] = producer
        self.count += 1
        self._set_count(user, len(producers) - 1, len(producers))

    def use(self, producer: Producer) -> None:
        user, producer_id = producer.key
        producers = self._users[user]
        producers.move_to_end(producer_id)
        self._users_by_count[len(producers)].move_to_end(user)

    def remove_one(self) -> Producer:
        """Remove the producer that was not used for longest of the user with the most producers."""
        user = next(iter(self._users_by_count[self._most]))
        producers = self._users[user]
        producer = producers.popitem(last=False)[1]
        self.count -= 1
        self._set_count(user, len(producers) + 1, len(producers))
        if not producers:
            del self._users[user]
        return producer

    def _set_count(self, user: str, before: int, after: int) -> None:
        if before > 0:
            users = self._users_by_count[before]
            del users[user]
            if not users:
                del self._users_by_count[before]
        if after > 0:
            users_after = self._users_by_count.get(after)
            if users_after is None:
                users_after = OrderedDict()
                self._users_by_count[after] = users_after
            users_after[user] = None
        if after > self._most or self._most not in self._users_by_count:
            self._most = after


class Producers:
    """The producers of each stream, at most its limit.

    A further one replaces one of the user with the most producers, so that no user can have those of others forgotten.
    ``window`` is in numbers.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._streams: dict[str, _StreamProducers] = {}

    def __len__(self) -> int:
        return sum([stream.count for stream in self._streams.values()])

    def count(self, stream: str) -> int:
        """The number of producers of a stream."""
        producers = self._streams.get(stream)
        return 0 if producers is None else producers.count

    def find(self, stream: str, key: ProducerKey) -> Producer | None:
        producers = self._streams.get(stream)
        return None if producers is None else producers.find(key)

    def create(self, stream: str, key: ProducerKey) -> Producer:
        producers = self._streams.get(stream)
        if producers is None:
            producers = _StreamProducers()
            self._streams[stream] = producers
        producer = Producer(self, stream, key)
        producers.add(producer)
        return producer

    def use(self, producer: Producer, now: int) -> None:
        """Record that a producer is in use; ``now`` is in µs since the Unix epoch."""
        producer.used = now
        self._streams[producer.stream].use(producer)

    def remove_excess(self, stream: str, limit: int) -> list[Producer]:
        """Remove the producers beyond the limit of a stream."""
        removed: list[Producer] = []
        producers = self._streams.get(stream)
        while producers is not None and producers.count > limit:
            removed.append(producers.remove_one())
        return removed

    def load(self, row: ProducerRow) -> Producer:
        """Restore a producer; rows come in the order of their last use."""
        producer = self.create(row.stream, (row.user_name, row.producer_id))
        producer.last = row.last
        producer.missing = int.from_bytes(row.missing, "little")
        producer.used = row.used
        return producer
