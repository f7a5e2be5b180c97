"""The connection workers of a broker: their processes, from start to stop.

A worker that hangs is killed. A worker that ends is started again at once; if it ends again and again, the broker
stops.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from mqttbroker.config.settings import Log
from mqttbroker.net.link_flush import LinkFlush
from mqttbroker.net.link_frames import DIRECTORY, HOLDS, PING, READY, RELOAD, SETUP, STATUS, STOP
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.worker_clients import WorkerClients
from mqttbroker.net.worker_setup import Directory, FrontSetup, Holds, WorkerSetup, decode_problems, decode_status, from_worker
from mqttbroker.system.defects import keep_running, report_defect

log = logging.getLogger("mqttbroker.network")

ANSWER_TIMEOUT = 60.0  # seconds in which a worker has to listen, or to reload
PING_INTERVAL = 1.0  # seconds
STOP_TIMEOUT = 10.0  # seconds in which a worker has to end after its link
MOST_FILES = 1_048_576  # of a process, unless fs.nr_open was raised
ENDS = 10  # of one worker in `ENDS_SECONDS`, after which the broker ends
ENDS_SECONDS = 60.0
LINK_SOCKET_BYTES = 1_048_576  # asked for the buffers of a link's sockets
COMMAND = [sys.executable, "-P", "-m", "mqttbroker.worker"]  # and the worker's number, and the descriptor of its link


NOTHING = Holds(0, 0, 0, 0, 0, {})
ENDED = ["ended"]  # the problem of a worker whose link was closed before it answered


def most_sockets() -> int:
    """How many sockets one process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)


class WorkerEnded(OSError):
    """The process ended before it listened."""


class Worker:
    """One worker, over all its processes."""

    def __init__(self, number: int, pool: WorkerPool) -> None:
        self.number = number
        self.cpu_seconds = 0.0
        self.starts = 0
        self.listens = False
        self.holds = NOTHING  # in a cluster
        self._linked = False  # the link is open
        self.clients: WorkerClients | None = None
        self.process: asyncio.subprocess.Process | None = None
        self._pool = pool
        self._answer: asyncio.Future[list[str]] | None = None
        self._ends: deque[float] = deque()
        self._silent_pings = 0  # intervals since a PING that is not answered yet was sent

    @property
    def pid(self) -> int:
        """The process, while its link is open; else 0."""
        return self.process.pid if self._linked and self.process is not None else 0

    @property
    def client_count(self) -> int:
        """The number of open connections."""
        return 0 if self.clients is None else len(self.clients.link.clients) + self.holds.clients

    @property
    def link_bytes(self) -> int:
        """Bytes written to the link that the worker has not read."""
        return 0 if self.clients is None else self.clients.link.buffered

    async def start(self) -> None:
        """Return when the worker listens. Raises OSError if it cannot, `WorkerEnded` if its process ended."""
        pool = self._pool
        loop = asyncio.get_running_loop()
        mine, its = socket.socketpair()
        for sock in (mine, its):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_SOCKET_BYTES)
        mine.setblocking(False)
        with its:
            descriptors = [its.fileno(), *pool.descriptors()]
            command = [*COMMAND, str(self.number), str(its.fileno())]
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, pass_fds=descriptors
            )
        self.starts += 1
        self._silent_pings = 0
        clients = self.clients = WorkerClients(self.number, pool.listeners, pool.scheduler, self._received, self._link_lost, most_sockets())
        link: Any = clients.link
        await loop.connect_accepted_socket(lambda: link, mine)
        if pool.stopping:
            link.close()
            raise WorkerEnded
        self._linked = True
        if pool.directory is not None:
            self.send_directory(pool.directory)
        reloads = pool.reloads
        problems = await self._ask(SETUP)
        while not problems and reloads != pool.reloads:
            reloads = pool.reloads
            problems = await self._ask(RELOAD)
        if problems == ENDED or not self._linked:
            raise WorkerEnded
        if problems:
            clients.link.close()
            raise OSError(", ".join(problems))
        self.listens = True
        log.info("event=worker_started worker=%d pid=%d", self.number, self.process.pid)

    async def reload(self) -> None:
        """Return when the worker uses the settings and certificates that the listeners have now."""
        if self.listens:
            for problem in await self._ask(RELOAD):
                log.error("event=reload_failed worker=%d reason=%s", self.number, problem)

    def send_directory(self, directory: Directory) -> None:
        if self._linked and self.clients is not None:
            self.clients.link.send(DIRECTORY, 0, directory.encode())

    async def _ask(self, kind: int) -> list[str]:
        """Send the setup in a frame of this kind; returns the problems that the worker has with it."""
        assert self.clients is not None
        if not self._linked:
            return ENDED
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self.clients.link.send(kind, 0, self._pool.setup().encode())
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                return await answer
        except TimeoutError:
            self.clients.link.fail(f"no answer in {ANSWER_TIMEOUT:g} s")
            return ENDED

    def ping(self, timeout: float) -> None:
        """Called once in each `PING_INTERVAL`: kill a worker that has not answered in ``timeout`` seconds.

        It counts intervals, not seconds, because the broker's own process may have been stopped meanwhile (SIGSTOP).
        """
        if not self.listens or self.clients is None:
            self._silent_pings = 0
            return
        if self._silent_pings * PING_INTERVAL >= timeout:
            self.clients.link.fail(f"no answer in {timeout:g} s")
        elif not self._silent_pings:
            self.clients.link.send(PING, 0, b"")
        self._silent_pings += 1

    def _received(self, kind: int, body: bytes) -> None:
        if kind == STATUS:
            self._silent_pings = 0
            self.cpu_seconds = from_worker(decode_status, body)
        elif kind == HOLDS:
            self._count(from_worker(Holds.decode, body))
        elif kind == READY:
            self._answered(from_worker(decode_problems, body))

    def _count(self, holds: Holds) -> None:
        self.holds = holds
        counters = self._pool.scheduler.outbound.counters
        counters.connections_refused += holds.refused
        counters.connections_evicted += holds.evicted
        counters.websocket_failures += holds.websocket_failures
        for name, count in holds.limits.items():
            counters.limits_reached[name] = counters.limits_reached.get(name, 0) + count

    def _answered(self, problems: list[str]) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(problems)

    def _link_lost(self) -> None:
        self._linked = False
        self.holds = NOTHING
        self._answered(ENDED)
        if self.clients is not None and self.clients.link.error and self.process is not None:
            log.error("event=worker_killed worker=%d reason=%s", self.number, self.clients.link.error)
            with suppress(ProcessLookupError):
                self.process.kill()
        if self.listens:
            self.listens = False
            self._pool.worker_ended(self)

    def count_end(self, now: float) -> bool:
        """Count an end of the process; whether there were `ENDS` of them in `ENDS_SECONDS`."""
        ends = self._ends
        ends.append(now)
        while ends[0] < now - ENDS_SECONDS:
            ends.popleft()
        return len(ends) >= ENDS

    async def wait(self) -> int:
        """The exit status of the process, which is killed if it outlives its link for long."""
        process = self.process
        assert process is not None
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                return await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            return await process.wait()


class WorkerPool:
    """``count`` workers that serve ``listeners``. ``fail`` is called with the reason when they cannot be kept running.

    ``log_settings`` returns level and format, ``timeout`` the seconds after which a worker that does not answer is killed.
    With ``front`` they send clients to the cores of a cluster, as `direct` tells them.
    """

    def __init__(
        self,
        count: int,
        listeners: Sequence[OpenListener],
        scheduler: LinkFlush,
        log_settings: Callable[[], Log],
        timeout: Callable[[], float],
        fail: Callable[[str], None],
        front: Callable[[], FrontSetup] | None = None,
    ) -> None:
        self._front = front
        self.directory: Directory | None = None
        self.listeners = listeners
        self.scheduler = scheduler
        self.workers = [Worker(number, self) for number in range(1, count + 1)]
        self._log_settings = log_settings
        self._timeout = timeout
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()
        self.reloads = 0
        self.stopping = False
        self._reloading = asyncio.Lock()

    def setup(self) -> WorkerSetup:
        listeners = tuple(listener.setup() for listener in self.listeners)
        return WorkerSetup(listeners, self._log_settings(), None if self._front is None else self._front())

    def direct(self, directory: Directory) -> None:
        """Tell the workers, and those that start later, which core owns each shard."""
        self.directory = directory
        for worker in self.workers:
            worker.send_directory(directory)

    def descriptors(self) -> list[int]:
        """The descriptors of all listening sockets."""
        return [descriptor for listener in self.listeners for descriptor in listener.descriptors]

    async def start(self) -> None:
        """Return when all workers listen. Raises OSError if one does not."""
        self._keep(keep_running("worker_watch", self._watch))
        await asyncio.gather(*(self._start(worker) for worker in self.workers))

    async def _watch(self) -> None:
        while not self.stopping:
            await asyncio.sleep(PING_INTERVAL)
            timeout = self._timeout()
            for worker in self.workers:
                worker.ping(timeout)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        report_defect(task, "workers", self._fail)

    async def _start(self, worker: Worker) -> None:
        """Start a worker, and again if its process ends before it listens. Raises OSError if that happens too often."""
        while True:
            try:
                await worker.start()
                return
            except WorkerEnded:
                if self.stopping:
                    return
                await self._count_end(worker)
            except OSError as error:
                raise OSError(f"workers: cannot start worker {worker.number}: {error.strerror or error}") from None

    async def _count_end(self, worker: Worker) -> None:
        """Wait for the end of a worker's process. Raises OSError if that was one too many."""
        too_often = worker.count_end(asyncio.get_running_loop().time())
        status = await worker.wait()
        reason = f"signal {-status}" if status < 0 else f"status {status}"
        log.error("event=worker_ended worker=%d reason=%s", worker.number, reason)
        if too_often:
            times = f"{ENDS} times in {ENDS_SECONDS:.0f} s"
            raise OSError(f"worker {worker.number} ended {times}, the last time with {reason}")

    async def reload(self) -> None:
        """Return when the workers use the settings and certificates that the listeners have now."""
        self.reloads += 1  # for the workers that start now
        async with self._reloading:
            await asyncio.gather(*(worker.reload() for worker in self.workers))

    def worker_ended(self, worker: Worker) -> None:
        """The link of a worker was closed."""
        if self.stopping:
            return
        self._keep(self._restart(worker))

    async def _restart(self, worker: Worker) -> None:
        try:
            await self._count_end(worker)
            if not self.stopping:
                await self._start(worker)
        except OSError as error:
            self._fail(str(error))

    def stop_listening(self) -> None:
        """Have the workers accept no more connections."""
        self.stopping = True
        for worker in self.workers:
            if worker.clients is not None:
                worker.clients.link.send(STOP, 0, b"")

    async def stop(self) -> None:
        """Close the links behind everything that was written, and wait until the workers have ended."""
        self.stopping = True
        for worker in self.workers:
            if worker.clients is not None:
                worker.clients.link.close()
        await asyncio.gather(*(worker.wait() for worker in self.workers if worker.process is not None))
