"""The tables of all shards of a cluster of which no node runs, with everything that the logs have.

The log of each shard is read to its end, as a standby does. Then what other shards have published and a shard has not routed is routed
to its sessions, as its core would do at its next start: nodes that stop publish wills, and other cores may have stopped before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from mqttbroker.cluster.bus.bus import Bus, BusRecord, LocalReceiver, first_mark
from mqttbroker.cluster.bus.feed import FeedBatches
from mqttbroker.cluster.kafka.log import KafkaLog, LogFailure
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import CHANGES, ForeignRecord, decode_header
from mqttbroker.cluster.log.view import VALID, LogView
from mqttbroker.cluster.retained.shards import ShardRetained, keeper
from mqttbroker.cluster.shard.tables import DATABASE, ShardTables
from mqttbroker.cluster.shards import Shards
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.core.delivery.replay import ReplaySource
from mqttbroker.core.delivery.turns import LongWork
from mqttbroker.core.routing.groups import Group
from sessions.journal import Gate
from sessions.message import Message
from sessions.row_kinds import SESSIONS, SUBSCRIPTIONS
from sessions.session import CORE_PREFIX, Session
from sessions.store.interface import Recovered
from sessions.write_set import WriteSet

APPLY_BYTES: Final = 33_554_432  # of changes in memory, beyond which the tables get them
STALLED: Final = 30.0  # seconds without a record, after which Kafka is given up
LOOK_INTERVAL: Final = 0.02  # seconds between two looks how far the logs are read
BUS_BACKLOG: Final = 67_108_864  # bytes of records that wait to be routed, beyond which they are routed before others are read

BuildBroker = Callable[[Recovered, ClusterPort], Broker]
"""Makes the core of a shard with these rows."""

Prepare = Callable[[int, Path, int], Awaitable[None]]
"""Puts a snapshot of a shard into a directory if the log, which begins at this offset, needs one."""


class OfflineShards:
    """The shards whose logs are in ``kafka``, which is started; each has a directory below ``directory``, named by its number.

    Methods raise `LogFailure`, `StoreError`, `OSError` or `sqlite3.Error`.
    """

    def __init__(self, kafka: KafkaLog, cluster: bytes, shards: int, directory: Path, prepare: Prepare, build: BuildBroker) -> None:
        self.routed = 0  # messages for sessions that their shard had not routed
        self.without_member = 0  # messages of shared subscriptions that have no member any more
        self._kafka = kafka
        self._cluster = cluster
        self._shards = Shards(shards)
        self._directory = directory
        self._prepare = prepare
        self._build = build
        self._ends: dict[int, int] = {}
        self._tables: dict[int, ShardTables] = {}
        self._views: dict[int, LogView] = {}
        self._cores: dict[int, _OfflineCore] = {}

    @property
    def ends(self) -> dict[int, int]:
        """The ends of the logs, by shard."""
        return self._ends

    def database(self, shard: int) -> Path:
        """The file with the tables of a shard."""
        return self._directory / str(shard) / DATABASE

    async def read(self) -> None:
        """Make the tables of all shards; afterwards their databases are closed."""
        every = range(self._shards.count)
        try:
            self._ends = await self._offsets(self._kafka.ends, "no end")
            starts = await self._offsets(self._kafka.starts, "no start")
            for shard in every:
                directory = self._directory / str(shard)
                directory.mkdir()
                await self._prepare(shard, directory, starts[shard])
                tables = self._tables[shard] = ShardTables(directory, shard, self._cluster)
                view = self._views[shard] = LogView(shard, self._cluster)
                view.restore(tables.open())
            await follow(self._kafka, {shard: self._views[shard].end for shard in every}, self._ends, self._add, self._apply_much)
            for tables in self._tables.values():
                tables.apply()
            await self._route()
            if await self._offsets(self._kafka.ends, "no end") != self._ends:
                raise LogFailure(f"{self._kafka.topic}: has grown meanwhile: a node of the cluster runs")
        finally:
            for tables in self._tables.values():
                tables.close()

    async def _offsets(self, ask: Callable[[range], Awaitable[dict[int, int]]], missing: str) -> dict[int, int]:
        found = await ask(range(self._shards.count))
        for shard in range(self._shards.count):
            if shard not in found:
                raise LogFailure(f"{self._kafka.topic}, partition {shard}: {missing} is known; has it a leader that can be reached?")
        return found

    # -- the rows of a shard ------------------------------------------------------------

    def _add(self, shard: int, offset: int, record: bytes) -> None:
        view, tables = self._views[shard], self._tables[shard]
        try:
            header = decode_header(record)
        except ForeignRecord:
            view.skip(offset)
            tables.passed(view.state)
            return
        body = None
        if view.read(offset, header) == VALID and header.kind == CHANGES:
            body = view.body(header, record)
        if body is None:
            tables.passed(view.state)
        else:
            tables.changed(view.state, body)

    def _apply_much(self) -> None:
        for tables in self._tables.values():
            if tables.size > APPLY_BYTES:
                tables.apply()

    # -- what a shard has not routed ------------------------------------------------------

    async def _route(self) -> None:
        """Route what other shards have published behind the marks of each shard."""
        every = range(self._shards.count)
        batches: dict[tuple[int, int], FeedBatches] = {}  # by the log and the shard that reads it
        starts: dict[int, int] = {}
        for shard in every:
            marks = self._tables[shard].marks
            for number in every:
                if number != shard:
                    mark = marks.get(number, first_mark(number))
                    batches[number, shard] = FeedBatches(shard, mark, self._cluster)
                    starts[number] = min(mark.offset, starts.get(number, mark.offset))
        waiting = 0

        def read(number: int, offset: int, record: bytes) -> None:
            nonlocal waiting
            for shard in every:
                if shard == number:
                    continue
                found = batches[number, shard].read(offset, record)
                if found is not None and found.sections:
                    self._core(shard).waiting.append(found)
                    waiting += len(record)
            if waiting > BUS_BACKLOG:
                settle()

        def settle() -> None:
            nonlocal waiting
            waiting = 0
            for core in list(self._cores.values()):
                core.route()
            for core in list(self._cores.values()):  # those that were given a message of a shared subscription by another one
                core.settle()

        await follow(self._kafka, starts, self._ends, read, settle)
        for core in self._cores.values():
            core.finish()
            self.routed += core.bus.routed

    def _core(self, shard: int) -> _OfflineCore:
        core = self._cores.get(shard)
        if core is None:
            tables, view = self._tables[shard], self._views[shard]
            broker = self._build(_without_cores(tables.recover()), _NoOthers(shard, self._shards))
            core = self._cores[shard] = _OfflineCore(self, shard, self._shards, tables, view, broker)
        return core

    def give_elsewhere(self, shard: int, group: str, message: Message) -> None:
        """Give a message of a shared subscription, which has no member in this shard any more, to one of another shard."""
        for other in range(self._shards.count):
            if other != shard and self._core(other).broker.publisher.give_to_group(group, message):
                return
        self.without_member += 1


async def follow(
    kafka: KafkaLog,
    starts: dict[int, int],
    ends: dict[int, int],
    on_record: Callable[[int, int, bytes], None],
    on_pause: Callable[[], None],
) -> None:
    """Read the logs of shards from ``starts`` to ``ends``. Raises `LogFailure`, and the errors of the callbacks; a `ValueError` is a
    `LogFailure` that names the record."""
    positions = {shard: start for shard, start in starts.items() if start < ends[shard]}
    if not positions:
        return

    failures: list[Exception] = []  # the reader has a line in the log for its own ones only

    def read(shard: int, offset: int, record: bytes) -> None:
        positions[shard] = offset + 1
        if failures or offset >= ends[shard]:
            return
        try:
            on_record(shard, offset, record)
        except ValueError as error:
            failures.append(LogFailure(f"{kafka.topic}, partition {shard}, offset {offset}: {error}"))
        except Exception as error:
            failures.append(error)

    def pause() -> None:
        if not failures:
            try:
                on_pause()
            except Exception as error:
                failures.append(error)

    reader = kafka.reader(dict(positions), read)
    reader.on_pause = pause
    reader.start()
    loop = asyncio.get_running_loop()
    before, since = dict(positions), loop.time()
    try:
        while any(position < ends[shard] for shard, position in positions.items()):
            await asyncio.sleep(LOOK_INTERVAL)
            if failures or reader.failure:
                break
            if positions != before:
                before, since = dict(positions), loop.time()
            elif loop.time() - since > STALLED:
                raise LogFailure(f"{kafka.topic}: Kafka has sent nothing for {STALLED:.0f} s")
    finally:
        await reader.stop()
    if not failures and reader.failure:
        raise LogFailure(reader.failure)
    pause()
    if failures:
        raise failures[0]


def _without_cores(recovered: Recovered) -> Recovered:
    """The rows without the sessions that stand for those of other cores: there is no core to which a message could be passed on."""
    away = {row.session_id for row in recovered.rows(SESSIONS) if row.client_id.startswith(CORE_PREFIX)}
    kinds = list(recovered.kinds)
    for kind in (SESSIONS, SUBSCRIPTIONS):
        kinds[kind.number] = [row for row in kinds[kind.number] if row.session_id not in away]
    return recovered._replace(kinds=kinds, queues=[row for row in recovered.queues if row.session_id not in away])


class _NoOthers(ClusterPort):
    """The other shards of a core without clients: there is nobody to ask."""

    def __init__(self, shard: int, shards: Shards) -> None:
        super().__init__(shard, shards.count)
        self._shards = shards

    def filter_added(self, topic_filter: str) -> None:
        """Messages at QoS 0 are not kept."""

    def filter_removed(self, topic_filter: str) -> None:
        """Messages at QoS 0 are not kept."""

    def retains(self, topic: str) -> bool:
        return keeper(topic, self._shards, self.shard) == self.shard

    def subscribe(self, work: LongWork, session: Session, filters: list[str]) -> None:
        raise AssertionError("no client subscribes")

    def send_shared(self, shard: int, group: Group, outgoing: Outgoing) -> None:
        """Messages at QoS 0 are not kept."""

    def retain(self, message: Message, gate: Gate | None) -> None:
        raise AssertionError("no client publishes")

    def linked(self, topic: str) -> None:
        raise AssertionError("there is no link")

    def open(self, topic_filter: str) -> ReplaySource:
        raise AssertionError("no client subscribes")


class _OfflineCore:
    """The broker of one shard, which routes and has no clients."""

    def __init__(self, owner: OfflineShards, shard: int, shards: Shards, tables: ShardTables, view: LogView, broker: Broker) -> None:
        self.broker = broker
        self.waiting: list[BusRecord] = []
        self._tables = tables
        self._state = view.state
        retained = ShardRetained(broker, shards, shard, lambda: 0, lambda topic: None)
        receiver = _Receiver(owner, broker, shard, shards.count, retained)
        self.bus = Bus(broker, shard, shards.count, tables.marks, receiver, lambda log, size: None)

    def route(self) -> None:
        """Route the records that wait."""
        records, self.waiting = self.waiting, []
        self.bus.feed(records)
        self.settle()

    def finish(self) -> None:
        """Store the marks, so that the tables say what they have."""
        self.bus.save_marks()
        self.settle()

    def settle(self) -> None:
        """Do all work of the broker, and have the tables take what it stores."""
        commits, journal = self.broker.commits, self.broker.journal
        while True:
            if self.broker.turns.step():
                continue
            write_set = commits.next_write_set()
            if write_set is not None:
                self._commit(write_set)
            elif not journal.closing:
                break
        self._tables.apply()

    def _commit(self, write_set: WriteSet) -> None:
        if write_set.has_changes():
            # No log is written: an end that moves has the tables apply the changes.
            self._state = self._state._replace(end=self._state.end + 1)
            self._tables.changed(self._state, encode_body(write_set))
        self.broker.commits.answered("")
        if write_set.pages or write_set.queries:
            self._tables.apply()
            tables = self._tables.tables
            pages = [tables.read_page(one) for one in write_set.pages]
            for query in write_set.queries:
                tables.run_query(query)
            self.broker.commits.read_done(write_set.queries, pages)


class _Receiver(LocalReceiver):
    def __init__(self, owner: OfflineShards, broker: Broker, shard: int, shards: int, retained: ShardRetained) -> None:
        super().__init__(broker, shard, shards)
        self._owner = owner
        self._own = shard
        self._retained = retained
        self._publisher = broker.publisher

    def retained(self, message: Message) -> bool:
        return self._retained.received(message)

    def shared(self, group: str, message: Message) -> None:
        if not self._publisher.give_to_group(group, message):
            self._owner.give_elsewhere(self._own, group, message)

    def failed(self, reason: str) -> None:
        raise LogFailure(reason)
