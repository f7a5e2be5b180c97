"""The broker without its histograms of latencies, to measure what these cost: ``python unsampled.py serve …``."""

from __future__ import annotations

import asyncio
import sys

from mqttbroker.admin.metrics.latency import Latency
from mqttbroker.cli.main import main


def measure_nothing(latency: Latency) -> None:
    pass


async def sample_nothing(latency: Latency, *of: object) -> None:
    await asyncio.Event().wait()


if __name__ == "__main__":
    setattr(Latency, "commit_began", measure_nothing)
    setattr(Latency, "commit_ended", measure_nothing)
    setattr(Latency, "sample", sample_nothing)
    sys.exit(main())
