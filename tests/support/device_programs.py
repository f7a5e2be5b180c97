"""Runs the programs of docs/examples/clients against a broker: each is a device that sends readings and gets commands."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from mqttbroker.auth.passwords import hash_password
from mqttbroker.codec.packets import Publish
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.cut_proxy import CutProxy
from support.paths import ROOT
from support.patience import PATIENCE
from support.raw_client import RawClient

PROGRAMS = ROOT / "docs" / "examples" / "clients"
NAME, PASSWORD = "device-1", "secret-1"
DENIED = "device-2"  # may log in, and not publish
RULES = f"topic readwrite #\nuser {NAME}\ntopic readwrite #\nuser {DENIED}\ntopic read commands/#\n"


class DeviceBroker(NamedTuple):
    """A broker that knows the device's password, with listeners for each transport."""

    process: BrokerProcess
    ports: Mapping[str, int]  # by type: tcp, tls, ws
    cafile: Path


@contextmanager
def device_broker(directory: Path) -> Iterator[DeviceBroker]:
    files = CertificateFiles(directory)
    users = "".join(f"{name}:{hash_password(PASSWORD.encode())}\n" for name in (NAME, DENIED))
    (directory / "users").write_text(users, encoding="utf-8")
    (directory / "rules").write_text(RULES, encoding="utf-8")
    tls = {"type": "tls", "port": 0, "certfile": str(files.certfile), "keyfile": str(files.keyfile)}
    config = {
        "password_file": str(directory / "users"), "acl_file": str(directory / "rules"), "allow_anonymous": True,
        "listeners": [{}, tls, {"type": "ws", "port": 0}],
    }  # fmt: skip
    with BrokerProcess(config=config) as process:
        ports = {kind: int(process.wait_for_log(rf"event=listening type={kind} .*\bport=(\d+)")[1]) for kind in ("tcp", "tls", "ws")}
        yield DeviceBroker(process, ports, files.cafile)


def settings(port: int, cafile: Path | None, password: str = PASSWORD, name: str = NAME) -> dict[str, str]:
    """The environment of a program, beside that of the system."""
    found = {"MQTT_PORT": str(port), "MQTT_USER": name, "MQTT_PASSWORD": password}
    return found if cafile is None else {**found, "MQTT_CA": str(cafile)}


class Program:
    """A process, and the lines that it printed."""

    def __init__(self, command: Sequence[object], environment: Mapping[str, str], directory: Path) -> None:
        self.lines: list[str] = []
        self._new_line = threading.Condition()
        self._process = subprocess.Popen(
            [str(word) for word in command], env=environment, cwd=directory, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._new_line:
                self.lines.append(line.rstrip())
                self._new_line.notify_all()

    def wait_for(self, pattern: str, after: int = 0) -> str:
        """The first line that matches, from line number ``after`` on."""
        deadline = time.monotonic() + 2 * PATIENCE
        with self._new_line:
            while True:
                for line in self.lines[after:]:
                    if re.search(pattern, line):
                        return line
                left = deadline - time.monotonic()
                assert left > 0 and self._reader.is_alive(), f"no {pattern!r} in:\n" + "\n".join(self.lines)
                self._new_line.wait(min(left, 0.2))

    def ended(self) -> int:
        """Wait for the end; the exit status."""
        status = self._process.wait(2 * PATIENCE)
        self._reader.join()
        return status

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()


class DeviceRun:
    """The behaviour that each program must have; a subclass starts the program."""

    def start(self, port: int, cafile: Path | None, password: str = PASSWORD, name: str = NAME) -> Program:
        raise NotImplementedError

    def converse(self, broker: DeviceBroker, tls: bool) -> None:
        """Readings until a lost connection, a command that the session kept meanwhile, readings, and a clean end."""
        process, end = broker.process, len(broker.process.lines)
        with CutProxy(broker.ports["tls" if tls else "tcp"]) as proxy, RawClient(process.port) as operator:
            operator.connect("operator")
            operator.subscribe(f"sensors/{NAME}/#", options=1)
            with self.start(proxy.port, broker.cafile if tls else None) as program:
                program.wait_for("stored: ")
                proxy.up = False
                proxy.cut()
                process.wait_for_log(f"event=disconnected client={NAME} ", after=end)
                operator.publish(f"commands/{NAME}/blink", b"on", 1)
                proxy.up = True
                program.wait_for(rf"command: commands/{NAME}/blink on$")
                program.wait_for("stored: ", after=len(program.lines))
                operator.publish(f"commands/{NAME}", b"stop", 1)
                assert program.ended() == 0, program.lines
            process.wait_for_log(f"event=disconnected client={NAME} .*reason=DISCONNECT", after=end)
            received = [packet.payload for packet in operator.ping() if isinstance(packet, Publish)]
        stored = [line.partition("stored: ")[2].encode() for line in program.lines if "stored: " in line]
        assert len(stored) > 1 and set(stored) <= set(received), (stored, received)
        assert all(json.loads(payload).keys() == {"ts", "value"} for payload in received)

    def refused(self, broker: DeviceBroker) -> None:
        """A wrong password is a line, and so is a reading that the rules forbid."""
        with self.start(broker.ports["tcp"], None, name=DENIED) as program:
            program.wait_for("(?i)refused.*not.?authori[sz]ed")
            assert not [line for line in program.lines if "stored" in line]
        with self.start(broker.ports["tcp"], None, "wrong") as program:
            program.wait_for("(?i)not connected:.*(not.?authori[sz]ed|bad.?user|134)")
