"""A defect in work that nobody awaits is logged, told, and does not end what must go on."""

from __future__ import annotations

import asyncio
import logging

import pytest

from mqttbroker.system import defects
from mqttbroker.system.defects import keep_running, report_defect

pytestmark = pytest.mark.one_build


async def fails() -> None:
    raise KeyError("x")


async def test_a_defect_of_a_task_is_logged_once_and_told(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    told = asyncio.Event()
    task = asyncio.create_task(fails())
    report_defect(task, "part", lambda reason: (reasons.append(reason), told.set()))
    await told.wait()
    assert reasons == ["a defect of part: KeyError('x')"]
    (record,) = caplog.records
    assert record.getMessage() == "event=defect in=part" and record.levelno == logging.ERROR and record.exc_info is not None


async def test_a_task_that_ends_or_is_cancelled_has_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    tasks = [asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(asyncio.Event().wait())]
    for task in tasks:
        report_defect(task, "part", reasons.append)
    await tasks[0]
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert not reasons and not caplog.records


async def test_work_that_must_go_on_begins_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(defects, "PAUSE", 0.0)
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise RuntimeError("the handler is closed")

    await keep_running("part", work)
    assert begun == 3 and caplog.messages == ["event=defect in=part"] * 2


async def test_work_that_is_cancelled_does_not_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    waits = asyncio.Event()

    async def work() -> None:
        waits.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_running("part", work))
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not caplog.records
