"""Which records of a log are valid."""

from __future__ import annotations

import pytest

from mqttbroker.cluster.log.records import CHANGES, NO_EPOCH, RELEASE, TAKEOVER, BadRecord, Header
from mqttbroker.cluster.log.view import (
    LATE_TAKEOVER,
    OLDER_EPOCH,
    OUT_OF_SEQUENCE,
    REPEATED,
    VALID,
    LogView,
)

pytestmark = pytest.mark.one_build

CLUSTER, A, B = b"cluster1", b"node-aaa", b"node-bbb"


def takeover(owner: bytes, ends: int) -> Header:
    return Header(TAKEOVER, 3, CLUSTER, owner, ends, 0)


def changes(owner: bytes, epoch: int, sequence: int, kind: int = CHANGES) -> Header:
    return Header(kind, 3, CLUSTER, owner, epoch, sequence)


def verdicts(*headers: Header) -> list[int]:
    view = LogView(3, CLUSTER)
    return [view.read(offset, header) for offset, header in enumerate(headers)]


def test_records_of_the_owner_are_valid_in_their_sequence() -> None:
    assert verdicts(takeover(A, NO_EPOCH), changes(A, 0, 1), changes(A, 0, 2)) == [VALID] * 3


def test_records_of_a_deposed_owner_are_void() -> None:
    log = [takeover(A, NO_EPOCH), changes(A, 0, 1), takeover(B, 0), changes(A, 0, 2), changes(B, 2, 1)]
    assert verdicts(*log) == [VALID, VALID, VALID, OLDER_EPOCH, VALID]


def test_of_two_takeovers_the_first_counts() -> None:
    log = [takeover(A, NO_EPOCH), takeover(B, NO_EPOCH), changes(B, 1, 1), changes(A, 0, 1)]
    assert verdicts(*log) == [VALID, LATE_TAKEOVER, OLDER_EPOCH, VALID]


def test_a_late_takeover_deposes_nobody() -> None:
    log = [takeover(A, NO_EPOCH), takeover(A, 0), takeover(B, 0), changes(A, 1, 1)]
    assert verdicts(*log) == [VALID, VALID, LATE_TAKEOVER, VALID]


def test_a_record_that_was_appended_twice_counts_once() -> None:
    log = [takeover(A, NO_EPOCH), changes(A, 0, 1), changes(A, 0, 1), changes(A, 0, 2), changes(A, 0, 1)]
    assert verdicts(*log) == [VALID, VALID, REPEATED, VALID, REPEATED]


def test_a_record_behind_a_missing_one_is_void() -> None:
    assert verdicts(takeover(A, NO_EPOCH), changes(A, 0, 2), changes(A, 0, 1)) == [VALID, OUT_OF_SEQUENCE, VALID]


def test_nothing_is_valid_between_a_release_and_the_next_takeover() -> None:
    view = LogView(3, CLUSTER)
    for offset, header in enumerate([takeover(A, NO_EPOCH), changes(A, 0, 1, RELEASE)]):
        assert view.read(offset, header) == VALID
    assert not view.is_owned
    assert view.read(2, changes(A, 0, 2)) == OLDER_EPOCH
    assert view.read(3, takeover(B, 0)) == VALID
    assert (view.is_owned, view.owner, view.epoch, view.sequence, view.end) == (True, B, 3, 0, 4)


def test_offsets_may_be_left_out_but_not_repeated() -> None:
    view = LogView(3, CLUSTER)
    view.read(5, takeover(A, NO_EPOCH))
    assert (view.epoch, view.end) == (5, 6)
    with pytest.raises(ValueError, match="read before"):
        view.read(5, changes(A, 5, 1))


def test_foreign_records_are_noticed_and_not_read() -> None:
    view = LogView(3, CLUSTER)
    with pytest.raises(BadRecord, match="shard 4 in the log of shard 3"):
        view.read(0, takeover(A, NO_EPOCH)._replace(shard=4))
    with pytest.raises(BadRecord, match="another cluster"):
        view.read(0, takeover(A, NO_EPOCH)._replace(cluster=b"cluster2"))
    assert view.end == 0
