"""``make bench``: this broker beside others on the same machine.

A run counts only if every message arrived once and in order. Rounds of all scenarios are repeated; no round begins that
would exceed the time limit.

Peers are mosquitto, if it is installed, and those of PEERS: "name=script name=script"; docs/performance.md describes
start scripts. SCENARIOS or --scenarios choose from the table in scenarios.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import report
from runner import HERE, OURS, OURS_OFF, OURS_WORKERS, Bench, Peer, Run, build_generator, fsync_us
from scenarios import (
    BUSY_WORKER,
    GROUPS,
    PARQUET,
    STREAM_PEERS,
    Scenario,
    all_scenarios,
    chosen,
    link_scenarios,
    spark_scenarios,
    stream_scenarios,
)

SPARK_ROWS = 4_000_000
STREAM_RECORDS = 1_000_000
SPARK_SHARE = 0.3  # of the time limit, if there are other scenarios
LINKS_SHARE = 0.4  # the same


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-s", "--scenarios", default=os.environ.get("SCENARIOS") or "all", help="names or groups (all)")
    parser.add_argument("-r", "--rounds", type=int, default=3, help="at most so many (%(default)s)")
    parser.add_argument("-d", "--duration", type=float, default=1.0, help="seconds of load in each run (%(default)s)")
    parser.add_argument(
        "--rest", type=float, default=2.0, help="seconds after a durable load whose CPU time and writes count (%(default)s)"
    )
    parser.add_argument("-m", "--minutes", type=float, default=15.0, help="the whole takes no longer (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies numbers of clients and messages")
    parser.add_argument("--features", action="store_true", help="passwords, ACL, metrics and a stream in every scenario")
    parser.add_argument("--no-mosquitto", action="store_true", help="leave out the mosquitto that is installed")
    parser.add_argument("--details", action="store_true", help="latencies, memory and CPU shares of every scenario too")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="directory of JSON and plot")
    parser.add_argument("--list", action="store_true", help="name the scenarios and groups")
    options = parser.parse_args(arguments)
    try:
        options.chosen = chosen(options.scenarios, options.scale)
    except ValueError as error:
        parser.error(str(error))
    if options.features:
        options.chosen = [replace(scenario, guarded=True) for scenario in options.chosen]
    return options


def peers(mosquitto: bool) -> list[Peer]:
    ours = os.environ.get("MQTTBROKER") or f"{sys.executable} -P -m mqttbroker"
    found = [Peer(OURS, HERE / "brokers" / "mqttbroker.sh", {"MQTTBROKER": ours})]
    if mosquitto and shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"):
        found.append(Peer("mosquitto", HERE / "brokers" / "mosquitto.sh"))
    for given in os.environ.get("PEERS", "").split():
        name, separator, script = given.partition("=")
        if not separator or not os.access(script, os.X_OK):
            raise SystemExit(f"bench: PEERS must be name=script, each an executable file; got {given!r}")
        found.append(Peer(name, Path(script).resolve()))
    return found


def surroundings(directory: Path) -> dict[str, Any]:
    """The machine and its state, which the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"), "cpu": model, "cpus": os.cpu_count(), "kernel": platform.release(),
        "python": platform.python_version(), "load_before": os.getloadavg()[0], "fsync_us": fsync_us(directory),
    }  # fmt: skip


SHOWN = (
    "cpu_us_per_delivered",
    "core_us_per_delivered",
    "delivered_per_s",
    "connects_per_s",
    "rows_per_s",
    "cpu_s_per_m",
    "p50_ms",
    "error",
)


def show_run(run: Run) -> None:
    shown = {key: run.get(key) for key in SHOWN}
    words = " ".join(f"{key}={found}" for key, found in shown.items() if found is not None)
    wrong = "" if run.get("ok") else f" WRONG {report.error_of([run])}"
    print(f"# {run['round']} {run['scenario_name']} {run['broker']}: {words}{wrong}", file=sys.stderr, flush=True)


def measure_spark(options: argparse.Namespace, names: list[str], minutes: float) -> list[Run]:
    """Run these scenarios with spark.py; none without PySpark."""
    if find_spec("pyspark") is None:
        print("bench: no Spark: pip install 'mqttbroker[spark]'", file=sys.stderr)
        return []
    rows = max(int(SPARK_ROWS * options.scale), 100)
    command = [sys.executable, str(HERE / "spark.py"), "--rows", str(rows), "--rounds", str(options.rounds)]
    command += ["--minutes", str(minutes), "--seconds", str(10 * options.duration), *names]
    return run_lines(command)


def measure_links(options: argparse.Namespace, runs: list[Run], names: list[str], minutes: float) -> list[Run]:
    """Run these scenarios with links.py, on links of workers as busy ones were found to be in the other runs."""
    command = [sys.executable, str(HERE / "links.py"), "--rounds", str(options.rounds), "--scale", str(options.scale)]
    command += ["--minutes", str(minutes), "--seconds", str(options.duration)]
    worker_us = report.median(report.of(runs, f"workers-{BUSY_WORKER}", OURS_WORKERS), "workers_us_per_delivered")
    if worker_us:
        command += ["--worker-us", str(worker_us)]
    return run_lines([*command, *names])


def measure_streams(options: argparse.Namespace, names: list[str]) -> list[Run]:
    """Run these scenarios with streams.py."""
    command = [sys.executable, str(HERE / "streams.py"), "--rounds", str(options.rounds)]
    command += ["--records", str(max(int(STREAM_RECORDS * options.scale), 1000)), "--seconds", str(6 * options.duration)]
    return run_lines([*command, *names])


def run_lines(command: list[str]) -> list[Run]:
    """Run a program that prints a line of JSON per run."""
    found = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(json.loads(line))
            show_run(found[-1])
    return found


def measure(bench: Bench, options: argparse.Namespace, began: float, minutes: float) -> None:
    scenarios = [scenario for scenario in options.chosen if not (scenario.spark or scenario.links or scenario.streams)]
    longest = 0.0
    for number in range(options.rounds):
        start = time.monotonic()
        if number and start - began + longest > minutes * 60:
            print(f"# {number} rounds: another would take longer than {minutes:g} minutes", file=sys.stderr)
            return
        bench.round(scenarios, number, show_run)
        longest = max(longest, time.monotonic() - start)


def names_of(bench: Bench) -> list[str]:
    """The brokers that ran, in the order of the table's columns."""
    ran = {run["broker"] for run in bench.runs}
    return [
        name for name in [OURS, OURS_OFF, OURS_WORKERS, *(peer.name for peer in bench.peers[1:]), PARQUET, *STREAM_PEERS] if name in ran
    ]


def write(options: argparse.Namespace, bench: Bench, around: dict[str, Any]) -> Path:
    """Write every run as JSON, and the plot; returns the path of the JSON file."""
    names = names_of(bench)
    options.results.mkdir(parents=True, exist_ok=True)
    out: Path = options.results / time.strftime("%Y%m%d-%H%M%S.json")
    found = {"surroundings": around, "medians": report.medians(bench.runs, options.chosen, names), "runs": bench.runs}
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not report.plot(out.with_suffix(".png"), bench.runs, options.chosen, names):
        print("bench: no plot without matplotlib: pip install 'mqttbroker[bench]'", file=sys.stderr)
    return out


def show(options: argparse.Namespace, bench: Bench) -> None:
    names = names_of(bench)
    print("\n" + report.table(bench.runs, options.chosen, names))
    if options.details:
        print("\n" + report.details(bench.runs, options.chosen, names))


def listing(scenarios: dict[str, Scenario]) -> str:
    lines = [f"{name:20} {scenario.arguments}" for name, scenario in scenarios.items()]
    lines += [f"{scenario.name:20} links.py" for scenario in link_scenarios()]
    lines += [f"{scenario.name:20} spark.py" for scenario in spark_scenarios()]
    lines += [f"{scenario.name:20} streams.py" for scenario in stream_scenarios()]
    return "\n".join(lines + [f"group {name:14} {' '.join(members)}" for name, members in GROUPS.items()])


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.list:
        print(listing(all_scenarios(options.scale)))
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="mqttbroker-bench-") as name:
        around = surroundings(Path(name))
        bench = Bench(peers(not options.no_mosquitto), build_generator(), Path(name), options.duration, options.rest)
        began = time.monotonic()
        try:
            if names := [scenario.name for scenario in options.chosen if scenario.spark]:
                alone = len(names) == len(options.chosen)
                bench.runs += measure_spark(options, names, options.minutes * (1.0 if alone else SPARK_SHARE))
            linked = [scenario.name for scenario in options.chosen if scenario.links]
            read = [scenario.name for scenario in options.chosen if scenario.streams]
            if read:
                bench.runs += measure_streams(options, read)
            alone = len(linked) + len(names) + len(read) == len(options.chosen)
            if not alone:
                measure(bench, options, began, options.minutes * (1 - LINKS_SHARE if linked else 1))
            if linked:
                left = options.minutes - (time.monotonic() - began) / 60
                bench.runs += measure_links(options, bench.runs, linked, left)
        except KeyboardInterrupt:
            print("bench: interrupted; what is there follows", file=sys.stderr)
        if not bench.runs:
            return 1
        out = write(options, bench, around)
        show(options, bench)
    print(f"\nfsync on this disk: {around['fsync_us']} µs; every run, and a plot: {out}")
    return 0 if all(run["ok"] for run in bench.runs if run["broker"] in (OURS, OURS_OFF, OURS_WORKERS)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
