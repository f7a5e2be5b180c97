"""The other shards, as the core of one shard asks them: over links, by the retained messages of all shards, and by the bus."""

from __future__ import annotations

from mqttbroker.cluster.bus.bus import Barrier
from mqttbroker.cluster.links.links import Links
from mqttbroker.cluster.retained.parts import RetainedParts
from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.core.delivery.replay import ReplaySource
from mqttbroker.core.delivery.turns import LongWork
from mqttbroker.core.routing.groups import Group
from sessions.journal import Gate
from sessions.message import Message
from sessions.session import Session


class OtherShards(ClusterPort):
    """The `ClusterPort` of a core, and the `LinkUser` of its links.

    It is made first, because the broker takes it, and what it asks takes the broker: `join_links` is to be called before rows are
    restored, and `join_bus` before clients come.
    """

    def __init__(self, shard: int, shards: int) -> None:
        super().__init__(shard, shards)
        self._links: Links | None = None
        self._retained: RetainedParts | None = None
        self._barrier: Barrier | None = None

    def join_links(self, links: Links, retained: RetainedParts) -> None:
        self._links = links
        self._retained = retained

    def join_bus(self, barrier: Barrier) -> None:
        self._barrier = barrier

    @property
    def links(self) -> Links:
        assert self._links is not None, "not joined yet"
        return self._links

    @property
    def retained(self) -> RetainedParts:
        assert self._retained is not None, "not joined yet"
        return self._retained

    # -- ClusterPort ------------------------------------------------------------------

    def subscribe(self, work: LongWork, session: Session, filters: list[str]) -> None:
        assert self._barrier is not None, "clients come later"
        self._barrier.wait(work, session, filters)

    def filter_added(self, topic_filter: str) -> None:
        self.links.filter_added(topic_filter)

    def filter_removed(self, topic_filter: str) -> None:
        self.links.filter_removed(topic_filter)

    def send_shared(self, shard: int, group: Group, outgoing: Outgoing) -> None:
        self.links.send_shared(shard, group, outgoing)

    def retains(self, topic: str) -> bool:
        return self.retained.writer.kept_here(topic)

    def retain(self, message: Message, gate: Gate | None) -> None:
        self.retained.writer.published(message, gate)

    def linked(self, topic: str) -> None:
        self.retained.writer.linked(topic)

    def open(self, topic_filter: str) -> ReplaySource:
        return self.retained.view.open(topic_filter)

    def tick(self) -> None:
        self.retained.view.tick()

    # -- LinkUser ---------------------------------------------------------------------

    def handle(self, shard: int, topic: str, payload: bytes) -> bool:
        return self.retained.handle(shard, topic, payload)

    def link_up(self) -> None:
        self.retained.link_up()

    def link_down(self, shard: int) -> None:
        self.retained.link_down(shard)

    def all_in_log(self) -> bool:
        return self.retained.writer.all_in_log()
