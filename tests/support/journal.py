"""A batch of a journal, closed at once."""

from __future__ import annotations

import sys

from sessions.journal import Journal
from sessions.write_set import WriteSet


def close_batch(journal: Journal) -> WriteSet:
    """Close the gathering batch and return its rows. Only when `writer_idle`."""
    journal.begin_closing()
    write_set = journal.continue_closing(sys.maxsize)
    assert write_set is not None
    return write_set
