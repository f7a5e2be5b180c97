"""The ownership of a shard, step by step; random steps are in test_ownership_model.py."""

from __future__ import annotations

import pytest

from mqttbroker.cluster.log.records import CHANGES, NO_EPOCH, RELEASE, TAKEOVER, Header
from mqttbroker.cluster.log.view import LATE_TAKEOVER, OLDER_EPOCH, VALID, LogView
from mqttbroker.cluster.shard.ownership import Do, Ownership, State

pytestmark = pytest.mark.one_build

CLUSTER, A, B = b"cluster1", b"node-aaa", b"node-bbb"


def done(ownership: Ownership) -> list[Do]:
    return [action.do for action in ownership.take_actions()]


def takeover_of(ownership: Ownership) -> Header:
    """The takeover that the ownership wants to append."""
    (action,) = ownership.take_actions()
    assert action.do is Do.APPEND and action.header is not None and action.header.kind == TAKEOVER
    return action.header


def owner() -> Ownership:
    """Node A, which owns the shard since offset 0, at the time 10."""
    ownership = Ownership(LogView(3, CLUSTER), A, 2.0)
    ownership.assign(True, 10.0)
    assert done(ownership) == [Do.READ_TO_END]
    ownership.read_to(0, 10.0)
    ownership.appended(0, takeover_of(ownership), 10.0)
    assert (ownership.state, done(ownership)) == (State.LOADING, [Do.LOAD])
    ownership.loaded()
    assert (ownership.state, done(ownership)) == (State.OWNER, [Do.SERVE])
    return ownership


def takeover(node: bytes, ends: int) -> Header:
    return Header(TAKEOVER, 3, CLUSTER, node, ends, 0)


def test_a_record_at_the_expected_offset_is_committed_at_once() -> None:
    ownership = owner()
    for offset in (1, 2):
        header = ownership.append(10.5)
        assert header == Header(CHANGES, 3, CLUSTER, A, 0, offset)
        ownership.appended(offset, header, 10.6)
        assert done(ownership) == [Do.COMMITTED]


def test_a_record_behind_another_takeover_is_not_acknowledged() -> None:
    ownership = owner()
    header = ownership.append(10.5)
    ownership.appended(2, header, 10.6)
    assert (ownership.state, done(ownership)) == (State.CHECKING, [Do.PAUSE, Do.READ_TO_END])
    assert ownership.record(1, takeover(B, 0)) == VALID
    assert (ownership.state, done(ownership)) == (State.FENCED, [Do.DROP])
    assert ownership.record(2, header) == OLDER_EPOCH
    assert done(ownership) == []
    ownership.dropped()
    assert ownership.state is State.FOLLOWER


def test_a_record_behind_a_void_one_is_committed() -> None:
    ownership = owner()
    header = ownership.append(10.5)
    ownership.appended(2, header, 10.6)
    assert done(ownership) == [Do.PAUSE, Do.READ_TO_END]
    assert ownership.record(1, takeover(B, NO_EPOCH)) == LATE_TAKEOVER
    assert ownership.record(2, header) == VALID
    ownership.read_to(3, 10.7)
    assert (ownership.state, done(ownership)) == (State.OWNER, [Do.COMMITTED, Do.SERVE])


def test_a_lost_record_is_refused_behind_a_takeover_of_itself() -> None:
    ownership = owner()
    header = ownership.append(10.5)
    ownership.append_unknown(header)
    assert (ownership.state, done(ownership)) == (State.CHECKING, [Do.PAUSE, Do.READ_TO_END])
    ownership.read_to(1, 10.6)
    again = takeover_of(ownership)
    assert again.epoch == 0
    ownership.appended(1, again, 10.7)
    assert (ownership.state, done(ownership)) == (State.OWNER, [Do.REFUSED, Do.SERVE])
    assert ownership.record(2, header) == OLDER_EPOCH, "it arrives late"
    following = ownership.append(10.8)
    assert (following.epoch, following.sequence) == (1, 1)


def test_a_record_that_arrives_before_that_takeover_is_committed() -> None:
    ownership = owner()
    header = ownership.append(10.5)
    ownership.append_unknown(header)
    done(ownership)
    ownership.read_to(1, 10.6)
    again = takeover_of(ownership)
    ownership.appended(2, again, 10.7)
    assert done(ownership) == [Do.READ_TO_END]
    assert ownership.record(1, header) == VALID
    assert ownership.record(2, again) == VALID
    assert (ownership.state, done(ownership)) == (State.OWNER, [Do.COMMITTED, Do.SERVE])


def test_an_owner_that_was_stopped_reads_before_it_serves() -> None:
    ownership = owner()
    ownership.time(11.9)
    assert done(ownership) == []
    ownership.time(12.1)
    assert (ownership.state, done(ownership)) == (State.CHECKING, [Do.PAUSE, Do.READ_TO_END])
    ownership.read_to(1, 12.1)
    assert (ownership.state, done(ownership)) == (State.OWNER, [Do.SERVE])


def test_a_look_at_the_end_renews_the_lease_or_finds_another_record() -> None:
    ownership = owner()
    ownership.end_is(1, 11.5)
    ownership.time(13.0)
    assert done(ownership) == []
    ownership.end_is(2, 13.0)
    assert (ownership.state, done(ownership)) == (State.CHECKING, [Do.PAUSE, Do.READ_TO_END])


def test_an_owner_releases_the_shard_behind_its_last_record() -> None:
    ownership = owner()
    header = ownership.append(10.5)
    ownership.assign(False, 10.5)
    assert (ownership.state, done(ownership)) == (State.STEPPING_DOWN, [Do.PAUSE])
    ownership.appended(1, header, 10.6)
    committed, release = ownership.take_actions()
    assert committed.do is Do.COMMITTED
    assert release.header == Header(RELEASE, 3, CLUSTER, A, 0, 2)
    ownership.appended(2, release.header, 10.7)
    assert (ownership.state, done(ownership)) == (State.FENCED, [Do.DROP])
    assert not ownership.view.is_owned


def test_a_living_owner_gets_time_to_release_the_shard() -> None:
    ownership = Ownership(LogView(3, CLUSTER), B, 2.0)
    assert ownership.record(0, takeover(A, NO_EPOCH)) == VALID
    ownership.assign(True, 10.0, 3.0)
    ownership.assign(True, 12.9, 3.0)
    assert done(ownership) == []
    ownership.time(13.0)
    assert done(ownership) == [Do.READ_TO_END]
    ownership.read_to(1, 13.0)
    assert takeover_of(ownership).epoch == 0


def test_a_takeover_that_another_node_was_faster_with_is_given_up() -> None:
    ownership = Ownership(LogView(3, CLUSTER), B, 2.0)
    ownership.assign(True, 10.0)
    done(ownership)
    ownership.read_to(0, 10.0)
    mine = takeover_of(ownership)
    ownership.appended(1, mine, 10.1)
    assert done(ownership) == [Do.READ_TO_END]
    assert ownership.record(0, takeover(A, NO_EPOCH)) == VALID
    assert ownership.record(1, mine) == LATE_TAKEOVER
    assert ownership.state is State.FOLLOWER


def test_a_log_that_lost_records_ends_the_ownership() -> None:
    ownership = owner()
    ownership.appended(1, ownership.append(10.5), 10.6)
    done(ownership)
    ownership.appended(1, ownership.append(10.7), 10.8)
    (action,) = ownership.take_actions()
    assert (ownership.state, action.do) == (State.FENCED, Do.DROP)
    assert action.reason == "a record was appended at offset 1, before the end 2 of the log"
