"""Bodies of records: changes, marks and published messages come back as they were."""

from __future__ import annotations

import pytest

from mqttbroker.cluster.log.body import changes_of, encode_body, published_of
from sessions.message import Message
from sessions.row_kinds import MARKS, SUBSCRIPTIONS
from sessions.rows import MarkRow, SubscriptionRow
from sessions.write_set import TO_ALL, TO_MEMBER, TO_STREAM, BusMessages, WriteSet, message_rows

MARK = MarkRow(3, 12, 1, 4, b"owner--1", 7, False)
PROPERTIES = b"\x26\x00\x01k\x00\x01v"


def test_changes_marks_and_published_messages_come_back() -> None:
    first = Message("a/b", b"\x00\xff", 2, False, PROPERTIES, "device", 1_700_000_000_000_000, 0)
    retained = Message("t/ü", b"", 0, True, b"", "", 5, 6)
    shared = Message("a/b", b"s", 1, False, b"", "device", 5, 0)
    whole = WriteSet()
    whole.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(1, "a/#", 1, 0, 0)]
    whole.saved(MARKS)[:] = [MARK]
    whole.stream_messages = {("s", 1): [first]}
    whole.bus = BusMessages()
    whole.bus.to_all = [first, retained]
    whole.bus.to_members = {("$share/g/a/#", 2): [shared]}
    body = encode_body(whole)

    changes, marks = changes_of(body)
    assert changes is not None and changes.saved(SUBSCRIPTIONS) == whole.saved(SUBSCRIPTIONS) and marks == [MARK]
    published = published_of(body)
    assert published.marks == [MARK]
    assert [(one.destination, one.name, one.partition, one.topics, one.retained) for one in published.sections] == [
        (TO_MEMBER, "g/a/#", 2, [b"a/b"], []),
        (TO_STREAM, "s", 1, [b"a/b"], []),
        (TO_ALL, "", 0, [b"a/b", "t/ü".encode()], [1]),
    ]
    member, stream, every = published.sections
    found = [every.message(1), every.message(0), member.message(0), stream.message(0)]
    assert message_rows(found) == message_rows([retained, first, shared, first])


def test_a_body_without_changes_of_rows_has_none() -> None:
    whole = WriteSet()
    whole.saved(MARKS)[:] = [MARK]
    assert changes_of(encode_body(whole)) == (None, [MARK])


def test_bytes_that_are_no_body_are_refused() -> None:
    for body in (b"\xc1", b"", b"\x93\xc4\x00\x90\x01"):
        with pytest.raises(ValueError, match="not a write set"):
            published_of(body)
    with pytest.raises(ValueError, match="not a write set"):
        changes_of(b"\x93\xc4\x01")
