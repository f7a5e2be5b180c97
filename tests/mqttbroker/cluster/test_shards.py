"""A write set cut by shard: every row is in the part of its shard, and all parts add up to the whole."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable

import pytest
from support.store_model import Query, RandomCommits

from mqttbroker.cluster.shards import MAX_SHARDS, Shards, first_id, shard_of_id
from sessions.message import Message
from sessions.rows import received_key, received_row
from sessions.write_set import PageRequest, WriteSet

SHARDS = Shards(5)
# The lists of a write set whose rows belong to the shard of an id, with that id.
BY_ID: dict[str, Callable[[Any], int]] = {
    "deleted_sessions": lambda row: int(row),
    "sessions": lambda row: int(row.session_id),
    "subscriptions": lambda row: int(row.session_id),
    "deleted_subscriptions": lambda row: int(row[0]),
    "entries": lambda row: int(row[0]),
    "entry_updates": lambda row: int(row[2]),
    "deleted_entries": lambda row: int(row[0]),
    "received": lambda row: received_row(row)[0],
    "deleted_received": lambda row: received_row(row)[0],
    "deleted_readers": lambda row: int(row),
    "readers": lambda row: int(row.reader_id),
    "offsets": lambda row: int(row.reader_id),
}
BY_HASH: dict[str, Callable[[Any], int]] = {
    "retained": lambda row: SHARDS.of_text(row.topic),
    "deleted_retained": lambda row: SHARDS.of_text(row),
    "deleted_producers": lambda row: SHARDS.of_producer(row[1], row[2]),
    "producers": lambda row: SHARDS.of_producer(row.user_name, row.producer_id),
}


def sharded(row_id: int) -> int:
    """The id that a row of the model would have in a cluster."""
    return first_id(row_id % SHARDS.count) + row_id


def in_shards(made: WriteSet) -> WriteSet:
    """A write set of the model, with ids that have shards."""
    made.stream_messages = {}
    made.deleted_sessions = [sharded(row) for row in made.deleted_sessions]
    made.sessions = [row._replace(session_id=sharded(row.session_id)) for row in made.sessions]
    made.subscriptions = [row._replace(session_id=sharded(row.session_id)) for row in made.subscriptions]
    made.deleted_subscriptions = [(sharded(row[0]), row[1]) for row in made.deleted_subscriptions]
    made.entries = [(sharded(row[0]), *row[1:]) for row in made.entries]
    made.entry_updates = [(*row[:2], sharded(row[2]), row[3]) for row in made.entry_updates]
    made.deleted_entries = [(sharded(row[0]), *row[1:]) for row in made.deleted_entries]
    for rows in (made.received, made.deleted_received):
        rows[:] = [received_key(sharded(session_id), packet_id) for session_id, packet_id in map(received_row, rows)]
    made.deleted_readers = [sharded(row) for row in made.deleted_readers]
    made.readers = [row._replace(reader_id=sharded(row.reader_id)) for row in made.readers]
    made.offsets = [row._replace(reader_id=sharded(row.reader_id)) for row in made.offsets]
    return made


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_the_whole(seed: int) -> None:
    commits = RandomCommits(seed)
    seen: Counter[str] = Counter()
    for _ in range(60):
        whole = in_shards(commits.next())
        parts = SHARDS.split(whole)
        for name, shard_of in (*{name: _by_id(of) for name, of in BY_ID.items()}.items(), *BY_HASH.items()):
            rows = getattr(whole, name)
            seen[name] += len(rows)
            for shard in range(SHARDS.count):
                mine = [row for row in rows if shard_of(row) == shard]
                assert (getattr(parts[shard], name) if shard in parts else []) == mine, name
        for shard, part in parts.items():
            wanted = {entry[2] for entry in part.entries}
            assert {message.id for message in part.messages} == wanted
            assert len(part.messages) == len(wanted)
            assert part.has_changes()
    assert not [name for name in (*BY_ID, *BY_HASH) if not seen[name]], "the model never makes such rows"


def _by_id(id_of: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda row: shard_of_id(id_of(row))


def test_reads_go_to_the_shard_of_their_session() -> None:
    whole = WriteSet()
    whole.pages = [PageRequest(first_id(4) + 1, 0, 10, True), PageRequest(first_id(2) + 1, 0, 10, True)]
    query: Any = Query(10, first_id(4) + 1, 0, 0)
    whole.queries = [query]
    parts = SHARDS.split(whole)
    assert {shard: (part.pages, part.queries) for shard, part in parts.items()} == {
        4: ([whole.pages[0]], [query]),
        2: ([whole.pages[1]], []),
    }


def test_a_message_for_several_shards_is_in_each_once() -> None:
    whole = WriteSet()
    message = Message("a", b"1", 1, False, b"", "p", 1, 0)
    message.id = 7
    whole.messages = [message]
    entry = (7, 1, 1, 0, b"", 0, 0, 2, 0)
    ids = [first_id(0) + 1, first_id(3) + 1, first_id(0) + 2]
    whole.entries = [(row_id, number, *entry) for number, row_id in enumerate(ids)]
    parts = SHARDS.split(whole)
    assert {shard: part.messages for shard, part in parts.items()} == {0: [message], 3: [message]}
    assert [len(parts[shard].entries) for shard in (0, 3)] == [2, 1]


def test_an_entry_without_its_message_is_a_defect() -> None:
    whole = WriteSet()
    whole.entries = [(first_id(1) + 1, 1, 7, 1, 1, 0, b"", 0, 0, 2, 0)]
    with pytest.raises(AssertionError, match="message 7 is not in the commit of its entries"):
        SHARDS.split(whole)


def test_a_write_set_that_follows_a_failure_proves_it_in_every_part() -> None:
    whole = WriteSet()
    whole.after_failure = True
    whole.deleted_sessions = [first_id(1) + 1, first_id(2) + 1]
    assert {shard: part.after_failure for shard, part in SHARDS.split(whole).items()} == {1: True, 2: True}


def test_ids_of_the_last_shard_with_a_packet_id_fit_into_63_bits() -> None:
    last = first_id(MAX_SHARDS) - 1
    assert shard_of_id(last) == MAX_SHARDS - 1
    key = received_key(last, 65535)
    assert key < 1 << 63 and received_row(key) == (last, 65535)


def test_client_ids_spread_over_all_shards() -> None:
    counts = Counter(SHARDS.of_text(f"sensor-{number}") for number in range(5000))
    assert set(counts) == set(range(5)) and max(counts.values()) < 2 * min(counts.values())
    with pytest.raises(ValueError, match="0 shards"):
        Shards(0)
