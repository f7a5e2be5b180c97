"""A single broker's rows are all in the shards, each where the cluster looks for it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.store_model import RandomCommits

from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.view import ViewState
from mqttbroker.cluster.shard.tables import ShardTables
from mqttbroker.cluster.shards import Shards
from mqttbroker.cluster.transfer.conversion import StoreRows
from sessions.row_kinds import OFFSETS, PRODUCERS, READERS, RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.store.database import Database
from sessions.store.tables import SqliteTables
from sessions.write_set import PageRequest

CLUSTER = b"cluster1"


def single_store(path: Path, seed: int) -> None:
    """A database with the rows of random commits."""
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
    database.close()


def entries(tables: SqliteTables, session_id: int) -> list[object]:
    page = tables.read_page(PageRequest(session_id, 0, 1 << 20, True))
    assert page.error is None
    # The id of a message and whether it is shared are the shard's own.
    rows = [row._replace(message_id=0, shared=0) for row in page.rows]
    return [*rows, *sorted(page.received)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("most_bytes", [1, 2000, 1 << 30])
def test_each_row_is_in_its_shard_and_nowhere_else(seed: int, most_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "single" / "mqttbroker.db"
    single_store(path, seed)
    shards = Shards(3)
    with closing(sqlite3.connect(path)) as connection:
        rows = StoreRows(connection, shards, most_bytes, 7.0)
        converted = [ShardTables(tmp_path / str(shard), shard, CLUSTER) for shard in range(3)]
        for tables in converted:
            tables.open()
        for end, (shard, write_set) in enumerate(rows.write_sets(), 1):
            converted[shard].changed(ViewState(end, 0, b"node-aaa", end, False), encode_body(write_set))
        carried = rows.carried
    whole = Database(path, durable=True)
    whole.open(may_be_new=False)
    before = SqliteTables(whole.connection, path)
    expected = before.recover()
    found = [tables.recover() for tables in converted]
    assert carried.sessions == len(expected.rows(SESSIONS)) == sum(len(one.rows(SESSIONS)) for one in found) > 0
    assert carried.retained == len(expected.rows(RETAINED)) == sum(len(one.rows(RETAINED)) for one in found)
    assert carried.queued == sum(queue.entries for queue in expected.queues) > 0
    for shard, one in enumerate(found):
        of_shard = [row for row in expected.rows(SESSIONS) if shards.of_text(row.client_id) == shard]
        assert one.rows(SESSIONS) == [row._replace(disconnected_at=row.disconnected_at or 7.0) for row in of_shard]
        ids = {row.session_id for row in of_shard}
        assert sorted(one.rows(SUBSCRIPTIONS)) == sorted(row for row in expected.rows(SUBSCRIPTIONS) if row.session_id in ids)
        assert sorted(one.rows(RETAINED)) == sorted(row for row in expected.rows(RETAINED) if shards.of_text(row.topic) == shard)
        assert sorted(one.rows(PRODUCERS)) == sorted(expected.rows(PRODUCERS))
        of_names = {row.reader_id for row in expected.rows(READERS) if shards.of_text(row.name) == shard}
        assert one.rows(READERS) == [row for row in expected.rows(READERS) if row.reader_id in of_names]
        assert one.rows(OFFSETS) == [row for row in expected.rows(OFFSETS) if row.reader_id in of_names]
        for session_id in ids:
            assert entries(converted[shard].tables, session_id) == entries(before, session_id)
    assert carried.readers == len(expected.rows(READERS)) > 0
    for tables in converted:
        tables.close()
    whole.close()
