"""The description of a node's cores."""

from __future__ import annotations

import asyncio

import pytest
from support.patience import PATIENCE

from mqttbroker.cluster.nodes import core_processes
from mqttbroker.cluster.nodes.core_control import OWNER, Status, decode_status, encode_line
from mqttbroker.cluster.nodes.core_processes import FOLLOW, SERVE, CoreProcess

pytestmark = pytest.mark.one_build


def test_missing_links_and_a_failure_of_streams_are_warnings_of_an_owner_that_stays_ready() -> None:
    core = CoreProcess(3, str, lambda: None, lambda: 1.0, lambda _: None)
    assert core.warnings() == []
    core.role = SERVE
    assert core.warnings() == []
    core.status = decode_status(encode_line(Status(OWNER, links_missing=[1, 4], stream_problem="mqtt.stream.a: no leader")))
    assert core.warnings() == ["shard 3: no link to the cores of shards 1, 4", "shard 3: streams: mqtt.stream.a: no leader"]
    assert core.unready() == ""
    core.role = FOLLOW
    assert core.warnings() == []
    core.role, core.status = SERVE, Status(OWNER)
    assert core.warnings() == []


async def test_a_core_is_started_again_after_a_defect(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(core_processes, "FIRST_WAIT", 0.0)
    tried = asyncio.Event()
    attempts = 0

    async def fail(*command: object, **options: object) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            tried.set()
        raise RuntimeError("no child watcher")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    core = CoreProcess(3, str, lambda: None, lambda: 1.0, lambda _: None)
    core.take_role(FOLLOW, 0.0, 1)
    async with asyncio.timeout(PATIENCE):
        await tried.wait()
    await core.stop()
    assert "event=defect in=core_process shard=3" in caplog.messages
    assert any("event=core_ended shard=3 reason=a defect" in line for line in caplog.messages)
