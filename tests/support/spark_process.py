"""Spark's own programs as processes, each with its own directory, PYTHONPATH and log, and a broker with readings."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import pyspark
import pyspark_mqtt
import pyspark_mqtt_retained
import pyspark_mqtt_sessions

import bridge_spark
import sessions
import topic_matcher
from bridge_spark.java import use_java
from mqttbroker.codec.packets import Puback, Publish
from support.broker_process import BrokerProcess
from support.class_archive import QUICK_JVM
from support.raw_client import RawClient
from support.spark_session import python_path
from support.worker_fork_server import worker_python

PACKAGES = (bridge_spark, pyspark_mqtt, pyspark_mqtt_retained, pyspark_mqtt_sessions, sessions, topic_matcher)
START_SECONDS = 60.0
STOP_SECONDS = 20.0
TOKEN = "s3cret"
SENSORS = 4
READINGS = 200
AT_ONCE = 20


class SparkProcess:
    """``program`` of Spark, run in ``directory``; a context manager that ends it."""

    def __init__(
        self, directory: Path, arguments: Sequence[str], env: Mapping[str, str] | None = None, program: str = "spark-class"
    ) -> None:
        self.directory = directory
        self.log = directory / "log"
        self._command = [spark_program(program), *arguments]
        self._env = spark_environment() | dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of ``pattern`` in the log; AssertionError with the log if it does not appear."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            ended = self._process.poll() is not None
            said = self.log.read_text(errors="replace")
            match = re.search(pattern, said)
            if match is not None:
                return match
            assert not ended and time.monotonic() < deadline, f"the log has no {pattern!r}:\n{said[-3000:]}"
            time.sleep(0.05)

    def terminate(self) -> int:
        """Send SIGTERM and wait; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(STOP_SECONDS)

    def __enter__(self) -> SparkProcess:
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, cwd=self.directory
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        if error is not None:
            print(f"log of {self._command[1]}:\n{self.log.read_text(errors='replace')[-3000:]}")
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def spark_program(name: str) -> str:
    """The path of a program of the PySpark package."""
    return str(Path(pyspark.__file__).parent / "bin" / name)


def run_program(command: Sequence[object], env: Mapping[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that starts others; kills all of them if the wait is interrupted."""
    with subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=directory,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def spark_environment() -> dict[str, str]:
    """The environment of Spark processes: little memory, fast start, loopback only."""
    use_java()
    return {
        **os.environ,
        "PYSPARK_PYTHON": worker_python(python_path()),
        "PYTHONPATH": python_path(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK_JVM,
    }


def install_into(directory: Path) -> str:
    """Copy the packages that an executor needs; returns their PYTHONPATH.  A task that uses them creates the file
    ``used`` there."""
    for package in PACKAGES:
        found = Path(str(package.__file__)).parent
        shutil.copytree(found, directory / found.name, ignore=shutil.ignore_patterns("__pycache__", "autoload"))
    with (directory / "bridge_spark" / "source" / "slice_reader.py").open("a") as reader:
        reader.write(f"\nopen({str(directory / 'used')!r}, 'w').close()\n")
    return str(directory)


@contextmanager
def broker_with_readings() -> Iterator[BrokerProcess]:
    """A broker whose stream `sensors` holds `READINGS` messages of `SENSORS` sensors in four partitions; HTTP requires
    `TOKEN`."""
    stream = {"filters": ["sensors/#"], "partitions": 4, "key": "topic"}
    config = {"streams": {"sensors": stream}, "http": {"token": TOKEN}}
    with BrokerProcess(config=config) as broker, RawClient(broker.port) as client:
        client.connect("publisher")
        publish(client, range(READINGS))
        client.disconnect()
        yield broker


def publish(client: RawClient, numbers: Sequence[int]) -> None:
    """Publish readings with these numbers and wait for their acknowledgements."""
    for start in range(0, len(numbers), AT_ONCE):
        part = numbers[start : start + AT_ONCE]
        client.send(*(Publish(topic(number), reading(number), 1, False, False, client.next_packet_id(), None) for number in part))
        assert [client.expect(Puback).reason_code for _ in part] == [0] * len(part)


def topic(number: int) -> str:
    return f"sensors/s{number % SENSORS}"


def reading(number: int) -> bytes:
    """The payload of a reading, five seconds after the previous one of the same sensor."""
    minute, fives = divmod(number // SENSORS, 12)
    return b'{"n": %d, "ts": "2026-01-01 00:%02d:%02d", "value": %d}' % (number, minute, fives * 5, number)
