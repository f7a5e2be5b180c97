"""Bodies of records, also those of older versions."""

from __future__ import annotations

from sessions.row_kinds import OFFSETS, READERS
from sessions.rows import received_row
from sessions.store.commit_log.records import decode, encode

# Packet ids as pairs and no readers: `received` (3, 7) and (70000, 65535), `deleted_received` (3, 6).
BEFORE_READERS = "9290dc00109000909090909090909292030792ce00011170cdffff919203069090909090"


def test_a_log_of_the_version_before_streams_had_readers_is_read() -> None:
    write_set, streams = decode(bytes.fromhex(BEFORE_READERS))
    assert list(map(received_row, write_set.received)) == [(3, 7), (70000, 65535)]
    assert list(map(received_row, write_set.deleted_received)) == [(3, 6)]
    assert (write_set.saved(READERS), write_set.saved(OFFSETS), write_set.removed(READERS), streams) == ([], [], [], [])


def test_it_is_written_as_it_was_read() -> None:
    write_set, _ = decode(bytes.fromhex(BEFORE_READERS))
    again, _ = decode(encode(write_set, {}))
    assert again.received == write_set.received and again.deleted_received == write_set.deleted_received
