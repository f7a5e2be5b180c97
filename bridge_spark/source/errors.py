"""The base of the source's errors: a message that Spark shows before the traceback."""

from __future__ import annotations

from typing import Optional

PREFIX = "mqtt source: "


class SourceError(Exception):
    """An error whose message is one line that begins with `PREFIX`.

    Spark sends `TracebackException.format` of a Python error to the user, and sets `__cause__` to None before.  The
    text begins with the cause, so this property makes it begin with the message.
    """

    @property
    def __cause__(self) -> Optional[BaseException]:
        return _FirstLine(str(self).removeprefix(PREFIX))

    @__cause__.setter
    def __cause__(self, cause: Optional[BaseException]) -> None:
        """The message is the only cause that is shown."""


# `TracebackException` prints the name of a builtin class without its module: "mqtt source: ...".
_FirstLine: type[Exception] = type(PREFIX.removesuffix(": "), (Exception,), {"__module__": "builtins"})
