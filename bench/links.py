#!/usr/bin/env python3
"""The CPU time of the core behind links: link_load speaks for the connection workers, so that the core is measured alone.

    python bench/links.py [--rounds 3] [--seconds 1] [--worker-us 5] [NAME ...]

Prints a line of JSON per run; `make bench SCENARIOS=workers` makes a table of them. With two CPUs or more the core is
tied to the first and the load to the second. The broker is the one that Python imports, compiled or plain, or that in the
tree BENCH_SOURCE.

direct-qQ    1000 pairs on the broker's own sockets, one message at a time: what a message costs that comes alone
link-qQ-N    the same pairs behind one link, N messages per read
capacity-N   N links, each written to as a worker does that is busy for 0.9 of its time with 1000/N pairs
link-idle    memory of the core for each of 10,000 idle clients, and CPU time for their CONNECTs
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import runner
from py_load import framed, text
from scenarios import BATCHES, WORKER_COUNTS

HERE = Path(__file__).resolve().parent
PAIRS = 1000
SIZE = 64  # bytes of payload
TURN_US = 10.0  # of a worker's CPU time per iteration of its loop, beside that per message
BUSY = 0.9  # of a worker's time
RUN_SECONDS = 90.0

Run = dict[str, Any]


def pinned(cpu: str) -> list[str]:
    """The beginning of a command that is to run on one CPU."""
    return ["taskset", "-c", cpu] if (os.cpu_count() or 1) > 1 and shutil.which("taskset") else []


@contextmanager
def broker(directory: Path, workers: int, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A broker whose connection workers, if any, are link_load: its process and port."""
    port = runner.free_port()
    command = [*pinned("0"), sys.executable, "-P", str(HERE / "linked_broker.py"), "serve", "--workers", str(workers)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", "off", "--log-level", "error"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(directory / "data")], cwd=directory, env={**os.environ, **environment},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait(30)


# --- on the broker's sockets --------------------------------------------------------------------------------------------


def connected(port: int, name: str) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), 10)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(framed(0x10, text("MQTT") + b"\x04\x02\0\0" + text(name)))
    line.recv(4, socket.MSG_WAITALL)
    return line


def direct(qos: int, seconds: float, pairs: int) -> Run:
    """One message at a time, by each publisher in turn."""
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {1})
    with (
        tempfile.TemporaryDirectory() as name,
        broker(Path(name), 0, {"BENCH_LINK_LOAD": "", "BENCH_LINKS": ""}) as (
            process,
            port,
        ),
    ):
        deadline = time.monotonic() + runner.START_SECONDS
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > deadline:
                return {"error": "did not start", "ok": False}
            time.sleep(0.02)
        publishers = [connected(port, f"publisher-{number}") for number in range(pairs)]
        subscribers = [connected(port, f"subscriber-{number}") for number in range(pairs)]
        packets = []
        for number, line in enumerate(subscribers):
            line.sendall(framed(0x82, b"\0\1" + text(f"load/{number}") + bytes((qos,))))
            line.recv(5, socket.MSG_WAITALL)
            packets.append(framed(0x30 | qos << 1, text(f"load/{number}") + b"\0\1"[: 2 * qos] + b"x" * SIZE))
        wrong = count = 0
        before, start = 0, 0.0
        while True:
            for packet, publisher, subscriber in zip(packets, publishers, subscribers):
                publisher.sendall(packet)
                got = subscriber.recv(len(packet), socket.MSG_WAITALL)
                wrong += got[-SIZE:] != packet[-SIZE:]
                if qos:
                    subscriber.sendall(b"\x40\x02" + got[-SIZE - 2 : -SIZE])
                    wrong += publisher.recv(4, socket.MSG_WAITALL) != b"\x40\x02\0\1"
            count += pairs
            now = time.monotonic()
            if not start:  # the first round builds the routes
                count, start, before = 0, now, runner.cpu_ns(process.pid)
            elif now - start > seconds:
                break
        used = (runner.cpu_ns(process.pid) - before) / 1000
        for line in (*publishers, *subscribers):
            line.close()
    return {"ok": not wrong, "corrupt": wrong, "delivered": count, "delivered_per_s": count / (now - start),
            "core_us_per_delivered": used / count, "core_cpu_pct": used / (now - start) / 1e4}  # fmt: skip


# --- behind links -------------------------------------------------------------------------------------------------------


def linked(program: Path, links: int, arguments: list[str], seconds: float) -> Run:
    """A run of link_load with so many links."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = directory / "links"
        load = subprocess.Popen(
            [*pinned("1"), str(program), "--socket", str(path), "--links", str(links), "--duration", str(seconds), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while not path.exists() and load.poll() is None:
            time.sleep(0.01)
        with broker(directory, links, {"BENCH_LINK_LOAD": str(program), "BENCH_LINKS": str(path)}):
            try:
                out, error = load.communicate(timeout=seconds + RUN_SECONDS)
            except subprocess.TimeoutExpired:
                load.kill()
                load.wait()
                return {"error": "took too long", "ok": False}
    try:
        run: Run = json.loads(out)
    except ValueError:
        return {"error": error.strip()[-200:], "ok": False}
    return run


def measure(name: str, program: Path, seconds: float, worker_us: float, scale: float) -> Run:
    kind, *given = name.split("-")
    pairs = max(int(PAIRS * scale), 16)
    common = ["--size", str(SIZE), "--pairs", str(pairs)]
    if kind == "direct":
        return direct(int(given[0][1]), seconds, pairs)
    if kind == "capacity":
        links = int(given[0])
        rate = links * BUSY * 1e6 / worker_us
        arguments = ["--rate", str(rate), "--message-us", str(worker_us), "--turn-us", str(TURN_US)]
        run = {"offered_per_s": rate, **linked(program, links, [*common, *arguments], seconds)}
        if run["ok"]:
            run["core_rate"] = 1e6 / run["core_us_per_delivered"]
            run["workers_fed"] = worker_us / run["core_us_per_delivered"]
        return run
    if given[0] == "idle":
        return linked(program, 1, ["--pairs", "1", "--idle", str(max(int(10_000 * scale), 10)), "--batch", "1"], 0.1)
    return linked(program, 1, [*common, "--qos", given[0][1], "--batch", given[1]], seconds)


NAMES = [
    name for qos in (0, 1) for name in (f"direct-q{qos}", *(f"link-q{qos}-{batch}" for batch in BATCHES))
] + ["link-idle", *(f"capacity-{count}" for count in WORKER_COUNTS)]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of load in each run")
    parser.add_argument("--minutes", type=float, default=5.0, help="no round begins that would take longer")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies numbers of clients")
    parser.add_argument("--worker-us", type=float, default=5.0, help="CPU time of a worker per message, for capacity-N")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown: {' '.join(sorted(unknown))}")
    program = runner.build_program("link_load")
    if program is None:
        print("bench: no C compiler: links are not measured", file=sys.stderr)
        return 0
    began, longest = time.monotonic(), 0.0
    for number in range(options.rounds):
        start = time.monotonic()
        if number and start - began + longest > options.minutes * 60:
            break
        alone: dict[str, float] = {}
        for name in options.names or NAMES:
            run = measure(name, program, options.seconds, options.worker_us, options.scale)
            qos = name.split("-")[1]
            if name.startswith("direct") and run["ok"]:
                alone[qos] = run["core_us_per_delivered"]
            elif name.startswith("link-q") and run["ok"] and "q0" in alone:
                run["of_alone"] = run["core_us_per_delivered"] / alone["q0"]
            print(json.dumps({"scenario_name": name, "broker": runner.OURS, "round": number, **run}), flush=True)
        longest = max(longest, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
