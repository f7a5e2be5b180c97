#!/usr/bin/env python3
"""Instructions in user mode that a broker takes for each delivered message, by perf: they vary less than times do.

    python bench/instructions.py [--rounds 3] [--seconds 3] [--load p2p-q0] NAME=COMMAND ...

COMMAND is called as ``COMMAND serve …``. The brokers take turns; the table has the median of the rounds, and its ratio to
that of the first broker. Each load runs at full speed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import runner
from scenarios import PAIRS

LOADS = {
    "p2p-q0": f"{PAIRS} --qos 0",
    "p2p-q1": f"{PAIRS} --qos 1",
    "fanout-q0": "--scenario fanout --publishers 1 --subscribers 100 --qos 0",
    "fanout-q1": "--scenario fanout --publishers 1 --subscribers 100 --qos 1",
    "durable-q1": f"{PAIRS} --qos 1 --clean 0",
}


def wait_until_it_listens(port: int) -> None:
    deadline = time.monotonic() + runner.START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.05)
    raise SystemExit("the broker does not listen")


def measure(command: str, generator: runner.Generator, load: str, seconds: float) -> float:
    """Instructions per delivered message of one run."""
    with tempfile.TemporaryDirectory() as directory:
        port = runner.free_port()
        (Path(directory) / "broker.toml").touch()
        arguments = ["--config", f"{directory}/broker.toml", "--data-dir", f"{directory}/data", "--host", "127.0.0.1"]
        arguments += ["--port", str(port), "--http-port", "off", "--log-level", "error"]
        broker = subprocess.Popen([*shlex.split(command), "serve", *arguments], cwd=directory)
        try:
            wait_until_it_listens(port)
            perf = subprocess.Popen(
                ["perf", "stat", "-x,", "-e", "instructions:u", "-p", str(broker.pid)], stderr=subprocess.PIPE, text=True
            )
            run = subprocess.run(
                [*generator.command, "--port", str(port), *LOADS[load].split(), "--duration", str(seconds)],
                capture_output=True, text=True,
            )  # fmt: skip
            perf.send_signal(signal.SIGINT)
            assert perf.stderr is not None
            counted = next(line for line in perf.stderr if "instructions" in line)
            perf.wait()
            result = json.loads(run.stdout)
            if not result["ok"]:
                raise SystemExit(f"{load}: {run.stdout}")
            return float(counted.split(",")[0]) / float(result["delivered"])
        finally:
            broker.terminate()
            broker.wait(30)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--load", action="append", choices=LOADS, help="repeat it for several; else all")
    options.add_argument("brokers", nargs="+", metavar="NAME=COMMAND")
    chosen = options.parse_args()
    brokers = dict(each.split("=", 1) for each in chosen.brokers)
    generator = runner.build_generator()
    print(f"| instructions per message | {' | '.join(brokers)} |")
    print(f"|---|{'---:|' * len(brokers)}")
    for load in chosen.load or LOADS:
        found: dict[str, list[float]] = {name: [] for name in brokers}
        for _ in range(chosen.rounds):
            for name, command in brokers.items():
                found[name].append(measure(command, generator, load, chosen.seconds))
        medians = [statistics.median(figures) for figures in found.values()]
        cells = [f"{each:,.0f} ({each / medians[0]:.3f})" for each in medians]
        print(f"| {load} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
