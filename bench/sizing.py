#!/usr/bin/env python3
"""Disk and memory of one broker for each reading, session, queued message and retained message (docs/sizing.md).

    sizing.py [--readings N] [--devices N] [--segment-bytes SIZE] [--queued N] [--retained N] [--data-dir DIR] [COMMAND ...]

Readings are JSON with a time and a number, from that many devices in turn, at QoS 1. Prints a line of JSON per figure:

    segments, sealed   bytes per reading of a stream's segments, before and after they are rewritten as Parquet
    sessions, queued, retained
                       bytes of the database and of resident memory for each

COMMAND starts the broker (this Python's `mqttbroker`); arguments of `serve` are added to it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runner import free_port  # noqa: E402

from mqttbroker.codec.packets import Connect, Disconnect, Publish, Subscribe, Subscription  # noqa: E402

AT_ONCE = 500  # messages that are sent before their acknowledgements are read
PUBACK_BYTES, SUBACK_BYTES, CONNACK_BYTES = 4, 5, 4  # in MQTT 3.1.1
STREAM = '[streams.readings]\nfilters = ["sensors/#"]\nsegment_bytes = "{}"\nseal = {}\n'
# A queued command or a retained state is about as long as a reading.
PAYLOAD = b'{"ts":"2026-01-31T12:00:00Z","value":21.5}'


class Broker:
    """A broker on a data directory; ends with `stop`."""

    def __init__(self, command: Sequence[str], data: Path, config: str = "") -> None:
        self.port, self.http_port = free_port(), free_port()
        file = data.with_suffix(".toml")
        file.write_text(config, encoding="utf-8")
        arguments = ["serve", "--config", file, "--data-dir", data, "--port", self.port, "--http-port", self.http_port]
        self._process = subprocess.Popen([*command, *map(str, arguments), "--log-level", "error"])
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except ConnectionRefusedError:
                if self._process.poll() is not None:
                    raise SystemExit("sizing: the broker does not start") from None
                time.sleep(0.1)

    def resident(self) -> int:
        """Bytes that the process has for itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("mqttbroker_memory_resident_bytes "):
                    return int(float(line.split()[1]))
        raise SystemExit("sizing: /metrics has no resident memory")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


class Client:
    """A connection; `publish` waits for all acknowledgements."""

    def __init__(self, port: int, name: str, clean: bool = True) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._send(Connect(name, 4, clean_start=clean).encode(4), CONNACK_BYTES)

    def _send(self, data: bytes, answer: int) -> None:
        self._socket.sendall(data)
        while answer:
            received = len(self._socket.recv(answer))
            if not received:
                raise SystemExit("sizing: the broker closed the connection")
            answer -= received

    def subscribe(self, topic_filter: str) -> None:
        self._send(Subscribe(1, [Subscription(topic_filter, 1)], None).encode(4), SUBACK_BYTES)

    def publish(self, messages: Iterable[tuple[str, bytes]], retain: bool = False) -> None:
        left = iter(messages)
        while part := list(islice(left, AT_ONCE)):
            packets = [Publish(topic, data, 1, retain, False, at, None).encode(4) for at, (topic, data) in enumerate(part, 1)]
            self._send(b"".join(packets), PUBACK_BYTES * len(part))

    def close(self) -> None:
        self._send(Disconnect().encode(4), 0)
        self._socket.close()


def readings(count: int, devices: int) -> Iterable[tuple[str, bytes]]:
    """A reading of each device every ten seconds."""
    chance = random.Random(1)
    values = [chance.uniform(15, 30) for _ in range(devices)]
    for number in range(count):
        turn, device = divmod(number, devices)
        values[device] += chance.uniform(-0.1, 0.1)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1_769_817_600 + 10 * turn))
        reading = json.dumps({"ts": at, "value": round(values[device], 2)}, separators=(",", ":"))
        yield f"sensors/site-{device % 20}/device-{device:05}/temperature", reading.encode()


def say(what: str, **figures: float) -> None:
    print(json.dumps({"figure": what, **{name: round(value, 1) for name, value in figures.items()}}), flush=True)


def size_of(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def measure_stream(command: Sequence[str], data: Path, count: int, devices: int, segment_bytes: str) -> None:
    broker = Broker(command, data, STREAM.format(segment_bytes, "false"))
    client = Client(broker.port, "readings")
    client.publish(readings(count, devices))
    client.close()
    broker.stop()
    payload = sum(len(value) for _, value in islice(readings(count, devices), 1000)) / 1000
    say("segments", bytes_each=size_of((data / "streams").rglob("*.*")) / count, payload_bytes=payload)
    import pyarrow.parquet

    broker = Broker(command, data, STREAM.format(segment_bytes, "true"))
    closed = len(list(data.rglob("*.seg"))) - len(list((data / "streams" / "readings").glob("*/")))
    while len(sealed := list(data.rglob("*.parquet"))) < closed:
        time.sleep(0.5)
    broker.stop()
    rows = sum(pyarrow.parquet.read_metadata(path).num_rows for path in sealed)
    say("sealed", bytes_each=size_of(sealed) / rows, readings=rows)


def measure_state(command: Sequence[str], data: Path, sessions: int, queued: int, retained: int) -> None:
    database, memory = 0, 0

    def step(what: str, count: int) -> None:
        nonlocal database, memory
        broker.stop()
        found = size_of(data.glob("mqttbroker.db*"))
        again = Broker(command, data)
        resident = again.resident()
        again.stop()
        if count:
            say(what, database_bytes_each=(found - database) / count, memory_bytes_each=(resident - memory) / count, count=count)
        database, memory = found, resident

    broker = Broker(command, data)
    step("empty", 0)
    broker = Broker(command, data)
    for number in range(sessions):
        client = Client(broker.port, f"device-{number:05}", clean=False)
        client.subscribe(f"commands/device-{number:05}/#")
        client.close()
    step("sessions", sessions)
    for what, count, topic, retain in (
        ("queued", queued, "commands/device-{:05}/set", False), ("retained", retained, "state/{:07}/temperature", True),
    ):  # fmt: skip
        broker = Broker(command, data)
        client = Client(broker.port, "operator")
        client.publish(((topic.format(n if retain else n % sessions), PAYLOAD) for n in range(count)), retain)
        client.close()
        step(what, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--readings", type=int, default=1_000_000)
    parser.add_argument("--devices", type=int, default=10_000, help="and as many sessions")
    parser.add_argument("--segment-bytes", default="16MiB", metavar="SIZE")
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--retained", type=int, default=100_000)
    parser.add_argument("--data-dir", type=Path, help="for the brokers' data, which are removed at the end")
    parser.add_argument("command", nargs="*", default=[sys.executable, "-P", "-m", "mqttbroker"])
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="mqttbroker-sizing-", dir=options.data_dir))
    try:
        measure_stream(options.command, directory / "stream", options.readings, options.devices, options.segment_bytes)
        measure_state(options.command, directory / "state", options.devices, options.queued, options.retained)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
