"""`ControlRunner`: operations from other threads, one slice per iteration of the loop, and a broker's HTTP server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.broker_process import BrokerProcess
from support.core import Core
from support.metric_samples import samples
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.admin.control.runner import BrokerStopping, ControlRunner
from mqttbroker.admin.control.slices import ControlError, Slices
from mqttbroker.admin.control.views import SessionFilter


class Host:
    """A broker core and a runner on the test's loop."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.loop = asyncio.get_running_loop()
        self.told = 0
        self.reloads = 0
        self.runner = ControlRunner(self.loop, self.tell_time, self.reload)

    def tell_time(self) -> None:
        self.told += 1

    async def reload(self) -> None:
        await asyncio.sleep(0)
        self.reloads += 1
        if self.reloads > 1:
            raise OSError("no certificate")


@pytest_asyncio.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    with Core(tmp_path) as core:
        made = Host(core)
        yield made
        made.runner.close()


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def test_results_and_errors_reach_other_threads(host: Host) -> None:
    core, runner = host.core, host.runner
    for number in range(3000):
        core.broker.registry.create(f"dev-{number:04d}", False)

    def work() -> tuple[Any, ...]:
        ident = runner.call(threading.get_ident).result(10)
        page = runner.scan(core.control.sessions.page, SessionFilter(contains="99"), limit=5).result(10)
        with pytest.raises(ControlError, match="^no session 'none'$"):
            runner.call(core.control.subscriptions.open_client, "none").result(10)
        with pytest.raises(ControlError, match="^a page has"):
            runner.scan(core.control.sessions.page, limit=0).result(10)
        return ident, page

    ident, page = await in_thread(work)
    assert ident == threading.get_ident()
    assert [summary.client_id for summary in page.sessions] == [f"dev-{n:04d}" for n in (99, 199, 299, 399, 499)]
    assert host.told >= 4


async def test_the_loop_serves_others_between_slices(host: Host) -> None:
    slices: list[str] = []

    def operation(name: str, waits: list[float]) -> Slices[str]:
        for wait in waits:
            slices.append(name)
            yield wait
        return name.upper()

    def mark() -> None:
        slices.append("|")
        if not all(future.done() for future in futures):
            host.loop.call_soon(mark)

    futures = [host.runner.scan(operation, "a", [0.0] * 3), host.runner.scan(operation, "b", [0.0, 0.05, 0.0])]
    host.loop.call_soon(mark)
    assert await asyncio.gather(*map(asyncio.wrap_future, futures)) == ["A", "B"]
    text = "".join(slices)
    assert "ab" not in text and "aa" not in text and "ba" not in text, "one slice per iteration"
    assert text.replace("|", "") == "ababab"
    assert text.count("|") > 10, "the loop is free while an operation waits"


async def test_a_cancelled_operation_ends_before_its_next_slice(host: Host) -> None:
    ran = 0

    def endless() -> Slices[None]:
        nonlocal ran
        while True:
            ran += 1
            yield 0.0

    future = host.runner.scan(endless)
    while ran < 3:
        await asyncio.sleep(0)
    future.cancel()
    await asyncio.wrap_future(host.runner.call(len, "abc"))
    before = ran
    for _ in range(10):  # iterations in which a slice would run
        await asyncio.sleep(0)
    assert ran == before
    with pytest.raises(CancelledError):
        future.result(0)
    assert await asyncio.wrap_future(host.runner.call(len, "abc")) == 3


async def test_closing_fails_what_is_not_done(host: Host) -> None:
    def endless() -> Slices[None]:
        while True:
            yield 0.0

    futures: list[Future[Any]] = [host.runner.scan(endless), host.runner.scan(endless), host.runner.call(len, "abc")]
    await asyncio.sleep(0)
    host.runner.close()
    for future in futures:
        with pytest.raises(BrokerStopping, match="the broker is stopping"):
            future.result(0)
    with pytest.raises(BrokerStopping):
        await in_thread(lambda: host.runner.call(len, "abc"))
    await asyncio.sleep(0)


async def test_reload(host: Host) -> None:
    await in_thread(lambda: host.runner.reload().result(10))
    assert host.reloads == 1
    with pytest.raises(OSError, match="no certificate"):
        await asyncio.wrap_future(host.runner.reload())


async def test_many_threads_at_once(host: Host) -> None:
    core = host.core
    for number in range(2000):
        core.broker.registry.create(f"dev-{number:04d}", False)

    def work(number: int) -> int:
        found, after = 0, ""
        while True:
            page = host.runner.scan(core.control.sessions.page, after=after, limit=100 + number).result(30)
            found += len(page.sessions)
            after = page.after
            if not after:
                return found

    with ThreadPoolExecutor(8) as pool:
        counts = await asyncio.gather(*(host.loop.run_in_executor(pool, work, number) for number in range(8)))
    assert counts == [2000] * 8


# --- a broker process ---------------------------------------------------------------------------------------------


def test_metrics_and_readiness_of_a_busy_broker(start_broker: Callable[..., BrokerProcess]) -> None:
    """The HTTP server's thread asks the event loop while that serves clients, and stops with the broker."""
    broker = start_broker()
    stopped = threading.Event()
    scrapes: list[float] = []

    def scrape() -> None:
        while not stopped.is_set():
            try:
                scrapes.append(samples(broker.get("/metrics"))["mqttbroker_publish_received_total"])
                assert broker.get("/readyz")
            except OSError:
                assert stopped.wait(PATIENCE), "HTTP failed while the broker was running"

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    with RawClient(broker.port) as client:
        client.connect("c")
        for thread in threads:
            thread.start()
        sent = 0
        while sent < 1000 or len(scrapes) < 10:
            client.publish("t", b"x", 1)
            sent += 1
        assert samples(broker.get("/metrics"))["mqttbroker_publish_received_total"] == sent
    stopped.set()
    assert broker.terminate() == 0
    for thread in threads:
        thread.join()
    assert scrapes[-1] <= sent and min(scrapes) >= 0
