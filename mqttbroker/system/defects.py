"""Work that nobody awaits: a defect that ends it is logged, and the part that depends on it is told, or begins it anew."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

log = logging.getLogger("mqttbroker")

PAUSE: Final = 1.0  # seconds


def _ignore(reason: str) -> None:
    """Nothing depends on it for long: it is started again when it is needed."""


def report_defect(work: asyncio.Future[Any] | concurrent.futures.Future[Any], part: str, failed: Callable[[str], object] = _ignore) -> None:
    """Log the exception that ends ``work``, a task of ``part``, and call ``failed`` with the reason, in one line.

    ``failed`` is called on the thread that calls the callbacks of ``work``.
    """

    def ended(work: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> None:
        defect = None if work.cancelled() else work.exception()
        if defect is not None:
            log.error("event=defect in=%s", part, exc_info=defect)
            failed(f"a defect of {part}: {defect!r}")

    work.add_done_callback(ended)


async def keep_running(part: str, run: Callable[[], Awaitable[None]]) -> None:
    """Await what ``run`` begins, and begin it anew `PAUSE` seconds after a defect has ended it."""
    while True:
        try:
            await run()
            return
        except Exception:
            log.exception("event=defect in=%s", part)
        await asyncio.sleep(PAUSE)
