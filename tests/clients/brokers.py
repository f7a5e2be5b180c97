"""The brokers that the suites run against: this one and Mosquitto, with the same listeners."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.broker_process import BrokerProcess, to_toml
from support.interpreters import Failed
from support.mosquitto import PROGRAM

OURS, MOSQUITTO = "mqttbroker", "mosquitto"
START_SECONDS = 10.0


@dataclass(frozen=True)
class Listener:
    """A port of 127.0.0.1; ``kind`` is a type of listener of this broker. With a ``cafile`` clients need certificates."""

    port: int
    kind: str = "tcp"
    certfile: Path | None = None
    keyfile: Path | None = None
    cafile: Path | None = None


@dataclass(frozen=True)
class Setup:
    """The settings of a broker for one suite; ``users`` are names and passwords. Without users no password is checked.

    ``receive_maximum`` is for this broker; Mosquitto's is 20.
    """

    listeners: Sequence[Listener]
    users: tuple[tuple[str, str], ...] = ()
    receive_maximum: int = 65535


def versions() -> dict[str, str]:
    """The brokers that there are, with their versions."""
    found = {OURS: _version([sys.executable, "-P", "-m", "mqttbroker", "--version"])}
    if PROGRAM is not None:
        found[MOSQUITTO] = _version([PROGRAM, "-h"])
    return found


def _version(command: list[str]) -> str:
    words = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout.split()
    return next(word for word in words if word[0].isdigit())


@contextmanager
def running(broker: str, setup: Setup, directory: Path) -> Iterator[None]:
    """Run a broker with new data in ``directory``, which has its log afterwards."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with _ours(setup, directory) if broker == OURS else _mosquitto(setup, directory):
        yield


@contextmanager
def _ours(setup: Setup, directory: Path) -> Iterator[None]:
    config: dict[str, object] = {"allow_anonymous": True, "listeners": [_table(one) for one in setup.listeners]}
    config["limits"] = {"receive_maximum": setup.receive_maximum}
    if setup.users:
        config["password_file"] = str(_password_file(setup, directory))
    broker = BrokerProcess(directory / "data", to_toml(config))
    broker.port = setup.listeners[0].port
    try:
        broker.start()
        yield
    finally:
        (directory / "broker.log").write_text(broker.log, encoding="utf-8")
        broker.close()


def _table(listener: Listener) -> dict[str, object]:
    table: dict[str, object] = {"host": "127.0.0.1", "port": listener.port, "type": listener.kind}
    if listener.certfile is not None:
        table |= {"certfile": str(listener.certfile), "keyfile": str(listener.keyfile)}
    if listener.cafile is not None:
        table |= {"cafile": str(listener.cafile), "client_certificate": "required"}
    return table


@contextmanager
def _mosquitto(setup: Setup, directory: Path) -> Iterator[None]:
    assert PROGRAM is not None
    lines = ["allow_anonymous true", "user root", "persistence true", f"persistence_location {directory}/"]
    if setup.users:
        lines.append(f"password_file {_password_file(setup, directory)}")
    for listener in setup.listeners:
        lines.append(f"listener {listener.port} 127.0.0.1")
        if listener.kind in ("ws", "wss"):
            lines.append("protocol websockets")
        if listener.certfile is not None:
            lines += [f"certfile {listener.certfile}", f"keyfile {listener.keyfile}"]
        if listener.cafile is not None:
            lines += [f"cafile {listener.cafile}", "require_certificate true"]
    (directory / "mosquitto.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with open(directory / "broker.log", "wb") as log:
        process = subprocess.Popen([PROGRAM, "-c", str(directory / "mosquitto.conf")], stdout=log, stderr=log)
    try:
        _wait_for_listeners(process, setup, directory / "broker.log")
        yield
    finally:
        process.terminate()
        process.wait()


def _password_file(setup: Setup, directory: Path) -> Path:
    """Hashes as mosquitto_passwd of Mosquitto 2.0 writes them, which both brokers read."""
    path = directory / "passwords"
    lines = []
    for name, password in setup.users:
        salt = os.urandom(12)
        key = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, 101)
        lines.append(f"{name}:$7$101${base64.b64encode(salt).decode()}${base64.b64encode(key).decode()}\n")
    path.touch(0o600)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _wait_for_listeners(process: subprocess.Popen[bytes], setup: Setup, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    for listener in setup.listeners:
        while True:
            try:
                socket.create_connection(("127.0.0.1", listener.port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise Failed(f"Mosquitto does not listen on port {listener.port}: {log}") from None
                time.sleep(0.02)
