"""Bodies of records: changes, marks and published messages come back as they were."""

from __future__ import annotations

import pytest

from mqttbroker.cluster.log.body import changes_of, encode_body, published_of
from mqttbroker.core.delivery.publisher import BUS
from sessions.message import Message
from sessions.row_kinds import MARKS, SUBSCRIPTIONS
from sessions.rows import MarkRow, SubscriptionRow
from sessions.write_set import WriteSet, message_rows

MARK = MarkRow(3, 12, 1, 4, b"owner--1", 7, False)
PROPERTIES = b"\x26\x00\x01k\x00\x01v"


def test_changes_marks_and_published_messages_come_back() -> None:
    first = Message("a/b", b"\x00\xff", 2, False, PROPERTIES, "device", 1_700_000_000_000_000, 0)
    retained = Message("t/ü", b"", 0, True, b"", "", 5, 6)
    shared = Message("a/b", b"s", 1, False, b"", "device", 5, 0)
    whole = WriteSet()
    whole.saved(SUBSCRIPTIONS)[:] = [SubscriptionRow(1, "a/#", 1, 0, 0)]
    whole.saved(MARKS)[:] = [MARK]
    whole.stream_messages = {(BUS, 0): [first, retained], ("$share/g/a/#", 2): [shared]}
    body = encode_body(whole)
    assert whole.stream_messages and whole.saved(MARKS) == [MARK]

    changes, marks = changes_of(body)
    assert changes is not None and changes.saved(SUBSCRIPTIONS) == whole.saved(SUBSCRIPTIONS) and marks == [MARK]
    published = published_of(body)
    assert published.marks == [MARK]
    assert [(one.name, one.partition, one.topics, one.retained) for one in published.sections] == [
        (BUS, 0, [b"a/b", "t/ü".encode()], [1]),
        ("$share/g/a/#", 2, [b"a/b"], []),
    ]
    first_of, second_of = published.sections
    assert message_rows([first_of.message(1), first_of.message(0), second_of.message(0)]) == message_rows([retained, first, shared])


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
