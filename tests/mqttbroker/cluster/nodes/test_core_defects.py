"""A defect in a core process ends it, with the reason, so that its node starts it again."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from support.patience import PATIENCE

from mqttbroker.cluster.nodes import core_control as control
from mqttbroker.cluster.nodes.core_control import CoreSetup, encode_line
from mqttbroker.config.settings import Cluster, Settings
from mqttbroker.node import shard_process
from mqttbroker.node.shard_process import ShardProcess

pytestmark = pytest.mark.one_build


class Store:
    def follow(self) -> None:
        """Nothing is read."""


class Core:
    """In the place of a `ShardParts`."""

    def __init__(self, *arguments: object) -> None:
        self.store = Store()


async def test_a_core_whose_state_cannot_be_reported_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(shard_process, "ShardParts", Core)
    monkeypatch.setattr(shard_process, "configure_log", lambda log: None)
    monkeypatch.setattr(shard_process, "set_umask", lambda mode: None)
    mine, its = socket.socketpair()
    its.setblocking(False)
    process = ShardProcess(0, its)
    monkeypatch.setattr(process, "_end", reason.set_result)

    async def wait(core: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(process, "_obey", wait)
    cluster = Cluster(engine="kafka", bootstrap_servers=("127.0.0.1:1",), node="n")
    setup = CoreSetup(Settings(cluster=cluster, data_dir=tmp_path), b"cc", "n", "127.0.0.1", "d", "key")
    with mine:
        mine.sendall(encode_line(control.Start(setup.encode())))
        task = asyncio.create_task(process.run())
        async with asyncio.timeout(PATIENCE):
            assert "AttributeError" in await reason  # the store has no status
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        process._transport.abort()
