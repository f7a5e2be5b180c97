"""The port of a broker core to its cluster: what the core of one shard asks the other shards for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.delivery.replay import ReplaySources
from mqttbroker.core.delivery.turns import LongWork
from mqttbroker.core.routing.groups import Group
from sessions.journal import Gate
from sessions.message import Message
from sessions.session import Session

NO_STREAMS: Final = "not available in a cluster: read the stream's topic in Kafka"


@mypyc_attr(allow_interpreted_subclasses=True)
class ClusterPort(ReplaySources):
    """The other shards, for the core of shard ``shard`` of ``shards``. A single broker has none.

    As `ReplaySources` it opens the retained messages of all shards.
    """

    def __init__(self, shard: int, shards: int) -> None:
        self.shard = shard
        self.shards = shards

    # -- subscriptions of this core -------------------------------------------------

    @abstractmethod
    def subscribe(self, work: LongWork, session: Session, filters: list[str]) -> None:
        """Do the work, which adds subscriptions to these filters, as soon as every shard is ready for them."""

    @abstractmethod
    def filter_added(self, topic_filter: str) -> None:
        """A session has one more subscription, to this full filter, and the router knows it."""

    @abstractmethod
    def filter_removed(self, topic_filter: str) -> None:
        """A session has one less."""

    # -- messages of this core ------------------------------------------------------

    @abstractmethod
    def send_shared(self, shard: int, group: Group, outgoing: Outgoing) -> None:
        """Send a message at QoS 0 to the core of a shard, which gives it to a member of a shared subscription; or drop it."""

    @abstractmethod
    def retains(self, topic: str) -> bool:
        """Whether this core keeps the topic's retained message: each topic's is kept by one core."""

    @abstractmethod
    def retain(self, message: Message, gate: Gate | None) -> None:
        """A message with RETAIN was published on this core; ``gate`` opens when the core that keeps it has stored it."""

    @abstractmethod
    def linked(self, topic: str) -> None:
        """A message with RETAIN came over a link, and goes to the subscribers of this core."""


class CommitGate(Gate):
    """A gate for a caller outside of the core: calls ``on_opened`` with whether a write failed."""

    def __init__(self, on_opened: Callable[[bool], None]) -> None:
        super().__init__()
        self._on_opened = on_opened

    def opened(self) -> None:
        self._on_opened(self.failed)
