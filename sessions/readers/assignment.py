"""The partitions of a stream, divided among the members of a group.

Each partition has one owner at a time. When members join or leave, as few partitions as possible move, and each moves
only after its owner has nothing of it in flight: so messages of one partition are never with two members.
"""

from __future__ import annotations

from abc import abstractmethod

from mypy_extensions import mypyc_attr


class GroupMember:
    """A member of a group, which is sent the messages of its partitions."""

    def __init__(self) -> None:
        self.partitions: list[int] = []  # those that it owns, ascending


@mypyc_attr(allow_interpreted_subclasses=True)
class AssignmentEvents:
    """What the group does when an assignment changes."""

    @abstractmethod
    def begin(self, partition: int, member: GroupMember) -> None:
        """The member owns the partition and is to be sent its messages."""

    @abstractmethod
    def pause(self, partition: int, member: GroupMember) -> None:
        """The owner is to be sent no more messages of the partition; `Assignment.drained` is called when it has none in
        flight, at once if it has none."""

    @abstractmethod
    def give_back(self, partition: int) -> None:
        """The owner has left: it acknowledges nothing any more."""


class Assignment:
    """Who owns which of ``partitions`` partitions.

    ``owners`` has the member that is sent a partition, or that still has messages of it in flight; ``targets`` the one
    that is to own it. They differ while a partition moves.
    """

    def __init__(self, partitions: int, events: AssignmentEvents) -> None:
        self.members: list[GroupMember] = []
        self.owners: list[GroupMember | None] = [None] * partitions
        self.targets: list[GroupMember | None] = [None] * partitions
        self.generation = 0  # number of changes of the members
        self._events = events

    def is_paused(self, partition: int) -> bool:
        """Whether the owner is to be sent no more, because the partition moves."""
        return self.owners[partition] is not self.targets[partition]

    def join(self, member: GroupMember) -> None:
        """Add a member, the last in the order of joining."""
        self.members.append(member)
        self._divide()

    def leave(self, member: GroupMember) -> None:
        """Remove a member; what it has in flight goes back to its partitions."""
        self.members.remove(member)
        for partition in member.partitions:
            self.owners[partition] = None
            self._events.give_back(partition)
        member.partitions = []
        for partition, target in enumerate(self.targets):
            if target is member:
                self.targets[partition] = None
        self._divide()

    def drained(self, partition: int) -> None:
        """The owner of a partition has nothing of it in flight: a partition that is paused moves."""
        owner = self.owners[partition]
        if owner is not None and self.is_paused(partition):
            owner.partitions.remove(partition)
            self.owners[partition] = None
            self._begin(partition)

    def _divide(self) -> None:
        """Give each member the same number of partitions, or one more, with few moves."""
        self.generation += 1
        members = self.members
        if not members:
            return
        targets = self.targets
        held: dict[GroupMember, list[int]] = {member: [] for member in members}
        unassigned: list[int] = []
        for partition, target in enumerate(targets):
            if target is None:
                # A partition that its owner still has needs no move if the owner keeps it.
                unassigned.append(partition)
            else:
                held[target].append(partition)
        least: int = len(targets) // len(members)
        larger: int = len(targets) % len(members)  # members with one more
        # Members with the most partitions keep one more; of equal ones, the members that joined first.
        for member in sorted(members, key=lambda each: -len(held[each])):
            most = least + 1 if larger > 0 else least
            if larger > 0:
                larger -= 1
            own = held[member]
            # First those go that the member does not own yet, then the last ones.
            own.sort(key=lambda partition: (self.owners[partition] is not member, partition))
            unassigned += own[most:]
            del own[most:]
        unassigned.sort()
        for partition in unassigned:
            # A member with room that owns the partition still, else the first of those with the fewest.
            owner = self.owners[partition]
            fewest = min(members, key=lambda each: len(held[each]))
            chosen = fewest
            if owner is not None and owner in held and len(held[owner]) <= len(held[fewest]):
                chosen = owner
            held[chosen].append(partition)
            targets[partition] = chosen
        for partition, target in enumerate(targets):
            owner = self.owners[partition]
            if owner is None:
                self._begin(partition)
            elif owner is not target:
                self._events.pause(partition, owner)
            else:
                self._events.begin(partition, owner)

    def _begin(self, partition: int) -> None:
        target = self.targets[partition]
        if target is None:
            return
        self.owners[partition] = target
        target.partitions.append(partition)
        target.partitions.sort()
        self._events.begin(partition, target)
