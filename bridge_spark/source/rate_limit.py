"""Limits of a micro-batch: `maxOffsetsPerTrigger`, `minOffsetsPerTrigger` and `maxTriggerDelay`."""

from __future__ import annotations

import time
from collections.abc import Callable

from bridge_spark.source.offsets import Offsets, limit_rows


class RateLimit:
    """`minOffsetsPerTrigger` (``min_rows``) and `maxTriggerDelay` of one query.

    The first batch is never delayed.  ``clock`` returns seconds.
    """

    def __init__(self, min_rows: int | None, max_delay_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_rows = min_rows or 0
        self._max_delay_s = max_delay_ms / 1000
        self._clock = clock
        self._last_batch: float | None = None

    def batch_end(self, start: Offsets, end: Offsets, max_rows: int | None, read_all: bool) -> Offsets:
        """The end of the next batch, which begins at ``start``; ``end`` is the last offset that may be read.

        Returns ``start`` while there are fewer than ``min_rows`` rows and the delay has not passed, unless ``read_all``
        is set.  The batch has at most ``max_rows`` rows.
        """
        rows = sum(max(0, offset - start.get(partition, 0)) for partition, offset in end.items())
        if rows and not read_all and self._min_rows:
            now = self._clock()
            overdue = self._last_batch is None or now - self._last_batch >= self._max_delay_s
            if rows < self._min_rows and not overdue:
                return dict(start)
            self._last_batch = now
        return dict(end) if max_rows is None else limit_rows(start, end, max_rows)
