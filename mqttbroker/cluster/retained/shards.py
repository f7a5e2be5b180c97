"""The retained messages of one core: those of the topics of its shard.

A message with RETAIN for a topic of another shard is in the log of the core where it was published. The core of the topic's shard
reads it there, and stores it together with its position in that log; its publisher is acknowledged when that is in the log of
the topic's shard. So each topic has one writer, and one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from mqttbroker.cluster.shards import Shards
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.acknowledgements import AckGate
from mqttbroker.core.delivery.cluster_port import CommitGate
from sessions.journal import Gate
from sessions.message import Message

LOCAL_ROOT: Final = "$SYS/"  # of topics that each core has for itself
PURGE_FROM: Final = 10_000  # waiting messages for a shard


def keeper(topic: str, shards: Shards, own: int) -> int:
    """The shard that keeps the topic's retained message, for the core of the shard ``own``."""
    return own if topic.startswith(LOCAL_ROOT) else shards.of_text(topic)


class ShardRetained:
    """Sets retained messages, or waits for the cores that do.

    ``own_end`` returns the offset behind the last committed record of the own log; ``changed`` is called with the topic of each
    message that another core retains and that subscribers of this core get now.
    """

    def __init__(self, broker: Broker, shards: Shards, own: int, own_end: Callable[[], int], changed: Callable[[str], None]) -> None:
        self.uncommitted = 0  # messages for other cores that are not in the own log yet
        self._broker = broker
        self._shards = shards
        self._own = own
        self._own_end = own_end
        self._changed = changed
        self._ends: dict[int, int] = {}  # by shard: its core has read this core's log up to this offset
        self._waiting: dict[int, deque[tuple[int, Gate]]] = {}  # by shard: offsets behind messages, ascending
        self._purge_at: dict[int, int] = {}  # by shard: the length at which they are purged

    def kept_here(self, topic: str) -> bool:
        """Whether this core keeps the topic's retained message."""
        return self._shard_of(topic) == self._own

    def _shard_of(self, topic: str) -> int:
        return keeper(topic, self._shards, self._own)

    @property
    def waiting(self) -> int:
        """The number of messages that other cores have not stored yet."""
        return sum(map(len, self._waiting.values()))

    # -- messages that were published on this core ---------------------------------

    def published(self, message: Message, gate: Gate | None) -> None:
        """A message with RETAIN was published on this core; ``gate`` opens when the core that keeps it has stored it."""
        shard = self._shard_of(message.topic)
        if shard == self._own:
            self._broker.retained.set(message, False, gate)
            return
        self._changed(message.topic)
        self.uncommitted += 1
        if gate is not None:
            gate.pending += 1
        self._broker.journal.wait_for_commit(CommitGate(partial(self._committed, shard, gate)))

    def linked(self, topic: str) -> None:
        """A message with RETAIN came over a link, and goes to the subscribers of this core."""
        if not self.kept_here(topic):
            self._changed(topic)

    def all_in_log(self) -> bool:
        """Whether all messages that were published here and belong to other cores are in this core's log."""
        return self.uncommitted == 0

    def _committed(self, shard: int, gate: Gate | None, failed: bool) -> None:
        """A message for a shard is in the own log, or its commit has failed."""
        self.uncommitted -= 1
        if gate is None:
            return
        if failed:
            gate.fail()
            return
        end = self._own_end()
        if self._ends.get(shard, 0) >= end:
            gate.settle()
        else:
            waiting = self._waiting.setdefault(shard, deque())
            waiting.append((end, gate))
            if len(waiting) >= self._purge_at.get(shard, PURGE_FROM):
                # Of clients that publish again and again on new connections.
                self._waiting[shard] = deque(each for each in waiting if not _unwanted(each[1]))
                self._purge_at[shard] = max(PURGE_FROM, 2 * len(self._waiting[shard]))

    def marked(self, shard: int, end: int) -> None:
        """A committed record of another shard says that its core has read this core's log up to the offset ``end``."""
        self._ends[shard] = end
        waiting = self._waiting.get(shard)
        while waiting and waiting[0][0] <= end:
            waiting.popleft()[1].settle()

    # -- messages that were published on another core ---------------------------------

    def received(self, message: Message) -> bool:
        """Take a message with RETAIN from another core's log; whether this core keeps its topic's retained message.

        Then the position behind it is to be stored in the same commit, or soon if there is nothing to store: its publisher
        waits for that.
        """
        topic = message.topic
        if not self.kept_here(topic):
            if message.qos:
                self._changed(topic)  # the bus routes it to the subscribers here; at QoS 0 the links have done that, or not
            return False
        publisher = self._broker.publisher
        if message.payload and publisher.retained_full(topic, message.size):
            self._broker.outbound.counters.away.retained_full += 1
        else:
            self._broker.retained.set(message, False, None)
        return True


def _unwanted(gate: Gate) -> bool:
    """Whether the connection is closed that waits for this gate."""
    return isinstance(gate, AckGate) and gate.connection.closed
