#!/usr/bin/env python3
"""How long the event loop and the garbage collector delay clients, with 10,000 of them at half load.

    python bench/pauses.py [--clients 10000] [--rate 10000] [--seconds 60] [--qos 0]

The pauses are CPU time of the broker's loop, as bench/probe.py records it, so that other load on the machine does not
count. The output also has the broker's share of a core and the clients' latencies. ``--rate`` is the total of messages
per second; half load is a share of about a half. The broker is the one that Python imports, compiled or plain, as the
output says, or that in the tree BENCH_SOURCE.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import runner
from py_load import framed, text

HERE = Path(__file__).resolve().parent
BOUNDS = (1, 2, 5, 10, 20, 50, 100, 1e9)  # milliseconds


class Probed:
    """A broker with the probe, in ``directory``; ``settings`` are environment variables."""

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        self.events = directory / "events.json"
        self.build = ""  # "compiled" or "plain", after `end`
        self.port = runner.free_port()
        command = [sys.executable, "-P", str(HERE / "probe.py"), "serve", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--http-port", "off", "--data-dir", str(directory / "data"), "--log-level", "error"]
        environment = {**runner.os.environ, "BENCH_PROBE": str(self.events), **settings}
        self.process = subprocess.Popen(command, env=environment, cwd=directory)
        deadline = time.monotonic() + 30
        while True:
            try:
                with runner.socket.create_connection(("127.0.0.1", self.port), 10) as line:
                    line.sendall(framed(0x10, text("MQTT") + b"\x04\x02\0\0" + text("first")))
                    if line.recv(4):
                        return
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise SystemExit("the broker does not start") from None
            time.sleep(0.02)

    def cpu(self) -> float:
        """CPU seconds of the broker so far, with its connection workers."""
        return sum(map(runner.cpu_ns, runner.descendants(self.process.pid))) / 1e9

    def end(self) -> list[tuple[str, float, float]]:
        """Stop the broker; returns the probe's events as (kind, monotonic seconds, milliseconds)."""
        self.process.terminate()
        self.process.wait(60)
        self.build, *events = json.loads(self.events.read_text(encoding="ascii"))
        for path in self.events.parent.glob(f"{self.events.name}.*"):  # of its connection workers
            events += json.loads(path.read_text(encoding="ascii"))[1:]
        return [(kind, when, took) for kind, when, took in events]


def histogram(events: list[tuple[str, float, float]], start: float, end: float) -> dict[str, list[float]]:
    """The durations in milliseconds of the events between ``start`` and ``end``, sorted, by kind."""
    found: dict[str, list[float]] = {}
    for kind, when, took in events:
        if start <= when <= end:
            found.setdefault(kind, []).append(took)
    return {kind: sorted(took) for kind, took in sorted(found.items())}


def show(what: str, found: dict[str, list[float]]) -> None:
    print(f"\n{what}\n\n| milliseconds | " + " | ".join(found) + " |")
    print("| --- | " + " | ".join("---:" for _ in found) + " |")
    low = 0.0
    for bound in BOUNDS:
        counts = [sum(low <= took < bound for took in row) for row in found.values()]
        if any(counts):
            print(f"| {low:g} to {bound:g} | " + " | ".join(map(str, counts)) + " |")
        low = bound
    print("| longest | " + " | ".join(f"{row[-1]:.1f}" for row in found.values()) + " |", flush=True)


def load(program: list[str], broker: Probed, arguments: list[str]) -> dict[str, object]:
    done = subprocess.run([*program, "--port", str(broker.port), *arguments], capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(f"mqtt_load: {done.stderr.strip()[-300:]}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def main(probed: Callable[[Path, dict[str, str]], Probed] = Probed) -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--clients", type=int, default=10_000)
    options.add_argument("--rate", type=float, default=10_000)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--qos", default="0")
    given = options.parse_args()
    pairs = given.clients // 2
    program = runner.build_generator().command
    with tempfile.TemporaryDirectory() as name:
        broker = probed(Path(name), {})
        start, used = time.monotonic(), broker.cpu()
        arguments = ["--scenario", "p2p", "--publishers", str(pairs), "--subscribers", str(pairs), "--qos", given.qos]
        found = load(program, broker, [*arguments, "--rate", str(given.rate / pairs), "--duration", str(given.seconds)])
        end, used = time.monotonic(), broker.cpu() - used
        events = broker.end()
    print(json.dumps({key: found.get(key) for key in ("ok", "delivered_per_s", "latency_us")}))
    print(f"the broker, {broker.build}, used {used / (end - start):.0%} of a core")
    show(f"{given.clients} clients connect", histogram(events, start, end - given.seconds))
    show(f"{given.seconds:g} s of {given.rate:g} messages per second", histogram(events, end - given.seconds, end))


if __name__ == "__main__":
    main()
