"""The publishers and the broker or cluster, killed and restarted in threads of their own while the driver runs.

Each actor has its own random generator, so its n-th life is the same in every run with the same seed.  An error of an
actor is a finding and does not end the run.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

from support.broker_process import BrokerProcess

from chaos_spark.driver import END_SECONDS, environment, family, still_there
from chaos_spark.outbox import Outbox
from chaos_spark.verdict import PROCESSES, PUBLISHERS, Findings

TRIES = 10  # to start a broker whose port is in use
FINISH_SECONDS = 120.0  # for a publisher to complete its handshakes


class Actor(threading.Thread):
    """Lives of ``mean`` seconds on average, until ``enough`` is set and it has been killed ``kills`` times."""

    def __init__(self, name: str, seed: str, mean: float, kills: int, findings: Findings) -> None:
        super().__init__(name=name, daemon=True)
        self.random = Random(f"{seed}:{name}")
        self.mean = mean
        self.wanted = kills
        self.findings = findings
        self.enough = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        try:
            while True:
                stay = self.random.expovariate(1 / self.mean) + 0.1
                if self.counts["kills"] < self.wanted:
                    time.sleep(stay)
                elif self.enough.wait(stay):
                    break
                self.kill()
                self.counts["kills"] += 1
            self.finish()
        except Exception as error:
            self.findings.fault(PROCESSES, f"{self.name}: {error}")

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL and begin the next life."""

    def finish(self) -> None:
        """End the last life and check it."""


class BrokerLives(Actor):
    """The broker; sometimes killed again while it starts."""

    def __init__(self, process: BrokerProcess, seed: str, mean: float, kills: int, findings: Findings) -> None:
        super().__init__("broker", seed, mean, kills, findings)
        self.process = process
        self.left: dict[int, str] = {}  # all processes of earlier lives

    def kill(self) -> None:
        self.findings.checked[PROCESSES] += 1
        self.left.update(family(self.process.pid))
        self.process.kill()
        if self.random.random() < 0.15:
            self.process.launch()
            time.sleep(self.random.uniform(0.05, 0.8))
            self.process.kill()
            self.counts["stillborn"] += 1
        for _ in range(TRIES):
            try:
                self.process.start()
                return
            except AssertionError:
                # Another connection of this machine may have taken the port.
                if self.process.running or "Address already in use" not in self.process.lines[-1]:
                    raise
                time.sleep(1.0)

    def finish(self) -> None:
        if left := still_there(self.left, END_SECONDS):
            self.findings.fault(PROCESSES, f"{len(left)} processes of brokers that were killed still run")


class PublisherLives(Actor):
    """One publisher and its directory; ``program``: Python's arguments."""

    def __init__(
        self, name: str, ports: Sequence[int], directory: Path, version: int, rate: float, seed: str, mean: float, kills: int,
        findings: Findings, program: tuple[str, ...] = ("-m", "chaos_spark.publisher"),
    ) -> None:  # fmt: skip
        super().__init__(name, seed, mean, kills, findings)
        self.directory = directory
        listed = ",".join(map(str, ports))
        self.command = [sys.executable, "-P", *program, name, listed, str(directory), str(version), str(rate)]
        self.process: subprocess.Popen[bytes] | None = None
        self.last = 0
        self._over = False
        self._starting = threading.Lock()

    def launch(self) -> None:
        with self._starting:
            if not self._over:
                self._launch()

    def close(self) -> None:
        """Kill the publisher and prevent further starts."""
        with self._starting:
            self._over = True
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def _launch(self) -> None:
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())

    def kill(self) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            self.findings.fault(PROCESSES, f"{self.name} ended by itself with {self.process.returncode}")
        self.process.kill()
        self.process.wait()
        outbox = Outbox(self.directory / f"{self.name}.outbox")
        for _, received in outbox.outgoing.values():
            self.counts["released" if received else "published"] += 1
        outbox.close()
        time.sleep(self.random.uniform(0.0, 0.3))
        self.launch()

    def finish(self) -> None:
        """Let the publisher complete its handshakes; sets ``last``, the number of its last reading."""
        assert self.process is not None
        (self.directory / f"{self.name}.finish").touch()
        try:
            status = self.process.wait(FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status:
            self.findings.fault(PUBLISHERS, f"{self.name} ended with {status} and not with everything completed")
        outbox = Outbox(self.directory / f"{self.name}.outbox")
        self.last = outbox.last
        self.findings.checked[PUBLISHERS] += outbox.last
        faults = self.directory / f"{self.name}.faults"
        for line in faults.read_text().splitlines() if faults.exists() else []:
            self.findings.fault(PUBLISHERS, line)
        outbox.close()
