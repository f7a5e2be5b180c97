"""How far the next micro-batch of a stream goes.

The rule kept here: a batch is held back only while it is too small and not yet
late; it never goes further than its limit, and never beyond where the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Optional

from bridge_spark.source.offsets import Offsets, limit_rows


class Admission:
    """`minOffsetsPerTrigger` and `maxTriggerDelay` of one query.

    The first batch is never held back.  ``clock`` gives seconds.
    """

    def __init__(
        self, min_rows: Optional[int], max_delay_ms: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._min_rows = min_rows or 0
        self._max_delay_s = max_delay_ms / 1000
        self._clock = clock
        self._last: Optional[float] = None

    def admit(self, start: Offsets, end: Offsets, max_rows: Optional[int], complete: bool) -> Offsets:
        """The end of the next batch between ``start`` and ``end``.

        ``max_rows`` limits it, and unless all there is must be read now
        (``complete``) it is ``start`` while there are too few rows.
        """
        waiting = sum(max(0, offset - start.get(partition, 0)) for partition, offset in end.items())
        if waiting and not complete and self._min_rows:
            now = self._clock()
            late = self._last is None or now - self._last >= self._max_delay_s
            if waiting < self._min_rows and not late:
                return dict(start)
            self._last = now
        return dict(end) if max_rows is None else limit_rows(start, end, max_rows)
