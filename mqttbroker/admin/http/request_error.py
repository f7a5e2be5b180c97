"""A request to the HTTP server that is refused."""

from __future__ import annotations


class RequestError(Exception):
    """A request that is refused: an HTTP status, one line, and the parameter or key that is wrong."""

    def __init__(self, status: int, reason: str, field: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.field = field
