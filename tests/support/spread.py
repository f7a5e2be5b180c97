"""A TCP port whose connections go to several ports in turn, as behind a load balancer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from itertools import cycle

HOST = "127.0.0.1"


class _Side(asyncio.Protocol):
    """One of the two sockets of a connection; the other one is ``other``."""

    def __init__(self) -> None:
        self.other: _Side | None = None
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # received before the other side was connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def join(self, other: _Side) -> None:
        self.other, other.other = other, self
        assert other.transport is not None
        other.transport.writelines(self._early)
        if self.transport is None or self.transport.is_closing():
            other.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.write_eof()
            return True
        return False

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            if error is None:
                self.other.transport.close()
            else:
                self.other.transport.abort()


class Spread:
    """Starts when made; `close` ends all connections."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = cycle(ports)
        self._socket = socket.create_server((HOST, 0))
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(self._loop.create_server(self._accept, sock=self._socket))
        self._loop.run_forever()
        server.close()

    def _accept(self) -> _Side:
        side = _Side()
        self._loop.create_task(self._connect(side, next(self._ports)))
        return side

    async def _connect(self, client: _Side, port: int) -> None:
        try:
            _, node = await self._loop.create_connection(_Side, HOST, port)
        except OSError:
            if client.transport is not None:
                client.transport.abort()
            return
        client.join(node)
