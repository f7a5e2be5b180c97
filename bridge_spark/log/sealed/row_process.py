"""A process that reads sealed segments for the broker, which loads no Arrow.

A request is a line of JSON on stdin: path, length of the file, offset and size. The answer is a line of JSON on stdout,
{"bytes": n, "end": offset, "reason": text}, and so many bytes: a record batch (`SealedRows.read`). The process ends when
stdin is closed, so it never outlives its parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Optional

LOW_PRIORITY = 10
CACHE_BYTES = 128 * 1024 * 1024  # of decoded row groups in the process

# The first argument is the directory of this package, so that the process can import it however this one did.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from bridge_spark.log.sealed.row_process import main; main(int(sys.argv[2]))"
)


class SealedBatch(NamedTuple):
    """What `SealedRows.read` found."""

    data: bytes
    end: int
    reason: str


class RowProcess:
    """The process, started by the first read. `kill` may be called from any thread, the rest from one."""

    def __init__(self, nice: int = LOW_PRIORITY) -> None:
        self._nice = nice
        self._process: Optional[subprocess.Popen[bytes]] = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def read(self, path: Path, length: int, offset: int, size: int) -> SealedBatch:
        """A batch of about `size` bytes. Raises `OSError`."""
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = self._start()
        assert process.stdin is not None and process.stdout is not None
        request = {"path": str(path), "length": length, "offset": offset, "size": size}
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            head = process.stdout.readline()
            answer: Any = json.loads(head) if head.endswith(b"\n") else {"bytes": -1}
            data = process.stdout.read(answer["bytes"]) if answer["bytes"] > 0 else b""
        except (OSError, ValueError, KeyError):
            answer, data = {"bytes": -1}, b""
        if answer["bytes"] != len(data):
            self.close()
            raise OSError("the process that reads sealed segments has ended")
        if answer["errno"]:
            raise OSError(answer["errno"], answer["reason"])
        return SealedBatch(data, answer["end"], answer["reason"])

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).resolve().parents[3]), str(self._nice)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """End the process, and with it the read that is under way."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process. The next read starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()


def main(nice: int) -> None:
    """Answer the requests on stdin until it is closed."""
    os.nice(nice)
    rows: Any = None
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        data, end, reason, errno = b"", 0, "", 0
        try:
            if rows is None:
                # Imported here, so that without pyarrow each read fails with that reason.
                from bridge_spark.log.sealed.rows import SealedRows

                rows = SealedRows(CACHE_BYTES)
            data, end, reason = rows.read(request["path"], request["length"], request["offset"], request["size"])
        except OSError as error:
            errno, reason = error.errno or 5, error.strerror or str(error)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        head = {"bytes": len(data), "end": end, "reason": reason, "errno": errno}
        out.write(json.dumps(head).encode() + b"\n" + data)
        out.flush()
