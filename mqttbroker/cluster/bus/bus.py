"""The bus: routes what the clients of other shards published to the sessions of this shard.

Each shard's log has the messages that its clients published. A shard reads the logs of all others, each in its order, and stores
the entries of its sessions with a mark that says how far the log was routed, in one record of its own log. After a takeover it goes
on at its marks, so no entry is stored twice, and none is left out. Its own messages are routed when they are published.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final
from zlib import crc32

from mypy_extensions import mypyc_attr

from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.delivery.turns import LongWork
from sessions.journal import IN_ANOTHER_LOG
from sessions.message import Message
from sessions.row_kinds import MARKS
from sessions.rows import MarkRow
from sessions.session import Session
from sessions.write_set import TO_ALL, TO_MEMBER

log = logging.getLogger("mqttbroker.cluster")

MARK_BYTES: Final = 4_194_304  # of a log, after which its mark is stored though nothing of it was
MESSAGE_WORK: Final = 6  # of one message that has a target, in units of `Router.work`, beside its route and its targets
PASSED_PER_WORK: Final = 8  # messages that have none
TARGETS_PER_WORK: Final = 4
DROPS_LOGGED: Final = 100  # messages without a member in a second; further ones are only counted

_UNLIMITED: Final = 1 << 60


def first_mark(number: int) -> MarkRow:
    """In front of a log's first record."""
    return MarkRow(number, 0, 0, -1, b"", 0, False)


class BusRecord:
    """The messages for this shard in a valid record of another shard's log, and the size of all before it that was void or empty.

    ``before`` and ``after`` are marks in front of the record and behind it. ``sections`` are those of `mqttbroker.cluster.log.body`,
    ``marks`` the ones that the record stores, ``size`` its bytes.
    """

    def __init__(self, before: MarkRow, after: MarkRow, sections: list[Any], marks: list[MarkRow], size: int) -> None:
        self.before = before
        self.after = after
        self.sections = sections
        self.marks = marks
        self.size = size


@mypyc_attr(allow_interpreted_subclasses=True)
class BusReceiver:
    """Receives the messages of other shards that are not for ordinary subscriptions."""

    @abstractmethod
    def retained(self, message: Message) -> bool:
        """A message with the RETAIN flag; whether its topic belongs to this shard. Then a mark behind it is stored in the batch that
        gathers now, also if there is nothing else to store: its publisher waits for it."""

    @abstractmethod
    def shared(self, group: str, message: Message) -> None:
        """A message that another shard chose this one for, of the shared subscription ``group`` (name/filter)."""

    @abstractmethod
    def marked(self, shard: int, end: int) -> None:
        """A record of another shard says that its bus has routed the log of this one up to the offset ``end``."""

    @abstractmethod
    def failed(self, reason: str) -> None:
        """The logs cannot be routed any more; messages are missing from now on."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LocalReceiver(BusReceiver):
    """Retains the messages, and hands those of a shared subscription to a member of this shard."""

    def __init__(self, broker: Broker, shard: int, shards: int) -> None:
        self._broker = broker
        self._shard = shard
        self._shards = shards
        self._second = -1.0  # of the monotonic clock, in which `_logged` lines were written
        self._logged = 0

    def retained(self, message: Message) -> bool:
        if crc32(message.topic.encode("utf-8")) % self._shards != self._shard:
            return False
        self._broker.retained.set(message, False, None)
        return True

    def shared(self, group: str, message: Message) -> None:
        if self._broker.publisher.give_to_group(group, message):
            return
        # A single broker, too, drops what a member that leaves has not acknowledged, if the group has no other member.
        outbound = self._broker.outbound
        outbound.counters.away.no_member += 1
        second = outbound.clock.monotonic // 1.0
        if second != self._second:
            self._second, self._logged = second, 0
        self._logged += 1
        if self._logged <= DROPS_LOGGED:
            log.warning("event=shared_message_dropped group=%s topic=%s", group, message.topic)

    def marked(self, shard: int, end: int) -> None:
        pass

    def failed(self, reason: str) -> None:
        log.error("event=bus_failed reason=%s", reason)


class _Log:
    """One shard's log: the records that are at hand, and how far they are routed."""

    def __init__(self, mark: MarkRow) -> None:
        self.mark = mark  # the messages before it are routed
        self.records: deque[BusRecord] = deque()
        self.stop = _UNLIMITED  # the record of this offset and all behind it are not routed yet
        self.unsaved = 0  # bytes of the records behind the mark that was saved last
        self.changed = False  # something was stored for a message behind that mark

    @property
    def ready(self) -> bool:
        return bool(self.records) and self.records[0].before.offset < self.stop

    @property
    def stopped(self) -> bool:
        return self.mark.offset >= self.stop

    def skip(self) -> None:
        """Move the mark over what was void or without messages."""
        if self.records and self.records[0].before.offset > self.mark.offset:
            self.mark = self.records[0].before


class Bus(LongWork):
    """Routes the logs ``logs`` of other shards from ``marks`` on to the sessions of ``broker``, which has shard ``shard`` of
    ``shards``.

    ``taken(log, size)`` is called when a record of so many bytes needs no memory any more.
    """

    def __init__(
        self,
        broker: Broker,
        shard: int,
        shards: int,
        marks: dict[int, MarkRow],
        receiver: BusReceiver,
        taken: Callable[[int, int], object],
    ) -> None:
        self.passed = 0  # messages that concerned nobody here
        self.routed = 0  # messages that had a target here
        self.on_stopped: Callable[[], object] | None = None  # called when all logs are routed up to their stops
        self._broker = broker
        self._shard = shard
        self._receiver = receiver
        self._taken = taken
        self._failed = False
        self._logs: dict[int, _Log] = {}
        for number in range(shards):
            if number != shard:
                self._logs[number] = _Log(marks.get(number, first_mark(number)))

    @property
    def marks(self) -> list[MarkRow]:
        """How far each log is routed."""
        return [each.mark for each in self._logs.values()]

    def position(self, number: int) -> int:
        """The offset up to which the log of another shard is routed."""
        return self._logs[number].mark.offset

    # -- records ----------------------------------------------------------------

    def feed(self, records: Iterable[BusRecord]) -> None:
        """Take the next records of any logs, those of one log in their order."""
        for record in records:
            number: int = record.before.log
            each = self._logs[number]
            for mark in record.marks:
                if mark.log == self._shard:
                    self._receiver.marked(number, mark.offset)
            if not record.sections and not each.records:
                self._pass(each, record)
            else:
                each.records.append(record)
                each.skip()
        self._save_changed()
        self._broker.turns.add(self)
        self._report_stop()

    @property
    def done(self) -> bool:
        if not self._failed:
            for each in self._logs.values():
                if each.ready:
                    return False
        return True

    def step(self, budget: int) -> int:
        try:
            cost = self._step(budget)
        except Exception as error:
            log.exception("event=defect in=bus")
            self._failed = True
            self._receiver.failed(f"a message of another shard cannot be routed: {error}")
            return 0
        self._save_changed()
        self._report_stop()
        return cost

    def _step(self, budget: int) -> int:
        broker = self._broker
        cost: int = 0
        ready: bool = True
        while ready and cost < budget:
            ready = False
            for each in self._logs.values():
                if not each.ready:
                    continue
                if broker.outbound.backlogged or not broker.publisher.fan_out.done:
                    break
                before: int = cost
                cost += self._route(each, budget - cost)
                ready = ready or cost > before
        return cost

    def _route(self, each: _Log, budget: int) -> int:
        """Route a part of a log's next record; returns the cost, 0 if it must wait."""
        record = each.records[0]
        routed: int = each.mark.routed if each.mark.offset == record.before.offset else 0
        first: int = 0  # index in the record of the section's first message
        cost: int = 0
        for section in record.sections:
            topics: list[bytes] = section.topics
            count: int = len(topics)
            if routed < first + count:
                index: int = routed - first
                destination: int = section.destination
                if destination == TO_ALL:
                    index, cost = self._route_section(each, section, index, budget)
                elif destination == TO_MEMBER and section.partition == self._shard:
                    index, cost = self._share_section(each, section, index, budget)
                else:
                    index = count
                routed = first + index
                if index < count:
                    self._move_inside(each, record.before, routed)
                    return cost
            first += count
        each.records.popleft()
        self._pass(each, record)
        return cost + 1

    def _route_section(self, each: _Log, section: Any, start: int, budget: int) -> tuple[int, int]:
        """Route messages of a section; returns the index of the next one, and the cost."""
        topics: list[bytes] = section.topics
        kept: list[int] = section.retained
        messages: Any = section.message
        router = self._broker.router
        count: int = len(topics)
        index: int = start
        cost: int = 0
        next_kept: int = 0  # index in `kept`
        while index < count and cost < budget:
            wanted: int = router.first_wanted(topics, index)
            while next_kept < len(kept) and kept[next_kept] < index:
                next_kept += 1
            if next_kept < len(kept) and kept[next_kept] < wanted:
                wanted = kept[next_kept]
            self.passed += wanted - index
            cost += (wanted - index) // PASSED_PER_WORK
            index = wanted
            if index == count:
                break
            retain: bool = next_kept < len(kept) and kept[next_kept] == index
            router.work = 0
            arrived: bool = self._route_message(each, topics[index], messages, index, retain)
            cost += router.work
            if not arrived:
                break
            index += 1
        return index, cost

    def _route_message(self, each: _Log, topic: bytes, messages: Any, index: int, retain: bool) -> bool:
        """Route one message; false if it has to wait for its route or for another message."""
        broker = self._broker
        publisher = broker.publisher
        journal = broker.journal
        router = broker.router
        try:
            route = router.route_in_parts(topic, self)
        except MQTTError:  # a limit of topics is lower here than where it was published
            broker.outbound.counters.away.not_authorized += 1
            return True
        if route is None or (route.large and not publisher.fan_out.done):
            return False
        if not route.has_targets and not retain:
            self.passed += 1
            return True
        message: Message = messages(index)
        router.work += MESSAGE_WORK + len(route.targets) // TARGETS_PER_WORK
        if message.qos and route.has_targets:
            self.routed += 1
            before: int = journal.next_seq
            publisher.distribute(Outgoing(topic, message, broker.outbound.clock.now), route, None, IN_ANOTHER_LOG)
            if route.large or journal.next_seq != before:
                each.changed = True
        if retain and self._receiver.retained(message):
            each.changed = True
        return True

    def _share_section(self, each: _Log, section: Any, start: int, budget: int) -> tuple[int, int]:
        """Hand messages of a section to members of its shared subscription."""
        group: str = section.name
        messages: Any = section.message
        count: int = len(section.topics)
        index: int = start
        cost: int = 0
        while index < count and cost < budget:
            message: Message = messages(index)
            self._receiver.shared(group, message)
            each.changed = True
            self.routed += 1
            cost += MESSAGE_WORK
            index += 1
        return index, cost

    # -- marks ------------------------------------------------------------------

    def _move_inside(self, each: _Log, before: MarkRow, routed: int) -> None:
        each.mark = MarkRow(before.log, before.offset, routed, before.epoch, before.owner, before.sequence, before.released)

    def _pass(self, each: _Log, record: BusRecord) -> None:
        """All of a record is routed."""
        each.mark = record.after
        each.skip()
        each.unsaved += record.size
        self._taken(record.before.log, record.size)

    def _save_changed(self) -> None:
        """Store the marks of logs with the entries that were made of their messages, in the same batch."""
        for each in self._logs.values():
            if each.changed or each.unsaved > MARK_BYTES:
                self._save(each)

    def _save(self, each: _Log) -> None:
        each.changed = False
        each.unsaved = 0
        self._broker.journal.save(MARKS, each.mark)

    def save_marks(self) -> None:
        """Store the marks of all logs in the batch that gathers."""
        for each in self._logs.values():
            self._save(each)

    # -- stops ------------------------------------------------------------------

    def stop_at(self, ends: dict[int, int]) -> None:
        """Route each log up to its end, which is an offset, and no further; then `on_stopped` is called."""
        for number, each in self._logs.items():
            each.stop = max(ends[number], each.mark.offset)
            if each.mark.routed:  # the record is routed in part
                each.stop = max(each.stop, each.mark.offset + 1)
        self._broker.turns.add(self)
        self._report_stop()

    def go_on(self) -> None:
        for each in self._logs.values():
            each.stop = _UNLIMITED
        self._broker.turns.add(self)

    @property
    def stopped(self) -> bool:
        """Whether all logs are routed up to their stops."""
        for each in self._logs.values():
            if not each.stopped:
                return False
        return True

    def _report_stop(self) -> None:
        if self.on_stopped is not None and self.stopped:
            self.on_stopped()


class _Waiting:
    """A SUBSCRIBE, or what waits only for the bus (without ``work``)."""

    def __init__(self, work: LongWork | None, persistent: bool, filters: list[str], done: Any) -> None:
        self.work = work
        self.persistent = persistent
        self.filters = filters
        self.done = done


class Barrier(LongWork):
    """Has SUBSCRIBEs wait until the other shards know their filters, and the bus has routed all that is older.

    So nothing that was acknowledged before a SUBSCRIBE reaches it, and everything that is published after its SUBACK does.
    ``announce(filters, done)`` tells the other shards of filters for QoS 0; ``find_ends(done)`` looks for the ends of all logs of
    other shards, and gives them to ``done`` by log. Both call ``done`` on the event loop, at once or later, once. All that
    waits at a time passes together.
    """

    def __init__(
        self,
        bus: Bus,
        broker: Broker,
        announce: Callable[[list[str], Callable[[], None]], object],
        find_ends: Callable[[Callable[[dict[int, int]], None]], object],
    ) -> None:
        self._bus = bus
        self._broker = broker
        self._announce = announce
        self._find_ends = find_ends
        self._waiting: list[_Waiting] = []
        self._passing: list[_Waiting] = []
        self._announced = False
        self._found = False
        self._open = False  # those in `_passing` may subscribe
        bus.on_stopped = self._check

    def wait(self, work: LongWork, session: Session, filters: list[str]) -> None:
        """Do the work, which adds subscriptions to these filters, as soon as every shard is ready for them."""
        self._waiting.append(_Waiting(work, session.id != 0, filters, None))
        self._begin()

    def catch_up(self, done: Callable[[], object]) -> None:
        """Call ``done`` when the bus has routed everything that is in the logs now."""
        self._waiting.append(_Waiting(None, False, [], done))
        self._begin()

    def _begin(self) -> None:
        if self._passing or not self._waiting:
            return
        self._passing = self._waiting
        self._waiting = []
        self._announced = self._found = False
        filters: list[str] = []
        for each in self._passing:
            filters.extend(each.filters)
        if filters:
            self._announce(filters, self._was_announced)
        else:
            self._announced = True
        self._find_ends(self._were_found)

    def _was_announced(self) -> None:
        self._announced = True
        self._check()

    def _were_found(self, ends: dict[int, int]) -> None:
        self._found = True
        self._bus.stop_at(ends)

    def _check(self) -> None:
        if self._announced and self._found and not self._open and self._bus.stopped:
            self._open = True
            for each in self._passing:
                if each.persistent:
                    # With the subscription, or before: after a takeover, nothing older is routed to it.
                    self._bus.save_marks()
                    break
            self._broker.turns.add(self)

    @property
    def done(self) -> bool:
        return not self._open

    def step(self, budget: int) -> int:
        cost: int = 1
        while self._passing and cost < budget:
            each = self._passing[0]
            work = each.work
            if work is None:
                each.done()
            elif not work.done:
                cost += max(1, work.step(budget - cost))
                if not work.done:
                    continue
            del self._passing[0]
        if not self._passing:
            self._open = self._found = self._announced = False
            self._bus.go_on()
            self._begin()
        return cost
