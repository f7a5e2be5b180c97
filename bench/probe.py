#!/usr/bin/env python3
"""The `mqttbroker` command with a probe in the event loop, for bench/pauses.py and bench/bystanders.py.

A timer is due every millisecond. The CPU time of the loop's thread between two calls is a "hold", or a "batch" if at
least ten packets per millisecond were received: then many clients were served. Holds and batches over a millisecond and all garbage
collections ("gc0" to "gc2") are written to the file BENCH_PROBE when the broker ends, as a JSON list of
[kind, monotonic seconds, milliseconds]. Connection workers have the same probe, with "worker" before each kind and their
numbers behind the name of the file; it knows no packets, so all are holds there.

The modules are those that Python imports, compiled or plain, or those of the tree BENCH_SOURCE.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "BENCH_SOURCE" in os.environ:
    sys.path.insert(0, os.environ["BENCH_SOURCE"])
sys.path.append(str(Path(__file__).resolve().parent.parent))

from mqttbroker import build_kind
from mqttbroker.cli import main as cli  # noqa: E402
from mqttbroker.net import worker_pool  # noqa: E402
from mqttbroker.server import server
from mqttbroker.worker import process as worker  # noqa: E402

INTERVAL = 0.001  # seconds
SHORTEST = 1.0  # milliseconds
BATCH = 10  # packets per millisecond


class Probe:
    """Records holds, batches and collections of one process; ``received`` returns how many packets it has received."""

    def __init__(self, prefix: str, received: Callable[[], int]) -> None:
        self.loop = asyncio.get_running_loop()
        self.prefix = prefix
        self.received = received
        self.packets = 0
        self.events: list[tuple[str, float, float]] = []
        self.collection_start = 0.0
        self.cpu = time.thread_time()
        gc.callbacks.append(self.collected)
        self.loop.call_later(INTERVAL, self.sample)

    def sample(self) -> None:
        cpu = time.thread_time()
        held = (cpu - self.cpu) * 1000
        self.cpu = cpu
        packets = self.received()
        if held > SHORTEST:
            kind = "hold" if packets - self.packets < held * BATCH else "batch"
            self.events.append((self.prefix + kind, time.monotonic(), round(held, 3)))
        self.packets = packets
        self.loop.call_later(INTERVAL, self.sample)

    def collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.collection_start = time.thread_time()
        else:
            took = (time.thread_time() - self.collection_start) * 1000
            self.events.append((f"{self.prefix}gc{info['generation']}", time.monotonic(), round(took, 3)))

    def end(self, path: str) -> None:
        gc.callbacks.remove(self.collected)
        Path(path).write_text(json.dumps([build_kind(), *self.events]), encoding="ascii")


async def run_probed(broker: server.Server) -> None:
    counters = broker.broker.outbound.counters
    probe = Probe("", lambda: counters.messages_received)
    try:
        await run(broker)
    finally:
        probe.end(os.environ["BENCH_PROBE"])


async def run_worker_probed(one: worker.Worker, link: socket.socket) -> None:
    probe = Probe("worker ", lambda: 0)
    try:
        await run_worker(one, link)
    finally:
        probe.end(f"{os.environ['BENCH_PROBE']}.{sys.argv[2]}")


run, run_worker = server.Server.run, worker.Worker.run
server.Server.run = run_probed  # type: ignore[method-assign]
worker.Worker.run = run_worker_probed  # type: ignore[method-assign]
worker_pool.COMMAND = [sys.executable, "-P", __file__, "worker"]
sys.exit(worker.main(sys.argv[2:]) if sys.argv[1] == "worker" else cli.main(sys.argv[1:]))
