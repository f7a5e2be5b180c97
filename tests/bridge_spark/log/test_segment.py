"""One segment file: a time is found in it with few reads, however long it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_spark.log.record_batch import encode_batch
from bridge_spark.log.segment import Segment, search_segment
from bridge_spark.log.sparse_index import INDEX_ENTRY
from sessions.message import Message

BATCHES = 100_000  # of one record and an index entry each
SPACING = 1_000_000  # bytes from one batch to the next, so that the segment has 100 GB
SECOND = 1_000_000
IO = Path("/proc/thread-self/io")


def reads() -> tuple[int, int]:
    """Read system calls of this thread so far, and the bytes that they read."""
    fields = dict(line.split(": ") for line in IO.read_text(encoding="ascii").splitlines())
    return int(fields["syscr"]), int(fields["rchar"])


@pytest.mark.skipif(not IO.exists(), reason="needs Linux with accounting of input and output")
def test_a_time_in_a_sparse_segment_of_100_gb_takes_few_reads(tmp_path: Path) -> None:
    path = tmp_path / f"{0:020d}.seg"
    wanted = [0, 1, 777, BATCHES // 2, BATCHES - 2, BATCHES - 1]
    with path.open("wb") as file:
        for offset in wanted:
            file.seek(offset * SPACING)
            file.write(encode_batch([Message("t", b"x", 1, False, b"", "c", (offset + 1) * SECOND, 0)], offset))
        file.truncate(BATCHES * SPACING)
    # The time of an entry is that of the record before it, except in the first one.
    path.with_suffix(".idx").write_bytes(b"".join(INDEX_ENTRY.pack(n, n * SPACING, max(n, 1) * SECOND) for n in range(BATCHES)))
    last = BATCHES * SECOND
    segment = Segment(0, BATCHES, BATCHES * SPACING, SECOND, last, (BATCHES - 1) * SPACING, BATCHES)
    for offset in wanted:
        before = reads()
        assert search_segment(path, segment, (offset + 1) * SECOND) == offset
        calls, size = (now - then for now, then in zip(reads(), before))
        assert calls <= BATCHES.bit_length() + 8
        assert size <= 64 * 1024
