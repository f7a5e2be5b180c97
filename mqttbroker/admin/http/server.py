"""The HTTP server: it binds the port, and loads what answers requests when the first client comes.

It runs in a thread of its own, on an asyncio loop of the standard library (uvloop has no ``sendfile``). aiohttp and the
API take as long to load, and as much memory, as the rest of the broker, which many run without HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from mqttbroker.admin.http.access import AccessList
from mqttbroker.admin.http.admission import RequestAdmission
from mqttbroker.core.access.bans import Bans, BanTerms
from mqttbroker.net.tls import ListenerContext

if TYPE_CHECKING:
    from mqttbroker.admin.http.application import HttpApplication

log = logging.getLogger("mqttbroker.http")

BACKLOG = 512


class HttpServer:
    """Serves HTTP on ``host`` and ``port`` (0: any free port).

    ``application`` makes the answers; it is called on the server's thread when the first client comes. With ``context`` the server
    speaks HTTPS. ``admission`` decides on access; ``bans`` of it count wrong tokens. ``requests`` counts requests by role and status. `start`,
    `renew` and `stop` are for the thread that owns the server.
    """

    def __init__(
        self,
        host: str,
        port: int,
        access: AccessList,
        application: Callable[[RequestAdmission, Counter[tuple[str, int]]], HttpApplication],
        context: ListenerContext | None = None,
        requests: Counter[tuple[str, int]] | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.bans = Bans(BanTerms())
        self.admission = RequestAdmission(access, context, self.bans, time.monotonic)
        self.requests: Counter[tuple[str, int]] = Counter() if requests is None else requests
        self._make_application = application
        self._application: HttpApplication | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    def start(self) -> None:
        """Bind and serve; from then on `port` is the port that was bound.

        Raises OSError if the address cannot be bound.
        """
        listening = self._bind()
        self.port = listening.getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listening, started), name="http", daemon=True)
        self._thread.start()
        started.wait()

    def _bind(self) -> socket.socket:
        # As bytes, since a str has Python load the codec of international names, which takes 0.5 MB.
        host = self.host.encode() if self.host.isascii() else self.host
        found = socket.getaddrinfo(host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dual)

    def renew(self, context: ListenerContext) -> None:
        """Use other certificates for new connections; without effect unless the server speaks HTTPS."""
        if self.admission.context is not None and self._loop is not None:
            self.admission.context = context
            self._loop.call_soon_threadsafe(self._renew)

    def _renew(self) -> None:
        if self._application is not None:
            self._application.renew()

    def stop(self) -> None:
        """Close every connection and end the thread; without effect unless started."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        assert self._loop is not None and self._stopping is not None
        self._loop.call_soon_threadsafe(self._stopping.set)
        thread.join()

    def _run(self, listening: socket.socket, started: threading.Event) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(listening, started))
        except Exception:
            log.exception("event=defect in=http")

    async def _serve(self, listening: socket.socket, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        listening.setblocking(False)
        with listening:
            started.set()
            if await self._client_comes(listening, self._stopping):
                self._application = self._make_application(self.admission, self.requests)
                await self._application.serve(listening, self._stopping)

    async def _client_comes(self, listening: socket.socket, stopping: asyncio.Event) -> bool:
        """Wait for the first client; false if the server stops before."""
        assert self._loop is not None
        come = asyncio.Event()
        self._loop.add_reader(listening, come.set)
        waiting = [asyncio.create_task(event.wait()) for event in (come, stopping)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        self._loop.remove_reader(listening)
        for task in waiting:
            task.cancel()
        return not stopping.is_set()
