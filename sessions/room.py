"""Objects that wait until a session's client can be sent more."""

from __future__ import annotations

from abc import abstractmethod

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class RoomUser:
    """Sends a session's client messages that are not in the session's queue, as far as there is room."""

    @abstractmethod
    def resume(self) -> None:
        """The in-flight window, the queue or the outbox has more room than before."""
