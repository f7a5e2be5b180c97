"""sessions.readers.assignment: partitions are divided evenly, move rarely, and never belong to two members."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sessions.readers.assignment import Assignment, AssignmentEvents, GroupMember


class Recorder(AssignmentEvents):
    """What each member has in flight, as the deliveries of a group would have it."""

    def __init__(self) -> None:
        self.assignment: Assignment | None = None
        self.reads: dict[int, GroupMember] = {}  # the member that is sent a partition
        self.in_flight: dict[int, GroupMember] = {}

    def begin(self, partition: int, member: GroupMember) -> None:
        assert self.in_flight.get(partition, member) is member
        self.reads[partition] = member

    def pause(self, partition: int, member: GroupMember) -> None:
        assert self.reads.pop(partition, member) is member
        if partition not in self.in_flight:
            assert self.assignment is not None
            self.assignment.drained(partition)

    def give_back(self, partition: int) -> None:
        self.reads.pop(partition, None)
        self.in_flight.pop(partition, None)


class AssignmentModel(RuleBasedStateMachine):
    """Members that come, go, and acknowledge late."""

    @initialize(partitions=st.integers(1, 12))
    def begin(self, partitions: int) -> None:
        self.events = Recorder()
        self.assignment = Assignment(partitions, self.events)
        self.events.assignment = self.assignment

    @precondition(lambda self: len(self.assignment.members) < 15)
    @rule()
    def join(self) -> None:
        before = list(self.assignment.targets)
        self.assignment.join(GroupMember())
        members = len(self.assignment.members)
        moved = sum(old is not None and old is not new for old, new in zip(before, self.assignment.targets))
        assert moved <= -(-len(before) // members)

    @precondition(lambda self: self.assignment.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        leaver = data.draw(st.sampled_from(self.assignment.members))
        before = list(self.assignment.targets)
        self.assignment.leave(leaver)
        for old, new in zip(before, self.assignment.targets):
            assert old is leaver or old is new

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        if self.events.reads:
            partition = data.draw(st.sampled_from(sorted(self.events.reads)))
            self.events.in_flight[partition] = self.events.reads[partition]

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        if self.events.in_flight:
            partition = data.draw(st.sampled_from(sorted(self.events.in_flight)))
            del self.events.in_flight[partition]
            self.assignment.drained(partition)

    @invariant()
    def every_partition_is_read_or_drains(self) -> None:
        if not hasattr(self, "assignment"):
            return
        assignment = self.assignment
        if not assignment.members:
            assert not self.events.reads and set(assignment.owners) == {None}
            return
        counts = [assignment.targets.count(member) for member in assignment.members]
        assert sum(counts) == len(assignment.targets) and max(counts) - min(counts) <= 1
        for partition, owner in enumerate(assignment.owners):
            assert owner is not None and partition in owner.partitions
            if assignment.is_paused(partition):
                assert self.events.in_flight[partition] is owner and partition not in self.events.reads
            else:
                assert self.events.reads[partition] is owner
        for member in assignment.members:
            assert member.partitions == [p for p, owner in enumerate(assignment.owners) if owner is member]


AssignmentModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAssignmentModel = AssignmentModel.TestCase


@given(st.integers(1, 20), st.integers(1, 20))
def test_members_that_join_one_after_the_other_get_equal_shares(partitions: int, members: int) -> None:
    events = Recorder()
    assignment = events.assignment = Assignment(partitions, events)
    for _ in range(members):
        assignment.join(GroupMember())
    counts = sorted(len(member.partitions) for member in assignment.members)
    assert sum(counts) == partitions and counts[-1] - counts[0] <= 1


def test_a_member_that_comes_back_while_its_partition_drains_keeps_it() -> None:
    events = Recorder()
    assignment = events.assignment = Assignment(2, events)
    first, second = GroupMember(), GroupMember()
    assignment.join(first)
    events.in_flight = {0: first, 1: first}
    assignment.join(second)
    assert assignment.owners == [first, first] and len(events.reads) == 1
    assignment.leave(second)
    assert events.reads == {0: first, 1: first} and events.in_flight == {0: first, 1: first}
