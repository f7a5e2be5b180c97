"""The will of a session (section 3.1.2.5)."""

from __future__ import annotations

from sessions.message import Message


class SessionWill:
    """A Will Message and when it is published. Times are in seconds.

    ``delay`` is the Will Delay Interval, ``expiry`` the Message Expiry Interval or -1. ``due`` is the Unix time of
    publication, 0.0 until the client has disconnected. ``row_id`` is the id of the row that only the will needs, as its
    session is not stored; 0 = there is none.
    """

    def __init__(self, message: Message, delay: int, expiry: int) -> None:
        self.message = message
        self.delay = delay
        self.expiry = expiry
        self.due: float = 0.0
        self.row_id = 0
