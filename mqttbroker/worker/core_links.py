"""The links of a worker to the cores of a cluster: a client goes to the owner of its client id's shard.

A link is opened when a client needs it, and kept until its core closes it or another core owns the shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from mqttbroker.cluster.shards import Shards
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.link_frames import ENDS, RELEASING
from mqttbroker.net.worker_setup import Directory
from mqttbroker.worker.clients import WorkerLink

log = logging.getLogger("mqttbroker.network")

RETRY = 0.1  # seconds until the next attempt to open a link
LEAVING = 1.0  # seconds in which a core that lost its shard may close its clients by itself
JOINS = 100  # of waiting clients in one iteration of the event loop
CLOSING = 1.0  # seconds in which clients may take the last bytes when their link is closed


class Placed(Protocol):
    """A client that waits for a link, such as a `HeldClient`; ``client_id`` "" = any core can have it."""

    @property
    def client_id(self) -> str: ...

    def wait(self) -> None:
        """There is no link now. It may leave before it returns."""

    def join(self, link: WorkerLink) -> None:
        """It is a client of this link from now on."""


class CoreLink:
    """The link to the owner of one shard. ``connect`` opens it: ``connect(shard, address, link)``; OSError if it cannot."""

    def __init__(self, shard: int, loop: Any, connect: Callable[[int, LinkAddress, WorkerLink], Awaitable[None]], links: CoreLinks) -> None:
        self.shard = shard
        self.link: WorkerLink | None = None  # an open one
        self.waiting: dict[Placed, bool] = {}
        self.address: LinkAddress | None = None  # of the owner; None if none is known
        self._linked: LinkAddress | None = None  # where `link` goes to
        self._loop = loop
        self._connect = connect
        self._links = links
        self._opening: asyncio.Task[None] | None = None

    def move(self, address: LinkAddress | None) -> None:
        """The shard has this owner now. While none is known an open link stays: its core knows whether it still owns the
        shard."""
        self.address = address
        if self.link is not None and address is not None and address != self._linked:
            link, self.link = self.link, None
            log.info("event=link_leaves shard=%d", self.shard)
            self._loop.call_later(LEAVING, link.close)
        self.open()

    def open(self) -> None:
        """Open the link if a client needs it."""
        if self._opening is None and self._is_needed:
            self._opening = self._loop.create_task(self._open())

    @property
    def _is_needed(self) -> bool:
        return self.link is None and self.address is not None and (bool(self.waiting) or self._links.any_waits_for(self))

    async def _open(self) -> None:
        reason = ""
        try:
            while self._is_needed:
                address = self.address
                assert address is not None
                link = self._links.new_link(self)
                try:
                    await self._connect(self.shard, address, link)
                except OSError as error:
                    self._links.forget(link)
                    if reason != str(error):
                        reason = str(error)
                        log.warning("event=link_failed shard=%d address=%s reason=%s", self.shard, address, reason)
                    await asyncio.sleep(RETRY)
                    continue
                if address != self.address:
                    link.close()
                elif self._links.is_open(link):
                    log.info("event=link_opened shard=%d address=%s", self.shard, address)
                    self.link = link
                    self._linked = address
                    self._links.join_waiting(self)
                else:
                    await asyncio.sleep(RETRY)
        finally:
            self._opening = None

    def stop(self) -> None:
        """Open no link any more."""
        self.address = None
        if self._opening is not None:
            self._opening.cancel()


class CoreLinks:
    """The links to the cores of all shards. ``host`` and ``port`` are the address of this node: clients that any core can have go to its
    own cores, at ``port`` + 1 + shard, if it has any."""

    def __init__(self, loop: Any, connect: Callable[[int, LinkAddress, WorkerLink], Awaitable[None]], host: str, port: int) -> None:
        self._loop = loop
        self._connect = connect
        self._host = host
        self._port = port
        self._shards: Shards | None = None
        self._cores: list[CoreLink] = []
        self._unplaced: dict[Placed, bool] = {}  # before the first directory
        self._for_any: dict[Placed, bool] = {}  # those for any core, while no link is open
        self._next = 0  # the core that `_any` looks at first
        self._open: dict[WorkerLink, bool] = {}  # those that are not lost
        self._lost: dict[WorkerLink, bool] = {}  # those whose clients' sockets are being closed

    @property
    def clients(self) -> int:
        """The number of clients of all links, also of those that were lost."""
        return sum(len(link.clients) for link in (*self._open, *self._lost))

    def any_waits_for(self, core: CoreLink) -> bool:
        """Whether a client waits that this core, as any, can have."""
        return bool(self._for_any) and core in self._candidates()

    def direct(self, directory: Directory) -> None:
        """Use this directory from now on."""
        if self._shards is None:
            self._shards = Shards(directory.shards)
            self._cores = [CoreLink(shard, self._loop, self._connect, self) for shard in range(directory.shards)]
        for core in self._cores:
            core.move(directory.owners.get(core.shard))
        unplaced, self._unplaced = self._unplaced, {}
        for client in unplaced:
            self.place(client)
        if self._for_any:
            self._open_any()

    def place(self, client: Placed) -> None:
        """Give the client to the core of its client id, at once or when the link is open."""
        if self._shards is None:
            self._unplaced[client] = True
            client.wait()
            return
        if client.client_id == "":
            link = self._any()
            if link is not None:
                client.join(link)
                return
            self._for_any[client] = True
            self._open_any()
        else:
            core = self._cores[self._shards.of_text(client.client_id)]
            if core.link is not None:
                client.join(core.link)
                return
            core.waiting[client] = True
            core.open()
        client.wait()

    def leave(self, client: Placed) -> None:
        """The client does not wait any more."""
        self._unplaced.pop(client, None)
        self._for_any.pop(client, None)
        if self._cores and self._shards is not None and client.client_id:
            self._cores[self._shards.of_text(client.client_id)].waiting.pop(client, None)

    def _candidates(self) -> list[CoreLink]:
        """The cores of this node; all with a known address if there are none."""
        known = [core for core in self._cores if core.address is not None]
        return [core for core in known if core.address and core.address[:2] == (self._host, self._port + 1 + core.shard)] or known

    def _any(self) -> WorkerLink | None:
        """The open link of one core or another; None if none is open."""
        candidates = [core for core in self._candidates() if core.link is not None]
        if not candidates:
            return None
        self._next = (self._next + 1) % len(candidates)
        return candidates[self._next].link

    def _open_any(self) -> None:
        for core in self._candidates():
            core.open()

    # -- links ------------------------------------------------------------------

    def new_link(self, core: CoreLink) -> WorkerLink:
        """One that is open until it is lost or forgotten."""

        def lost() -> None:
            self._link_lost(core, link)

        def control(kind: int, number: int, body: bytes) -> None:
            if kind == RELEASING and core.link is link:
                core.link = None  # its clients stay until their core closes them

        link = WorkerLink(self._loop, control, lost)
        self._open[link] = True
        return link

    def forget(self, link: WorkerLink) -> None:
        self._open.pop(link, None)

    def is_open(self, link: WorkerLink) -> bool:
        return link in self._open

    def join_waiting(self, core: CoreLink) -> None:
        """Give a link that was opened the clients that wait for it, some in each iteration of the event loop."""
        link = core.link
        if link is None:
            core.open()
            return
        for _ in range(JOINS):
            waiting = core.waiting or self._for_any
            if not waiting:
                return
            client = next(iter(waiting))
            del waiting[client]
            client.join(link)
        self._loop.call_soon(self.join_waiting, core)

    def _link_lost(self, core: CoreLink, link: WorkerLink) -> None:
        if core.link is link:
            core.link = None
            log.warning("event=link_lost shard=%d clients=%d", core.shard, len(link.clients))
        if self._open.pop(link, False) and link.clients:
            self._end_clients(link)

    def _end_clients(self, link: WorkerLink) -> None:
        """Close the sockets of the clients of a lost link: no other core knows what they have acknowledged."""
        self._lost[link] = True
        link.shut_down()
        self._loop.call_later(CLOSING, self._abort_clients, link)

    def _abort_clients(self, link: WorkerLink) -> None:
        for client in list(link.clients.values()):
            client.abort()
        self._lost.pop(link, None)

    def announce_end(self) -> None:
        """Have the cores disconnect all clients, and open no more links."""
        for core in self._cores:
            core.stop()
        for link in self._open:
            link.send(ENDS, 0, b"")

    @property
    def serves(self) -> bool:
        """Whether there is a client that no core has disconnected."""
        return any(not client.ended for link in self._open for client in link.clients.values())

    def close(self) -> None:
        """Close the sockets of all clients, behind what was written. The links stay open, so that the cores are told."""
        for core in self._cores:
            core.stop()
        for link in list(self._open):
            self._end_clients(link)
