"""An S3 server on a free port of 127.0.0.1: moto, which keeps everything in memory.

MOTO_SERVER is the path of the program ``moto_server`` if it is not installed beside this Python, as packages of other tests
may not agree with its own.  Without it, tests that need it are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import IO

import pytest

from support.patience import PATIENCE

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


class S3Server:
    """A running server with the bucket ``bucket``.  ``endpoint`` is HOST:PORT, ``environment`` the variables for clients."""

    def __init__(self) -> None:
        found = os.environ.get("MOTO_SERVER") or shutil.which("moto_server", path=Path(sys.executable).parent)
        if found is None:
            pytest.skip("moto is not installed, and MOTO_SERVER is not set")
        self._process = subprocess.Popen(
            [found, "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        )
        assert self._process.stderr is not None
        self.endpoint = self._announced(self._process.stderr)
        self.url = f"http://{self.endpoint}"
        self.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.url}
        self.make_bucket("bucket")

    @staticmethod
    def _announced(stderr: IO[str]) -> str:
        for line in stderr:
            match = re.search(r"Running on http://(127\.0\.0\.1:[0-9]+)", line)
            if match is not None:
                # Requests are logged; the pipe must not fill up.
                Thread(target=deque, args=(stderr, 0), daemon=True).start()
                return match[1]
        raise AssertionError("the S3 server did not start")

    def make_bucket(self, name: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=PATIENCE).close()

    def pause(self, paused: bool) -> None:
        """Stop answering, or answer again."""
        self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server whose endpoint and credentials are in the environment."""
    server = S3Server()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
    finally:
        server.stop()
