"""A node with one shard: it commits numbered bodies while it owns the shard, and prints what became of each.

As a program it reads ``own`` and ``leave`` from standard input, and prints ``committed N``, ``refused N``, ``dropped N`` (whose
fate is not known), and ``left`` when the shard was taken from it, or released.

    python shard_owner.py BOOTSTRAP TOPIC NAME
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.kafka.reader import LogReader
from mqttbroker.cluster.log.records import CHANGES, HEADER_BYTES, Takeover, decode_header
from mqttbroker.cluster.log.view import VALID, LogView
from mqttbroker.cluster.shard.log import Outcome, ShardLog
from mqttbroker.cluster.shard.ownership import Ownership, State

CLUSTER = b"testtest"
APPEND_TIMEOUT = 4.0
LEASE = 1.0
PATIENCE = 1.0


def owner_id(name: str) -> bytes:
    return name.encode().ljust(8, b"-")[:8]


class ShardOwner:
    """One node and its shard 0 of ``topic``; ``say`` is called with each line."""

    def __init__(
        self,
        bootstrap: list[str],
        topic: str,
        name: str,
        say: Callable[[str], None],
        lease: float = LEASE,
        append_timeout: float = APPEND_TIMEOUT,
    ) -> None:
        self.name = name
        self.patience = PATIENCE
        self.kafka = KafkaLog({"bootstrap_servers": bootstrap}, topic, append_timeout)
        self.ownership = Ownership(LogView(0, CLUSTER), owner_id(name), lease)
        self.reader: LogReader | None = None
        self.log: ShardLog | None = None
        self.bodies: list[bytes] = []  # as the log has them
        self.own = False
        self._say = say
        self._serving = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0

    async def start(self) -> None:
        await self.kafka.start()
        log = self.log = ShardLog(self.kafka, self.ownership, Takeover(self.name, "", ""), self)
        log.start()
        self.listen()
        self._tasks = [asyncio.create_task(self._assign())]

    def listen(self) -> None:
        """Read the log from the first record that is not known."""
        log = self.log
        assert log is not None
        self.reader = self.kafka.reader({0: self.ownership.view.end}, lambda shard, offset, record: log.read(offset, record))
        self.reader.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.log is not None:
            await self.log.stop()
        await self.kafka.stop()

    async def _assign(self) -> None:
        while True:
            assert self.log is not None
            self.log.assign(self.own, self.patience)
            await asyncio.sleep(0.05)

    async def until(self, state: State) -> None:
        while self.ownership.state is not state:
            await asyncio.sleep(0.01)

    # -- commits ----------------------------------------------------------------

    async def commit(self) -> Outcome:
        """Commit the next number once the shard is served."""
        assert self.log is not None
        while not (self._serving.is_set() and self.log.may_commit):
            await asyncio.sleep(0.001)
        self._number += 1
        number = self._number
        outcome = await self.log.commit(f"{self.name} {number}".encode())
        self._say(f"{outcome.value} {number}")
        return outcome

    async def commit_forever(self) -> None:
        while True:
            await self.commit()

    # -- ShardEvents ------------------------------------------------------------

    def changed(self, offset: int, body: bytes) -> None:
        self.bodies.append(body)

    def load(self) -> None:
        assert self.log is not None
        asyncio.get_running_loop().call_soon(self.log.loaded)

    def serve(self) -> None:
        self._serving.set()

    def pause(self) -> None:
        self._serving.clear()

    def drop(self, reason: str) -> None:
        assert self.log is not None
        self._serving.clear()
        self._say("left")
        asyncio.get_running_loop().call_soon(self.log.dropped)


def valid_bodies(log: list[tuple[int, bytes]]) -> list[bytes]:
    """The bodies of the valid changes in a log of offsets and records."""
    view = LogView(0, CLUSTER)
    found = []
    for offset, record in log:
        header = decode_header(record)
        if view.read(offset, header) == VALID and header.kind == CHANGES:
            found.append(record[HEADER_BYTES:])
    return found


async def main(bootstrap: str, topic: str, name: str) -> None:
    def say(line: str) -> None:
        os.write(1, f"{line}\n".encode())

    node = ShardOwner(bootstrap.split(","), topic, name, say)
    await node.start()
    committing = asyncio.create_task(node.commit_forever())
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while command := await commands.readline():
        node.own = command == b"own\n"
    committing.cancel()
    with suppress(asyncio.CancelledError):
        await committing
    await node.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
