"""Retained messages of a cluster, as one core has them: put together, and joined to its bus and its links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from mqttbroker.cluster.retained.pages import RetainedPageServer
from mqttbroker.cluster.retained.shards import ShardRetained
from mqttbroker.cluster.retained.view import AllShardsRetained
from mqttbroker.cluster.shards import Shards
from mqttbroker.core.broker import Broker
from sessions.message import Message

# Topics of QoS 0 messages over the links between cores; no client may publish to them, and they are not routed.
REQUEST: Final = "$core/retained/request"
ANSWER: Final = "$core/retained/answer"


class Links(Protocol):
    """The links to other cores."""

    def send(self, shard: int, topic: str, payload: bytes) -> bool:
        """Send the core of a shard a message at QoS 0; false if there is no link to it."""

    def after_retained(self, done: Callable[[], object]) -> None:
        """Call ``done`` when all messages with RETAIN that were published on other cores before are in their logs."""


class RetainedParts:
    """The retained messages of the topics of the shard ``own``, and the way to those of the others.

    To be made before the stored rows are restored. ``view`` opens those of all shards, and ``writer`` takes those that are published. ``position(shard)`` is the offset up to which the bus has routed the log
    of another shard, ``own_end()`` the one behind the last committed record of the own log; ``find_ends(done)`` looks for the ends of
    all logs of other shards, and gives them to ``done`` by log.
    """

    def __init__(
        self,
        broker: Broker,
        shards: Shards,
        own: int,
        links: Links,
        position: Callable[[int], int],
        own_end: Callable[[], int],
        find_ends: Callable[[Callable[[dict[int, int]], None]], object],
    ) -> None:
        def positions() -> dict[int, int]:
            return {shard: own_end() if shard == own else position(shard) for shard in range(shards.count)}

        self.view = AllShardsRetained(
            broker,
            shards,
            own,
            positions,
            lambda done: links.after_retained(lambda: find_ends(done)),
            self._uncommitted,
            lambda shard, body: links.send(shard, REQUEST, body),
        )
        self._pages = RetainedPageServer(broker, shards, own, position, own_end, lambda shard, body: links.send(shard, ANSWER, body))
        self.writer = ShardRetained(broker, shards, own, own_end, self.view.changed)
        broker.retained.keep_sorted()

    def _uncommitted(self) -> bool:
        return self.writer.uncommitted > 0

    @property
    def waiting(self) -> int:
        """The number of messages that were published here and that other cores have not stored yet."""
        return self.writer.waiting

    # -- for the bus ----------------------------------------------------------------

    def received(self, message: Message) -> bool:
        """Take a message with RETAIN that was read from another core's log, when it is routed.

        True if it belongs here: then the position behind it is to be stored in the same commit, also if that has no other
        change, because its publisher waits for it.
        """
        return self.writer.received(message)

    def marked(self, shard: int, end: int) -> None:
        """A valid record of another shard's log says that its core has routed this core's log up to the offset ``end``."""
        self.writer.marked(shard, end)

    # -- for the links ----------------------------------------------------------------

    def handle(self, shard: int, topic: str, payload: bytes) -> bool:
        """Take a message that the core of a shard has sent over a link; false if it is not for this."""
        if topic == REQUEST:
            self._pages.asked(shard, payload)
        elif topic == ANSWER:
            self.view.answered(shard, payload)
        else:
            return False
        return True

    def link_up(self) -> None:
        """There is a link to one more core, over which requests may be sent."""
        self.view.link_up()

    def link_down(self, shard: int) -> None:
        """The link to the core of a shard is lost."""
        self.view.link_down(shard)
