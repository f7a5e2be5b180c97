"""Long work, cut into parts: a bounded amount of it is done in each iteration of the event loop.

Work is measured in units of about 0.7 µs, as `Router.work` is.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from mqttbroker.core.client.outbox import Outbound

TURN_WORK: Final = 1400  # of all long work together in one iteration
PART_WORK: Final = 700  # of one piece of long work before another one has its turn


@mypyc_attr(allow_interpreted_subclasses=True)
class LongWork:
    """Work that takes many iterations."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is left to do; then `Turns` forgets the work."""

    @abstractmethod
    def step(self, budget: int) -> int:
        """Do a part that costs about ``budget``; returns its cost, 0 if the work waits for something else."""


class Turns:
    """The unfinished long work of one broker, each piece in turn."""

    def __init__(self, outbound: Outbound) -> None:
        self._outbound = outbound
        self.iteration = 0  # number of calls of `step`
        self._works: dict[LongWork, bool] = {}  # the next one first

    def add(self, work: LongWork) -> None:
        """Do this work from now on, until it is done."""
        if work not in self._works:
            self._works[work] = True
            self.wake()

    def wake(self) -> None:
        """Have `step` called in this iteration of the event loop."""
        if self._outbound.on_flush_needed is not None:
            self._outbound.on_flush_needed()

    def step(self) -> bool:
        """Do the work of one iteration; true if there is more that can be done at once."""
        self.iteration += 1
        if not self._works:
            return False
        left: int = TURN_WORK
        waiting: int = 0  # works in a row that could do nothing
        while left > 0 and waiting < len(self._works):
            work = next(iter(self._works))
            del self._works[work]
            cost: int = 0
            if not work.done:
                cost = work.step(min(left, PART_WORK))
            left -= max(1, cost)
            if cost > 0:
                waiting = 0
            if not work.done:
                self._works[work] = True
                if cost == 0:
                    waiting += 1
        return waiting < len(self._works)
