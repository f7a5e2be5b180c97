"""A restart within one process: a new program takes the place of the broker's, and keeps its listening sockets."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn, Sequence

from mqttbroker.net.passed_sockets import ListeningSocket, pass_on
from mqttbroker.service_manager import ServiceManager


def restart(sockets: Sequence[ListeningSocket], manager: ServiceManager) -> NoReturn:
    """Run the command line of this process again, with ``sockets``. Raises OSError if that is not possible."""
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # until the new program handles it; the default ends the process
    os.environ.update(manager.variables)
    pass_on(sockets, os.environ)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
