"""The core processes of a node: started, told what to be, watched, and started again when they end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from mqttbroker.cluster.nodes.core_control import (
    CHECKING,
    FENCED,
    OWNER,
    RELEASED,
    STANDBY,
    STARTING,
    Command,
    Lines,
    Own,
    Owners,
    Release,
    Reload,
    Standby,
    Start,
    Status,
    Stop,
    core_command,
    decode_status,
    encode_line,
)
from mqttbroker.system.defects import keep_running

log = logging.getLogger("mqttbroker.cluster")

NOTHING: Final = ""  # the role of a shard without a process here
FOLLOW: Final = "follow"
SERVE: Final = "serve"

WARM_LAG: Final = 1000  # records of its log that a standby may lack and still count as warm
FIRST_WAIT: Final = 0.5  # seconds from a core's end to its next start
LONGEST_WAIT: Final = 10.0
FAILED_FOR: Final = 30.0  # seconds in which a shard whose core failed as an owner does not move back, unless its owner drains
STEADY: Final = 60.0  # seconds after which a core that ends is started again as soon as the first time
STOP_TIMEOUT: Final = 30.0  # seconds that a core may take to commit, release its shard and end
START_TIMEOUT: Final = 60.0  # seconds to the first sign of life


class CoreProcess:
    """The core of ``shard``, over all its processes.

    ``setup`` returns the encoded `CoreSetup`, ``timeout`` the seconds without a sign of life after which a process is killed.
    ``changed`` is called when `owns`, `warm` or the state may have changed.
    """

    def __init__(
        self,
        shard: int,
        setup: Callable[[], str],
        owners: Callable[[], Owners | None],
        timeout: Callable[[], float],
        changed: Callable[[CoreProcess], None],
    ) -> None:
        self.shard = shard
        self.role = NOTHING
        self.status: Status | None = None
        self.starts = 0
        self.pid = 0  # of the running process
        self._setup = setup
        self._owners = owners
        self._timeout = timeout
        self._changed = changed
        self._patience = 0.0
        self._generation = -1  # of the directory that gave the role
        self._not_before = -1  # generation: this core lost the shard under it, so it needs a newer one to take it over
        self._failed_until = 0.0
        self._told_own = False
        self._ends = False  # it was told to release or to stop
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None
        self._last_sign = 0.0

    # -- what others ask -----------------------------------------------------------

    @property
    def owns(self) -> bool:
        """Whether this core has the shard, or is about to take it over."""
        return self._told_own and not self._ends

    @property
    def claims(self) -> bool:
        """Whether another node that is to have the shard must wait for this one: it is not the case while the process starts."""
        return self.owns and self.status is not None and self.status.state != STARTING

    @property
    def epoch(self) -> int:
        """The takeover under which it owns the shard; -1 if it does not yet."""
        return self.status.epoch if self.owns and self.status is not None and self.status.state in (OWNER, CHECKING) else -1

    @property
    def warm(self) -> bool:
        """Whether it is a standby that could take the shard over at once."""
        status = self.status
        return status is not None and status.state == STANDBY and not self._ends and status.lag <= WARM_LAG

    @property
    def failed(self) -> bool:
        """Whether it failed as an owner lately."""
        return asyncio.get_running_loop().time() < self._failed_until

    @property
    def runs(self) -> bool:
        return self._task is not None

    def unready(self) -> str:
        """Why clients of its shard are not served, for an owner; "" if they are."""
        if self.role != SERVE:
            return ""
        if self.status is None:
            return f"shard {self.shard}: its process starts"
        if self.status.state != OWNER or self.status.problem:
            return f"shard {self.shard}: {self.status.problem or self.status.state}"
        return ""

    def warnings(self) -> list[str]:
        """The reasons why an owner serves its clients in part only. On any thread."""
        status = self.status
        if self.role != SERVE or status is None:
            return []
        found = []
        if status.links_missing:
            found.append(f"shard {self.shard}: no link to the cores of shards {', '.join(map(str, status.links_missing))}")
        if status.stream_problem:
            found.append(f"shard {self.shard}: streams: {status.stream_problem}")
        return found

    # -- what it is to be ----------------------------------------------------------

    def take_role(self, role: str, patience: float, generation: int) -> None:
        """Be an owner (`SERVE`), a standby (`FOLLOW`), or end (`NOTHING`), as the directory ``generation`` says."""
        self.role, self._patience, self._generation = role, patience, generation
        if self._task is None:
            if role != NOTHING:
                self._task = asyncio.create_task(self._keep())
        elif self._transport is not None:
            self._tell_role()

    def send(self, command: Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_line(command))

    def tell_owners(self, owners: Owners) -> None:
        self.send(owners)

    def reload(self) -> None:
        self.send(Reload(self._setup()))

    async def stop(self) -> None:
        """Release the shard if it is owned, and end."""
        self.role = NOTHING
        if self._transport is not None:
            self._end(Stop())
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT + 1.0)

    def _tell_role(self) -> None:
        if self._ends:
            return  # its next process gets the role
        if self.role == SERVE and self._generation > self._not_before:
            if not self._told_own:
                self._told_own = True
                self.send(Own(self._patience))
        elif self._told_own or self.role == NOTHING:
            self._end(Release())

    def _end(self, command: Command) -> None:
        if not self._ends:
            self._ends = True
            if self.status is None and self.pid:
                # It has nothing yet, and may take long to start.
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                return
            self.send(command)
            asyncio.get_running_loop().call_later(STOP_TIMEOUT, self._kill, self.pid, "it does not end")

    # -- processes ---------------------------------------------------------------

    async def _keep(self) -> None:
        """Run a process until there is no role."""
        loop = asyncio.get_running_loop()
        wait = FIRST_WAIT
        try:
            while self.role != NOTHING:
                began = loop.time()
                try:
                    reason = await self._run()
                except Exception as error:
                    log.exception("event=defect in=core_process shard=%d", self.shard)
                    reason = f"a defect: {error!r}"
                    self._kill(self.pid, reason)
                    self.pid = 0
                owned, asked, state = self._told_own, self._ends, "" if self.status is None else self.status.state
                self._told_own = self._ends = False
                self.status = None
                if owned and not asked:
                    self._not_before = self._generation  # the others may have it by now
                self._changed(self)
                if asked or state in (RELEASED, FENCED):
                    log.info("event=core_ended shard=%d state=%s", self.shard, state or "-")
                    continue
                if owned:
                    self._failed_until = loop.time() + FAILED_FOR
                log.error("event=core_ended shard=%d reason=%s", self.shard, reason)
                wait = FIRST_WAIT if loop.time() - began > STEADY else min(2 * wait, LONGEST_WAIT)
                await asyncio.sleep(wait / 2)
        finally:
            self._task = None

    async def _run(self) -> str:
        """Run one process to its end; returns why it ended."""
        loop = asyncio.get_running_loop()
        mine, its = socket.socketpair()
        mine.setblocking(False)
        try:
            with its:
                process = await asyncio.create_subprocess_exec(
                    *core_command(self.shard, its.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(its.fileno(),),
                )
        except OSError as error:
            mine.close()
            return f"it cannot be started: {error.strerror or error}"
        self.starts += 1
        self.pid = process.pid
        self._last_sign = loop.time() + START_TIMEOUT
        control = _Control(self)
        await loop.connect_accepted_socket(lambda: control, mine)
        watching = asyncio.create_task(keep_running("core_watch", self._watch))
        log.info("event=core_started shard=%d pid=%d", self.shard, process.pid)
        try:
            status = await process.wait()
        finally:
            watching.cancel()
            self.pid = 0
            if self._transport is not None:
                self._transport.close()
                self._transport = None
        return f"signal {-status}" if status < 0 else f"status {status}"

    async def _watch(self) -> None:
        """Kill the process if it gives no sign of life."""
        loop = asyncio.get_running_loop()
        previous = loop.time()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            if now - previous > 2.0:
                # This process was stopped itself (SIGSTOP), so its cores may have been, too.
                self._last_sign = max(self._last_sign, now)
            previous = now
            if now - self._last_sign > self._timeout():
                self._kill(self.pid, "no sign of life")

    def _kill(self, pid: int, reason: str) -> None:
        """End the process ``pid`` if it still runs."""
        if pid and pid == self.pid:
            log.error("event=core_killed shard=%d reason=%s", self.shard, reason)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- for `_Control` ------------------------------------------------------------

    def disconnected(self) -> None:
        self._transport = None  # the process ends, too

    def connected(self, transport: Any) -> None:
        self._transport = transport
        self.send(Start(self._setup()))
        owners = self._owners()
        if owners is not None:
            self.send(owners)
        if self.role == NOTHING:
            self._end(Stop())
        elif self.role == SERVE and self._generation > self._not_before:
            self._tell_role()
        else:
            self.send(Standby())

    def received(self, status: Status) -> None:
        self._last_sign = max(self._last_sign, asyncio.get_running_loop().time())
        before, warm = self.status, self.warm
        self.status = status
        if before is None or (before.state, before.problem) != (status.state, status.problem):
            log.info("event=core_state shard=%d state=%s problem=%s", self.shard, status.state, status.problem)
            self._changed(self)
        elif warm != self.warm:
            self._changed(self)


class _Control(asyncio.Protocol):
    """The node's end of the socketpair with a core."""

    def __init__(self, core: CoreProcess) -> None:
        self._core = core
        self._lines = Lines()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._core.connected(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._core.disconnected()

    def data_received(self, data: bytes) -> None:
        try:
            for line in self._lines.feed(data):
                self._core.received(decode_status(line))
        except ValueError as error:
            log.error("event=core_line_invalid shard=%d reason=%s", self._core.shard, error)
            self._transport.abort()  # the core ends with its link
