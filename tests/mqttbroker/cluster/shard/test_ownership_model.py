"""Random nodes, appends, stops and takeovers: what an owner acknowledges is in the log once, and what it refuses never."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mqttbroker.cluster.log.records import CHANGES, TAKEOVER, Header
from mqttbroker.cluster.log.view import VALID, LogView
from mqttbroker.cluster.shard.ownership import Do, Ownership, State

pytestmark = pytest.mark.one_build

CLUSTER = b"cluster1"
LEASE = 2.0
PATIENCE = 3.0


@dataclass
class Append:
    """An append on its way. ``awaited``: its node gets an answer."""

    node: Node
    header: Header
    write: int | None
    awaited: bool = True


@dataclass
class Answer:
    """The next event of a node: the outcome of an append, or the end of the log."""

    header: Header | None = None
    offset: int = -1  # of the append; -1 = refused, -2 = unknown
    end: int = 0
    sent: float = 0.0


@dataclass
class Node:
    """A node: its ownership, and what it has yet to be told."""

    ownership: Ownership
    inbox: list[Answer] = field(default_factory=list)
    stopped: bool = False
    asked: list[float] = field(default_factory=list)  # when it asked for the end of the log
    loading: bool = False
    dropping: bool = False
    serving: bool = False
    write: int | None = None  # under way
    assigned: bool = False


class Model(RuleBasedStateMachine):
    """Three nodes, and the log of one shard."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.log: list[tuple[Header, int | None]] = []
        self.sent: list[Append] = []
        self.nodes = [Node(Ownership(LogView(0, CLUSTER), b"node-%03d" % number, LEASE)) for number in range(3)]
        self.writes = 0
        self.committed: list[int] = []
        self.refused: list[int] = []

    # -- the nodes' side --------------------------------------------------------

    def act(self, node: Node) -> None:
        """Carry out what a node's ownership asks for."""
        for action in node.ownership.take_actions():
            if action.do is Do.APPEND:
                assert action.header is not None
                self.sent.append(Append(node, action.header, None))
            elif action.do is Do.READ_TO_END:
                node.asked.append(self.now)
            elif action.do is Do.LOAD:
                node.loading = True
            elif action.do is Do.SERVE:
                assert not node.dropping
                node.serving = True
            elif action.do is Do.PAUSE:
                node.serving = False
            elif action.do is Do.COMMITTED:
                assert node.write is not None
                self.committed.append(node.write)
                node.write = None
            elif action.do is Do.REFUSED:
                assert node.write is not None
                self.refused.append(node.write)
                node.write = None
            else:
                node.serving = node.loading = False
                node.dropping = True
                node.write = None

    def feed(self, node: Node, end: int) -> None:
        ownership = node.ownership
        while ownership.view.end < end:
            ownership.record(ownership.view.end, self.log[ownership.view.end][0])
            self.act(node)

    def tell(self, node: Node) -> None:
        """Give a node its next answer."""
        answer = node.inbox.pop(0)
        ownership = node.ownership
        if answer.header is None:
            self.feed(node, answer.end)
            ownership.read_to(answer.end, answer.sent)
        elif answer.offset >= 0:
            ownership.appended(answer.offset, answer.header, self.now)
        elif answer.offset == -1:
            ownership.append_refused(answer.header, "not enough replicas")
        else:
            ownership.append_unknown(answer.header)
        self.act(node)

    def pick(self, number: int) -> Node:
        return self.nodes[number % len(self.nodes)]

    # -- rules ------------------------------------------------------------------

    @initialize(number=st.integers(0, 2))
    def first_owner(self, number: int) -> None:
        self.settle(self.pick(number))

    @rule(number=st.integers(0, 2), own=st.booleans())
    def assign(self, number: int, own: bool) -> None:
        node = self.pick(number)
        node.assigned = own
        if not node.stopped:
            node.ownership.assign(own, self.now, PATIENCE)
            self.act(node)

    @rule(number=st.integers(0, 2))
    def move(self, number: int) -> None:
        """Every running node learns that one is to own the shard."""
        for each in self.nodes:
            each.assigned = each is self.pick(number)
            if not each.stopped:
                each.ownership.assign(each.assigned, self.now, PATIENCE)
                self.act(each)

    @rule(number=st.integers(0, 2))
    def write(self, number: int) -> None:
        node = self.pick(number)
        if node.serving and not node.stopped and node.ownership.may_append:
            self.writes += 1
            node.write = self.writes
            self.sent.append(Append(node, node.ownership.append(self.now), self.writes))
            self.act(node)

    @precondition(lambda self: self.sent)
    @rule(index=st.integers(0, 5), copies=st.integers(1, 2), answered=st.booleans(), second=st.booleans())
    def arrive(self, index: int, copies: int, answered: bool, second: bool) -> None:
        """An append reaches the log, once or twice; its answer may be lost."""
        append = self.sent.pop(index % len(self.sent))
        first = len(self.log)
        self.log += [(append.header, append.write)] * copies
        if append.awaited:
            offset = first + (copies - 1 if second else 0)
            append.node.inbox.append(Answer(append.header, offset if answered else -2))

    @precondition(lambda self: self.sent)
    @rule(index=st.integers(0, 5), known=st.booleans())
    def lose(self, index: int, known: bool) -> None:
        """An append does not reach the log."""
        append = self.sent.pop(index % len(self.sent))
        if append.awaited:
            append.node.inbox.append(Answer(append.header, -1 if known else -2))

    @precondition(lambda self: any(append.awaited for append in self.sent))
    @rule(index=st.integers(0, 5))
    def time_out(self, index: int) -> None:
        """A node gives an append up that may reach the log later."""
        waiting = [append for append in self.sent if append.awaited]
        append = waiting[index % len(waiting)]
        append.awaited = False
        append.node.inbox.append(Answer(append.header, -2))

    @rule(number=st.integers(0, 2))
    def advance(self, number: int) -> None:
        """A node reads to the end, is given all answers, and finishes what it does; no append arrives."""
        node = self.pick(number)
        if node.stopped:
            return
        for _ in range(3):
            while node.asked:
                self.answer_end(number)
            while node.inbox:
                self.tell(node)
            self.finish(number)

    @rule(number=st.integers(0, 2))
    def depose(self, number: int) -> None:
        """A node takes the shard over, while the others learn of nothing and their appends are on their way."""
        node = self.pick(number)
        if node.stopped:
            return
        self.now += 2 * PATIENCE
        node.ownership.assign(True, self.now, 0.0)
        node.ownership.time(self.now)
        self.act(node)
        self.advance(number)
        for index in [index for index, append in enumerate(self.sent) if append.node is node][:1]:
            self.arrive(index, 1, True, False)
        self.advance(number)

    @rule(number=st.integers(0, 2))
    def answer_end(self, number: int) -> None:
        node = self.pick(number)
        if node.asked:
            node.inbox.append(Answer(end=len(self.log), sent=node.asked.pop(0)))

    @rule(number=st.integers(0, 2))
    def fail_to_read(self, number: int) -> None:
        node = self.pick(number)
        if node.asked and not node.stopped:
            node.asked.pop(0)
            node.ownership.read_failed()
            self.act(node)

    @rule(number=st.integers(0, 2))
    def answer(self, number: int) -> None:
        node = self.pick(number)
        if node.inbox and not node.stopped:
            self.tell(node)

    @rule(number=st.integers(0, 2), records=st.integers(1, 3))
    def follow(self, number: int, records: int) -> None:
        """A node reads some records, asked or not."""
        node = self.pick(number)
        if not node.stopped:
            self.feed(node, min(len(self.log), node.ownership.view.end + records))

    @rule(number=st.integers(0, 2))
    def see_end(self, number: int) -> None:
        node = self.pick(number)
        if not node.stopped:
            node.ownership.end_is(len(self.log), self.now)
            self.act(node)

    @rule(number=st.integers(0, 2))
    def finish(self, number: int) -> None:
        """A node has loaded or dropped its sessions."""
        node = self.pick(number)
        if node.stopped:
            return
        if node.loading:
            node.loading = False
            node.ownership.loaded()
        elif node.dropping:
            node.dropping = False
            node.ownership.dropped()
        self.act(node)

    @rule(number=st.integers(0, 2))
    def stop_or_continue(self, number: int) -> None:
        node = self.pick(number)
        node.stopped = not node.stopped
        if not node.stopped:
            node.ownership.time(self.now)
            self.act(node)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes:
            if not node.stopped:
                node.ownership.time(self.now)
                self.act(node)

    # -- what must hold -----------------------------------------------------------

    def valid(self) -> tuple[list[int], LogView]:
        view = LogView(0, CLUSTER)
        found = []
        for offset, (header, write) in enumerate(self.log):
            if view.read(offset, header) == VALID and header.kind == CHANGES:
                assert write is not None
                found.append(write)
        return found, view

    @invariant()
    def acknowledged_once_and_refused_never(self) -> None:
        found, view = self.valid()
        assert len(found) == len(set(found)), "a write is in the log twice"
        assert set(self.committed) <= set(found), "an acknowledgement for a void record"
        assert not set(self.refused) & set(found), "a refused write is in the log"
        for node in self.nodes:
            ownership = node.ownership
            if ownership.state is State.OWNER:
                assert ownership.view.owner == ownership.node
            if not node.serving:
                continue
            assert ownership.state is State.OWNER or ownership.state is State.FENCED
            # A node that serves and knows the log is its owner.
            assert ownership.view.epoch != view.epoch or view.owner == ownership.node
        owners: dict[int, list[int]] = {}
        for header, write in self.log:
            if write is not None:
                owners.setdefault(int.from_bytes(header.owner, "big"), []).append(write)
        for node in self.nodes:
            own = [write for write in found if write in owners.get(int.from_bytes(node.ownership.node, "big"), [])]
            assert own == sorted(own), "the writes of a node are out of order"

    def settle(self, chosen: Node) -> None:
        """Without faults, the node that is assigned the shard owns it soon, and commits."""
        done = len(self.committed) + 3
        for _ in range(200):
            self.now += 0.5
            for node in self.nodes:
                node.ownership.time(self.now)
                node.ownership.assign(node is chosen, self.now, PATIENCE)
                self.act(node)
                if node.loading:
                    node.loading = False
                    node.ownership.loaded()
                if node.dropping:
                    node.dropping = False
                    node.ownership.dropped()
                self.act(node)
                if node is chosen and node.serving and node.ownership.may_append:
                    self.writes += 1
                    node.write = self.writes
                    self.sent.append(Append(node, node.ownership.append(self.now), self.writes))
                while self.sent:
                    self.arrive(0, 1, True, False)
                while node.asked:
                    node.inbox.append(Answer(end=len(self.log), sent=node.asked.pop(0)))
                while node.inbox:
                    self.tell(node)
            if len(self.committed) >= done:
                return
        raise AssertionError(f"no owner: {[node.ownership.state for node in self.nodes]}")

    def teardown(self) -> None:
        for node in self.nodes:
            node.stopped = False
        self.settle(self.nodes[0])
        self.acknowledged_once_and_refused_never()
        found, _ = self.valid()
        assert set(self.committed) <= set(found)
        assert any(header.kind == TAKEOVER for header, _ in self.log)


Model.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestOwnershipModel = Model.TestCase
