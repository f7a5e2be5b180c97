"""The stages in which the broker refuses work as its memory nears ``max_memory``, and how often it did."""

from __future__ import annotations

from typing import Final

NORMAL: Final = 0
NO_CONNECTIONS: Final = 1  # new connections are refused
NO_STATE: Final = 2  # and so are subscriptions, retained messages and wills that take more memory
SHEDDING: Final = 3  # and nothing is queued in memory for clients that do not keep up

STAGE_NAMES: Final[list[str]] = ["normal", "no_connections", "no_state", "shedding"]


class MemoryStage:
    """The stage in force, set by `mqttbroker.core.memory.Memory`; and refusals since the start."""

    def __init__(self) -> None:
        self.stage = NORMAL
        self.refused_connections = 0
        self.refused_subscriptions = 0
        self.refused_retained = 0
        self.refused_wills = 0

    @property
    def refuses_connections(self) -> bool:
        return self.stage >= NO_CONNECTIONS

    @property
    def refuses_state(self) -> bool:
        return self.stage >= NO_STATE
