#!/usr/bin/env python3
"""Load generator for machines without a C compiler, with a part of mqtt_load's options and results.

It has the scenarios p2p, fanin and fanout at QoS 0 and 1, checks that no message is lost, doubled or reordered, and is the load
of ``mqttbroker bench``. Its own speed limits the rates; the broker's CPU time per message is comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time

from mqttbroker.cli.load import Account, Load, Plan
from mqttbroker.cli.load_client import Connection
from mqttbroker.codec.data_types import encode_utf8 as text
from mqttbroker.codec.frames import encode_fixed_header

__all__ = ["framed", "text"]
NO_COUNT = (1 << 32) - 1


def framed(first: int, body: bytes) -> bytes:
    return encode_fixed_header(first, len(body)) + body


def plan(options: argparse.Namespace) -> Plan:
    """Of publishers to topics of their own; in ``fanout`` all subscribers get each message, else one does."""
    fan_out = options.subscribers if options.scenario == "fanout" else 1
    return Plan(
        options.publishers,
        options.subscribers,
        fan_out,
        options.qos,
        options.size,
        options.rate * options.publishers,
        options.window,
        options.duration,
        NO_COUNT,
        options.drain_limit,
        not options.clean,
        "load",
        f"py{os.getpid()}",
    )


async def run(options: argparse.Namespace) -> dict[str, object]:
    async def opened(connection: Connection) -> None:
        await asyncio.get_running_loop().create_connection(lambda: connection, options.host, options.port)

    load = Load(plan(options), Account(options.mqtt_version, 60, None, None), opened)
    try:
        await load.connect()
        cpu = cpu_us(options.broker_pid)
        await load.measure()
        await asyncio.sleep(options.rest)
        cpu = cpu_us(options.broker_pid) - cpu
    finally:
        await load.close()
    latency = load.delivery.summary()
    return {
        "label": options.label, "scenario": options.scenario, "qos": options.qos,
        "published": load.acknowledged if options.qos else load.sent, "delivered": load.delivered,
        "delivered_per_s": round(load.delivered / max(load.finished_after, 1e-9), 1),
        "latency_us": None if latency is None else {name: round(value * 1000) for name, value in latency.items()},
        "cpu_us_per_delivered": round(cpu / load.delivered, 3) if load.delivered else None,
        "lost": load.lost, "dup": load.duplicated, "misordered": load.out_of_order, "unacked": load.unacknowledged,
        "disconnects": len(load.disconnected), "ok": load.ok,
    }  # fmt: skip


def cpu_us(pids: str) -> float:
    """CPU time so far of processes, given as comma-separated ids, in microseconds."""
    return sum(time.clock_gettime_ns(~int(pid) << 3 | 2) for pid in filter(None, pids.split(","))) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"host": "127.0.0.1", "broker-pid": "", "label": ""}.items():
        parser.add_argument(f"--{name}", default=default)
    for name, number in {"port": 1883, "mqtt-version": 4, "publishers": 1, "subscribers": 1, "qos": 0,
                         "size": 64, "window": 100, "clean": 1}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, amount in {"duration": 5.0, "rate": 0.0, "drain-limit": 20.0, "rest": 0.0}.items():
        parser.add_argument(f"--{name}", type=float, default=amount)
    parser.add_argument("--scenario", choices=("p2p", "fanin", "fanout"), default="p2p")
    options = parser.parse_args()
    if options.qos > 1:
        parser.error("QoS 2 needs mqtt_load")
    options.window = options.window or 100
    result = asyncio.run(run(options))
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
