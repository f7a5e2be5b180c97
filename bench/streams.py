#!/usr/bin/env python3
"""How fast streams are appended to and read, what live clients notice of readers, and Redis and RabbitMQ beside it.

    streams.py [--records N] [--rounds N] [--seconds S] [--readers N] [--command COMMAND] [SCENARIO ...]

Each scenario starts a broker, most of them on a stream of N records of 128 B, and prints a line of JSON per round:

    catch-up-active   one QoS 0 subscriber (MQTT 3.1.1) reads the whole stream from unsealed segments
    catch-up-v5       the same for MQTT 5.0, whose deliveries carry ts, key, partition and offset
    catch-up-qos1     the same at QoS 1, each message acknowledged
    catch-up-sealed   as catch-up-active, from sealed segments
    bystanders-of-readers
                      the latency of 50 pairs of other clients at 20 QoS 1 messages/s each: alone, while --readers catch
                      up on another broker on the same processor, and while they do on the same broker
    append-cost       ten pairs at QoS 0: the CPU time that a message takes more if it is stored
    stream-append     durable appends, ten publishers with 100 records in flight each; beside the peers
    stream-group      a group of four reads and acknowledges, the offsets are on disk; beside the peers

With two processors or more, the brokers of the two scenarios about CPU time and latency are tied to the first and their
clients to the second, where the readers run only when the pairs' process does not.
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
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import runner  # noqa: E402
import stream_peers  # noqa: E402
from py_load import framed, text  # noqa: E402
from stream_peers import BATCH, Line, Server  # noqa: E402

from bridge_spark.log.stream_config import StreamConfig, partition_of  # noqa: E402
from bridge_spark.log.stream_log import StreamLogs  # noqa: E402
from sessions.message import Message  # noqa: E402

OURS = runner.OURS
SIZE = 128  # bytes of a payload
TOPIC = "bench/history/%04d"
TOPICS = 1000
COMMIT = 1000  # records of a commit of `fill`
SEGMENT = 32 * 1024 * 1024
PARTITIONS = 4  # of the stream that a group reads
PAIRS = ["--publishers", "50", "--subscribers", "50", "--rate", "20", "--qos", "1", "--size", "20"]
PARTS = 3  # into which the seconds of live messages are divided, each alone and beside readers
EACH = 3  # runs of append-cost with and without a stream
CPUS = os.cpu_count() or 1


def fill(directory: Path, records: int, partitions: int) -> None:
    """Write a stream of so many records."""
    config = StreamConfig("history", ["bench/history/#"], partitions, segment_bytes=SEGMENT, segment_age=3600.0)
    logs = StreamLogs(directory / "streams", [config])
    (directory / "streams").mkdir(parents=True)
    logs.recover(None)
    stamp = int(time.time() * 1_000_000) - records
    for first in range(0, records, COMMIT):
        by_partition: dict[tuple[str, int], list[Message]] = {}
        for n in range(first, min(first + COMMIT, records)):
            topic = TOPIC % (n % TOPICS)
            message = Message(topic, b"%0*d" % (SIZE, n), 1, False, b"", "bench", stamp + n, 0)
            by_partition.setdefault(("history", partition_of(topic.encode(), partitions)), []).append(message)
        logs.append(by_partition)
        logs.committed()
    logs.sync()
    logs.close()


class Sources:
    """Data directories with a stream of ``records``, one for each number of partitions."""

    def __init__(self, directory: Path, records: int) -> None:
        self._directory = directory
        self.records = records

    def filled(self, partitions: int) -> Path:
        path = self._directory / f"filled-{partitions}"
        if not path.exists():
            fill(path, self.records, partitions)
        return path


class Broker(Server):
    """This broker, on a copy of a data directory or on an empty one, which stores ``filters``."""

    name = OURS

    def __init__(
        self,
        command: list[str],
        source: Path | None = None,
        *,
        partitions: int = 1,
        filters: str = "bench/history/#",
        sealed: bool = False,
        pinned: bool = False,
    ) -> None:
        super().__init__()
        self.command = [*pin(0), *command] if pinned else command
        if source is not None:
            shutil.copytree(source, self.directory / "data")
        self.sealed = sealed
        self.http = runner.free_port()
        (self.directory / "broker.toml").write_text(
            '[log]\nlevel = "warning"\n[streams.history]\n'
            f'filters = ["{filters}"]\npartitions = {partitions}\nsegment_bytes = "{SEGMENT}B"\n'
            f"seal = {str(sealed).lower()}\n",
            encoding="utf-8",
        )

    def start(self) -> None:
        ports = ["--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(self.http)]
        where = ["--config", str(self.directory / "broker.toml"), "--data-dir", str(self.directory / "data")]
        self.process = self.run([*self.command, "serve", *where, *ports])

    def prepare(self) -> None:
        self.connect().close()
        while self.sealed:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/streams/history") as answer:
                segments = json.load(answer)["partitions"][0]["segments"]
            if all(segment["sealed"] for segment in segments[:-1]):
                break
            time.sleep(0.2)

    def publisher(self) -> Line:
        sock = self.connect()
        sock.sendall(framed(0x10, text("MQTT") + b"\x04\x02\0\0" + text("")))
        if sock.recv(4, socket.MSG_WAITALL)[3:] != b"\0":
            raise SystemExit("streams: CONNECT refused")
        return Line(sock)

    def batch(self, payload: bytes) -> bytes:
        return b"".join(framed(0x32, text(TOPIC % number) + (number + 1).to_bytes(2, "big") + payload) for number in range(BATCH))

    def answers(self, line: Line) -> int:
        data = line.receive()
        whole = len(data) // 4
        line.rest = data[whole * 4 :]
        if data[: whole * 4 : 4] != b"\x40" * whole:
            raise SystemExit(f"streams: not a PUBACK in {data[:100]!r}")
        return whole


def pin(cpu: int) -> list[str]:
    return ["taskset", "-c", str(cpu)] if CPUS > 1 and shutil.which("taskset") else []


def load(program: Path, arguments: list[str], cpu: int | None = None) -> dict[str, Any]:
    """Run a load generator; returns its figures."""
    command = [*(pin(cpu) if cpu is not None else []), str(program), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"streams: {program.name}: {done.stderr.strip()[-300:]}") from None
    return found


def rates(records: int, seconds: float, used: float) -> dict[str, Any]:
    return {
        "delivered_per_s": round(records / seconds),
        "cpu_us_per_delivered": round(used / records * 1e6, 3),
        "per_cpu_s": round(records / used) if used else None,
    }


class Scenarios:
    """Runs scenarios and returns their figures, by broker."""

    def __init__(self, options: argparse.Namespace, sources: Sources) -> None:
        self.command = shlex.split(options.command)
        self.options = options
        self.sources = sources
        self.records = sources.records
        programs = runner.build_program("stream_load"), runner.build_generator()
        if programs[0] is None or not programs[1].in_c:
            raise SystemExit("streams: needs a C compiler")
        self.stream_load, self.mqtt_load = programs[0], Path(programs[1].command[0])
        self.peers = stream_peers.installed() if {"stream-append", "stream-group"} & set(options.scenarios) else []

    def run(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if name == "bystanders-of-readers":
            yield OURS, self.bystanders()
        elif name == "append-cost":
            yield OURS, self.append_cost()
        elif name == "stream-append":
            yield from self.append()
        elif name == "stream-group":
            yield from self.group()
        else:
            yield OURS, self.catch_up(name)

    def catch_up(self, name: str) -> dict[str, Any]:
        with Broker(self.command, self.sources.filled(1), sealed=name == "catch-up-sealed") as broker:
            if name == "catch-up-v5":
                arguments = ["--version", "5", "--filter", "$stream/history", "--start", "earliest"]
            else:
                arguments = ["--filter", "$replay/earliest/history", "--qos", str(int(name == "catch-up-qos1"))]
            return self.read(broker, arguments)

    def read(self, broker: Server, arguments: list[str]) -> dict[str, Any]:
        before = broker.cpu_seconds()
        found = load(self.stream_load, ["read", "--port", str(broker.port), "--count", str(self.records), *arguments])
        time.sleep(stream_peers.REST_SECONDS)
        used = broker.cpu_seconds() - before
        return {**found, **rates(self.records, found["seconds"], used)}

    def bystanders(self) -> dict[str, Any]:
        source = self.sources.filled(1)
        found: dict[str, list[dict[str, Any]]] = {"quiet": [], "control": [], "loaded": []}
        with Broker(self.command, source, pinned=True) as ours, Broker(self.command, source, pinned=True) as other:
            for _ in range(PARTS):
                found["quiet"].append(self.pairs(ours))
                for name, target in (("control", other), ("loaded", ours)):
                    with self.reading(target, found[name]):
                        found[name].append(self.pairs(ours))
        figures: dict[str, Any] = {"ok": all(run.get("ok", True) for runs in found.values() for run in runs)}
        for name, runs in found.items():
            latencies = [run["latency_us"] for run in runs if "latency_us" in run]
            for key in ("p50", "p99"):
                figures[f"{name}_{key}_ms"] = round(statistics.median(row[key] for row in latencies) / 1000, 3)
            speeds = [run["mb_per_s"] for run in runs if "latency_us" not in run]
            if speeds:
                figures[f"{name}_mb_per_s"] = statistics.median(speeds)
        figures["loaded_to_quiet"] = round(figures["loaded_p99_ms"] / figures["quiet_p99_ms"], 2)
        figures["loaded_to_control"] = round(figures["loaded_p99_ms"] / figures["control_p99_ms"], 2)
        return figures

    def pairs(self, broker: Server) -> dict[str, Any]:
        """Live messages of other clients."""
        seconds = str(self.options.seconds / PARTS)
        return load(self.mqtt_load, ["--port", str(broker.port), *PAIRS, "--duration", seconds], cpu=1)

    @contextmanager
    def reading(self, broker: Server, runs: list[dict[str, Any]]) -> Iterator[None]:
        """Readers that catch up, each from another offset, for longer than `pairs` takes."""
        seconds, count = self.options.seconds / PARTS, self.options.readers
        begin = min(seconds, 1.0)
        arguments = ["--port", str(broker.port), "--clients", str(count), "--seconds", str(seconds + 2 * begin), "--idle"]
        arguments += ["--version", "5", "--filter", "$stream/history", "--spread", str(self.records)]
        process = subprocess.Popen([*pin(1), str(self.stream_load), "drain", *arguments], stdout=subprocess.PIPE)
        time.sleep(begin)
        yield
        output, _ = process.communicate()
        runs.append(json.loads(output))

    def append_cost(self) -> dict[str, Any]:
        """CPU µs per message of pairs, stored and not, on otherwise equal brokers."""
        took: dict[str, list[float]] = {"load/#": [], "elsewhere/#": []}
        for _ in range(EACH):
            for filters, values in took.items():
                with Broker(self.command, filters=filters, pinned=True) as broker:
                    pids = ",".join(map(str, runner.descendants(broker.process.pid)))
                    arguments = ["--port", str(broker.port), "--publishers", "10", "--subscribers", "10", "--qos", "0"]
                    arguments += ["--size", str(SIZE), "--broker-pid", pids, "--rest", "1"]
                    arguments += ["--duration", str(self.options.seconds / 5)]
                    values.append(load(self.mqtt_load, arguments, cpu=1)["cpu_us_per_delivered"])
        stored, not_stored = (statistics.median(values) for values in took.values())
        return {
            "ok": True, "stored_us": round(stored, 3), "not_stored_us": round(not_stored, 3),
            "added_us": round(stored - not_stored, 3),
        }  # fmt: skip

    def append(self) -> Iterator[tuple[str, dict[str, Any]]]:
        payload = b"%0*d" % (SIZE, 1)
        count = self.records // BATCH * BATCH
        with Broker(self.command) as broker:
            yield OURS, {"ok": True, **rates(count, *stream_peers.append(broker, count, payload))}
        count = self.peer_records
        for make in self.peers:
            with make() as peer:
                yield peer.name, {"ok": True, **rates(count, *stream_peers.append(peer, count, payload))}

    def group(self) -> Iterator[tuple[str, dict[str, Any]]]:
        with Broker(self.command, self.sources.filled(PARTITIONS), partitions=PARTITIONS) as broker:
            arguments = ["--clients", str(stream_peers.MEMBERS), "--version", "5", "--qos", "1"]
            arguments += ["--filter", "$share/bench/$stream/history", "--start", "earliest"]
            yield OURS, self.read(broker, arguments)
        count = self.peer_records
        for make in self.peers:
            with make() as peer:
                if isinstance(peer, stream_peers.Peer) and peer.has_groups:
                    stream_peers.append(peer, count, b"%0*d" % (SIZE, 1))
                    yield peer.name, {"ok": True, **rates(count, *stream_peers.read_group(peer, count))}
                else:
                    yield peer.name, {"ok": False, "error": "not offered"}

    @property
    def peer_records(self) -> int:
        """Fewer than of this broker: RabbitMQ would take minutes."""
        return max(self.records // 5 // BATCH * BATCH, BATCH)


SCENARIOS = (
    "catch-up-active", "catch-up-v5", "catch-up-qos1", "catch-up-sealed", "bystanders-of-readers", "append-cost",
    "stream-append", "stream-group",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="streams.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6.0, help="of live messages, alone and beside readers")
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--command", default=os.environ.get("MQTTBROKER") or f"{sys.executable} -P -m mqttbroker")
    options = parser.parse_args()
    if unknown := set(options.scenarios).difference(SCENARIOS):
        parser.error(f"unknown scenarios {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    with tempfile.TemporaryDirectory(prefix="bench-streams-") as directory:
        scenarios = Scenarios(options, Sources(Path(directory), options.records))
        for number in range(options.rounds):
            for name in options.scenarios:
                for broker, found in scenarios.run(name):
                    run = {"scenario_name": name, "broker": broker, "round": number + 1, **found}
                    print(json.dumps(run), flush=True)


if __name__ == "__main__":
    main()
