"""support.worker_fork_server: forked workers are like started ones, and end with the program that Spark started."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from support.spark_session import python_path
from support.worker_fork_server import worker_python

pytestmark = [
    pytest.mark.one_build,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="processes have no descriptors"),
]

ONCE = ["-m", "timeit", "-n", "1", "-r", "1", "-s"]
SHOW = "import os, sys; print('pandas' in sys.modules, os.environ['GIVEN'], os.getcwd(), len(sys.argv), sys.modules['__main__'].__spec__.name, input())"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **more}


@pytest.mark.parametrize(("path", "forked"), [("", True), ("/elsewhere", False)])
def test_arguments_environment_directory_and_input(tmp_path: Path, path: str, forked: bool) -> None:
    given = environment(GIVEN="a value")
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (path, given["PYTHONPATH"])))
    said = subprocess.run(
        [worker_python(python_path()), *ONCE, SHOW, "pass"], input="text\n", capture_output=True, text=True, env=given, cwd=tmp_path
    )
    assert said.stdout.splitlines()[0] == f"{forked} a value {tmp_path} 8 timeit text", said.stderr


def test_other_commands_are_pythons() -> None:
    said = subprocess.run(
        [worker_python(python_path()), "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, env=environment()
    )
    assert said.stdout == f"{sys.executable}\n"


def test_a_worker_ends_with_its_program() -> None:
    command = [worker_python(python_path()), *ONCE, "import os; print(os.getpid()); input()", "pass"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()) as program:
        assert program.stdout is not None
        worker = os.pidfd_open(int(program.stdout.readline()))
        program.terminate()
        assert select.select([worker], [], [], 60)[0]
        os.close(worker)
    assert program.returncode == 0
