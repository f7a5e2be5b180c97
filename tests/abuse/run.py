"""``make abuse``: each kind of abuse against a broker of its own, beside well-behaved clients.

Ends with a status other than 0 if a broker ended, an acknowledged message was lost, memory grew beyond its limits, or
the well-behaved clients were not served. Latencies are reported, not judged, unless they are in seconds. The seed decides
what is random in the packets.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.paths import ROOT, TESTS

import abuse.connections
import abuse.messages
import abuse.subscriptions  # noqa: F401
from abuse.kinds import KINDS, Kind
from abuse.target import GROWTH, LIMITS, MIB, Target, raise_file_limit, start
from mqttbroker import build_kind

DOCUMENT = ROOT / "docs" / "abuse.md"
STARVED_P50 = 2000.0  # milliseconds
STARVED_MAX = 20_000.0
DEFECT = re.compile(r"event=defect|Traceback|Fatal error|never retrieved")
SETTLING = 1.0  # seconds after the abuse until memory is read

INTRODUCTION = """# Abuse

The answers of a broker to each kind of abuse, and the latencies of well-behaved clients meanwhile. `make abuse` runs all
kinds, each for {seconds:g} s against a broker of its own, and writes this page. It fails if a broker ends, an
acknowledged message is lost, memory grows by more than the limits allow, or the well-behaved clients are not served.

The clients are four pairs at QoS 1, 50 messages per second each, to persistent sessions. p50 and p99 are their
latencies in milliseconds, from PUBLISH to delivery, before the abuse and during it. Abuse, clients and broker share the
machine, so a part of each ratio is competition for its processors{load}. Memory is resident memory in MiB: before the
abuse, at its highest, and a second after it.

The limits are lower than the defaults, so that they are reached in seconds: {limits}. Together they allow a growth of
{growth} MiB; a stream that is written without a pause may take more, because a commit holds its messages.

Machine: {machine}; broker: {build}; seed {seed}.
"""


@dataclass
class Result:
    """One run of a kind; times are in milliseconds, memory is in bytes."""

    kind: Kind
    quiet: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    before: int = 0
    peak: int = 0
    after: int = 0
    did: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def row(self) -> str:
        quiet, during = percentile(self.quiet, 0.99), percentile(self.during, 0.99)
        latencies = [
            f"{percentile(self.quiet, 0.5):.1f} / {percentile(self.during, 0.5):.1f}",
            f"{quiet:.1f} / {during:.1f}",
            f"{during / quiet:.1f}" if quiet else "",
        ]
        memory = " / ".join(f"{size / MIB:.0f}" for size in (self.before, self.peak, self.after))
        what = self.kind.what.replace("|", "\\|")
        return f"| {self.kind.name} | {what} | {self.did} | {' | '.join(latencies)} | {memory} |"


HEAD = (
    "| kind | the client sends | the broker's answers | p50 before / during | p99 before / during | ratio of p99 "
    "| MiB before / highest / after |\n| --- | --- | --- | ---: | ---: | ---: | ---: |"
)


def percentile(values: list[float], part: float) -> float:
    """0 without values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] if values else 0.0


class Bystanders:
    """The process of the well-behaved clients."""

    def __init__(self, port: int) -> None:
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "abuse.bystanders", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", "the well-behaved clients cannot connect"

    def period(self, name: str) -> None:
        self._tell(f"period {name}")

    def end(self) -> dict[str, Any]:
        """Their figures; see `abuse.bystanders`."""
        self._tell("end")
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.process.wait(30)
        return found

    def _tell(self, command: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()


class Memory(threading.Thread):
    """The highest resident memory of a broker, until `stop`."""

    def __init__(self, target: Target) -> None:
        super().__init__(daemon=True)
        self.target = target
        self.highest = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self.highest = max(self.highest, self.target.resident)

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self.highest


def measure(kind: Kind, target: Target, bystanders: Bystanders, quiet: float, seconds: float) -> Result:
    """Abuse the broker beside clients that are connected."""
    result = Result(kind)
    bystanders.period(f"{kind.name} quiet")
    time.sleep(quiet)
    result.before = target.resident
    memory = Memory(target)
    memory.start()
    bystanders.period(f"{kind.name} during")
    target.until = time.monotonic() + seconds
    try:
        kind.abuse(target)
    except AssertionError as error:
        result.problems.append(str(error))
    except OSError as error:
        target.answered.note(f"gave up: {error}")
    result.did = target.answered.summary()
    bystanders.period(f"{kind.name} after")
    target.stop()
    time.sleep(min(SETTLING, seconds))
    result.peak = memory.stop()
    result.after = target.resident
    if not target.broker.running:
        result.problems.append("the broker ended")
    if result.peak - result.before > kind.growth:
        result.problems.append(f"memory grew by {(result.peak - result.before) >> 20} MiB")
    defects = [line for line in target.broker.lines if DEFECT.search(line)]
    result.problems += defects[:3]
    return result


def judge(results: list[Result], found: dict[str, Any]) -> None:
    """Add the figures of the well-behaved clients."""
    for result in results:
        result.quiet = found["periods"].get(f"{result.kind.name} quiet", [])
        result.during = found["periods"].get(f"{result.kind.name} during", [])
        late = [*result.during, *found["periods"].get(f"{result.kind.name} after", [])]
        if percentile(result.during, 0.5) > STARVED_P50 or max(late, default=0.0) > STARVED_MAX or not late:
            result.problems.append(f"not served: {len(late)} messages, p50 {percentile(late, 0.5):.0f} ms")
    last = results[-1]
    if found["lost"]:
        last.problems.append(f"{found['lost']} acknowledged messages were lost")
    if found["unacknowledged"]:
        last.problems.append(f"{found['unacknowledged']} messages were not acknowledged")
    last.problems += found["errors"]


def run(kind: Kind, seed: str, quiet: float, seconds: float) -> Result:
    """One kind against a broker of its own."""
    result = Result(kind)
    with tempfile.TemporaryDirectory(prefix="mqttbroker-abuse-") as directory:
        target = start(Path(directory), f"{seed} {kind.name}", kind.limits, kind.program)
        bystanders: Bystanders | None = None
        try:
            bystanders = Bystanders(target.ports.tcp)
            bystanders.period("warm-up")
            time.sleep(0.3)
            result = measure(kind, target, bystanders, quiet, seconds)
            judge([result], bystanders.end())
        finally:
            if bystanders is not None:
                bystanders.close()
            try:
                target.close()
            except AssertionError as error:  # it had ended by itself, or logged a traceback
                result.problems.append(str(error)[-2000:])
    return result


def wrapped(document: str) -> str:
    """The paragraphs of a page with lines of at most 120 characters."""
    return "\n\n".join(textwrap.fill(paragraph, 120, break_on_hyphens=False) for paragraph in document.split("\n\n"))


def machine() -> str:
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{os.cpu_count()} × {model}, {system}, Python {platform.python_version()}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make abuse", description="Abuse a broker beside well-behaved clients.")
    parser.add_argument("names", nargs="*", metavar="KIND", help="all kinds without any: " + ", ".join(KINDS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each kind of abuse")
    parser.add_argument("--quiet", type=float, default=1.5, help="seconds of measuring before it")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--document", type=Path, default=None, help="the page to write, if all kinds ran")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in KINDS]
    if unknown:
        parser.error(f"unknown kind {', '.join(unknown)}")
    raise_file_limit()
    results = []
    load = os.getloadavg()[0]
    print(HEAD, flush=True)
    for name in options.names or KINDS:
        result = run(KINDS[name], options.seed, options.quiet, options.seconds)
        results.append(result)
        print(result.row, flush=True)
        for problem in result.problems:
            print(f"PROBLEM {name}: {problem}", flush=True)
    failed = [result.kind.name for result in results if result.problems]
    if options.document is not None and not options.names:
        limits = ", ".join(f"`{name}` {value}" for name, value in LIMITS.items())
        head = INTRODUCTION.format(
            seconds=options.seconds,
            load=f" (and with other programs: the load was {load:.0f})" if load > 3 * (os.cpu_count() or 1) else "",
            limits=limits,
            growth=GROWTH // MIB,
            machine=machine(),
            build=build_kind(),
            seed=options.seed,
        )
        options.document.write_text(f"{wrapped(head)}\n\n{HEAD}\n" + "\n".join(result.row for result in results) + "\n", encoding="utf-8")
    print(f"abuse: {len(results)} kinds, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
