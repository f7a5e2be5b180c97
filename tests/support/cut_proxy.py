"""A TCP proxy that cuts connections, for tests of links that break."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType


class CutProxy:
    """Forwards connections to ``target`` on the loopback from a free ``port``, in a thread of its own.

    `cut` resets every connection. With ``up`` False new ones are reset at once, with ``frozen`` True no bytes are passed.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.up = True
        self.frozen = False
        self.connections = 0  # accepted so far
        self.passed = 0  # bytes, both ways
        self.cut_at: int | None = None  # `passed` at which everything is cut, once
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> CutProxy:
        started = threading.Event()

        async def start() -> None:
            self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            started.set()

        self._loop.create_task(start())
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._call(self._loop.stop)
        self._thread.join(10)

    def cut(self) -> None:
        self._call(self._cut)

    def _call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _close(self) -> None:
        self._cut()
        if self._server is not None:
            self._server.close()
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _cut(self) -> None:
        for writer in list(self._writers):
            transport = writer.transport
            with suppress(OSError):
                transport.abort()
        self._writers.clear()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.up:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, other_writer}
        await asyncio.gather(self._pass(reader, other_writer), self._pass(other_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(4096):
                while self.frozen:
                    await asyncio.sleep(0.01)
                self.passed += len(data)
                if self.cut_at is not None and self.passed >= self.cut_at:
                    # In the middle of what was read.
                    self.cut_at = None
                    writer.write(data[: len(data) // 2])
                    await asyncio.sleep(0)
                    self._cut()
                    return
                writer.write(data)
                await writer.drain()
        writer.close()
