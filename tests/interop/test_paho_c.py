"""The Paho C client (Debian's libpaho-mqtt-dev) against the broker: paho_c.c, compiled here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from client import Client, Connection, Program
from suite import Suite
from support.tools import needs

SOURCE = Path(__file__).with_name("paho_c.c")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paho") / "paho_c"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(path), "-lpaho-mqtt3c"], check=True)
    return path


@needs("paho-c")
class TestPahoC(Suite):
    @pytest.fixture(autouse=True)
    def compiled(self, program: Path) -> None:
        self.command = [str(program)]

    def connect(self, connection: Connection) -> Client:
        return Program(connection, self.command)
