"""``make chaos-spark``: kills publishers, broker and driver while readings go to a table, then checks the table.

The seed decides the kills, as far as Spark's timing allows.  Every wait polls files and has a limit.  Exit status 1 if
there are findings.
"""

from __future__ import annotations

import argparse
import json
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
from typing import Any, NamedTuple, Optional, TypeVar

from support.broker_process import BrokerProcess
from support.class_archive import QUICK_JVM

from bridge_spark.log.segment_names import SEALED_SUFFIX
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.storage import Manifest
from chaos_spark.actors import BrokerLives, PublisherLives
from chaos_spark.defects import DEFECTS
from chaos_spark.driver import (
    ALL,
    END_SECONDS,
    PATIENCE,
    STARTING,
    Death,
    Driver,
    TableFiles,
    deaths,
    environment,
    told,
)
from chaos_spark.outbox import SCHEMA
from chaos_spark.state import FORMATS, StateRun
from chaos_spark.verdict import (
    PROCESSES,
    REFUSED,
    Findings,
    Glimpses,
    Ranges,
    judge,
    judge_readers,
    read_dead_letters,
    read_table,
)
from mqttbroker import build_kind

STREAM = "chaos"
PARTITIONS = 3
RECORD_BYTES = 300  # in the log per reading, at most
AWAY = "cannot be read after"  # the last error of a driver if the broker was down for too long
TRIES = 4  # consecutive starts that may end with that error
TAKEN = re.compile(r"partition (\d+): retention has removed the offsets (\d+) to (\d+)")
SETTLED = 2.0  # seconds without a change before the log counts as settled
OVERTAKINGS = 3
OVERTAKEN = 500  # offsets that retention removes before the reader has read them
SEGMENTS: dict[str, dict[str, Any]] = {
    "plain": {"segment_bytes": "1MiB", "seal": False},
    "retention": {"segment_bytes": "64KiB", "seal": False, "retention_bytes": "3MiB"},
    "sealing": {"segment_bytes": "128KiB", "seal": True},
}
HELD_BACK = {"plain": 200_000, "retention": 5_000, "sealing": 200_000}  # lag in offsets at which publishers pause


class Plan(NamedTuple):
    """The size of a run.

    ``kills``: of each kind, at least.  ``rate``: readings per second of all publishers.  ``publisher_life`` and
    ``broker_life``: mean seconds.  ``overtaken``: how often retention overtakes the reader, in mode "retention".
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


class Run:
    """One run of a plan in ``directory``."""

    def __init__(self, plan: Plan, directory: Path, programs: Programs = Programs()) -> None:
        self.plan = plan
        self.directory = directory
        self.findings = findings = Findings()
        self.counts: Counter[str] = Counter()
        self.random = Random(f"{plan.seed}:run")
        self.broker = BrokerProcess(config={
            "streams": {STREAM: {"filters": ["chaos/#"], "partitions": PARTITIONS, **SEGMENTS[plan.mode]}},
            "sys_interval": "0s",
        }, env=environment(), program=programs.broker)  # fmt: skip
        self.broker_lives = BrokerLives(self.broker, plan.seed, plan.broker_life, plan.kills, findings)
        self.files = TableFiles(directory / "table")
        self.driver = Driver(self.files, directory / "driver.log", programs.driver)
        self.glimpses = Glimpses(findings, self.files.output)
        self.program = programs.publisher
        self.publishers: list[PublisherLives] = []
        self.storage = DirectoryStorage(str(self.broker.data_dir), STREAM)
        self.lost: Ranges = []
        self.over = threading.Event()
        self.holding: Optional[bool] = None  # whether publishers pause; None: depends on the lag

    def go(self) -> None:
        """Run to the end; the verdict is in ``findings``."""
        plan = self.plan
        self.broker.start()
        for number in range(plan.publishers):
            self.publishers.append(PublisherLives(
                f"sensor-{number}", self.broker.port, self.directory, 4 + number % 2, plan.rate / plan.publishers,
                plan.seed, plan.publisher_life, -(-plan.kills // plan.publishers), self.findings, self.program,
            ))  # fmt: skip
            self.publishers[-1].launch()
        for actor in (*self.publishers, self.broker_lives):
            actor.start()
        pacing = threading.Thread(target=self._pace, daemon=True)
        pacing.start()
        every = plan.kills // (plan.overtaken + 1) or 1
        for number, death in enumerate(deaths(plan.seed, plan.kills), 1):
            self._live(death, self._config())
            if not all(actor.is_alive() for actor in (*self.publishers, self.broker_lives)):
                return
            if number % every == 0 and self.counts["overtaken"] < plan.overtaken:
                self._overtake()
        self._finish(pacing)
        self._judge()

    # --- the driver -----------------------------------------------------------------------------------------------

    def _config(self, strict: bool = True) -> Path:
        source = self.plan.source if self.plan.source != "both" else self.random.choice(("path", "url"))
        self.counts[source] += 1
        where = str(self.broker.data_dir) if source == "path" else self.broker.url
        config = self.directory / "ingest.toml"
        config.write_text(
            f"[source]\n{source} = {json.dumps(where)}\n[spark]\nmaster = 'local[2,4]'\n"
            f"[spark.conf]\n'spark.driver.extraJavaOptions' = '{QUICK_JVM}'\n"
            f"[tables.readings]\nstream = '{STREAM}'\nschema = '{SCHEMA}'\noutput = {json.dumps(str(self.files.output))}\n"
            f"columns = ['topic', 'partition', 'offset']\nmax_offsets_per_trigger = 3000\n"
            f"fail_on_data_loss = {json.dumps(strict)}\n"
        )
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
            self.driver.kill(death.victim)
            self.counts["kills"] += 1
            self.counts[f"of {death.victim}"] += 1
            self.counts[STARTING if death.moment == STARTING else before] += 1
        self.glimpses.look()

    def _gave_up(self) -> bool:
        """Whether the driver has ended because the broker was down for too long."""
        status, words = self.driver.wait(1.0), self.driver.last_words()
        if status == 1 and AWAY in words:
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
        limit = HELD_BACK[self.plan.mode]
        while not self.over.wait(0.1):
            behind = sum(self._behind().values())
            if self.holding is False or self.holding is None and behind < limit // 2:
                hold.unlink(missing_ok=True)
            elif self.holding or behind > limit:
                hold.touch()

    def _behind(self) -> dict[int, int]:
        done = self.files.done()
        return {number: state.high_watermark - done.get(number, 0) for number, state in self.storage.manifest().items()}

    def _starts(self) -> dict[int, int]:
        return {number: state.log_start for number, state in self.storage.manifest().items()}

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
        before: Optional[Manifest] = None
        while before != (now := self.storage.manifest()):
            before = now
            time.sleep(SETTLED)
        starts = self._starts()
        self._refuse(starts, there)
        if self._until(self._config(strict=False), lambda: files.committed() > batch):
            self.driver.kill(ALL)
        if starts != self._starts():
            self.findings.fault(PROCESSES, "retention went on although nothing was published")
        self.lost += [(number, there.get(number, 0), start) for number, start in starts.items()
                      if there.get(number, 0) < start]
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
            if AWAY not in words:
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
        self.broker_lives.enough.set()
        self.broker_lives.join(PATIENCE)
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
        self.counts["sealed"] = sum(1 for _ in self.broker.data_dir.glob(f"streams/{STREAM}/*/*{SEALED_SUFFIX}"))
        self.counts["batches"] = self.files.committed() + 1
        self.driver.close()
        self.glimpses.look()
        rows, dead = read_table(self.files.output), read_dead_letters(self.files.dead_letters)
        last = {actor.name: actor.last for actor in self.publishers}
        ends = {number: state.high_watermark for number, state in self.storage.manifest().items()}
        judge(self.findings, rows, dead, last, ends, self.lost)
        judge_readers(self.findings, self.files.output, rows)

    def close(self) -> None:
        self.over.set()
        self.driver.close()
        for publisher in self.publishers:
            publisher.close()
        self.broker.close()

    def summary(self, seconds: float) -> str:
        counts, plan = self.counts, self.plan
        publishers: Counter[str] = sum((actor.counts for actor in self.publishers), Counter())
        return (
            f"chaos-spark: seed {plan.seed}, {plan.mode}, {build_kind()} build, {seconds:.0f} s\n"
            f"  {told(counts)}; {counts['of Python']} of Python alone, {counts['of JVM']} of the JVM alone; "
            f"{counts['gave up']} times it gave up on a broker that was away; "
            f"{counts['path']} starts by path, {counts['url']} by url\n"
            f"  broker: {self.broker_lives.counts['kills']} kills, {self.broker_lives.counts['stillborn']} more while it "
            f"started\n"
            f"  publishers: {publishers['kills']} kills, with {publishers['published']} PUBLISH and "
            f"{publishers['released']} PUBREL to send again\n"
            f"  segments: {counts['sealed']} are sealed in the end\n"
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
    parser = argparse.ArgumentParser(
        prog="make chaos-spark", description="Kill publishers, broker and driver, and check the table."
    )
    parser.add_argument("--seed", default="1")
    parser.add_argument("--modes", default="plain", help=f"of {','.join([*SEGMENTS, *FORMATS])}")
    parser.add_argument("--source", default="both", choices=("both", "path", "url"))
    parser.add_argument("--kills", type=int, default=20, help="of publishers, broker and driver each, at least")
    parser.add_argument("--rate", type=float, default=800.0, help="readings per second")
    parser.add_argument("--defect", choices=sorted(DEFECTS), help="to see it found")
    options = parser.parse_args()
    programs = Programs()
    if options.defect:
        programs = programs._replace(**{DEFECTS[options.defect][0]: ("-m", "chaos_spark.defects", options.defect)})
    found = False
    for mode in options.modes.split(","):
        run: Run | StateRun
        if mode in FORMATS:
            run, summary = chaos(partial(StateRun, options.seed, mode, options.kills, program=programs.driver))
        else:
            overtaken = OVERTAKINGS if mode == "retention" else 0
            plan = Plan(options.seed, mode, options.source, options.kills, 4, options.rate, 5.0, 8.0, overtaken)
            run, summary = chaos(partial(Run, plan, programs=programs))
        text = run.findings.text()
        found = found or bool(text)
        print(f"{summary}\n\n{text or 'nothing found'}\n", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
