"""The connection workers of a broker, and what each of them does and takes."""

from __future__ import annotations

import asyncio

from mqttbroker.admin.control.views import WorkerStatus
from mqttbroker.config.settings import Settings
from mqttbroker.net.worker_pool import WorkerPool
from mqttbroker.server.reload import Reloadable
from mqttbroker.system.memory_limit import ProcessesMemory


class Workers(Reloadable):
    """None before `start`, and none in a broker without connection workers."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._starting: asyncio.Task[None] | None = None
        self._memory = ProcessesMemory()
        self._resident: dict[int, int] = {}  # bytes by process id, as last seen

    async def start(self, pool: WorkerPool, stopping: asyncio.Event) -> None:
        """Return when all workers listen, or the broker stops. Raises OSError if a worker cannot listen."""
        self._pool = pool
        starting, stopped = asyncio.create_task(pool.start()), asyncio.create_task(stopping.wait())
        self._starting = starting  # goes on until `WorkerPool.stop`
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if starting.done():
            starting.result()

    async def reload(self, settings: Settings) -> list[str]:
        """Return when they use the settings and certificates that the listeners have now."""
        if self._pool is not None:
            await self._pool.reload()
        return []

    def stop_listening(self) -> None:
        """Have the workers accept no more connections."""
        if self._pool is not None:
            self._pool.stop_listening()

    async def stop(self) -> None:
        """Close the links behind everything that was written, and wait until the workers have ended."""
        if self._pool is not None:
            await self._pool.stop()

    def memory(self) -> int:
        """Bytes of resident memory of all workers."""
        if self._pool is not None:
            self._resident = self._memory.resident([one.pid for one in self._pool.workers if one.pid])
        return sum(self._resident.values())

    def statuses(self) -> list[WorkerStatus]:
        """The state of each worker; its memory is that of the last call of `memory`."""
        return [
            WorkerStatus(
                one.number,
                one.listens,
                one.client_count,
                one.cpu_seconds,
                self._resident.get(one.pid, 0),
                one.link_bytes,
                one.starts,
            )
            for one in ([] if self._pool is None else self._pool.workers)
        ]
