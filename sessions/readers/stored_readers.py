"""The readers of streams whose offsets are stored: subscriptions of persistent sessions, groups and queues.

What changes is in the journal before the call returns, so it is committed with what else the caller adds to the batch.
"""

from __future__ import annotations

from sessions.journal import Journal
from sessions.readers.partition_offsets import PartitionOffsets, offsets_from_row
from sessions.row_kinds import READERS
from sessions.rows import GROUP_READER, QUEUE_READER, SUBSCRIPTION_READER, OffsetsRow, ReaderRow

Key = tuple[int, str, str]


def _key(row: ReaderRow) -> Key:
    """A subscription has its filter in place of a name, and one stream at a time."""
    return row.session_id, row.name, "" if row.kind == SUBSCRIPTION_READER else row.stream


class StoredReader:
    """A reader and its offsets by partition."""

    def __init__(self, journal: Journal, row: ReaderRow) -> None:
        self.row = row
        self.partitions: list[PartitionOffsets] = []
        self.deleted = False
        self._journal = journal

    def save(self, offsets: PartitionOffsets) -> None:
        """Store the offsets of a partition with the batch that gathers."""
        if not offsets.changed and not self.deleted:
            self._journal.save_offsets(offsets)

    def seek(self, positions: list[int]) -> None:
        """Continue at these offsets, one of each partition."""
        for partition, position in enumerate(positions):
            offsets = self.partitions[partition]
            offsets.reset(position)
            self.save(offsets)

    def change(self, start: str, options: int) -> None:
        """Store another start text and other options."""
        if start != self.row.start or options != self.row.options:
            self.row = self.row._replace(start=start, options=options)
            self._journal.save(READERS, self.row)

    def fill(self, positions: list[int]) -> None:
        """Add the partitions that are missing, at these offsets."""
        while len(self.partitions) < len(positions):
            offsets = PartitionOffsets(self.row.reader_id, len(self.partitions), positions[len(self.partitions)])
            self.partitions.append(offsets)
            self.save(offsets)


class StoredReaders:
    """All of one broker."""

    def __init__(self, journal: Journal) -> None:
        self.by_id: dict[int, StoredReader] = {}
        self.next_id = 1
        self._journal = journal
        self._by_key: dict[Key, StoredReader] = {}
        self._counts: dict[tuple[int, str], int] = {}  # by kind and stream

    def subscription(self, session_id: int, full_filter: str) -> StoredReader | None:
        return self._by_key.get((session_id, full_filter, ""))

    def group(self, name: str, stream: str) -> StoredReader | None:
        return self._by_key.get((-GROUP_READER, name, stream))

    def queue(self, name: str, stream: str) -> StoredReader | None:
        return self._by_key.get((-QUEUE_READER, name, stream))

    def groups(self, stream: str) -> int:
        """The number of groups of a stream."""
        return self._counts.get((GROUP_READER, stream), 0)

    def queues(self, stream: str) -> int:
        """The number of queues of a stream, each filter counted."""
        return self._counts.get((QUEUE_READER, stream), 0)

    def create(
        self,
        kind: int,
        session_id: int,
        name: str,
        stream: str,
        topic_filter: str,
        start: str,
        options: int,
        now: int,
        positions: list[int],
    ) -> StoredReader:
        """Add a reader at these offsets, one of each partition; ``now`` is in µs since the epoch."""
        row = ReaderRow(
            self.next_id, kind, session_id if kind == SUBSCRIPTION_READER else -kind, name, stream, topic_filter, start, options, now
        )
        self._journal.save(READERS, row)
        reader = self._add(row)
        reader.fill(positions)
        return reader

    def _add(self, row: ReaderRow) -> StoredReader:
        reader = StoredReader(self._journal, row)
        self.next_id = max(self.next_id, row.reader_id + 1)
        self.by_id[row.reader_id] = reader
        self._by_key[_key(row)] = reader
        self._counts[(row.kind, row.stream)] = self._counts.get((row.kind, row.stream), 0) + 1
        return reader

    def delete(self, reader: StoredReader) -> None:
        """Forget a reader and its offsets."""
        row = reader.row
        if not reader.deleted:
            reader.deleted = True
            del self.by_id[row.reader_id]
            del self._by_key[_key(row)]
            self._counts[(row.kind, row.stream)] -= 1
            self._journal.remove(READERS, row.reader_id)

    def of_stream(self, stream: str) -> list[StoredReader]:
        """The readers of a stream, in the order of their ids."""
        return [reader for reader in self.by_id.values() if reader.row.stream == stream]

    # -- the start ------------------------------------------------------------

    def load(self, row: ReaderRow) -> None:
        """Restore a reader without its offsets."""
        self._add(row)

    def load_offsets(self, row: OffsetsRow) -> None:
        """Restore the offsets of a reader; rows come in the order of their partitions. Raises `ValueError`."""
        reader = self.by_id.get(row.reader_id)
        if reader is not None:
            if row.partition != len(reader.partitions):
                raise ValueError(f"reader {row.reader_id} has no offset of partition {len(reader.partitions)}")
            reader.partitions.append(offsets_from_row(row))
