"""The cores of a cluster in memory, each with a real bus, store and retained messages; their logs are lists.

Packets of clients come and go as in `support.core`. A commit of a core is in its log, and the others have it after `settle`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from mqttbroker.cluster.bus.bus import Bus, BusReceiver, BusRecord
from mqttbroker.cluster.log.body import encode_body, published_of
from mqttbroker.cluster.retained.parts import RetainedParts
from mqttbroker.cluster.shards import Shards
from sessions.message import Message
from sessions.row_kinds import MARKS
from sessions.rows import MarkRow
from support.core import Core
from support.partial_port import PartialPort


class ShardCores:
    """``count`` cores; ``away`` has the shards whose core is not linked to the others."""

    def __init__(self, directory: Path, count: int = 3, **limits: Any) -> None:
        self.shards = Shards(count)
        self.logs: list[list[bytes]] = [[] for _ in range(count)]
        self.away: set[int] = set()
        self.sent: deque[tuple[int, int, str, bytes]] = deque()  # messages on links: from, to, topic, payload
        self.cores: list[JoinedCore] = []
        for shard in range(count):
            (directory / str(shard)).mkdir()
            self.cores.append(JoinedCore(self, shard, directory / str(shard), limits))
        self.settle()

    def __enter__(self) -> ShardCores:
        return self

    def __exit__(self, *_: object) -> None:
        for core in self.cores:
            core.close()

    def __getitem__(self, shard: int) -> JoinedCore:
        return self.cores[shard]

    def topic(self, shard: int, prefix: str = "t/") -> str:
        """A topic of a shard."""
        return next(name for name in (f"{prefix}{n}" for n in range(1000)) if crc32(name.encode()) % len(self.logs) == shard)

    def settle(self) -> None:
        """Let all cores commit, read the others' logs, and answer each other, until there is nothing to do."""
        busy = True
        while busy:
            busy = self._pass_on()
            for core in self.cores:
                if core.shard not in self.away:
                    busy = core.read_logs() or busy
                    committed = len(core.records)
                    core.settle_alone()
                    busy = busy or bool(self.sent) or len(core.records) > committed

    def _pass_on(self) -> bool:
        """Deliver the messages on links."""
        some = bool(self.sent)
        while self.sent:
            self.pass_one()
        return some

    def pass_one(self) -> None:
        """Deliver the first message on a link."""
        source, target, topic, payload = self.sent.popleft()
        if source not in self.away and target not in self.away:
            assert self.cores[target].messages.handle(source, topic, payload)

    def advance(self, seconds: float) -> None:
        for core in self.cores:
            core.advance(seconds)

    def lose(self, shard: int) -> None:
        """A core's links are lost, and it reads no log."""
        self.away.add(shard)
        for core in self.cores:
            core.messages.link_down(shard)

    def bring_back(self, shard: int) -> None:
        self.away.discard(shard)
        for core in self.cores:
            core.messages.link_up()
        self.settle()

    def kill(self, shard: int) -> None:
        """Another process takes the shard over with what is in its log."""
        self.cores[shard].kill()
        for core in self.cores:
            core.messages.link_down(shard)
            core.messages.link_up()
        self.settle()


class JoinedCore(Core):
    """The core of one shard."""

    def __init__(self, cluster: ShardCores, shard: int, directory: Path, limits: dict[str, Any]) -> None:
        self.cluster = cluster
        self.shard = shard
        self.marks: dict[int, MarkRow] = {}  # as committed
        super().__init__(directory, **limits)

    def port(self) -> PartialPort:
        self._port = PartialPort()
        return self._port

    def assembled(self) -> None:
        self.fed = {number: mark.offset for number, mark in self.marks.items()}
        self._port.broker = self.broker
        self.broker.lifecycle.resume()
        self.messages = RetainedParts(
            self.broker,
            self.cluster.shards,
            self.shard,
            self,
            lambda shard: self.bus.position(shard),
            lambda: len(self.records),
            lambda done: done({shard: len(log) for shard, log in enumerate(self.cluster.logs) if shard != self.shard}),
        )
        self._port._retained = self.messages
        self.bus = Bus(self.broker, self.shard, self.cluster.shards.count, dict(self.marks), _Receiver(self), lambda log, size: None)

    def after_retained(self, done: Callable[[], object]) -> None:
        """All cores have committed what was published there."""
        for core in self.cluster.cores:
            if core is not self:
                while core.commit():
                    pass
        done()

    @property
    def records(self) -> list[bytes]:
        return self.cluster.logs[self.shard]

    def send(self, shard: int, topic: str, payload: bytes) -> bool:
        if shard in self.cluster.away or self.shard in self.cluster.away:
            return False
        self.cluster.sent.append((self.shard, shard, topic, payload))
        return True

    def read_logs(self, most: int = 1000) -> bool:
        """Hand the bus what other cores have committed, of each log up to ``most`` records; false if there is nothing new."""
        some = False
        for number, log in enumerate(self.cluster.logs):
            start = self.fed.get(number, 0)
            if number == self.shard or start == len(log):
                continue
            some = True
            self.fed[number] = min(len(log), start + most)
            records = []
            for offset in range(start, self.fed[number]):
                marks, sections = published_of(log[offset])
                before, after = (MarkRow(number, end, 0, 0, b"", 0, False) for end in (offset, offset + 1))
                records.append(BusRecord(before, after, sections, marks, len(log[offset])))
            self.bus.feed(records)
        return some

    def settle(self) -> None:
        self.cluster.settle()

    def settle_alone(self) -> None:
        super().settle()

    def commit(self) -> bool:
        write_set = self.taken or self.take()
        if write_set is not None:
            self.taken = write_set
            if write_set.has_changes():
                self.records.append(encode_body(write_set))
            self.marks.update((mark.log, mark) for mark in write_set.saved(MARKS))
            write_set.stream_messages, write_set.bus = {}, None
            write_set.saved(MARKS).clear()
        return super().commit()


class _Receiver(BusReceiver):
    def __init__(self, core: JoinedCore) -> None:
        self._core = core

    def retained(self, message: Message) -> bool:
        return self._core.messages.received(message)

    def shared(self, group: str, message: Message) -> None:
        raise AssertionError("no shared subscription is tested here")

    def marked(self, shard: int, end: int) -> None:
        self._core.messages.marked(shard, end)

    def failed(self, reason: str) -> None:
        raise AssertionError(reason)
