"""Brokers that tests fork from one that is loaded are like those that are started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.forked_process import ForkedProcess, can_fork

COMMAND = [sys.executable, "-P", "-m", "mqttbroker", "serve"]


def forked(directory: Path, *arguments: str, **environment: str) -> ForkedProcess:
    return ForkedProcess([*COMMAND, *arguments], directory, {**os.environ, **environment})


def test_output_and_exit_status_are_those_of_a_started_command(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("nonsense = 1\n")
    for arguments in (["--config", "bad.toml"], ["--nonsense"], ["--print-config"]):
        started = subprocess.run(
            [*COMMAND, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        process = forked(tmp_path, *arguments)
        assert (process.stdout.read(), process.wait(20)) == (started.stdout, started.returncode)
        assert process.poll() == started.returncode


def test_variables_of_the_environment_are_read(tmp_path: Path) -> None:
    process = forked(tmp_path, "--print-config", MQTTBROKER_LIMITS__MAX_INFLIGHT="7")
    assert "max_inflight = 7" in process.stdout.read()
    assert process.wait(20) == 0


def test_the_signal_that_ended_it_is_its_status(start_broker: Any) -> None:
    broker = start_broker()
    process = broker._process
    assert isinstance(process, ForkedProcess)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    assert process.poll() is None
    broker.kill()
    assert process.returncode == -signal.SIGKILL
    broker.start()
    assert broker.terminate() == 0


def test_it_has_no_files_of_another_process(start_broker: Any) -> None:
    start_broker()
    files = [kinds_of_files(start_broker(env=variables).pid) for variables in ({}, {"NOT_FORKED": "1"})]
    assert files[0] == files[1]


def kinds_of_files(process: int) -> list[str]:
    """The open files of a process, without numbers."""
    links = [os.readlink(each) for each in Path(f"/proc/{process}/fd").iterdir()]
    return sorted(re.sub(r"[\d/].*", "", link) or Path(link).name for link in links)


def test_only_variables_that_no_interpreter_reads_may_be_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_fork({**os.environ, "MQTTBROKER_PORT": "1"})
    assert can_fork({**os.environ, "JAVA_HOME": "/java", "PYSPARK_PYTHON": "python", "SPARK_BUFFER_SIZE": "1"}), (
        "Spark started in this process"
    )
    assert not can_fork({**os.environ, "LD_PRELOAD": "any.so"})
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert not can_fork(os.environ)
    with BrokerProcess() as broker:
        assert isinstance(broker._process, subprocess.Popen)
