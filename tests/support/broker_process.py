"""A broker for tests: a subprocess on free ports with its own data directory.

The broker chooses its ports and logs them. A broker that ends by itself or logs a traceback fails the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mqttbroker.auth.proven_passwords import KeyFileError, find_key_file
from support.forked_process import ForkedProcess, can_fork
from support.patience import PATIENCE
from support.processes import children, command_line

START_SECONDS = 2 * PATIENCE
STOP_SECONDS = PATIENCE
PACKAGE = ["-m", "mqttbroker"]


def worker_pids(broker: int) -> list[int]:
    """The process ids of a broker's connection workers."""
    commands = {child: command_line(child) for child in children(broker)}
    return [
        child for child, command in commands.items() if command.startswith(b"mqttbroker: worker ") or b"\0mqttbroker.worker\0" in command
    ]


class BrokerProcess:
    """``mqttbroker serve`` with ``config``, TOML text or tables as a dict.

    Flags for the ports and the data directory override ``config``. A ``data_dir`` is kept; without one a temporary
    directory is used until `close`. The log level must be info or debug, because the ports are read from the log.
    ``program`` is a script that Python runs in the place of the package; it inherits the descriptors ``pass_fds``. With
    TEST_WORKERS=N in the environment a broker whose configuration has no `workers` has N connection workers. Starts with
    `start` or ``with``.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        config: Mapping[str, Any] | str | None = None,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        program: Sequence[str] = PACKAGE,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mqttbroker-test-"))
        self.data_dir = self.directory / "data" if data_dir is None else Path(data_dir)
        self.config = self.directory / "broker.toml"
        self.config.write_text(config if isinstance(config, str) else to_toml(config or {}), encoding="utf-8")
        self.arguments = list(arguments)
        self.program = list(program)
        self.pass_fds = tuple(pass_fds)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MQTTBROKER_")}
        workers = os.environ.get("TEST_WORKERS")
        self.env = {**clean, **({"MQTTBROKER_WORKERS": workers} if workers else {}), **(env or {})}
        self.host = "127.0.0.1"
        self.launcher: Sequence[str] = ()  # what the command begins with, which runs the broker in its own place
        self.port = 0
        self.http_port = 0
        self.lines: list[str] = []
        self._first_line = 0  # of the last start
        self._new_line = threading.Condition()
        self._process: subprocess.Popen[str] | ForkedProcess | None = None
        self._reader: threading.Thread | None = None
        self._ended_by_test = True
        self._held: dict[int, socket.socket] = {}

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> BrokerProcess:
        """Start it and wait until it listens; raises AssertionError with the log if it does not."""
        self.launch()
        return self.started()

    def started(self) -> BrokerProcess:
        """Wait until it listens after `launch`; raises AssertionError with the log if it does not."""
        first = self._first_line
        self.port = self._port_of("tcp", first)
        if "off" not in self.arguments:
            self.http_port = self._port_of("https?", first)
        return self

    def launch(self) -> None:
        """Start it without waiting."""
        self._first_line = len(self.lines)
        assert self._process is None or self._process.poll() is not None, "already running"
        command = [*self.launcher, sys.executable, "-P", *self.program, "serve", "--config", str(self.config)]
        command += ["--port", str(self.port), "--http-port", str(self.http_port), "--data-dir", str(self.data_dir)]
        command += self.arguments
        if self.program == PACKAGE and not self.launcher and not self.pass_fds and can_fork(self.env):
            self._process = ForkedProcess(command, self.directory, self.env)
        else:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=self.env,
                cwd=self.directory,
                pass_fds=self.pass_fds,
            )
        self._ended_by_test = False
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """Send SIGTERM and wait; returns the exit status."""
        return self._end(signal.SIGTERM)

    def restart(self, kill: bool = False) -> BrokerProcess:
        """End it by SIGTERM or, with ``kill``, SIGKILL, and start it on the same ports and data."""
        self._end(signal.SIGKILL if kill else signal.SIGTERM)
        return self.start()

    def restart_in_place(self) -> BrokerProcess:
        """Send SIGUSR2, and wait until the new program listens, on other ports unless they were given."""
        self._first_line = len(self.lines)
        os.kill(self.pid, signal.SIGUSR2)
        self.wait_for_log("event=started", START_SECONDS, self._first_line)
        return self.started()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all its processes with SIGSTOP; what clients send meanwhile is there at once when they go on."""
        pids = [self.pid, *worker_pids(self.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its files; raises AssertionError if it had ended by itself or logged a traceback."""
        try:
            if self._process is not None:
                ended = None if self._ended_by_test else self._process.poll()
                self._end(signal.SIGTERM)
                assert ended is None, f"the broker ended by itself with {ended}:\n{self.log}"
            assert "Traceback" not in self.log, f"the broker logged a traceback:\n{self.log}"
        finally:
            for held in self._held.values():
                held.close()
            with suppress(KeyFileError):
                find_key_file(self.data_dir).unlink(missing_ok=True)
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> BrokerProcess:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            print(f"log of the broker:\n{self.log}")
        self.close()

    # --- log, HTTP, state -----------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        with self._new_line:
            return "\n".join(self.lines)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of a GET; raises urllib's HTTPError for a status of 400 or above."""
        request = urllib.request.Request(self.url + path, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            body: bytes = response.read()
        return body

    def wait_for_log(self, pattern: str, timeout: float = PATIENCE, after: int = 0) -> re.Match[str]:
        """Wait for a log line that matches ``pattern``, from line number ``after`` on; returns the match."""
        deadline = time.monotonic() + timeout
        with self._new_line:
            while True:
                for line in self.lines[after:]:
                    match = re.search(pattern, line)
                    if match is not None:
                        return match
                left = deadline - time.monotonic()
                ended = self._process is None or self._reader is None or not self._reader.is_alive()
                assert left > 0 and not ended, f"the log has no {pattern!r}:\n" + "\n".join(self.lines)
                self._new_line.wait(min(left, 0.2))

    @contextmanager
    def log_unread(self) -> Iterator[None]:
        """Leave the log in its pipe, which is soon full."""
        with self._new_line:
            yield

    def _port_of(self, listener: str, after: int) -> int:
        text = rf"event=listening .*\btype={listener}\b.*\bport=(\d+)"
        as_json = rf'"event": "listening".*"type": "{listener}".*"port": "?(\d+)'
        match = self.wait_for_log(f"{text}|{as_json}", START_SECONDS, after)
        return int(match[1] or match[2])

    def _read(self, process: subprocess.Popen[str] | ForkedProcess) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._new_line:
                self.lines.append(line.rstrip("\n"))
                self._new_line.notify_all()

    def _end(self, how: signal.Signals) -> int:
        process = self._process
        assert process is not None and self._reader is not None
        self._ended_by_test = True
        if process.poll() is None:
            process.send_signal(how)
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the broker did not end within {STOP_SECONDS} s:\n{self.log}") from None
        self._reader.join()
        self._hold_ports()
        return status

    def _hold_ports(self) -> None:
        """Bind the ports while the broker is down, so that the system gives them to no other process."""
        for port in {self.port, self.http_port} - {0} - self._held.keys():
            held = self._held[port] = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                held.bind((self.host, port))


def to_toml(tables: Mapping[str, Any]) -> str:
    """Tables as TOML; scalars and lists are written as JSON, which is also TOML."""

    def inline(value: Any) -> str:
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{json.dumps(key)} = {inline(item)}" for key, item in value.items()) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(inline(item) for item in value) + "]"
        return json.dumps(value)

    return "".join(f"{json.dumps(key)} = {inline(value)}\n" for key, value in tables.items())
