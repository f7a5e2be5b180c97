"""Parts of a broker and of a node that must go on after a defect, say so, or end their owner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.patience import PATIENCE

from mqttbroker.auth import external
from mqttbroker.auth.external import ExternalAuthenticator, ExternalTerms
from mqttbroker.bridges.bridge import Bridge, BridgeContext
from mqttbroker.config import settings as config
from mqttbroker.config.settings import Cluster, Settings
from mqttbroker.net import worker_pool
from mqttbroker.net.passed_sockets import PassedSockets
from mqttbroker.net.worker_pool import WorkerPool
from mqttbroker.node.process import ClusterNode
from mqttbroker.server.reload import Reloader
from mqttbroker.server.restart import RestartRequest
from mqttbroker.server.server import Server
from mqttbroker.system import defects, memory_limit
from mqttbroker.system.memory_limit import MemoryWatch, ProcessMemory
from mqttbroker.system.service_manager import ServiceManager

pytestmark = pytest.mark.one_build

NOTHING: Any = None
DEFECT = RuntimeError("the handler is closed")


class FailsOnce:
    """A function that raises an exception, and notes the calls behind that."""

    def __init__(self) -> None:
        self.calls = 0
        self.again = asyncio.Event()

    def __call__(self, *arguments: object) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise DEFECT
        self.again.set()
        return 1.0


@pytest.fixture(autouse=True)
def pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defects, "PAUSE", 0.01)


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_broker_goes_on_to_commit(caplog: pytest.LogCaptureFixture) -> None:
    write = FailsOnce()
    admin = SimpleNamespace(controls=NOTHING, metrics=NOTHING, conditions=lambda: NOTHING, history=SimpleNamespace(capacity=0))
    server: Any = SimpleNamespace(
        broker=NOTHING, admin=admin, listeners=[], reloader=NOTHING, loaded=NOTHING, scheduler=SimpleNamespace(write=write),
        settings=Settings(durability="interval", durability_interval=0.0), _manager=ServiceManager({}),
    )  # fmt: skip
    tasks = Server._periodic_tasks(server)
    async with asyncio.timeout(PATIENCE):
        await write.again.wait()
    await ended(tasks)
    assert "event=defect in=write" in caplog.messages


async def test_a_node_goes_on_to_pass_reloads_to_its_cores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(engine="kafka", bootstrap_servers=("127.0.0.1:1",), node="n")
    reread, reloaded = FailsOnce(), asyncio.Event()
    reloaded.set()

    def settings() -> Settings:
        reread()
        reloaded.clear()
        return node.settings

    node = ClusterNode(Settings(cluster=cluster, data_dir=tmp_path), settings, ServiceManager({}), PassedSockets({}))
    node.reloader = SimpleNamespace(reloaded=reloaded, settings=node.settings)  # type: ignore[assignment]
    tasks = node._periodic_tasks()
    async with asyncio.timeout(PATIENCE):
        await reread.again.wait()
    await ended(tasks)
    assert "event=defect in=pass_reloads" in caplog.messages


async def test_workers_that_cannot_be_started_again_end_the_broker(caplog: pytest.LogCaptureFixture) -> None:
    reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    pool = WorkerPool(1, [], NOTHING, NOTHING, NOTHING, reason.set_result)
    pool.worker_ended(pool.workers[0])
    async with asyncio.timeout(PATIENCE):
        assert "AssertionError" in await reason  # it has no process
    assert "event=defect in=workers" in caplog.messages


async def test_workers_are_watched_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worker_pool, "PING_INTERVAL", 0.0)
    timeout = FailsOnce()
    pool = WorkerPool(0, [], NOTHING, NOTHING, timeout, NOTHING)
    await pool.start()
    async with asyncio.timeout(PATIENCE):
        await timeout.again.wait()
    await ended(list(pool._tasks))
    assert "event=defect in=worker_watch" in caplog.messages


async def test_a_reload_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    reloader = Reloader(FailsOnce(), Settings(), NOTHING, ServiceManager({}))
    reloader.start()
    assert reloader._task is not None
    await asyncio.wait([reloader._task])
    await asyncio.sleep(0)
    assert "event=defect in=reload" in caplog.messages


async def test_a_restart_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    request = RestartRequest(FailsOnce(), asyncio.Event())
    request.request()
    assert request._check is not None
    await asyncio.wait([request._check])
    await asyncio.sleep(0)
    assert "event=defect in=restart" in caplog.messages and not request.granted


async def test_a_bridge_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    context = BridgeContext(NOTHING, NOTHING, tmp_path, lambda: 0.0, lambda: "identity", lambda topic, payload: None, lambda: 1000)
    bridge = Bridge(config.Bridge(name="b", addresses=("127.0.0.1:1",)), context)
    update = FailsOnce()

    async def wait() -> None:
        update()
        await asyncio.Event().wait()

    monkeypatch.setattr(bridge, "_update_local_session", wait)
    bridge.start()
    async with asyncio.timeout(PATIENCE):
        await update.again.wait()
    await bridge.stop()
    assert "event=defect in=bridge" in caplog.messages


async def test_an_authenticator_is_started_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(external, "PluginProcess", lambda spec, kind: SimpleNamespace(start=lambda: None))
    authenticator = ExternalAuthenticator("plugin", NOTHING, ExternalTerms(1, 1, 1, 1.0, 1.0, 1000), NOTHING)
    authenticator._loop = asyncio.get_running_loop()
    start = FailsOnce()

    async def wait(spec: object) -> None:
        start()
        await asyncio.Event().wait()

    monkeypatch.setattr(authenticator, "_start_process", wait)
    authenticator._process, authenticator._pause = external._Process(NOTHING), 0.0
    authenticator._lost(NOTHING)
    async with asyncio.timeout(PATIENCE):
        await start.again.wait()
    await ended(list(authenticator._tasks))
    assert "event=defect in=authenticator" in caplog.messages


async def test_the_memory_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(memory_limit, "INTERVAL", 0.0)
    sample = FailsOnce()
    watch = MemoryWatch(SimpleNamespace(), ProcessMemory(), 0)  # type: ignore[arg-type]
    monkeypatch.setattr(watch, "sample", sample)
    watch.start(asyncio.get_running_loop())
    async with asyncio.timeout(PATIENCE):
        await sample.again.wait()
    watch.stop()
    assert "event=defect in=memory_watch" in caplog.messages
