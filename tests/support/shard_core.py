"""Cores of a cluster in one process: each has the broker core of `support.core.Core`, its own tables, and a bus; the logs of all
shards are lists of records in memory. Nothing happens by itself: a test commits, and hands on what the logs have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqttbroker.admin.control.control import controls_of
from mqttbroker.auth.security import Security
from mqttbroker.cluster.bus.bus import Barrier, Bus, LocalReceiver, first_mark
from mqttbroker.cluster.bus.feed import FeedBatches
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import (
    CHANGES,
    HEADER_BYTES,
    TAKEOVER,
    Header,
    decode_header,
    encode_record,
)
from mqttbroker.cluster.log.view import VALID, LogView
from mqttbroker.cluster.shard.tables import ShardTables
from mqttbroker.cluster.shards import Shards
from mqttbroker.core.broker import Broker
from mqttbroker.server.assembly import build_broker, restore
from support.core import Core, CoreClient
from support.partial_port import PartialPort

CLUSTER = b"cluster1"


class Receiver(LocalReceiver):
    """Keeps why the bus has failed."""

    def __init__(self, broker: Broker, shard: int, shards: int) -> None:
        super().__init__(broker, shard, shards)
        self.failures: list[str] = []

    def failed(self, reason: str) -> None:
        self.failures.append(reason)


class Logs:
    """The logs of all shards."""

    def __init__(self, shards: int) -> None:
        self.records: list[list[bytes]] = [[] for _ in range(shards)]
        self.owners = 0

    def next_owner(self) -> bytes:
        self.owners += 1
        return b"own-%04d" % self.owners


class ShardCore(Core):
    """The owner of a shard. ``on_answer`` hooks of the bus are answered by `answer_ends`; `read` hands records to the bus."""

    def __init__(self, directory: Path, logs: Logs, shard: int, **limits: Any) -> None:
        self.logs = logs
        self.shard = shard
        self.shards = Shards(len(logs.records))
        super().__init__(directory, **limits)
        self.eager = False

    def _start(self) -> None:
        logs, shard = self.logs, self.shard
        self.tables = ShardTables(self.directory / f"{shard:02}", shard, CLUSTER)
        self.view = LogView(shard, CLUSTER)
        self.view.restore(self.tables.open())
        records = logs.records[shard]
        self.owner = logs.next_owner()
        records.append(encode_record(Header(TAKEOVER, shard, CLUSTER, self.owner, self._epoch(), 0), b""))
        for offset in range(self.view.end, len(records)):
            header = decode_header(records[offset])
            if self.view.read(offset, header) == VALID and header.kind == CHANGES:
                self.tables.changed(self.view.state, records[offset][HEADER_BYTES:])
            else:
                self.tables.passed(self.view.state)
        assert self.view.owner == self.owner
        recovered = self.tables.recover()
        security = Security(self.settings)
        self.policy = security.policy
        port = PartialPort()
        self.broker = port.broker = build_broker(self.settings, recovered, security, port)
        self.broker.lifecycle.resume()
        self._set_clock()
        restore(self.broker, recovered, self.seconds)
        marks = self.tables.marks
        receiver = self.receiver = Receiver(self.broker, shard, self.shards.count)
        self.bus = Bus(self.broker, shard, self.shards.count, marks, receiver, lambda log, size: None)
        self.asked_ends: list[Callable[[dict[int, int]], object]] = []
        self.barrier = Barrier(self.bus, self.broker, lambda filters, done: done(), self.asked_ends.append)
        port.join_bus(self.barrier)
        self.feeds = {log: FeedBatches(shard, marks.get(log, first_mark(log)), CLUSTER) for log in range(self.shards.count) if log != shard}
        self.next = {log: marks.get(log, first_mark(log)).offset for log in self.feeds}
        self.control = controls_of(self.broker, lambda: self.seconds)
        self.clients: list[CoreClient] = []
        self.taken = None
        self.caught_up = False
        self.barrier.catch_up(self._set_caught_up)

    def _set_caught_up(self) -> None:
        self.caught_up = True

    def _epoch(self) -> int:
        """The epoch in force at the end of the own log."""
        view = LogView(self.shard, CLUSTER)
        for offset, record in enumerate(self.logs.records[self.shard]):
            view.read(offset, decode_header(record))
        return view.epoch

    # --- the store ------------------------------------------------------------------------------------------------

    def commit(self) -> bool:
        write_set = self.taken or self.take()
        self.taken = None
        if write_set is None:
            return False
        if write_set.has_changes():
            view = self.view
            header = Header(CHANGES, self.shard, CLUSTER, self.owner, view.epoch, view.sequence + 1)
            body = encode_body(write_set)
            records = self.logs.records[self.shard]
            records.append(encode_record(header, body))
            assert view.read(len(records) - 1, header) == VALID
            self.tables.changed(view.state, body)
        self.broker.commits.answered("")
        if write_set.pages or write_set.queries:
            self.tables.apply()
            for query in write_set.queries:
                self.tables.tables.run_query(query)
            pages = [self.tables.tables.read_page(page) for page in write_set.pages]
            self.broker.commits.read_done(write_set.queries, pages)
        self._resume()
        return True

    def settle(self) -> None:
        """Commit until there is nothing to write; a SUBSCRIBE may still wait for the other shards."""
        idle = 0
        while idle < 3:
            self._resume()
            worked = self.broker.turns.step() or self.broker.replays.step() or self.commit()
            idle = 0 if worked else idle + 1

    def kill(self) -> None:
        """Lose what is not committed; the next owner takes the shard over."""
        for client in self.clients:
            client.connection.outbox.parts.clear()
        self.tables.close(unchanged=True)
        self._start()

    def close(self) -> None:
        self.tables.close()

    # --- the bus --------------------------------------------------------------------------------------------------

    def read(self, log: int, most: int | None = None) -> None:
        """Hand the bus the next records of a log: ``most`` of them, or all."""
        records = self.logs.records[log]
        end = len(records) if most is None else min(len(records), self.next[log] + most)
        batches = self.feeds[log]
        found = [batches.read(offset, records[offset]) for offset in range(self.next[log], end)]
        self.next[log] = end
        self.bus.feed([one for one in (*found, batches.pass_on()) if one is not None])

    def answer_ends(self) -> None:
        """Tell those who asked where the logs end."""
        asked, self.asked_ends[:] = list(self.asked_ends), []
        for done in asked:
            done({log: len(self.logs.records[log]) for log in self.feeds})

    def work(self) -> None:
        """Do the work that is at hand, and commit nothing."""
        while self.broker.turns.step():
            pass

    def read_all(self) -> None:
        """Read all logs, and answer, until there is nothing more to do."""
        self.answer_ends()
        for log in self.feeds:
            self.read(log)
        self.settle()
