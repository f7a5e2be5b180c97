"""Groups and queues of streams for operators: their offsets and members, and the reset of groups.

Their names are those of subscriptions, ``$share/<group>`` and ``$queue/<name>``, so no other consumer of a stream has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final, NamedTuple

from mqttbroker.admin.control.runner import ControlRunner
from mqttbroker.admin.control.slices import ControlError
from mqttbroker.core.broker import Broker
from mqttbroker.core.streams.filter import EARLIEST, LATEST, TIME, Start, parse_from, parse_offset
from sessions.readers.stored_readers import StoredReader
from sessions.rows import GROUP_READER, QUEUE_READER

GROUP_PREFIX: Final = "$share/"
_TIMEOUT: Final = 10.0  # seconds that a thread waits for the event loop


class GroupMember(NamedTuple):
    """A member of a group, and the partitions that it owns."""

    client_id: str
    partitions: list[int]


class GroupStatus(NamedTuple):
    """A group or queue in a stream. ``topic_filter`` is "" for all topics; offsets are the lowest without PUBACK."""

    name: str
    topic_filter: str
    offsets: dict[int, int]
    in_flight: int
    redelivered: int
    refused: int
    members: list[GroupMember]


class GroupControl:
    """The groups and queues of a broker. The methods are for the event loop's thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def all(self) -> dict[str, list[GroupStatus]]:
        """The groups and queues of each stream, sorted by name."""
        found: dict[str, list[GroupStatus]] = {}
        for stored in self._broker.stored_readers.by_id.values():
            if stored.row.kind == GROUP_READER:
                found.setdefault(stored.row.stream, []).append(self._group_status(stored))
            elif stored.row.kind == QUEUE_READER and stored.row.name in self._broker.work_queues.all:
                found.setdefault(stored.row.stream, []).append(self._queue_status(stored))
        for statuses in found.values():
            statuses.sort()
        return found

    def _group_status(self, stored: StoredReader) -> GroupStatus:
        group = self._broker.stream_groups.all.get(stored.row.reader_id)
        members = (
            [] if group is None else [GroupMember(session.client_id, list(member.partitions)) for session, member in group.members.items()]
        )
        return GroupStatus(
            GROUP_PREFIX + stored.row.name,
            stored.row.topic_filter,
            {offsets.partition: offsets.committed for offsets in stored.partitions},
            sum(offsets.in_flight for offsets in stored.partitions),
            0 if group is None else group.redelivered,
            0 if group is None else group.refusals,
            members,
        )

    def _queue_status(self, stored: StoredReader) -> GroupStatus:
        queue = self._broker.work_queues.all[stored.row.name]
        return GroupStatus(
            queue.full_name,
            stored.row.topic_filter,
            {offsets.partition: offsets.committed for offsets in stored.partitions},
            queue.in_flight,
            queue.redeliveries,
            0,
            [GroupMember(session.client_id, []) for session in queue.consumers],
        )

    def bounds(self, stream: str, partitions: int) -> list[tuple[int, int]]:
        """The first offset and the end of each partition."""
        return [self._broker.chunk_reads.bounds(stream, partition) for partition in range(partitions)]

    def reset(self, stream: str, name: str, positions: Sequence[int]) -> bool:
        """Have a group continue at these offsets, one of each partition; false if there is none."""
        group = self._broker.stream_groups.find(name.removeprefix(GROUP_PREFIX), stream)
        if group is None or len(group.stored.partitions) != len(positions):
            return False
        group.reset(list(positions))
        return True

    def forget(self, stream: str, name: str) -> bool:
        """Delete a group and its offsets; false if there is none. Its members are sent no more."""
        group = self._broker.stream_groups.find(name.removeprefix(GROUP_PREFIX), stream)
        if group is None:
            return False
        self._broker.stream_groups.delete(group)
        return True


class GroupsReport:
    """`GroupControl.all` for other threads than the event loop's."""

    def __init__(self, runner: ControlRunner, control: GroupControl) -> None:
        self._runner = runner
        self._control = control

    def __call__(self) -> dict[str, list[GroupStatus]]:
        """Empty while the broker stops."""
        try:
            return self._runner.call(self._control.all).result(_TIMEOUT)
        except (ControlError, FutureTimeout, CancelledError):
            return {}


def parse_reset(text: str, now: int) -> Start:
    """Where a reset goes: ``earliest``, ``latest``, ``offset:P=N,…``, or a time as in a replay. ``now`` is in µs since
    the epoch. Raises ValueError with the reason."""
    return parse_offset(text) if text.startswith("offset:") else parse_from(text, now)


def position(start: Start, partition: int, bounds: tuple[int, int]) -> int | None:
    """The offset in a partition with these bounds; None for a time, or if the partition is not named."""
    if start.kind == TIME:
        return None
    if start.kind in (EARLIEST, LATEST):
        return bounds[0] if start.kind == EARLIEST else bounds[1]
    wanted = start.offsets.get(partition, start.offsets.get(-1))
    return None if wanted is None else min(max(wanted, bounds[0]), bounds[1])
