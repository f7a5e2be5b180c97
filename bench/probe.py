#!/usr/bin/env python3
"""The `mqttbroker` command with a probe in the event loop, for bench/pauses.py and bench/bystanders.py.

A timer is due every millisecond. The CPU time of the loop's thread between two calls is a "hold", or a "batch" if at
least ten packets per millisecond were received: then many clients were served. Those over a millisecond and all garbage
collections ("gc0" to "gc2") are written to the file BENCH_PROBE when the broker ends, as a JSON list of
[kind, monotonic seconds, milliseconds].

The modules are those that Python imports, compiled or plain, or those of the tree BENCH_SOURCE.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if "BENCH_SOURCE" in os.environ:
    sys.path.insert(0, os.environ["BENCH_SOURCE"])
sys.path.append(str(Path(__file__).resolve().parent.parent))

from mqttbroker import build_kind, server
from mqttbroker.cli import main as cli  # noqa: E402

INTERVAL = 0.001  # seconds
SHORTEST = 1.0  # milliseconds
BATCH = 10  # packets per millisecond


class Probe:
    """Records holds, batches and collections of one broker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, broker: server.Server) -> None:
        self.loop = loop
        self.counters = broker.broker.outbound.counters
        self.packets = 0
        self.events: list[tuple[str, float, float]] = []
        self.collection_start = 0.0
        self.cpu = time.thread_time()
        gc.callbacks.append(self.collected)
        loop.call_later(INTERVAL, self.sample)

    def sample(self) -> None:
        cpu = time.thread_time()
        held = (cpu - self.cpu) * 1000
        self.cpu = cpu
        packets = self.counters.messages_received
        if held > SHORTEST:
            kind = "hold" if packets - self.packets < held * BATCH else "batch"
            self.events.append((kind, time.monotonic(), round(held, 3)))
        self.packets = packets
        self.loop.call_later(INTERVAL, self.sample)

    def collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.collection_start = time.thread_time()
        else:
            took = (time.thread_time() - self.collection_start) * 1000
            self.events.append((f"gc{info['generation']}", time.monotonic(), round(took, 3)))


async def run_probed(broker: server.Server) -> None:
    probe = Probe(asyncio.get_running_loop(), broker)
    try:
        await run(broker)
    finally:
        gc.callbacks.remove(probe.collected)
        Path(os.environ["BENCH_PROBE"]).write_text(json.dumps([build_kind(), *probe.events]), encoding="ascii")


run = server.Server.run
server.Server.run = run_probed  # type: ignore[method-assign]
sys.exit(cli.main(sys.argv[1:]))
