"""The shards of a cluster as the store of a single broker; the logs are in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.core import Core
from support.memory_log import CLUSTER, TOPIC, MemoryLog, MemoryTopic
from support.properties import session_expiry
from support.store_model import RandomCommits

from mqttbroker.cluster.kafka.log import LogFailure
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import CHANGES, NO_EPOCH, TAKEOVER, Header, Takeover, encode_record, encode_takeover
from mqttbroker.cluster.log.view import ViewState
from mqttbroker.cluster.shard.tables import ShardTables
from mqttbroker.cluster.shards import Shards
from mqttbroker.cluster.transfer.offline_shards import OfflineShards
from mqttbroker.cluster.transfer.store_import import StoreImport
from mqttbroker.cluster.transfer.store_merge import Merged, merge_shards
from mqttbroker.config.settings import Settings
from mqttbroker.core.broker import Broker
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.server.assembly import build_broker, restore
from sessions.message import Message
from sessions.row_kinds import MARKS, OFFSETS, PRODUCERS, READERS, RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.rows import SUBSCRIPTION_READER, MarkRow, OffsetsRow, ReaderRow, SessionRow, SubscriptionRow
from sessions.session import NEVER
from sessions.store.database import Database
from sessions.store.interface import Recovered
from sessions.store.tables import SqliteTables
from sessions.write_set import BusMessages, PageRequest, WriteSet

SHARDS = 3
OWNER = b"importer"


def client_id(name: str, shard: int) -> str:
    return next(f"{name}{n}" for n in range(99) if Shards(SHARDS).of_text(f"{name}{n}") == shard)


def message(topic: str, payload: bytes, qos: int = 1, retain: bool = False) -> Message:
    return Message(topic, payload, qos, retain, b"", "publisher", int(time.time() * 1_000_000), 0)


def build(recovered: Recovered, port: ClusterPort) -> Broker:
    settings = Settings()
    broker = build_broker(settings, recovered, cluster=port)
    restore(broker, recovered, time.time())
    return broker


async def imported(database: Path, memory: MemoryTopic) -> None:
    """Import a single broker's database into the logs."""
    log = MemoryLog(memory, 1.0)
    await StoreImport(log, CLUSTER, OWNER, Takeover("import", "", ""), 16_000).run(database, SHARDS)


async def offline(memory: MemoryTopic, directory: Path) -> OfflineShards:
    async def no_snapshot(shard: int, place: Path, log_start: int) -> None:
        assert log_start == 0

    directory.mkdir()
    log = MemoryLog(memory, 1.0)
    await log.start()
    shards = OfflineShards(log, CLUSTER, SHARDS, directory, no_snapshot, build)
    await shards.read()
    return shards


def merged(shards: OfflineShards, target: Path) -> Merged:
    return merge_shards(target, [shards.database(shard) for shard in range(SHARDS)])


class Owner:
    """Appends records to the log of a shard, as a core that takes it over."""

    def __init__(self, memory: MemoryTopic, shard: int, epoch: int = 0) -> None:
        """``epoch`` is the one before: that of the import begins with the first record."""
        self.memory, self.shard, self.sequence = memory, shard, 0
        header = Header(TAKEOVER, shard, CLUSTER, b"new-node", epoch, 0)
        self.epoch = memory.append(shard, encode_record(header, encode_takeover(Takeover("n", "", ""))))

    def commit(self, write_set: WriteSet) -> int:
        self.sequence += 1
        header = Header(CHANGES, self.shard, CLUSTER, b"new-node", self.epoch, self.sequence)
        return self.memory.append(self.shard, encode_record(header, encode_body(write_set)))

    def publish(self, messages: Sequence[Message], group: str = "", shard: int = 0) -> int:
        write_set = WriteSet()
        write_set.bus = BusMessages()
        if group:
            write_set.bus.to_members = {(group, shard): list(messages)}
        else:
            write_set.bus.to_all = list(messages)
        return self.commit(write_set)


def random_store(path: Path, seed: int) -> None:
    database = Database(path, durable=True)
    database.open(may_be_new=True)
    tables = SqliteTables(database.connection, path)
    commits = RandomCommits(seed)
    for _ in range(40):
        write_set = commits.next()
        write_set.stream_messages = {}
        tables.begin()
        tables.apply(write_set)
        tables.commit()
    last = WriteSet()  # a subscription to a stream: the other readers are groups
    reader, session = 1 << 20, min(row.session_id for row in tables.recover().rows(SESSIONS))
    last.saved(READERS)[:] = [ReaderRow(reader, SUBSCRIPTION_READER, session, "$stream/s", "s", "", "earliest", 1, 5)]
    last.saved(OFFSETS)[:] = [OffsetsRow(reader, 0, 17, 20, b"pending"), OffsetsRow(reader, 1, 4, 4, b"")]
    tables.begin()
    tables.apply(last)
    tables.commit()
    database.close()


def contents(path: Path) -> tuple[dict[str, object], list[object], list[object], list[object]]:
    """The sessions of a store with all that is theirs, without row ids and the time of the disconnect; retained messages; producers;
    readers of streams with their offsets."""
    database = Database(path, durable=True)
    database.open(may_be_new=False)
    tables = SqliteTables(database.connection, path)
    found = tables.recover()
    sessions: dict[str, object] = {}
    for row in found.rows(SESSIONS):
        page = tables.read_page(PageRequest(row.session_id, 0, 1 << 20, True))
        assert page.error is None
        sessions[row.client_id] = (
            row._replace(session_id=0, disconnected_at=1.0),
            sorted(one[1:] for one in found.rows(SUBSCRIPTIONS) if one.session_id == row.session_id),
            [one._replace(message_id=0, shared=0) for one in page.rows],
            sorted(page.received),
        )
    database.close()
    client_ids = {row.session_id: row.client_id for row in found.rows(SESSIONS)}
    readers: list[object] = sorted(
        (
            client_ids.get(row.session_id, str(row.session_id)),
            row[1:2] + row[3:],
            [one[1:] for one in found.rows(OFFSETS) if one.reader_id == row.reader_id],
        )
        for row in found.rows(READERS)
    )
    return sessions, sorted(found.rows(RETAINED)), sorted(found.rows(PRODUCERS)), readers


@pytest.mark.parametrize("seed", range(3))
async def test_a_store_that_was_imported_is_exported_as_it_was(seed: int, tmp_path: Path) -> None:
    before, after = tmp_path / "before" / "mqttbroker.db", tmp_path / "after" / "mqttbroker.db"
    random_store(before, seed)
    memory = MemoryTopic(SHARDS)
    await imported(before, memory)
    shards = await offline(memory, tmp_path / "shards")
    found = merged(shards, after)
    expected, exported = contents(before), contents(after)
    assert exported == expected
    assert found.sessions == len(expected[0]) > 0 and found.queued > 0 and found.readers == len(expected[3]) > 1
    assert shards.routed == 0


async def test_what_a_shard_has_not_routed_is_in_the_queues(tmp_path: Path) -> None:
    """Queued, retained, and for a member of a shared subscription: each once, also behind a mark, and in the order of the log."""
    names = [client_id("s", shard) for shard in range(SHARDS)]
    (tmp_path / "single").mkdir()
    with Core(tmp_path / "single") as core:
        for shard, name in enumerate(names):
            client = core.connect(name, clean_start=False, properties=session_expiry())
            client.subscribe("t/#", options=shard)
            client.subscribe(f"$share/g{shard}/jobs", options=2)
            client.disconnect()
    memory = MemoryTopic(SHARDS)
    await imported(tmp_path / "single" / "core.db", memory)
    owners = [Owner(memory, shard) for shard in range(SHARDS)]
    first = owners[0].publish([message("t/1", b"routed"), message("t/1", b"a"), message("other", b"-")])
    marked = WriteSet()
    marked.saved(MARKS)[:] = [MarkRow(0, first, 1, owners[0].epoch, b"new-node", 0, False)]  # shard 1 has routed the first of them
    owners[1].commit(marked)
    retained = [message(f"t/{n}", b"kept", 1, True) for n in range(6)]
    owners[0].publish(retained)
    away = WriteSet()  # as a core stores it that knows of a persistent member on the core of shard 1
    away.saved(SESSIONS)[:] = [SessionRow(900, "$core/1", 5, NEVER, 1.0, None, None, None, None)]
    away.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(900, "$share/g1/jobs", 2, 2, 0)]
    owners[0].commit(away)
    owners[2].publish([message("jobs", b"shared", 2)], "$share/g1/jobs", 1)
    owners[2].publish([message("jobs", b"left", 2)], "$share/g1/jobs", 0)  # its members there have left
    owners[2].publish([message("jobs", b"nobody", 2)], "$share/none/jobs", 0)
    shards = await offline(memory, tmp_path / "shards")
    merged(shards, tmp_path / "after" / "core.db")
    assert shards.without_member == 1
    assert contents(tmp_path / "after" / "core.db")[0].keys() == set(names)
    with Core(tmp_path / "after") as core:
        stored = []
        for shard, name in enumerate(names):
            client = core.connect(name, clean_start=False, properties=session_expiry())
            assert client.connack.session_present
            found = [(one.topic, one.payload, one.qos) for one in client.arrived()]
            stored.append(sorted(one for one in found if one[0] == "jobs"))
            routed = [("t/1", b"routed", 1), ("t/1", b"a", 1)]
            kept = [(f"t/{n}", b"kept", 1) for n in range(6)]
            expected = {0: [], 1: [routed[1], *kept], 2: [*routed, *kept]}[shard]
            assert [one for one in found if one[0] != "jobs"] == expected
        assert stored == [[], [("jobs", b"left", 2), ("jobs", b"shared", 2)], []]
        new = core.connect("new")
        new.subscribe("t/#", options=1)
        # The publisher's own shard has stored its retained messages itself, with the record that published them.
        own = {one.topic for one in retained if Shards(SHARDS).of_text(one.topic) == 0}
        assert {one.topic for one in new.arrived()} == {one.topic for one in retained} - own


async def test_a_log_that_grows_meanwhile_is_refused(tmp_path: Path) -> None:
    memory = MemoryTopic(SHARDS)
    random_store(tmp_path / "single" / "mqttbroker.db", 1)
    await imported(tmp_path / "single" / "mqttbroker.db", memory)
    looks = 0

    class Growing(MemoryLog):
        async def ends(self, shards: Sequence[int]) -> dict[int, int]:
            nonlocal looks
            looks += 1
            return {shard: end + (looks > 1) for shard, end in (await super().ends(shards)).items()}

    async def no_snapshot(shard: int, place: Path, log_start: int) -> None:
        pass

    (tmp_path / "shards").mkdir()
    shards = OfflineShards(Growing(memory, 1.0), CLUSTER, SHARDS, tmp_path / "shards", no_snapshot, build)
    with pytest.raises(LogFailure, match=f"{TOPIC}: has grown meanwhile: a node of the cluster runs"):
        await shards.read()


async def test_a_record_of_another_cluster_is_named(tmp_path: Path) -> None:
    memory = MemoryTopic(SHARDS)
    header = Header(TAKEOVER, 1, b"another-", b"new-node", NO_EPOCH, 0)
    memory.append(1, encode_record(header, encode_takeover(Takeover("n", "", ""))))
    with pytest.raises(LogFailure, match="partition 1, offset 0: a record of another cluster"):
        await offline(memory, tmp_path / "shards")


async def test_a_shard_is_read_behind_its_snapshot(tmp_path: Path) -> None:
    """Records before the ends and marks of the snapshots are not read: Kafka has deleted them."""
    gone = 5
    memory = MemoryTopic(SHARDS)
    for _ in range(gone):
        memory.append(0, encode_record(Header(TAKEOVER, 0, b"deleted!", b"old-node", NO_EPOCH, 0), b""))
    row = SessionRow(1, client_id("s", 0), 5, NEVER, 1.0, None, None, None, None)
    state = ViewState(gone, 2, b"old-node", 2, True)

    class Started(MemoryLog):
        async def starts(self, shards: Sequence[int]) -> dict[int, int]:
            return {shard: 0 if shard else gone for shard in shards}

    async def snapshot(shard: int, place: Path, log_start: int) -> None:
        assert log_start == (0 if shard else gone)
        tables = ShardTables(place, shard, CLUSTER)
        tables.open()
        write_set = WriteSet()
        if shard == 0:
            write_set.saved(SESSIONS)[:] = [row]
        else:
            write_set.saved(MARKS)[:] = [MarkRow(0, gone, 0, *state[1:])]
        tables.changed(state if shard == 0 else ViewState(0, NO_EPOCH, b"", 0, True), encode_body(write_set))
        tables.apply()
        tables.close()

    (tmp_path / "shards").mkdir()
    (tmp_path / "after").mkdir()
    owner = Owner(memory, 0, 2)
    more = WriteSet()
    more.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(1, "t", 1, 1, 0)]
    owner.commit(more)
    shards = OfflineShards(Started(memory, 1.0), CLUSTER, SHARDS, tmp_path / "shards", snapshot, build)
    await shards.read()
    assert merged(shards, tmp_path / "after" / "core.db") == Merged(1, 1, 0, 0, 0)
