"""Starts the process of a plug-in (`mqttbroker.auth.plugin_main`), and talks with it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqttbroker.auth.plugin_main import MAX_FRAME, encode

log = logging.getLogger("mqttbroker.auth")

MAX_LINE = 500  # characters of a line of output in the log
MAX_LINES = 20  # of output in the log, per second
# The argument is the directory of this package, so that the process can import it however this one did.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from mqttbroker.auth.plugin_main import main; main(int(sys.argv[2]))"


class PluginFailed(Exception):
    """The process could not be started. One line with the reason."""


@dataclass(frozen=True)
class PluginSpec:
    """A plug-in and how its process is run; times in seconds, sizes in bytes."""

    plugin: str
    path: str | None  # a directory with modules
    options: dict[str, Any] = field(repr=False)
    timeout: float
    start_timeout: float
    max_memory: int


class PluginProcess:
    """A process that runs a plug-in. `start` and `close` may be called from any thread, the rest from the loop's."""

    sock: socket.socket  # once it is started

    def __init__(self, spec: PluginSpec, kind: str) -> None:
        self._spec = spec
        self._kind = kind
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until the plug-in is loaded. Raises PluginFailed, also if `close` is called."""
        spec = self._spec
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).resolve().parents[2]), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the broker
                )
            except OSError as error:
                ours.close()
                raise PluginFailed(f"cannot start a process: {error.strerror}") from None
        self.sock = ours
        threading.Thread(target=_log_output, args=(process, self._kind), daemon=True).start()
        if self._closed:
            process.kill()
        try:
            reason = self._load(spec)
        except TimeoutError:
            reason = f"not loaded within {spec.start_timeout:g} s"
        except (OSError, ValueError) as error:
            reason = str(error)
        if reason:
            self.close()
            ours.close()
            raise PluginFailed(reason)

    def _load(self, spec: PluginSpec) -> str:
        """Have the plug-in loaded; returns the reason if that failed."""
        fields = {"plugin": spec.plugin, "path": spec.path, "options": spec.options, "timeout": spec.timeout}
        self.sock.settimeout(spec.start_timeout)
        self.sock.sendall(encode({**fields, "max_memory": spec.max_memory}))
        answer = json.loads(self._receive(int.from_bytes(self._receive(4), "big")))
        return "" if answer.get("ready") is True else str(answer.get("error"))

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            if not part:
                assert self._process is not None
                raise OSError(f"the process ended with status {self._process.wait()}")
            data += part
        return data

    def close(self) -> None:
        """End the process at once."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # `_log_output` waits for it


class PluginConnection(asyncio.Protocol):
    """The connection with a `PluginProcess`. ``on_answer`` is called with each answer, ``on_lost`` once, at its end."""

    def __init__(
        self,
        process: PluginProcess,
        on_answer: Callable[[PluginConnection, dict[str, Any]], None],
        on_lost: Callable[[PluginConnection], None],
    ) -> None:
        self._process = process
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._received = bytearray()
        self.closed = False

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._process.sock.setblocking(False)
        self._transport, _ = await loop.create_connection(lambda: self, sock=self._process.sock)

    def send(self, number: int, fields: bytes) -> None:
        """Send a login: the fields of a JSON object."""
        frame = b'{"id":%d,' % number + fields[1:]
        self._transport.writelines([len(frame).to_bytes(4, "big"), frame])

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= 4 and not self.closed:
            end = 4 + int.from_bytes(received[:4], "big")
            if end > MAX_FRAME:
                self.kill()
                return
            if len(received) < end:
                return
            frame = bytes(received[4:end])
            del received[:end]
            self._on_answer(self, json.loads(frame))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        if not self.closed:
            self.closed = True
            self._transport.abort()
            self._process.close()
            self._process.sock.close()
            self._on_lost(self)


def _log_output(process: subprocess.Popen[bytes], kind: str) -> None:
    """Log the lines that the process writes to stdout and stderr; more than `MAX_LINES` per second are dropped."""
    assert process.stdout is not None
    second, lines = 0.0, 0
    with process.stdout as output:
        for data in iter(lambda: output.readline(MAX_LINE), b""):
            now = time.monotonic()
            if now - second >= 1.0:
                second, lines = now, 0
            lines += 1
            text = data.decode("utf-8", "replace").rstrip()
            if text and lines <= MAX_LINES:
                log.info("event=authenticator_output authenticator=%s text=%s", kind, text)
    process.wait()
