#!/usr/bin/env python3
"""A cluster of nodes on this machine: latencies, rates, and CPU time of its processes and of Kafka's.

    python bench/cluster.py [--nodes 3] [--shards 6] [--fsync] [--seconds 8] [--rates 100,20000] [--size 128] [--one-node]

All clients connect to the first node, and have their sessions in cores of all of them. ``load`` is messages per second in
all, "full" as many as go through. ``ack`` is from PUBLISH to PUBACK, ``delivery`` from PUBLISH to its arrival. CPU times are µs
per delivered message: of all cores and node processes, all workers, and all Kafka brokers. ``log`` is bytes per message in one copy of the logs. With ``--one-node`` a broker without a cluster, with one connection worker, has the same loads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import runner

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.broker_process import BrokerProcess  # noqa: E402
from support.cluster_nodes import ClusterNodes  # noqa: E402
from support.kafka import KafkaCluster  # noqa: E402

PAIRS = 50  # publishers, and as many subscribers
WINDOW = 1000  # messages in flight of a publisher at full load
CONFIG: dict[str, Any] = {"sys_interval": "0s", "limits": {"max_inflight": WINDOW, "receive_maximum": WINDOW}}


def load(port: int, qos: int, rate: int | None, size: int, seconds: float) -> dict[str, Any]:
    """Run the load generator; ``rate`` is of all publishers together."""
    words = [
        str(runner.HERE / "mqtt_load"), "--port", str(port), "--scenario", "p2p", "--publishers", str(PAIRS),
        "--subscribers", str(PAIRS), "--qos", str(qos), "--size", str(size), "--duration", str(seconds),
        "--window", str(WINDOW),
    ]  # fmt: skip
    if rate is not None:
        words += ["--rate", str(rate / PAIRS)]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=seconds + 60)
    lines = answer.stdout.splitlines()
    if not lines:
        raise SystemExit(f"mqtt_load: {answer.stderr.strip()}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def cpu(pids: list[int], title: str = "") -> float:
    """CPU seconds of these processes and all that they started, as far as their command begins with the title."""
    return sum(runner.cpu_ns(one) for pid in pids for one in runner.descendants(pid) if command(one).startswith(title)) / 1e9


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def log_bytes(directory: Path) -> int:
    """Bytes in the logs of all shards, on all Kafka brokers together."""
    return sum(file.stat().st_size for file in directory.glob("broker-*/*.log-*/*.log"))


def measure(title: str, port: int, nodes: list[int], kafka: list[int], logs: Path, options: argparse.Namespace) -> None:
    rates: list[int | None] = [int(rate) for rate in options.rates.split(",") if rate]
    print(
        f"\n{title}\n{'QoS':>4}{'load':>8}{'delivered/s':>13}{'ack p50':>10}{'p99 ms':>8}{'delivery p50':>14}{'p99 ms':>8}"
        f"{'cores us':>10}{'workers':>9}{'kafka':>8}{'log':>7}"
    )
    for qos, rate in [*((1, rate) for rate in rates), (1, None), (2, None), (0, None)]:
        before = figures(nodes, kafka, logs)
        run = load(port, qos, rate, options.size, options.seconds)
        delivered = max(1, run["delivered"])
        cores, workers, brokers, log = ((after - one) / delivered for one, after in zip(before, figures(nodes, kafka, logs)))
        ack, latency = run.get("ack_us") or {}, run["latency_us"]
        print(
            f"{qos:>4}{rate or 'full':>8}{run['delivered_per_s']:>13,.0f}"
            f"{ack.get('p50', 0) / 1000:>10.2f}{ack.get('p99', 0) / 1000:>8.2f}"
            f"{latency['p50'] / 1000:>14.2f}{latency['p99'] / 1000:>8.2f}{cores:>10.2f}{workers:>9.2f}{brokers:>8.2f}{log:>7.0f}"
            + ("" if run.get("ok", True) else f"  FAILED: {run.get('error') or run}"),
            flush=True,
        )


def figures(nodes: list[int], kafka: list[int], logs: Path) -> tuple[float, ...]:
    """CPU time (µs) of cores and node processes, of workers and of Kafka, and bytes in a copy of the logs."""
    copies = max(1, len(kafka))
    workers = cpu(nodes, "mqttbroker: worker")
    return 1e6 * (cpu(nodes) - workers), 1e6 * workers, 1e6 * cpu(kafka), log_bytes(logs) / copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rates", default="100,20000", help="messages per second, with commas between")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--one-node", action="store_true")
    options = parser.parse_args()
    runner.build_generator()
    if options.one_node:
        with BrokerProcess(config=CONFIG, arguments=["--workers", "1"]) as broker:
            measure("one broker with a worker", broker.port, [broker.pid], [], Path(os.devnull), options)
    with tempfile.TemporaryDirectory() as place, KafkaCluster(Path(place)) as kafka:
        with ClusterNodes(kafka, options.nodes, options.shards, CONFIG, fsync=options.fsync) as cluster:
            brokers = [one.process.pid for one in kafka.brokers if one.process is not None]
            title = f"{options.nodes} nodes, {options.shards} shards, three Kafka brokers{', fsync' if options.fsync else ''}"
            measure(title, cluster.ports[0], [node.pid for node in cluster.nodes], brokers, Path(place), options)


if __name__ == "__main__":
    main()
