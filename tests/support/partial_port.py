"""The port of a core to its cluster, for tests that have only some of its parts."""

from __future__ import annotations

from mqttbroker.cluster.other_shards import OtherShards
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.delivery.replay import ReplaySource, RetainedSources
from mqttbroker.core.delivery.turns import LongWork
from mqttbroker.core.routing.groups import Group
from sessions.journal import Gate
from sessions.message import Message
from sessions.session import Session


class PartialPort(OtherShards):
    """The port of a core that takes any client id; ``broker`` is to be set when it is made.

    Without a barrier SUBSCRIBEs are handled at once, without links no core is told filters, and without the retained messages of all shards
    the core keeps those that are published on it.
    """

    broker: Broker

    def __init__(self) -> None:
        super().__init__(0, 1)

    def subscribe(self, work: LongWork, session: Session, filters: list[str]) -> None:
        if self._barrier is None:
            work.step(1 << 60)
        else:
            super().subscribe(work, session, filters)

    def filter_added(self, topic_filter: str) -> None:
        if self._links is not None:
            super().filter_added(topic_filter)

    def filter_removed(self, topic_filter: str) -> None:
        if self._links is not None:
            super().filter_removed(topic_filter)

    def send_shared(self, shard: int, group: Group, outgoing: Outgoing) -> None:
        if self._links is not None:
            super().send_shared(shard, group, outgoing)

    def retains(self, topic: str) -> bool:
        return self._retained is None or super().retains(topic)

    def retain(self, message: Message, gate: Gate | None) -> None:
        if self._retained is None:
            self.broker.retained.set(message, False, gate)
        else:
            super().retain(message, gate)

    def linked(self, topic: str) -> None:
        if self._retained is not None:
            super().linked(topic)

    def open(self, topic_filter: str) -> ReplaySource:
        if self._retained is None:
            return RetainedSources(self.broker.retained).open(topic_filter)
        return super().open(topic_filter)

    def may_match(self, topic_filter: str, now: int) -> bool:
        if self._retained is None:
            return RetainedSources(self.broker.retained).may_match(topic_filter, now)
        return super().may_match(topic_filter, now)

    def tick(self) -> None:
        if self._retained is not None:
            super().tick()

    def handle(self, shard: int, topic: str, payload: bytes) -> bool:
        return self._retained is not None and super().handle(shard, topic, payload)

    def link_up(self) -> None:
        if self._retained is not None:
            super().link_up()

    def link_down(self, shard: int) -> None:
        if self._retained is not None:
            super().link_down(shard)

    def all_in_log(self) -> bool:
        return self._retained is None or super().all_in_log()
