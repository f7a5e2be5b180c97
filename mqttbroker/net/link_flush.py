"""The flush of the links to connection workers, at the end of each event-loop iteration in which there was something to write."""

from __future__ import annotations

import time
from typing import Any

from mqttbroker.core.client.outbox import Outbound


class LinkFlush:
    """Flushes links, and tells the time. A process with clients has a `FlushScheduler`, which is one."""

    def __init__(self, outbound: Outbound, loop: Any) -> None:
        self.outbound = outbound
        self.loop = loop
        self._links: list[Any] = []  # `Link`s that have something to write
        self._scheduled = False

    def schedule(self) -> None:
        """Run `flush` at the end of this event-loop iteration."""
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self.flush)

    def update_clock(self) -> float:
        """Set the broker's clock; returns monotonic seconds."""
        clock = self.outbound.clock
        clock.now = time.time_ns() // 1000
        now: float = self.loop.time()
        clock.monotonic = now
        return now

    def flush(self) -> None:
        """Write what the links have."""
        self._scheduled = False
        self._flush_links()

    def flush_link(self, link: Any) -> None:
        """Flush a link at the end of this event-loop iteration."""
        self._links.append(link)
        self.schedule()

    def _flush_links(self) -> None:
        if self._links:  # a broker without workers has none
            links, self._links = self._links, []
            for link in links:
                link.flush()
