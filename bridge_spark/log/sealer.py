"""The process that works with Arrow for the broker: both ends of the pipe to it.

The rule kept here: the broker's own process never loads Arrow and never computes for it.  The process runs at the lowest
priority, does one job after the other, and ends with its pipe, so that it never outlives who started it.

Each job is a line of JSON, {"do": "seal" | "rescue", ...}, and is answered by one: {} or {"error": "...", "errno": 28}.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Optional

LOWEST_PRIORITY = 19
# The last place is where this package is, whatever made it importable for who starts the process.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from bridge_spark.log.sealer import main; main()"


class SealingFailed(Exception):
    """A job was not done; the text says why, in one line, and ``errno`` what the system said, 0 if it was not that."""

    def __init__(self, reason: str, errno: int = 0) -> None:
        super().__init__(reason)
        self.errno = errno


class Sealer:
    """The process, started by the first job.  `kill` is for any thread, the rest for one."""

    def __init__(self) -> None:
        self._process: Optional[subprocess.Popen[str]] = None

    def do(self, job: dict[str, Any]) -> None:
        """Have the job done.  Raises `SealingFailed`."""
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
            failure = json.loads(answer)
        except ValueError:
            self.close()
            raise SealingFailed(f"the sealing process said {answer[:200]!r}") from None
        if failure:
            raise SealingFailed(failure["error"], failure["errno"])

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

    def kill(self) -> None:
        """End a job that is under way, and the process."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process; the next job starts another."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()


# -- the process --------------------------------------------------------------


def run(job: dict[str, Any]) -> None:
    """Do a job here.  Raises `ValueError`, `OSError` or `ImportError`."""
    if job["do"] == "rescue":
        from bridge_spark.log.sealed_rescue import rescue

        rescue(Path(job["source"]), Path(job["target"]), job["first_offset"], job["end_offset"])
        return
    from bridge_spark.log.sealed_writer import Source, seal

    source = Source(Path(job["source"]), job["stream"], job["partition"], job["first_offset"], job["end_offset"], job["size"])
    seal(source, Path(job["target"]))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    """Do the jobs that come on stdin."""
    os.nice(LOWEST_PRIORITY)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)  # whoever asked is gone, so nobody waits for the job under way

    threading.Thread(target=listen, daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        try:
            run(job)
            answer = {}
        except Exception as error:
            answer = {"error": _reason(error), "errno": getattr(error, "errno", None) or 0}
        print(json.dumps(answer), flush=True)

