"""How long a test waits for what must come."""

from __future__ import annotations

from collections.abc import Iterator

# Seconds. A broker without a defect may need many of them: one fsync takes seconds on a disk that other programs write to.
PATIENCE = 30.0


def growing() -> Iterator[float]:
    """Seconds, each time four times as many: for what must begin before its time is over, until it does."""
    return (4.0**power for power in range(4))
