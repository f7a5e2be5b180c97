"""Runs brokers and the load generator.

One broker runs at a time, started anew for every run. Within a scenario the brokers alternate, so that other load on
the machine affects all of them. A run in which a message was lost, doubled, damaged or reordered has failed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scenarios import ELSEWHERE, Scenario

HERE = Path(__file__).resolve().parent
OURS = "mqttbroker"
OURS_OFF = "durability off"
OURS_WORKERS = "with workers"
START_SECONDS = 30.0
STOP_SECONDS = 15.0
RUN_SECONDS = 90.0
"""How long a run may take beyond its duration."""
RATE_UNKNOWN = 20_000.0
"""Messages per second of a half-load scenario when the full load was not measured."""
USER = "bench"

Run = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A broker: ``script PORT`` runs it in the foreground; exit status 3 means that it lacks the scenario's feature."""

    name: str
    script: Path
    settings: dict[str, str] = field(default_factory=dict)


@dataclass
class Generator:
    """The load generator, and in C the library that counts a broker's syncs."""

    command: list[str]
    in_c: bool
    sync_count: Path | None = None


def is_older(built: Path, sources: list[Path]) -> bool:
    return not built.exists() or built.stat().st_mtime < max(path.stat().st_mtime for path in sources)


def build_generator() -> Generator:
    """mqtt_load, compiled if its sources changed.

    Without a C compiler py_load.py, which is slower and has fewer options.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        print("bench: no C compiler: py_load.py makes the load and bounds the rates", file=sys.stderr)
        return Generator([sys.executable, str(HERE / "py_load.py")], False)
    program = HERE / "mqtt_load"
    sources = [HERE / name for name in ("mqtt_load.c", "channel.c")]
    if is_older(program, [*sources, HERE / "channel.h"]):
        made = program.with_name(f"mqtt_load-{os.getpid()}.o")
        command = [compiler, "-O2", "-std=c11", "-o", str(made), *map(str, sources)]
        if subprocess.run([*command, "-lssl", "-lcrypto"], capture_output=True).returncode:
            print("bench: no OpenSSL headers (libssl-dev): TLS is not measured", file=sys.stderr)
            subprocess.run([*command, "-DNO_TLS"], check=True)
        made.replace(program)
    return Generator([str(program)], True, build_sync_count(compiler))


def build_program(name: str) -> Path | None:
    """The program of one source file, compiled if that changed; None without a C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    source, program = HERE / f"{name}.c", HERE / name
    if compiler is not None and is_older(program, [source]):
        made = program.with_name(f"{name}-{os.getpid()}.o")
        subprocess.run([compiler, "-O2", "-std=c11", "-o", str(made), str(source)], check=True)
        made.replace(program)
    return None if compiler is None else program


def build_sync_count(compiler: str) -> Path | None:
    """sync_count.so, compiled if its source changed; None where it cannot be compiled."""
    source, library = HERE / "sync_count.c", HERE / "sync_count.so"
    if is_older(library, [source]):
        made = library.with_name(f"sync_count-{os.getpid()}.so")
        command = [compiler, "-O2", "-std=c11", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"]
        if subprocess.run(command, capture_output=True).returncode:
            print("bench: syncs are not counted: sync_count.c needs Linux and glibc", file=sys.stderr)
            return None
        made.replace(library)
    return library


# --- the brokers' environment -----------------------------------------------------------------------------------------


def write_passwords(path: Path, users: int = 100) -> None:
    """Write a password file in Mosquitto's format, which all brokers here read."""
    lines = []
    for name in [USER, *(f"device{number}" for number in range(users))]:
        salt = os.urandom(12)
        digest = hashlib.pbkdf2_hmac("sha512", USER.encode(), salt, 101)
        lines.append(f"{name}:$7$101${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}\n")
    path.write_text("".join(lines), encoding="ascii")


ACL = f"""\
topic read public/#

user {USER}
topic readwrite load/#
topic readwrite commands/+/answer

pattern readwrite devices/%c/#
pattern read users/%u/#
"""


def write_certificate(directory: Path) -> bool:
    """Write cert.pem and key.pem; False without trustme."""
    try:
        import trustme
    except ImportError:
        return False
    issued = trustme.CA().issue_cert("127.0.0.1", "localhost")
    issued.private_key_pem.write_to_path(str(directory / "key.pem"))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(directory / "cert.pem"), append=True)
    return True


def fsync_us(directory: Path, rounds: int = 100) -> float:
    """Median time in microseconds to append 4 KiB to a file and sync it."""
    took = []
    with (directory / "fsync").open("wb") as file:
        for _ in range(rounds):
            start = time.perf_counter()
            os.write(file.fileno(), bytes(4096))
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - start)
    return round(statistics.median(took) * 1e6, 1)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def descendants(pid: int) -> list[int]:
    """The process ids of a process and of its live descendants."""
    found = [pid]
    for parent in found:
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found


def cpu_ns(pid: int) -> int:
    """CPU time of a process by the scheduler's clock, whole milliseconds; 0 if it has ended."""
    with suppress(OSError):
        return time.clock_gettime_ns((~pid << 3) | 2) // 1_000_000 * 1_000_000
    return 0


class RunningBroker:
    """A broker's processes, in a directory of their own, until `stop`."""

    def __init__(self, peer: Peer, environment: dict[str, str], directory: Path, cpu: str | None) -> None:
        self.port = free_port()
        self.log = directory / "log"
        pin = [] if cpu is None else ["taskset", "-c", cpu]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*pin, str(peer.script), str(self.port)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **environment, "TMPDIR": str(directory)},
            )  # fmt: skip

    def wait_until_it_listens(self) -> str:
        """Wait until the broker accepts connections; returns an error, or ""."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return ""
            time.sleep(0.02)
        if self.process.returncode == 3:
            return "not offered"
        return f"did not start: {self.log.read_text(errors='replace')[-300:]}"

    def wait_until_it_rests(self, processes: int) -> None:
        """Wait until there are so many processes, and none has used CPU time for a while."""
        deadline = time.monotonic() + START_SECONDS
        used: dict[int, int] | None = None
        while time.monotonic() < deadline:
            before, used = used, {pid: cpu_ns(pid) for pid in descendants(self.process.pid)}
            if used == before and len(used) >= processes:
                return
            time.sleep(0.15)

    def stop(self) -> None:
        processes = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for child in processes[1:]:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)


class Scraper:
    """Requests the metrics every second, as a monitoring system does; a context manager."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        while not self.ended.wait(1):
            with suppress(OSError):
                urllib.request.urlopen(self.url, timeout=5).read()

    def __enter__(self) -> Scraper:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


# --- runs -----------------------------------------------------------------------------------------------------------


class Bench:
    """Runs scenarios against peers and collects mqtt_load's results."""

    def __init__(self, peers: list[Peer], generator: Generator, directory: Path, duration: float, rest: float) -> None:
        self.peers = peers
        self.rest = rest
        self.generator = generator
        self.directory = directory
        self.duration = duration
        self.runs: list[Run] = []
        self.rates: dict[str, float] = {}
        self.cpus = os.cpu_count() or 1
        self.workers = max(1, self.cpus - 1)
        self.pin = self.cpus > 1 and shutil.which("taskset") is not None
        write_passwords(directory / "passwords")
        os.chmod(directory / "passwords", 0o600)
        (directory / "acl").write_text(ACL, encoding="ascii")
        os.chmod(directory / "acl", 0o600)
        self.has_certificate = write_certificate(directory)

    def possible(self, scenario: Scenario) -> bool:
        return (self.generator.in_c or not scenario.needs_c) and (scenario.transport != "tls" or self.has_certificate)

    def participants(self, scenario: Scenario) -> list[Peer]:
        """The peers that have what the scenario needs. If it is ``durable``, also this broker without durability; if it is
        about ``workers``, also this broker with them, and no Mosquitto, which has one thread."""
        found = [peer for peer in self.peers if peer.name == OURS or scenario.guarded or not scenario.stream]
        ours = next((peer for peer in self.peers if peer.name == OURS), None)
        if scenario.durable and ours is not None:
            found.insert(1, Peer(OURS_OFF, ours.script, {**ours.settings, "BENCH_DURABILITY": "off"}))
        if scenario.workers and ours is not None:
            found = [peer for peer in found if peer.name != "mosquitto"]
            found.insert(1, Peer(OURS_WORKERS, ours.script, {**ours.settings, "BENCH_WORKERS": str(self.workers)}))
        return found

    def round(self, scenarios: list[Scenario], number: int, report: Callable[[Run], None]) -> None:
        """Measure each scenario with each of its brokers, in reverse order in every second round: a place in the order is worth up to 13 %."""
        for scenario in filter(self.possible, scenarios):
            for peer in list(self.participants(scenario))[:: -1 if number % 2 else 1]:
                run = {"scenario_name": scenario.name, "broker": peer.name, "round": number, **self.run(scenario, peer)}
                self.runs.append(run)
                report(run)

    def run(self, scenario: Scenario, peer: Peer) -> Run:
        """Start a broker, load it, stop it."""
        http_port = free_port() if scenario.guarded else 0
        environment = self.environment(scenario, peer, http_port)
        pinned = self.pin and not scenario.durable
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            syncs = Path(name) / "syncs"
            if scenario.durable and self.generator.sync_count is not None:
                environment |= {"LD_PRELOAD": str(self.generator.sync_count), "SYNC_COUNT": str(syncs)}
            broker = RunningBroker(peer, environment, Path(name), self.cpus_of_broker(scenario) if pinned else None)
            try:
                error = broker.wait_until_it_listens()
                if error:
                    return {"error": error, "ok": False}
                if scenario.workers:
                    broker.wait_until_it_rests(1 + int(environment["BENCH_WORKERS"]) if peer.name == OURS_WORKERS else 1)
                if http_port and peer.name == OURS:
                    with Scraper(http_port):
                        run = self.load(scenario, broker, syncs)
                else:
                    run = self.load(scenario, broker, syncs)
                if broker.process.poll() is not None:
                    run.update(error=f"the broker ended with {broker.process.returncode}", ok=False)
                return run
            finally:
                broker.stop()

    def cpus_of_broker(self, scenario: Scenario) -> str:
        """The CPUs that a broker is tied to: the first; all but the generator's if the scenario is about workers."""
        return f"0-{self.cpus - 2}" if scenario.workers else "0"

    def cpu_of_generator(self, scenario: Scenario) -> str:
        return str(self.cpus - 1) if scenario.workers else "1"

    def environment(self, scenario: Scenario, peer: Peer, http_port: int) -> dict[str, str]:
        """The start script's variables; all are always set, to "" if they do not apply."""
        guarded, tls = scenario.guarded, scenario.transport == "tls"
        return {
            "BENCH_TRANSPORT": scenario.transport,
            "BENCH_CERT": str(self.directory / "cert.pem") if tls else "",
            "BENCH_KEY": str(self.directory / "key.pem") if tls else "",
            "BENCH_PASSWORDS": str(self.directory / "passwords") if guarded else "",
            "BENCH_ACL": str(self.directory / "acl") if guarded else "",
            "BENCH_STREAM": scenario.stream or (ELSEWHERE if guarded else ""),
            "BENCH_HTTP_PORT": str(http_port) if http_port else "off",
            "BENCH_DURABILITY": "commit",
            "BENCH_WORKERS": "0" if peer.name == OURS else str(self.workers) if scenario.workers else "",
            **peer.settings,
        }

    def load(self, scenario: Scenario, broker: RunningBroker, syncs: Path) -> Run:
        arguments = shlex.split(scenario.arguments.format(rate=self.rate(scenario)))
        if scenario.timed:
            arguments += ["--duration", str(self.duration * scenario.stretch)]
        if scenario.guarded:
            arguments += ["--username", USER, "--password", USER]
        if scenario.durable:
            arguments += ["--rest", str(self.rest)]
        if syncs.exists():
            arguments += ["--sync-count", str(syncs)]
        pinned = self.pin and not scenario.durable
        pin = ["taskset", "-c", self.cpu_of_generator(scenario)] if pinned else []
        command = [*pin, *self.generator.command, "--port", str(broker.port)]
        command += ["--broker-pid", ",".join(map(str, descendants(broker.process.pid)))]
        command += ["--mqtt-version", str(scenario.mqtt), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.duration * scenario.stretch + RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return {"error": "took too long", "ok": False}
        try:
            run: Run = json.loads(done.stdout)
        except ValueError:
            return {"error": done.stderr.strip()[-200:] or "the load generator printed nothing", "ok": False}
        return run

    def rate(self, scenario: Scenario) -> float:
        """Messages per second and publisher at half load; the same in every round."""
        if not scenario.half_of:
            return 0
        if scenario.name not in self.rates:
            full = [run["delivered_per_s"] for run in self.runs if run["scenario_name"] == scenario.half_of and run["ok"]]
            self.rates[scenario.name] = round((min(full) / 2 if full else RATE_UNKNOWN) / 10, 1)
        return self.rates[scenario.name]
