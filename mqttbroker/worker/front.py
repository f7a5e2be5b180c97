"""A worker of a cluster's node: clients that wait for their CONNECT, and links to the cores of all nodes."""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import Any

from mqttbroker.cluster.links.server import WORKER, Hello, client_context, connect_link
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.worker_setup import FrontSetup, Holds, ListenerSetup
from mqttbroker.system.file_limit import OWN_FILES
from mqttbroker.worker.clients import WorkerLink
from mqttbroker.worker.core_links import CoreLinks
from mqttbroker.worker.held_clients import HeldClients, HeldListener

LEAVING_SECONDS = 3.0  # in which the cores disconnect the clients of a worker that ends


class Front:
    """From the worker's setup to its end. Raises OSError for files of TLS that cannot be used."""

    def __init__(self, loop: Any, setup: FrontSetup) -> None:
        self._loop = loop
        self._setup = setup
        self._tls = client_context(*setup.link_files)
        self.links = CoreLinks(loop, self._connect, setup.host, setup.port)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = sys.maxsize if most == resource.RLIM_INFINITY else most - OWN_FILES
        self._held = HeldClients(loop, setup, self.links, room)

    def listener(self, index: int, setup: ListenerSetup) -> HeldListener:
        """The clients of a listener until they have a core."""
        return HeldListener(self._held, index, setup)

    def reload(self, setup: FrontSetup) -> list[str]:
        """Use other limits, and certificates for the links that are opened from now on; returns problems."""
        self._held.reload(setup)
        try:
            self._tls = client_context(*setup.link_files)
        except OSError as error:
            return [f"certificates of links: {error.strerror or error}"]
        self._setup = setup
        return []

    @property
    def client_count(self) -> int:
        """All sockets of clients."""
        return len(self._held.clients) + self.links.clients

    def holds(self) -> Holds:
        """The sockets, and what was counted since the last call."""
        counters = self._held.counters
        limits, counters.limits_reached = counters.limits_reached, {}
        found = Holds(
            self.client_count,
            len(self._held.clients),
            counters.connections_refused,
            counters.connections_evicted,
            counters.websocket_failures,
            limits,
        )
        counters.connections_refused = counters.connections_evicted = counters.websocket_failures = 0
        return found

    async def send_away(self) -> None:
        """Have the cores disconnect all clients, so that those of version 5 get the reason; returns when they have done so, or after
        `LEAVING_SECONDS`."""
        self._held.end()
        self.links.announce_end()
        until = self._loop.time() + LEAVING_SECONDS
        while self.links.serves and self._loop.time() < until:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Close all clients' sockets, behind everything that was written."""
        self._held.end()
        self.links.close()

    async def _connect(self, shard: int, address: LinkAddress, link: WorkerLink) -> None:
        """Open the link to a core. Raises OSError."""
        hello = Hello(**self._setup.hello, kind=WORKER, shard=shard)
        await connect_link(address, self._tls, hello, link)
