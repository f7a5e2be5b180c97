"""Changes of streams at run time, as the HTTP API calls them."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Protocol

from mqttbroker.config.settings import Stream

Definition = Mapping[str, object]
"""Settings of a stream by name, written as in the configuration file."""


class StreamRefused(Exception):
    """A change cannot be made; ``key`` names the setting, "" = none. ``missing``: there is no such stream."""

    def __init__(self, reason: str, key: str = "", missing: bool = False) -> None:
        super().__init__(reason)
        self.key = key
        self.missing = missing


class StreamChanges(Protocol):
    """The streams in force, and their changes. The methods that change anything are for the event loop, and raise
    `StreamRefused`; a change is on disk when they return."""

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The streams by name; for any thread."""

    def is_created(self, name: str) -> bool:
        """Whether the stream was created at run time; the configuration file has the others. For any thread."""

    def create(self, name: str, definition: Definition) -> Awaitable[None]:
        """Create a stream."""

    def alter(self, name: str, changes: Definition) -> Awaitable[None]:
        """Change settings of a stream that was created at run time, for what comes after."""

    def delete(self, name: str) -> Awaitable[None]:
        """Delete a stream that was created at run time, with its records."""
