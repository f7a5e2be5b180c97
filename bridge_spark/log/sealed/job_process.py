"""Runs jobs of `bridge_spark.log.sealed.segment_jobs`, which need Arrow or an archive, in a process of their own.

The broker itself never loads Arrow.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from bridge_spark.log.sealed.child_process import ChildProcess

LOWEST_PRIORITY = 19


class JobFailed(Exception):
    """A job failed.  The text is one line; ``errno`` is that of an `OSError` in the process, else 0."""

    def __init__(self, reason: str, errno: int = 0) -> None:
        super().__init__(reason)
        self.errno = errno


class JobProcess:
    """The process, started by the first job.  `kill` may be called from any thread, the rest from one.

    `nice` is its priority, 0 that of this process.
    """

    def __init__(self, nice: int = LOWEST_PRIORITY) -> None:
        self._child = ChildProcess("bridge_spark.log.sealed.segment_jobs", nice)

    def run_within(self, job: dict[str, Any], seconds: float) -> Any:
        """`run`, but end the process if it has not answered after so many seconds."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            return self.run(job)
        except JobFailed:
            if timer.is_alive():
                raise
            raise JobFailed(f"no answer after {seconds:.0f} s") from None
        finally:
            timer.cancel()

    def run(self, job: dict[str, Any]) -> Any:
        """Run a job in the process and return its result.  Raises `JobFailed`."""
        try:
            self._child.start()
            answer = self._child.ask(job)
        except OSError as error:
            self._child.close()
            raise JobFailed(f"the sealing process: {error.strerror or error}") from None
        if not answer:
            raise JobFailed(f"the sealing process ended with status {self._child.close()}")
        try:
            answered = json.loads(answer)
        except ValueError:
            self._child.close()
            text = answer[:200].decode(errors="replace")
            raise JobFailed(f"the sealing process answered {text!r}") from None
        if "error" in answered:
            raise JobFailed(answered["error"], answered["errno"])
        return answered["result"]

    def kill(self) -> None:
        """End the process, and with it the job that runs."""
        self._child.kill()

    def close(self) -> None:
        """End the process.  The next job starts a new one."""
        self._child.close()
