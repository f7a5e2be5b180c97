"""Targets of the log: files that are rotated and a full disk, the journal, and levels of areas."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.broker_process import BrokerProcess
from support.core import wait_until
from support.raw_client import RawClient

from mqttbroker.config.settings import LOG_AREAS
from mqttbroker.logs.levels import AREAS
from mqttbroker.logs.targets import LogFile

Start = Callable[..., BrokerProcess]


def run_logging(code: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    program = f"import logging\nfrom mqttbroker.logs import output as logs\nfrom mqttbroker.logs.output import Destinations\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output="stderr" not in more, text=True, timeout=50,
                          check=True, env={**os.environ, **(env or {})}, **more)  # fmt: skip


def test_lines_have_priorities_on_a_stderr_that_is_the_journal() -> None:
    reader, writer = os.pipe()
    status = os.fstat(writer)
    code = 'logs.configure("info", "text")\nlogging.error("event=x")\n'
    run_logging(code, env={"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}, stderr=writer)
    run_logging(code, env={"JOURNAL_STREAM": "1:2"}, stderr=writer)
    os.close(writer)
    with os.fdopen(reader) as lines:
        first, second = lines.read().splitlines()
    assert re.match(r"<3>\d{4}-.* error event=x", first) and re.match(r"\d{4}-.* error event=x", second)


def test_lines_are_lost_on_a_full_disk_and_counted() -> None:
    assert LogFile(Path("/dev/full")).write([b"a", b"b"]) == 2
    done = run_logging("""
from pathlib import Path
logs.configure("info", "text", None, Destinations(("file", "stderr"), Path("/dev/full")))
for number in range(5):
    logging.info("event=x")
handlers = logging.getLogger().handlers
while handlers[0].dropped < 5:
    pass
print(logs.dropped_lines())
""")
    assert done.stdout == "5\n" and done.stderr.count("event=x") == 5


def test_the_log_of_a_broker_is_a_file_that_is_rotated(start_broker: Start, tmp_path: Path) -> None:
    file = tmp_path / "broker.log"
    broker = start_broker(config=f'log.to = ["file", "stderr"]\nlog.file = "{file}"\nlog.level = "info"\n')
    assert file.stat().st_mode & 0o777 == 0o600
    wait_until(lambda: "event=started" in file.read_text())  # its thread writes after that of stderr, or before it
    file.rename(tmp_path / "broker.log.1")
    after = len(broker.lines)
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=reloaded", after=after)
    with RawClient(broker.port) as client:
        client.connect("rotated")
    assert broker.terminate() == 0
    assert "client=rotated" in file.read_text() and "event=started" not in file.read_text()
    old = (tmp_path / "broker.log.1").read_text()
    assert "event=started" in old and "client=rotated" not in old


def test_areas_of_the_settings_have_loggers() -> None:
    assert tuple(AREAS) == LOG_AREAS


def test_levels_of_areas_apply_and_end(start_broker: Start) -> None:
    broker = start_broker(config='log.level = "info"\n[log.levels]\nclients = "error"\npackets = "debug"\n')
    with RawClient(broker.port) as client:
        client.connect("quiet")
        broker.wait_for_log("event=packet_sent client=quiet .*type=CONNACK")
    assert not any("event=connected client=quiet" in line for line in broker.lines)
    broker.config.write_text('log.level = "info"\nlog.levels = {packets = "error"}\n')
    after = len(broker.lines)
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=reloaded", after=after)
    with RawClient(broker.port) as client:
        client.connect("heard")
        broker.wait_for_log("event=connected client=heard")
    assert not any("event=packet_" in line and "heard" in line for line in broker.lines)


def test_workers_log_to_the_same_file(start_broker: Start, tmp_path: Path) -> None:
    file = tmp_path / "broker.log"
    broker = start_broker(config=f'workers = 1\nlog.to = ["file", "stderr"]\nlog.file = "{file}"\n')
    pid = broker.wait_for_log(r"event=worker_started worker=1 pid=(\d+)")[1]
    assert str(file) in [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]


def test_a_log_file_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'log.to = "file"\nlog.file = "{tmp_path}/missing/log"\n')
    done = subprocess.run([sys.executable, "-P", "-m", "mqttbroker", "serve", "--config", str(tmp_path / "c.toml")],
                          capture_output=True, text=True, timeout=50, cwd=tmp_path, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (2, f"{tmp_path}/c.toml:2: log.file: {tmp_path}/missing/log: No such file or directory\n")
