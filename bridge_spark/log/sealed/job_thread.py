"""A thread of the broker that has jobs done in a process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bridge_spark.log.sealed.job_process import JobProcess

logger = logging.getLogger(__name__)


class JobThread:
    """Calls `work` from `start` to `stop`: at once, when `due` is set, and after `pause()` seconds; None is no limit.

    `work` runs jobs in `process`, which is ended after each call.
    """

    def __init__(
        self,
        name: str,
        due: threading.Event,
        process: JobProcess,
        work: Callable[[], None],
        pause: Callable[[], float | None],
    ) -> None:
        self.stopping = False
        self._name = name
        self._due = due
        self._process = process
        self._work = work
        self._pause = pause
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop at once: the job that runs fails."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.stopping = True
        self._due.set()
        while thread.is_alive():
            self._process.kill()
            thread.join(0.05)

    def _run(self) -> None:
        self._due.set()
        while not self.stopping:
            self._due.wait(self._pause())
            self._due.clear()
            try:
                self._work()
            except Exception:
                # A defect must not end the thread: segments would fill the disk.
                logger.exception("event=defect in=%s", self._name)
            finally:
                self._process.close()
