"""The limits and parts that all listeners of a process share when they admit clients."""

from __future__ import annotations

from collections.abc import Iterable

from mqttbroker.core.client.connection import Connection
from mqttbroker.core.terms.memory_stage import MemoryStage
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.link_flush import LinkFlush
from mqttbroker.net.open_sockets import OpenSockets


class SharedAdmission:
    """The terms, counters and clock of ``flush``, the stage of the memory, and all sockets.

    ``scheduler`` serves the clients of this process; without one their connections are in the cores of a cluster.
    """

    def __init__(self, flush: LinkFlush, memory: MemoryStage, sockets: OpenSockets, scheduler: FlushScheduler | None = None) -> None:
        self.flush = flush
        self.terms = flush.outbound.terms
        self.counters = flush.outbound.counters
        self.memory = memory
        self.sockets = sockets
        self.scheduler = scheduler

    @property
    def connections(self) -> Iterable[Connection]:
        """The connections of this process's clients."""
        return () if self.scheduler is None else self.scheduler.broker.clients.connections


def broker_admission(scheduler: FlushScheduler, sockets: OpenSockets) -> SharedAdmission:
    """The admission of the clients of a broker."""
    return SharedAdmission(scheduler, scheduler.broker.memory_stage, sockets, scheduler)
