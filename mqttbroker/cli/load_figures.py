"""The figures of a load: latencies, and the numbers of messages that came, came twice or came out of order."""

from __future__ import annotations

from collections import defaultdict

_BITS = 7  # a value is known to one part in 128


class Latencies:
    """Counts of durations in buckets that are at most 0.8 % wide; memory does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        self.longest = 0  # nanoseconds
        self._buckets: defaultdict[int, int] = defaultdict(int)

    def add(self, nanoseconds: int) -> None:
        """Count a duration; a negative one counts as 0."""
        self.count += 1
        if nanoseconds > self.longest:
            self.longest = nanoseconds
        shift = nanoseconds.bit_length() - _BITS - 1
        self._buckets[nanoseconds >> shift << shift if shift > 0 else max(nanoseconds, 0)] += 1

    def percentile(self, percent: float) -> float:
        """The milliseconds that this share of the durations does not exceed; 0 if there are none."""
        wanted = self.count * percent / 100
        for value in sorted(self._buckets):
            wanted -= self._buckets[value]
            if wanted <= 0:
                return min(value * (1 + 0.5 / (1 << _BITS)), self.longest) / 1e6
        return self.longest / 1e6

    def summary(self) -> dict[str, float] | None:
        """p50, p95, p99 and the longest, in milliseconds; None if there are no durations."""
        if not self.count:
            return None
        found = {f"p{percent}": round(self.percentile(percent), 3) for percent in (50, 95, 99)}
        return {**found, "max": round(self.longest / 1e6, 3)}


class Deliveries:
    """The messages of one publisher that have come to one subscriber. Memory: a bit per message, once one was missing."""

    def __init__(self) -> None:
        self.next = 0  # all before it have come, but for those that are missing
        self.received = 0  # different messages
        self.duplicated = 0
        self.out_of_order = 0
        self._missing = bytearray()  # a bit per message

    def add(self, number: int) -> int:
        """Count message ``number`` of the publisher, 0 is the first; returns by how much it is ahead of all that came before."""
        ahead = number + 1 - self.next
        if ahead > 0:
            if ahead > 1:
                self._miss(self.next, number)
            self.next = number + 1
            self.received += 1
            return ahead
        at, bit = number >> 3, 1 << (number & 7)
        if at < len(self._missing) and self._missing[at] & bit:
            self._missing[at] ^= bit
            self.received += 1
            self.out_of_order += 1
        else:
            self.duplicated += 1
        return 0

    def _miss(self, first: int, end: int) -> None:
        self._missing.extend(bytes((end >> 3) + 1 - len(self._missing)))
        for number in range(first, end):
            self._missing[number >> 3] |= 1 << (number & 7)
