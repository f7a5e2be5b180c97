"""Slices, pages and cursors, which all operations on a running broker share.

All operations run on the event loop's thread; other threads use a `ControlRunner`. An operation that may visit many objects
is a generator: it yields after each slice of at most `SLICE` objects, how many seconds to wait before the next one, and
returns the result. A command is in effect when it returns, and on disk with the next commit.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import Generic, TypeVar

from mqttbroker.core.client.outbox import Outbound
from topic_matcher.filters import is_valid_filter, parse_shared

SLICE = 256  # sessions, subscriptions or topics visited in one slice: less than a millisecond without compilation
MAX_VISITS = 20_000  # sessions, subscriptions or topics visited for one page, except in another order: some 20 ms
MAX_PAGE = 1000  # sessions, subscriptions or messages in one page
MAX_CURSORS = 32  # open cursors of each kind; opening one more closes the one used longest ago

T = TypeVar("T")
Slices = Generator[float, None, T]


class ControlError(Exception):
    """The request cannot be served; the message is one line for its sender."""


class Cursors(Generic[T]):
    """Unfinished listings by cursor: the last `MAX_CURSORS` opened.

    A cursor is good for one page, and not after a restart: a page whose answer was lost cannot be taken for the next.
    """

    def __init__(self) -> None:
        self._listings: dict[int, T] = {}
        self._last = secrets.randbits(48)

    def open(self, listing: T) -> int:
        if len(self._listings) >= MAX_CURSORS:
            del self._listings[next(iter(self._listings))]
        self._last += 1
        self._listings[self._last] = listing
        return self._last

    def take(self, cursor: int) -> T:
        """The listing of a cursor, which ends with it."""
        listing = self._listings.pop(cursor, None)
        if listing is None:
            raise ControlError(f"no cursor {cursor}: it was used, or {MAX_CURSORS} others have been opened since")
        return listing


def check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_PAGE:
        raise ControlError(f"a page has 1 to {MAX_PAGE} entries, not {limit}")


def check_filter(topic_filter: str, may_be_shared: bool = True) -> None:
    if not is_valid_filter(topic_filter):
        raise ControlError(f"not a topic filter: {topic_filter!r}")
    if not may_be_shared and parse_shared(topic_filter) is not None:
        raise ControlError(f"a shared subscription has no retained messages: {topic_filter!r}")


def wake(outbound: Outbound) -> None:
    """Have the next flush hand the gathered batch of the journal to the store."""
    if outbound.on_flush_needed is not None:
        outbound.on_flush_needed()
