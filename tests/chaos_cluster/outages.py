"""How long each shard acknowledged nothing, by the fault that was the cause."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

LATE = 1.0  # seconds: a gap that is older than this when a fault begins is not that fault's


class Gap(NamedTuple):
    """The time between two acknowledgements of a shard, in monotonic seconds."""

    begin: float
    end: float


class Outages:
    """The acknowledgements of all shards, and the faults, each by its time."""

    def __init__(self, shards: int, now: float) -> None:
        self._last = [now] * shards
        self._gaps: list[Gap] = []
        self._faults: list[tuple[float, str]] = []

    def acknowledged(self, shard: int, now: float) -> None:
        self._gaps.append(Gap(self._last[shard], now))
        self._last[shard] = now

    def fault(self, kind: str, now: float) -> None:
        """A fault of this kind begins; later than those before it."""
        self._faults.append((now, kind))

    def all_acknowledged_since(self, begin: float) -> bool:
        return min(self._last) >= begin

    def longest(self) -> dict[str, list[float]]:
        """By the kind, for each fault the seconds of the longest gap that it caused, sorted.

        A gap counts to its end, also if other faults have begun meanwhile. It counts for one fault: the first one that
        began within it, but for the one before that if the gap was `LATE` by then.
        """
        begins = [begin for begin, _ in self._faults]
        longest = [0.0] * len(begins)
        for gap in self._gaps:
            index = bisect_left(begins, gap.begin)
            within = index < len(begins) and begins[index] < gap.end
            if index and not (within and begins[index] - gap.begin <= LATE):
                index -= 1
            elif not within:
                continue  # before the first fault
            longest[index] = max(longest[index], gap.end - gap.begin)
        found: dict[str, list[float]] = {}
        for (_, kind), seconds in zip(self._faults, longest):
            found.setdefault(kind, []).append(seconds)
        return {kind: sorted(seconds) for kind, seconds in found.items()}

    def table(self) -> str:
        """A line for each kind of fault: its number, and the median and the maximum of `longest`."""
        lines = [f"{'a shard acknowledges nothing, seconds':44}{'faults':>8}{'median':>8}{'maximum':>9}"]
        lines += [
            f"{kind:44}{len(seconds):>8}{seconds[len(seconds) // 2]:>8.1f}{seconds[-1]:>9.1f}" for kind, seconds in self.longest().items()
        ]
        return "\n".join(lines)
