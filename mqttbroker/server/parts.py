"""The parts of a server that depend on where its rows are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.config.settings import Settings
from mqttbroker.core.broker import Broker
from mqttbroker.core.delivery.cluster_port import ClusterPort
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.listeners import OpenListener
from sessions.store.interface import Recovered, Store


class BrokerParts(Protocol):
    """The parts that depend on where the broker stores its rows: `SingleParts` of a single broker, `ShardParts` of a shard."""

    @property
    def clustered(self) -> bool:
        """Whether the broker is one of several: its node has the signals and the sockets, and Kafka the streams."""

    @property
    def settings(self) -> Settings:
        """The settings in force, with the streams that were created at run time."""

    @property
    def definitions(self) -> Mapping[str, Mapping[str, Any]]:
        """The definitions of the streams that were created at run time."""

    @property
    def stream_logs(self) -> StreamLogs:
        """The streams on this disk."""

    @property
    def store(self) -> Store: ...

    @property
    def cluster(self) -> ClusterPort | None:
        """The port of the core to the other shards."""

    @property
    def repaired(self) -> str:
        """What `recover` had to repair, one line; "" = nothing."""

    def recover(self) -> Recovered:
        """Open the store. Raises StoreError."""

    def built(self, broker: Broker, scheduler: FlushScheduler) -> None:
        """The broker is built, and its rows are not restored yet."""

    async def start(self, broker: Broker, scheduler: FlushScheduler) -> None:
        """Start what needs the event loop. Returns when clients may connect."""

    async def open(self, listener: OpenListener) -> None:
        """Open a listener. Raises OSError."""

    async def accept(self, listeners: Sequence[OpenListener], scheduler: FlushScheduler) -> None:
        """Accept clients of these listeners from now on. Raises OSError."""

    def stop_accepting(self) -> None:
        """Accept no more clients."""

    async def stop(self) -> None:
        """Stop what `start` has started; the clients are disconnected, and everything is written."""

    def unready(self) -> list[str]:
        """The reasons why clients should not connect now."""

    def sys_topics(self) -> dict[str, object]:
        """Values of topics below ``$SYS/broker/``."""
