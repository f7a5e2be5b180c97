"""The store as the broker uses it, independent of the database.

A store has two parts. The commit log makes write sets durable, in order and each whole or not at all; the tables are
the state that all write sets add up to, read at start and by pages and queries.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sessions.message import Message
from sessions.row_kinds import KINDS, RowKind
from sessions.rows import QueueRow
from sessions.write_set import Page, WriteSet

Done = Callable[[WriteSet, Exception | None], None]
ReadDone = Callable[[WriteSet, list[Page]], None]
Partition = tuple[str, int]  # stream and partition number
StreamChange = Callable[[dict[Partition, int]], None]


class StoreError(Exception):
    """The store cannot be used; the text is one line that names file and reason."""


class CorruptStore(StoreError):
    """The store is damaged."""


class Recovered(NamedTuple):
    """The contents of the tables at start, except queued messages.

    ``kinds`` has the rows of each of the `KINDS`, by number. ``disconnected_at`` is None for a session whose client was connected
    when the broker was killed. ``queues`` has the sessions with stored entries. The ``next_`` ids are greater than any that is stored.
    """

    kinds: list[list[Any]]
    queues: list[QueueRow]
    next_session_id: int
    next_message_id: int
    next_seq: int

    def rows(self, kind: RowKind[Any, Any]) -> list[Any]:
        """The rows of a kind, in the order of `RowKind.order`."""
        return self.kinds[kind.number]


def nothing_recovered() -> Recovered:
    """The contents of empty tables."""
    return Recovered([[] for _ in KINDS], [], 1, 1, 1)


class Progress(NamedTuple):
    """How far the tables follow the commit log: bytes of the log on disk, commits that the tables have not, the memory
    of those in bytes, and the seconds that the last transaction of the tables took."""

    log_bytes: int = 0
    commits_behind: int = 0
    unapplied_bytes: int = 0
    apply_seconds: float = 0.0


class CommitLog(Protocol):
    """Commits write sets one after the other. For one thread, the owner's."""

    def start(self, done: Done, read_done: ReadDone) -> None:
        """Start committing. Both are called in the order of the write sets, on other threads.

        ``done(write_set, None)``: the write set is durable. ``done(write_set, error)``: nothing of it is stored, nor
        will be, and it is not read. ``read_done(write_set, pages)``: the pages and queries of a durable write set are
        read, as of this write set.
        """

    def submit(self, write_set: WriteSet) -> None:
        """Hand over a write set; never blocks."""

    def change_streams(self, change: StreamChange) -> None:
        """Call ``change(ends)`` on the thread that commits, between two commits, and after everything committed is in
        the stream log, as far as the disk allows; never blocks.

        ``ends`` are the ends of the partitions that take records. Partitions that the change adds take records afterwards;
        partitions that it removes take none, and the records that wait for them are dropped. It raises nothing.
        """

    def stop(self) -> None:
        """Commit everything submitted, and close."""


class Store(CommitLog, Protocol):
    """A commit log and its tables, on the disk of one data directory."""

    @property
    def damage(self) -> str:
        """The first damage found since the start; empty if there is none."""

    def progress(self) -> Progress:
        """How far the tables follow; called on any thread."""

    def recover(self) -> Recovered:
        """Open the store and read its tables. Before `start`.

        Raises `StoreError` if the directory or a file cannot be used, belongs to a newer program, or is in use by
        another process, and `CorruptStore` if it is damaged. Everything is closed again then.
        """


class StreamLog(Protocol):
    """The stream log as the store uses it; its files are below ``directory``. It gets what the commit log has."""

    directory: Path

    def append(self, records: dict[Partition, list[Message]]) -> object:
        """Write records, not synced, which readers see after `committed`; after an error `rollback` comes first."""

    def rollback(self) -> None:
        """Truncate to the last committed ends; without effect if nothing was appended since."""

    def committed(self) -> None:
        """Move the high watermarks to the ends of what was appended."""

    def sync(self) -> None:
        """Return when everything appended before the call is on disk. Called on another thread."""

    def recover(self, ends: dict[Partition, int] | None, logged: dict[Partition, int]) -> dict[Partition, int]:
        """Truncate the partitions to these ends (missing = 0); with None, only behind the last valid batch.

        The commit log has the records from the offsets ``logged`` on. They need not be there, and are appended again:
        the offsets from which on are returned, for every partition.
        """
