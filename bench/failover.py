#!/usr/bin/env python3
"""How long the sessions of a dead node wait: with a warm standby, and on a node that has nothing on its disk.

    python bench/failover.py [--sessions 100000] [--messages 10] [--nodes 3] [--shards 6] [--samples 200]

Persistent sessions, a thousand topics, and ``--messages`` QoS 1 messages to each topic, so that each session has so many in its
queue. Then a node is killed (SIGKILL) and ``--samples`` of its sessions connect to the others: a time is from the kill until such a
client has its session and all its messages. Last, all nodes are killed, their directories are deleted, and one node starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.cluster_nodes import ClusterNode, ClusterNodes  # noqa: E402
from support.kafka import KafkaCluster  # noqa: E402

from mqttbroker.cli.main import main as command  # noqa: E402
from mqttbroker.core.sessions.own_shard import shard_of  # noqa: E402

TOPICS = 1000
AT_ONCE = 300  # connections that are being made
TRY_AFTER = 0.05  # seconds
TRY_FOR = 120.0  # seconds
PUBACK_WINDOW = 100


def framed(kind: int, body: bytes) -> bytes:
    length, left = bytearray(), len(body)
    while True:
        left, seven = left >> 7, left & 127
        length.append(seven | (128 if left else 0))
        if not left:
            return bytes((kind,)) + bytes(length) + body


def text(value: str) -> bytes:
    data = value.encode()
    return len(data).to_bytes(2, "big") + data


def connect(client: str, clean: bool) -> bytes:
    return framed(0x10, text("MQTT") + bytes((4, 2 if clean else 0)) + b"\0\0" + text(client))


async def read_packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    kind = (await reader.readexactly(1))[0]
    length = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return kind, await reader.readexactly(length)


async def make_session(number: int, port: int) -> None:
    """Make a persistent session that subscribes to its topic, and disconnect."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    subscribe = framed(0x82, b"\0\1" + text(f"plant/{number % TOPICS}") + b"\1")
    writer.write(connect(f"device-{number}", False) + subscribe)
    connack, suback = await read_packet(reader), await read_packet(reader)
    if connack != (0x20, b"\0\0") or suback != (0x90, b"\0\1\1"):
        raise SystemExit(f"device-{number}: {connack} {suback}")
    writer.write(b"\xe0\0")
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def make_sessions(count: int, ports: Sequence[int]) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await make_session(number, ports[number % len(ports)])

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def publish(messages: int, port: int) -> None:
    """Publish so many messages to each topic; returns when all are acknowledged."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(connect("publisher", True))
    await read_packet(reader)
    waiting = 0
    for number in range(messages * TOPICS):
        packet_id = (number % 65535 + 1).to_bytes(2, "big")
        writer.write(framed(0x32, text(f"plant/{number % TOPICS}") + packet_id + f"{number // TOPICS}".encode().ljust(128)))
        waiting += 1
        if waiting == PUBACK_WINDOW:
            await read_packet(reader)
            waiting -= 1
    while waiting:
        await read_packet(reader)
        waiting -= 1
    writer.close()


async def resume(number: int, messages: int, ports: Sequence[int], begin: float) -> float:
    """Seconds from ``begin`` until a client has its session and its messages, in their order, from one of these nodes."""
    tries = 0
    while time.monotonic() - begin < TRY_FOR:
        tries += 1
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(30):
                reader, writer = await asyncio.open_connection("127.0.0.1", ports[tries % len(ports)])
                try:
                    writer.write(connect(f"device-{number}", False))
                    kind, body = await read_packet(reader)
                    if body[1]:
                        await asyncio.sleep(TRY_AFTER)
                        continue
                    if not body[0]:
                        raise SystemExit(f"device-{number}: its session is lost")
                    seen: list[int] = []
                    while len(seen) < messages:
                        kind, body = await read_packet(reader)
                        if kind & 0xF0 == 0x30:
                            start = 2 + int.from_bytes(body[:2], "big")
                            seen.append(int(body[start + 2 :]))
                    if seen != list(range(messages)):
                        raise SystemExit(f"device-{number}: got {seen}")
                    return time.monotonic() - begin
                finally:
                    writer.close()
        await asyncio.sleep(TRY_AFTER)
    raise SystemExit(f"device-{number}: no service in {TRY_FOR:.0f} s")


async def resume_all(numbers: Sequence[int], messages: int, ports: Sequence[int], begin: float) -> list[float]:
    return sorted(await asyncio.gather(*(resume(number, messages, ports, begin) for number in numbers)))


def show(title: str, times: Sequence[float]) -> None:
    print(f"{title:<46}{len(times):>9}{times[0]:>9.2f}{statistics.median(times):>9.2f}{times[-1]:>9.2f}", flush=True)


def owned(node: int, cluster: ClusterNodes) -> set[int]:
    """The shards of a node."""
    asked = next(one for one in cluster.nodes if one.running)
    answer = asked.get("/api/v1/cluster", {"Authorization": f"Bearer {os.environ['MQTTBROKER_API_TOKEN']}"})
    return {number for number, shard in enumerate(json.loads(answer)["shards"]) if shard["owner"] == f"node-{node + 1}"}


def sampled(options: argparse.Namespace, shards: set[int]) -> list[int]:
    """Some sessions of these shards that have not been used yet."""
    found = [number for number in range(options.sessions) if shard_of(f"device-{number}", options.shards) in shards]
    step = max(1, len(found) // options.samples)
    taken = found[options.used :: step][: options.samples]
    options.used += 1
    return taken


def run(cluster: ClusterNodes, options: argparse.Namespace) -> None:
    begin = time.monotonic()
    asyncio.run(make_sessions(options.sessions, cluster.ports))
    made = time.monotonic()
    asyncio.run(publish(options.messages, cluster.ports[0]))
    done = time.monotonic()
    print(
        f"{options.sessions:,} sessions in {made - begin:.0f} s; {options.messages * TOPICS:,} messages, "
        f"{options.sessions * options.messages:,} times in a queue, in {done - made:.0f} s\n"
    )
    print(f"{'seconds until session and messages are there':<46}{'sampled':>9}{'first':>9}{'median':>9}{'last':>9}")
    for number in range(1, len(cluster.nodes)):
        cluster.wait_until_ready()
        node = cluster.nodes[number]
        numbers = sampled(options, owned(number, cluster))
        node.kill()
        begin = time.monotonic()
        ports = [one.port for one in cluster.nodes if one.running]
        show(f"node killed, {len(ports)} left, standbys warm", asyncio.run(resume_all(numbers, options.messages, ports, begin)))
        node.start()
    cluster.wait_until_ready()
    begin = time.monotonic()
    for node in cluster.nodes:
        call(["cluster", "snapshot", "--url", node.url])
    print(f"snapshots of all shards: {time.monotonic() - begin:.1f} s")
    for node in cluster.nodes:
        node.kill()
    for node in cluster.nodes:
        shutil.rmtree(node.data_dir / "shards", ignore_errors=True)
    numbers = sampled(options, set(range(options.shards)))
    begin = time.monotonic()
    first: ClusterNode = cluster.nodes[0]
    first.launch()
    show("all killed, one node with an empty disk", asyncio.run(resume_all(numbers, options.messages, [first.port], begin)))


def call(words: list[str]) -> None:
    with redirect_stdout(sys.stderr):
        status = command(words)
    if status:
        raise SystemExit(f"mqttbroker {' '.join(words)}: exit status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--messages", type=int, default=10, help="in each session's queue")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--samples", type=int, default=200)
    options = parser.parse_args()
    options.used = 0
    os.environ["MQTTBROKER_API_TOKEN"] = token = secrets.token_hex(16)
    config = {"sys_interval": "0s", "limits": {"max_connections": 10_000}, "http": {"token": token}}
    with tempfile.TemporaryDirectory() as place, KafkaCluster(Path(place)) as kafka:
        with ClusterNodes(kafka, options.nodes, options.shards, config) as cluster:
            run(cluster, options)


if __name__ == "__main__":
    main()
