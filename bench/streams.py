#!/usr/bin/env python3
"""How fast clients catch up on a stream, and what live clients notice of it.

    streams.py [--records N] [--rounds N] [--seconds S] [--readers N] [--command COMMAND] [SCENARIO ...]

Each scenario starts a broker on a stream of N records of 128 B and prints one line of JSON per round:

    catch-up-active   one QoS 0 subscriber (MQTT 3.1.1) reads the whole stream from unsealed segments
    catch-up-v5       the same for MQTT 5.0, whose deliveries carry ts, key, partition and offset
    catch-up-qos1     the same at QoS 1, each message acknowledged
    catch-up-sealed   as catch-up-active, from sealed segments
    bystanders-of-readers
                      the delay of live QoS 1 messages of other clients, alone and while --readers catch up
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bridge_spark.log.stream_config import StreamConfig  # noqa: E402
from bridge_spark.log.stream_log import StreamLogs  # noqa: E402
from sessions.message import Message  # noqa: E402

from runner import cpu_ns, free_port  # noqa: E402

SCENARIOS = ("catch-up-active", "catch-up-v5", "catch-up-qos1", "catch-up-sealed", "bystanders-of-readers")
SIZE = 128  # bytes of a payload
TOPIC = "bench/history/%04d"
TOPICS = 1000
BATCH = 1000  # records of a commit
SEGMENT = 32 * 1024 * 1024


def fill(directory: Path, records: int) -> None:
    """Write a stream of so many records."""
    config = StreamConfig("history", ["bench/history/#"], segment_bytes=SEGMENT, segment_age=3600.0)
    logs = StreamLogs(directory / "streams", [config])
    (directory / "streams").mkdir(parents=True)
    logs.recover(None)
    stamp = int(time.time() * 1_000_000) - records
    for first in range(0, records, BATCH):
        logs.append({("history", 0): [
            Message(TOPIC % (n % TOPICS), b"%0*d" % (SIZE, n), 1, False, b"", "bench", stamp + n, 0)
            for n in range(first, min(first + BATCH, records))
        ]})
        logs.committed()
    logs.sync()
    logs.close()


class Broker:
    """A broker on a copy of a data directory."""

    def __init__(self, command: list[str], source: Path, sealed: bool) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bench-streams-"))
        shutil.copytree(source, self.directory / "data")
        config = self.directory / "broker.toml"
        config.write_text(
            '[log]\nlevel = "warning"\n[streams.history]\nfilters = ["bench/history/#"]\n'
            f'partitions = 1\nsegment_bytes = "{SEGMENT}B"\nseal = {str(sealed).lower()}\n',
            encoding="utf-8",
        )
        self.port, self.http = free_port(), free_port()
        ports = ["--port", str(self.port), "--http-port", str(self.http)]
        data = ["--data-dir", str(self.directory / "data")]
        self.process = subprocess.Popen([*command, "serve", "--config", str(config), *ports, *data])
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise SystemExit("streams: the broker does not start") from None
                time.sleep(0.05)
        if sealed:
            self.wait_until_sealed()

    def wait_until_sealed(self) -> None:
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/streams/history") as answer:
                segments = json.load(answer)["partitions"][0]["segments"]
            if all(segment["sealed"] for segment in segments[:-1]):
                return
            time.sleep(0.2)

    def cpu_seconds(self) -> float:
        return cpu_ns(self.process.pid) / 1e9

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        shutil.rmtree(self.directory, ignore_errors=True)


def text(value: str) -> bytes:
    return len(value).to_bytes(2, "big") + value.encode()


def packet(first: int, body: bytes) -> bytes:
    length, size = b"", len(body)
    while True:
        length += bytes([size % 128 | (128 if size > 127 else 0)])
        size //= 128
        if not size:
            return bytes([first]) + length + body


def connect(port: int, version: int) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), 10)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = text("MQTT") + bytes([version, 2, 0, 60]) + (b"\0" if version == 5 else b"") + text("")
    line.sendall(packet(0x10, body))
    head = line.recv(2, socket.MSG_WAITALL)
    line.recv(head[1], socket.MSG_WAITALL)
    return line


def subscribe(line: socket.socket, topic_filter: str, qos: int, version: int, start: str = "") -> None:
    properties = b"\x26" + text("stream-offset") + text(start) if start else b""
    body = b"\0\x01" + (bytes([len(properties)]) + properties if version == 5 else b"") + text(topic_filter) + bytes([qos])
    line.sendall(packet(0x82, body))


def catch_up(port: int, records: int, qos: int, version: int) -> float:
    """The seconds in which a subscriber receives all records of the stream, in order."""
    line = connect(port, version)
    line.settimeout(60)
    begun = time.perf_counter()
    subscribe(line, "$replay/earliest/history", qos, version)
    count, data, position, last = 0, b"", 0, -1
    while count < records:
        data = data[position:] + line.recv(1 << 20)
        position = 0
        acks = bytearray()
        end = len(data)
        while end - position >= 4:
            size, width, shift = 0, 1, 0
            while True:
                byte = data[position + width]
                size |= (byte & 127) << shift
                width += 1
                shift += 7
                if byte < 128:
                    break
            if end - position < width + size:
                break
            first = data[position]
            body = position + width
            position = body + size
            if first >> 4 != 3:
                continue
            count += 1
            if first & 6:
                at = body + 2 + (data[body] << 8 | data[body + 1])
                acks += b"\x40\x02" + data[at : at + 2]
            if count % 1000 == 0 or count == records:
                number = int(data[position - SIZE : position])
                if number != count - 1 or number <= last:
                    raise SystemExit(f"streams: record {number} at place {count - 1}")
                last = number
        if acks:
            line.sendall(acks)
    seconds = time.perf_counter() - begun
    line.close()
    return seconds


def drain(port: int, stopped: threading.Event) -> None:
    """Catch up again and again, without looking at what arrives."""
    while not stopped.is_set():
        line = connect(port, 4)
        line.settimeout(0.5)
        subscribe(line, "$replay/earliest/history", 0, 4)
        try:
            while not stopped.is_set() and line.recv(1 << 18):
                pass
        except TimeoutError:
            pass
        line.close()


def delays(port: int, seconds: float) -> list[float]:
    """The delays of live messages, in ms: 200 a second from one client to another."""
    receiver, sender = connect(port, 4), connect(port, 4)
    subscribe(receiver, "live/#", 1, 4)
    receiver.recv(5, socket.MSG_WAITALL)
    found: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun = time.perf_counter()
        sender.sendall(packet(0x32, text("live/x") + b"\0\x01" + b"x" * 20))
        head = receiver.recv(2, socket.MSG_WAITALL)
        body = receiver.recv(head[1], socket.MSG_WAITALL)
        found.append((time.perf_counter() - begun) * 1000)
        receiver.sendall(b"\x40\x02" + body[8:10])
        sender.recv(4, socket.MSG_WAITALL)
        time.sleep(max(0.0, 0.005 - (time.perf_counter() - begun)))
    receiver.close()
    sender.close()
    return found


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def measure(name: str, command: list[str], source: Path, options: argparse.Namespace) -> dict[str, Any]:
    with Broker(command, source, name == "catch-up-sealed") as broker:
        if name == "bystanders-of-readers":
            quiet = delays(broker.port, options.seconds)
            stopped = threading.Event()
            # In processes, so that they do not delay the measuring thread.
            readers = [
                subprocess.Popen([sys.executable, __file__, "--drain", str(broker.port), "--readers", "10"])
                for _ in range(options.readers // 10)
            ]
            time.sleep(1.0)
            loaded = delays(broker.port, options.seconds)
            stopped.set()
            for reader in readers:
                reader.terminate()
                reader.wait()
            return {"quiet_p99_ms": round(p99(quiet), 3), "loaded_p99_ms": round(p99(loaded), 3),
                    "quiet_p50_ms": round(statistics.median(quiet), 3),
                    "loaded_p50_ms": round(statistics.median(loaded), 3)}
        qos, version = int(name == "catch-up-qos1"), 5 if name == "catch-up-v5" else 4
        before = broker.cpu_seconds()
        seconds = catch_up(broker.port, options.records, qos, version)
        used = broker.cpu_seconds() - before
        return {
            "delivered_per_s": round(options.records / seconds),
            "cpu_us_per_delivered": round(used / options.records * 1e6, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="streams.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of live messages in bystanders-of-readers")
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--command", default=os.environ.get("MQTTBROKER") or f"{sys.executable} -P -m mqttbroker")
    parser.add_argument("--drain", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drain:
        threads = [
            threading.Thread(target=drain, args=(options.drain, threading.Event()), daemon=True)
            for _ in range(options.readers)
        ]
        for thread in threads:
            thread.start()
        threads[0].join()
        return
    with tempfile.TemporaryDirectory(prefix="bench-streams-") as directory:
        source = Path(directory) / "data"
        fill(source, options.records)
        for number in range(options.rounds):
            for name in options.scenarios:
                found = measure(name, shlex.split(options.command), source, options)
                print(json.dumps({"scenario_name": name, "broker": "mqttbroker", "round": number + 1, "ok": True, **found}),
                      flush=True)


if __name__ == "__main__":
    main()
