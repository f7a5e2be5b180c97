"""The suites: where each comes from, what it expects of a broker, and how it runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import trustme
from support.interpreters import Failed, run

from clients import sources
from clients.brokers import Listener, Setup
from clients.results import Result, from_go, from_junit

PYTEST = ("pytest==8.4.2", "pytest-asyncio==1.2.0", "pytest-timeout==2.4.0")
SUITE_SECONDS = 1800  # that the programs of one suite may take
TEST_SECONDS = 120

Start = Callable[[Setup], AbstractContextManager[None]]


class Suite(Protocol):
    """A client's suite. ``programs`` are those that it needs beside Python."""

    name: str
    version: str
    programs: tuple[str, ...]

    def fetch(self, directory: Path) -> None:
        """Download and build it in ``directory``.  Raises `Failed`."""

    def run(self, directory: Path, start: Start, scratch: Path) -> list[Result]:
        """Run what was fetched against the broker that ``start`` starts.  Raises `Failed` or ValueError."""


class Aiomqtt:
    name, version, programs = "aiomqtt", "2.5.1", ()

    def fetch(self, directory: Path) -> None:
        source = sources.sdist(self.name, self.version, directory)
        certificate(directory, authority=source / "tests" / "mosquitto.org.crt")
        sources.environment(directory / "python", *PYTEST, "anyio==4.11.0", str(source))

    def run(self, directory: Path, start: Start, scratch: Path) -> list[Result]:
        secured = {"certfile": directory / "server.pem", "keyfile": directory / "server.key"}
        listeners = [Listener(1883), Listener(8080, "ws"), Listener(8883, "tls", **secured)]
        with start(Setup(listeners, users=(("rw", "readwrite"),))):
            return pytest(directory, directory / f"aiomqtt-{self.version}", scratch)


class Gmqtt:
    name, version, programs = "gmqtt", "0.8.0", ()

    def fetch(self, directory: Path) -> None:
        source = sources.sdist(self.name, self.version, directory)
        certificate(directory, authority=directory / "ca.pem")
        sources.environment(directory / "python", *PYTEST, "uvloop", str(source))

    def run(self, directory: Path, start: Start, scratch: Path) -> list[Result]:
        secured = {"certfile": directory / "server.pem", "keyfile": directory / "server.key"}
        with start(Setup([Listener(1883), Listener(8883, "tls", **secured)])):
            trusted = {"SSL_CERT_FILE": str(directory / "ca.pem")}
            return pytest(directory, directory / f"gmqtt-{self.version}", scratch, HOST="localhost", **trusted)


class PahoGo:
    name, version, programs = "paho.mqtt.golang", "v1.5.1", ("go",)

    def fetch(self, directory: Path) -> None:
        sources.go_module(f"github.com/eclipse/{self.name}", self.version, directory)

    def run(self, directory: Path, start: Start, scratch: Path) -> list[Result]:
        with start(Setup([Listener(1883)])):
            command = ["go", "tool", "test2json", "../suite", "-test.v=test2json", f"-test.timeout={SUITE_SECONDS}s"]
            return from_go(output_of(command, directory / "source", scratch / "suite.log").splitlines())


class PahoC:
    """In the version that the crate of its Rust wrapper brings, with the certificates of the suite.

    Each of its TLS ports is for MQTT in some tests and for WebSocket in others, so it runs twice.
    """

    name, version, programs = "paho.mqtt.c", "1.3.16", ("cargo", "cmake", "cc")
    _CRATE = ("paho-mqtt-sys", "0.11.0")

    def fetch(self, directory: Path) -> None:
        source = (sources.crate(*self._CRATE, directory) / "paho.mqtt.c").rename(directory / "source")
        keys = source / "test" / "ssl"
        chain = (keys / "server.crt").read_bytes() + (keys / "test-signing-ca.crt").read_bytes()
        (directory / "server.pem").write_bytes(chain)
        build = directory / "build"
        choices = ["PAHO_WITH_SSL=TRUE", "PAHO_BUILD_SHARED=TRUE", "PAHO_BUILD_STATIC=FALSE"]
        choices += ["PAHO_ENABLE_TESTING=TRUE", "MQTT_WS_TEST_BROKER=ws://localhost:8080", "CMAKE_BUILD_TYPE=Release"]
        run(["cmake", "-S", source, "-B", build, *(f"-D{choice}" for choice in choices)], directory / "fetch.log")
        run(["cmake", "--build", build, "--parallel", "2"], directory / "fetch.log")

    def run(self, directory: Path, start: Start, scratch: Path) -> list[Result]:
        own = scratch / "build"  # its tests write files where the programs are
        shutil.copytree(directory / "build", own, symlinks=True)
        subprocess.run(["mount", "--bind", str(own), str(directory / "build")], check=True)
        proxy = [sys.executable, str(directory / "source" / "test" / "mqttsas.py"), "localhost", "1883", "1884"]
        found = []
        for kind, which in (("tls", "--exclude-regex"), ("wss", "--tests-regex")):
            listeners = [Listener(1883), Listener(8080, "ws"), *self._secured(directory, kind)]
            with start(Setup(listeners, receive_maximum=20)):  # as that of the project's own test broker
                with open(scratch / f"proxy-{kind}.log", "wb") as log:
                    process = subprocess.Popen(proxy, stdout=log, stderr=log)
                try:
                    report = scratch / f"{kind}.xml"
                    command = ["ctest", "--output-junit", str(report), "--timeout", str(TEST_SECONDS)]
                    command += [which, "^test[35]-.*-ws-"]
                    output_of(command, directory / "build", scratch / f"{kind}.log")
                    found += from_junit(report)
                finally:
                    process.terminate()
                    process.wait()
        return found

    @staticmethod
    def _secured(directory: Path, kind: str) -> list[Listener]:
        keys = directory / "source" / "test" / "ssl"
        secured = {"certfile": directory / "server.pem", "keyfile": keys / "server.key"}
        return [
            Listener(18883),
            Listener(18884, kind, cafile=keys / "all-ca.crt", **secured),
            Listener(18885, kind, **secured),
            Listener(18886, kind, **secured),
            Listener(18887, kind, cafile=keys / "server.crt", **secured),
        ]


class MqttJs:
    """Bursts, as zigbee2mqtt and Node-RED send them: the project's own test, because the package has none."""

    name, version, programs = "mqtt.js", "5.16.0", ("node", "npm")
    _PORTS = (("tcp", "mqtt", 1883), ("ws", "ws", 8080), ("tls", "mqtts", 8883))  # type of listener, scheme, port

    def fetch(self, directory: Path) -> None:
        sources.npm_package("mqtt", self.version, directory)
        certificate(directory, authority=directory / "ca.pem")

    def run(self, directory: Path, start: Start, scratch: Path) -> list[Result]:
        secured = {"certfile": directory / "server.pem", "keyfile": directory / "server.key"}
        listeners = [Listener(port, kind, **(secured if kind == "tls" else {})) for kind, _, port in self._PORTS]
        with start(Setup(listeners)):
            urls = [f"{scheme}://localhost:{port}" for _, scheme, port in self._PORTS]
            command = ["node", "--no-warnings", str(Path(__file__).with_name("mqtt_js.js")), *urls]
            output = output_of(command, directory, scratch / "suite.log", NODE_PATH=str(directory / "node_modules"))
        return [Result(**json.loads(line)) for line in output.splitlines()]


class OldAiomqtt:
    """Messages over TLS to a version that reads one packet when its socket is readable: the project's own test."""

    name, version, programs = "aiomqtt-tls", "2.3.2", ()

    def fetch(self, directory: Path) -> None:
        certificate(directory, authority=directory / "ca.pem")
        sources.environment(directory / "python", f"aiomqtt=={self.version}")

    def run(self, directory: Path, start: Start, scratch: Path) -> list[Result]:
        secured = {"certfile": directory / "server.pem", "keyfile": directory / "server.key"}
        with start(Setup([Listener(8883, "tls", **secured)])):
            program = [str(directory / "python" / "bin" / "python"), "-P", str(Path(__file__).with_name("old_aiomqtt.py"))]
            output = output_of([*program, "8883", str(directory / "ca.pem")], directory, scratch / "suite.log")
        return [Result(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]


SUITES: tuple[Suite, ...] = (Aiomqtt(), OldAiomqtt(), Gmqtt(), PahoC(), PahoGo(), MqttJs())


def certificate(directory: Path, authority: Path) -> None:
    """Make server.pem and server.key for loopback's names, and the certificate of their authority."""
    issuer = trustme.CA()
    issued = issuer.issue_cert("localhost", "127.0.0.1", "test.mosquitto.org")
    issuer.cert_pem.write_to_path(str(authority))
    (directory / "server.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(directory / "server.key"))


def pytest(directory: Path, source: Path, scratch: Path, **environment: str) -> list[Result]:
    """Run the tests of a Python package from its unpacked source, in the environment of ``directory``."""
    report = scratch / "pytest.xml"
    python = str(directory / "python" / "bin" / "python")
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    command += [f"--junitxml={report}", "tests"]
    output_of(command, source, scratch / "suite.log", **environment)
    return from_junit(report)


def output_of(command: list[str], directory: Path, log: Path, **environment: str) -> str:
    """Run a suite's program, which fails if a test does; returns its output, which is also in ``log``."""
    began = time.monotonic()
    with open(log, "wb") as output:
        try:
            subprocess.run(
                command, cwd=directory, env=sources.in_environment(**environment), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, timeout=SUITE_SECONDS)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Failed(f"{command[0]} ran for {time.monotonic() - began:.0f} s: {log}") from None
    return log.read_text(encoding="utf-8", errors="replace")
