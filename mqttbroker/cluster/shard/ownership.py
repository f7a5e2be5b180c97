"""The ownership of a shard, as one node sees it: a state machine without I/O, clock or randomness.

The log alone decides. A node owns the shard from its valid takeover to the next valid one or its release. It acknowledges
a record only if that is valid, which it knows at once if the record's offset follows the last one it has read, and otherwise by
reading the log up to the record.

An append whose outcome is not known is never made again. If reading to the end of the log does not find it, it may still
arrive: so the owner takes the shard over from itself. Behind that takeover the lost record would be void, and may be refused.

The caller carries out the `Action`s that `take_actions` returns, and reports what came of them. It feeds every record of the
log, in order, to `record`, but for those that `appended` reports at the expected offset.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from mqttbroker.cluster.log.records import CHANGES, RELEASE, TAKEOVER, Header
from mqttbroker.cluster.log.view import VALID, LogView


class State(Enum):
    FOLLOWER = "follower"  # reads the log; the node may be assigned the shard
    TAKING_OVER = "taking over"  # its takeover is under way
    LOADING = "loading"  # its takeover is valid; the records before it are to be applied and loaded
    OWNER = "owner"  # serves clients
    CHECKING = "checking"  # the owner, but it does not know what is in the log; it serves nobody
    STEPPING_DOWN = "stepping down"  # finishes its append and releases the shard
    FENCED = "fenced"  # no longer the owner; what it loaded is being dropped


class Do(Enum):
    APPEND = "append"  # a takeover or release, with this header
    READ_TO_END = "read to end"  # ask for the end of the log, feed the records before it, then call `read_to`
    LOAD = "load"  # apply the records up to the takeover and load the shard, then call `loaded`
    SERVE = "serve"  # serve clients, for the first time or again
    PAUSE = "pause"  # read from no client of the shard until SERVE or DROP
    COMMITTED = "committed"  # the record of `append` is valid: acknowledge
    REFUSED = "refused"  # it is not in the log, and will not be valid if it gets there
    DROP = "drop"  # forget the shard's sessions without acknowledging anything, then call `dropped`


class Action(NamedTuple):
    do: Do
    header: Header | None = None
    reason: str = ""


# The states in which the node has, or may have, the shard's sessions in memory.
LOADED: Final = (State.LOADING, State.OWNER, State.CHECKING, State.STEPPING_DOWN)


class Ownership:
    """The ownership of the shard whose log ``view`` reads, by the node with the id ``node``.

    All times are monotonic seconds of one clock. An owner that has not been confirmed for ``lease`` seconds reads the log
    before it serves on.
    """

    def __init__(self, view: LogView, node: bytes, lease: float) -> None:
        self.view = view
        self.node = node
        self.lease = lease
        self.state = State.FOLLOWER
        self.epoch_changes = 0  # takeovers by this node, of itself too
        self._assigned = False
        self._not_before = 0.0  # when a living owner may be deposed
        self._confirmed = 0.0  # the node was the owner at this time
        self._now = 0.0
        self._pending: Header | None = None  # of the record of `append`, until its outcome is known
        self._sent = 0.0  # when it, or a takeover, was sent
        self._appending: Header | None = None  # the append whose answer is awaited
        self._reading = False  # an answer to READ_TO_END is awaited
        self._read_again = False
        self._read_from = 0  # the end of the view when READ_TO_END was asked for
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """The actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def has_pending(self) -> bool:
        """Whether the outcome of an `append` is not known yet."""
        return self._pending is not None

    @property
    def may_append(self) -> bool:
        return self.state is State.OWNER and self._pending is None

    # -- from the node ----------------------------------------------------------

    def assign(self, own: bool, now: float, patience: float = 0.0) -> None:
        """The node is to own the shard, or not. To be repeated: after a failure only the next call tries again.

        A living owner is given ``patience`` seconds to release the shard, counted from the first call.
        """
        self._now = now
        if own and not self._assigned:
            self._not_before = now + patience
        self._assigned = own
        if self.state is State.FOLLOWER:
            self._consider_takeover()
        elif not own and self.state in (State.LOADING, State.OWNER):
            self._step_down()

    def append(self, now: float, flags: int = 0) -> Header:
        """The header of a record of changes, which the caller appends. Only if `may_append`."""
        assert self.may_append
        self._now = now
        self._pending = Header(CHANGES, self.view.shard, self.view.cluster, self.node, self.view.epoch, self.view.sequence + 1, flags)
        self._appending = self._pending
        self._sent = now
        return self._pending

    def loaded(self) -> None:
        """LOAD is done."""
        if self.state is State.LOADING:
            self.state = State.OWNER
            self._do(Do.SERVE)

    def dropped(self) -> None:
        """DROP is done."""
        if self.state is State.FENCED:
            self.state = State.FOLLOWER
            # The node that is the owner now gets its time, though this one is assigned the shard.
            self._assigned = False

    def time(self, now: float) -> None:
        """To be called often, and first of all after a pause of the process."""
        self._now = now
        if self.state is State.OWNER and now - self._confirmed > self.lease:
            self._check()
        elif self.state is State.FOLLOWER:
            self._consider_takeover()
        elif self.state in (State.TAKING_OVER, State.CHECKING, State.STEPPING_DOWN):
            if self._appending is None and not self._reading:
                self._read()

    # -- answers from the log ------------------------------------------------------

    def appended(self, offset: int, header: Header, now: float) -> None:
        """The record is in the log at this offset."""
        self._now = now
        if self._appending is not header:
            return  # an answer that is no longer awaited; the record is found by reading
        self._appending = None
        if offset == self.view.end:
            self.record(offset, header)
        elif offset < self.view.end:
            # The record there is another one: else its outcome would be known.
            self._lost_records(f"a record was appended at offset {offset}, before the end {self.view.end} of the log")
        else:
            self._check()  # there are other records before it

    def append_refused(self, header: Header, reason: str) -> None:
        """The record was not appended, for certain."""
        if self._appending is not header:
            return
        self._appending = None
        if header is self._pending:
            self._pending = None
            self._do(Do.REFUSED, reason=reason)
            if self.state is State.STEPPING_DOWN:
                self._release()
        elif self.state is State.TAKING_OVER:
            self.state = State.FOLLOWER  # `time` and `assign` try again
        elif header.kind == RELEASE:
            self._fence("the shard was not released")

    def append_unknown(self, header: Header) -> None:
        """No answer came in time, and none can come: the connection is closed."""
        if self._appending is not header:
            return
        self._appending = None
        if self.state is State.OWNER:
            self._check()
        else:
            self._read()

    def record(self, offset: int, header: Header) -> int:
        """The next record of the log; returns `LogView.read`. Raises `BadRecord`."""
        verdict = self.view.read(offset, header)
        if verdict != VALID:
            return verdict
        if header.kind == TAKEOVER:
            self._taken_over(header)
        elif header.owner == self.node:
            self._found(header)
        return verdict

    def read_to(self, end: int, sent: float) -> None:
        """The records before ``end`` were fed, which was the end of the log at a time after ``sent``."""
        self._reading = False
        if end < self._read_from:
            return  # the answer of a Kafka broker that no longer leads and does not know it; `time` asks again
        if end > self.view.end or self._read_again:
            # The caller could not feed all of them, or they were asked for before the last append was over.
            self._read()
        elif self._appending is not None:
            pass  # its outcome comes first
        elif self.state is State.FOLLOWER or self.state is State.TAKING_OVER:
            self._take_over()
        elif self.state is State.CHECKING:
            if self._pending is None:
                self._resume(sent)
            else:
                self._take_over()
        elif self.state is State.STEPPING_DOWN:
            # The next owner reads whatever arrives. Clients repeat what was not acknowledged.
            self._fence("the outcome of the last append is not known")

    def read_failed(self) -> None:
        """READ_TO_END failed; `time` tries again."""
        self._reading = False

    def end_is(self, end: int, sent: float) -> None:
        """The log ended there at a time after ``sent``."""
        if self.state is not State.OWNER or self._pending is not None:
            return  # a pending record may be the one behind
        if end > self.view.end:
            self._check()
        elif end == self.view.end:
            self._confirmed = max(self._confirmed, sent)

    # -- taking over ------------------------------------------------------------

    def _consider_takeover(self) -> None:
        if self._may_take_over() and not self._reading:
            self._read()

    def _may_take_over(self) -> bool:
        view = self.view
        return self._assigned and (not view.is_owned or view.owner == self.node or self._now >= self._not_before)

    def _take_over(self) -> None:
        """Append a takeover; the log was read to its end."""
        if self.state is not State.CHECKING:
            if not self._may_take_over():
                self.state = State.FOLLOWER
                return
            self.state = State.TAKING_OVER
        view = self.view
        self._appending = Header(TAKEOVER, view.shard, view.cluster, self.node, view.epoch, 0)
        self._sent = self._now
        self._do(Do.APPEND, self._appending)

    def _taken_over(self, header: Header) -> None:
        """A valid takeover was read."""
        if header.owner != self.node:
            if self.state is State.TAKING_OVER:
                # A takeover record of this node that is still under way is void.
                self._appending = None
                self.state = State.FOLLOWER
            elif self.state in LOADED:
                self._fence("another node has taken the shard over")
            return
        self.epoch_changes += 1
        if self.state is State.TAKING_OVER:
            self._appending = None
            self._confirmed = self._sent
            self.state = State.LOADING
            if self._assigned:
                self._do(Do.LOAD)
            else:
                self._step_down()
        elif self.state is State.CHECKING:
            # Of itself: the append that is not known is void from here on, unless it was read before.
            self._appending = None
            if self._pending is not None:
                self._pending = None
                self._do(Do.REFUSED, reason="the append was not acknowledged in time")
            self._resume(self._sent)

    # -- owning -------------------------------------------------------------------

    def _found(self, header: Header) -> None:
        """A valid record of this node was read."""
        pending = self._pending
        if header.kind == RELEASE:
            if self.state is State.STEPPING_DOWN:
                self._fence("the shard was released")
            return
        if pending is None or header.sequence != pending.sequence or header.epoch != pending.epoch:
            return
        self._pending = None
        if self._appending is pending:
            self._appending = None
        self._confirmed = max(self._confirmed, self._sent)
        self._do(Do.COMMITTED)
        if self.state is State.STEPPING_DOWN:
            self._release()

    def _check(self) -> None:
        if self.state is State.OWNER:
            self.state = State.CHECKING
            self._do(Do.PAUSE)
        self._read()

    def _resume(self, confirmed: float) -> None:
        self._confirmed = max(self._confirmed, confirmed)
        self.state = State.OWNER
        self._do(Do.SERVE)
        if not self._assigned:
            self._step_down()

    def _read(self) -> None:
        if self._reading:
            self._read_again = True
            return
        self._reading = True
        self._read_again = False
        self._read_from = self.view.end
        self._do(Do.READ_TO_END)

    # -- leaving ------------------------------------------------------------------

    def _step_down(self) -> None:
        if self.state is State.OWNER:
            self._do(Do.PAUSE)
        self.state = State.STEPPING_DOWN
        if self._pending is None:
            self._release()

    def _release(self) -> None:
        view = self.view
        self._appending = Header(RELEASE, view.shard, view.cluster, self.node, view.epoch, view.sequence + 1)
        self._do(Do.APPEND, self._appending)

    def _lost_records(self, reason: str) -> None:
        if self.state in LOADED:
            self._fence(reason)
        elif self.state is State.TAKING_OVER:
            self._appending = None
            self.state = State.FOLLOWER

    def _fence(self, reason: str) -> None:
        self.state = State.FENCED
        self._pending = self._appending = None
        self._do(Do.DROP, reason=reason)

    def _do(self, do: Do, header: Header | None = None, reason: str = "") -> None:
        self._actions.append(Action(do, header, reason))
