"""Kafka brokers on this machine, for the demo and for tests: real processes in KRaft mode on free ports.

The program comes from Maven by name, once per environment.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

VERSION = "4.1.1"
LIBRARIES = Path(sys.prefix) / f"kafka-{VERSION}"
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion><groupId>mqttbroker</groupId><artifactId>kafka</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>2.24.3</version>
    </dependency>
  </dependencies>
</project>
"""
JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Dorg.apache.logging.log4j.level=INFO")
# Below the ports that systems give to outgoing connections, which would take that of a broker while it is dead.
PORTS = range(18_000, 32_000)
FORMAT_ID = "bXF0dGJyb2tlci10ZXN0cw"  # of the brokers' files
DOWNLOAD_S = 300.0
START_S = 60.0
STOP_S = 30.0


class KafkaMissing(Exception):
    """Kafka cannot be had or started here; the text says why."""


class DownloadFailed(OSError):
    """Maven has not downloaded Kafka; the text says why."""


def kafka_class_path() -> str:
    """The class path of Kafka, which is downloaded if it is not there. Raises `KafkaMissing` and `DownloadFailed`."""
    if shutil.which("java") is None:
        raise KafkaMissing("Kafka needs Java")
    if not LIBRARIES.exists():
        maven = shutil.which("mvn")
        if maven is None:
            raise KafkaMissing("Kafka is downloaded by Maven, and there is no mvn")
        with tempfile.TemporaryDirectory() as place:
            Path(place, "pom.xml").write_text(POM, encoding="utf-8")
            unfinished = LIBRARIES.with_suffix(f".{os.getpid()}")
            command = [maven, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={unfinished}"]
            try:
                # Maven writes its errors to stdout, and codes of colours also if that is no terminal.
                done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=DOWNLOAD_S)
            except subprocess.TimeoutExpired:
                raise DownloadFailed(f"Maven has not downloaded Kafka in {DOWNLOAD_S:g} s") from None
            if done.returncode:
                said = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
                raise DownloadFailed(f"Maven has not downloaded Kafka: {said[0]}")
            try:
                unfinished.rename(LIBRARIES)
            except OSError:  # another process was first
                shutil.rmtree(unfinished)
    return str(LIBRARIES / "*")


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        if port not in found:
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                found.append(port)
    return found


class Place(NamedTuple):
    """The address of a Kafka broker, and what the command that starts it begins with, to run it there."""

    host: str = "127.0.0.1"
    command: tuple[str, ...] = ()


class KafkaBroker:
    """One broker, which is a controller, too; ``settings`` is its properties file."""

    def __init__(self, number: int, place: Place, port: int, settings: Path, class_path: str) -> None:
        self.number = number
        self.place = place
        self.port = port
        self.settings = settings
        self.class_path = class_path
        self.process: subprocess.Popen[bytes] | None = None

    def tool(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.settings.with_suffix(".log"), "ab") as output:
            return subprocess.Popen(
                [*self.place.command, "java", *JVM, "-cp", self.class_path, name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.settings.parent,
            )

    def start(self) -> None:
        """Start it without waiting."""
        if self.process is not None and self.process.poll() is None:
            raise ValueError(f"Kafka broker {self.number} runs already")
        self.process = self.tool("kafka.Kafka", str(self.settings))

    def wait_until_listening(self) -> None:
        """Wait for a broker that was started. Raises `KafkaMissing` if it ends."""
        assert self.process is not None, "start comes first"
        until = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection((self.place.host, self.port), 1.0):
                return
            if self.process.poll() is not None or time.monotonic() > until:
                log = self.settings.with_suffix(".log").read_text(errors="replace")
                raise KafkaMissing(f"Kafka broker {self.number} does not listen:\n{log[-3000:]}")
            time.sleep(0.05)

    def send_signal(self, number: int) -> None:
        assert self.process is not None, "start comes first"
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """End it in order."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()


class LocalKafka:
    """Brokers with the numbers 1 to ``count``, their files in ``directory``. Starts with ``with``.

    ``places`` has one for each broker; without it they are all on the loopback address. Clients and brokers speak ``protocol``, which needs
    ``settings``. ``formatting`` are arguments of the tool that makes the brokers' files.
    """

    def __init__(
        self,
        directory: Path,
        count: int = 3,
        places: Sequence[Place] = (),
        protocol: str = "PLAINTEXT",
        settings: Sequence[str] = (),
        formatting: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self._formatting = formatting
        places = places or [Place()] * count
        class_path = kafka_class_path()
        ports = free_ports(2 * count)
        voters = ",".join(f"{number}@{place.host}:{port}" for number, (place, port) in enumerate(zip(places, ports[count:]), 1))
        self.brokers: list[KafkaBroker] = []
        for number, place in enumerate(places):
            host = place.host
            path = directory / f"broker-{number + 1}.properties"
            copies = min(3, count)
            path.write_text(
                "\n".join(
                    [
                        f"node.id={number + 1}",
                        "process.roles=broker,controller",
                        f"listeners={protocol}://{host}:{ports[number]},CONTROLLER://{host}:{ports[count + number]}",
                        f"advertised.listeners={protocol}://{host}:{ports[number]}",
                        "controller.listener.names=CONTROLLER",
                        f"listener.security.protocol.map=CONTROLLER:PLAINTEXT,{protocol}:{protocol}",
                        f"inter.broker.listener.name={protocol}",
                        f"controller.quorum.voters={voters}",
                        f"log.dirs={directory / f'broker-{number + 1}'}",
                        "auto.create.topics.enable=false",
                        f"offsets.topic.replication.factor={copies}",
                        "offsets.topic.num.partitions=3",
                        f"transaction.state.log.replication.factor={copies}",
                        f"transaction.state.log.min.isr={max(1, copies - 1)}",
                        "transaction.state.log.num.partitions=3",
                        "group.initial.rebalance.delay.ms=0",
                        "group.min.session.timeout.ms=500",
                        # Not as short as docs/cluster.md asks: on a busy machine, brokers that live would be taken for dead.
                        "broker.session.timeout.ms=1500",
                        "broker.heartbeat.interval.ms=300",
                        "controller.quorum.election.timeout.ms=500",
                        "controller.quorum.fetch.timeout.ms=1000",
                        "replica.lag.time.max.ms=3000",
                        "num.network.threads=1",
                        "num.io.threads=2",
                        "log.cleaner.dedupe.buffer.size=2097152",
                        "log.segment.bytes=16777216",
                        *settings,
                    ]
                )
                + "\n",
                encoding="utf-8",
            )
            self.brokers.append(KafkaBroker(number + 1, place, ports[number], path, class_path))

    def __enter__(self) -> LocalKafka:
        formatting = [
            broker.tool("kafka.tools.StorageTool", "format", "-t", FORMAT_ID, "-c", str(broker.settings), *self._formatting)
            for broker in self.brokers
        ]
        for broker, process in zip(self.brokers, formatting):
            if process.wait(START_S) != 0:
                log = broker.settings.with_suffix(".log").read_text(errors="replace")
                raise KafkaMissing(f"the files of Kafka broker {broker.number} cannot be made:\n{log[-3000:]}")
        try:
            for broker in self.brokers:
                broker.start()
            for broker in self.brokers:
                broker.wait_until_listening()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all brokers; nothing of them is needed afterwards."""
        for broker in self.brokers:
            broker.kill()

    @property
    def bootstrap(self) -> list[str]:
        return [f"{broker.place.host}:{broker.port}" for broker in self.brokers]

    def broker(self, number: int) -> KafkaBroker:
        return self.brokers[number - 1]
