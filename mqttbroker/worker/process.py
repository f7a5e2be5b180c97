"""The process of a connection worker: ``python -m mqttbroker.worker NUMBER DESCRIPTOR``.

The title of the process has the number. The descriptor is that of the link, whose first frame is a `WorkerSetup`.
The process ends with the link: it sends its clients the bytes that wait for them, and closes them. Operators send
signals to the broker's process only.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import signal
import socket
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import uvloop
from setproctitle import setproctitle

from mqttbroker.logs.output import configure_log, reopen, set_levels
from mqttbroker.net.link_frames import ABORT, ADMITTED, DIRECTORY, HOLDS, PING, READY, RELOAD, SETUP, STATUS, STOP
from mqttbroker.net.worker_setup import Directory, WorkerSetup
from mqttbroker.system.allocator import keep_freed_memory
from mqttbroker.system.file_limit import raise_file_limit
from mqttbroker.worker.clients import WorkerLink
from mqttbroker.worker.listeners import LinkedHandshake, LinkedListener

if TYPE_CHECKING:
    from mqttbroker.worker.front import Front

log = logging.getLogger("mqttbroker.network")

PR_SET_PDEATHSIG = 1  # prctl.h
CLOSING_SECONDS = 1.0  # in which clients may take the last bytes when the link is closed


class Worker:
    """One worker, from its setup to the end of its link."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = WorkerLink(self._loop, self._control, self._link_lost)
        self._listeners: list[LinkedListener] = []
        self._handshakes: dict[int, LinkedHandshake] = {}
        self._front: Front | None = None  # of a cluster's node
        self._directory: Directory | None = None  # the last one
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, sock: socket.socket) -> None:
        """Serve until the link is closed."""
        link: Any = self._link
        await self._loop.connect_accepted_socket(lambda: link, sock)
        await self._ended.wait()
        self._stop_listening()
        for unfinished in list(self._handshakes.values()):
            unfinished.handshake.abort()
        self._link.shut_down()
        if self._front is not None:
            await self._front.send_away()
            self._front.close()
        until = time.monotonic() + CLOSING_SECONDS
        while self._client_count and time.monotonic() < until:
            await asyncio.sleep(0.01)

    @property
    def _client_count(self) -> int:
        return len(self._link.clients) + (0 if self._front is None else self._front.client_count)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _link_lost(self) -> None:
        self._ended.set()

    def _control(self, kind: int, number: int, body: bytes) -> None:
        if kind == ADMITTED and number in self._handshakes:
            self._handshakes[number].admit()
        elif kind == ABORT and number in self._handshakes:
            self._handshakes[number].handshake.abort()
        elif kind == SETUP:
            self._start(self._open(WorkerSetup.decode(body)))
        elif kind == RELOAD:
            self._reload(WorkerSetup.decode(body))
        elif kind == STOP:
            self._stop_listening()
        elif kind == DIRECTORY:
            self._directory = Directory.decode(body)
            if self._front is not None:
                self._front.links.direct(self._directory)
        elif kind == PING:
            self._link.send(STATUS, 0, json.dumps(time.process_time()).encode())
            if self._front is not None:
                self._link.send(HOLDS, 0, self._front.holds().encode())

    async def _open(self, setup: WorkerSetup) -> None:
        """Open the listeners, and say whether that succeeded."""
        problems = []
        try:
            configure_log(replace(setup.log, audit_file=None))
            if setup.front is not None:
                from mqttbroker.worker.front import Front

                self._front = Front(self._loop, setup.front)
                if self._directory is not None:
                    self._front.links.direct(self._directory)
            for index, one in enumerate(setup.listeners):
                held = None if self._front is None else self._front.listener(index, one)
                listener = LinkedListener(self._link, self._handshakes, index, one, held)
                self._listeners.append(listener)
                await listener.open()
        except OSError as error:
            problems.append(error.strerror or str(error))
        self._link.send(READY, 0, json.dumps(problems).encode())

    def _reload(self, setup: WorkerSetup) -> None:
        set_levels(setup.log)
        problems = reopen(setup.log)
        if self._front is not None and setup.front is not None:
            problems += self._front.reload(setup.front)
        for listener, one in zip(self._listeners, setup.listeners):
            try:
                listener.reload(one)
            except OSError as error:
                problems.append(f"listener {one.listener.address}: {error.strerror or error}")
        self._link.send(READY, 0, json.dumps(problems).encode())


def end_with_broker() -> None:
    """Have the kernel kill this process if the broker's is killed: a worker that hangs would keep its sockets."""
    with suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run a worker; ``arguments`` are those of the command line."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_broker()
    setproctitle(f"mqttbroker: worker {arguments[0]}")
    raise_file_limit()
    keep_freed_memory()
    gc.freeze()

    async def run() -> None:
        await Worker().run(socket.socket(fileno=int(arguments[1])))

    with suppress(KeyboardInterrupt):
        uvloop.run(run())
    return 0
