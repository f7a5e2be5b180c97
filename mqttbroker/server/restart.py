"""A restart within one process: a new program takes the place of the broker's, and keeps its listening sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from mqttbroker.config.files import ConfigError
from mqttbroker.config.settings import Settings
from mqttbroker.net.passed_sockets import ListeningSocket, pass_on
from mqttbroker.server import config_check
from mqttbroker.system.defects import report_defect
from mqttbroker.system.service_manager import ServiceManager

log = logging.getLogger("mqttbroker")
audit = logging.getLogger("mqttbroker.audit")


class RestartRequest:
    """Stops the broker for a restart, unless the new one would not start with the settings as they are now.

    ``reread`` loads these and raises ConfigError. ``stopping`` is set once the restart is ``granted``.
    """

    def __init__(self, reread: Callable[[], Settings], stopping: asyncio.Event) -> None:
        self.granted = False
        self._reread = reread
        self._stopping = stopping
        self._check: asyncio.Task[None] | None = None

    def request(self) -> None:
        """SIGUSR2 was received."""
        audit.info("event=admin action=restart user=%s", "SIGUSR2")
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._grant_if_possible())
            report_defect(self._check, "restart")

    async def _grant_if_possible(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            settings = await loop.run_in_executor(None, self._reread)
            problems = await loop.run_in_executor(None, config_check.check, settings)
        except ConfigError as error:
            problems = error.problems
        for problem in problems:
            log.error("event=restart_refused reason=%s", problem)
        if not problems:
            self.granted = True
            self._stopping.set()


def restart(sockets: Sequence[ListeningSocket], manager: ServiceManager) -> NoReturn:
    """Run the command line of this process again, with ``sockets``. Raises OSError if that is not possible."""
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # until the new program handles it; the default ends the process
    os.environ.update(manager.variables)
    pass_on(sockets, os.environ)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
