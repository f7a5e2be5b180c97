"""Retained messages in a cluster: each topic's is kept by one core, which is not always the one that it is published on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from mypy_extensions import mypyc_attr

from sessions.journal import Gate
from sessions.message import Message


@mypyc_attr(allow_interpreted_subclasses=True)
class RetainedShards:
    """Which core keeps the retained message of a topic, for the `Publisher` of one of them."""

    @abstractmethod
    def kept_here(self, topic: str) -> bool:
        """Whether this core keeps the topic's retained message."""

    @abstractmethod
    def published(self, message: Message, gate: Gate | None) -> None:
        """A message with RETAIN was published on this core; ``gate`` opens when the core that keeps it has stored it."""

    @abstractmethod
    def linked(self, topic: str) -> None:
        """A message with RETAIN came over a link, and goes to the subscribers of this core."""

    @abstractmethod
    def all_in_log(self) -> bool:
        """Whether all messages that were published here and belong to other cores are in this core's log."""


class CommitGate(Gate):
    """A gate for a caller outside of the core: calls ``on_opened`` with whether a write failed."""

    def __init__(self, on_opened: Callable[[bool], None]) -> None:
        super().__init__()
        self._on_opened = on_opened

    def opened(self) -> None:
        self._on_opened(self.failed)
