"""Prometheus, as Debian packages it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from support.tools import program

PROMETHEUS = program("prometheus")
PROMTOOL = program("promtool")


class Prometheus:
    """A Prometheus with the configuration ``config``, a file, and its data in ``directory``; ``arguments`` are further flags.

    Ends with `stop` or ``with``.
    """

    def __init__(self, directory: Path, config: Path, arguments: Sequence[str] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.process = subprocess.Popen(
            [str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}",
             f"--web.listen-address={self.address}", *arguments], stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 45
        while True:
            try:
                if condition():
                    return
            except (urllib.error.URLError, ConnectionError):
                pass
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.2)

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()
