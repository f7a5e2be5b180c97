"""Producers: which numbered messages each publisher has stored in a stream, so that a repeat is recognised.

A producer numbers its messages 0, 1, 2 …. For each one the broker knows the greatest number, and which of those before
it are missing within a window; lower numbers count as stored. A number that comes late, because its commit failed or
its packet was refused, is in the window, as long as the window is larger than what the producer has in flight.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Dict, Final, List, Optional, Tuple

from sessions.rows import ProducerRow

ProducerKey = Tuple[str, str]  # user name and producer id

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
        """Bytes of its names and missing numbers, at most."""
        user, producer_id = self.key
        return len(user) + len(producer_id) + self._owner.window // 8

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

    def remove(self, numbers: List[int]) -> None:
        """The commit of these numbers failed."""
        for number in numbers:
            behind = self.last - number
            if behind < self._owner.window:
                self.missing |= 1 << behind

    def row(self) -> ProducerRow:
        user, producer_id = self.key
        missing = self.missing.to_bytes((self.missing.bit_length() + 7) // 8, "little")
        return ProducerRow(self.stream, user, producer_id, self.last, missing, self.used)


class Producers:
    """The producers of each stream, at most its limit; further ones replace those that were not used for longest.

    ``window`` is in numbers.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._streams: Dict[str, OrderedDict[ProducerKey, Producer]] = {}

    def __len__(self) -> int:
        return sum([len(producers) for producers in self._streams.values()])

    def find(self, stream: str, key: ProducerKey) -> Optional[Producer]:
        producers = self._streams.get(stream)
        return None if producers is None else producers.get(key)

    def create(self, stream: str, key: ProducerKey) -> Producer:
        producers = self._streams.get(stream)
        if producers is None:
            producers = OrderedDict()
            self._streams[stream] = producers
        producer = Producer(self, stream, key)
        producers[key] = producer
        return producer

    def use(self, producer: Producer, now: int) -> None:
        """Record that a producer is in use; ``now`` is in µs since the Unix epoch."""
        producer.used = now
        self._streams[producer.stream].move_to_end(producer.key)

    def remove_oldest(self, stream: str, limit: int) -> List[Producer]:
        """Remove the producers beyond the limit of a stream."""
        removed: List[Producer] = []
        producers = self._streams[stream]
        while len(producers) > limit:
            removed.append(producers.popitem(last=False)[1])
        return removed

    def load(self, row: ProducerRow) -> Producer:
        """Restore a producer; rows come in the order of their last use."""
        producer = self.create(row.stream, (row.user_name, row.producer_id))
        producer.last = row.last
        producer.missing = int.from_bytes(row.missing, "little")
        producer.used = row.used
        return producer
