"""A process that ends while it is asked."""

from __future__ import annotations

import os
import signal

import pytest

from bridge_spark.log.sealed.child_process import ChildProcess


def test_a_process_that_has_ended_is_closed_with_a_request_in_its_pipe_and_started_again() -> None:
    child = ChildProcess("bridge_spark.log.sealed.row_process", 0)
    child.start()
    assert child.process is not None
    os.kill(child.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(BrokenPipeError):
        child.ask({"path": "x"})
    assert child.close() == -signal.SIGKILL
    child.start()
    try:
        assert child.process is not None and child.process.poll() is None
    finally:
        assert child.close() == -signal.SIGKILL
