"""The rows of a shard equal those of a model, whatever of its log was applied before each start."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from random import Random

import pytest
from support.store_model import RandomCommits, check_recovered

from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import CHANGES, HEADER_BYTES, NO_EPOCH, TAKEOVER, Header, decode_header, encode_record
from mqttbroker.cluster.log.view import VALID, LogView
from mqttbroker.cluster.shard.tables import DATABASE, ShardTables
from sessions.message import Message
from sessions.row_kinds import MARKS, SESSIONS
from sessions.rows import MarkRow, SessionRow
from sessions.store.interface import CorruptStore, StoreError
from sessions.write_set import PageRequest, WriteSet

CLUSTER, A, B = b"cluster1", b"node-aaa", b"node-bbb"
SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow(reason="more of the same")) for seed in range(2, 40))]


class Log:
    """The log of shard 3 in memory, with random takeovers, repeated and void records between the commits of a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.commits = RandomCommits(seed)
        self.records: list[bytes] = []
        self.view = LogView(3, CLUSTER)
        self._add(Header(TAKEOVER, 3, CLUSTER, A, NO_EPOCH, 0), b"")

    def _add(self, header: Header, body: bytes) -> None:
        self.view.read(len(self.records), header)
        self.records.append(encode_record(header, body))

    def commit(self) -> None:
        write_set = self.commits.next()
        write_set.stream_messages = {}
        view = self.view
        header = Header(CHANGES, 3, CLUSTER, view.owner, view.epoch, view.sequence + 1)
        body = encode_body(write_set)
        self._add(header, body)
        if self.chance.random() < 0.1:
            self._add(header, body)
        if self.chance.random() < 0.1:
            deposed = Header(CHANGES, 3, CLUSTER, view.owner, view.epoch, view.sequence + 1)
            self._add(Header(TAKEOVER, 3, CLUSTER, self.chance.choice((A, B)), view.epoch, 0), b"")
            self._add(deposed, body)


def follow(tables: ShardTables, view: LogView, log: Log, until: int, chance: Random) -> None:
    for offset in range(view.end, until):
        record = log.records[offset]
        header = decode_header(record)
        if view.read(offset, header) == VALID and header.kind == CHANGES:
            tables.changed(view.state, record[HEADER_BYTES:])
        else:
            tables.passed(view.state)
        if chance.random() < 0.2:
            tables.apply()


@pytest.mark.parametrize("seed", SEEDS)
def test_each_record_is_applied_once_whatever_was_applied_before_a_start(tmp_path: Path, seed: int) -> None:
    log, chance = Log(seed), Random(seed)
    last = 0
    for _ in range(8):
        for _ in range(15):
            log.commit()
        tables, view = ShardTables(tmp_path, 3, CLUSTER), LogView(3, CLUSTER)
        view.restore(tables.open())
        assert view.end <= last
        follow(tables, view, log, chance.randrange(view.end, len(log.records)), chance)
        last = view.end
        tables.close(unchanged=chance.random() < 0.5)
    tables, view = ShardTables(tmp_path, 3, CLUSTER), LogView(3, CLUSTER)
    view.restore(tables.open())
    follow(tables, view, log, len(log.records), chance)
    check_recovered(tables.recover(), log.commits.rows)
    assert view.state == log.view.state
    tables.close()
    assert ShardTables(tmp_path, 3, CLUSTER).open() == log.view.state


def test_marks_are_stored_with_the_changes_of_their_record(tmp_path: Path) -> None:
    tables, view = ShardTables(tmp_path, 3, CLUSTER), LogView(3, CLUSTER)
    view.restore(tables.open())
    view.read(0, Header(TAKEOVER, 3, CLUSTER, A, NO_EPOCH, 0))
    for sequence in (1, 2, 3):
        write_set = WriteSet()
        write_set.saved(MARKS)[:] = [MarkRow(sequence % 2, 10 * sequence, sequence, 4, B, 5, sequence == 3)]
        view.read(sequence, Header(CHANGES, 3, CLUSTER, A, 0, sequence))
        tables.changed(view.state, encode_body(write_set))
        if sequence == 1:
            tables.apply()
    expected = {0: MarkRow(0, 20, 2, 4, B, 5, False), 1: MarkRow(1, 30, 3, 4, B, 5, True)}
    assert tables.marks == expected
    tables.recover()
    tables.close()
    again = ShardTables(tmp_path, 3, CLUSTER)
    again.open()
    assert again.marks == expected
    again.close()


@pytest.mark.parametrize("passed", [False, True], ids=["changes", "takeover read"])
def test_ids_that_the_next_owner_uses_again_are_not_those_of_removed_rows(tmp_path: Path, passed: bool) -> None:
    tables, view = ShardTables(tmp_path, 3, CLUSTER), LogView(3, CLUSTER)
    view.restore(tables.open())
    old, new = (Message("t", payload, 1, False, b"", "p", 1, 0) for payload in (b"old", b"new"))
    old.id = new.id = 7
    sessions = [SessionRow(number, f"c{number}", 5, 60, 0.0, None, None, None, None) for number in (1, 2)]
    for offset, owner, entries, removed, messages in (
        (1, A, [(1, 5, 7, 0)], [], [old]),
        (2, A, [], [(1, 5, 7, 0)], []),
        (4, B, [(1, 5, 7, 1), (2, 6, 7, 1)], [], [new]),
        (5, B, [], [(1, 5, 7, 1)], []),
    ):
        if owner != view.owner:
            view.read(offset - 1, Header(TAKEOVER, 3, CLUSTER, owner, view.epoch, 0))
            if passed:
                tables.passed(view.state)
        write_set = WriteSet()
        write_set.saved(SESSIONS)[:] = sessions if offset == 1 else []
        write_set.messages, write_set.deleted_entries = messages, removed
        write_set.entries = [(*entry, 1, 0, b"", 0, 0, 10, 0) for entry in entries]
        assert view.read(offset, Header(CHANGES, 3, CLUSTER, owner, view.epoch, view.sequence + 1)) == VALID
        tables.changed(view.state, encode_body(write_set))
        if offset == 1:
            tables.apply()
    tables.apply()
    (page,) = tables.tables.read_page(PageRequest(2, 0, 10, False)).rows
    assert (page.seq, page.payload) == (6, b"new")
    assert tables.size == 0 and tables.tables.recover().next_seq == 7
    tables.close()


def test_a_transaction_that_fails_is_applied_later_as_a_whole(tmp_path: Path) -> None:
    log = Log(1)
    for _ in range(20):
        log.commit()
    tables, view = ShardTables(tmp_path, 3, CLUSTER), LogView(3, CLUSTER)
    view.restore(tables.open())
    follow(tables, view, log, 10, Random(1))
    tables.apply()
    connection = tables.database.connection
    connection.execute("ALTER TABLE shard_log RENAME TO hidden")
    for offset in range(view.end, len(log.records)):
        record = log.records[offset]
        if view.read(offset, decode_header(record)) == VALID and decode_header(record).kind == CHANGES:
            tables.changed(view.state, record[HEADER_BYTES:])
    with pytest.raises(sqlite3.Error, match="shard_log"):
        tables.apply()
    assert not connection.in_transaction
    connection.execute("ALTER TABLE hidden RENAME TO shard_log")
    check_recovered(tables.recover(), log.commits.rows)
    tables.close()


def test_the_database_of_another_shard_or_cluster_is_refused(tmp_path: Path) -> None:
    log = Log(0)
    tables, view = ShardTables(tmp_path, 3, CLUSTER), LogView(3, CLUSTER)
    view.restore(tables.open())
    follow(tables, view, log, 1, Random(0))
    tables.apply()
    tables.close()
    with pytest.raises(StoreError, match=f"{DATABASE}: belongs to shard 3, not to shard 4"):
        ShardTables(tmp_path, 4, CLUSTER).open()
    with pytest.raises(StoreError, match=f"{DATABASE}: belongs to the cluster {CLUSTER.hex()}"):
        ShardTables(tmp_path, 3, b"cluster2").open()


def test_a_record_that_is_no_write_set_is_named(tmp_path: Path) -> None:
    tables, view = ShardTables(tmp_path, 3, CLUSTER), LogView(3, CLUSTER)
    view.restore(tables.open())
    view.read(0, Header(TAKEOVER, 3, CLUSTER, A, NO_EPOCH, 0))
    with pytest.raises(CorruptStore, match="shard 3, record of offset 0: not a write set"):
        tables.changed(view.state, b"\xc1")
    tables.close()
