"""The base of the errors of source and sink: a message that Spark shows before the traceback."""

from __future__ import annotations

from functools import cache


class SourceError(Exception):
    """An error whose message is one line that begins with the name of the component and a colon.

    Spark sends `TracebackException.format` of a Python error to the user, and sets `__cause__` to None before.  The
    text begins with the cause, so this property makes it begin with the message.
    """

    @property
    def __cause__(self) -> BaseException | None:
        component, _, text = str(self).partition(": ")
        return _first_line(component)(text)

    @__cause__.setter
    def __cause__(self, cause: BaseException | None) -> None:
        """The message is the only cause that is shown."""


@cache
def _first_line(component: str) -> type[Exception]:
    """`TracebackException` prints the name of a builtin class without its module: "mqtt source: ..."."""
    return type(component, (Exception,), {"__module__": "builtins"})


def line_of(error: SourceError) -> str:
    """The message without the name of the component."""
    return str(error).partition(": ")[2]
