"""A Mosquitto of the system as another broker."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.local_kafka import free_ports
from support.patience import PATIENCE
from support.tools import needs, program

PROGRAM = program("mosquitto")
NEEDS_MOSQUITTO = needs("mosquitto")


class Mosquitto:
    """A process on ``port`` that keeps its data in ``directory``."""

    def __init__(self, directory: Path, settings: str = "") -> None:
        (self.port,) = free_ports(1)
        self._config = directory / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nuser root\npersistence true\n"
            f"persistence_location {directory}/\n{settings}\n"
        )
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None
        self.process = subprocess.Popen([PROGRAM, "-c", str(self._config)], stderr=subprocess.PIPE)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate()[1]
                time.sleep(0.02)

    def stop(self) -> None:
        """End it as SIGTERM does: it saves its sessions."""
        self.process.terminate()
        self.process.communicate()


@contextmanager
def mosquitto(directory: Path, settings: str = "") -> Iterator[Mosquitto]:
    broker = Mosquitto(directory, settings)
    try:
        yield broker
    finally:
        broker.stop()
