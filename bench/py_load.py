#!/usr/bin/env python3
"""Load generator for machines without a C compiler, with a part of mqtt_load's options and results.

It has the scenarios p2p, fanin and fanout at QoS 0 and 1, checks that no message is lost, doubled or reordered, and
needs only the standard library. Its own speed limits the rates; the broker's CPU time per message is comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time

CONNECT, CONNACK, PUBLISH, PUBACK, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x90


def framed(first: int, body: bytes) -> bytes:
    size, length = len(body), bytearray()
    while True:
        length.append(size & 127 | (128 if size > 127 else 0))
        size >>= 7
        if not size:
            return bytes((first,)) + bytes(length) + body


def text(value: str) -> bytes:
    return len(value).to_bytes(2, "big") + value.encode()


class Client(asyncio.Protocol):
    """One connection; received packets go to ``load``."""

    def __init__(self, load: Load, index: int) -> None:
        self.load = load
        self.index = index
        self.buffer = b""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data
        pos, end = 0, len(data)
        while end - pos >= 2:
            size, shift, body = 0, 0, pos + 1
            while body < end and data[body] > 127:
                size |= (data[body] & 127) << shift
                shift += 7
                body += 1
            if body >= end or body + 1 + size + (data[body] << shift) > end:
                break
            size += data[body] << shift
            self.packet(data[pos], data[body + 1 : body + 1 + size])
            pos = body + 1 + size
        self.buffer = data[pos:]

    def packet(self, first: int, body: bytes) -> None:
        kind = first & 0xF0
        if kind == PUBLISH:
            start = 2 + int.from_bytes(body[:2], "big")
            if first & 6:
                self.transport.write(bytes((PUBACK, 2)) + body[start : start + 2])
                start += 2
            start += self.load.v5
            self.load.on_publish(self, body[start:])
        elif kind == PUBACK:
            self.load.on_puback(self.index)
        elif kind in (CONNACK, SUBACK) and not self.ready.done():
            self.ready.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.load.disconnects += not self.load.finished


class Load:
    """One run: its clients and its counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.v5 = 1 if options.mqtt_version == 5 else 0
        self.finished = False
        self.disconnects = self.sent = self.acked = self.delivered = self.duplicates = self.misordered = 0
        self.fan = options.subscribers if options.scenario in ("fanin", "fanout") else 1
        self.window = options.window or 100
        self.next = [0] * options.publishers
        self.inflight = [0] * options.publishers
        self.seen: dict[tuple[int, int], int] = {}
        self.publishers: list[Client] = []
        self.publishing = False

    async def client(self, kind: str, index: int) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: Client(self, index), self.options.host, self.options.port)
        clean = 2 if self.options.clean else 0
        head = text("MQTT") + bytes((self.options.mqtt_version, clean, 0, 60)) + b"\0" * self.v5
        client.transport.write(framed(CONNECT, head + text(f"py{os.getpid()}{kind}{index}")))
        await client.ready
        return client

    async def subscribe(self, client: Client, filters: list[str]) -> None:
        client.ready = asyncio.get_running_loop().create_future()
        wanted = b"".join(text(f) + bytes((self.options.qos,)) for f in filters)
        client.transport.write(framed(0x82, b"\0\1" + b"\0" * self.v5 + wanted))
        await client.ready

    def publish(self, index: int) -> None:
        sequence = self.next[index]
        self.next[index] = sequence + 1
        self.inflight[index] += 1 if self.options.qos else self.fan
        self.sent += 1
        topic = index % self.options.topics
        packet_id = (sequence % 65535 + 1).to_bytes(2, "big") if self.options.qos else b""
        payload = index.to_bytes(4, "big") + sequence.to_bytes(4, "big")
        body = text(f"load/{topic}") + packet_id + b"\0" * self.v5 + payload.ljust(self.options.size, b"x")
        self.publishers[index].transport.write(framed(PUBLISH | self.options.qos << 1, body))

    def fill(self, index: int) -> None:
        limit = self.window * (1 if self.options.qos else self.fan)
        while self.publishing and not self.options.rate and self.inflight[index] < limit:
            self.publish(index)

    def on_puback(self, index: int) -> None:
        self.acked += 1
        self.inflight[index] -= 1
        self.fill(index)

    def on_publish(self, client: Client, payload: bytes) -> None:
        index, sequence = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
        expected = self.seen.get((client.index, index), 0)
        self.delivered += 1
        self.duplicates += sequence < expected
        self.misordered += sequence > expected
        self.seen[client.index, index] = max(expected, sequence + 1)
        if not self.options.qos:
            self.inflight[index] -= 1
            self.fill(index)

    async def run(self) -> dict[str, object]:
        options = self.options
        for index in range(options.subscribers):
            client = await self.client("s", index)
            topics = range(options.topics)
            mine = topics if self.fan > 1 else [t for t in topics if t % options.subscribers == index]
            await self.subscribe(client, ["load/#"] if options.scenario == "fanin" else [f"load/{t}" for t in mine])
        self.publishers = [await self.client("p", index) for index in range(options.publishers)]
        cpu, start = cpu_us(options.broker_pid), time.monotonic()
        self.publishing = True
        if options.rate:
            await self.paced(start)
        else:
            for index in range(options.publishers):
                self.fill(index)
            await asyncio.sleep(options.duration)
        self.publishing = False
        deadline = time.monotonic() + options.drain_limit
        while time.monotonic() < deadline and (
            self.delivered < self.sent * self.fan or (options.qos and self.acked < self.sent)
        ):
            await asyncio.sleep(0.02)
        elapsed = time.monotonic() - start
        await asyncio.sleep(options.rest)
        return self.result(cpu_us(options.broker_pid) - cpu, elapsed)

    async def paced(self, start: float) -> None:
        rounds = 0
        while (elapsed := time.monotonic() - start) < self.options.duration:
            while rounds < elapsed * self.options.rate:
                rounds += 1
                for index in range(self.options.publishers):
                    self.publish(index)
            await asyncio.sleep(0.5 / self.options.rate)

    def result(self, cpu: float, seconds: float) -> dict[str, object]:
        self.finished = True
        lost = max(self.sent * self.fan - self.delivered, 0)
        unacked = self.sent - self.acked if self.options.qos else 0
        bad = lost or unacked or self.misordered or self.disconnects or (self.duplicates and not self.options.qos)
        return {
            "label": self.options.label, "scenario": self.options.scenario, "qos": self.options.qos,
            "published": self.acked if self.options.qos else self.sent, "delivered": self.delivered,
            "delivered_per_s": round(self.delivered / seconds, 1),
            "cpu_us_per_delivered": round(cpu / self.delivered, 3) if self.delivered else None,
            "lost": lost, "dup": self.duplicates, "misordered": self.misordered, "unacked": unacked,
            "disconnects": self.disconnects, "ok": not bad,
        }  # fmt: skip


def cpu_us(pids: str) -> float:
    """CPU time so far of processes, given as comma-separated ids, in microseconds."""
    return sum(time.clock_gettime_ns(~int(pid) << 3 | 2) for pid in filter(None, pids.split(","))) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"host": "127.0.0.1", "broker-pid": "", "label": ""}.items():
        parser.add_argument(f"--{name}", default=default)
    for name, number in {"port": 1883, "mqtt-version": 4, "publishers": 1, "subscribers": 1, "topics": 0, "qos": 0,
                         "size": 64, "window": 100, "clean": 1}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, amount in {"duration": 5.0, "rate": 0.0, "drain-limit": 20.0, "rest": 0.0}.items():
        parser.add_argument(f"--{name}", type=float, default=amount)
    parser.add_argument("--scenario", choices=("p2p", "fanin", "fanout"), default="p2p")
    options = parser.parse_args()
    if options.qos > 1:
        parser.error("QoS 2 needs mqtt_load")
    options.topics = options.topics or (1 if options.scenario == "fanout" else options.publishers)
    result = asyncio.run(Load(options).run())
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
