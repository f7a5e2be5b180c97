#!/usr/bin/env python3
"""The broker with a probe in its event loop: for bench/pauses.py and bench/bystanders.py, used like `mqttbroker`.

Rule: the probe only looks. A timer asks to be called every millisecond; what the loop's thread computed between two
calls, in CPU time and so without what other processes took, is a "hold", or a "batch" if it handled at least ten
packets for each millisecond: then many were served, and nobody was held up by another. Those over a millisecond and
every garbage collection ("gc0" to "gc2") go to the file BENCH_PROBE names when the broker ends, as a JSON list of
[kind, monotonic seconds, milliseconds].

The modules are those that Python finds, compiled or plain, or those of the tree that BENCH_SOURCE names.
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

EVERY = 0.001
LEAST = 1.0  # milliseconds
BATCH = 10  # packets in each


class Probe:
    def __init__(self, loop: asyncio.AbstractEventLoop, broker: server.Server) -> None:
        self.loop = loop
        self.counters = broker.broker.outbound.counters
        self.packets = 0
        self.events: list[tuple[str, float, float]] = []
        self.begun = 0.0
        self.used = time.thread_time()
        gc.callbacks.append(self.collected)
        loop.call_later(EVERY, self.look)

    def look(self) -> None:
        used = time.thread_time()
        held = (used - self.used) * 1000
        self.used = used
        packets = self.counters.messages_received
        if held > LEAST:
            kind = "hold" if packets - self.packets < held * BATCH else "batch"
            self.events.append((kind, time.monotonic(), round(held, 3)))
        self.packets = packets
        self.loop.call_later(EVERY, self.look)

    def collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.begun = time.thread_time()
        else:
            took = (time.thread_time() - self.begun) * 1000
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
