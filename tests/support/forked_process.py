"""``mqttbroker serve`` without its imports: a process that is forked from one that has done them.

They are most of what a start costs, and the tests start more than a thousand brokers. The process runs the same code from there on, has
its own arguments, environment, directory and descriptors, and ends as an interpreter does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

SERVER = Path(__file__).with_name("fork_server.py")
ANSWER_BYTES = 64
ANY_TIME = ("MQTTBROKER_", "PYTEST_", "SPARK_", "PYSPARK_", "JAVA_HOME")


class ForkServer:
    """The process that forks; ends with this one."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self.environment = of_interpreter(os.environ)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SERVER), str(its.fileno())], stdin=subprocess.DEVNULL, pass_fds=[its.fileno()]
            )

    def fork(self, request: Mapping[str, object], output: int, status: int) -> int:
        """Fork a process that writes to ``output``, and whose exit status is written to ``status``; returns its id."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output, status])
            answer = self._socket.recv(ANSWER_BYTES)
        assert answer, f"the process that forks brokers has ended with {self._process.wait()}"
        return int(answer)


@cache
def fork_server() -> ForkServer:
    return ForkServer()


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment may be forked: it has no variable for the interpreter or a library that the server has not."""
    return of_interpreter(environment) == fork_server().environment


def of_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may take effect when an interpreter starts: not the broker's, nor those that pytest and Spark set as tests run."""
    return {name: value for name, value in environment.items() if not name.startswith(ANY_TIME)}


class ForkedProcess:
    """A process with this command, whose output is ``stdout``; it has the methods of `subprocess.Popen` that tests call."""

    def __init__(self, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        read, output = os.pipe()
        self._status, status = os.pipe()
        request = {"command": list(command), "directory": str(directory), "environment": dict(environment)}
        try:
            self.pid = fork_server().fork(request, output, status)
        finally:
            os.close(output)
            os.close(status)
        self.stdout = open(read, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or the signal as a negative number, once the process has ended."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("mqttbroker serve", timeout or 0.0)
            self._ended()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        self.returncode = int(os.read(self._status, ANSWER_BYTES))
        os.close(self._status)
