"""A Python process that answers requests on its stdin, for code that the broker itself does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# The first argument is the directory of this package, so that the process can import it however this one did.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from {} import main; main(int(sys.argv[2]))"


class ChildProcess:
    """Runs ``main(nice)`` of a module, which must end when its stdin is closed, so that it never outlives this process.

    ``nice`` is the priority of the next process that is started, 0 that of this process. `kill` may be called from any
    thread, the rest from one.
    """

    def __init__(self, module: str, nice: int) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._program = _PROGRAM.format(module)
        self.nice = nice

    def start(self) -> None:
        """Start the process if it does not run. Raises `OSError`."""
        if self.process is not None and self.process.poll() is None:
            return
        self.close()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", self._program, str(Path(__file__).resolve().parents[3]), str(self.nice)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, request: dict[str, Any]) -> bytes:
        """Send a request as a line of JSON; returns the line that answers it, empty if the process has ended.

        Raises `OSError`.
        """
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def read(self, size: int) -> bytes:
        """The bytes that follow the line of an answer; fewer if the process has ended."""
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.read(size)

    def kill(self) -> None:
        """End the process, and with it the request that it answers."""
        process = self.process
        if process is not None:
            process.kill()

    def close(self) -> int | None:
        """End the process; returns its exit status, None if there is none. `start` starts a new one."""
        process, self.process = self.process, None
        if process is None:
            return None
        # A request that the process did not take is still in the buffer, which is flushed when it is closed.
        with suppress(BrokenPipeError), process:
            process.kill()
        return process.returncode
