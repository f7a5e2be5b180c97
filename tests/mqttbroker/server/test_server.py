"""The parts of a broker: in which order they stop, and that a start that fails stops those that are started."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from mqttbroker.config.settings import Http, Listener, Settings
from mqttbroker.net.passed_sockets import PassedSockets
from mqttbroker.server.server import Server
from mqttbroker.server.single_parts import SingleParts
from mqttbroker.system.service_manager import ServiceManager

pytestmark = pytest.mark.one_build

STOPS = (
    ("_manager", "stopping"), ("reloader", "stop"), ("memory_watch", "stop"), ("", "_close_listeners"), ("workers", "stop_listening"),
    ("_parts", "stop_accepting"), ("bridges", "stop"), ("security", "stop"), ("sealer", "stop"), ("archiver", "stop"), ("", "_cancel_tasks"),
    ("loaded.stream_reads", "stop"), ("loaded.store_runner", "drain"), ("_parts", "stop"), ("workers", "stop"), ("admin.runner", "close"),
    ("admin.http", "stop"), ("admin.consumers", "stop"),
)  # fmt: skip


def server(directory: Path, listening: socket.socket | None = None) -> Server:
    """A broker with HTTP, and with a listener on the address of ``listening``."""
    port = 0 if listening is None else listening.getsockname()[1]
    settings = Settings(data_dir=directory, http=Http(port=0), listeners=(Listener(port=port),))
    passed = PassedSockets({})
    return Server(
        SingleParts(settings, passed), settings, lambda: settings, ServiceManager({}), passed, lambda: os.kill(os.getpid(), signal.SIGTERM)
    )


def record_stops(made: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The calls of `STOPS` from now on."""
    calls: list[tuple[str, str]] = []

    def record(part: str, name: str) -> None:
        owner: Any = made
        for attribute in filter(None, part.split(".")):
            owner = getattr(owner, attribute)
        method = getattr(owner, name)

        def recorded(*arguments: Any) -> Any:
            calls.append((part, name))
            return method(*arguments)

        monkeypatch.setattr(owner, name, recorded)

    for part, name in STOPS:
        record(part, name)
    return calls


async def test_clients_leave_first_and_http_answers_until_everything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = server(tmp_path)
    calls = record_stops(made, monkeypatch)
    await made.run()
    assert calls == list(STOPS)


async def test_a_start_that_fails_stops_what_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = server(tmp_path, listening)
        calls = record_stops(made, monkeypatch)
        with pytest.raises(OSError, match="cannot listen"):
            await made.run()
    assert calls == list(STOPS)
    left = {thread.name for thread in set(threading.enumerate()) - before if "asyncio" not in thread.name}
    assert not left and made.listeners == [] and made.admin.http.port is not None


async def test_threads_that_are_started_before_a_failure_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    made = server(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("no bans can be read")

    monkeypatch.setattr(made.security, "start", fail)
    with pytest.raises(OSError, match="no bans"):
        await made.run()
    assert not {thread.name for thread in set(threading.enumerate()) - before if "asyncio" not in thread.name}
