"""The error of the sink."""

from __future__ import annotations

from bridge_spark.source.errors import SourceError


class SinkError(SourceError):
    """A batch cannot be written; the message is one line that names option or column, value and reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"mqtt sink: {reason}")
