"""The core process of a shard of a cluster: ``python -m mqttbroker.node.shard_process SHARD DESCRIPTOR``.

The descriptor is that of a socket to the node process, whose lines are those of `mqttbroker.cluster.nodes.core_control`. The process follows the
log of its shard. Told to own it, it takes the shard over and serves its clients, until it is told to release it, or another process has
the shard: then it ends at once, and acknowledges nothing more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, Final

import uvloop
from setproctitle import setproctitle

from mqttbroker.admin.data.files import restrict, set_umask
from mqttbroker.cluster.nodes import core_control as control
from mqttbroker.cluster.nodes.core_control import CoreSetup, Lines, Status
from mqttbroker.cluster.shard.ownership import State
from mqttbroker.cluster.shard_parts import ShardParts
from mqttbroker.config.load import ConfigError
from mqttbroker.config.settings import Settings
from mqttbroker.logs.output import close, configure_log
from mqttbroker.net.passed_sockets import PassedSockets
from mqttbroker.server.server import Server, loading
from mqttbroker.system.allocator import keep_freed_memory
from mqttbroker.system.defects import report_defect
from mqttbroker.system.memory_limit import divided_memory
from mqttbroker.system.service_manager import ServiceManager
from mqttbroker.worker.process import end_with_broker
from sessions.store.interface import StoreError

log = logging.getLogger("mqttbroker.cluster")

LOOK_INTERVAL: Final = 0.05  # seconds between two looks at the state, which is sent when it changes
RELEASE_MARGIN: Final = 10.0  # seconds that a release may take beyond two appends
LOG_SECONDS: Final = 0.5  # in which the last lines of the log are to be written
FAILED: Final = 3  # exit status of a process that may not go on

_STATES: Final = {
    State.FOLLOWER: control.STANDBY,
    State.TAKING_OVER: control.TAKING_OVER,
    State.LOADING: control.TAKING_OVER,
    State.OWNER: control.OWNER,
    State.CHECKING: control.CHECKING,
    State.STEPPING_DOWN: control.RELEASED,
    State.FENCED: control.FENCED,
}


def core_settings(settings: Settings, shard: int) -> Settings:
    """The settings of the core of a shard, made of those of its node, which may come to own all shards."""
    http = dataclasses.replace(settings.http, port=control.http_port(settings.http.port, shard))
    memory = divided_memory(settings.limits.max_memory, settings.cluster.shards)
    limits = dataclasses.replace(settings.limits, max_memory=memory)
    return dataclasses.replace(settings, workers=0, http=http, limits=limits, data_dir=settings.data_dir / "shards" / f"{shard:02d}")


class ShardProcess:
    """The core of ``shard``, from its setup to its end; ``sock`` is the socket to the node."""

    def __init__(self, shard: int, sock: socket.socket) -> None:
        self._shard = shard
        self._sock = sock
        self._commands: asyncio.Queue[Any] = asyncio.Queue()
        self._transport: Any = None
        self._core: ShardParts | None = None
        self._server: Server | None = None
        self._settings = Settings()
        self._serving: asyncio.Task[None] | None = None
        self._is_open = False  # clients may connect
        self._releasing = False
        self._problem = ""
        self._sent = Status("")
        self._sent_at = 0.0

    # -- an asyncio protocol: the node's lines --------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._lines = Lines()

    def data_received(self, data: bytes) -> None:
        for line in self._lines.feed(data):
            self._commands.put_nowait(control.decode_command(line))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._sent.state != control.RELEASED:
            self._end("the node process has ended")

    def pause_writing(self) -> None:
        """The node reads late; the lines are short."""

    def resume_writing(self) -> None:
        """The node reads again."""

    # -- from start to end ------------------------------------------------------------

    async def run(self) -> None:
        """Return when the shard is released."""
        loop = asyncio.get_running_loop()
        protocol: Any = self
        await loop.connect_accepted_socket(lambda: protocol, self._sock)
        start = await self._commands.get()
        assert isinstance(start, control.Start), "the first line has the setup"
        setup = CoreSetup.decode(start.setup)
        settings = self._settings = core_settings(setup.settings, self._shard)
        configure_log(dataclasses.replace(settings.log, audit_file=None))
        set_umask(settings.data_mode)
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        restrict(settings.data_dir, settings.data_mode)
        core = self._core = ShardParts(setup._replace(settings=settings), self._shard, settings.data_dir, self._end)
        core.store.follow()
        reporting = asyncio.create_task(self._report())
        report_defect(reporting, "core_status", self._end)
        try:
            await self._obey(core)
        finally:
            reporting.cancel()

    async def _obey(self, core: ShardParts) -> None:
        loaded = asyncio.wrap_future(core.store.loaded)
        command = asyncio.create_task(self._commands.get())
        while True:
            waiting: list[asyncio.Future[Any]] = [command]
            if self._serving is None:
                waiting.append(loaded)
            else:
                waiting.append(self._serving)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._serving is None and loaded.done():
                loaded.result()
                self._serving = asyncio.create_task(self._serve(core))
            elif self._serving is not None and self._serving.done():
                self._serving.result()
                return
            if command.done():
                if self._obeyed(core, command.result()):
                    break
                command = asyncio.create_task(self._commands.get())
        await self._release(core)

    def _obeyed(self, core: ShardParts, command: Any) -> bool:
        """Do as a command says; true if the process is to release the shard."""
        if isinstance(command, control.Own):
            core.store.own(command.patience)
        elif isinstance(command, control.Owners):
            core.direct(command.owners, command.nodes)
        elif isinstance(command, control.Reload):
            self._settings = core_settings(CoreSetup.decode(command.setup).settings, self._shard)
            core.reload(self._settings)
            if self._server is not None and self._is_open:
                self._server.reloader.reload()
        elif isinstance(command, control.Snapshot):
            core.request_snapshot()
        elif isinstance(command, (control.Release, control.Stop)):
            return True
        elif isinstance(command, control.Standby):
            return core.store.status().state is not State.FOLLOWER
        return False

    def _reread(self) -> Settings:
        return self._settings

    async def _serve(self, core: ShardParts) -> None:
        """The broker, until it is told to stop."""
        with loading():
            server = self._server = Server(core, self._settings, self._reread, ServiceManager({}), PassedSockets({}), self._opened)
        if self._releasing:
            server.stopping.set()
        await server.run()

    def _opened(self) -> None:
        self._is_open = True

    async def _release(self, core: ShardParts) -> None:
        """Disconnect the clients, commit everything, and give the shard up."""
        self._releasing = True
        seconds = 2 * self._settings.cluster.append_timeout + RELEASE_MARGIN
        watch = threading.Timer(seconds, self._end, (f"the release took more than {seconds:g} s",))
        watch.daemon = True
        watch.start()
        if self._serving is None and core.store.loaded.done():
            self._serving = asyncio.create_task(self._serve(core))
        if self._serving is not None:
            if self._server is not None:
                self._server.stopping.set()
            await self._serving
        else:
            await asyncio.get_running_loop().run_in_executor(None, core.store.stop)
        watch.cancel()
        self._send(Status(control.RELEASED))

    def _end(self, reason: str) -> None:
        """End the process at once; on any thread."""
        if self._problem:
            return
        self._problem = reason
        with suppress(OSError):
            self._sock.send(control.encode_line(Status(control.FENCED, reason)))
        log.error("event=shard_ended shard=%d reason=%s", self._shard, reason)
        writing = threading.Thread(target=close, daemon=True)
        writing.start()
        writing.join(LOG_SECONDS)
        os._exit(FAILED)

    # -- the state for the node -------------------------------------------------------

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            status = self._status()
            if (status.state, status.problem) != (self._sent.state, self._sent.problem) or (
                loop.time() >= self._sent_at + control.STATUS_INTERVAL
            ):
                self._send(status)
                self._sent_at = loop.time()
            await asyncio.sleep(LOOK_INTERVAL)

    def _send(self, status: Status) -> None:
        self._sent = status
        if self._transport is not None:
            self._transport.write(control.encode_line(status))

    def _status(self) -> Status:
        assert self._core is not None
        store = self._core.store.status()
        state = _STATES[store.state]
        if self._releasing:
            state = control.RELEASING
        elif state in (control.OWNER, control.CHECKING) and not self._is_open:
            state = control.TAKING_OVER
        elif state == control.CHECKING and not store.problem:
            state = control.OWNER  # it looks at the end of the log, as after each pause
        elif state == control.STANDBY and not store.open:
            state = control.STARTING
        status = Status(state, store.problem, store.lag, store.end, store.epoch, store.epoch_changes)
        server = self._server
        if server is not None and self._is_open:
            status.clients = len(server.broker.clients.connections)
            status.sessions = len(server.broker.registry)
            status.http_port = server.admin.http.port
            status.problems = server.reloader.problems
            status.resident = server.process_memory.resident()
            status.snapshots = self._core.snapshots_written
            status.bus_lag = self._core.bus_lag
            status.links_missing = list(self._core.links_missing)
            status.stream_problem = self._core.stream_problem
        return status


def main(arguments: list[str]) -> int:
    """Run the core of a shard; ``arguments`` are those of the command line."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_broker()
    shard = int(arguments[0])
    setproctitle(f"mqttbroker: shard {shard}")
    keep_freed_memory()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what concerns operators has its own events
    sock = socket.socket(fileno=int(arguments[1]))
    sock.setblocking(False)

    async def run() -> None:
        process = ShardProcess(shard, sock)
        try:
            await process.run()
        except (ConfigError, OSError, StoreError, ValueError) as error:
            process._end(str(error))
        except Exception as error:
            log.exception("event=defect in=core")
            process._end(f"a defect of the core: {error!r}")

    uvloop.run(run())
    close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
