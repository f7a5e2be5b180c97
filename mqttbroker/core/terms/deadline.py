"""Deadlines for what others have to do in time, such as a client its CONNECT.

A process that was stopped (SIGSTOP, a frozen container, a suspended machine) has not read meanwhile what they sent, so that time
does not count.
"""

from __future__ import annotations

from typing import Any, Final

STOPPED: Final = 1.0  # seconds; what comes later by more shows that the process did not run


class Deadline:
    """Calls ``call(*arguments)`` after ``seconds`` on ``loop``, unless it is cancelled.

    If the process was stopped when it was due, what was sent meanwhile is read first: it is due again after as long as the process
    was late, at most ``seconds``.
    """

    def __init__(self, loop: Any, seconds: float, call: Any, *arguments: Any) -> None:
        self._loop = loop
        self._seconds = seconds
        self._call = call
        self._arguments = arguments
        self._set(seconds)

    def _set(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._is_due)

    def _is_due(self) -> None:
        late = self._loop.time() - self._due
        if late > STOPPED:
            self._set(min(late, self._seconds))
        else:
            self._call(*self._arguments)

    def cancel(self) -> None:
        self._timer.cancel()
