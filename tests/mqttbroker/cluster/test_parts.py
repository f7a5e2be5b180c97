"""Bodies in several records: they have effect with their last part, for the owner, and for readers of the log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.kafka import KafkaCluster
from support.kafka_writer import CLUSTER, opened
from support.shard_owner import owner_id

from mqttbroker.cluster.bus.feed import FeedBatches
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import CHANGES, CONTINUED, MORE, TAKEOVER, Header, encode_record
from mqttbroker.cluster.log.view import OLDER_EPOCH, REPEATED, VALID, LogView
from mqttbroker.cluster.shard.store import Sizes
from sessions.message import Message
from sessions.row_kinds import RETAINED
from sessions.rows import MarkRow
from sessions.write_set import BusMessages, WriteSet

FIRST, SECOND = owner_id("first"), owner_id("second")


def changes(epoch: int, sequence: int, flags: int = 0, owner: bytes = FIRST) -> Header:
    return Header(CHANGES, 0, CLUSTER, owner, epoch, sequence, flags)


def takeover(epoch: int, owner: bytes) -> Header:
    return Header(TAKEOVER, 0, CLUSTER, owner, epoch, 0)


def bodies(records: list[tuple[Header, bytes]], verdicts: list[int]) -> list[tuple[int, bytes]]:
    """The offsets of the states in which the view can be stored, with the bodies that end there."""
    view, found = LogView(0, CLUSTER), []
    for offset, (header, part) in enumerate(records):
        assert view.read(offset, header) == verdicts[offset], offset
        body = view.with_part(header, part) if verdicts[offset] == VALID and header.kind == CHANGES else None
        found.append((view.state.end, body if body is not None else b""))
    return found


def test_a_body_is_there_with_its_last_part_and_the_state_before_it_until_then() -> None:
    records = [
        (takeover(-1, FIRST), b""),
        (changes(0, 1, MORE), b"a"),
        (changes(0, 2, MORE | CONTINUED), b"b"),
        (changes(0, 2, MORE | CONTINUED), b"b"),
        (changes(0, 3, CONTINUED), b"c"),
        (changes(0, 4), b"d"),
    ]
    verdicts = [VALID, VALID, VALID, REPEATED, VALID, VALID]
    assert bodies(records, verdicts) == [(1, b""), (1, b""), (1, b""), (1, b""), (5, b"abc"), (6, b"d")]


def test_parts_without_the_last_one_have_no_effect() -> None:
    records = [
        (takeover(-1, FIRST), b""),
        (changes(0, 1, MORE), b"lost"),
        (takeover(0, SECOND), b""),
        (changes(0, 2, CONTINUED), b"late"),
        (changes(2, 1, MORE, SECOND), b"refused"),
        (changes(2, 2, 0, SECOND), b"other"),
    ]
    verdicts = [VALID, VALID, VALID, OLDER_EPOCH, VALID, VALID]
    assert bodies(records, verdicts) == [(1, b""), (1, b""), (3, b""), (4, b""), (4, b""), (6, b"other")]


def test_a_reader_goes_on_in_front_of_a_body_in_parts() -> None:
    write_set = WriteSet()
    write_set.bus = BusMessages()
    write_set.bus.to_all = [Message("a", b"payload", 1, False, b"", "", 0, 0)]
    body = encode_body(write_set)
    mark = MarkRow(1, 0, 0, -1, b"", 0, False)
    headers = takeover(-1, FIRST), changes(0, 1, MORE), changes(0, 2, CONTINUED)
    log = [encode_record(header._replace(shard=1), part) for header, part in zip(headers, (b"", body[:5], body[5:]))]
    whole = FeedBatches(0, mark, CLUSTER)
    assert whole.read(0, log[0]) is None
    passed = whole.pass_on()
    assert passed is not None and passed.after.offset == 1
    assert whole.read(1, log[1]) is None and whole.pass_on() is None
    found = whole.read(2, log[2])
    assert found is not None and (found.before.offset, found.after.offset) == (1, 3)
    assert [section.message(0).payload for section in found.sections] == [b"payload"]
    again = FeedBatches(0, found.before, CLUSTER)
    assert again.read(1, log[1]) is None
    repeated = again.read(2, log[2])
    assert repeated is not None and (repeated.before, repeated.after) == (found.before, found.after)


@pytest.mark.slow("starts Kafka")
def test_a_store_commits_and_recovers_what_no_record_can_hold(kafka: KafkaCluster, tmp_path: Path) -> None:
    asyncio.run(kafka.create_topic("parts"))

    def lost(reason: str) -> None:
        raise AssertionError(reason)

    payload = bytes(range(256)) * 2000
    for start, directory in enumerate(("first", "second")):
        store = opened(kafka.bootstrap, "parts", tmp_path / directory, f"node-{start}", lost)
        store._sizes = Sizes(10_000)
        retained = store.recover().rows(RETAINED)
        assert [row.payload for row in retained] == [payload] * start
        if not start:
            done: list[object] = []
            store.start(lambda _, error: done.append(error), lambda *_: None)
            write_set = WriteSet()
            write_set.saved(RETAINED).append(Message("a", payload, 1, True, b"", "", 0, 0))
            store.submit(write_set)
        store.stop()
    assert done == [None]
