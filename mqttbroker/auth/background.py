"""The interface of authenticators that answer later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mqttbroker.core.access.policy import Authenticator


class BackgroundAuthenticator(Authenticator):
    """An authenticator that may answer in a later iteration of the event loop.

    It calls ``_update_clock`` before each such answer, on the thread of ``_loop``.
    """

    def start(self, loop: asyncio.AbstractEventLoop, update_clock: Callable[[], object]) -> None:
        """Begin to answer; ``update_clock`` sets the broker's clock."""
        self._loop = loop
        self._update_clock = update_clock

    def stop(self) -> None:
        """End the work; no request is answered after this."""

    async def reload(self) -> list[str]:
        """Read the files that the settings name again. Returns the problems; after one, nothing has changed."""
        return []
