"""Starts and talks to the worker process (`bridge_spark.log.sealed.worker`), for jobs that need Arrow or an archive.

The broker itself never loads Arrow.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Optional

LOWEST_PRIORITY = 19

# The first argument is the directory of this package, so that the process can import it however this one did.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from bridge_spark.log.sealed.worker import main; main(int(sys.argv[2]))"
)


class SealingFailed(Exception):
    """A job failed.  The text is one line; ``errno`` is that of an `OSError` in the worker, else 0."""

    def __init__(self, reason: str, errno: int = 0) -> None:
        super().__init__(reason)
        self.errno = errno


class WorkerProcess:
    """The worker process, started by the first job.  `kill` may be called from any thread, the rest from one.

    `nice` is its priority, 0 that of this process.
    """

    def __init__(self, nice: int = LOWEST_PRIORITY) -> None:
        self._nice = nice
        self._process: Optional[subprocess.Popen[str]] = None

    def run_within(self, job: dict[str, Any], seconds: float) -> Any:
        """`run`, but end the process if it has not answered after so many seconds."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            return self.run(job)
        except SealingFailed:
            if timer.is_alive():
                raise
            raise SealingFailed(f"no answer after {seconds:.0f} s") from None
        finally:
            timer.cancel()

    def run(self, job: dict[str, Any]) -> Any:
        """Run a job in the process and return its result.  Raises `SealingFailed`."""
        process = self._process
        try:
            if process is None or process.poll() is not None:
                self.close()
                process = self._process = self._start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError as error:
            self.close()
            raise SealingFailed(f"the sealing process: {error.strerror or error}") from None
        if not answer:
            process.kill()
            status = process.wait()
            self.close()
            raise SealingFailed(f"the sealing process ended with status {status}")
        try:
            answered = json.loads(answer)
        except ValueError:
            self.close()
            raise SealingFailed(f"the sealing process answered {answer[:200]!r}") from None
        if "error" in answered:
            raise SealingFailed(answered["error"], answered["errno"])
        return answered["result"]

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).resolve().parents[3]), str(self._nice)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

    def kill(self) -> None:
        """End the process, and with it the job that runs."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process.  The next job starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()
