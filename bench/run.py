"""``make bench``: CPU per delivered message of this broker and of others on the same machine.

Rule: every figure is the median of runs that alternate between the brokers, one broker at a time, each freshly
started; a run in which a message was lost, doubled or reordered is shown as a failure and not as a figure.

Peers are Debian's mosquitto if it is installed, and whatever PEERS names ("name=script name=script"; a script is
started as SCRIPT PORT). Without a C compiler the slower generator in py_load.py makes the load.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

import compare

HERE = Path(__file__).resolve().parent
PAIRS_1000 = "--scenario p2p --publishers 1000 --subscribers 1000 --qos 0 --size 64 --rate 10"
SCENARIOS = ["p2p-q0-64", "p2p-q1-64", "fanout100-q0", "fanin100-q0", "pairs1000-q0", "persist-online-q1", "offline-q1"]
# What is shown of a scenario: title, key of mqtt_load's result.
FIGURES = {"offline-q1": [("offline-q1 queue", "cpu_us_per_published"), ("offline-q1 drain", "cpu_us_per_delivered")]}


def load_generator() -> tuple[Path, list[str]]:
    """The generator to use and the scenarios it can run."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # py_load.py's python3
        print("bench: no C compiler, the load comes from py_load.py and bounds the rates", file=sys.stderr)
        return HERE / "py_load.py", [name for name in SCENARIOS if not name.startswith("offline")]
    sources, program = [HERE / "mqtt_load.c", HERE / "channel.c"], HERE / "mqtt_load"
    if not program.exists() or program.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        subprocess.run([compiler, "-O2", "-std=c11", "-DNO_TLS", "-o", str(program), *map(str, sources)], check=True)
    return program, SCENARIOS


def brokers() -> list[tuple[str, str]]:
    found = [("mqttbroker", str(HERE / "brokers" / "mqttbroker.sh"))]
    if shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"):
        found.append(("mosquitto", str(HERE / "brokers" / "mosquitto.sh")))
    for peer in os.environ.get("PEERS", "").split():
        name, separator, script = peer.partition("=")
        if not separator:
            raise SystemExit(f"bench: PEERS must be name=script, got {peer!r}")
        found.append((name, script))
    return found


def median(runs: list[dict[str, Any]], broker: str, scenario: str, key: str) -> Optional[float]:
    values = [run.get(key) for run in runs if run["broker"] == broker and run["name"] == scenario and run.get("ok")]
    return statistics.median(values) if values and None not in values else None


def summary(runs: list[dict[str, Any]], names: list[str], scenarios: list[str]) -> str:
    """CPU µs per message: one line per figure, one column per broker, and how many times ours the others take."""
    columns = [f"{name:>12}" for name in names] + [f"{'x ' + name:>14}" for name in names[1:]]
    lines = [f"{'CPU µs per delivered message':30}" + "".join(columns)]
    for scenario in scenarios:
        for title, key in FIGURES.get(scenario, [(scenario, "cpu_us_per_delivered")]):
            values = [median(runs, name, scenario, key) for name in names]
            cells = [f"{'failed' if value is None else format(value, '.2f'):>12}" for value in values]
            for value in values[1:]:
                ratio = "-" if value is None or not values[0] else format(value / values[0], ".2f")
                cells.append(f"{ratio:>14}")
            lines.append(f"{title:30}" + "".join(cells))
    return "\n".join(lines)


def main() -> int:
    program, possible = load_generator()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-s", "--scenarios", default=",".join(possible), help="comma separated (%(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("-d", "--duration", type=float, default=3, help="seconds of each run")
    parser.add_argument("--mqtt", type=int, choices=(4, 5), default=4, help="protocol version")
    options = parser.parse_args()
    compare.SCENARIOS["pairs1000-q0"] = PAIRS_1000
    compare.LOAD = str(program)
    scenarios = options.scenarios.split(",")
    unknown = [name for name in scenarios if name not in compare.SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario {unknown[0]}; there are {', '.join(compare.SCENARIOS)}")

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pin = (os.cpu_count() or 1) > 1 and shutil.which("taskset") is not None
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    out = results / time.strftime("%Y%m%d-%H%M%S.jsonl")
    peers = brokers()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TMPDIR"] = directory
        settings = argparse.Namespace(
            r=options.repetitions, d=options.duration, mqtt=options.mqtt, out=str(out), extra="", limit=120,
            retry_noisy=None, cpu_broker="0" if pin else None, cpu_load="1" if pin else None,
        )  # fmt: skip
        runs = compare.run_all(settings, peers, scenarios)
    compare.tables(runs)
    print("\n" + summary(runs, [name for name, _ in peers], scenarios))
    print(f"\nevery run: {out.relative_to(HERE.parent)}")
    return 0 if all(run.get("ok") for run in runs if run["broker"] == "mqttbroker") else 1


if __name__ == "__main__":
    sys.exit(main())
