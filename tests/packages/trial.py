"""What an installed package must do: the version and kind of build, a broker with clients, and lines about missing parts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

SECONDS = 30.0  # for the start of a broker, and for each command

INGEST = """
[source]
path = "data"

[tables.readings]
stream = "sensors"
topic = "sensors/{machine}"
format = "number"
output = "tables/readings"
"""
SEALED = """
[streams.sensors]
filters = ["sensors/#"]
seal = true
"""
CONFIGURATIONS = {"ingest.toml": INGEST, "sealed.toml": SEALED}

# Commands that need a part which a plain installation has not: their exit status, and what the line must contain.
OPTIONAL = {
    ("ingest", "ingest.toml"): (1, "pip install 'mqttbroker[spark]'"),
    ("check-config", "sealed.toml"): (2, 'pip install "mqttbroker[parquet]"'),
}


class TrialFailed(Exception):
    """The package did not do what it must."""


class Broker:
    """``mqttbroker serve`` of the package, on ports that it chooses, with its data below ``directory``."""

    def __init__(self, programs: Path, directory: Path, seconds: float) -> None:
        self._programs = programs
        self._directory = directory
        self._seconds = seconds
        self._log = directory / "broker.log"
        self.port = 0

    def start(self) -> None:
        """Start the broker and wait until it accepts clients.  Raises `TrialFailed`."""
        began = self._log.stat().st_size if self._log.exists() else 0
        with open(self._log, "ab") as output:
            command = [self._programs / "mqttbroker", "serve", "--port", "0", "--http-port", "0", "--data-dir", "data"]
            self._process = subprocess.Popen(
                command, cwd=self._directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=clean()
            )
        deadline = time.monotonic() + self._seconds
        while not (port := listening_port(self._log.read_text()[began:])):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise TrialFailed(f"the broker did not start: {self._log}")
            time.sleep(0.05)
        self.port = port

    def terminate(self) -> int:
        """End the broker with SIGTERM; return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(self._seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def clean() -> dict[str, str]:
    """The environment without this checkout, other packages of Python, and settings of a broker."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MQTTBROKER_", "SPARK"))}


def listening_port(log: str) -> int:
    for line in log.splitlines():
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if fields.get("event") == "listening" and fields["type"] == "tcp":
            return int(fields["port"])
    return 0


def try_commands(programs: Path, kind: str, directory: Path, seconds: float = SECONDS) -> None:
    """Try the package whose programs are in ``programs``; raises `TrialFailed`.  ``kind`` is "plain" or "compiled"."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)

    def command(*arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [programs / "mqttbroker", *arguments],
            cwd=directory,
            env=clean(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode != status:
            raise TrialFailed(f"mqttbroker {' '.join(arguments)}: exit status {done.returncode}: {done.stderr.strip()}")
        return done.stdout + done.stderr

    if kind not in (version := command("--version")):
        raise TrialFailed(f"the version is {version.strip()!r}, not that of a {kind} build")
    broker = Broker(programs, directory, seconds)
    broker.start()
    try:
        command("pub", "-p", str(broker.port), "-V", "5", "-t", "plant/1", "-m", "21.5", "-q", "2", "-r")
        broker.kill()
        broker.start()
        read = command("sub", "-p", str(broker.port), "-V", "5", "-t", "plant/#", "-q", "2", "-v", "-C", "1", "-W", "10")
        if read != "plant/1 21.5\n":
            raise TrialFailed(f"the retained message after a kill is {read!r}")
        if status := broker.terminate():
            raise TrialFailed(f"the exit status after SIGTERM is {status}")
    finally:
        broker.kill()
    command("check-store", "data")
    for name, text in CONFIGURATIONS.items():
        (directory / name).write_text(text, encoding="utf-8")
    for arguments, (status, advice) in OPTIONAL.items():
        if advice not in (told := command(*arguments, status=status)) or len(told.splitlines()) != 1:
            raise TrialFailed(f"mqttbroker {' '.join(arguments)} does not say what to install: {told.strip()}")
