"""docs/client-examples.md has the programs of docs/examples/clients, and they do what the page says.

The Python program runs here, that of JavaScript and the page for a browser in `make interop`, the others with `make slow` if their
tools are there. `DEVICE_SOURCES` names a directory with checkouts of `micropython-lib`, `arduino-mqtt` and `ArduinoCore-API`, which no
package registry has.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from project.test_docs_examples import BLOCK
from support.broker_process import BrokerProcess
from support.device_programs import NAME, PASSWORD, PROGRAMS, DeviceBroker, DeviceRun, Program, device_broker, settings
from support.paths import ROOT
from support.raw_client import RawClient
from support.spark_session import python_path

pytestmark = pytest.mark.one_build

PAGE = ROOT / "docs" / "client-examples.md"
HOST = ROOT / "tests" / "clients" / "arduino_host"
# Of each directory: its language in a fence, and its files.
FILES = {
    "python/device.py": "python", "javascript/device.js": "javascript", "javascript/page.html": "html", "go/device.go": "go",
    "go/go.mod": "text", "rust/Cargo.toml": "text", "rust/src/main.rs": "rust", "java/pom.xml": "xml",
    "java/src/main/java/Device.java": "java", "csharp/Device.csproj": "xml", "csharp/Program.cs": "csharp",
    "arduino/device/device.ino": "cpp", "micropython/device.py": "python",
}  # fmt: skip


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceBroker]:
    with device_broker(tmp_path_factory.mktemp("devices")) as broker:
        yield broker


def test_the_page_has_the_programs() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert {str(path.relative_to(PROGRAMS)) for path in PROGRAMS.rglob("*") if path.is_file()} == set(FILES)
    for name, language in FILES.items():
        block = f"```{language}\n{(PROGRAMS / name).read_text(encoding='utf-8')}```\n"
        assert block in page, f"{PAGE.name} has another text than docs/examples/clients/{name}"
    fences = [line for line in page.splitlines() if line.startswith("```") and line not in ("```", "```sh", "```toml")]
    assert len(fences) == len(FILES), "a program of the page is no file"


def test_the_broker_of_the_page(tmp_path: Path, start_broker: Callable[..., BrokerProcess]) -> None:
    blocks = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    passwd, serve, sub, pub = blocks["sh"].splitlines()
    assert serve == "mqttbroker serve --config device-broker.toml"
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-P", "-m", *shlex.split(passwd)]
    subprocess.run(command, cwd=tmp_path, env=environment, input=f"{PASSWORD}\n", text=True, check=True)
    text = blocks["toml"].replace('"users.txt"', f'"{tmp_path}/users.txt"').replace("port = 1883", "").replace("9001", "0")
    broker = start_broker(config=text)
    program = Program([sys.executable, PROGRAMS / "python" / "device.py"], {**os.environ, **settings(broker.port, None)}, tmp_path)
    with program, RawClient(broker.port) as operator:
        operator.connect("operator")
        operator.subscribe(shlex.split(sub)[2])
        assert operator.take().topic == f"sensors/{NAME}/temperature"
        [topic, payload] = [shlex.split(pub)[at] for at in (4, 6)]
        operator.publish(topic, payload.encode(), 1)
        assert program.ended() == 0


class Conversation(DeviceRun):
    """The tests of a program."""

    @pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
    def test_it_keeps_its_session_and_its_readings(self, devices: DeviceBroker, tls: bool) -> None:
        self.converse(devices, tls)

    def test_what_the_broker_refuses_is_a_line(self, devices: DeviceBroker) -> None:
        self.refused(devices)


class TestPython(Conversation):
    def start(self, port: int, cafile: Path | None, password: str = PASSWORD, name: str = NAME) -> Program:
        environment = {**os.environ, **settings(port, cafile, password, name)}
        return Program([sys.executable, PROGRAMS / "python" / "device.py"], environment, PROGRAMS)


class Built(Conversation):
    """A program that is built first, in a copy of its directory."""

    directory = ""
    build: tuple[tuple[str, ...], ...] = ()
    command: tuple[str, ...] = ()
    built: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def copy(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        tool = cls.build[0][0]
        if shutil.which(tool) is None:
            pytest.skip(f"this machine has no {tool}")
        directory = tmp_path_factory.mktemp("program") / "program"
        shutil.copytree(PROGRAMS / cls.directory, directory)
        for step in cls.build:
            done = subprocess.run(step, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert done.returncode == 0, done.stdout[-4000:]
        cls.built = directory

    def start(self, port: int, cafile: Path | None, password: str = PASSWORD, name: str = NAME) -> Program:
        return Program(self.command, {**os.environ, **settings(port, cafile, password, name)}, self.built)


@pytest.mark.slow("builds with Go")
@pytest.mark.timeout(1200)
class TestGo(Built):
    directory, build, command = "go", (("go", "mod", "tidy"), ("go", "build", "-o", "device")), ("./device",)


@pytest.mark.slow("builds with Cargo")
@pytest.mark.timeout(1800)
class TestRust(Built):
    directory, build, command = "rust", (("cargo", "build", "--quiet"),), ("target/debug/device",)


@pytest.mark.slow("builds with Maven")
@pytest.mark.timeout(1200)
class TestJava(Built):
    directory, build, command = "java", (("mvn", "-q", "-B", "compile"),), ("mvn", "-q", "-B", "exec:java")


@pytest.mark.slow("builds with the .NET SDK")
@pytest.mark.timeout(1200)
class TestCSharp(Built):
    directory, build, command = "csharp", (("dotnet", "build"),), ("dotnet", "run", "--no-build")


def sources(name: str) -> Path:
    """A checkout in DEVICE_SOURCES; skips the test without."""
    found = Path(os.environ.get("DEVICE_SOURCES", "/nonexistent"), name)
    if not found.is_dir():
        pytest.skip(f"DEVICE_SOURCES names no directory with {name}")
    return found


def replaced(text: str, changes: dict[str, str]) -> str:
    for printed, here in changes.items():
        assert text.count(printed) == 1, printed
        text = text.replace(printed, here)
    return text


@pytest.mark.slow("needs MicroPython")
class TestMicroPython(DeviceRun):
    """The program runs on MicroPython's port to Unix, where there is no network to join."""

    directory: Path

    @pytest.fixture(autouse=True)
    def program(self, tmp_path: Path) -> None:
        if shutil.which("micropython") is None:
            pytest.skip("this machine has no micropython")
        shutil.copytree(sources("micropython-lib") / "micropython" / "umqtt.simple" / "umqtt", tmp_path / "umqtt")
        self.directory = tmp_path

    @pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
    def test_it_keeps_its_session_and_its_readings(self, devices: DeviceBroker, tls: bool) -> None:
        self.converse(devices, tls)

    def start(self, port: int, cafile: Path | None, password: str = PASSWORD, name: str = NAME) -> Program:
        text = (PROGRAMS / "micropython" / "device.py").read_text(encoding="utf-8")
        changes = {'"192.168.1.10", 1883, "device-1", ""': f'"localhost", {port}, "{name}", "{password}"'}
        if cafile is not None:
            certificate = self.directory / "ca.der"
            subprocess.run(["openssl", "x509", "-in", cafile, "-outform", "der", "-out", certificate], check=True)
            changes['CA = ""'] = f'CA = "{certificate}"'
        (self.directory / "device.py").write_text(replaced(text, changes), encoding="utf-8")
        return Program(["micropython", "device.py"], os.environ, self.directory)


@pytest.mark.slow("compiles an Arduino library")
class TestArduino(DeviceRun):
    """The sketch and its library, compiled for this machine: no board, no WiFi, and no TLS, which a board's library does."""

    directory: Path

    @pytest.fixture(autouse=True)
    def program(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def test_it_keeps_its_session_and_its_readings(self, devices: DeviceBroker) -> None:
        self.converse(devices, tls=False)

    def start(self, port: int, cafile: Path | None, password: str = PASSWORD, name: str = NAME) -> Program:
        mqtt, core = sources("arduino-mqtt") / "src", sources("ArduinoCore-API")
        changes = {'"192.168.1.10"': '"127.0.0.1"', ', PASSWORD[] = ""': f', PASSWORD[] = "{password}"', "PORT = 1883": f"PORT = {port}"}
        sketch = self.directory / "device.ino"
        sketch.write_text(replaced((PROGRAMS / "arduino/device/device.ino").read_text(encoding="utf-8"), changes), encoding="utf-8")
        objects = [self.directory / f"{path.stem}.o" for path in sorted((mqtt / "lwmqtt").glob("*.c"))]
        for path in objects:
            subprocess.run(["cc", "-c", mqtt / "lwmqtt" / f"{path.stem}.c", "-o", path], check=True)
        names = ["api/String.cpp", "api/Print.cpp", "api/Stream.cpp", "api/IPAddress.cpp", "test/src/itoa.cpp", "test/src/dtostrf.cpp"]
        command = ["c++", "-std=gnu++17", "-DHOST", f'-DSKETCH="{sketch}"']
        command += [f"-I{path}" for path in (HOST, core / "api", core, core / "test" / "include", mqtt)]
        files = [HOST / "main.cpp", mqtt / "MQTTClient.cpp", *(core / name for name in names), *objects]
        subprocess.run([*command, *map(str, files), "-o", self.directory / "device"], check=True)
        return Program([self.directory / "device"], os.environ, self.directory)
