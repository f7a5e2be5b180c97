"""``make chaos-spark``: kills publishers, broker and driver while readings go to a table, then checks the table. In the modes
``cluster`` and ``cluster-kafka`` nodes and Kafka brokers of a cluster are killed in the place of a broker.

The seed decides the kills, as far as Spark's timing allows.  Every wait polls files and has a limit.  Exit status 1 if
there are findings.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

from bridge_spark.source.storage import Manifest
from chaos_spark.actors import Actor, PublisherLives
from chaos_spark.defects import BROKER, DEFECTS
from chaos_spark.driver import ALL, END_SECONDS, EXECUTOR, PATIENCE, STARTING, Death, Driver, deaths, told
from chaos_spark.jobs import IngestJob, Job, KafkaSourceJob
from chaos_spark.services import STREAM, Cluster, Service, SingleBroker
from chaos_spark.state import FORMATS, StateRun
from chaos_spark.verdict import (
    PROCESSES,
    REFUSED,
    Findings,
    Glimpses,
    Ranges,
    judge,
)
from mqttbroker import build_kind

TRIES = 4  # consecutive starts of a driver that may end because the broker was down for too long
TAKEN = re.compile(r"partition (\d+): retention has removed the offsets (\d+) to (\d+)")
SETTLED = 2.0  # seconds without a change before the log counts as settled
OVERTAKINGS = 3
OVERTAKEN = 500  # offsets that retention removes before the reader has read them
SEGMENTS: dict[str, dict[str, Any]] = {
    "plain": {"segment_bytes": "1MiB", "seal": False},
    "retention": {"segment_bytes": "64KiB", "seal": False, "retention_bytes": "3MiB"},
    "sealing": {"segment_bytes": "128KiB", "seal": True},
}
CLUSTER, CLUSTER_KAFKA = "cluster", "cluster-kafka"  # read by format("mqtt"), and by Spark's own Kafka source
CLUSTER_MODES = (CLUSTER, CLUSTER_KAFKA)
HELD_BACK = {"retention": 5_000}  # lag in offsets at which publishers pause
HELD_BACK_ELSE = 200_000
RATE, CLUSTER_RATE = 800.0, 150.0  # readings per second
PUBLISHER_LIFE, CLUSTER_PUBLISHER_LIFE = 5.0, 20.0  # mean seconds


class Plan(NamedTuple):
    """The size of a run.

    ``kills``: of each kind, at least.  ``rate``: readings per second of all publishers.  ``publisher_life`` and
    ``broker_life``: mean seconds, of a cluster those between two kills.  ``overtaken``: how often retention overtakes the reader, in mode "retention".
    """

    seed: str
    mode: str
    source: str
    kills: int
    publishers: int
    rate: float
    publisher_life: float
    broker_life: float
    overtaken: int = 0


class Programs(NamedTuple):
    """Python's arguments for each program; a defect replaces one."""

    broker: tuple[str, ...] = ("-m", "mqttbroker")
    publisher: tuple[str, ...] = ("-m", "chaos_spark.publisher")
    driver: tuple[str, ...] = ("-m", "mqttbroker")


def parts(plan: Plan, directory: Path, programs: Programs, findings: Findings) -> tuple[Service, Job]:
    """The service that stores the stream, and the job that reads it."""
    if plan.mode not in CLUSTER_MODES:
        broker = SingleBroker(SEGMENTS[plan.mode], plan.source, programs.broker, plan.seed, plan.broker_life, plan.kills, findings)
        return broker, IngestJob(directory, programs.driver)
    cluster = Cluster(directory, plan.seed, plan.broker_life, plan.kills, findings)
    if plan.mode == CLUSTER:
        return cluster, IngestJob(directory, programs.driver, executors=True)
    return cluster, KafkaSourceJob(directory, cluster.nodes.id, STREAM)


class Run:
    """One run of a plan in ``directory``."""

    def __init__(self, plan: Plan, directory: Path, programs: Programs = Programs()) -> None:
        self.plan = plan
        self.directory = directory
        self.findings = findings = Findings()
        self.counts: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()  # of drivers, by the way they read the stream
        self.random = Random(f"{plan.seed}:run")
        self.service, self.job = parts(plan, directory, programs, findings)
        self.files = self.job.files
        self.driver = Driver(self.files, directory / "driver.log", self.job.program)
        self.glimpses = Glimpses(findings, self.job.rows)
        self.program = programs.publisher
        self.publishers: list[PublisherLives] = []
        self.lost: Ranges = []
        self.over = threading.Event()
        self.served = ""  # the summary of the service
        self.holding: bool | None = None  # whether publishers pause; None: depends on the lag

    def go(self) -> None:
        """Run to the end; the verdict is in ``findings``."""
        plan = self.plan
        self.service.start()
        for number in range(plan.publishers):
            self.publishers.append(PublisherLives(
                f"sensor-{number}", self.service.ports, self.directory, 4 + number % 2, plan.rate / plan.publishers,
                plan.seed, plan.publisher_life, -(-plan.kills // plan.publishers), self.findings, self.program,
            ))  # fmt: skip
            self.publishers[-1].launch()
        for actor in self._actors():
            actor.start()
        pacing = threading.Thread(target=self._pace, daemon=True)
        pacing.start()
        every = plan.kills // (plan.overtaken + 1) or 1
        for number, death in enumerate(deaths(plan.seed, plan.kills, self.job.victims), 1):
            self._live(death, self._config())
            if not all(actor.is_alive() for actor in self._actors()):
                return
            if number % every == 0 and self.counts["overtaken"] < plan.overtaken:
                self._overtake()
        self._finish(pacing)
        self._judge()

    def _actors(self) -> list[Actor]:
        return [*self.publishers, self.service.lives]

    # --- the driver -----------------------------------------------------------------------------------------------

    def _config(self, strict: bool = True) -> Path:
        way, source = self.service.source(self.random)
        self.starts[way] += 1
        config = self.directory / "ingest.toml"
        config.write_text(self.job.settings(STREAM, source, strict))
        return config

    def _live(self, death: Death, config: Path) -> None:
        """One life of the driver."""
        for _ in range(TRIES):
            self.driver.start(config)
            self.findings.checked[PROCESSES] += 1
            if self.driver.wait_for(death):
                break
            if self.driver.ended is None:
                self.counts["late"] += 1
                break
            if not self._gave_up():
                return
        before = self.files.state()
        if self.driver.ended is None:
            if death.victim == EXECUTOR:
                self.driver.kill_executor()
                self._go_on()
            else:
                self.driver.kill(death.victim)
            self.counts["kills"] += 1
            self.counts[f"of {death.victim}"] += 1
            self.counts[STARTING if death.moment == STARTING else before] += 1
        self.glimpses.look()

    def _go_on(self) -> None:
        """Check that the driver, whose executor was killed, commits another batch; then end it."""
        deadline = time.monotonic() + PATIENCE
        batch = self.files.planned()
        while self.driver.ended is None and self.files.committed() <= batch and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.driver.ended is None:
            if self.files.committed() <= batch:
                self.findings.fault(PROCESSES, f"the driver committed nothing in {PATIENCE} s after its executor was killed")
            self.driver.kill(ALL)
        else:
            self._gave_up()

    def _gave_up(self) -> bool:
        """Whether the driver has ended because the broker was down for too long."""
        status, words = self.driver.wait(1.0), self.driver.last_words()
        if status == 1 and self.service.away.search(words):
            self.counts["gave up"] += 1
            return True
        self.findings.fault(PROCESSES, f"the driver ended by itself with {status}: {words}")
        return False

    def _until(self, config: Path, done: Any) -> bool:
        """Run the driver until ``done()``; start it again if it gives up."""
        deadline = time.monotonic() + PATIENCE
        for _ in range(TRIES):
            self.driver.start(config)
            self.findings.checked[PROCESSES] += 1
            while self.driver.ended is None and time.monotonic() < deadline:
                if done():
                    return True
                time.sleep(0.05)
            if self.driver.ended is None:
                self.findings.fault(PROCESSES, f"the driver had not caught up after {PATIENCE} s: {self._behind()}")
                return False
            if not self._gave_up():
                return False
        self.findings.fault(PROCESSES, f"the driver gave up {TRIES} times")
        return False

    # --- retention ------------------------------------------------------------------------------------------------

    def _pace(self) -> None:
        """Pause publishers while the reader is far behind, unless ``holding`` is set."""
        hold = self.directory / "hold"
        limit = HELD_BACK.get(self.plan.mode, HELD_BACK_ELSE)
        while not self.over.wait(0.1):
            behind = sum(self._behind().values())
            if self.holding is False or self.holding is None and behind < limit // 2:
                hold.unlink(missing_ok=True)
            elif self.holding or behind > limit:
                hold.touch()

    def _behind(self) -> dict[int, int]:
        done = self.files.done()
        manifest = self.service.manifest()
        return {number: state.high_watermark - done.get(number, 0) for number, state in manifest.items()}

    def _starts(self) -> dict[int, int]:
        return {number: state.log_start for number, state in self.service.manifest().items()}

    def _overtake(self) -> None:
        """Let retention remove unread offsets: a strict driver refuses to go on, a lenient one continues."""
        files = self.files
        batch = files.planned()
        there = files.offsets(batch) if files.published(batch) else files.done()
        self.holding = False
        deadline = time.monotonic() + PATIENCE
        while sum(max(0, start - there.get(number, 0)) for number, start in self._starts().items()) < OVERTAKEN:
            if time.monotonic() > deadline:
                self.findings.fault(PROCESSES, f"retention took nothing of {self._behind()} in {PATIENCE} s")
                break
            time.sleep(0.1)
        self.holding = True
        before: Manifest | None = None
        while before != (now := self.service.manifest()):
            before = now
            time.sleep(SETTLED)
        starts = self._starts()
        self._refuse(starts, there)
        if self._until(self._config(strict=False), lambda: files.committed() > batch):
            self.driver.kill(ALL)
        if starts != self._starts():
            self.findings.fault(PROCESSES, "retention went on although nothing was published")
        self.lost += [(number, there.get(number, 0), start) for number, start in starts.items() if there.get(number, 0) < start]
        self.glimpses.look()
        self.holding = None
        self.counts["overtaken"] += 1

    def _refuse(self, starts: dict[int, int], there: dict[int, int]) -> None:
        """Check that a strict driver names the lost offsets and leaves the table as it is.  Offsets before ``there``
        are in the table and not lost, whether or not the checkpoint has them."""
        planned = self.files.offsets(self.files.planned())
        expected = {}
        for number, start in starts.items():
            first = there.get(number, 0)
            end = start if planned == there else min(start, planned.get(number, 0))
            if first < end:
                expected[number] = (first, end - 1)
        config = self._config()
        for _ in range(TRIES):
            self.driver.start(config)
            if (status := self.driver.wait(PATIENCE)) is None:
                self.driver.kill(ALL)
            words = self.driver.last_words()
            if not self.service.away.search(words):
                break
            self.counts["gave up"] += 1
        named = {int(number): (int(first), int(last)) for number, first, last in TAKEN.findall(words)}
        self.findings.checked[REFUSED] += 1
        if status != 1 or named != expected:
            self.findings.fault(REFUSED, f"ended with {status}: {words}, and {expected} was taken")

    # --- the end --------------------------------------------------------------------------------------------------

    def _finish(self, pacing: threading.Thread) -> None:
        for actor in self.publishers:
            actor.enough.set()
        config = self._config()
        caught_up = self._until(config, lambda: not any(actor.is_alive() for actor in self.publishers))
        self.service.lives.enough.set()
        self.service.lives.join(PATIENCE)
        self.service.wait_for_copies(sum(actor.last for actor in self.publishers))
        self.over.set()
        pacing.join()
        if caught_up and self.driver.ended is not None:
            caught_up = self._until(config, lambda: True)
        deadline = time.monotonic() + PATIENCE
        while caught_up and any(self._behind().values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if any(self._behind().values()):
            self.findings.fault(PROCESSES, f"the driver has not caught up: {self._behind()} offsets behind")
        if caught_up and (status := self.driver.stop()) != 0:
            self.findings.fault(PROCESSES, f"the driver ended with {status} after SIGTERM: {self.driver.last_words()}")
        if left := self.driver.left_behind(END_SECONDS):
            self.findings.fault(PROCESSES, f"{len(left)} processes of drivers that were killed still run")

    def _judge(self) -> None:
        self.counts["batches"] = self.files.committed() + 1
        self.driver.close()
        self.glimpses.look()
        rows, dead = self.job.rows(), self.job.dead_letters()
        last = {actor.name: actor.last for actor in self.publishers}
        judge(self.findings, rows, dead, last, self.service.places(), self.lost)
        self.job.judge_readers(self.findings, rows)
        self.served = self.service.summary()

    def close(self) -> None:
        self.over.set()
        self.driver.close()
        for publisher in self.publishers:
            publisher.close()
        self.service.close()

    def summary(self, seconds: float) -> str:
        counts, plan = self.counts, self.plan
        publishers: Counter[str] = sum((actor.counts for actor in self.publishers), Counter())
        return (
            f"chaos-spark: seed {plan.seed}, {plan.mode}, {build_kind()} build, {seconds:.0f} s\n"
            f"  {told(counts)}; {counts['of Python']} of Python alone, {counts['of JVM']} of the JVM alone, "
            f"{counts[f'of {EXECUTOR}']} of the executor's Python alone; "
            f"{counts['gave up']} times it gave up on a broker that was away; "
            f"starts by {', '.join(f'{way}: {count}' for way, count in sorted(self.starts.items()))}\n"
            f"  {self.served}\n"
            f"  publishers: {publishers['kills']} kills, with {publishers['published']} PUBLISH and "
            f"{publishers['released']} PUBREL to send again\n"
            f"  readings: {sum(actor.last for actor in self.publishers):,} in {counts['batches']} batches; "
            f"{counts['overtaken']} times retention was faster and took {sum(end - first for _, first, end in self.lost):,}"
            f"\n\n{self.findings.table()}"
        )


Kind = TypeVar("Kind", Run, StateRun)


def chaos(make: Callable[[Path], Kind]) -> tuple[Kind, str]:
    """Run in a temporary directory; returns the judged run and its summary."""
    directory = Path(tempfile.mkdtemp(prefix="chaos-spark-"))
    begin = time.monotonic()
    run = make(directory)
    try:
        run.go()
    finally:
        run.close()
        shutil.rmtree(directory, ignore_errors=True)
    return run, run.summary(time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos-spark", description="Kill publishers, broker and driver, and check the table.")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--modes", default="plain", help=f"of {','.join([*SEGMENTS, *FORMATS, *CLUSTER_MODES])}")
    parser.add_argument("--source", default="both", choices=("both", "path", "url"))
    parser.add_argument(
        "--kills",
        type=int,
        default=20,
        help="of publishers, broker and driver each, at least; of a cluster of nodes and of Kafka brokers each",
    )
    parser.add_argument("--rate", type=float, help=f"readings per second; {RATE:.0f} without it, {CLUSTER_RATE:.0f} of a cluster")
    parser.add_argument("--defect", choices=sorted(DEFECTS), help="to see it found")
    options = parser.parse_args()
    modes = options.modes.split(",")
    programs = Programs()
    if options.defect:
        if DEFECTS[options.defect][0] == BROKER and {*modes} & {*CLUSTER_MODES}:
            parser.error(f"{options.defect} is a defect of a single broker")
        programs = programs._replace(**{DEFECTS[options.defect][0]: ("-m", "chaos_spark.defects", options.defect)})
    found = False
    for mode in modes:
        run: Run | StateRun
        if mode in FORMATS:
            run, summary = chaos(partial(StateRun, options.seed, mode, options.kills, program=programs.driver))
        else:
            overtaken = OVERTAKINGS if mode == "retention" else 0
            clustered = mode in CLUSTER_MODES
            rate = options.rate or (CLUSTER_RATE if clustered else RATE)
            life = CLUSTER_PUBLISHER_LIFE if clustered else PUBLISHER_LIFE
            plan = Plan(options.seed, mode, options.source, options.kills, 4, rate, life, 8.0, overtaken)
            run, summary = chaos(partial(Run, plan, programs=programs))
        text = run.findings.text()
        found = found or bool(text)
        print(f"{summary}\n\n{text or 'nothing found'}\n", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
